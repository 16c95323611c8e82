"""Low-rank adapters: what they add to products.

lora: low-rank adapters
lora_gluon: the Gluon kernels behind lora.py for cards with mma.sync
lora_triton: the Triton kernels behind lora.py
"""
