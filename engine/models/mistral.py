"""Mistral 7B and its successors of the same shape (Nemo, Small)."""

from __future__ import annotations

from .blocks import AttentionBlock, CausalLM


class MistralForCausalLM(CausalLM):
    """Llama with a sliding window in every layer, where the config sets one."""

    def make_attention(self, layer: int) -> AttentionBlock:
        return AttentionBlock(self.config, layer, self.rotary, self.place, window=self.config.windows[layer])
