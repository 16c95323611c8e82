"""Drawing the next token: temperature, min-p, top-k, top-p and the draw itself, without sorting the vocabulary.

Every filter keeps the most probable tokens, so all three together are one threshold on the logit (threshold.py finds
it; the idea of pivots instead of a sort is FlashInfer's). Among the survivors the token is drawn by Gumbel-max, with
the noise of (seed, position, token) that noise.py makes: it depends on its row's logits and settings alone, whatever
else is in the batch. Noise is made for the few tokens that may win. The twin sorts the head of each row, and the whole
where the head cannot decide.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .argmax import argmax_torch, argmax_triton
from .noise import BLOCK_TOKENS, LEAST_WEIGHT, block_noise, block_noise_triton, token_noise, token_noise_triton
from .threshold import find_threshold, load_logits, relative_weights

_MAX_BLOCK = 8192
_TORCH_BLOCK = 1024
# Far below it 1 / temperature would overflow; distributions this cold are greedy anyway.
_MIN_TEMPERATURE = 1e-30
_BLOCK_TOKENS = tl.constexpr(BLOCK_TOKENS)
_LEAST_WEIGHT = tl.constexpr(LEAST_WEIGHT)
# A bound on a token's score is taken this much wider: the score is rounded in another way.
_MARGIN = tl.constexpr(1 - 1e-5)


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor | None = None, all_greedy: bool = False,
) -> torch.Tensor:  # fmt: skip
    """One token a row → int32 [S].

    logits fp32 [S, V], last dimension contiguous; temperature fp32 [S], 0 for greedy (the lowest index of the maximum);
    top_k int32 [S], 0 for off; top_p fp32 [S], 1 for off; min_p fp32 [S], 0 for off; seed and position int64 [S].
    all_greedy says that every temperature is 0, so that nothing but the argmax is launched.

    With probabilities of logits / temperature, in this order: min-p keeps tokens of at least min_p times the greatest
    probability; top-k those whose logit is at least the k-th greatest; top-p the smallest set of most probable
    survivors whose mass is at least top_p of the survivors'. Ties with the last token kept are kept. The draw is the
    survivor with the greatest logit / temperature - log(E(seed, position, token)), the lowest index of several, with
    the exponential variates E of noise.py. A logit of -inf is never drawn. A row whose maximum is infinite is taken as
    greedy (so 0 if all are -inf); one with a NaN gives some index in range.
    """
    function = sample_triton if logits.is_cuda else sample_torch
    return function(logits, temperature, top_k, top_p, min_p, seed, position, out, all_greedy)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-softmax of raw logits fp32 [S, V] at tokens int [S], and the k most probable tokens.

    → logprob fp32 [S], rank int32 [S] (1 + the number of strictly greater logits), top ids int32 [S, k] and their
    logprobs fp32 [S, k], most probable first; 0 <= k <= V.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.long().unsqueeze(1))
    rank = (logits > chosen).sum(dim=-1, dtype=torch.int32).add_(1)
    values, ids = logits.topk(k, dim=-1)
    return (chosen - normaliser).squeeze(1), rank, ids.int(), values - normaliser


# ---- torch ----------------------------------------------------------------------------------------------------------


def sample_torch(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor | None = None, all_greedy: bool = False,
) -> torch.Tensor:  # fmt: skip
    if all_greedy:
        return argmax_torch(logits, out)
    maxima = _block_maxima(logits)
    top = maxima.amax(dim=-1)
    hot = (temperature > 0) & (top.abs() < float("inf"))
    if not bool(hot.any()):
        return argmax_torch(logits, out)
    top = torch.where(hot, top, 0.0).unsqueeze(1)
    inverse, min_p = temperature.clamp(min=_MIN_TEMPERATURE).reciprocal_().unsqueeze(1), min_p.unsqueeze(1)
    limit = _limit_torch(logits, top, hot, inverse, top_k, top_p, min_p)
    rows = hot.nonzero().squeeze(1)
    arrays = (logits, maxima, limit, top, inverse, min_p, seed, position, rows)
    tokens = torch.from_numpy(_draw_numpy(*[x.numpy() for x in arrays]))
    if len(rows) < len(logits):
        tokens = argmax_torch(logits).index_copy_(0, rows, tokens.int())
    return tokens.int() if out is None else out.copy_(tokens)


def _block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """The greatest logit of each block of the noise, fp32 [S, blocks]."""
    whole = logits.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
    maxima = logits[:, :whole].unflatten(1, (-1, BLOCK_TOKENS)).amax(dim=-1)
    if whole == logits.shape[1]:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=1)


def _limit_torch(
    logits: torch.Tensor, top: torch.Tensor, hot: torch.Tensor, inverse: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor, min_p: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The lowest logit that top-k and top-p keep, fp32 [S, 1]; of the rows that are hot."""
    num_rows, vocabulary = logits.shape
    limit = torch.full_like(top, float("-inf"))
    top_k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
    rows = (hot & ((top_k < vocabulary) | (top_p < 1))).nonzero().squeeze(1)
    if not rows.numel():
        return limit
    # Sorting a vocabulary takes some ten milliseconds, and its head nearly always decides.
    limited = top_k[rows] < vocabulary
    head = int((top_k[rows] * limited).max()) + 1
    if not bool(limited.all()):
        head = max(head, 1024)
    top_k, top_p = top_k.unsqueeze(1), top_p.unsqueeze(1)
    while rows.numel():
        part = logits if rows.numel() == num_rows else logits[rows]
        # A row that is not decided yet gets another limit from a longer head.
        limit[rows], decided = _best(part, top[rows], inverse[rows], top_k[rows], top_p[rows], min_p[rows], head)
        rows = rows[~decided]
        head *= 16
    return limit


