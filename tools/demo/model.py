"""The demo model in plain torch, for training; parameters and arithmetic are transformers' LlamaForCausalLM's.

transformers' own module spends most of a step of so small a model on norms and rotations made of many little
operations.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizer import END_OF_TEXT_ID, IM_END_ID
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

# 4.53 million parameters: 9 MB in bfloat16.
CONFIG = LlamaConfig(
    vocab_size=1536,
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=640,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=IM_END_ID,
    pad_token_id=END_OF_TEXT_ID,
)
ROPE_THETA = 10_000.0  # LlamaConfig's default
# Close to greedy: at temperature 1 so small a model would now and then pick a wrong digit.
GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.1,
    "eos_token_id": IM_END_ID,
    "pad_token_id": END_OF_TEXT_ID,
}


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Tokens [rows, length] to logits [rows, length, vocab_size]. The names of its parameters are transformers'."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
                "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
            }
        )
        frequencies = ROPE_THETA ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # What adds to the residual stream starts smaller, by its depth (GPT-2, section 2.3).
                parameter.data.div_((2 * config.num_hidden_layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        embed = self.model["embed_tokens"]
        x = embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        return F.linear(self.model["norm"](x), embed.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, length, head_dim], halves rotated against each other as Llama does."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def save_model(model: nn.Module, folder: Path) -> None:
    """Writes the model into `folder` in bfloat16, each file whole or not at all."""
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    llama = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the output matrix is the embedding
        raise RuntimeError(f"weights do not fit LlamaForCausalLM: missing {missing}, unexpected {unexpected}")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        llama.save_pretrained(temporary)
        Path(temporary, "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
        for path in Path(temporary).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def load_model(model: nn.Module, folder: Path, tokenizer: Tokenizer) -> None:
    """Weights of `folder`, also where its tokenizer is another: tokens that both know keep their embedding, a new one
    starts as the mean of the pieces that spelled it there."""
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    before, known = weights["model.embed_tokens.weight"], Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = []
    for i in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(i)
        same = known.token_to_id(token)
        pieces = [same] if same is not None else known.encode(tokenizer.decode([i]), add_special_tokens=False).ids
        rows.append(before[pieces].mean(0))
    weights["model.embed_tokens.weight"] = torch.stack(rows)
    model.load_state_dict(weights)
