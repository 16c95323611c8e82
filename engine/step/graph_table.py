"""The table of padded shapes that steps are captured for as CUDA graphs, and which of them holds a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..cache.batch import Shape
from ..link.plan import StepPlan
from ..schedule.planner import BESIDE_DRAFTS, FEW_DECODES

LOGIT_ROWS = 32
MIXED_TOKENS = (128, 256, 512, 768, 1024)
MIXED_DECODE_ROWS = (0, 16, 32, 64, 128, 256, 512)
MIXED_PREFILL_ROWS = 16
# Of more prompts than that, as after a burst of short ones: coarse, for they are rare. Graphs of BETWEEN_TOKENS, which
# are coarse anyway, have as many.
MANY_PREFILL_ROWS = 128
MANY_TOKENS = 256  # the smaller of two sizes; the other is the largest of a small step
# Steps of many tokens, for long queues: coarser, since there the host's time matters less. Steps of more than these
# are launched kernel by kernel: the GPU is so long at it that padding would cost more.
LARGE_TOKENS = (2048, 4096)
BETWEEN_TOKENS = (1280, 1536, 1792)  # where mixed steps have up to 2,048 tokens
LARGE_DECODE_ROWS = (0, 64, 256, 512)
LARGE_PREFILL_ROWS = 64
LARGE_PADDING = 1.1  # of their tokens; with more, launching kernel by kernel is faster


def decode_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph: padding wastes at most a few rows, and the number of graphs stays small."""
    sizes = [1, 2, 4, 8, 12, *range(16, 65, 8), *range(80, 257, 16), *range(288, largest + 1, 32)]
    return sorted({*(size for size in sizes if size <= largest), largest})


