"""The towers of Qwen2-VL, 2.5-VL and 3-VL, and of Qwen 3.5: pictures of any shape, each attended to as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..families.vision_spec import VisionSpec
from ..layers.linear import TowerLinear
from ..layers.norm import make_norm
from ..layers.state import Vectors
from ..link.media import MediaItem
from ..quant.weights import Placement, WeightMap
from .tower import PatchProduct, Picture, Tower, frames_of, in_tokens, patches, stretched_table

_BLOCK = {"norm1": "norm1", "norm2": "norm2", "qkv": "attn.qkv", "out": "attn.proj"}
_LINEAR = {"up": "mlp.linear_fc1", "down": "mlp.linear_fc2"}
_FC = {"up": "mlp.fc1", "down": "mlp.fc2"}
_GATED = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


class Merger(nn.Module):
    """The patches of a token, one behind the other, to a feature. norm_last: their norm is of all of them at once."""

    def __init__(self, spec: VisionSpec, place: Placement, paths: Sequence[str], norm_last: bool = False) -> None:
        """paths: of the norm and of the two products, behind the merger's."""
        super().__init__()
        blocks, self.width, self.norm_last = spec.blocks, spec.blocks.hidden * spec.merge**2, norm_last
        self.paths = paths
        self.norm = make_norm(blocks.norm, (self.width if norm_last else blocks.hidden,), blocks.eps, place)
        self.first = TowerLinear(self.width, {"fc1": self.width}, place=place, bias=True)
        self.second = TowerLinear(self.width, {"fc2": spec.out}, place=place, bias=True)

    def weight_map(self, prefix: str) -> WeightMap:
        norm, first, second = (f"{prefix}.{path}" for path in self.paths)
        return {norm: (self.norm, ""), first: (self.first, "fc1"), second: (self.second, "fc2")}

    def forward(self, x: Tensor) -> Tensor:
        """[patches, hidden] → [tokens, out]."""
        normed, _ = self.norm(None, x.view(-1, self.width) if self.norm_last else x)
        return self.second(functional.gelu(self.first(normed.view(-1, self.width))))


class QwenTower(Tower):
    """What they have in common: patches in the order of tokens, turned by their rows and columns; a merger."""

    blocks_path = "blocks"
    patches_path = "patch_embed.proj"
    merger_paths: ClassVar[tuple[str, str, str]]
    patch_bias: ClassVar[bool]

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        blocks = spec.blocks
        kernel = (3, spec.frames, spec.patch, spec.patch)
        self.patches = PatchProduct(kernel, blocks.hidden, place, bias=self.patch_bias)
        self.merger = Merger(spec, place, self.merger_paths)
        half = blocks.head_dim // 2  # of a head's elements turn by the row, as many by the column
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self.frequencies = ((1.0 / blocks.theta**exponents).to(place.device),) * 2

    def _further_weights(self, root: str) -> WeightMap:
        return self.merger.weight_map(f"{root}.merger")

    def embedded(self, pixels: Tensor) -> Tensor:
        """uint8 [F, height, width, 3] → [patches, hidden], those of one token one behind the other."""
        spec = self.spec
        found: Tensor = self.patches(patches(self.normalised(pixels), spec.patch, spec.merge, spec.frames))
        return found


class Qwen3Tower(QwenTower):
    """Qwen3-VL and Qwen 3.5: positions by a table, too, and features of some blocks for the text's first layers."""

    block_paths = _BLOCK | _LINEAR
    merger_paths = ("norm", "linear_fc1", "linear_fc2")
    patch_bias = True

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__(spec, place)
        self.table = Vectors({"weight": (spec.table**2, spec.blocks.hidden)}, place.dtype, place)
        self.deep_mergers = nn.ModuleList(
            Merger(spec, place, self.merger_paths, norm_last=True) for _ in spec.deepstack
        )

    def _further_weights(self, root: str) -> WeightMap:
        found = super()._further_weights(root) | {f"{root}.pos_embed": (self.table, "")}
        for index, merger in enumerate(self.deep_mergers):
            assert isinstance(merger, Merger)
            found |= merger.weight_map(f"{root}.deepstack_merger_list.{index}")
        return found

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        known = [item for _, item in items]
        turns, frames = self.turns(known, *self.frequencies), self.packed(frames_of(known))
        residual = torch.cat([self.embedded(pixels) for pixels, _ in items])
        deep: dict[int, Tensor] = {}  # by place among the mergers
        x: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, turns, frames)
            if index in self.spec.deepstack:
                residual, x = residual.add_(x), None
                place = self.spec.deepstack.index(index)
                deep[place] = self.deep_mergers[place](residual)
        features = self.merger(residual if x is None else residual.add_(x))
        return self.of_each(torch.cat([features, *(deep[place] for place in sorted(deep))], dim=1), known)

    def embedded(self, pixels: Tensor) -> Tensor:
        x, spec = super().embedded(pixels), self.spec
        rows, columns = pixels.shape[1] // spec.patch, pixels.shape[2] // spec.patch
        where = in_tokens(stretched_table(self.table.weight, spec.table, rows, columns), spec.merge).to(x.dtype)
        return x.view(-1, *where.shape).add_(where).flatten(0, 1)


class Qwen2Tower(QwenTower):
    """Qwen2-VL, and 2.5-VL, whose patches attend in windows but in a few blocks."""

    merger_paths = ("ln_q", "mlp.0", "mlp.2")
    patch_bias = False

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        self.block_paths = _BLOCK | (_GATED if spec.blocks.gated else _FC)
        super().__init__(spec, place)

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        spec, known = self.spec, [item for _, item in items]
        order: Tensor | None = None
        frames = windows = self.packed(frames_of(known))
        x: Tensor | None = None
        residual = torch.cat([self.embedded(pixels) for pixels, _ in items])
        if spec.window:
            order, windows = self._order(known), self.packed(self._windows(known))
            residual = self.reordered(residual, order)
        turns = self.turns(known, *self.frequencies, order)
        for index, block in enumerate(self.blocks):
            x, residual = block(x, residual, turns, frames if index in spec.full else windows)
        features: Tensor = self.merger(residual if x is None else residual.add_(x))
        if order is not None:
            features = torch.empty_like(features).index_copy_(0, order, features)
        return self.of_each(features, known)

    def _order(self, items: Sequence[MediaItem]) -> Tensor:
        """int64 [tokens]: of tokens window by window, their index row by row."""
        found, first, side = [], 0, self.spec.window
        for count, rows, columns in self._in_tokens(items):
            row, column = (torch.arange(n, device=self.place.device) for n in (rows, columns))
            window = (row // side)[:, None] * -(-columns // side) + column // side
            key = window * side**2 + (row % side)[:, None] * side + column % side
            of_frame = key.flatten().argsort()
            for frame in range(count):
                found.append(of_frame + (first + frame * rows * columns))
            first += count * rows * columns
        return torch.cat(found)

    def _windows(self, items: Sequence[MediaItem]) -> list[int]:
        """Patches of each window, in their order."""
        side, unit, found = self.spec.window, self.spec.merge**2, list[int]()
        for count, rows, columns in self._in_tokens(items):
            high, wide = ([min(side, n - start) for start in range(0, n, side)] for n in (rows, columns))
            found += [height * width * unit for height in high for width in wide] * count
        return found

    def _in_tokens(self, items: Sequence[MediaItem]) -> list[tuple[int, int, int]]:
        merge = self.spec.merge
        return [(count, rows // merge, columns // merge) for count, rows, columns in (item.grid for item in items)]
