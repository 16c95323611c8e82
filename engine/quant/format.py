"""What a checkpoint's way to store a matrix has to say, and where it is asked from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # what cannot be read is refused before torch is imported
    import torch
    from torch import Tensor

    from .codes import Codes


FLOATS = ("F64", "F32", "F16", "BF16")  # types, as safetensors names them, of weights that are not quantised
DUMMY_STD = 0.02  # of dummy weights: about what training starts from, so activations stay finite


@dataclass(frozen=True)
class Stored:
    """A tensor that a format needs: its shape in the checkpoint, and the types it may have there."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # as safetensors names them: "I32", "F8_E4M3", "BF16", …
    optional: bool = False  # it may be missing


class Format(Protocol):
    """How one module of a checkpoint stores its matrix [N, K] (rows of the output, columns of the input)."""

    @property
    def name(self) -> str:
        """For people: "AWQ int4 G=128"."""
        ...

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        """Suffix behind the module's path ("qweight", "weight_scale") → what must be stored there, bias excluded.

        Raises ModelError where such a matrix cannot be stored so, naming value, limit and remedy.
        """
        ...

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        """tensors: those of `expected`, whole, on one device, as stored. Raises ModelError for wrong values."""
        ...

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        """Random codes on the generator's device, for matrices of about N(0, 0.02)."""
        ...


class Scheme(Protocol):
    """What a checkpoint's configuration says of its modules. Made by engine/quant/scheme.py."""

    method: str  # "awq", "gptq", "fp8", …, as vLLM and transformers name it

    def format(self, path: str, stored: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> Format | None:
        """How the module at `path` ("model.layers.0.self_attn.q_proj") is stored; None: not quantised.

        `stored`: suffix → (dtype, shape) of the tensors below that path, from the files' headers, which decide; None
        where there are no files (dummy weights): then the configuration does. Raises ModelError where both disagree.
        """
        ...
