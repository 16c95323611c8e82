"""The tower of Mistral 3 and Pixtral: pictures of any shape, each attended to as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..families.vision_spec import VisionSpec
from ..layers.linear import TowerLinear
from ..layers.norm import make_norm
from ..quant.weights import Placement, WeightMap
from .tower import ACTIVATIONS, PROJECTOR, PatchProduct, Picture, Tower, frames_of, patches

_PATHS = {
    "norm1": "attention_norm", "norm2": "ffn_norm", "q": "attention.q_proj", "k": "attention.k_proj",
    "v": "attention.v_proj", "out": "attention.o_proj", "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj", "down": "feed_forward.down_proj",
}  # fmt: skip


class PixtralTower(Tower):
    block_paths = _PATHS
    blocks_path = "transformer.layers"
    patches_path = "patch_conv"

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        blocks, projector = spec.blocks, spec.projector
        assert projector is not None
        hidden, out = blocks.hidden, spec.out
        self.patches = PatchProduct((3, spec.patch, spec.patch), hidden, place, bias=False)
        self.norm = make_norm("rms", (hidden,), blocks.eps, place)
        self.last_norm = make_norm("rms", (hidden,), projector.eps, place) if projector.eps else None
        self.merging = None
        if spec.merge > 1:
            self.merging = TowerLinear(hidden * spec.merge**2, {"merged": hidden}, place=place)
        self.first = TowerLinear(hidden, {"first": out}, place=place, bias=projector.bias)
        self.second = TowerLinear(out, {"second": out}, place=place, bias=projector.bias)
        self.activation = ACTIVATIONS[projector.activation]
        # A head's frequencies, of which every other one is for rows, the rest for columns.
        exponents = torch.arange(0, blocks.head_dim, 2, dtype=torch.float32) / blocks.head_dim
        frequencies = (1.0 / blocks.theta**exponents).to(place.device)
        self.frequencies = frequencies[0::2], frequencies[1::2]

    def _further_weights(self, root: str) -> WeightMap:
        found: WeightMap = {
            f"{root}.ln_pre": (self.norm, ""),
            f"{PROJECTOR}.linear_1": (self.first, "first"),
            f"{PROJECTOR}.linear_2": (self.second, "second"),
        }
        if self.last_norm is not None:
            found[f"{PROJECTOR}.norm"] = self.last_norm, ""
        if self.merging is not None:
            found[f"{PROJECTOR}.patch_merger.merging_layer"] = self.merging, "merged"
        return found

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        spec, known = self.spec, [item for _, item in items]
        turns, frames = self.turns(known, *self.frequencies), self.packed(frames_of(known))
        pixels = torch.cat([patches(self.normalised(one), spec.patch, spec.merge) for one, _ in items])
        residual, _ = self.norm(None, self.patches(pixels))
        hidden = self.through_blocks(residual, turns, frames)
        if self.last_norm is not None:
            hidden, _ = self.last_norm(None, hidden)
        if self.merging is not None:  # whose weights have an element of all patches of a token one beside the other
            hidden = self.merging(hidden.unflatten(0, (-1, spec.merge**2)).transpose(1, 2).flatten(1))
        return self.of_each(self.second(self.activation(self.first(hidden))), known)
