"""Forbidding tokens: by a bit mask, as grammars do, and by words that an output must not contain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.history import History, page_places


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


def apply_bad_words(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor,
) -> None:  # fmt: skip
    """Sets to -inf, in place, what would complete a word that the row's output must not contain.

    logits fp32 [S, V], last dimension contiguous. The history of logits' row i is the first
    seq_lens[i] tokens of rows[i], all of them in pages, of which prompt_lens[i] are prompt: a word that begins there is
    none; rows, prompt_lens, seq_lens int32 [S]. Word j forbids words[offsets[j] : offsets[j + 1]] to row index[j];
    index int32 [N], offsets int32 [N + 1], words int32 [at least offsets[N]]. Empty words, and last tokens outside the
    vocabulary, forbid nothing.
    """
    (apply_bad_words_triton if logits.is_cuda else apply_bad_words_torch)(
        logits, history, rows, prompt_lens, seq_lens, index, offsets, words
    )


def apply_bad_words_torch(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor,
) -> None:  # fmt: skip
    length = offsets.diff().long() - 1  # of what must come just before
    seq_len = seq_lens[index].long()
    possible = ((length >= 0) & (length <= seq_len - prompt_lens[index])).nonzero().squeeze(1)
    if possible.numel() == 0:
        return
    length, seq_len, row = length[possible], seq_len[possible], index[possible].long()
    end = offsets[possible + 1].long() - 1
    back = torch.arange(int(length.max()), 0, -1, device=logits.device)  # places before the end
    inside = back <= length.unsqueeze(1)
    wanted = words[(end.unsqueeze(1) - back).clamp(min=0)]
    found = history.computed(rows[row].long().unsqueeze(1), (seq_len.unsqueeze(1) - back).clamp(min=0))
    last = words[end].long()
    matches = ((wanted == found) | ~inside).all(dim=1) & (last >= 0) & (last < logits.shape[1])
    logits[row[matches], last[matches]] = float("-inf")


def apply_bad_words_triton(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor,
) -> None:  # fmt: skip
    num_words = index.shape[0]
    if num_words:
        _bad_words_kernel[(num_words,)](
            logits, history.pages, history.table, rows, prompt_lens, seq_lens, index, offsets, words,
            logits.stride(0), history.table.stride(0), logits.shape[1], PAGE=history.page, BLOCK=32, num_warps=1,
        )  # fmt: skip


@triton.jit
def _bad_words_kernel(
    logits_ptr, pages_ptr, table_ptr, rows_ptr, prompt_lens_ptr, seq_lens_ptr, index_ptr, offsets_ptr, words_ptr,
    row_stride, table_stride, vocabulary, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0)
    begin, end = tl.load(offsets_ptr + word), tl.load(offsets_ptr + word + 1)
    row = tl.load(index_ptr + word).to(tl.int64)
    length = end - begin - 1
    seq_len = tl.load(seq_lens_ptr + row)
    if (length >= 0) & (length <= seq_len - tl.load(prompt_lens_ptr + row)):
        table_ptr += tl.load(rows_ptr + row).to(tl.int64) * table_stride
        different = tl.zeros([BLOCK], tl.int32)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            wanted = tl.load(words_ptr + begin + place, mask=place < length, other=0)
            inside = place < length
            page_ptr = pages_ptr + page_places(table_ptr, seq_len - length + place, inside, PAGE)
            found = tl.load(page_ptr, mask=inside, other=0)
            different += (wanted != found).to(tl.int32)
        last = tl.load(words_ptr + end - 1)
        if (tl.sum(different, axis=0) == 0) & (last >= 0) & (last < vocabulary):
            tl.store(logits_ptr + row * row_stride + last, float("-inf"))
