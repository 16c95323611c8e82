"""The blocks of towers, and what is around them: pictures in, the features of their tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isqrt, prod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention.rope import apply_rope
from ..families.vision_spec import BlockSpec, VisionSpec
from ..layers.linear import TowerLinear
from ..layers.norm import make_norm
from ..layers.packed import Packed
from ..layers.state import Vectors
from ..link.media import MediaItem
from ..quant.format import FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}
# int32 positions [patches], and the fp32 table of cosines and sines [patches, head] that they look up.
Turns = tuple[Tensor, Tensor]
PROJECTOR = "multi_modal_projector"  # its path, where it is no part of the tower
Picture = tuple[Tensor, MediaItem]  # uint8 [frames, height, width, 3] on the device, and what is known of it


class PatchProduct(nn.Module):
    """A convolution whose step is its size, as one product over patches."""

    def __init__(self, kernel: tuple[int, ...], out: int, place: Placement, bias: bool = True) -> None:
        """kernel: of the checkpoint's tensor [out, *kernel]."""
        super().__init__()
        self.stored = (out, *kernel)
        self.product = TowerLinear(prod(kernel), {"out": out}, place=place, bias=bias)

    def choose(self, formats: Mapping[str, Format]) -> None:
        assert not formats, "no format stores convolutions"
        self.product.choose(formats)

    def expected(self, part: str) -> dict[str, Stored]:
        return self.product.expected("out") | {"weight": Stored(self.stored, FLOATS)}

    def create(self) -> None:
        self.product.create()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.product.load("out", {**tensors, "weight": tensors["weight"].flatten(1)})

    def finish(self) -> None:
        self.product.finish()

    def randomize(self, generator: torch.Generator) -> None:
        self.product.randomize(generator)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, elements of the kernel] → [N, out]."""
        return self.product(patches)


class Block(nn.Module):
    """Attention, then MLP, each behind a norm that is fused with the addition to the residual stream before it."""

    def __init__(self, spec: BlockSpec, place: Placement, paths: Mapping[str, str]) -> None:
        """paths: the module's parts → their names behind the block's: qkv, or q, k and v; out, up, down, and where the
        MLP is gated gate; norm1, norm2; scale1, scale2, which are tensors of the block itself."""
        super().__init__()
        hidden, inner = spec.hidden, spec.inner
        self.spec, self.paths = spec, paths
        self.activation = ACTIVATIONS[spec.activation]
        parts = {"qkv": 3 * hidden} if "qkv" in paths else dict.fromkeys("qkv", hidden)
        self.qkv = TowerLinear(hidden, parts, place=place, bias=spec.qkv_bias)
        self.out = TowerLinear(hidden, {"out": hidden}, place=place, bias=spec.bias)
        parts = {"gate": inner, "up": inner} if spec.gated else {"up": inner}
        self.up = TowerLinear(hidden, parts, place=place, bias=spec.bias)
        self.down = TowerLinear(inner, {"down": hidden}, place=place, bias=spec.bias)
        self.norm1, self.norm2 = (make_norm(spec.norm, (hidden,), spec.eps, place) for _ in range(2))
        names = (paths["scale1"], paths["scale2"]) if spec.layer_scale else ()
        self.scales = Vectors(dict.fromkeys(names, (hidden,)), place.dtype, place) if names else None

    def weight_map(self, prefix: str) -> WeightMap:
        paths = self.paths
        found: WeightMap = {}
        for linear in (self.qkv, self.out, self.up, self.down):
            found |= {f"{prefix}.{paths[part]}": (linear, part) for part in linear.shape.parts}
        if self.scales is not None:
            found[prefix] = self.scales, ""
        return found | {f"{prefix}.{paths['norm1']}": (self.norm1, ""), f"{prefix}.{paths['norm2']}": (self.norm2, "")}

    def forward(self, x: Tensor | None, residual: Tensor, turns: Turns | None, frames: Packed) -> tuple[Tensor, Tensor]:
        """x: what is still to be added to residual [N, hidden], which is updated in place; → the same of the next.
        turns: None: nothing is rotated."""
        normed, residual = self.norm1(x, residual)
        normed, residual = self.norm2(self._scaled(self.attend(normed, turns, frames), "scale1"), residual)
        return self._scaled(self.down(self.inner(normed)), "scale2"), residual

    def _scaled(self, x: Tensor, name: str) -> Tensor:
        return x if self.scales is None else x.mul_(self.scales.get_parameter(self.paths[name]))

    def inner(self, x: Tensor) -> Tensor:
        """What the MLP has between its products: [N, hidden] → [N, inner]."""
        if not self.spec.gated:
            return self.activation(self.up(x))
        if self.spec.activation == "silu":
            joined = self.up.silu_mul(x)
            assert isinstance(joined, Tensor), "it was told of no reader"
            return joined
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.activation(gate).mul_(up)

    def attend(self, x: Tensor, turns: Turns | None, frames: Packed) -> Tensor:
        heads, dim = self.spec.heads, self.spec.head_dim
        query, key, value = self.qkv(x).view(len(x), 3 * heads, dim).split(heads, dim=1)
        if turns is not None:
            apply_rope(query, key, *turns)
        return self.out(frames.attend(query, key, value, dim**-0.5).flatten(1))


class Tower(nn.Module):
    """What a tower's assembly fills in: weights, the rows of a picture before the blocks, its features behind them.

    Built without weights, in the activations' dtype; every rank has the whole of it, and encodes every picture.
    """

    block_paths: Mapping[str, str]  # as Block has them
    blocks_path: ClassVar[str]  # behind the tower's root, as the next
    patches_path: ClassVar[str]
    patches: PatchProduct

    def __init__(self, spec: VisionSpec, place: Placement) -> None:
        super().__init__()
        self.spec, self.place = spec, place
        self.blocks = nn.ModuleList(Block(spec.blocks, place, self.block_paths) for _ in range(spec.blocks.depth))
        mean, std = (torch.tensor(values, dtype=torch.float32) for values in (spec.mean, spec.std))
        if place.device.type != "meta":
            # In the order in which transformers' processors compute it: pixels stay between 0 and 255.
            self._mean, self._std = ((values * 255).to(place.device) for values in (mean, std))

    def weight_map(self) -> WeightMap:
        """Every module path of the checkpoint whose tensors must be loaded."""
        root = self.spec.root
        found: WeightMap = {f"{root}.{self.patches_path}": (self.patches, ""), **self._further_weights(root)}
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            found |= block.weight_map(f"{root}.{self.blocks_path}.{index}")
        return {self.spec.named(path): target for path, target in found.items()}

    def _further_weights(self, root: str) -> WeightMap:
        """Beside patches and blocks."""
        raise NotImplementedError

    def encode(self, items: Sequence[Picture]) -> list[Tensor]:
        """→ of each its features [tokens, out · (1 + layers of deepstack)], those for the embeddings first. All pass
        the blocks together, each frame attending to itself alone."""
        raise NotImplementedError

    def through_blocks(self, residual: Tensor, turns: Turns | None, frames: Packed) -> Tensor:
        """[patches, hidden], overwritten, → behind all blocks."""
        x: Tensor | None = None
        for block in self.blocks:
            x, residual = block(x, residual, turns, frames)
        return residual if x is None else residual.add_(x)

    def turns(self, items: Sequence[MediaItem], down: Tensor, across: Tensor, order: Tensor | None = None) -> Turns:
        """As Block has them, of patches in the order of tokens. down, across: frequencies by row and by column.
        order: as in `reordered`."""
        parts = []
        for count, rows, columns in (item.grid for item in items):
            angles = in_tokens(angles_of_grid(rows, columns, down, across), self.spec.merge)
            parts.append(angles.repeat(count, 1) if count > 1 else angles)
        angles = torch.cat(parts)
        if order is not None:
            angles = self.reordered(angles, order)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return torch.arange(len(table), dtype=torch.int32, device=table.device), table

    def reordered(self, x: Tensor, order: Tensor) -> Tensor:
        """x [patches, …], those of a token one behind the other; order int64 [tokens]: the old index of each token."""
        return x.unflatten(0, (-1, self.spec.merge**2)).index_select(0, order).flatten(0, 1)

    def of_each(self, features: Tensor, items: Sequence[MediaItem]) -> list[Tensor]:
        """features [tokens of all, …] → those of each item."""
        grids = (item.grid for item in items)
        return list(features.split([count * rows * columns // self.spec.merge**2 for count, rows, columns in grids]))

    def sample(self, patches: int) -> MediaItem:
        """A gray picture of about so many patches."""
        merge = self.spec.merge
        side = max(1, isqrt(patches) // merge) * merge
        return self._gray((1, side, side))

    def _gray(self, grid: tuple[int, int, int]) -> MediaItem:
        tiles, rows, columns = grid
        size = tiles, rows * self.spec.patch, columns * self.spec.patch
        length = prod(grid) // self.spec.merge**2
        return MediaItem(b"", 0, length, grid, size, size[1:], bytes([128]) * (3 * prod(size)))

    @property
    def feature_size(self) -> int:
        """Elements of one token's features."""
        return self.spec.out * (1 + len(self.spec.deepstack))

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [frames, height, width, 3] → the same in the activations' dtype."""
        return pixels.float().sub_(self._mean).div_(self._std).to(self.place.dtype)

    def packed(self, lengths: Sequence[int]) -> Packed:
        """Patches of each frame, one behind the other."""
        starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if self.place.device.type == "cuda":  # or the copy would wait for what runs there
            starts = starts.pin_memory()
        return Packed(list(lengths), starts.to(self.place.device, non_blocking=True))


