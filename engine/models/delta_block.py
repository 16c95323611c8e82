"""A gated delta net between its products: one makes queries, keys, values and output gates, one the output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..describe.model_config import ModelConfig
from ..families.layer_spec import DeltaSpec
from ..layers.attention import AttentionBatch
from ..layers.delta import DeltaNet
from ..layers.linear import Linear
from ..quant.weights import Placement, WeightMap, keep_at_hand
from .state_block import StateBlock


class DeltaBlock(StateBlock):
    """Fused projections of q, k, v and z; another one of what decides of strength (b) and decay (a), which checkpoints
    leave in 16 bits; the delta net; output projection."""

    name = "linear_attn"  # in the checkpoint

    def __init__(self, spec: DeltaSpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        heads, hidden, keys = spec.num_value_heads, config.hidden_size, spec.key_size
        share = spec.share(place.tp_size)
        self.sizes = [share.channels, share.value_size]
        parts, gates = {"qkv": spec.channels, "z": spec.value_size}, {"b": heads, "a": heads}
        pieces = {"qkv": (keys, keys, spec.value_size), "qkvz": (keys, keys, spec.value_size, spec.value_size)}
        order: Mapping[str, Tensor] = {}
        if spec.by_head:
            parts, gates = {"qkvz": spec.channels + spec.value_size}, {"ba": 2 * heads}
            values = spec.value_size // spec.num_key_heads
            order = {
                "qkvz": _by_part(spec.num_key_heads, [spec.key_dim, spec.key_dim, values, values]),
                "ba": _by_part(spec.num_key_heads, [heads // spec.num_key_heads] * 2),
            }
        self.input = Linear(
            hidden, parts, place=place, rule="column", pieces=pieces,
            row_order={part: rows for part, rows in order.items() if part in parts},
        )  # fmt: skip
        self.gates = Linear(
            hidden, gates, place=place, rule="column", pieces={"ba": (heads, heads)},
            row_order={part: rows for part, rows in order.items() if part in gates},
        )  # fmt: skip
        self.state = DeltaNet(spec, config.norm_eps, place)
        self.output = Linear(spec.value_size, {"out": hidden}, place=place, rule="row", unit=spec.value_dim)
        keep_at_hand(self)

    def _input_weights(self, prefix: str) -> WeightMap:
        return {
            f"{prefix}.in_proj_{part}": (linear, part)
            for linear in (self.input, self.gates)
            for part in linear.shape.parts
        }

    def mix(self, x: Tensor, batch: AttentionBatch) -> Tensor:
        mixed, z = self.input(x).split(self.sizes, dim=1)
        return self.state(mixed, self.gates(x), z, batch.state)


def _by_part(num_heads: int, sizes: list[int]) -> Tensor:
    """Rows that the file has by head, each with its share of every part, put part by part: int64 [all rows]."""
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
