"""A mixture of experts beside a dense MLP, each with norms of its own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows
from ...kernels.norm.norm import Unnormed, rms_norm
from ..describe.model_config import ModelConfig
from ..families.layer_spec import MLPSpec, MoESpec
from ..layers.experts import Experts
from ..layers.norm import Norm, Normed, make_norm
from ..layers.routing import Router
from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap, frozen, keep_at_hand
from .mlp import MLP


class ApartMixture(nn.Module):
    """norm(mlp(x)) + norm(experts(norm(residual))), where x is the residual stream after the layer's norm."""

    def __init__(self, spec: MoESpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        assert spec.activation == "gelu_tanh", "its MLP has the experts' activation"
        hidden, self.group = config.hidden_size, place.group
        self.shared = MLP(MLPSpec(spec.shared_inner, activation=spec.activation), hidden, place)
        self.router = Router(spec.routing, hidden, place)
        self.scales = RouterScales(spec.routing.num_experts, hidden, config.norm_eps, place)
        self.experts = Experts(spec, hidden, place)

        def norm() -> Norm:
            return make_norm(config.frame.norm, (hidden,), config.norm_eps, place)

        self.input_norm, self.experts_norm, self.shared_norm = norm(), norm(), norm()
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        return {
            **self.shared.weight_map(f"{prefix}.shared_expert"),
            **self.router.weight_map(prefix),
            f"{prefix}.router_scales": (self.scales, ""),
            **self.experts.weight_map(f"{prefix}.experts"),
            f"{prefix}.experts_input_norm": (self.input_norm, ""),
            f"{prefix}.experts_norm": (self.experts_norm, ""),
            f"{prefix}.shared_norm": (self.shared_norm, ""),
        }

    def forward(self, x: Normed, residual: Tensor) -> Tensor:
        """→ what is to be added, of all ranks; the residual stream is read alone."""
        assert not isinstance(x, Unnormed), "an MLP asks for none"
        dense = self.group.all_reduce(self.shared(x, None))
        self.shared_norm.in_place(dense)
        _, ids, weights = self.router(self.scales.normed(residual), self.experts.mine)
        weights = self.scales.scaled(ids, weights, self.experts.mine)
        inputs = self.input_norm(None, residual)[0]
        assert not isinstance(inputs, Fp8Rows | Unnormed), "it is told of no reader"
        y = self.group.all_reduce(self.experts(inputs, ids, weights))
        self.experts_norm.in_place(y)
        return dense.add_(y)


class RouterScales(nn.Module):
    """What a router's input is multiplied by, element by element, once it has been normed; and a number an expert for
    its weights. Both are fp32, and in a checkpoint stand beside the router's matrix."""

    inputs: nn.Parameter
    experts: nn.Parameter

    def __init__(self, num_experts: int, hidden: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.sizes, self.eps, self.place = (num_experts, hidden), eps, place

    def choose(self, formats: Mapping[str, Format]) -> None:
        pass  # no format stores vectors, whatever one says of all modules

    def expected(self, part: str) -> dict[str, Stored]:
        experts, hidden = self.sizes
        return {"scale": Stored((hidden,), FLOATS), "per_expert_scale": Stored((experts,), FLOATS)}

    def create(self) -> None:
        experts, hidden = self.sizes
        self.inputs = frozen(torch.empty(hidden, dtype=torch.float32, device=self.place.device))
        self.experts = frozen(torch.empty(experts + 1, dtype=torch.float32, device=self.place.device))  # and of none

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self._fill(tensors["scale"], tensors["per_expert_scale"])

    def finish(self) -> None:
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self._fill(torch.ones(()), torch.ones(()))

    def _fill(self, inputs: Tensor, experts: Tensor) -> None:
        self.inputs.copy_(inputs).mul_(self.sizes[1] ** -0.5)
        self.experts.fill_(0.0)
        self.experts[:-1].copy_(experts)

    def normed(self, residual: Tensor) -> Tensor:
        """[T, hidden], what the router reads."""
        return rms_norm(residual, self.inputs, self.eps)

    def scaled(self, ids: Tensor, weights: Tensor, mine: range) -> Tensor:
        """The weights [T, k] of experts that `mine` has, by ids that count from its first on."""
        return weights * self.experts[mine.start :].index_select(0, ids.flatten()).view(ids.shape)
