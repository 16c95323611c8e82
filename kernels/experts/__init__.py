"""The products of a mixture: routing, many small gated MLPs, plain or as codes.

expert_codes: the matrices of a mixture's experts as packed codes (planes.py), side by side
gating: how the gates of an expert are activated
moe: the MLPs of a mixture of experts
moe_blocks: in which blocks of rows the products of a mixture are computed
moe_codes: the experts of a mixture as packed codes (planes.py), read as they are
moe_few: experts of a mixture as packed codes beside a few pairs (token, expert) on Hopper
moe_few_gluon: the Gluon kernel behind moe_few.py
moe_fp8: FP8 experts with many rows each
moe_lora: low-rank adapters of experts
moe_route: routing of a mixture of experts
moe_router: a router's logits of a few rows in one kernel with the norm before it
moe_triton: the products of a mixture of experts in Triton
"""
