"""What blocks have in common whose mixer keeps a recurrent state, between its products."""

from __future__ import annotations

from torch import Tensor, nn

from ..layers.attention import AttentionBatch
from ..layers.linear import Linear
from ..layers.state import StateLayer
from ..quant.weights import WeightMap


class StateBlock(nn.Module):
    """A product of the input, what keeps the state, a product of its result."""

    name: str  # in the checkpoint
    input: Linear
    state: StateLayer
    output: Linear

    def weight_map(self, prefix: str) -> WeightMap:
        return (
            self._input_weights(prefix) | self.state.weight_map(prefix) | {f"{prefix}.out_proj": (self.output, "out")}
        )

    def _input_weights(self, prefix: str) -> WeightMap:
        return {f"{prefix}.in_proj": (self.input, "in")}

    def mix(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        """[T, hidden] → [T, columns of the output's matrix]. The step's tokens go into the state."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None
    ) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        out = self.mix(x, batch)
        if wanted is not None:
            return self.output(out.index_select(0, wanted))
        return self.output.add_to(residual, out)
