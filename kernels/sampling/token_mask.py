"""Forbidding tokens by a bit mask, which is how grammars say what may come next."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """logits[rows[i], token] = -inf, in place, where bit token % 32 of bits[i, token // 32] is 0.

    logits fp32 [S, V], last dimension contiguous; rows int32 [G], indexes into S, each at most once; bits int32
    [G, ceil(V / 32)], last dimension contiguous, whose bits from V on mean nothing.
    """
    (apply_token_mask_triton if logits.is_cuda else apply_token_mask_torch)(logits, rows, bits)


def apply_token_mask_torch(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    # In bytes, the least significant bit first: the order of the tokens on any machine that torch runs on.
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = (bits.contiguous().view(torch.uint8).unsqueeze(2) >> shifts) & 1
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    index = rows.long()
    logits[index] = logits[index].masked_fill_(forbidden, -float("inf"))


def apply_token_mask_triton(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    num_rows, vocabulary = rows.shape[0], logits.shape[1]
    if num_rows == 0:
        return
    _mask_kernel[(num_rows, triton.cdiv(vocabulary, 4096))](
        logits, rows, bits, logits.stride(0), bits.stride(0), vocabulary, BLOCK=4096, num_warps=8
    )


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, logits_stride, bits_stride, vocabulary, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    word = tl.load(bits_ptr + index * bits_stride + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0  # the shift copies the sign, which the & drops
    tl.store(logits_ptr + row * logits_stride + token, -float("inf"), mask=inside & forbidden)
