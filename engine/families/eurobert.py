"""EuroBERT (Boizard et al., arXiv:2503.05500): Llama's layers, read both ways."""

from __future__ import annotations

from typing import Any

from . import llama
from .family import Family

DEFAULTS: dict[str, Any] = {
    **llama.DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "eos_token_id": 128001,
}

EUROBERT = Family("EuroBertForCausalLM", "eurobert", DEFAULTS, llama.layers, causal=False)
