"""What a step does to the recurrent states of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class StateStep:
    """The states of one step, the same for all layers: B rows with T tokens in all.

    Row b has the tokens query_start[b] … query_start[b + 1] - 1 of the step, which stand at the positions from start[b]
    on. The first `num_decode_rows` rows have `decode_query_len` tokens each, or none (padding); the others, prompts or
    chunks of them, any number. A row without tokens or with slot 0 is padding: nothing is read or written for it, and
    results at its tokens are undefined, as they are at tokens of no row.

    Each layer has, by slot, a state S [num_slots, heads, K, V] of the positions below state_len[b], and a ring
    [num_slots, R, C + G] in which the inputs of position p lie at p % R: C channels of the convolution and G inputs of
    gates. The positions from state_len[b] to start[b] - 1, 1 + drafts at most, are pending: the step folds them into S
    first, from the ring. Then it computes its tokens, and folds those below fold_to[b]. R must be a power of two, and
    at least conv_width - 1 + 2 * (1 + drafts): what a decode row writes is then never what it reads.

    All tensors int32, contiguous, on the device: slots, start, state_len, fold_to, snap_at, snap_slot [B]; query_start
    [B + 1]. start <= fold_to <= start + tokens of the row, and fold_to = start for decode rows. state_len 0: the state
    is zeros and so are the inputs before position 0; neither is read. snap_at: 0, or a multiple of 64; where state_len
    < snap_at <= fold_to, S after that many tokens, and the channels of the ring at the conv_width - 1 positions before
    it, are written to snap_slot, too. No two rows have the same slot, nor is a snap_slot any row's slot.
    """

    slots: Tensor
    start: Tensor
    state_len: Tensor
    fold_to: Tensor
    snap_at: Tensor
    snap_slot: Tensor
    query_start: Tensor
    num_decode_rows: int
    decode_query_len: int = 1

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @cached_property
    def decodes(self) -> StateStep:
        """The decode rows alone."""
        return self._part(0, self.num_decode_rows, self.num_decode_rows)

    @cached_property
    def prompts(self) -> StateStep:
        """The rows behind the decode rows."""
        return self._part(self.num_decode_rows, self.num_rows, 0)

    def _part(self, first: int, last: int, num_decode_rows: int) -> StateStep:
        if (first, last) == (0, self.num_rows) and num_decode_rows == self.num_decode_rows:
            return self
        rows = slice(first, last)
        return StateStep(
            self.slots[rows], self.start[rows], self.state_len[rows], self.fold_to[rows], self.snap_at[rows],
            self.snap_slot[rows], self.query_start[first : last + 1], num_decode_rows, self.decode_query_len,
        )  # fmt: skip

    def on_host(self) -> list[HostRow]:
        """The rows that are no padding."""
        starts = self.query_start.tolist()
        columns = (self.slots, self.start, self.state_len, self.fold_to, self.snap_at, self.snap_slot)
        decodes = [index < self.num_decode_rows for index in range(self.num_rows)]
        rows = zip(*(column.tolist() for column in columns), starts[:-1], starts[1:], decodes, strict=True)
        return [found for row in rows if (found := HostRow(*row)).slot and found.first < found.end]


@dataclass(frozen=True, slots=True)
class HostRow:
    """A row of a step for the twins."""

    slot: int
    start: int
    state_len: int
    fold_to: int
    snap_at: int
    snap_slot: int
    first: int  # of its tokens in the step
    end: int  # behind the last one
    decodes: bool

    @property
    def snaps(self) -> bool:
        return self.state_len < self.snap_at <= self.fold_to