def frames_of(items: Sequence[MediaItem]) -> list[int]:
    """Patches of each frame."""
    return [rows * columns for count, rows, columns in (item.grid for item in items) for _ in range(count)]


def in_tokens(grid: Tensor, merge: int) -> Tensor:
    """[rows, columns, …] of a picture's patches → [patches, …], those of one token one behind the other."""
    rows, columns, *rest = grid.shape
    return grid.reshape(rows // merge, merge, columns // merge, merge, *rest).transpose(1, 2).flatten(0, 3)


def patches(pixels: Tensor, patch: int, merge: int = 1, frames: int = 1) -> Tensor:
    """[F, height, width, 3] → [F / frames · patches, 3 · frames · patch²], as kernels of convolutions are stored, in
    the order of `in_tokens`. A single picture is all frames of its patches."""
    if len(pixels) < frames:
        pixels = pixels.expand(frames, *pixels.shape[1:])
    of_time, height, width, _ = pixels.shape
    side = patch * merge
    parts = pixels.reshape(
        of_time // frames, frames, height // side, merge, patch, width // side, merge, patch, 3
    ).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)  # fmt: skip
    return parts.reshape(-1, 3 * frames * patch * patch)


def angles_of_grid(rows: int, columns: int, down: Tensor, across: Tensor) -> Tensor:
    """fp32 [rows, columns, frequencies of both]: each row times those of `down`, then each column times the others."""
    device = down.device
    of_rows = torch.arange(rows, dtype=torch.float32, device=device)[:, None, None] * down
    of_columns = torch.arange(columns, dtype=torch.float32, device=device)[:, None] * across
    return torch.cat((of_rows.expand(rows, columns, -1), of_columns.expand(rows, columns, -1)), dim=-1)


def stretched_table(table: Tensor, side: int, rows: int, columns: int) -> Tensor:
    """fp32 [rows, columns, hidden]: a table of side × side vectors [side², hidden] between whose corners a picture's
    patches lie evenly, each the mean of its four neighbours by distance."""
    (above, below, down), (left, right, across) = (_taps(n, side, table.device) for n in (rows, columns))
    found: Tensor | None = None
    for row, of_row in ((above, 1 - down), (below, down)):
        for column, of_column in ((left, 1 - across), (right, across)):
            weight = of_row[:, None, None] * of_column[None, :, None]
            one = functional.embedding(row[:, None] * side + column, table) * weight
            found = one if found is None else found.add_(one)
    assert found is not None
    return found


def _taps(count: int, side: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of `count` places over `side` entries: the entry before each, the one behind, and how far it is past it."""
    places = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(count - 1, 1)
    before = places.floor()
    first = before.long()
    return first, (first + 1).clamp_(max=side - 1), places - before
