"""Changes to the logits before sampling: repetition, presence and frequency penalties, and the logit bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# In the Triton path's counts: the bit that says that the prompt holds the token; below it the count in the output.
_IN_PROMPT = tl.constexpr(1 << 30)


def apply_penalties(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
) -> None:  # fmt: skip
    """Penalises, in place, the tokens that each row's request has seen.

    logits fp32 [S, V], last dimension contiguous. token_ids int32 [R + 1, L]; the history of logits' row i is
    token_ids[rows[i], :seq_lens[i]], of which the first prompt_lens[i] are prompt; rows, prompt_lens, seq_lens int32
    [S]. repetition, presence, frequency fp32 [S]; 1, 0, 0 change nothing.

    First repetition r (Keskar et al. 2019, arXiv 1909.05858, with Hugging Face's rule for signs): a token of the
    history has its logit divided by r if positive, else multiplied. Then, as in OpenAI's API, a token that the output
    holds n > 0 times loses presence + n · frequency. Ids outside the vocabulary (placeholders of images) are skipped.
    """
    (apply_penalties_triton if logits.is_cuda else apply_penalties_torch)(
        logits, token_ids, rows, prompt_lens, seq_lens, repetition, presence, frequency
    )


def apply_logit_bias(logits: torch.Tensor, index: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
    """logits[index[i], tokens[i]] += values[i], in place; entries for one logit add up.

    logits fp32 [S, V]; index and tokens int64 [n], in range; values fp32 [n], -inf to forbid.
    """
    logits.index_put_((index, tokens), values, accumulate=True)


def apply_penalties_torch(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
) -> None:  # fmt: skip
    active = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero().squeeze(1)
    if active.numel() == 0:
        return
    vocabulary, num_tokens = logits.shape[1], int(seq_lens[active].max())
    history = token_ids[rows[active], :num_tokens]
    column = torch.arange(num_tokens, device=logits.device)
    inside = (column < seq_lens[active].unsqueeze(1)) & (history >= 0) & (history < vocabulary)
    is_output = (column >= prompt_lens[active].unsqueeze(1))[inside]
    row, _ = inside.nonzero(as_tuple=True)
    token = history[inside].long()

    counts = torch.zeros(active.numel() * vocabulary, dtype=torch.int32, device=logits.device)
    place = row * vocabulary + token
    counts.index_add_(0, place, is_output.int())
    count, target = counts[place], active[row]
    # A token that occurs several times gets the same new logit each time.
    logit = logits[target, token]
    factor = repetition[target]
    logit = torch.where(logit > 0, logit / factor, logit * factor)
    logit -= torch.where(count > 0, presence[target] + count * frequency[target], 0.0)
    logits[target, token] = logit


def apply_penalties_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: torch.Tensor, prompt_lens: torch.Tensor,
    seq_lens: torch.Tensor, repetition: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor,
) -> None:  # fmt: skip
    num_rows, vocabulary = logits.shape
    if num_rows == 0:
        return
    counts = torch.zeros((num_rows, vocabulary), dtype=torch.int32, device=logits.device)
    sharers = min(16, triton.cdiv(token_ids.shape[1], 1024))
    _count_kernel[(num_rows, sharers)](
        token_ids, rows, prompt_lens, seq_lens, repetition, presence, frequency, counts, token_ids.stride(0),
        vocabulary, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    _penalize_kernel[(num_rows, triton.cdiv(vocabulary, 4096))](
        logits, counts, repetition, presence, frequency, logits.stride(0), vocabulary, BLOCK=4096, num_warps=8
    )


@triton.jit
def _count_kernel(
    token_ids_ptr, rows_ptr, prompt_lens_ptr, seq_lens_ptr, repetition_ptr, presence_ptr, frequency_ptr, counts_ptr,
    token_stride, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    row, sharer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    repetition = tl.load(repetition_ptr + row)
    if (repetition != 1.0) | (tl.load(presence_ptr + row) != 0.0) | (tl.load(frequency_ptr + row) != 0.0):
        history_ptr = token_ids_ptr + tl.load(rows_ptr + row).to(tl.int64) * token_stride
        prompt_len, seq_len = tl.load(prompt_lens_ptr + row), tl.load(seq_lens_ptr + row)
        for start in range(sharer * BLOCK, seq_len, tl.num_programs(1) * BLOCK):
            index = start + tl.arange(0, BLOCK)
            token = tl.load(history_ptr + index, mask=index < seq_len, other=-1)
            inside = (token >= 0) & (token < vocabulary)
            place = counts_ptr + row * vocabulary + token
            tl.atomic_or(place, _IN_PROMPT, mask=inside & (index < prompt_len), sem="relaxed")
            tl.atomic_add(place, 1, mask=inside & (index >= prompt_len), sem="relaxed")


@triton.jit
def _penalize_kernel(
    logits_ptr, counts_ptr, repetition_ptr, presence_ptr, frequency_ptr, row_stride, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        count = tl.load(counts_ptr + row * vocabulary + token, mask=token < vocabulary, other=0)
        seen = count != 0
        logits = tl.load(logits_ptr + row * row_stride + token, mask=seen, other=0.0)
        logits = tl.where(logits > 0, logits / repetition, logits * repetition)
        count = count & (_IN_PROMPT - 1)
        logits -= tl.where(count > 0, presence + count.to(tl.float32) * frequency, 0.0)
        tl.store(logits_ptr + row * row_stride + token, logits, mask=seen)
