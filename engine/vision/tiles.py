"""Towers that look at squares of one size: InternViT of InternVL and CLIP's of LLaVA, and what is between their vectors
and the text's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..families.vision_spec import VisionSpec
from ..layers.delta import Vectors
from ..layers.linear import TowerLinear
from ..layers.norm import make_norm
from ..quant.weights import Placement, WeightMap
from .tower import ACTIVATIONS, PROJECTOR, Block, PatchProduct, Picture, Tower, in_tokens, patches


class TileTower(Tower):
    """Squares, each behind a vector of its class, with a vector for every place in them."""

    block_paths: ClassVar[Mapping[str, str]]
    blocks_path: ClassVar[str]
    patches_path: ClassVar[str]

    def __init__(self, spec: VisionSpec, place: Placement, patch_bias: bool) -> None:
        super().__init__(spec, place)
        blocks, projector = spec.blocks, spec.projector
        assert projector is not None
        self.patches = PatchProduct((3, spec.patch, spec.patch), blocks.hidden, place, bias=patch_bias)
        self.blocks = nn.ModuleList(Block(blocks, place, self.block_paths) for _ in range(blocks.depth))
        width = blocks.hidden * spec.merge**2
        self.first = TowerLinear(width, {"first": spec.out}, place=place, bias=projector.bias)
        self.second = TowerLinear(spec.out, {"second": spec.out}, place=place, bias=projector.bias)
        self.activation = ACTIVATIONS[projector.activation]

    def weight_map(self) -> WeightMap:
        root = self.spec.root
        found: WeightMap = {
            f"{root}.{self.patches_path}": (self.patches, ""),
            f"{PROJECTOR}.linear_1": (self.first, "first"),
            f"{PROJECTOR}.linear_2": (self.second, "second"),
            **self._further_weights(root),
        }
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            found |= block.weight_map(f"{root}.{self.blocks_path}.{index}")
        return {self.spec.named(path): target for path, target in found.items()}

    def _further_weights(self, root: str) -> WeightMap:
        raise NotImplementedError

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        spec, known = self.spec, [item for _, item in items]
        pixels = torch.cat([patches(self.normalised(one), spec.patch, spec.merge) for one, _ in items])
        side = spec.image_size // spec.patch
        tiles = self.patches(pixels).unflatten(0, (-1, side**2))
        of_class, places = self._embeddings()
        tiles = torch.cat((of_class.expand(len(tiles), 1, -1), tiles), dim=1)
        where = torch.cat((places[:1], in_tokens(places[1:].unflatten(0, (side, side)), spec.merge)))
        residual = self._before(tiles.add_(where).flatten(0, 1))
        squares, x = self.packed([side**2 + 1] * len(tiles)), None
        for block in self.blocks:
            x, residual = block(x, residual, None, squares)
        hidden = (residual if x is None else residual.add_(x)).unflatten(0, (-1, side**2 + 1))[:, 1:]
        hidden = self._behind(hidden.reshape(-1, self.first.shape.in_features))
        return self.of_each(self.second(self.activation(self.first(hidden))), known)

    def _embeddings(self) -> tuple[Tensor, Tensor]:
        """→ the class's vector [hidden], and those of places [1 + patches, hidden], row by row, its own first."""
        raise NotImplementedError

    def _before(self, x: Tensor) -> Tensor:
        """What the blocks get."""
        return x

    def _behind(self, x: Tensor) -> Tensor:
        """[tokens, patches of a token one beside the other] → what the projector gets."""
        return x


class InternTower(TileTower):
    """InternVL's, with a norm before the projector."""

    block_paths: ClassVar[Mapping[str, str]] = {
        "norm1": "layernorm_before", "norm2": "layernorm_after", "q": "attention.q_proj", "k": "attention.k_proj",
        "v": "attention.v_proj", "out": "attention.projection_layer", "up": "mlp.fc1", "down": "mlp.fc2",
        "scale1": "lambda_1", "scale2": "lambda_2",
    }  # fmt: skip
    blocks_path = "encoder.layer"
    patches_path = "embeddings.patch_embeddings.projection"

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place, patch_bias=True)
        hidden, count = spec.blocks.hidden, (spec.image_size // spec.patch) ** 2
        shapes = {"cls_token": (1, 1, hidden), "position_embeddings": (1, 1 + count, hidden)}
        self.embeddings = Vectors(shapes, place.dtype, place)
        self.norm = make_norm("layer_bias", (hidden * spec.merge**2,), 1e-5, place)

    def _further_weights(self, root: str) -> WeightMap:
        return {f"{root}.embeddings": (self.embeddings, ""), f"{PROJECTOR}.layer_norm": (self.norm, "")}

    def _embeddings(self) -> tuple[Tensor, Tensor]:
        found = self.embeddings
        return found.get_parameter("cls_token").view(-1), found.get_parameter("position_embeddings")[0]

    def _behind(self, x: Tensor) -> Tensor:
        normed = self.norm(None, x)[0]
        assert isinstance(normed, Tensor), "it was told of no reader"
        return normed


class ClipTower(TileTower):
    """LLaVA's, with a norm before the blocks, whose last ones are left out."""

    block_paths: ClassVar[Mapping[str, str]] = {
        "norm1": "layer_norm1", "norm2": "layer_norm2", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
        "v": "self_attn.v_proj", "out": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2",
    }  # fmt: skip
    blocks_path = "encoder.layers"
    patches_path = "embeddings.patch_embedding"

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place, patch_bias=False)
        hidden, count = spec.blocks.hidden, (spec.image_size // spec.patch) ** 2
        self.of_class = Vectors({"class_embedding": (hidden,)}, place.dtype, place)
        self.places = Vectors({"weight": (1 + count, hidden)}, place.dtype, place)
        self.norm = make_norm("layer_bias", (hidden,), spec.blocks.eps, place)

    def _further_weights(self, root: str) -> WeightMap:
        return {
            f"{root}.embeddings": (self.of_class, ""),
            f"{root}.embeddings.position_embedding": (self.places, ""),
            f"{root}.pre_layrnorm": (self.norm, ""),
        }

    def _embeddings(self) -> tuple[Tensor, Tensor]:
        return self.of_class.get_parameter("class_embedding"), self.places.weight

    def _before(self, x: Tensor) -> Tensor:
        normed = self.norm(None, x)[0]
        assert isinstance(normed, Tensor), "it was told of no reader"
        return normed
