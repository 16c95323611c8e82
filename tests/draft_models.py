"""Tiny random heads that draft, in the formats that theirs are published in, and what plain code makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, EPS, THETA = 64, 96, 4, 2, 16, 300, 1e-6, 10_000.0
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": VOCAB, "rms_norm_eps": EPS, "rope_theta": THETA,
    "num_hidden_layers": 1, "max_position_embeddings": 512, "hidden_act": "silu", "dtype": "float32",
}  # fmt: skip
LAYER = {
    "self_attn.k_proj.weight": KV_HEADS * DIM, "self_attn.v_proj.weight": KV_HEADS * DIM,
    "self_attn.q_proj.weight": HEADS * DIM,
}  # fmt: skip


def _layer(name: str, inputs: int, generator: torch.Generator) -> dict[str, Tensor]:
    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25

    found = {f"{name}.{key}": random(rows, inputs) for key, rows in LAYER.items()}
    found[f"{name}.self_attn.o_proj.weight"] = random(HIDDEN, HEADS * DIM)
    found |= {f"{name}.mlp.{part}_proj.weight": random(INNER, HIDDEN) for part in ("gate", "up")}
    found[f"{name}.mlp.down_proj.weight"] = random(HIDDEN, INNER)
    found[f"{name}.post_attention_layernorm.weight"] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    return found


def eagle3(folder: Path, draft_vocab: int = VOCAB, layer: str = "midlayer", **changes: Any) -> Path:
    """With the tokens 3, 5, 7 … where it has fewer than the target. layer: "layers.0" in the way of speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(11)
    tensors = _layer(layer, 2 * HIDDEN, generator)
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) * 0.1
    for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    tensors["lm_head.weight"] = torch.randn(draft_vocab, HIDDEN, generator=generator) * 0.3
    if draft_vocab < VOCAB:
        tensors["d2t"] = torch.arange(draft_vocab) + 3
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][torch.arange(draft_vocab) + tensors["d2t"]] = True
    config = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab, **changes}
    if layer == "layers.0":
        inner = {key: config[key] for key in CONFIG}
        rest = {"draft_vocab_size": draft_vocab, "target_hidden_size": None, "norm_before_residual": True, **changes}
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
                  "transformer_layer_config": inner, **rest}  # fmt: skip
    return _save(folder, config, tensors)


def eagle(folder: Path, bias: bool = False, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(12)
    tensors = _layer("layers.0", HIDDEN, generator)
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    if bias:
        tensors["fc.bias"] = torch.randn(HIDDEN, generator=generator)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return _save(folder, {**CONFIG, "architectures": ["LlamaForCausalLM"], "bias": bias, **changes}, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# ---- plain ----
def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, DIM]."""
    angles = positions[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None].repeat(1, 1, 2), angles.sin()[:, None].repeat(1, 1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Plain:
    """The layer over a whole text at once, without a cache."""

    def __init__(self, tensors: dict[str, Tensor], target: Any, normed_residual: bool = False) -> None:
        self.t, self.target, self.normed_residual = tensors, target, normed_residual
        self.is_third = "norm.weight" in tensors
        self.layer = "midlayer" if "midlayer.mlp.up_proj.weight" in tensors else "layers.0"

    def think(self, token_ids: Tensor) -> Tensor:
        """What the target thinks of each of these tokens."""
        with torch.no_grad():
            out = self.target.model(token_ids[None], output_hidden_states=True)
        if not self.is_third:
            return out.last_hidden_state[0]
        count = len(self.target.model.layers)
        taps = torch.cat([out.hidden_states[i][0] for i in (2, count // 2, count - 3)], dim=-1)
        return functional.linear(taps, self.t["fc.weight"])

    def run(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """token_ids [T]: those behind; hidden [T, HIDDEN] → [T, HIDDEN]."""
        t, name = self.t, self.layer
        table = t.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        embedded = table[token_ids]
        if self.is_third:
            normed = norm(hidden, t[f"{name}.hidden_norm.weight"])
            residual = normed if self.normed_residual else hidden
            x = torch.cat((norm(embedded, t[f"{name}.input_layernorm.weight"]), normed), dim=-1)
        else:
            both = torch.cat((embedded, hidden), dim=-1)
            residual = x = functional.linear(both, t["fc.weight"], t.get("fc.bias"))
        positions = torch.arange(len(x))
        q, k, v = (functional.linear(x, t[f"{name}.self_attn.{p}_proj.weight"]).unflatten(-1, (-1, DIM)) for p in "qkv")
        q, k = _rotate(q, positions), _rotate(k, positions)
        k, v = (heads.repeat_interleave(HEADS // KV_HEADS, dim=1) for heads in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        scores = scores.masked_fill(positions[None, :] > positions[:, None], float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = residual + functional.linear(attended, t[f"{name}.self_attn.o_proj.weight"])
        y = norm(residual, t[f"{name}.post_attention_layernorm.weight"])
        gate, up = (functional.linear(y, t[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        return residual + functional.linear(functional.silu(gate) * up, t[f"{name}.mlp.down_proj.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        if not self.is_third:
            return functional.linear(hidden, self.target.lm_head.weight)
        logits = functional.linear(norm(hidden, self.t["norm.weight"]), self.t["lm_head.weight"])
        if "d2t" not in self.t:
            return logits
        every = torch.full((VOCAB,), float("-inf"))
        every[torch.arange(len(logits)) + self.t["d2t"]] = logits
        return every

    def drafts(self, history: list[int], count: int, draw: Any) -> list[int]:
        """draw(logits [VOCAB], place) → the token there."""
        tokens = torch.tensor(history)
        hidden, found = self.think(tokens[:-1]), []
        tokens = tokens[1:]
        for _ in range(count):
            out = self.run(tokens, hidden)
            token = int(draw(self.logits(out[-1]), len(history) + len(found)))
            found.append(token)
            tokens, hidden = torch.cat((tokens, torch.tensor([token]))), torch.cat((hidden, out[-1:]))
        return found
