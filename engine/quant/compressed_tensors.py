"""compressed-tensors, as llm-compressor writes it: whole numbers and floats of 4 and 8 bits, by groups of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .config_groups import Group, Weights, find_group
from .eight_bits import INPUT, Fp8, find_fp8, find_int8, plain_int8
from .format import EXPONENTS, Scales, Stored, quantised, section
from .fp4 import Fp4, find_fp4
from .settings import SCALES, Headers, names, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes
    from .format import Format


_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
_SPARSE = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")


class CompressedTensorsScheme:
    """quant_method compressed-tensors. `kv_cache_scheme`: QuantizationArgs of the cache, or None."""

    method = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse(config)
        self.groups: list[Group] = []
        self.kv_cache_scheme: Mapping[str, Any] | None = section(config, "kv_cache_scheme") or None
        whole = config.get("format")
        for name, values in section(config, "config_groups").items():
            group = Group.parse(name, values)
            self.groups.append(replace(group, format=group.format or (None if whole == "mixed-precision" else whole)))
        for group in self.groups:
            _refuse_format(group.format)
            if group.weights is not None:
                _refuse_weights(group.weights)
        self.ignore = names(config, "ignore")
        self.orders_columns = any(group.weights is not None and group.weights.ordered for group in self.groups)

    def orders(self, path: str) -> bool:
        """Whether the module's columns were quantised in an order of their own."""
        group = find_group(path, self.groups, self.ignore)
        return group is not None and group.weights is not None and group.weights.ordered

    def format(self, path: str, stored: Headers | None) -> Format | None:
        group = find_group(path, self.groups, self.ignore)
        weights = None if group is None else group.weights
        if stored is None:
            return None if group is None or weights is None else _without_files(group, weights)
        if not quantised(stored):
            return None
        block = None if weights is None else weights.block
        static = group is not None and group.static and "input_scale" in stored
        suffix = "weight_packed" if "weight_packed" in stored else "weight"
        match suffix, stored.get(suffix, ("none", ()))[0]:
            case "weight", "F8_E4M3" if weights is None or _is(weights, "float", 8):
                return find_fp8(path, stored, static, block)
            case "weight", "I8" if weights is None or weights.type == "int":
                if weights is not None and "weight_g_idx" in stored:
                    return _packed(weights, words=False)
                return find_int8(path, stored, weights.bits if weights else 8, static, block)
            case "weight_packed", "U8" if weights is None or _is(weights, "float", 4):
                return find_fp4(path, stored)
            case "weight_packed", "I32" if weights is not None and weights.type == "int":
                return _packed(weights)
        found = stored.get(suffix, ("none",))[0]
        says = "has no group for it" if weights is None else f"says {weights.described}"
        raise ModelError(
            f"{path}.{suffix} is {found}, and quantization_config {says}: correct config.json, or download the "
            "checkpoint again"
        )


def _is(weights: Weights, kind: str, bits: int) -> bool:
    return (weights.type, weights.bits) == (kind, bits)


def _without_files(group: Group, weights: Weights) -> Format:
    """The format that the configuration alone says."""
    if weights.type == "float":
        if weights.bits == 4:
            nvfp4 = weights.strategy == "tensor_group"
            return Fp4("weight_packed", "weight_global_scale", divisor=True) if nvfp4 else Fp4("weight_packed")
        if weights.block == (1, 32):
            return Fp8(Scales("weight_scale", weights.block, dtypes=EXPONENTS))
        return Fp8(Scales("weight_scale", weights.block), INPUT if group.static else None)
    if group.format == "pack-quantized" or (not group.inputs and group.format is None):
        return _packed(weights)
    return plain_int8(weights.block, weights.bits, weights.symmetric, group.static)


def _packed(weights: Weights, words: bool = True) -> Format:
    """Integers for weights alone; `words`: in int32, else a byte each. Raises ModelError for blocks of rows."""
    if weights.strategy == "block":
        raise ModelError(
            f"quantization_config: weights are {weights.described}, packed integers are read per tensor, channel and "
            "group: quantize the model again"
        )
    return PackedInts(weights.bits, weights.group or None, weights.symmetric, words, weights.strategy == "tensor")


def _refuse(config: Mapping[str, Any]) -> None:
    """Raises ModelError for what needs more than codes and scales."""
    kind = section(config, "sparsity_config").get("format") or "dense"
    if config.get("format") in _SPARSE or kind != "dense":
        found = config["format"] if config.get("format") in _SPARSE else kind
        raise ModelError(
            f"the checkpoint is stored in the sparse layout {found!r}, which vserve does not read: export it again as "
            "pack-quantized or float-quantized without sparsity"
        )
    transform = section(config, "transform_config")
    if transform.get("config_groups", transform):
        raise ModelError(
            "quantization_config: transform_config needs Hadamard rotations at run time: use a checkpoint without "
            "transform_config"
        )
    _refuse_format(config.get("format"))


