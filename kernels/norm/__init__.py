"""Norms, activations, and sums over ranks with them.

activation: activations of MLPs, and absolute values of which a maximum is NaN where one of them is
all_reduce: sums over the ranks of one host through memory that all of them can reach, alone or with the norm behind
    them
layer_norm: LayerNorm (Ba, Kiros and Hinton 2016, arXiv 1607.06450), alone and fused with the residual addition
    before it
norm: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), alone and fused with the residual addition before it
"""
