"""Which layers share the blocks of the KV cache, and what a block holds: follows from what each layer keeps.

A block belongs to one KV group, and has room for one page (block_size tokens) of each of its layers. Groups have
equally many layers, or some places stay empty: the page of the layer at place i of every group lies in storage i, so
that a block costs the same whichever group takes it, and one pool serves all.

Layers are grouped by their window alone. Other head sizes, or values that are part of the keys, only change how a layer
views its page, and where pages at one place differ in size, the smaller leave the rest of theirs empty. Whether that
pays, or all layers are better off in one group that keeps what any of them needs, is counted in bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..families.layer_spec import KVSpec
from .kv_format import NUMBERS, KVFormat

if TYPE_CHECKING:
    from ..models.model import Model


MAX_GROUPS = 8  # each has a table a request, and costs the host time at every block
WORTH_GROUPS = 0.05  # of the bytes: what more groups have to save


@dataclass(frozen=True)
class GroupSpec:
    """Layers that keep the same tokens of a request: the last `window`, or all (0)."""

    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    specs: tuple[KVSpec, ...]  # of all layers
    groups: tuple[GroupSpec, ...]  # those that keep all tokens first: a prefix is looked up in them first
    block_size: int
    format: KVFormat = NUMBERS

    @classmethod
    def of(cls, specs: Sequence[KVSpec], block_size: int, max_model_len: int, format: KVFormat = NUMBERS) -> KVLayout:
        """Of those in which a request of the whole context takes about the fewest bytes, the one of fewest groups."""
        specs = tuple(specs)
        kinds: dict[int, list[int]] = {}
        for index, spec in enumerate(specs):
            kinds.setdefault(spec.window if spec.window < max_model_len else 0, []).append(index)
        widest = 0 if 0 in kinds else max(kinds)
        layouts = [cls(specs, (GroupSpec(widest, tuple(range(len(specs)))),), block_size, format)]
        in_order = sorted(kinds, key=lambda window: (window > 0, -window))
        for size in range(1, max(map(len, kinds.values())) + 1):
            groups = tuple(
                GroupSpec(window, tuple(kinds[window][first : first + size]))
                for window in in_order
                for first in range(0, len(kinds[window]), size)
            )
            if len(groups) <= MAX_GROUPS:
                layouts.append(cls(specs, groups, block_size, format))
        costs = [layout.request_blocks(max_model_len) * layout.block_elements for layout in layouts]
        few = [pair for pair in zip(costs, layouts, strict=True) if pair[0] <= (1 + WORTH_GROUPS) * min(costs)]
        return min(few, key=lambda pair: (len(pair[1].groups), pair[0]))[1]

    def of_stage(self, specs: Sequence[KVSpec], layers: Sequence[int]) -> KVLayout:
        """Of some of the layers, alike in everything that a scheduler sees: each of the groups here gets about as many
        of them. specs: of these layers, as this rank has them."""
        dealt: list[list[int]] = [[] for _ in self.groups]
        alike: dict[int, list[int]] = {}  # window → its groups
        for index, group in enumerate(self.groups):
            alike.setdefault(group.window, []).append(index)
        for place, layer in enumerate(layers):
            window = next(group.window for group in self.groups if layer in group.layers)
            emptiest = min(alike[window], key=lambda index: len(dealt[index]))
            dealt[emptiest].append(place)
        groups = tuple(GroupSpec(group.window, tuple(mine)) for group, mine in zip(self.groups, dealt, strict=True))
        return KVLayout(tuple(specs), groups, self.block_size, self.format)

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def history_group(self) -> int | None:
        """The group with whose blocks the tokens of sequences lie; None: none keeps whole ones."""
        return self.windows.index(0) if 0 in self.windows else None

    @property
    def page_bytes(self) -> int:
        """Of the tokens that lie with a block."""
        return 0 if self.history_group is None else 4 * self.block_size

    def row_bytes(self, max_model_len: int) -> int:
        """Of a request's tables that grow with the context: its blocks in each group, and where no group keeps whole
        sequences its tokens, with a table of their own."""
        own = 0 if self.page_bytes else 1 + self.block_size
        return 4 * (len(self.groups) + own) * -(-max_model_len // self.block_size)

    @property
    def places(self) -> list[list[int]]:
        """The layers that share each storage, one of a group at most."""
        most = max(len(group.layers) for group in self.groups)
        return [[group.layers[i] for group in self.groups if i < len(group.layers)] for i in range(most)]

    @property
    def block_elements(self) -> int:
        """Numbers in a block."""
        return self.block_size * sum(max(self.specs[i].token_elements for i in place) for place in self.places)

    def block_bytes(self, number_bytes: int) -> int:
        """With its scales; number_bytes: of an element of the activations."""
        format, specs = self.format, self.specs
        scales = sum(max(format.scale_bytes(specs[i]) for i in place) for place in self.places)
        return self.block_elements * format.item_bytes(number_bytes) + self.block_size * scales

    def request_blocks(self, num_tokens: int, chunk: int = 1) -> int:
        """That a request has at most when steps compute up to `chunk` of its tokens; 1: while it decodes."""
        return sum(blocks_held(num_tokens, group.window, chunk, self.block_size) for group in self.groups)

    def longest_request(self, num_blocks: int, chunk: int, max_model_len: int) -> int:
        """Tokens of a request that so many blocks hold, the null block among them."""
        return longest_request(self.windows, num_blocks, chunk, self.block_size, max_model_len)


def kv_layout(
    model: Model, block_size: int, max_model_len: int, format: KVFormat = NUMBERS, drafting: Sequence[KVSpec] = ()
) -> KVLayout:
    """Of the layers that this rank has, and of those that draft: of a stage, with the groups of the whole model."""
    config, stage = model.config, model.place.stage
    if stage.count == 1:
        return KVLayout.of([*model.kv_specs(), *drafting], block_size, max_model_len, format)
    whole = KVLayout.of(config.kv_specs(), block_size, max_model_len, format)
    return whole.of_stage(model.kv_specs(), config.kv_places(stage.indices(len(config.layers))))


def blocks_held(num_tokens: int, window: int, chunk: int, block_size: int) -> int:
    """Blocks that a request of `num_tokens` has at most at one moment, when steps compute up to `chunk` of its tokens.

    A step sees its own tokens and, with a window (0: none), the window - 1 before them, wherever in a block they begin.
    """
    every = -(-num_tokens // block_size)
    if not window:
        return every
    return min(every, -(-(window + chunk - 2) // block_size) + 1)


def longest_request(windows: Sequence[int], num_blocks: int, chunk: int, block_size: int, max_model_len: int) -> int:
    """Tokens of a request that `num_blocks` blocks, the null block among them, hold while it is alone.

    `windows`: of each KV group. A multiple of block_size; where all groups have windows, the context is the limit.
    """
    most = num_blocks - 1 if 0 in windows else -(-max_model_len // block_size)

    def needed(blocks: int) -> int:
        return sum(blocks_held(blocks * block_size, window, chunk, block_size) for window in windows)

    return bisect_right(range(1, most + 1), num_blocks - 1, key=needed) * block_size
