"""Tiny random heads that draft, in the formats that theirs are published in, and what plain code makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

EPS, THETA = 1e-6, 10_000.0


@dataclass(frozen=True)
class Sizes:
    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    vocab: int = 300
    scale: float = 1.0  # of random weights

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.dim,
            "vocab_size": self.vocab, "rms_norm_eps": EPS, "rope_theta": THETA, "num_hidden_layers": 1,
            "max_position_embeddings": 512, "hidden_act": "silu", "dtype": "float32",
        }  # fmt: skip


TINY = Sizes()


def _layer(name: str, inputs: int, sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25 * sizes.scale

    queries, keys = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    found = {f"{name}.self_attn.{key}.weight": random(count, inputs) for key, count in rows.items()}
    found[f"{name}.self_attn.o_proj.weight"] = random(sizes.hidden, queries)
    found |= {f"{name}.mlp.{part}_proj.weight": random(sizes.inner, sizes.hidden) for part in ("gate", "up")}
    found[f"{name}.mlp.down_proj.weight"] = random(sizes.hidden, sizes.inner)
    found[f"{name}.post_attention_layernorm.weight"] = 1 + 0.3 * torch.randn(sizes.hidden, generator=generator)
    return found


def eagle3(
    folder: Path, draft_vocab: int = 0, layer: str = "midlayer", sizes: Sizes = TINY, **changes: Any
) -> Path:  # fmt: skip
    """With the tokens 3, 5, 7 … where it has fewer than the target. layer: "layers.0" in the way of speculators."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, hidden, draft_vocab = torch.Generator().manual_seed(11), sizes.hidden, draft_vocab or sizes.vocab
    tensors = _layer(layer, 2 * hidden, sizes, generator)
    tensors["fc.weight"] = torch.randn(hidden, 3 * hidden, generator=generator) * 0.1 * sizes.scale
    for name in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    tensors["lm_head.weight"] = torch.randn(draft_vocab, hidden, generator=generator) * 0.3 * sizes.scale
    if draft_vocab < sizes.vocab:
        tensors["d2t"] = torch.arange(draft_vocab) + 3
        tensors["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool)
        tensors["t2d"][torch.arange(draft_vocab) + tensors["d2t"]] = True
    config = {**sizes.config(), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab, **changes}
    if layer == "layers.0":
        inner = {key: config[key] for key in sizes.config()}
        rest = {"draft_vocab_size": draft_vocab, "target_hidden_size": None, "norm_before_residual": True, **changes}
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
                  "transformer_layer_config": inner, **rest}  # fmt: skip
    return _save(folder, config, tensors)


