"""Arrays: kernels in Triton and Gluon, and what they stand for in plain torch, the CPU's way."""
