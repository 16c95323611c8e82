"""Changes to the logits before sampling: repetition, presence and frequency penalties, and the logit bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention.history import History, page_places

# In the Triton path's counts: the bit that says that the prompt holds the token; below it the count in the output.
_IN_PROMPT = tl.constexpr(1 << 30)


def apply_penalties(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
    index: torch.Tensor, counts: torch.Tensor,
) -> None:  # fmt: skip
    """Penalises, in place, the tokens that the requests of some rows have seen.

    logits fp32 [S, V], last dimension contiguous. The history of logits' row i is the first seq_lens[i] tokens of
    rows[i], all of them in pages, of which the first prompt_lens[i] are prompt; rows, prompt_lens, seq_lens int32 [S].
    repetition, presence, frequency fp32 [S]; 1, 0, 0 change nothing. index int32 [G]: the rows of logits that are
    penalised, each at most once. counts int32 [C, V], of zeros, and of zeros again afterwards: room for C rows at once.

    First repetition r (Keskar et al. 2019, arXiv 1909.05858, with Hugging Face's rule for signs): a token of the
    history has its logit divided by r if positive, else multiplied. Then, as in OpenAI's API, a token that the output
    holds n > 0 times loses presence + n · frequency. Ids outside the vocabulary are skipped.
    """
    (apply_penalties_triton if logits.is_cuda else apply_penalties_torch)(
        logits, history, rows, prompt_lens, seq_lens, repetition, presence, frequency, index, counts
    )


def apply_logit_bias(logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, entries: torch.Tensor) -> None:
    """logits[rows[i], token] += value, in place, for the entries offsets[i] to offsets[i + 1].

    logits fp32 [S, V], last dimension contiguous; rows int32 [G], each at most once; offsets int32 [G + 1]; entries
    int32 [N, 2], contiguous: a token, in range and at most once a row, and the bits of an fp32 value, -inf to forbid.
    """
    (apply_logit_bias_triton if logits.is_cuda else apply_logit_bias_torch)(logits, rows, offsets, entries)


def apply_logit_bias_torch(
    logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, entries: torch.Tensor
) -> None:
    row = torch.repeat_interleave(rows.long(), offsets.diff().long())
    logits[row, entries[:, 0].long()] += entries[:, 1].contiguous().view(torch.float32)


def apply_logit_bias_triton(
    logits: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, entries: torch.Tensor
) -> None:
    if rows.shape[0]:
        _bias_kernel[(rows.shape[0], 4)](logits, rows, offsets, entries, logits.stride(0), BLOCK=256, num_warps=2)


def apply_penalties_torch(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
    index: torch.Tensor, counts: torch.Tensor,
) -> None:  # fmt: skip
    active = index.long()
    if active.numel() == 0:
        return
    vocabulary, num_tokens = logits.shape[1], int(seq_lens[active].max())
    column = torch.arange(num_tokens, device=logits.device)
    tokens = history.computed(rows[active].unsqueeze(1), column)
    inside = (column < seq_lens[active].unsqueeze(1)) & (tokens >= 0) & (tokens < vocabulary)
    is_output = (column >= prompt_lens[active].unsqueeze(1))[inside]
    row, _ = inside.nonzero(as_tuple=True)
    token = tokens[inside].long()

    seen = torch.zeros(active.numel() * vocabulary, dtype=torch.int32, device=logits.device)
    place = row * vocabulary + token
    seen.index_add_(0, place, is_output.int())
    count, target = seen[place], active[row]
    # A token that occurs several times gets the same new logit each time.
    logit = logits[target, token]
    factor = repetition[target]
    logit = torch.where(logit > 0, logit / factor, logit * factor)
    logit -= torch.where(count > 0, presence[target] + count * frequency[target], 0.0)
    logits[target, token] = logit


def apply_penalties_triton(
    logits: torch.Tensor, history: History, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
    index: torch.Tensor, counts: torch.Tensor,
) -> None:  # fmt: skip
    (num_rows, vocabulary), most = (index.shape[0], logits.shape[1]), counts.shape[0]
    assert most % 4 == 0 or num_rows <= most, "every slice of index has to be aligned, as Triton's variant is"
    sharers = min(16, triton.cdiv(history.max_len, 1024))
    for start in range(0, num_rows, most):
        chosen = index[start : start + most]
        _count_kernel[(chosen.shape[0], sharers)](
            history.pages, history.table, rows, prompt_lens, seq_lens, chosen, counts, history.table.stride(0),
            vocabulary, PAGE=history.page, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        _penalize_kernel[(chosen.shape[0], triton.cdiv(vocabulary, 4096))](
            logits, counts, repetition, presence, frequency, chosen, logits.stride(0), vocabulary, BLOCK=4096,
            num_warps=8,
        )  # fmt: skip


@triton.jit
def _bias_kernel(logits_ptr, rows_ptr, offsets_ptr, entries_ptr, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    logits_ptr += tl.load(rows_ptr + row).to(tl.int64) * row_stride
    for start in range(begin + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < end
        token = tl.load(entries_ptr + 2 * entry, mask=inside, other=0)
        value = tl.load(entries_ptr + 2 * entry + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        logits = tl.load(logits_ptr + token, mask=inside, other=0.0)
        tl.store(logits_ptr + token, logits + value, mask=inside)


@triton.jit
def _count_kernel(
    pages_ptr, table_ptr, rows_ptr, prompt_lens_ptr, seq_lens_ptr, index_ptr, counts_ptr, table_stride, vocabulary,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, sharer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(index_ptr + place)
    table_ptr += tl.load(rows_ptr + row).to(tl.int64) * table_stride
    prompt_len, seq_len = tl.load(prompt_lens_ptr + row), tl.load(seq_lens_ptr + row)
    for start in range(sharer * BLOCK, seq_len, tl.num_programs(1) * BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < seq_len
        token = tl.load(pages_ptr + page_places(table_ptr, position, inside, PAGE), mask=inside, other=-1)
        inside = (token >= 0) & (token < vocabulary)
        count_ptr = counts_ptr + place * vocabulary + token
        tl.atomic_or(count_ptr, _IN_PROMPT, mask=inside & (position < prompt_len), sem="relaxed")
        tl.atomic_add(count_ptr, 1, mask=inside & (position >= prompt_len), sem="relaxed")


@triton.jit
def _penalize_kernel(
    logits_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, index_ptr, row_stride, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + place).to(tl.int64)
    repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count_ptr = counts_ptr + place * vocabulary + token
    count = tl.load(count_ptr, mask=token < vocabulary, other=0)
    seen = count != 0
    tl.store(count_ptr, 0, mask=seen)  # the next rows find zeros
    logits = tl.load(logits_ptr + row * row_stride + token, mask=seen, other=0.0)
    logits = tl.where(logits > 0, logits / repetition, logits * repetition)
    count = count & (_IN_PROMPT - 1)
    logits -= tl.where(count > 0, presence + count.to(tl.float32) * frequency, 0.0)
    tl.store(logits_ptr + row * row_stride + token, logits, mask=seen)
