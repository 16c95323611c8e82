"""What a probe of transformers' model finds: where attention is called, which products share an input, which norms, and
how transformers' own plan divides all that over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..families.layer_spec import AttentionSpec, LayerSpec


@dataclass(frozen=True)
class Cut:
    """How one matrix is divided: a product's, or the stacked ones of experts."""

    rule: Literal["column", "row"]  # as LinearShape has it
    length: int  # of the rows, or columns, that are divided
    unit: int = 1  # of these that stay together: a head
    whole: bool = False  # column: each rank gets the results of all; row: each has all of the input
    packed: bool = False  # of experts: two halves, each of which is divided


@dataclass(frozen=True)
class Layout:
    """Paths are those of the model with its head ("model.layers.0.self_attn")."""

    attention: tuple[str, ...]  # the modules that call attention, in their order; one a layer of the config
    products: tuple[str, ...]  # nn.Linear modules that are called
    siblings: tuple[tuple[str, ...], ...]  # of these, those of one module that multiply the same input
    norms: Mapping[str, tuple[float, bool]]  # RMS norms → (eps, whether their weights are less one)
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # of products, and of parameters
    summed: tuple[str, ...] = ()  # experts: each rank has a summand of their results
    undivided: str = "it was not looked at"  # why it cannot be divided; "": it can

    def is_divided(self, attention: str) -> bool:
        """Whether each rank has some of its heads."""
        return any(cut.rule == "column" and not cut.whole for cut in self._cuts_of(attention))

    def fault(self, layers: Sequence[LayerSpec], size: int) -> str | None:
        """What cannot be divided over so many ranks, for people."""
        for path, layer in zip(self.attention, layers, strict=True):
            spec = layer.attention
            if not self.is_divided(path) or not isinstance(spec, AttentionSpec):
                continue
            heads, keys = spec.num_heads, spec.num_kv_heads
            whole_heads = all(cut.unit > 1 for cut in self._cuts_of(path) if cut.rule == "column")
            if heads % size or (keys % size and (size % keys or not whole_heads)):
                return f"{heads} attention heads over {keys} of keys and values"
        for path, cut in self.cuts.items():
            units = cut.length // cut.unit // (2 if cut.packed else 1)
            if units % size and (cut.unit == 1 or size % units):
                what = "rows" if cut.rule == "column" else "columns"
                return f"{units} heads of {path}" if cut.unit > 1 else f"{units} {what} of {path}"
        return None

    def _cuts_of(self, attention: str) -> list[Cut]:
        return [cut for path, cut in self.cuts.items() if path.rpartition(".")[0] == attention]