def mixed_sizes(max_mixed_tokens: int, large_mixed_tokens: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """(tokens of small graphs, tokens of large ones) for steps with prompts. The scheduler's limits are among them, as
    it plans so many whenever enough prompts wait; others beyond LARGE_TOKENS are launched kernel by kernel."""
    if not max_mixed_tokens:
        return [], list(large_mixed_tokens)
    small = min(max_mixed_tokens, MIXED_TOKENS[-1])
    sizes = [*(n for n in MIXED_TOKENS if n < small), small]
    if small == max_mixed_tokens:
        sizes.append(small + FEW_DECODES)
    limits = (n for n in (*LARGE_TOKENS, max_mixed_tokens) if small < n <= min(max_mixed_tokens, LARGE_TOKENS[-1]))
    large = {*large_mixed_tokens, *(n + FEW_DECODES for n in limits), *between_sizes(max_mixed_tokens)}
    return sizes, sorted(large)


def between_sizes(max_mixed_tokens: int) -> list[int]:
    """Of the large ones, those up to which every mixed step has a graph, however much it is padded. First a prompt of
    1,024 tokens beside few decodes."""
    if not MIXED_TOKENS[-1] < max_mixed_tokens <= LARGE_TOKENS[0]:
        return []
    most = max_mixed_tokens + FEW_DECODES
    return [MIXED_TOKENS[-1] + FEW_DECODES, *(n for n in BETWEEN_TOKENS if n < most), most]


def draft_sizes(most: int) -> list[int]:
    """As decode_sizes, up to what has graphs for some number of drafts; coarser, for each has its own."""
    return sorted({*(size for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if size <= most), most})


def padded_logits(num_sampled: int, num_rows: int) -> int:
    """Of how many of the rows behind a graph logits are computed: of few different numbers, all met at the start.

    cuBLAS has a kernel for every few rows, and the driver waits for the device to be idle when it loads one.
    """
    if num_sampled < LOGIT_ROWS:
        rounded = 1 << (num_sampled - 1).bit_length() if num_sampled else 0
    else:
        rounded = -(-num_sampled // LOGIT_ROWS) * LOGIT_ROWS
    return min(rounded, num_rows)


def logit_counts(shapes: Sequence[Shape], max_num_seqs: int, depths: Sequence[tuple[int, int]]) -> set[int]:
    """Of how many rows logits are computed behind graphs of these shapes."""
    rows = {shape.samples for shape in shapes}
    most_sampled = max(max_num_seqs, *(count * (1 + drafts) + BESIDE_DRAFTS for count, drafts in depths), 0)
    return {padded_logits(n, most) for most in rows for n in range(1, min(most, most_sampled) + 1)}


def most_drafting_rows(depths: Sequence[tuple[int, int]]) -> int:
    """Requests, padding included, of the largest step behind which a model drafts."""
    most = max((count for count, _ in depths), default=0)
    return next((rows for rows in MIXED_DECODE_ROWS if rows >= most), most) + MIXED_PREFILL_ROWS


class GraphTable:
    """Padded shapes of steps that only decode, with drafts or without, and of steps with some prompt tokens too."""

    def __init__(
        self, max_decodes: int, max_mixed_tokens: int, large_mixed_tokens: tuple[int, ...],
        drafts: Mapping[int, int] | None = None, coarse: bool = False,
    ) -> None:  # fmt: skip
        """`drafts`: up to how many decodes there are graphs for so many drafts of each. `coarse`: fewer graphs, of
        steps that come less often."""
        self.drafts = {count: min(most, max_decodes) for count, most in (drafts or {}).items()}
        self.decodes = [n for n in decode_sizes(max_decodes) if not coarse or n.bit_count() == 1 or n == max_decodes]
        mixed_rows = LARGE_DECODE_ROWS if coarse else MIXED_DECODE_ROWS
        self.mixed_decodes = sorted({min(rows, max_decodes) for rows in mixed_rows})
        self.large_decodes = sorted({min(rows, max_decodes) for rows in LARGE_DECODE_ROWS})
        self.max_mixed_tokens = max_mixed_tokens
        self.mixed_tokens, self.large_tokens = mixed_sizes(max_mixed_tokens, large_mixed_tokens)
        self.between = between_sizes(max_mixed_tokens)
        self._between_prefills = MANY_PREFILL_ROWS if max_decodes > LARGE_PREFILL_ROWS else LARGE_PREFILL_ROWS
        self.many_tokens: list[int] = []
        if max_decodes > MIXED_PREFILL_ROWS:
            self.many_tokens = [n for n in self.mixed_tokens if n in (MANY_TOKENS, self.mixed_tokens[-1])]
        self.shapes = sorted(self._shapes(), key=lambda shape: -shape.tokens)  # the largest first
        self._known = frozenset(self.shapes)

    def _shapes(self) -> list[Shape]:
        found = [Shape(size, 0, size, 0) for size in self.decodes]
        few_decodes = _at_least(self.mixed_decodes, FEW_DECODES) or self.mixed_decodes[-1]
        for tokens in self.mixed_tokens:
            rows = [n for n in self.mixed_decodes if n < tokens]
            if tokens > self.max_mixed_tokens:  # beside few decodes alone, and rows that are padded to more than that
                rows = [n for n in rows if n <= few_decodes or n >= self.max_mixed_tokens]
            found += [Shape(n, MIXED_PREFILL_ROWS, tokens, tokens) for n in rows]
        for tokens in self.many_tokens:
            rows = [n for n in self.large_decodes if n < tokens]
            found += [Shape(n, MANY_PREFILL_ROWS, tokens, tokens) for n in rows]
        for tokens in self.large_tokens:
            rows = [n for n in self.large_decodes if n < tokens]
            found += [Shape(n, self._large_prefills(tokens), tokens, tokens) for n in rows]
        for count, most in self.drafts.items():
            found += [Shape(size, 0, size * (1 + count), 0, count) for size in draft_sizes(most)]
            sizes = [tokens for tokens in self.mixed_tokens if tokens > most * (1 + count)]
            found += [Shape(most, BESIDE_DRAFTS, tokens, tokens, count) for tokens in sizes]
        return found

    def _large_prefills(self, tokens: int) -> int:
        """Prompts of large graphs of this size."""
        return self._between_prefills if tokens in self.between else LARGE_PREFILL_ROWS

    def expects(self, plan: StepPlan) -> bool:
        """Whether a plan of this size should find a graph, however many prompts it has."""
        if plan.num_drafts and plan.num_decodes > self.drafts.get(plan.num_drafts, 0):
            return False
        if plan.total_tokens == plan.num_decode_tokens or plan.total_tokens <= max(self.mixed_tokens, default=0):
            return True
        return not plan.num_drafts and plan.total_tokens <= max(self.between, default=0)

    def fits(self, plan: StepPlan) -> Shape | None:
        """The smallest shape of the table that holds this plan, if one does."""
        nearest = self.nearest(plan)
        if nearest is None or nearest in self._known:
            return nearest
        # Prompts of which a hit leaves one token count as decodes here, not in the planner's limit: more than
        # FEW_DECODES may stand in a step of as many tokens as only few were expected in.
        holding = [shape for shape in self.shapes if shape.holds(nearest)]
        return min(holding, key=lambda shape: (shape.tokens, shape.rows), default=None)

    def nearest(self, plan: StepPlan) -> Shape | None:
        """What this plan would be padded to first; not all of these shapes are worth a graph."""
        decodes, prefills, tokens = plan.num_decodes, len(plan.rows) - plan.num_decodes, plan.total_tokens
        if plan.num_drafts:
            return self._nearest_with_drafts(plan)
        if not prefills:
            size = _at_least(self.decodes, decodes)
            return None if size is None else Shape(size, 0, size, 0)
        if not self.mixed_tokens:
            return None
        large, few = tokens > self.mixed_tokens[-1], prefills <= MIXED_PREFILL_ROWS
        if large:
            sizes, decode_rows = self.large_tokens, self.large_decodes
        elif few:
            sizes, decode_rows = self.mixed_tokens, self.mixed_decodes
        else:
            sizes, decode_rows = self.many_tokens, self.large_decodes
        rows = _at_least(decode_rows, decodes)
        if rows is None:
            return None
        size = _at_least(sizes, max(tokens, rows + 1))
        if size is None:
            return None
        max_prefills = MIXED_PREFILL_ROWS if few else MANY_PREFILL_ROWS
        if large:
            max_prefills = self._large_prefills(size)
        if prefills > max_prefills:
            return None
        if large and size not in self.between and size > tokens * LARGE_PADDING:
            return None
        return Shape(rows, max_prefills, size, size)

    def _nearest_with_drafts(self, plan: StepPlan) -> Shape | None:
        count, most = plan.num_drafts, self.drafts.get(plan.num_drafts, 0)
        if plan.num_decodes > most:
            return None
        prefills = len(plan.rows) - plan.num_decodes
        if not prefills:
            rows = next(rows for rows in draft_sizes(most) if rows >= plan.num_decodes)
            return Shape(rows, 0, rows * (1 + count), 0, count)
        tokens = _at_least(self.mixed_tokens, max(plan.total_tokens, most * (1 + count) + 1))
        if tokens is None or prefills > BESIDE_DRAFTS:
            return None
        return Shape(most, BESIDE_DRAFTS, tokens, tokens, count)


def _at_least(sizes: list[int], wanted: int) -> int | None:
    """The smallest of the sorted sizes that is not below the one wanted."""
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None
