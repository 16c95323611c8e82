"""Token ids → vectors, and vectors → logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.linear.fp8_rows import Fp8Rows
from ...kernels.sampling.argmax import best_of_pieces, of_pieces
from ..quant.decoded import decoded
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.unquantized import Tied
from ..quant.weights import Placement, copy_weight, vocab_share
from .linear import Adapter, Linear


class Table(nn.Module):
    """A row of the table for each id, in the activations' dtype however it is stored. Every rank holds the whole
    table: it is small beside the layers.

    `scale`, rounded to the activations' dtype, multiplies what is looked up.
    """

    weight: nn.Parameter
    _format: Format | None = None

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, scale: float = 1.0) -> None:
        super().__init__()
        self.size, self.place = (vocab_size, hidden_size), place
        self.scale: float = torch.tensor(scale, dtype=place.dtype).item()

    def choose(self, formats: Mapping[str, Format]) -> None:
        self._format = formats.get("")

    def expected(self, part: str) -> dict[str, Stored]:
        return {"weight": Stored(self.size, FLOATS)} if self._format is None else self._format.expected(*self.size)

    def create(self) -> None:
        self.weight = self.place.empty(*self.size)

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if self._format is None:
            copy_weight(self.weight, tensors["weight"])
        else:
            codes = decoded(self._format, tensors, *self.size, self.place.device)
            self.weight.copy_(codes.numbers(self.place.dtype))

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, DUMMY_STD, generator=generator)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[T] int32 or int64 → [T, hidden]."""
        found = functional.embedding(input_ids, self.weight)
        return found if self.scale == 1.0 else found.mul_(self.scale)


class Embedding(Table):
    """The table that is looked up first, to which adapters may add."""

    adapter: Adapter | None = None  # whose input are the ids

    def forward(self, input_ids: Tensor) -> Tensor:
        adapter = self.adapter
        if adapter is None or not adapter.active:
            return super().forward(input_ids)
        return adapter.added(input_ids, lambda: Table.forward(self, input_ids))


class LMHead(Linear):
    """Hidden states → logits, in fp32 because sampling sums over the whole vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, place: Placement, tied: Embedding | None = None, bias: bool = False
    ) -> None:
        super().__init__(hidden_size, {"out": vocab_size}, place=place, rule="vocabulary", bias=bias)
        self.vocab_size, self.group = vocab_size, place.group
        self.share = vocab_share(vocab_size, place.tp_size)
        if tied is not None:
            self.method = Tied(self.shape, lambda: tied.weight)

    def choose(self, formats: Mapping[str, Format]) -> None:
        if not isinstance(getattr(self, "method", None), Tied):
            super().choose(formats)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        """[N, hidden] of the selected rows → fp32 [N, vocab], on every rank."""
        return self.whole(self.part(x))

    def part(self, x: Tensor | Fp8Rows) -> Tensor:
        """[N, hidden] → fp32 [N, this rank's columns]."""
        assert isinstance(x, Tensor), "the last norm is told of no reader"
        if (adapter := self.active_adapter) is None:
            return self.method.multiply_fp32(x)
        return adapter.added(x, lambda: self.method.multiply_fp32(x))

    def whole(self, part: Tensor) -> Tensor:
        """The ranks' columns beside one another."""
        if self.group.size == 1:
            return part
        # Of all ranks alike: the last ones may have fewer columns.
        padded = functional.pad(part, (0, self.share - part.shape[1]))
        found = self.group.all_gather(padded, dim=0).split(len(part))
        return torch.cat([one[:, : self.vocab_size - rank * self.share] for rank, one in enumerate(found)], dim=1)

    def greatest(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """argmax of the ranks' columns, int32 [N], and whether its logit is finite, bool [N]: some numbers of a row are
        exchanged, where `whole` gathers it (70B over two cards, 256 rows: 0.4 ms of 38)."""
        best = best_of_pieces(part, self.group.rank * self.share, self.share)
        return of_pieces(self.group.all_gather(best))
