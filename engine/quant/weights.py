"""Where weights live, how they are divided over ranks, and their way from a mapped file to the GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..parallel.group import ALONE, Group
from ..parallel.pipeline import WHOLE, Stage
from .format import Format, Stored

# Rows divided, every rank as many; the same with fewer for the last, as vocabularies want it; columns divided.
ShardRule = Literal["replicated", "column", "vocabulary", "row"]


@dataclass(frozen=True)
class Placement:
    """Dtype and device of a model's weights, and this rank's place among those that share the model: its stage, and
    among the ranks that divide the layers of that."""

    dtype: torch.dtype
    device: torch.device
    group: Group = ALONE
    whole_experts: bool = False  # experts are dealt to the ranks, never divided
    stage: Stage = WHOLE
    exact: bool = False  # on the CPU no product with codes computes in less than dtype

    @property
    def tp_rank(self) -> int:
        return self.group.rank

    @property
    def tp_size(self) -> int:
        return self.group.size

    def span(self, length: int, unit: int = 1) -> tuple[int, int]:
        """(start, length) of this rank's share of `length` rows or columns, cut between units (a unit = one head).

        Where there are fewer units than ranks, neighbouring ranks hold the same one (key and value heads).
        Raises ValueError when the units do not divide evenly.
        """
        units = length // unit
        if units % self.tp_size == 0:
            share = length // self.tp_size
            return self.tp_rank * share, share
        if self.tp_size % units == 0:
            return self.tp_rank * units // self.tp_size * unit, unit
        raise ValueError(f"{units} parts cannot be divided over {self.tp_size} ranks: choose a divisor of {units}")

    def vocab_span(self, rows: int) -> tuple[int, int]:
        """The same of a vocabulary's rows, of which the last ranks may have fewer."""
        share = vocab_share(rows, self.tp_size)
        start = self.tp_rank * share
        return start, min(share, rows - start)

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised, frozen weight."""
        return frozen(torch.empty(shape, dtype=self.dtype, device=self.device))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def keep_at_hand(module: nn.Module) -> None:
    """nn.Module looks its parameters and modules up in three dictionaries, one after the other, when nothing else of
    that name is found. For what every layer and product needs that is too long."""
    module.__dict__.update({**module._parameters, **module._modules})


class LinearShape:
    """One matrix, or several that read the same input fused into one (q, k, v; gate, up), and this rank's share of it.

    parts: name → rows of the whole matrix, in their order in the output.
    rule: "column" divides every part's rows over the ranks, "row" divides the input; `unit` rows (columns) stay
    together. Raises ValueError where they do not divide.
    row_order: part → int64 [rows]: the checkpoint's row for each of the whole part here; parts not named keep theirs.
    pieces: part → rows of the matrices that the checkpoint has in it, one after the other: each is divided.
    units: of parts that have another unit.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        place: Placement,
        rule: ShardRule,
        unit: int,
        has_bias: bool,
        row_order: Mapping[str, Tensor] = {},
        pieces: Mapping[str, Sequence[int]] = {},
        units: Mapping[str, int] = {},
    ) -> None:
        self.in_features, self.parts, self.has_bias = in_features, dict(parts), has_bias
        self.row_order = dict(row_order)
        self.place, self.rule = place, rule
        self.input_span = place.span(in_features, unit) if rule == "row" else (0, in_features)
        self.spans: dict[str, tuple[int, int]] = {}  # part → (first row of the whole part, rows) that this rank holds
        self.offsets: dict[str, int] = {}  # part → its first row here
        self.rows = 0  # of this rank
        for name, rows in parts.items():
            self.spans[name] = (0, rows)
            if rule == "vocabulary":
                self.spans[name] = place.vocab_span(rows)
            elif rule == "column" and name in pieces and place.tp_size > 1:
                self.spans[name] = (0, self._take_of_pieces(name, pieces[name], unit))
            elif rule == "column":
                self.spans[name] = place.span(rows, units.get(name, unit))
            self.offsets[name] = self.rows
            self.rows += self.spans[name][1]

    def _take_of_pieces(self, part: str, pieces: Sequence[int], unit: int) -> int:
        """→ rows of this rank, which are the order of the part from here on."""
        rows, first = [], 0
        for size in pieces:
            start, share = self.place.span(size, unit)
            rows.append(torch.arange(first + start, first + start + share))
            first += size
        mine = torch.cat(rows)
        order = self.row_order.get(part)
        self.row_order[part] = mine if order is None else order[mine]
        return len(mine)

    def ordered(self, part: str, stored: Tensor) -> Tensor:
        """The rows of the whole part, from the checkpoint's order into the one here; of pieces, this rank's alone."""
        order = self.row_order.get(part)
        return stored if order is None else stored[order.to(stored.device)]

    def load_bias(self, target: Tensor, part: str, bias: Tensor) -> None:
        """target [rows of this rank]; bias: of the whole part, as stored."""
        start, size = self.spans[part]
        bias = self.ordered(part, bias)
        mine = target.narrow(0, self.offsets[part], size)
        if self.rule == "row" and self.place.tp_rank > 0:
            mine.zero_()  # the ranks' results are summed: only the first adds the bias
        else:
            mine.copy_(bias.narrow(0, start, size))


