"""Llama 2, 3 and 3.x, and the many models that took their shape (Yi, SmolLM, TinyLlama, Vicuna, …)."""

from __future__ import annotations

from .blocks import CausalLM


class LlamaForCausalLM(CausalLM):
    """The blocks as they are; biases come from the config."""
