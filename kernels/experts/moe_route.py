"""Routing of a mixture of experts: a router's logits → each token's experts and weights → rows sorted by expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..launch.pdl import pdl_options

LITTLE_PAIRS = 4096  # up to so many are sorted in smaller pieces
LOWEST = tl.constexpr(-3.0e38)  # of what may be chosen: NaN is chosen last, and makes a weight that is noticed


class Routing(NamedTuple):
    """How experts are chosen and weighted, in the order of what is done."""

    top_k: int
    score: str = "softmax"  # of the logits, before the choice: softmax, sigmoid, none
    num_groups: int = 1  # of experts, of which only the best kept_groups may be chosen from
    kept_groups: int = 1
    group_score: str = "max"  # a group's best expert, or the sum of its best two ("top2")
    softmax_chosen: bool = False  # the weights are a softmax over what was chosen
    renormalize: bool = False  # the weights are divided by their sum + epsilon
    epsilon: float = 0.0
    factor: float = 1.0  # and multiplied by this


def route(
    logits: torch.Tensor,
    how: Routing,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    mine: range | None = None,
    query_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] → experts int32 [T, k], the best first, and their weights fp32 [T, k]; computed in fp32.

    correction fp32 [E] is added to the scores for the choice alone. Of equal scores the lower expert is the better.
    load int64 [E]: to each expert's number the tokens are added that go there; with query_start, int32 [requests + 1],
    those before its last number, for what is behind them pads the step.
    mine: the experts that are here, None: all. Ids count from the first of them on; of the others the weight is 0, and
    the id len(mine).
    """
    if logits.is_cuda:
        return route_triton(logits, how, correction, load, mine, query_start)
    return route_torch(logits, how, correction, load, mine, query_start)


def route_torch(
    logits: torch.Tensor,
    how: Routing,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    mine: range | None = None,
    query_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float()
    if how.score == "softmax":
        scores = scores.softmax(dim=1)
    elif how.score == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction is None else scores + correction
    if how.num_groups > 1:
        choice = _in_kept_groups(choice, how)
    ids = _best(choice, how.top_k)
    if load is not None:
        counted = ids if query_start is None else ids[: int(query_start[-1])]
        load += torch.bincount(counted.flatten(), minlength=len(load))
    weights = scores.gather(1, ids)
    if how.softmax_chosen:
        weights = weights.softmax(dim=1)
    if how.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + how.epsilon)
    weights = weights * how.factor
    if mine is not None:
        ids = ids - mine.start
        here = (ids >= 0) & (ids < len(mine))
        ids, weights = ids.where(here, len(mine)), weights.where(here, 0.0)
    return ids.int(), weights


def _in_kept_groups(choice: torch.Tensor, how: Routing) -> torch.Tensor:
    """The same with -inf outside of the groups that may be chosen from."""
    grouped = choice.unflatten(1, (how.num_groups, -1))
    best = grouped.amax(dim=2) if how.group_score == "max" else grouped.topk(2, dim=2).values.sum(dim=2)
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, _best(best, how.kept_groups), False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest in each row, in order; torch.topk does not say which of equal ones it takes."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def route_triton(
    logits: torch.Tensor,
    how: Routing,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    mine: range | None = None,
    query_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (num_tokens, num_experts), k = logits.shape, how.top_k
    mine = range(num_experts) if mine is None else mine
    ids = torch.empty((num_tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        size = num_experts // how.num_groups
        _route_kernel[(num_tokens,)](
            logits, logits if correction is None else correction, ids if load is None else load,
            ids if query_start is None else query_start, ids, weights, logits.stride(0), how.factor, how.epsilon,
            mine.start, len(mine), 0 if query_start is None else len(query_start) - 1,
            SCORE=how.score, CORRECT=correction is not None, GROUPS=how.num_groups, SIZE=size, KEPT=how.kept_groups,
            TOP2=how.group_score == "top2", TOP_K=k, SOFTMAX_CHOSEN=how.softmax_chosen, RENORMALIZE=how.renormalize,
            COUNT=load is not None, PADDED=query_start is not None, BLOCK_G=triton.next_power_of_2(how.num_groups),
            BLOCK_S=triton.next_power_of_2(size), BLOCK_K=triton.next_power_of_2(k),
            num_warps=1 if num_experts <= 256 else 4, **pdl_options(logits, num_tokens),
        )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["start", "count", "num_requests"])
def _route_kernel(
    logits_ptr, correction_ptr, load_ptr, query_start_ptr, ids_ptr, weights_ptr, stride, factor, epsilon, start, count,
    num_requests,
    SCORE: tl.constexpr, CORRECT: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    TOP2: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX_CHOSEN: tl.constexpr, RENORMALIZE: tl.constexpr,
    COUNT: tl.constexpr, PADDED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token, its experts as [groups, experts of a group]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    place = tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + place[None, :]
    exists = (group < GROUPS)[:, None] & (place < SIZE)[None, :]
    scores = tl.load(logits_ptr + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    if SCORE == "sigmoid":
        scores = tl.sigmoid(scores)
    choice = scores
    if CORRECT:
        choice += tl.load(correction_ptr + expert, mask=exists, other=0.0)
    choice = tl.where(choice > LOWEST, choice, LOWEST)
    choice = tl.where(exists, choice, float("-inf"))
    if GROUPS > 1:
        best = tl.max(choice, axis=1)
        if TOP2:
            first = tl.min(tl.where(choice == best[:, None], place[None, :], BLOCK_S), axis=1)
            best += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), choice), axis=1)
        best = tl.where(best > LOWEST, best, LOWEST)
        best = tl.where(group < GROUPS, best, float("-inf"))
        kept = group < 0
        for _ in range(KEPT):
            taken = tl.min(tl.where(best == tl.max(best), group, BLOCK_G))
            kept = kept | (group == taken)
            best = tl.where(group == taken, float("-inf"), best)
        choice = tl.where(kept[:, None], choice, float("-inf"))

    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for index in range(TOP_K):
        taken = tl.min(tl.where(choice == tl.max(choice), expert, GROUPS * SIZE))
        weight = tl.sum(tl.where(expert == taken, scores, 0.0))
        choice = tl.where(expert == taken, float("-inf"), choice)
        chosen = tl.where(slot == index, taken, chosen)
        weights = tl.where(slot == index, weight, weights)
    if SOFTMAX_CHOSEN:
        weights = tl.where(slot < TOP_K, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights))
        weights = weights / tl.sum(weights)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights) + epsilon)
    here = (chosen >= start) & (chosen < start + count)
    tl.store(ids_ptr + token * TOP_K + slot, tl.where(here, chosen - start, count), mask=slot < TOP_K)
    tl.store(weights_ptr + token * TOP_K + slot, tl.where(here, weights * factor, 0.0), mask=slot < TOP_K)
    if COUNT:  # whole numbers: in whatever order they are added
        end = tl.load(query_start_ptr + num_requests) if PADDED else tl.num_programs(0)
        tl.atomic_add(load_ptr + chosen, 1, mask=(slot < TOP_K) & (token < end), sem="relaxed")


