"""What looks at a model's pictures: numbers that a family reads of config.json, and all that a tower is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .layer_spec import Names

# Whose assembly of blocks it is, and who resizes a picture for it: a file of engine/vision/ each.
TowerKind = Literal["qwen2", "qwen3", "pixtral", "intern", "clip"]
TowerActivation = Literal["gelu_tanh", "gelu", "quick_gelu", "silu"]


@dataclass(frozen=True)
class BlockSpec:
    """A tower's blocks, all alike: attention over all patches of a frame, then an MLP, each behind a norm."""

    depth: int
    hidden: int
    inner: int  # of the MLP
    heads: int
    activation: TowerActivation = "gelu_tanh"
    gated: bool = False  # the MLP has two products that are multiplied
    norm: Literal["layer_bias", "rms"] = "layer_bias"
    eps: float = 1e-6
    bias: bool = True  # of the output of attention and of the MLP
    qkv_bias: bool = True
    theta: float = 10_000.0  # base of the rotation by row and column; 0: nothing is rotated
    layer_scale: bool = False  # what is added to the residual stream is multiplied element by element

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class ProjectorSpec:
    """What is between a tower's vectors and the text's, where it is no part of the tower."""

    activation: TowerActivation = "gelu"
    bias: bool = True
    eps: float = 0.0  # of the norm before; 0: there is none


@dataclass(frozen=True)
class VisionSpec:
    """A tower, what it makes of a picture, and where its features go in a prompt."""

    kind: TowerKind
    blocks: BlockSpec
    out: int  # elements of a feature: the text's hidden size
    patch: int  # pixels a side
    merge: int  # patches a side whose features are one token's
    image_token: int  # of which a picture's features take the places
    video_token: int | None = None
    frames: int = 1  # of a video that one patch is made of
    image_size: int = 0  # pixels of the longest side, or of both, that it was trained with; 0: any
    projector: ProjectorSpec | None = None
    window: int = 0  # tokens a side that attend to one another; 0: all of a frame do
    full: tuple[int, ...] = ()  # blocks without such windows
    table: int = 0  # rows and columns of the table of positions; 0: there is none
    deepstack: tuple[int, ...] = ()  # blocks behind which features are made for the text's first layers, too
    mrope: tuple[int, int, int] | None = None  # rotated pairs by time, row and column; None: positions as text has them
    interleaved: bool = False  # these take turns, and do not lie in three pieces
    bidirectional: Literal["", "all", "sliding"] = ""  # layers of the text in which a picture's tokens see all of it
    separators: tuple[int, ...] = ()  # tokens that may stand within a picture's span beside those of its features
    separator_texts: tuple[str, ...] = ()  # of these, by which a tokenizer's files may give them other numbers
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of red, green and blue, from 0 to 1, and their deviation:
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)  # what pixels are normalised by
    root: str = "visual"  # what the tower's paths begin with
    names: Names = ()  # pieces of the tower's paths → of the checkpoint's, see Family
    other_names: tuple[Names, ...] = ()

    def named(self, path: str) -> str:
        """A path of the tower as the checkpoint names it."""
        for ours, theirs in self.names:
            path = path.replace(ours, theirs)
        return path