def _refuse_format(name: str | None) -> None:
    if name in _SPARSE or name == "mxfp6-pack-quantized" or (name is not None and name not in _FORMATS):
        raise ModelError(
            f"quantization_config: format is {name!r}, read are {', '.join(_FORMATS)}: export the checkpoint again, or "
            "serve the unquantized model with --quantization fp8"
        )


def _refuse_weights(weights: Weights) -> None:
    if weights.type == "float":
        fp4 = weights.bits == 4 and (weights.strategy, weights.group) in (("tensor_group", 16), ("group", 32))
        if weights.bits != 8 and not fp4:
            raise ModelError(
                f"quantization_config: weights are {weights.described}, of floats FP8, NVFP4 (tensor_group of 16) and "
                "MXFP4 (group of 32) are read: use the unquantized model with --quantization fp8"
            )


@dataclass(frozen=True)
class PackedInts:
    """w = (code - zero) · weight_scale, where code and zero are signed numbers of `bits` bits.

    bits: 1 to 8. group: columns that share a scale (strategy group); None: the whole row (channel). packed: codes lie
    in int32 words (pack-quantized), all of them raised by 2 ** (bits - 1); else each in an int8 (int-quantized).
    per_tensor: one scale for the matrix (strategy tensor), `group` is None then.
    """

    bits: int
    group: int | None = None
    symmetric: bool = True
    packed: bool = True
    per_tensor: bool = False

    @property
    def name(self) -> str:
        group = "tensor" if self.per_tensor else "channel" if self.group is None else self.group
        return f"compressed-tensors int{self.bits} G={group}{'' if self.symmetric else ' asymmetric'}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = 1 if self.group is None else -(-columns // self.group)
        scales = (1,) if self.per_tensor else (rows, groups)
        zeros = Stored(scales, ("I8",), optional=self.symmetric)
        if not self.packed:
            tensors = {"weight": Stored((rows, columns), ("I8",))}
        else:
            tensors = {
                "weight_packed": Stored((rows, -(-columns * self.bits // 32)), ("I32",)),
                "weight_shape": Stored((2,), ("I64", "I32"), optional=True),
            }
            if not self.per_tensor:  # along the output, unlike the codes
                zeros = Stored((-(-rows * self.bits // 32), groups), ("I32",), optional=self.symmetric)
        if self.group is not None:
            tensors["weight_g_idx"] = Stored((columns,), ("I32", "I64"), optional=True)
        return {**tensors, "weight_scale": Stored(scales, SCALES), "weight_zero_point": zeros}

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        import torch

        from .integers import bit_stream, integer_codes

        half = 1 << (self.bits - 1)
        if self.packed:
            self._check(tensors, rows, columns)
            codes = bit_stream(tensors["weight_packed"], self.bits, columns)
        else:
            codes = tensors["weight"].view(torch.uint8) + half  # uint8 wraps around
            if self.bits < 8 and int(codes.max()) >= 2 * half:
                raise ModelError(
                    f"weight holds codes from {int(tensors['weight'].min())} to {int(tensors['weight'].max())}, "
                    f"config.json says {self.bits} bits: correct num_bits"
                )
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = bit_stream(zeros.t(), self.bits, rows).t()
        elif zeros is not None:
            zeros = zeros.view(torch.uint8) + half
        scales = tensors["weight_scale"]
        if self.per_tensor:
            scales = scales.view(1, 1).expand(rows, 1)
            zeros = None if zeros is None else zeros.view(1, 1).expand(rows, 1)
        groups = tensors.get("weight_g_idx")
        if groups is not None and bool((groups == -1).any()):  # never filled in: columns lie in their order
            groups = None
        if groups is None:
            whole_groups(columns, self.group)
        return integer_codes(codes, scales, zeros, self.group or columns, self.bits, self.symmetric, groups)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, self.bits, self.group or columns, self.symmetric, generator)

    @staticmethod
    def _check(tensors: Mapping[str, Tensor], rows: int, columns: int) -> None:
        if "weight_shape" in tensors and (shape := tensors["weight_shape"].tolist()) != [rows, columns]:
            raise ModelError(
                f"weight_shape is {shape} in the checkpoint, config.json makes the matrix {[rows, columns]}: the "
                "weights and the config are not of one model, download both again"
            )