class SortedPairs(NamedTuple):
    """All pairs (token, one of its k experts), as numbers token · k + place, in blocks of pairs with one expert."""

    pairs: torch.Tensor  # int32 [max_blocks · block]; T · k where a block has no more
    experts: torch.Tensor  # int32 [max_blocks]
    num_blocks: torch.Tensor  # int32 [1], on the device: those behind them hold anything

    @property
    def max_blocks(self) -> int:
        return len(self.experts)


def most_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks that pairs take at most, however they are routed: a grid of so many fits every step of that shape."""
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // block


def sort_pairs(ids: torch.Tensor, num_experts: int, block: int) -> SortedPairs:
    """ids int32 [T, k] → the pairs by expert, within an expert in their order."""
    if ids.is_cuda:
        return sort_pairs_triton(ids, num_experts, block)
    return sort_pairs_torch(ids, num_experts, block)


def sort_pairs_torch(ids: torch.Tensor, num_experts: int, block: int) -> SortedPairs:
    blocks, experts = [], []
    for expert in range(num_experts):
        for piece in (ids.flatten() == expert).nonzero()[:, 0].split(block):
            if len(piece):
                blocks.append(torch.nn.functional.pad(piece, (0, block - len(piece)), value=ids.numel()))
                experts.append(expert)
    missing = most_blocks(ids.numel(), num_experts, block) - len(blocks)
    blocks += [torch.full((block,), ids.numel(), device=ids.device)] * missing
    return SortedPairs(
        torch.cat(blocks).int() if blocks else ids.flatten(),
        torch.tensor(experts + [0] * missing, dtype=torch.int32, device=ids.device),
        torch.tensor([len(experts)], dtype=torch.int32, device=ids.device),
    )


def sort_pairs_triton(ids: torch.Tensor, num_experts: int, block: int) -> SortedPairs:
    """Without atomic additions, so that it is always the same: each expert has a program that looks through all ids."""
    num_pairs, device = ids.numel(), ids.device
    max_blocks = most_blocks(num_pairs, num_experts, block)
    found = SortedPairs(
        torch.empty(max_blocks * block, dtype=torch.int32, device=device),
        torch.empty(max_blocks, dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    chunk = 1024 if num_pairs <= LITTLE_PAIRS else 4096  # no more, so that few kernels are compiled
    options = {"num_warps": 8 if chunk > 1024 else 4}
    _count_kernel[(num_experts,)](ids, counts, num_pairs, CHUNK=chunk, **options, **pdl_options(ids, ids.shape[0]))
    _sort_kernel[(num_experts,)](
        ids, counts, found.pairs, found.experts, found.num_blocks, num_pairs,
        EXPERTS=num_experts, BLOCK_E=triton.next_power_of_2(num_experts), BLOCK=block, CHUNK=chunk, **options,
        **pdl_options(ids, ids.shape[0]),
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    offset = tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        ids = tl.load(ids_ptr + start + offset, mask=start + offset < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found))


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    ids_ptr, counts_ptr, pairs_ptr, experts_ptr, num_blocks_ptr, num_pairs,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + other, mask=other < EXPERTS, other=0)
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(other < expert, blocks, 0))
    count = tl.sum(tl.where(other == expert, counts, 0))
    mine = (count + BLOCK - 1) // BLOCK
    if expert == EXPERTS - 1:
        tl.store(num_blocks_ptr, first + mine)

    offset = tl.arange(0, CHUNK)
    end = first * BLOCK
    if count > 0:
        for start in range(0, num_pairs, CHUNK):
            pair = start + offset
            here = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
            rank = tl.cumsum(here.to(tl.int32), 0)
            tl.store(pairs_ptr + end + rank - 1, pair, mask=here)
            end += tl.sum(here.to(tl.int32))
        padding = count + tl.arange(0, BLOCK)
        tl.store(pairs_ptr + first * BLOCK + padding, num_pairs, mask=padding < mine * BLOCK)
        for start in range(0, mine, CHUNK):
            tl.store(experts_ptr + first + start + offset, expert, mask=start + offset < mine)
