"""Drawing the next token: temperature, min-p, top-k, top-p and the draw itself, without sorting the vocabulary.

Every filter keeps the most probable tokens, so all three together are one threshold on the logit (threshold.py finds
it; the idea of pivots instead of a sort is FlashInfer's). The token is then drawn by inverting the cumulative
distribution in vocabulary order. A row's noise is Philox(seed, position): its token depends on its own logits and
settings alone, whatever else is in the batch. The twin sorts the head of each row, and the whole where the head cannot
decide.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .argmax import argmax_torch, argmax_triton
from .threshold import find_threshold, load_logits, relative_weights, tile_masses

_MAX_BLOCK = 8192
_TORCH_BLOCK = 1024
# Far below it 1 / temperature would overflow; distributions this cold are greedy anyway.
_MIN_TEMPERATURE = 1e-30


def philox_uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """seed int64 [S], position int64 [S] → fp32 [S] in [0, 1): one draw of 24 bits for each pair.

    Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the key is seed's two 32-bit
    words, the counter (position's low word, its high word, 0, 0); the draw is the top 24 bits of the first output word.
    """
    return philox_uniform_triton(seed, position) if seed.is_cuda else philox_uniform_torch(seed, position)


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
    first survivor in vocabulary order whose cumulative mass exceeds philox_uniform(seed, position) times the total.
    A logit of -inf is never drawn. A row whose maximum is infinite is taken as greedy (so 0 if all are -inf); one with
    a NaN gives some index in range: see has_nan.
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


def has_nan(logits: torch.Tensor) -> torch.Tensor:
    """logits [S, V] → bool [S]: whether the row holds a NaN. (The maximum propagates NaN: no temporary of [S, V].)"""
    return logits.amax(dim=-1).isnan()


# ---- torch ----------------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF
_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_KEY_STEPS = torch.arange(10).view(10, 1, 1) * torch.tensor([[0xBB67AE85], [0x9E3779B9]])


def philox4x32_torch(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """counter [4, S] and key [2, S], 32-bit words in int64 → the four output words [4, S]."""
    device = counter.device
    multipliers, keys = _MULTIPLIERS.to(device), (key.flip(0) + _KEY_STEPS.to(device)) & _WORD
    even, odd = counter[0::2], counter[1::2].flip(0)  # words (0, 2) and (3, 1)
    for round_key in keys.unbind(0):
        product = even * multipliers  # wraps: all 64 bits are there
        # Words (2, 0) become high ^ (3, 1) ^ key (1, 0); words (3, 1) become low.
        even = (product >> 32).bitwise_and_(_WORD).bitwise_xor_(odd).bitwise_xor_(round_key).flip(0)
        odd = product.bitwise_and_(_WORD)
    return torch.stack((even[0], odd[1], even[1], odd[0]))


def philox_uniform_torch(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(position)
    counter = torch.stack((position & _WORD, (position >> 32) & _WORD, zero, zero))
    words = philox4x32_torch(counter, torch.stack((seed & _WORD, (seed >> 32) & _WORD)))
    return (words[0] >> 8).float() * 2.0**-24


def sample_torch(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    seed: torch.Tensor, position: torch.Tensor, out: torch.Tensor | None = None, all_greedy: bool = False,
) -> torch.Tensor:  # fmt: skip
    if all_greedy:
        return argmax_torch(logits, out)
    top = logits.amax(dim=-1)
    hot = (temperature > 0) & top.isfinite()
    top = torch.where(hot, top, 0.0)
    tokens = _draw_torch(logits, top, hot, temperature, top_k, top_p, min_p, philox_uniform_torch(seed, position))
    if not bool(hot.all()):
        tokens = torch.where(hot, tokens, argmax_torch(logits))
    return tokens.int() if out is None else out.copy_(tokens)


def _draw_torch(
    logits: torch.Tensor, top: torch.Tensor, hot: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor,
    top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The draw of the rows that are hot; anything for the others."""
    num_rows, vocabulary = logits.shape
    inverse = 1 / temperature.clamp(min=_MIN_TEMPERATURE).unsqueeze(1)
    top_k = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long()
    filtered = hot & ((top_k < vocabulary) | (top_p < 1))
    top, top_k, top_p, min_p = top.unsqueeze(1), top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1)

    blocks, weights = _blocks(logits)
    if not bool(filtered.any()):
        _weigh(logits, top, inverse, min_p, out=weights)
        return _invert(blocks, uniform.unsqueeze(1))
    rows = filtered.logical_not().nonzero().squeeze(1)
    if rows.numel():
        weights[rows] = _weigh(logits[rows], top[rows], inverse[rows], min_p[rows])
    rows = filtered.nonzero().squeeze(1)
    # Sorting a vocabulary takes some ten milliseconds, and its head nearly always decides.
    limited = top_k[rows] < vocabulary
    head = int((top_k[rows] * limited).max()) + 1
    if not bool(limited.all()):
        head = max(head, 1024)
    while rows.numel():
        part = logits if rows.numel() == num_rows else logits[rows]
        indices, kept, decided = _best(part, top[rows], inverse[rows], top_k[rows], top_p[rows], min_p[rows], head)
        # A row that is not decided yet writes too little here, and again with a longer head.
        weights[rows.unsqueeze(1), indices] = kept
        rows = rows[~decided]
        head *= 16
    return _invert(blocks, uniform.unsqueeze(1))


