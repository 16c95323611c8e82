"""Towers that look at squares of one size: InternViT of InternVL, CLIP's of LLaVA and SigLIP's of Gemma 3, and what is
between their vectors and the text's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..families.vision_spec import VisionSpec
from ..layers.linear import TowerLinear
from ..layers.norm import Norm, make_norm
from ..layers.state import Vectors
from ..link.media import MediaItem
from ..quant.format import FLOATS, Stored
from ..quant.weights import Placement, WeightMap
from .tower import ACTIVATIONS, PROJECTOR, PatchProduct, Picture, Tower, in_tokens, patches

_PATHS = {
    "norm1": "layer_norm1", "norm2": "layer_norm2", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "out": "self_attn.out_proj", "up": "mlp.fc1", "down": "mlp.fc2",
}  # fmt: skip
_INTERN_PATHS = {
    "norm1": "layernorm_before", "norm2": "layernorm_after", "q": "attention.q_proj", "k": "attention.k_proj",
    "v": "attention.v_proj", "out": "attention.projection_layer", "up": "mlp.fc1", "down": "mlp.fc2",
    "scale1": "lambda_1", "scale2": "lambda_2",
}  # fmt: skip


class TileTower(Tower):
    """Squares with a vector for every place in them, some behind a vector of their class."""

    block_paths = _PATHS
    blocks_path = "encoder.layers"
    patches_path = "embeddings.patch_embedding"
    patch_bias: ClassVar[bool] = True

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        blocks = spec.blocks
        self.side = spec.image_size // spec.patch  # in patches
        self.patches = PatchProduct((3, spec.patch, spec.patch), blocks.hidden, place, bias=self.patch_bias)

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        spec, known = self.spec, [item for _, item in items]
        pixels = torch.cat([patches(self.normalised(one), spec.patch, spec.merge) for one, _ in items])
        tiles = self.patches(pixels).unflatten(0, (-1, self.side**2))
        of_class, places = self._embeddings()
        tiles += in_tokens(places[-(self.side**2) :].unflatten(0, (self.side, self.side)), spec.merge)
        if of_class is not None:
            tiles = torch.cat(((of_class + places[0]).expand(len(tiles), 1, -1), tiles), dim=1)
        count, length, _ = tiles.shape
        squares, residual = self.packed([length] * count), self._before(tiles.flatten(0, 1))
        hidden = self.through_blocks(residual, None, squares).unflatten(0, (count, length))
        hidden = hidden[:, length - self.side**2 :].reshape(-1, spec.merge**2, spec.blocks.hidden)
        return self.of_each(self._features(hidden), known)

    def sample(self, patches: int) -> MediaItem:
        return self._gray((max(1, patches // self.side**2), self.side, self.side))

    def _further_weights(self, root: str) -> WeightMap:
        raise NotImplementedError

    def _embeddings(self) -> tuple[Tensor | None, Tensor]:
        """→ the class's vector [hidden] where there is one, and those of places [patches, hidden], row by row, its own
        before them."""
        raise NotImplementedError

    def _before(self, x: Tensor) -> Tensor:
        """What the blocks get."""
        return x

    def _features(self, x: Tensor) -> Tensor:
        """[tokens, patches of a token, hidden] → [tokens, out]."""
        raise NotImplementedError


class ProjectedTower(TileTower):
    """The patches of a token, one beside the other, pass an MLP."""

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        projector = spec.projector
        assert projector is not None
        self.width = spec.blocks.hidden * spec.merge**2
        self.first = TowerLinear(self.width, {"first": spec.out}, place=place, bias=projector.bias)
        self.second = TowerLinear(spec.out, {"second": spec.out}, place=place, bias=projector.bias)
        self.activation = ACTIVATIONS[projector.activation]

    def _further_weights(self, root: str) -> WeightMap:
        first, second = (self.first, "first"), (self.second, "second")
        return {f"{PROJECTOR}.linear_1": first, f"{PROJECTOR}.linear_2": second}

    def _features(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x.flatten(1))))


class InternTower(ProjectedTower):
    """InternVL's, with a norm before the projector."""

    block_paths = _INTERN_PATHS
    blocks_path = "encoder.layer"
    patches_path = "embeddings.patch_embeddings.projection"

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        hidden = spec.blocks.hidden
        shapes = {"cls_token": (1, 1, hidden), "position_embeddings": (1, 1 + self.side**2, hidden)}
        self.embeddings = Vectors(shapes, place.dtype, place)
        self.norm = make_norm("layer_bias", (self.width,), 1e-5, place)

    def _further_weights(self, root: str) -> WeightMap:
        found = super()._further_weights(root)
        return found | {f"{root}.embeddings": (self.embeddings, ""), f"{PROJECTOR}.layer_norm": (self.norm, "")}

    def _embeddings(self) -> tuple[Tensor | None, Tensor]:
        found = self.embeddings
        return found.get_parameter("cls_token").view(-1), found.get_parameter("position_embeddings")[0]

    def _features(self, x: Tensor) -> Tensor:
        return super()._features(_normed(self.norm, x.flatten(1)))


