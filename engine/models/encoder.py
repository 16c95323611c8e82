"""Encoders of the shape of BERT: what stands around attention and MLP, as their spec says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention.rope import apply_rope_torch
from ..describe.model_config import ModelConfig
from ..families.encoders import EncoderLayerSpec, EncoderSpec
from ..layers.attention import Attention
from ..layers.embedding import Embedding
from ..layers.head import Head
from ..layers.linear import Linear
from ..layers.norm import LayerNorm
from ..layers.packed import Packed
from ..layers.rope import RotaryEmbedding
from ..quant.weights import Placement, WeightMap

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


class EncoderLayer(nn.Module):
    """Attention, then MLP; with norm_first, the first layer's first norm is that of the embeddings."""

    def __init__(
        self, spec: EncoderSpec, layer: EncoderLayerSpec, first: bool, config: ModelConfig, place: Placement,
        rotary: RotaryEmbedding | None,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, width, inner, paths = config.hidden_size, spec.num_heads * spec.head_dim, spec.inner, spec.paths
        self.spec, self.window, self.rotary = spec, layer.window, rotary
        self.activation = _ACTIVATIONS[spec.activation]
        parts = {"qkv": 3 * width} if "qkv" in paths else {"q": width, "k": width, "v": width}
        self.qkv = Linear(hidden, parts, place=place, bias=spec.qkv_bias)
        self.out = Linear(width, {"out": hidden}, place=place, bias=spec.output_bias)
        order = {}
        if not spec.gated:
            parts = {"up": inner}
        elif "up_gate" in paths:  # gates come first here
            parts = {"up_gate": 2 * inner}
            order = {"up_gate": torch.arange(2 * inner, device="cpu").roll(inner)}
        else:
            parts = {"gate_up": 2 * inner} if "gate_up" in paths else {"gate": inner, "up": inner}
        self.up = Linear(hidden, parts, place=place, bias=spec.up_bias, row_order=order)
        self.down = Linear(inner, {"down": hidden}, place=place, bias=spec.down_bias)
        norms = [LayerNorm((hidden,), config.norm_eps, place, bias=spec.norm_bias) for _ in range(2)]
        self.norm1 = None if spec.norm_first and first else norms[0]
        self.norm2 = norms[1]

    def weight_map(self, prefix: str) -> WeightMap:
        paths = self.spec.paths
        found: WeightMap = {}
        for linear in (self.qkv, self.out, self.up, self.down):
            found |= {f"{prefix}.{paths[part]}": (linear, part) for part in linear.shape.parts}
        if self.norm1 is not None:
            found[f"{prefix}.{paths['norm1']}"] = (self.norm1, "")
        return found | {f"{prefix}.{paths['norm2']}": (self.norm2, "")}

    def forward(self, x: Tensor, positions: Tensor, batch: Packed) -> Tensor:
        """[T, hidden] → [T, hidden]; x may be overwritten."""
        if self.spec.norm_first:
            x = x.add_(self.attend(x if self.norm1 is None else norm(self.norm1, x), positions, batch))
            return x.add_(self.mlp(norm(self.norm2, x)))
        assert self.norm1 is not None
        x = add_norm(self.norm1, self.attend(x, positions, batch), x)
        return add_norm(self.norm2, self.mlp(x), x)

    def attend(self, x: Tensor, positions: Tensor, batch: Packed) -> Tensor:
        heads, dim = self.spec.num_heads, self.spec.head_dim
        query, key, value = self.qkv(x).view(len(x), 3 * heads, dim).split(heads, dim=1)
        if self.rotary is not None:
            apply_rope_torch(query, key, positions, self.rotary.cos_sin)
        return self.out(batch.attend(query, key, value, dim**-0.5, self.window).flatten(1))

    def mlp(self, x: Tensor) -> Tensor:
        if not self.spec.gated:
            return self.down(self.activation(self.up(x)))
        if self.spec.activation == "silu":
            return self.down(self.up.silu_mul(x))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


class Encoder(nn.Module):
    """A Model without a cache and without logits."""

    def __init__(self, config: ModelConfig, place: Placement, max_len: int) -> None:
        super().__init__()
        spec = config.encoder
        assert spec is not None
        self.config, self.place, self.spec = config, place, spec
        hidden = config.hidden_size
        self.words = Embedding(config.vocab_size, hidden, place)
        self.positions = Embedding(spec.positions, hidden, place) if spec.positions else None
        self.types = Embedding(spec.token_types, hidden, place) if spec.token_types else None
        self.norm = LayerNorm((hidden,), config.norm_eps, place, bias=spec.norm_bias)
        self.rotary = {
            rope: RotaryEmbedding(rope, spec.head_dim, max_len, place.device)
            for rope in {layer.rope for layer in spec.layers} if rope is not None
        }  # fmt: skip
        self.layers = nn.ModuleList(
            EncoderLayer(spec, layer, not i, config, place, self.rotary.get(layer.rope) if layer.rope else None)
            for i, layer in enumerate(spec.layers)
        )
        self.last_norm = LayerNorm((hidden,), config.norm_eps, place, bias=spec.norm_bias) if spec.norm_first else None
        self.pooling_head = None if config.head is None else Head(config.head, config.vocab_size, place, None)
        self.eval()

    def forward(self, input_ids: Tensor, positions: Tensor, batch: Packed, types: Tensor | None = None) -> Tensor:
        """int32 [T] each → hidden states [T, hidden]. types: 1 for tokens of the second text of a pair; None: all 0."""
        x = self.words(input_ids)
        if self.types is not None:
            x = x.add_(self.types.weight[0] if types is None else self.types(types))
        if self.positions is not None:
            x = x.add_(self.positions(positions + self.spec.first_position))
        x = norm(self.norm, x)
        for layer in self.layers:
            x = layer(x, positions, batch)
        return x if self.last_norm is None else norm(self.last_norm, x)

    def attention_layers(self) -> list[Attention]:
        """Those that want a cache: none."""
        return []

    def weight_map(self) -> WeightMap:
        """Every module path of the checkpoint whose tensors must be loaded."""
        prefix, paths = self.spec.prefix, self.spec.paths
        around = {
            "words": self.words, "positions": self.positions, "types": self.types, "norm": self.norm,
            "last_norm": self.last_norm,
        }  # fmt: skip
        found: WeightMap = {prefix + paths[name]: (one, "") for name, one in around.items() if one is not None}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            found |= layer.weight_map(f"{prefix}{paths['layer']}.{index}")
        return found if self.pooling_head is None else found | self.pooling_head.weight_map()

    def is_ignorable(self, name: str) -> bool:
        """Tables of positions, and all that stands behind the layers where something else is asked of them."""
        paths = self.spec.paths
        body = (f"{paths['layer']}.", f"{paths['words'].partition('.')[0]}.", f"{paths['norm']}.")
        return not name.removeprefix(self.spec.prefix).startswith(body) or name.endswith("_ids")


def norm(layer: LayerNorm, x: Tensor) -> Tensor:
    """On the CPU torch's own, which goes over x once."""
    if x.is_cuda:
        return layer(None, x)[0]
    return functional.layer_norm(x, layer.shape, layer.weight, layer.bias, layer.eps)


def add_norm(layer: LayerNorm, x: Tensor, residual: Tensor) -> Tensor:
    """Of their sum, which takes the residual's place."""
    return layer(x, residual)[0] if x.is_cuda else norm(layer, residual.add_(x))
