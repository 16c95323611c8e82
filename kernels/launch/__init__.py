"""How kernels are launched: dependent launches, tiles by GPU, descriptors.

pdl: programmatic dependent launch
pdl_gluon: what pdl.py asks of a kernel, in Gluon
tiles: tuned tiles are data
tma: descriptors of matrices for the tensor memory accelerator (TMA) of Hopper GPUs, as Gluon kernels take them
"""