def _weigh(logits: torch.Tensor, top: torch.Tensor, inverse: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the greatest; 0 where min-p drops the token."""
    weights = torch.sub(logits, top).mul_(inverse).exp_()
    if bool((min_p > 0).any()):
        # A mask of floats: one of bool would be converted, at many times the cost.
        weights.mul_(torch.ge(weights, min_p, out=torch.empty_like(weights)))
    return weights


def _best(
    logits: torch.Tensor, top: torch.Tensor, inverse: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, head: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Top-k and top-p among the head greatest logits of each row.

    → the lowest logit kept, fp32 [S, 1]; bool [S], whether the head holds every survivor.
    """
    vocabulary = logits.shape[1]
    if head < vocabulary:
        values = logits.topk(head, dim=-1).values
    else:
        head = vocabulary
        values = logits.sort(dim=-1, descending=True).values
    smallest = values[:, -1:]
    limited = top_k < vocabulary
    limit = torch.where(limited, values.gather(1, (top_k - 1).clamp_(max=head - 1)), float("-inf"))
    decided = ~limited | (limit > smallest)
    if bool((top_p < 1).any()):
        # Sums whose order of additions is the same for every length of the head and every number of rows.
        mass = (_weigh(values, top, inverse, min_p) * (values >= limit)).cumsum(dim=-1)
        total = mass[:, -1:]
        if not bool(limited.all()):
            padded = F.pad(logits, (0, -vocabulary % _TORCH_BLOCK), value=float("-inf"))
            blocks = _weigh(padded, top, inverse, min_p).unflatten(1, (-1, _TORCH_BLOCK))
            total = torch.where(limited, total, blocks.sum(dim=-1).sum(dim=-1, keepdim=True))
        last = torch.searchsorted(mass, top_p * total).clamp_(max=head - 1)
        limit = torch.where(top_p < 1, torch.maximum(limit, values.gather(1, last)), limit)
        decided &= limit > smallest
    if head == vocabulary:
        decided = torch.ones_like(decided)
    return limit, decided.squeeze(1)


@np.errstate(over="ignore")
def _draw_numpy(
    logits: np.ndarray, maxima: np.ndarray, limit: np.ndarray, top: np.ndarray, inverse: np.ndarray,
    min_p: np.ndarray, seed: np.ndarray, position: np.ndarray, rows: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The draw of some rows, int64 [len(rows)]. In numpy, as what it computes is mostly small: see noise.py."""
    vocabulary = logits.shape[1]
    top, inverse, limit, seed, position = top[rows], inverse[rows], limit[rows], seed[rows], position[rows]
    floor = np.maximum(min_p[rows], np.float32(LEAST_WEIGHT))
    least, leader = block_noise(seed, position, maxima.shape[1])

    # A leader's noise is known with its block's. What would lose to it even with the least noise of its block need not
    # be looked at: first among blocks by their best tokens, then among tokens.
    tokens = leader + np.arange(0, vocabulary, BLOCK_TOKENS)
    chances = _chances(_take(logits, rows, tokens), limit, top, inverse, floor)
    need = least * ((chances / least).max(axis=1, keepdims=True) * np.float32(_MARGIN.value))
    chances = _chances(maxima[rows], limit, top, inverse, floor)
    place, block = np.nonzero((chances > 0) & (chances >= need))
    tokens = block[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    values = _take(logits, rows[place], tokens)
    chances = _chances(values, limit[place], top[place], inverse[place], floor[place])
    of_block, of_token = np.nonzero((chances > 0) & (chances >= need[place, block][:, None]))
    place, block = place[of_block], block[of_block]
    tokens, values = tokens[of_block, of_token], values[of_block, of_token].astype(np.float64)

    noise = token_noise(seed[place], position[place], tokens, least[place, block], leader[place, block])
    scores = np.exp((values - top[place, 0]) * inverse[place, 0]) / noise
    # Of each row the greatest score, and the first of several: the sort is stable.
    order = np.lexsort((-scores, place))
    return tokens[order[np.searchsorted(place, np.arange(len(rows)))]]


def _take(logits: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The logits of tokens [N, n], -inf beyond the end; rows [N]."""
    vocabulary = logits.shape[1]
    if vocabulary % BLOCK_TOKENS == 0:  # then no block goes beyond it
        return logits[rows[:, None], tokens]
    values = logits[rows[:, None], np.minimum(tokens, vocabulary - 1)]
    values[tokens >= vocabulary] = float("-inf")
    return values


def _chances(
    logits: np.ndarray, limit: np.ndarray, top: np.ndarray, inverse: np.ndarray, floor: np.ndarray
) -> np.ndarray:
    """Probabilities relative to the greatest; 0 where a filter drops the token."""
    weights = np.exp((logits - top) * inverse)
    return weights * ((weights >= floor) & (logits >= limit))


# ---- triton ---------------------------------------------------------------------------------------------------------


def sample_triton(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor | None = None, all_greedy: bool = False,
    max_block: int = _MAX_BLOCK,
) -> torch.Tensor:  # fmt: skip
    """sample, by one program a row; takes up to 96 KiB of scratch a row.

    max_block: the greatest tile of the vocabulary, a power of two.
    """
    if all_greedy:
        return argmax_triton(logits, out)
    num_rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if logits.stride(1) != 1 or logits.dtype != torch.float32:
        raise ValueError(
            f"sample takes fp32 logits with a last stride of 1, got {logits.dtype}, {logits.stride()}: use float()"
        )
    if num_rows:
        # Tile and warps follow from the vocabulary alone: a row must be summed in the same order in every batch.
        block = min(max_block, max(32, triton.next_power_of_2(vocabulary)))
        # Of the search for the threshold, then of the noise: two numbers a block.
        scratch = logits.new_empty((num_rows, max(3 * block, 2 * triton.cdiv(vocabulary, BLOCK_TOKENS))))
        _sample_kernel[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, seed, position, out, scratch, logits.stride(0), vocabulary,
            TILES=triton.next_power_of_2(triton.cdiv(vocabulary, block)), BLOCK=block,
            SCRATCH=scratch.shape[1], num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def _chances_triton(logits, limit, top, inverse_temperature, floor):
    weights = relative_weights(logits, top, inverse_temperature, floor)
    return tl.where(logits >= limit, weights, 0.0)


@triton.jit
def _draw(
    row_ptr, scratch_ptr, limit, top, inverse_temperature, min_p, seed, position, vocabulary, BLOCK: tl.constexpr
):
    """The token with the greatest chance divided by its noise. Three steps, each for fewer tokens.

    The leaders of the noise's blocks are known with their noise: the best of them is to be beaten. Then the row is read
    for the quads of tokens that may do so. Every lane has one quad of each tile, and marks its tiles in a word; last, a
    lane makes the noise of one of its marked quads after the other, mostly of none or one.
    """
    floor = tl.maximum(min_p, _LEAST_WEIGHT)
    num_blocks = tl.cdiv(vocabulary, _BLOCK_TOKENS)
    four = tl.arange(0, 4)[None, :]
    bound = tl.zeros([], tl.float32)
    tl.debug_barrier()  # the scratch may still be being read
    for start in range(0, num_blocks, BLOCK // 2):
        groups = start // 4 + tl.arange(0, BLOCK // 8)
        least, leader = block_noise_triton(seed, position, groups)
        block = groups[:, None] * 4 + four
        tl.store(scratch_ptr + block, least, mask=block < num_blocks)
        tl.store(scratch_ptr + num_blocks + block, leader.to(tl.float32), mask=block < num_blocks)
        logits = load_logits(row_ptr, block * _BLOCK_TOKENS + leader, vocabulary)
        scores = _chances_triton(logits, limit, top, inverse_temperature, floor) / least
        bound = tl.maximum(bound, tl.max(tl.max(scores, axis=1), axis=0))
    bound *= _MARGIN
    tl.debug_barrier()  # what one thread stored, another will load

    best = tl.zeros([], tl.float32)
    token = tl.zeros([], tl.int32)
    lanes = tl.arange(0, BLOCK // 4)
    for start in range(0, vocabulary, 32 * BLOCK):
        marked = tl.zeros([BLOCK // 4], tl.uint32)
        for tile in range(0, tl.minimum(tl.cdiv(vocabulary - start, BLOCK), 32)):
            quad = (start + tile * BLOCK) // 4 + lanes
            logits = load_logits(row_ptr, quad[:, None] * 4 + four, vocabulary)
            chance = tl.max(_chances_triton(logits, limit, top, inverse_temperature, floor), axis=1)
            block = quad * 4 // _BLOCK_TOKENS
            least = tl.load(scratch_ptr + block, mask=block < num_blocks, other=0.0)
            marked |= ((chance > 0) & (chance >= bound * least)).to(tl.uint32) << tile
        while tl.max(marked, axis=0) > 0:
            rest = marked & (marked - 1)
            lowest = marked ^ rest
            marked = rest
            of_lane = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the exponent is the bit's place
            quad = tl.where(lowest > 0, (start + of_lane * BLOCK) // 4 + lanes, vocabulary)  # or one beyond the end
            index = quad[:, None] * 4 + four
            logits = load_logits(row_ptr, index, vocabulary)
            chances = _chances_triton(logits, limit, top, inverse_temperature, floor)
            block = quad * 4 // _BLOCK_TOKENS
            least = tl.load(scratch_ptr + block, mask=lowest > 0, other=1.0)
            leader = tl.load(scratch_ptr + num_blocks + block, mask=lowest > 0, other=0.0).to(tl.int32)
            scores = chances / token_noise_triton(seed, position, quad, least, leader)
            greatest = tl.max(tl.max(scores, axis=1), axis=0)
            first = tl.min(tl.min(tl.where(scores == greatest, index, 2147483647), axis=1), axis=0)
            better = (greatest > best) | ((greatest == best) & (first < token))
            best = tl.where(better, greatest, best)
            token = tl.where(better, first, token)
    return token


@triton.jit
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr, scratch_ptr,
    row_stride, vocabulary, TILES: tl.constexpr, BLOCK: tl.constexpr, SCRATCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)

    # Of every lane: its three greatest logits, and where it first met the greatest.
    first = tl.full([BLOCK], float("-inf"), tl.float32)
    second = tl.full([BLOCK], float("-inf"), tl.float32)
    third = tl.full([BLOCK], float("-inf"), tl.float32)
    index = lanes
    for start in range(0, vocabulary, BLOCK):
        logits = load_logits(row_ptr, start + lanes, vocabulary)
        index = tl.where(logits > first, start + lanes, index)
        third = tl.maximum(third, tl.minimum(second, logits))
        second = tl.maximum(second, tl.minimum(first, logits))
        first = tl.maximum(first, logits)
    top = tl.max(first, axis=0)
    token = tl.min(tl.where(first == top, index, 2147483647), axis=0)

    temperature = tl.load(temperature_ptr + row)
    if (temperature > 0) & (top > float("-inf")) & (top < float("inf")):
        inverse_temperature = tl.div_rn(1.0, tl.maximum(temperature, 1e-30))
        min_p = tl.load(min_p_ptr + row)
        limit = find_threshold(
            row_ptr, scratch_ptr + row.to(tl.int64) * SCRATCH, first, second, third, top, inverse_temperature,
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), min_p, vocabulary, TILES, BLOCK,
        )  # fmt: skip
        token = _draw(
            row_ptr, scratch_ptr + row.to(tl.int64) * SCRATCH, limit, top, inverse_temperature, min_p,
            tl.load(seed_ptr + row), tl.load(position_ptr + row), vocabulary, BLOCK,
        )  # fmt: skip
    tl.store(out_ptr + row, token)
