"""The tower of Qwen3-VL and Qwen 3.5: pictures of any shape, each attended to as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..families.vision_spec import VisionSpec
from ..layers.delta import Vectors
from ..layers.linear import TowerLinear
from ..layers.norm import make_norm
from ..quant.weights import Placement, WeightMap
from .tower import Block, PatchProduct, Picture, Tower, angles_of_grid, in_tokens, patches, stretched_table

PATHS = {
    "norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "out": "attn.proj", "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
}  # fmt: skip


class Merger(nn.Module):
    """The patches of a token, one behind the other, to a feature. norm_last: their norm is of all of them at once."""

    def __init__(self, spec: VisionSpec, place: Placement, norm_last: bool) -> None:
        super().__init__()
        blocks, self.width, self.norm_last = spec.blocks, spec.blocks.hidden * spec.merge**2, norm_last
        self.norm = make_norm(blocks.norm, (self.width if norm_last else blocks.hidden,), blocks.eps, place)
        self.first = TowerLinear(self.width, {"fc1": self.width}, place=place, bias=True)
        self.second = TowerLinear(self.width, {"fc2": spec.out}, place=place, bias=True)

    def weight_map(self, prefix: str) -> WeightMap:
        return {
            f"{prefix}.norm": (self.norm, ""), f"{prefix}.linear_fc1": (self.first, "fc1"),
            f"{prefix}.linear_fc2": (self.second, "fc2"),
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → [tokens, out]."""
        x = self.norm(None, x.view(-1, self.width) if self.norm_last else x)[0].view(-1, self.width)
        return self.second(functional.gelu(self.first(x)))


class QwenTower(Tower):
    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        blocks = spec.blocks
        self.patches = PatchProduct((3, spec.frames, spec.patch, spec.patch), blocks.hidden, place)
        self.table = Vectors({"weight": (spec.table**2, blocks.hidden)}, place.dtype, place)
        self.blocks = nn.ModuleList(Block(blocks, place, PATHS) for _ in range(blocks.depth))
        self.merger = Merger(spec, place, norm_last=False)
        self.deep_mergers = nn.ModuleList(Merger(spec, place, norm_last=True) for _ in spec.deepstack)
        half = blocks.head_dim // 2  # of a head's elements turn by the row, as many by the column
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._frequencies = (1.0 / blocks.theta**exponents).to(place.device)

    def weight_map(self) -> WeightMap:
        root = self.spec.root
        found: WeightMap = {
            f"{root}.patch_embed.proj": (self.patches, ""), f"{root}.pos_embed": (self.table, "")
        }  # fmt: skip
        for index, block in enumerate(self.blocks):
            found |= block.weight_map(f"{root}.blocks.{index}")  # type: ignore[operator]
        found |= self.merger.weight_map(f"{root}.merger")
        for index, merger in enumerate(self.deep_mergers):
            found |= merger.weight_map(f"{root}.deepstack_merger_list.{index}")  # type: ignore[operator]
        return {self.spec.named(path): target for path, target in found.items()}

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        spec = self.spec
        grids = [item.grid for _, item in items]
        residual = torch.cat([self._embedded(*picture) for picture in items])
        angles = torch.cat([self._angles(*grid) for grid in grids])
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        turns = torch.arange(len(table), dtype=torch.int32, device=table.device), table
        frames = self.packed([rows * columns for count, rows, columns in grids for _ in range(count)])
        deep: dict[int, Tensor] = {}
        x: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, turns, frames)
            if index in spec.deepstack:
                residual, x = residual.add_(x), None
                place = spec.deepstack.index(index)
                deep[place] = self.deep_mergers[place](residual)
        features = [self.merger(residual if x is None else residual.add_(x)), *(deep[place] for place in sorted(deep))]
        tokens = [count * rows * columns // spec.merge**2 for count, rows, columns in grids]
        return list(torch.cat(features, dim=1).split(tokens))

    def _embedded(self, pixels: Tensor, item: object) -> Tensor:
        """→ [patches, hidden]."""
        spec = self.spec
        x = self.patches(patches(self.normalised(pixels), spec.patch, spec.merge, spec.frames))
        rows, columns = pixels.shape[1] // spec.patch, pixels.shape[2] // spec.patch
        where = in_tokens(stretched_table(self.table.weight, spec.table, rows, columns), spec.merge).to(x.dtype)
        return x.view(-1, *where.shape).add_(where).flatten(0, 1)

    def _angles(self, count: int, rows: int, columns: int) -> Tensor:
        """fp32 [patches, half of a head]."""
        angles = in_tokens(angles_of_grid(rows, columns, self._frequencies), self.spec.merge)
        return angles.repeat(count, 1) if count > 1 else angles
