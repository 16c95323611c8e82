"""What tokens have for each layer beside their embedding, and the ends of layers that take it in (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..describe.model_config import ModelConfig
from ..families.layer_spec import LayerSpec
from ..layers.embedding import Table
from ..layers.linear import Linear
from ..layers.norm import make_norm
from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap, frozen, keep_at_hand


class TokenVectors(nn.Module):
    """A vector a token and layer: the mean, times √2, of what a table has for its id and of what a product makes of its
    embedding, which is normed. Every rank has and computes all of it."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.num_layers, self.size = len(config.layers), config.layers[0].token_vector
        width, hidden = self.num_layers * self.size, config.hidden_size
        self.table = Table(config.frame.token_vectors, width, place, self.size**0.5)
        self.projection = Linear(hidden, {"out": width}, place=place)
        self.norm = make_norm(config.frame.norm, (self.size,), config.norm_eps, place)
        self.scale = hidden**-0.5
        keep_at_hand(self)

    def weight_map(self) -> WeightMap:
        return {
            "model.embed_tokens_per_layer": (self.table, ""),
            "model.per_layer_model_projection": (self.projection, "out"),
            "model.per_layer_projection_norm": (self.norm, ""),
        }

    def forward(self, input_ids: Tensor, embeddings: Tensor) -> Tensor:
        """ids [T] and embeddings [T, hidden] → [T, layers, size]. Of a token that has an embedding alone, the id is
        what stands in its place."""
        made = self.projection(embeddings).mul_(self.scale).view(-1, self.size)
        self.norm.in_place(made)
        return made.add_(self.table(input_ids).view(-1, self.size)).mul_(2**-0.5).view(len(input_ids), -1, self.size)


class LayerEnd(nn.Module):
    """residual += norm(up(gelu(gate(residual)) · vector)), where the layer takes a vector; residual *= scale."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        size, hidden = spec.token_vector, config.hidden_size
        self.gate = Linear(hidden, {"out": size}, place=place) if size else None
        self.up = Linear(size, {"out": hidden}, place=place) if size else None
        self.norm = make_norm(config.frame.norm, (hidden,), config.norm_eps, place) if size else None
        self.scale = Scale(place) if spec.scaled else None
        keep_at_hand(self)

    def weight_map(self, prefix: str) -> WeightMap:
        found: WeightMap = {}
        if self.gate is not None and self.up is not None and self.norm is not None:
            found[f"{prefix}.per_layer_input_gate"] = self.gate, "out"
            found[f"{prefix}.per_layer_projection"] = self.up, "out"
            found[f"{prefix}.post_per_layer_input_norm"] = self.norm, ""
        return found if self.scale is None else found | {prefix: (self.scale, "")}

    def forward(self, residual: Tensor, vector: Tensor | None) -> None:
        """residual [T, hidden], in place; vector [T, size]."""
        if self.gate is not None and self.up is not None and self.norm is not None:
            assert vector is not None, "the model has made vectors of the step's tokens"
            y = self.up(functional.gelu(self.gate(residual), approximate="tanh").mul_(vector))
            self.norm.in_place(y)
            residual.add_(y)
        if self.scale is not None:
            residual.mul_(self.scale.weight)


class Scale(nn.Module):
    """A number, which stands in a checkpoint below the layer, without a module of its own."""

    weight: nn.Parameter

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.place = place

    def choose(self, formats: Mapping[str, Format]) -> None:
        pass  # no format stores it, whatever one says of all modules

    def expected(self, part: str) -> dict[str, Stored]:
        return {"layer_scalar": Stored((1,), FLOATS)}

    def create(self) -> None:
        self.weight = frozen(torch.empty(1, dtype=self.place.dtype, device=self.place.device))

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(tensors["layer_scalar"])

    def finish(self) -> None:
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.fill_(1.0)
