"""Products with a weight: 16-bit numbers, FP8, codes.

cublaslt: y = x Wᵀ through cuBLAS, with an algorithm that was measured instead of the one that its heuristic takes
dequantize: products of many rows with packed codes
fp8_linear: FP8 × FP8 products for many rows
fp8_rows: activations as FP8
linear: products of a few rows with a weight
linear_gluon: the Gluon kernel behind linear_hopper.py
linear_hopper: products of many rows on Hopper GPUs, with SwiGLU or an addition in the same pass
planes: matrices of 4- and 8-bit codes as products on a GPU read them
quant_few: products of up to eight rows with packed codes on Hopper
quant_few_gluon: the Gluon kernel behind quant_few.py
quant_linear: products of some rows with packed codes (planes.py)
quant_many: products of many rows with packed codes on Hopper
quant_many_gluon: the Gluon kernel behind quant_many.py
"""
