"""Mamba-2 over its state: where the kernels meet the step's batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.state.group_norm import gated_group_norm
from ...kernels.state.scan import scan
from ...kernels.state.scan_decode import ScanWeights
from ...kernels.state.step import StateStep
from ..families.layer_spec import ScanSpec
from ..quant.weights import Placement, WeightMap
from .norm import Norm, make_norm
from .state import StateLayer, Vectors


class Scan(StateLayer):
    """One layer: a short convolution, the recurrence, output gates with the norm of groups that goes with them."""

    def __init__(self, spec: ScanSpec, eps: float, place: Placement) -> None:
        super().__init__(spec.state)
        self.scan, self.eps = spec, eps
        bias = {"bias": (spec.channels,)} if spec.conv_bias else {}
        self.conv = Vectors({"weight": (spec.channels, 1, spec.conv_width), **bias}, place.dtype, place)
        heads = (spec.num_heads,)
        self.steps = Vectors({"A_log": heads, "D": heads, "dt_bias": heads}, torch.float32, place)
        self.norm: Norm | None = make_norm("rms", (spec.inner,), eps, place) if spec.norm else None

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {f"{prefix}.conv1d": (self.conv, ""), prefix: (self.steps, "")}
        return found if self.norm is None else {**found, f"{prefix}.norm": (self.norm, "")}

    def forward(self, mixed: Tensor, dt: Tensor, z: Tensor, step: StateStep | None) -> Tensor:
        """mixed [T, C] (values, what is written, what is read), dt [T, H], z [T, H·P] → [T, H·P]. The step's tokens go
        into ring and state. Without slots (the memory profiling run) nothing is kept: zeros of the right shape."""
        ring, matrices, spec = self.ring, self.matrices, self.scan
        if ring is None or matrices is None:
            beside = z.new_empty(len(z), spec.channels)  # the convolution's result, which prompts have
            found = z.new_zeros(z.shape)
            del beside
            return found
        assert step is not None
        weights = ScanWeights(
            self.conv.weight.view(spec.channels, -1), self.conv.bias if spec.conv_bias else None,
            self.steps.A_log, self.steps.D, self.steps.dt_bias, spec.limits,
        )  # fmt: skip
        y = scan(mixed, dt, weights, ring, matrices, step, spec.num_groups).flatten(1)
        weight = None if self.norm is None else self.norm.weight
        return gated_group_norm(y, z, weight, spec.num_groups, self.eps, spec.norm or "gate_first")
