"""Qwen 2 and 2.5, QwQ."""

from __future__ import annotations

from .blocks import AttentionBlock, CausalLM


class Qwen2ForCausalLM(CausalLM):
    """Llama with a bias on q, k and v (by the config), and a window in the upper layers where it is switched on."""

    def make_attention(self, layer: int) -> AttentionBlock:
        return AttentionBlock(self.config, layer, self.rotary, self.place, window=self.config.windows[layer])
