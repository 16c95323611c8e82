"""The only place that multiplies by weights: its method says how, its rule how it is divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels import cublaslt
from ...kernels.activation import silu_mul
from ...kernels.cublaslt import Algorithms, measured_linear
from ...kernels.linear import prepare, small_linear, small_linear_rows
from ...kernels.linear_hopper import HopperTiles, hopper_tiles, linear_hopper, silu_mul_linear_hopper
from .staging import copy_weight
from .weights import Placement

ShardRule = Literal["replicated", "column", "row"]
DUMMY_STD = 0.02  # of dummy weights: about what training starts from, so activations stay finite
ADD_ROWS = 448  # from so many on, to add to the residual costs a product less than it saves in the norm behind it


class LinearMethod(Protocol):
    """How a Linear stores its weights and multiplies."""

    def create(self, layer: Linear) -> None:
        """Allocate the layer's parameters for this rank's share."""
        ...

    def expected(self, layer: Linear, part: str) -> dict[str, tuple[int, ...]]:
        """The tensors of `part` in a checkpoint: suffix → whole shape."""
        ...

    def load(self, layer: Linear, part: str, tensor: Tensor, kind: str) -> None: ...

    def finish(self, layer: Linear) -> None: ...

    def randomize(self, layer: Linear, generator: torch.Generator) -> None: ...

    def apply(self, layer: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out] of this rank. residual [T, out], given from layer.add_rows rows on: is added to."""
        ...

    def apply_silu_mul(self, layer: Linear, x: Tensor) -> Tensor:
        """[T, in] → [T, out / 2]: silu(gate) · up of the layer's two parts."""
        ...

    def apply_fp32(self, layer: Linear, x: Tensor) -> Tensor:
        """The same as apply with a result in fp32, not rounded to the weights' dtype where the device can."""
        ...


