"""Steps that nobody asked for, to compile what they need, and kernels that are compiled too late all the same."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import triton

from ..link.plan import NewRow, StepPlan
from ..link.sampling_params import Pooling, SamplingParams

POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling(head=True))


FEW = 16  # prompts, up to which they are equally long
SHORT = 16  # tokens of each of many, beside a long one


def dummy_plan(
    num_seqs: int,
    num_tokens: int,
    sampling: SamplingParams,
    num_drafts: int,
    adapted: bool,
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_groups: int,
    generates: bool,
) -> StepPlan:
    """Its block tables point to the null block.

    num_seqs: more where contexts of so many are too short for the tokens, and no more than tokens. They are equally
    long, but of many one may be long: kernels choose by the longest, and by how many there are. num_drafts: of each
    request, beside one token; what num_tokens has beyond that is another one's prompt. adapted: every request has the
    adapter of the first slot, whatever is in it. generates: or the model makes vectors alone. num_groups: of the cache.
    """
    num_seqs = min(max(num_seqs, -(-num_tokens // max_model_len)), num_tokens, max_num_seqs)
    lengths = _lengths(num_seqs, num_tokens, max_model_len)
    if num_drafts:
        prompt = num_tokens - num_seqs * (1 + num_drafts)
        lengths = [1 + num_drafts] * num_seqs + [prompt] * (prompt > 0)
    lengths.sort(key=lambda n: n != 1)
    num_decodes, num_seqs = num_seqs if num_drafts else lengths.count(1), len(lengths)
    slot, sampling = 0 if adapted else -1, sampling if generates else POOLED
    rows = [NewRow(i, 0, bytes(4 * n), n, 0, sampling, slot) for i, n in enumerate(lengths)]
    every = list(range(num_seqs))
    return StepPlan(
        -1, every, lengths, [0] * num_seqs, every if generates else [], num_decodes, rows,
        [[] for _ in range(num_groups)], pooled=[] if generates else every, num_drafts=num_drafts,
    )  # fmt: skip


def _lengths(num_seqs: int, num_tokens: int, max_model_len: int) -> list[int]:
    first, others = 0, num_seqs
    if num_seqs > FEW and num_tokens > SHORT * num_seqs:
        first, others = min(num_tokens - SHORT * (num_seqs - 1), max_model_len), num_seqs - 1
    share, more = divmod(num_tokens - first, others)
    return [first] * (first > 0) + [min(share + (i < more), max_model_len) for i in range(others)]


logger = logging.getLogger(__name__)


@dataclass
class _Times:
    num: int = 0
    seconds: float = 0.0
    begun: float | None = None  # time.monotonic() of the one that is being compiled


class LateCompilations:
    def __init__(self) -> None:
        """Of an engine that starts now: what an earlier one of this process has Triton count, is over."""
        self._times = _Times()
        triton.knobs.runtime.jit_cache_hook = triton.knobs.runtime.jit_post_compile_hook = None

    def __len__(self) -> int:
        return self._times.num

    @property
    def seconds(self) -> float:
        """That they have taken so far."""
        begun = self._times.begun
        return self._times.seconds + (0.0 if begun is None else time.monotonic() - begun)

    def count(self) -> None:
        """From here on every kernel should be ready."""
        times = self._times  # not self: Triton keeps the hooks longer than their runner is wanted

        def begin(**_: object) -> None:
            times.begun = time.monotonic()

        def compiled(*, fn: Any, **_: object) -> None:
            spent = 0.0 if times.begun is None else time.monotonic() - times.begun
            times.num += 1
            times.seconds += spent
            times.begun = None
            logger.warning("%s was not ready, and every request waited %.2f s for it: please report it", fn.name, spent)

        triton.knobs.runtime.jit_cache_hook = begin
        triton.knobs.runtime.jit_post_compile_hook = compiled
