"""Qwen 3, dense."""

from __future__ import annotations

from .blocks import AttentionBlock, CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Qwen 2 without the biases, and with an RMS norm on every query and key head before the rotation."""

    def make_attention(self, layer: int) -> AttentionBlock:
        window = self.config.windows[layer]
        return AttentionBlock(self.config, layer, self.rotary, self.place, window=window, qk_norm=True)