class WeightHolder(Protocol):
    """A module that takes tensors from a checkpoint. `part` names one of several matrices fused into one (q, k, v).

    Called in this order: choose, expected, create, load or randomize, finish.
    """

    def choose(self, formats: Mapping[str, Format]) -> None:
        """How the checkpoint stores the parts; those not named: as floats. Allocates nothing."""
        ...

    def expected(self, part: str) -> dict[str, Stored]:
        """Suffix in the checkpoint ("weight", "bias", …) → what is stored there, before any division over ranks."""
        ...

    def create(self) -> None:
        """Allocate what `load` fills."""
        ...

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's share of a part's tensors: suffix → tensor (any device, as stored, whole)."""
        ...

    def finish(self) -> None:
        """Called once when everything is loaded: the layout may change, kernels are chosen, workspaces made."""
        ...

    def randomize(self, generator: torch.Generator) -> None:
        """Fill with dummy weights."""
        ...


# Module path in the checkpoint → the holder that takes its tensors, and as which part.
WeightMap = dict[str, tuple[WeightHolder, str]]


ROWS = 64  # of the vocabulary that stay together


def vocab_share(vocab_size: int, size: int) -> int:
    """Rows of the output matrix that every rank has but the last ones, which may have fewer."""
    share = -(-vocab_size // size)
    if vocab_size < ROWS * size * size:  # or ranks would be left without any
        return share
    return -(-share // ROWS) * ROWS


PIECE = 8 << 20  # bytes
SMALL = 1 << 20  # bytes that are not worth it

_own = threading.local()


def copy_weight(target: Tensor, source: Tensor) -> None:
    """target = source, of the same shape; for what the current stream does from here on."""
    alike = source.dtype == target.dtype and target.is_contiguous()
    in_rows = source.is_contiguous() or (
        source.dim() == 2 and source.stride(1) == 1 and source.shape[1] * source.itemsize <= PIECE
    )
    if target.is_cuda and source.device.type == "cpu" and alike and in_rows and source.nbytes > SMALL:
        staging: Staging | None = getattr(_own, "staging", None)
        if staging is None or staging.device != target.device:
            staging = _own.staging = Staging(target.device)
        staging.copy(target, source)
    else:
        target.copy_(source)


class Staging:
    """One thread's way to a device: two buffers that take turns, and a stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target = source, of the same shape and dtype, from host memory. Done when it returns.

        target is contiguous, source too, or a matrix whose rows are (some columns of a larger one).
        """
        to = target.view(-1).view(torch.uint8)
        width = 1 if source.is_contiguous() else source.shape[1] * source.itemsize  # bytes that stay together
        rows = None if source.is_contiguous() else source.view(torch.uint8).numpy()
        step = PIECE // width * width
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still use what lay there
        with torch.cuda.stream(self._stream):
            for turn, start in enumerate(range(0, source.nbytes, step)):
                buffer, sent = self._buffers[turn % 2], self._sent[turn % 2]
                sent.synchronize()
                size = min(step, source.nbytes - start)
                # One thread's work, whereas torch's copy in host memory starts as many threads as there are cores.
                if rows is None:
                    ctypes.memmove(buffer.data_ptr(), source.data_ptr() + start, size)
                else:
                    packed = buffer[:size].numpy().reshape(-1, width)
                    np.copyto(packed, rows[start // width : (start + size) // width])
                to[start : start + size].copy_(buffer[:size], non_blocking=True)
                sent.record()
        self._stream.synchronize()
