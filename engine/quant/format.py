"""A checkpoint's way to store a matrix: what a format has to say, what the files' headers say, and scales. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ModelError
from .settings import SCALES, Headers, expression

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes


FLOATS = ("F64", "F32", "F16", "BF16")  # types, as safetensors names them, of weights that are not quantised
DUMMY_STD = 0.02  # of dummy weights: about what training starts from, so activations stay finite


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a checkpoint, as its file's header describes it."""

    file: Path
    dtype: str  # safetensors' name: "BF16", "F32", …
    shape: tuple[int, ...]
    num_bytes: int


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


EXPONENTS = ("U8", "F8_E8M0")  # a byte e stands for 2^(e - 127)
# What calibration left beside a matrix. A product that quantises its input by its own scales needs none of it.
BESIDE = ("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale")


def quantised(stored: Headers) -> bool:
    """Whether there is a matrix below the path, and not as plain floats."""
    if "weight" in stored:
        return stored["weight"][0] not in FLOATS
    return any(suffix in stored for suffix in ("weight_packed", "qweight"))


def beside(stored: Headers | None) -> tuple[tuple[str, Stored], ...]:
    """What lies beside the matrix and may be passed over: the loader shall not take it for left over."""
    return tuple(
        (suffix, Stored(stored[suffix][1], (stored[suffix][0],), optional=True))
        for suffix in BESIDE
        if stored is not None and suffix in stored
    )


def refuse_scaled_inputs(path: str, stored: Headers | None) -> None:
    """Raises ModelError where the matrix expects its input multiplied, column by column, by AWQ's factors."""
    if stored is not None and "pre_quant_scale" in stored:
        raise ModelError(
            f"{path}.pre_quant_scale multiplies the input of this matrix, which is not done: use a checkpoint in which "
            "AWQ's factors are folded into the weights (awq, compressed-tensors)"
        )


def named(path: str, names: Iterable[str]) -> bool:
    """Whether `path` or one of its parts is among these names: "lm_head", "model.layers.0", "mlp.gate"."""
    return any(f".{name}." in f".{path}." for name in names if name)


def matched(path: str, patterns: Iterable[str]) -> bool:
    """As `named`; a pattern may also have wildcards of file names, or begin with "re:"."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if expression(pattern.removeprefix("re:"), "a list of modules").match(path):
                return True
        elif fnmatchcase(path, pattern) or named(path, [pattern]):
            return True
    return False


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under this key, empty where there is none. Raises ModelError for anything else there."""
    found = config.get(key)
    if isinstance(found, Mapping):
        return found
    if found is None:
        return {}
    raise ModelError(f"quantization_config: {key} is {found!r:.60}, an object belongs there: correct config.json")


def pair(value: Any, key: str) -> tuple[int, int]:
    """Rows and columns of a block, from [128, 128] or the older "128x128". Raises ModelError for anything else."""
    found = value
    if isinstance(value, str):
        found = [int(part) if part.isdecimal() else part for part in value.split("x")]
    if isinstance(found, (list, tuple)) and len(found) == 2:
        rows, columns = found
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise ModelError(
        f"quantization_config: {key} is {value!r:.60}, two whole numbers above 0 belong there ([128, 128]): correct "
        "config.json"
    )


TENSOR, CHANNEL = (0, 0), (1, 0)  # blocks: all of the matrix, and one row of it


@dataclass(frozen=True)
class Scales:
    """One number for each block of a matrix [N, K]; blocks at the end may be ragged."""

    suffix: str
    block: tuple[int, int]  # rows and columns of a block; 0: all there are
    shape: tuple[int, ...] | None = None  # as stored, where it is not the usual one
    dtypes: tuple[str, ...] = SCALES  # EXPONENTS: bytes that stand for powers of two

    @property
    def exponents(self) -> bool:
        return self.dtypes == EXPONENTS

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """How many of them there are, down and across."""
        return -(-rows // (self.block[0] or rows)), -(-columns // (self.block[1] or columns))

    def group(self, columns: int) -> int:
        """Columns that share a scale."""
        return min(self.block[1] or columns, columns)

    def stored(self, rows: int, columns: int) -> Stored:
        usual = (1,) if self.block == TENSOR else self.blocks(rows, columns)
        return Stored(usual if self.shape is None else self.shape, self.dtypes)

    def read(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """fp32 [N, ceil(K / group)], one a row whatever the blocks were: parts of a fused matrix keep their own."""
        found = tensors[self.suffix]
        down, across = self.blocks(rows, columns)
        values = (powers_of_two(found) if self.exponents else found.float()).reshape(down, across)
        return values.repeat_interleave(self.block[0] or rows, dim=0)[:rows].contiguous()


def powers_of_two(exponents: Tensor) -> Tensor:
    """e8m0 → fp32: 2^(e - 127), with 255 no number (OCP Microscaling Formats 1.0, 5.4.1)."""
    import torch

    bits = exponents.view(torch.uint8).int()
    bits = torch.where(bits == 0, 1 << 22, torch.where(bits == 255, 0x7FC00000, bits << 23))
    return bits.view(torch.float32)


def find_scales(path: str, stored: Headers, suffix: str, block: tuple[int, int] | None = None) -> Scales:
    """How the scales of `path` are stored, by their shape beside the matrix's: for all, a row, or a block.

    `block`: rows and columns, as the configuration has them. Raises ModelError where the shape fits none of these.
    """
    whole = stored["weight"][1]
    if len(whole) != 2 or 0 in whole:
        raise ModelError(f"{path}.weight has shape {list(whole)}, which is no matrix: download the checkpoint again")
    rows, columns = whole
    if suffix not in stored:
        raise ModelError(
            f"{path}.weight is {stored['weight'][0]}, without a {suffix} beside it: download the checkpoint again"
        )
    dtype, shape = stored[suffix]
    bare = tuple(size for size in shape if size != 1)
    dtypes = EXPONENTS if dtype in EXPONENTS else SCALES
    candidates = [TENSOR, CHANNEL, (1, 32)] if dtypes == EXPONENTS else [TENSOR, CHANNEL, (128, 128)]
    for candidate in [*([block] if block else []), *candidates]:
        scales = Scales(suffix, candidate, shape, dtypes)
        down, across = scales.blocks(rows, columns)
        if bare == tuple(size for size in (down, across) if size != 1) and prod(shape) == down * across:
            return scales
    expected = f"one scale, one for each of {rows} rows"
    if block and block not in (TENSOR, CHANNEL):
        down, across = Scales(suffix, block).blocks(rows, columns)
        expected += f", or {[down, across]}, one a block of {block[0]} × {block[1] or columns}"
    raise ModelError(
        f"{path}.{suffix} has shape {list(shape)}, expected is {expected}: correct quantization_config in config.json, "
        "or download the checkpoint again"
    )
