"""A layer's MLP: between two products, or a mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...kernels.linear.fp8_rows import Fp8Rows
from ...kernels.norm.activation import silu_mul
from ..describe.model_config import ModelConfig
from ..families.layer_spec import Activation, LayerSpec, MLPSpec, MoESpec
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..layers.norm import Normed
from ..layers.routing import Router
from ..quant.weights import Placement, WeightMap, keep_at_hand


class MLP(nn.Module):
    """down(act(gate(x)) · up(x)), gate and up fused into one product; without gate, down(act(up(x)))."""

    def __init__(self, spec: MLPSpec, hidden: int, place: Placement) -> None:
        super().__init__()
        inner, bias = spec.inner, spec.bias
        parts = {"gate_up": 2 * inner} if spec.fused else {"gate": inner, "up": inner}
        if not spec.gated:
            assert not spec.fused and spec.activation == "relu2", "no decoder has another without gate"
            parts = {"up": inner}
        self.activation = spec.activation
        self.multipliers = None if spec.multipliers == (1.0, 1.0) else spec.multipliers
        assert self.multipliers is None or not bias, "biases would be multiplied, too"
        pieces = {"gate_up": (inner, inner)}
        self.gate_up = Linear(hidden, parts, place=place, rule="column", bias=bias, pieces=pieces)
        self.down = Linear(inner, {"out": hidden}, place=place, rule="row", bias=bias)
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.{part}_proj": (self.gate_up, part) for part in self.gate_up.shape.parts}
        return found | {f"{prefix}.down_proj": (self.down, "out")}

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None) -> Tensor | None:
        """→ what is to be added to residual; None: it has been. Where residual is None, the result is wanted itself."""
        if self.multipliers is None:
            return self.down.add_to(residual, self.gate_up.activate(x, self.activation, self.down))
        products = self.gate_up(x)
        for half, factor in zip(products.chunk(2, dim=1), self.multipliers, strict=True):
            half *= factor
        return self.down.add_to(residual, silu_mul(products))


class Mixture(nn.Module):
    """Σ_k w_k · expert_k(x) of the experts that the router chooses, and a shared one for all tokens."""

    def __init__(self, spec: MoESpec, hidden: int, place: Placement) -> None:
        super().__init__()
        self.router = Router(spec.routing, hidden, place)
        self.experts = Experts(spec, spec.latent or hidden, place)
        self.shared: MLP | None = None
        if spec.shared_inner:
            activation: Activation = "silu" if spec.gated else "relu2"
            shared = MLPSpec(spec.shared_inner, False, activation, spec.gated, spec.shared_fused)
            self.shared = MLP(shared, hidden, place)
        self.into_latent = Linear(hidden, {"out": spec.latent}, place=place) if spec.latent else None
        self.of_latent = Linear(spec.latent, {"out": hidden}, place=place) if spec.latent else None
        self.weighs_input = spec.weighs_input
        assert not spec.weighs_input or spec.routing.top_k == 1, "each of several experts would read something else"
        self.shared_gate = Linear(hidden, {"out": 1}, place=place) if spec.shared_gate else None

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {**self.router.weight_map(prefix), **self.experts.weight_map(f"{prefix}.experts")}
        if self.shared is not None:
            found |= self.shared.weight_map(f"{prefix}.shared_expert")
        if self.into_latent is not None and self.of_latent is not None:
            found[f"{prefix}.fc1_latent_proj"] = (self.into_latent, "out")
            found[f"{prefix}.fc2_latent_proj"] = (self.of_latent, "out")
        if self.shared_gate is not None:
            found[f"{prefix}.shared_expert_gate"] = (self.shared_gate, "out")
        return found

    def forward(self, x: Normed, residual: Tensor | None) -> Tensor | None:
        """→ None: all has been added to residual, which is rounded once. Where residual is None, the result itself."""
        assert not isinstance(x, Fp8Rows), "a router asks for none"
        normed, ids, weights = self.router(x, self.experts.mine)
        beside, inputs = None, normed
        if self.weighs_input:  # the experts' result is then taken as it is, where this rank has the expert
            here = ids < len(self.experts.mine)
            inputs, weights = normed * weights.sigmoid().to(normed.dtype), here.to(weights.dtype)
        if self.shared is not None:
            beside = self.shared(normed, None)
            if self.shared_gate is not None:
                beside *= torch.sigmoid(self.shared_gate(normed))
        if self.into_latent is not None and self.of_latent is not None:
            y = self.of_latent(self.experts(self.into_latent(inputs), ids, weights))
            y = y if beside is None else y.add_(beside)
            if residual is None:
                return y
            residual.add_(y)
            return None
        total: Tensor = self.experts(inputs, ids, weights, beside, residual)
        return total if residual is None else None


def has_experts(config: ModelConfig) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in config.layers)


def with_stored_experts(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    """The same with experts as the checkpoint has them, whose tensors' names and shapes are given: a tensor an expert,
    or one of all, in either direction. Libraries have changed their minds about it."""
    # What drafts, and is not loaded, may have its own in another way.
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(config.ignored)}
    single = any(re.search(r"\.experts\.\d+\.", name) for name in shapes)

    def as_stored(spec: MoESpec) -> MoESpec:
        if single:
            return replace(spec, stored="")
        if any(name.endswith(f".{spec.stacked_names[0]}_blocks") for name in shapes):
            return replace(spec, stored="blocks")
        hidden = config.hidden_size
        # One of the two is not square, and says it.
        for of, (rows, columns) in zip(
            spec.stacked_names, ((2 * spec.inner, hidden), (hidden, spec.inner)), strict=True
        ):
            found = next((shape for name, shape in shapes.items() if name.endswith(f".{of}")), ())
            if rows != columns and found[1:] in ((rows, columns), (columns, rows)):
                return replace(spec, stored="stacked" if found[1:] == (rows, columns) else "transposed")
        return spec

    def layer_as_stored(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mlp=as_stored(layer.mlp)) if isinstance(layer.mlp, MoESpec) else layer

    known = {layer: layer_as_stored(layer) for layer in set(config.layers)}  # of many layers, few differ
    return replace(config, layers=tuple(known[layer] for layer in config.layers))