class ClipTower(ProjectedTower):
    """LLaVA's, with a norm before the blocks, whose last ones are left out."""

    patch_bias = False

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        hidden = spec.blocks.hidden
        self.of_class = Vectors({"class_embedding": (hidden,)}, place.dtype, place)
        self.places = Vectors({"weight": (1 + self.side**2, hidden)}, place.dtype, place)
        self.norm = make_norm("layer_bias", (hidden,), spec.blocks.eps, place)

    def _further_weights(self, root: str) -> WeightMap:
        return super()._further_weights(root) | {
            f"{root}.embeddings": (self.of_class, ""),
            f"{root}.embeddings.position_embedding": (self.places, ""),
            f"{root}.pre_layrnorm": (self.norm, ""),
        }

    def _embeddings(self) -> tuple[Tensor | None, Tensor]:
        return self.of_class.get_parameter("class_embedding"), self.places.weight

    def _before(self, x: Tensor) -> Tensor:
        return _normed(self.norm, x)


class TurnedProduct(PatchProduct):
    """A matrix that stands in the checkpoint with its rows as columns, under a name of its own."""

    def __init__(self, name: str, size: int, out: int, place: Placement) -> None:
        super().__init__((size,), out, place, bias=False)
        self.name, self.turned = name, (size, out)

    def expected(self, part: str) -> dict[str, Stored]:
        return {self.name: Stored(self.turned, FLOATS)}

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().load(part, {"weight": tensors[self.name].t()})


class GemmaTower(TileTower):
    """Gemma 3's: a token is the mean of its patches, normed and multiplied by a matrix."""

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        hidden, eps = spec.blocks.hidden, spec.blocks.eps
        self.places = Vectors({"weight": (self.side**2, hidden)}, place.dtype, place)
        self.last_norm = make_norm("layer_bias", (hidden,), eps, place)
        self.mean_norm = make_norm("rms_less_one", (hidden,), eps, place)
        self.matrix = TurnedProduct("mm_input_projection_weight", hidden, spec.out, place)

    def _further_weights(self, root: str) -> WeightMap:
        return {
            f"{root}.embeddings.position_embedding": (self.places, ""),
            f"{root}.post_layernorm": (self.last_norm, ""),
            f"{PROJECTOR}.mm_soft_emb_norm": (self.mean_norm, ""),
            PROJECTOR: (self.matrix, ""),
        }

    def _embeddings(self) -> tuple[Tensor | None, Tensor]:
        return None, self.places.weight

    def _features(self, x: Tensor) -> Tensor:
        return self.matrix(_normed(self.mean_norm, _normed(self.last_norm, x.flatten(0, 1)).view(x.shape).mean(1)))


def _normed(norm: Norm, x: Tensor) -> Tensor:
    found = norm(None, x)[0]
    assert isinstance(found, Tensor), "it was told of no reader"
    return found