def eagle(folder: Path, bias: bool = False, sizes: Sizes = TINY, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator, hidden = torch.Generator().manual_seed(12), sizes.hidden
    tensors = _layer("layers.0", hidden, sizes, generator)
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2 * sizes.scale
    if bias:
        tensors["fc.bias"] = torch.randn(hidden, generator=generator)
    tensors["embed_tokens.weight"] = torch.randn(sizes.vocab, hidden, generator=generator)
    return _save(folder, {**sizes.config(), "architectures": ["LlamaForCausalLM"], "bias": bias, **changes}, tensors)


def with_drafting_layer(folder: Path, own: bool) -> Path:
    """Of a model that transformers has saved, the last layer becomes the one that drafts. own: with an embedding and
    an output matrix that are not the model's."""
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    config["num_nextn_predict_layers"] = 1
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:last]
    (file,) = folder.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(13)
    hidden, vocab, prefix = config["hidden_size"], config["vocab_size"], f"model.layers.{last}"
    tensors[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    table, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if own:
        table, output = (torch.randn(vocab, hidden, generator=generator) * 0.3 for _ in range(2))
    tensors[f"{prefix}.embed_tokens.weight"] = table.clone()
    tensors[f"{prefix}.shared_head.head.weight"] = output.clone()
    return _save(folder, config, tensors)


def with_mtp(folder: Path) -> Path:
    """Of a hybrid that transformers has saved, whose last layer has attention, that layer becomes the one that drafts:
    "mtp.…" as in Qwen 3.5. And a second one, which nobody reads."""
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    config["layer_types"] = config["layer_types"][:last]
    config["mtp_num_hidden_layers"] = 1
    (file,) = folder.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(13)
    begin = f"model.layers.{last}."
    tensors = {name.replace(begin, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    tensors["mtp.layers.1.mlp.up_proj.weight"] = torch.zeros(1)
    hidden = config["hidden_size"]
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(hidden, generator=generator)
    return _save(folder, config, tensors)


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ---- plain ----
def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, dim]."""
    dim = x.shape[-1]
    angles = positions[:, None] * THETA ** (-torch.arange(0, dim, 2) / dim)
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
        """token_ids [T]: those behind; hidden [T, hidden] → the same."""
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
        q, k, v = (
            functional.linear(x, t[f"{name}.self_attn.{p}_proj.weight"]).unflatten(-1, (-1, TINY.dim)) for p in "qkv"
        )
        q, k = _rotate(q, positions), _rotate(k, positions)
        k, v = (heads.repeat_interleave(TINY.heads // TINY.kv_heads, dim=1) for heads in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / TINY.dim**0.5
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
        every = torch.full((TINY.vocab,), float("-inf"))
        every[torch.arange(len(logits)) + self.t["d2t"]] = logits
        return every

    def drafts(self, history: list[int], count: int, draw: Any) -> list[int]:
        """draw(logits [vocab], place) → the token there."""
        tokens = torch.tensor(history)
        hidden, found = self.think(tokens[:-1]), []
        tokens = tokens[1:]
        for _ in range(count):
            out = self.run(tokens, hidden)
            token = int(draw(self.logits(out[-1]), len(history) + len(found)))
            found.append(token)
            tokens, hidden = torch.cat((tokens, torch.tensor([token]))), torch.cat((hidden, out[-1:]))
        return found


class PlainLayer(Plain):
    """Of a layer behind the last one: `model` is transformers', with one layer more than the target."""

    def __init__(self, tensors: dict[str, Tensor], model: Any) -> None:
        *_, self.last = model.model.layers
        model.model.layers = model.model.layers[:-1]
        super().__init__(tensors, model)
        self.prefix = f"model.layers.{len(model.model.layers)}"

    def think(self, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.target.model(token_ids[None], use_cache=False)
        return out.last_hidden_state[0]

    def run(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        t, prefix = self.t, self.prefix
        embedded = norm(t[f"{prefix}.embed_tokens.weight"][token_ids], t[f"{prefix}.enorm.weight"])
        both = torch.cat((embedded, norm(hidden, t[f"{prefix}.hnorm.weight"])), dim=-1)
        return self.behind(functional.linear(both, t[f"{prefix}.eh_proj.weight"])[None])

    def behind(self, x: Tensor) -> Tensor:
        """What the layer makes of x [1, T, hidden]."""
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
        rotated = self.target.model.rotary_emb(x, position_ids=positions)
        out = self.last(x, attention_mask=mask, position_ids=positions, position_embeddings=rotated)
        return (out if isinstance(out, Tensor) else out[0])[0]

    def logits(self, hidden: Tensor) -> Tensor:
        normed = norm(hidden, self.t[f"{self.prefix}.shared_head.norm.weight"])
        return functional.linear(normed, self.t[f"{self.prefix}.shared_head.head.weight"])


class PlainMTP(PlainLayer):
    """Qwen 3.5's: fc over the normed embedding and hidden state, a layer with attention, a norm, the model's output
    matrix. It goes on with what that norm has made. Norms multiply by one more than their weight."""

    def run(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        t = self.t
        embedded = norm(t["model.embed_tokens.weight"][token_ids], 1 + t["mtp.pre_fc_norm_embedding.weight"])
        both = torch.cat((embedded, norm(hidden, 1 + t["mtp.pre_fc_norm_hidden.weight"])), dim=-1)
        out = self.behind(functional.linear(both, t["mtp.fc.weight"])[None])
        return norm(out, 1 + t["mtp.norm.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.target.lm_head.weight)