class UnquantizedMethod:
    """Weights as they are: y = x Wᵀ + b."""

    def create(self, layer: Linear) -> None:
        rows = sum(size for _, size in layer.spans.values())
        layer.weight = layer.place.empty(rows, layer.input_span[1])
        layer.bias = layer.place.empty(rows) if layer.has_bias else None

    def expected(self, layer: Linear, part: str) -> dict[str, tuple[int, ...]]:
        rows = layer.parts[part]
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, layer.in_features)}
        if layer.has_bias:
            shapes["bias"] = (rows,)
        return shapes

    def load(self, layer: Linear, part: str, tensor: Tensor, kind: str) -> None:
        start, size = layer.spans[part]
        share = tensor.narrow(0, start, size)
        if kind == "weight":
            copy_weight(layer.weight.narrow(0, layer.offsets[part], size), share.narrow(1, *layer.input_span))
            return
        assert layer.bias is not None
        target = layer.bias.narrow(0, layer.offsets[part], size)
        if layer.rule == "row" and layer.place.tp_rank > 0:
            target.zero_()  # the ranks' results are summed: only the first adds the bias
        else:
            target.copy_(share)

    def finish(self, layer: Linear) -> None:
        if layer.weight.device.type == "cpu":
            # Stored column by column, a product with one row streams through the matrix: twice as fast with MKL.
            layer.weight.data = layer.weight.t().contiguous().t()
        elif layer.weight.device.type == "cuda":
            layer.small_rows = small_linear_rows(*layer.weight.shape, layer.weight.dtype)
            if layer.small_rows:
                prepare(layer.weight.device)
            if layer.bias is None:
                layer.algorithms = cublaslt.algorithms(*layer.weight.shape, layer.weight.dtype)
                layer.tiles = hopper_tiles(*layer.weight.shape, layer.weight.dtype, gated=False)
                layer.gated_tiles = hopper_tiles(*layer.weight.shape, layer.weight.dtype, gated=True)
                if layer.place.tp_size == 1 and layer.weight.dtype != torch.float32:
                    layer.add_rows = ADD_ROWS
            if layer.algorithms:
                cublaslt.prepare(layer.weight.device)

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        layer.weight.normal_(0.0, DUMMY_STD, generator=generator)
        if layer.bias is not None:
            layer.bias.normal_(0.0, DUMMY_STD, generator=generator)

    def apply(self, layer: Linear, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows <= layer.small_rows and residual is None:
            return small_linear(x, layer.weight, layer.bias)
        if layer.tiles and (tile := layer.tiles[min(rows, len(layer.tiles) - 1)]) is not None:
            return linear_hopper(x, layer.weight, tile, residual)
        if rows < len(layer.algorithms) and (algorithm := layer.algorithms[rows]) is not None:
            return measured_linear(x, layer.weight, algorithm, residual)
        if residual is not None:
            return residual.addmm_(x, layer.weight.t())
        return functional.linear(x, layer.weight, layer.bias)

    def apply_silu_mul(self, layer: Linear, x: Tensor) -> Tensor:
        tiles = layer.gated_tiles
        if tiles and (tile := tiles[min(x.shape[0], len(tiles) - 1)]) is not None:
            return silu_mul_linear_hopper(x, layer.weight, tile)
        return silu_mul(self.apply(layer, x))

    def apply_fp32(self, layer: Linear, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and layer.bias is None:
            return torch.mm(x, layer.weight.t(), out_dtype=torch.float32)
        return self.apply(layer, x).float()


class TiedMethod(UnquantizedMethod):
    """Multiplies by a weight that another module owns and loads (the output matrix tied to the embedding)."""

    def __init__(self, owner: nn.Parameter) -> None:
        self.owner = owner  # whole: [vocab, hidden]

    def create(self, layer: Linear) -> None:
        (start, size), *_ = layer.spans.values()
        whole = size == self.owner.shape[0]
        layer.weight = self.owner if whole else nn.Parameter(self.owner.narrow(0, start, size), requires_grad=False)
        layer.bias = None

    def finish(self, layer: Linear) -> None:
        if self.owner.device.type == "cpu":  # its own copy: the owner's rows are looked up, this one's are multiplied
            layer.weight = nn.Parameter(self.owner.t().contiguous().t(), requires_grad=False)

    def expected(self, layer: Linear, part: str) -> dict[str, tuple[int, ...]]:
        return {}

    def randomize(self, layer: Linear, generator: torch.Generator) -> None:
        pass  # its owner does


class Linear(nn.Module):
    """One matrix, or several that read the same input fused into one (q, k, v; gate, up).

    parts: name → rows of the whole matrix, in their order in the output.
    rule: "column" divides every part's rows over the ranks, "row" divides the input; `unit` rows (columns)
    stay together.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    small_rows: int = 0  # up to how many rows go to small_linear; known when the weights are loaded
    algorithms: Algorithms = ()  # by number of rows: cuBLAS's algorithm, where another than its own choice is faster
    tiles: HopperTiles = ()  # by number of rows: of linear_hopper, where that is faster than cuBLAS
    gated_tiles: HopperTiles = ()  # the same for silu_mul
    add_rows: int | None = None  # from how many rows on add_to takes one pass; None: never

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        place: Placement,
        rule: ShardRule = "replicated",
        unit: int = 1,
        bias: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.has_bias = in_features, parts, bias
        self.place, self.rule = place, rule
        self.input_span = place.span(in_features, unit) if rule == "row" else (0, in_features)
        self.spans: dict[str, tuple[int, int]] = {}  # part → (first row of the whole part, rows) that this rank holds
        self.offsets: dict[str, int] = {}  # part → its first row here
        offset = 0
        for name, rows in parts.items():
            self.spans[name] = place.span(rows, unit) if rule == "column" else (0, rows)
            self.offsets[name] = offset
            offset += self.spans[name][1]
        self.adapter: Callable[[Linear, Tensor, Tensor], Tensor] | None = None  # (layer, input, output) → output
        self.method: LinearMethod = method or UnquantizedMethod()
        self.method.create(self)

    def expected(self, part: str) -> dict[str, tuple[int, ...]]:
        return self.method.expected(self, part)

    def load(self, part: str, tensor: Tensor, kind: str = "weight") -> None:
        self.method.load(self, part, tensor, kind)

    def finish(self) -> None:
        self.method.finish(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.method.randomize(self, generator)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out], in the weights' dtype; for the row rule this rank's summand."""
        y = self.method.apply(self, x)
        return y if self.adapter is None else self.adapter(self, x, y)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor | None:
        """[T, in] → [T, out] that is to be added to residual [T, out]; None: it has been."""
        if self.add_rows is None or x.shape[0] < self.add_rows or self.adapter is not None:
            return self.forward(x)
        self.method.apply(self, x, residual)
        return None

    def silu_mul(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out / 2] of this rank: silu of the first part, times the second."""
        return self.method.apply_silu_mul(self, x) if self.adapter is None else silu_mul(self(x))