def _blocks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros [S, blocks, n], and the view of them that has logits' shape."""
    num_rows, vocabulary = logits.shape
    blocks = logits.new_zeros((num_rows, -(-vocabulary // _TORCH_BLOCK), _TORCH_BLOCK))
    return blocks, blocks.flatten(1)[:, :vocabulary]


def _weigh(
    logits: torch.Tensor, top: torch.Tensor, inverse: torch.Tensor, min_p: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Probabilities relative to the greatest; 0 where min-p drops the token."""
    weights = torch.sub(logits, top, out=out).mul_(inverse).exp_()
    if bool((min_p > 0).any()):
        # A mask of floats: one of bool would be converted, at many times the cost.
        weights.mul_(torch.ge(weights, min_p, out=torch.empty_like(weights)))
    return weights


def _best(
    logits: torch.Tensor, top: torch.Tensor, inverse: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, head: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Top-k and top-p among the head greatest logits of each row.

    → their tokens [S, head]; their weights, 0 for tokens dropped; bool [S], whether the head holds every survivor.
    """
    vocabulary = logits.shape[1]
    if head < vocabulary:
        values, indices = logits.topk(head, dim=-1)
    else:
        head = vocabulary
        values, indices = logits.sort(dim=-1, descending=True)
    smallest = values[:, -1:]
    limited = top_k < vocabulary
    limit = torch.where(limited, values.gather(1, (top_k - 1).clamp_(max=head - 1)), float("-inf"))
    weights = _weigh(values, top, inverse, min_p)
    kept = weights * (values >= limit)
    decided = ~limited | (limit > smallest)
    if bool((top_p < 1).any()):
        # Sums whose order of additions is the same for every length of the head and every number of rows.
        mass = kept.cumsum(dim=-1)
        total = mass[:, -1:]
        if not bool(limited.all()):
            blocks, everything = _blocks(logits)
            _weigh(logits, top, inverse, min_p, out=everything)
            total = torch.where(limited, total, blocks.sum(dim=-1).sum(dim=-1, keepdim=True))
        last = torch.searchsorted(mass, top_p * total).clamp_(max=head - 1)
        limit = torch.where(top_p < 1, torch.maximum(limit, values.gather(1, last)), limit)
        kept = weights * (values >= limit)
        decided &= limit > smallest
    if head == vocabulary:
        decided = torch.ones_like(decided)
    return indices, kept, decided.squeeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """weights [S, blocks, n], uniform [S, 1] → int64 [S]: the token at which the cumulative weight passes uniform.

    Summing blocks and then accumulating in one of them is many times faster than accumulating all.
    """
    ends = weights.sum(dim=-1).cumsum(dim=-1)
    target = uniform * ends[:, -1:]
    block = _first_beyond(ends, target)
    start = F.pad(ends, (1, 0)).gather(1, block)
    rows = torch.arange(weights.shape[0], device=weights.device).unsqueeze(1)
    token = _first_beyond(weights[rows, block].squeeze(1).cumsum(dim=-1).add_(start), target)
    return (block * weights.shape[2] + token).squeeze(1)


def _first_beyond(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose end is greater than target; when rounding leaves none, the first to reach the greatest."""
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(ends, target, right=True), last).clamp_(max=ends.shape[1] - 1)


# ---- triton ---------------------------------------------------------------------------------------------------------


def philox_uniform_triton(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    out = torch.empty(seed.shape, dtype=torch.float32, device=seed.device)
    if seed.shape[0]:
        _philox_kernel[(triton.cdiv(seed.shape[0], 128),)](seed, position, out, seed.shape[0], BLOCK=128)
    return out


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
        scratch = logits.new_empty((num_rows, 3 * block))
        _sample_kernel[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, seed, position, out, scratch, logits.stride(0), vocabulary,
            TILES=triton.next_power_of_2(triton.cdiv(vocabulary, block)), BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out


@triton.jit
def _uniform(seed, position):
    counter = position.to(tl.uint64, bitcast=True)
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return (word >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["num_rows"])
def _philox_kernel(seed_ptr, position_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + row, mask=row < num_rows, other=0)
    position = tl.load(position_ptr + row, mask=row < num_rows, other=0)
    tl.store(out_ptr + row, _uniform(seed, position), mask=row < num_rows)


@triton.jit
def _draw(
    row_ptr, limit, top, inverse_temperature, min_p, uniform, vocabulary, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    """Inverts the cumulative distribution: first which tile, from the tiles' masses, then which token of it."""
    tiles = tl.arange(0, TILES)
    masses = tile_masses(row_ptr, limit, top, inverse_temperature, min_p, vocabulary, TILES, BLOCK)
    ends = tl.cumsum(masses, axis=0)
    target = uniform * tl.max(ends, axis=0)
    # Rounding may leave no end beyond the target: then the last survivor, among tiles as among tokens.
    tile = tl.min(tl.where((ends > target) & (masses > 0), tiles, TILES), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(masses > 0, tiles, 0), axis=0))
    start = tl.max(tl.where(tiles < tile, ends, 0.0), axis=0)

    lanes = tl.arange(0, BLOCK)
    logits = load_logits(row_ptr, tile * BLOCK + lanes, vocabulary)
    weights = tl.where(logits >= limit, relative_weights(logits, top, inverse_temperature, min_p), 0.0)
    passed = start + tl.cumsum(weights, axis=0) > target
    lane = tl.min(tl.where(passed & (weights > 0), lanes, BLOCK), axis=0)
    lane = tl.minimum(lane, tl.max(tl.where(weights > 0, lanes, 0), axis=0))
    return tile * BLOCK + lane


@triton.jit
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, out_ptr, scratch_ptr,
    row_stride, vocabulary, TILES: tl.constexpr, BLOCK: tl.constexpr,
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
            row_ptr, scratch_ptr + row.to(tl.int64) * (3 * BLOCK), first, second, third, top, inverse_temperature,
            tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), min_p, vocabulary, TILES, BLOCK,
        )  # fmt: skip
        uniform = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        token = _draw(row_ptr, limit, top, inverse_temperature, min_p, uniform, vocabulary, TILES, BLOCK)
    tl.store(out_ptr + row, token)
