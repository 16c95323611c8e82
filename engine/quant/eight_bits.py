"""Codes of 8 bits: floats (e4m3 with a scale for the matrix, a row or a block; MXFP8) and whole numbers (INT8 W8A8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ModelError
from .format import (
    CHANNEL,
    DUMMY_STD,
    EXPONENTS,
    TENSOR,
    Scales,
    Stored,
    beside,
    find_scales,
    named,
    pair,
    quantised,
    refuse_scaled_inputs,
)
from .settings import SCALES, Headers, names, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes


_SPREAD = 64.0  # of dummy codes: seven standard deviations stay below e4m3's largest, 448
# Modules that no writer quantises unless the files say so.
HEADS = ("lm_head", "embed_tokens", "embed_tokens_per_layer")
INPUT = "input_scale"


@dataclass(frozen=True)
class Fp8:
    """w = weight · scale."""

    as_stored: ClassVar[bool] = True  # codes are the file's
    scales: Scales
    input: str | None = None  # suffix of the input's scale, one for all of it, where the checkpoint fixes that too
    beside: tuple[tuple[str, Stored], ...] = ()

    @property
    def name(self) -> str:
        rows, columns = self.scales.block
        if self.scales.exponents and (rows, columns) == (1, 32):
            return "MXFP8"
        if self.scales.block in (TENSOR, CHANNEL):
            share = "tensor" if self.scales.block == TENSOR else "channel"
        else:
            share = f"{rows}×{columns} block"
        return f"FP8 per {share}{', static' if self.input else ''}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if self.scales.block[0] == 1 and not self.scales.exponents:  # tiles of two dimensions may end with the matrix
            whole_groups(columns, self.scales.block[1] or None)
        tensors = {
            "weight": Stored((rows, columns), ("F8_E4M3",)),
            self.scales.suffix: self.scales.stored(rows, columns),
            **dict(self.beside),
        }
        if self.input:
            tensors[self.input] = replace(tensors.get(self.input, Stored((1,), SCALES)), optional=False)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes

        input_scale = one_number(tensors[self.input], self.input) if self.input else None
        scales, group = self.scales.read(tensors, rows, columns), self.scales.group(columns)
        return Codes(tensors["weight"], scales, group, bits=8, input_scale=input_scale)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes

        values = torch.empty(rows, columns, device=generator.device).normal_(0, _SPREAD, generator=generator)
        codes = values.clamp_(-448, 448).to(torch.float8_e4m3fn)
        group = self.scales.group(columns)
        shape = rows, -(-columns // group)
        scales = torch.full(shape, DUMMY_STD / _SPREAD, device=generator.device)
        return Codes(codes, scales, group, bits=8, input_scale=4 / 448 if self.input else None)


def one_number(tensor: Tensor, suffix: str) -> float:
    """Raises ModelError where there are several, or one that cannot scale anything."""
    if tensor.numel() == 1 and 0 < (value := float(tensor)) < float("inf"):
        return value
    raise ModelError(
        f"{suffix} has shape {list(tensor.shape)} and begins with {tensor.flatten()[:1].tolist()}, one number above 0 "
        "belongs there: download the checkpoint again"
    )


def find_fp8(path: str, stored: Headers, static: bool = False, block: tuple[int, int] | None = None) -> Fp8:
    """How the module at `path` is stored, by its headers. transformers has names of its own for scales.

    Raises ModelError where it is no such FP8.
    """
    refuse_scaled_inputs(path, stored)
    dtype, shape = stored.get("weight", ("missing", ()))
    if dtype != "F8_E4M3" or len(shape) != 2:
        raise ModelError(
            f"{path}.weight is {dtype} {list(shape)}, 8-bit floats are read as F8_E4M3 matrices: use another checkpoint"
        )
    suffix = "weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"
    others = "input_scale" not in stored and "activation_scale" in stored
    input = ("activation_scale" if others else INPUT) if static else None
    return Fp8(find_scales(path, stored, suffix, block), input, beside(stored))


class Fp8Scheme:
    """quant_method fp8: of transformers, AutoFP8 and DeepSeek."""

    method = "fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        activations = config.get("activation_scheme") or "dynamic"
        if activations not in ("static", "dynamic"):
            raise ModelError(
                f"quantization_config: activation_scheme is {activations!r}, read are static and dynamic: correct "
                "config.json"
            )
        if (fmt := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ModelError(
                f"quantization_config: fmt is {fmt!r}, read is e4m3: use another checkpoint, or the unquantized model "
                "with --quantization fp8"
            )
        size = config.get("weight_block_size")
        self.block = None if size is None else pair(size, "weight_block_size")
        self.static = activations == "static" and self.block is None
        self.ignored = names(config, "ignored_layers", "modules_to_not_convert")

    def format(self, path: str, stored: Headers | None) -> Fp8 | None:
        if stored is None:
            if named(path, (*self.ignored, *HEADS)):
                return None
            suffix = "weight_scale_inv" if self.block else "weight_scale"
            return Fp8(Scales(suffix, self.block or TENSOR), INPUT if self.static else None)
        if any(dtype == "F8_E4M3" and len(shape) == 3 for dtype, shape in stored.values()):  # of all experts
            return Fp8(Scales("weight_scale_inv", self.block or TENSOR))
        return find_fp8(path, stored, self.static, self.block) if quantised(stored) else None


class FbgemmFp8Scheme:
    """quant_method fbgemm_fp8: a scale a row, and the input's a token.

    Its `activation_scale_ub` only cuts outliers of the input; a token's own scale represents them, so it is not used.
    """

    method = "fbgemm_fp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ignored = names(config, "modules_to_not_convert")

    def format(self, path: str, stored: Headers | None) -> Fp8 | None:
        if stored is None:
            return None if named(path, (*self.ignored, *HEADS)) else Fp8(Scales("weight_scale", CHANNEL))
        return find_fp8(path, stored) if quantised(stored) else None


class Mxfp8Scheme:
    """quant_method mxfp8: a power of two for 32 columns of a row."""

    method = "mxfp8"
    _scales = Scales("weight_scale", (1, 32), dtypes=EXPONENTS)

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ignored = names(config, "modules_to_not_convert", "ignored_layers")

    def format(self, path: str, stored: Headers | None) -> Fp8 | None:
        if stored is None:
            return None if named(path, (*self.ignored, *HEADS)) else Fp8(self._scales)
        return find_fp8(path, stored, block=(1, 32)) if quantised(stored) else None


_ZEROS = ("I8", "I32", *SCALES)


@dataclass(frozen=True)
class Int8:
    """w = (weight - weight_zero_point) · weight_scale, codes of `bits` bits in bytes.

    `static`: the checkpoint fixes the input's scale. One that fixes a zero point as well is served with a scale for
    each token instead, which has no rounding that the fixed one would avoid: `Codes` has no zero point of the input.
    """

    as_stored: ClassVar[bool] = True  # codes are the file's
    scales: Scales
    bits: int = 8
    zeros: Scales | None = None
    static: bool = False
    beside: tuple[tuple[str, Stored], ...] = ()

    @property
    def name(self) -> str:
        rows, columns = self.scales.block
        share = f"G={columns}" if columns else "per channel" if rows else "per tensor"
        zeros = ", zero points" if self.zeros else ""
        return f"INT{self.bits} {share}{zeros}{', static' if self.static else ''}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if self.scales.block[0] == 1:
            whole_groups(columns, self.scales.block[1] or None)
        tensors = {
            "weight": Stored((rows, columns), ("I8",)),
            self.scales.suffix: self.scales.stored(rows, columns),
            **dict(self.beside),
        }
        if self.zeros is not None:
            tensors[self.zeros.suffix] = self.zeros.stored(rows, columns)
        if self.static:
            tensors["input_scale"] = replace(tensors.get("input_scale", Stored((1,), SCALES)), optional=False)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes

        low, high = -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        if self.bits < 8 and not (low <= int(tensors["weight"].min()) and int(tensors["weight"].max()) <= high):
            raise ModelError(
                f"weight holds codes from {int(tensors['weight'].min())} to {int(tensors['weight'].max())}, with "
                f"num_bits {self.bits} they go from {low} to {high}: correct config.json, or download it again"
            )
        scales = self.scales.read(tensors, rows, columns)
        zeros = None if self.zeros is None else self.zeros.read(tensors, rows, columns)
        input_scale = None
        if self.static and "input_zero_point" not in tensors:
            input_scale = one_number(tensors["input_scale"], "input_scale")
        group = self.scales.group(columns)
        return Codes(tensors["weight"], scales, group, self.bits, zeros, input_scale=input_scale)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes

        device, highest = generator.device, 2 ** (self.bits - 1) - 1
        spread = highest / 4
        values = torch.empty(rows, columns, device=device).normal_(0, spread, generator=generator)
        codes = values.round_().clamp_(-highest, highest).to(torch.int8)
        group = self.scales.group(columns)
        scales = torch.full((rows, -(-columns // group)), DUMMY_STD / spread, device=device)
        zeros = None if self.zeros is None else torch.zeros_like(scales)
        return Codes(codes, scales, group, self.bits, zeros, input_scale=4 / 127 if self.static else None)


def find_int8(
    path: str, stored: Headers, bits: int = 8, static: bool = False, block: tuple[int, int] | None = None
) -> Int8:
    """How the module at `path` is stored, by its headers. Raises ModelError where scales have no known shape."""
    refuse_scaled_inputs(path, stored)
    scales = find_scales(path, stored, "weight_scale", block)
    zeros = None
    if "weight_zero_point" in stored:
        zeros = Scales("weight_zero_point", scales.block, scales.shape, _ZEROS)
    return Int8(scales, bits, zeros, static, beside(stored))


def plain_int8(block: tuple[int, int], bits: int, symmetric: bool, static: bool) -> Int8:
    """As the configuration has it, where there are no files."""
    zeros = None if symmetric else Scales("weight_zero_point", block, dtypes=_ZEROS)
    return Int8(Scales("weight_scale", block), bits, zeros, static)
