"""Decoders whose attention goes both ways, over texts that lie one behind the other."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.attention.rope import apply_rope_torch
from ...kernels.norm.norm import rms_norm
from ..layers.attention import Attention
from ..layers.packed import Packed
from .attention_block import AttentionBlock
from .blocks import CausalLM


class PackedAttention(nn.Module):
    """Of one layer, in the place of attention over a cache: norms of heads, rotation, and the texts at hand."""

    def __init__(self, cached: Attention) -> None:
        super().__init__()
        assert cached.sinks is None and not cached.scoring.soft_cap, "refused before"
        self.rotary, self.scoring, self.q_norm, self.k_norm = (
            cached.rotary, cached.scoring, cached.q_norm, cached.k_norm,
        )  # fmt: skip

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor, batch: Packed, last_only: bool = False
    ) -> Tensor:
        """query [T, H, D], key and value [T, KV, D] → [T, H·D]. query and key are overwritten."""
        for norm, heads in ((self.q_norm, query), (self.k_norm, key)):
            if norm is not None:
                rms_norm(heads, norm.weight, norm.eps, out=heads)
        apply_rope_torch(query, key, positions, self.rotary.cos_sin)
        self.rotary.scale(query, positions)
        return batch.attend(query, key, value, self.scoring.scale, self.scoring.window).flatten(1)


def attend_both_ways(model: CausalLM) -> None:
    """Once its weights are there."""
    for layer in model.layers:
        block = layer.mixer
        assert isinstance(block, AttentionBlock)
        block.attention = PackedAttention(block.attention)  # type: ignore[assignment]
