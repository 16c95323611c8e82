"""The MLP between two products."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows
from ..families.layer_spec import MLPSpec
from ..layers.linear import Linear
from ..quant.weights import Placement, WeightMap, keep_at_hand


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up fused into one product."""

    def __init__(self, spec: MLPSpec, hidden: int, place: Placement) -> None:
        super().__init__()
        assert spec.gated, "there is no MLP without gate yet"
        inner, bias = spec.inner, spec.bias
        parts = {"gate_up": 2 * inner} if spec.fused else {"gate": inner, "up": inner}
        self.activation = spec.activation
        pieces = {"gate_up": (inner, inner)}
        self.gate_up = Linear(hidden, parts, place=place, rule="column", bias=bias, pieces=pieces)
        self.down = Linear(inner, {"out": hidden}, place=place, rule="row", bias=bias)
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.{part}_proj": (self.gate_up, part) for part in self.gate_up.shape.parts}
        return found | {f"{prefix}.down_proj": (self.down, "out")}

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        return self.down.add_to(residual, self.gate_up.activate(x, self.activation, self.down))
