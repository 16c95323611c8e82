"""What the Triton kernels of attention share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The running maximum starts at a finite value, so that a row that has seen no key yet gives exp2(-inf - LOWEST) = 0
# instead of the NaN of exp2(-inf - -inf).
LOWEST = tl.constexpr(-1e30)
LIFT = tl.constexpr(256.0)  # of weights times scales (kv_fp8.py), which are small numbers for fp16


@triton.jit
def soft_cap_scores(scores, cap):
    """cap * tanh(scores / cap), tanh written with exp2 so that it cannot overflow (x -> inf gives 1 - 2/inf)."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * 1.4426950408889634 / cap))))


@triton.jit
def visible_keys(seq_len, QUERY_LEN: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that any query token of the request sees, and how many there are from there on."""
    first_key = seq_len * 0
    if WINDOW > 0:
        first_key = tl.maximum(seq_len - QUERY_LEN - WINDOW + 1, 0)
    return first_key, seq_len - first_key


@triton.jit
def split_size_of(num_keys, num_splits, min_split_tokens, BLOCK_N: tl.constexpr):
    """Keys per split: at least min_split_tokens, a multiple of BLOCK_N, and at most num_splits splits in all."""
    wanted = tl.minimum(tl.maximum(num_keys // min_split_tokens, 1), num_splits)
    blocks = (num_keys + wanted * BLOCK_N - 1) // (wanted * BLOCK_N)
    return tl.maximum(blocks, 1) * BLOCK_N
