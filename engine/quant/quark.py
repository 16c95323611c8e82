"""AMD's Quark: FP8, INT8, MXFP4, and 4-bit whole numbers in groups, packed eight to a word along the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .eight_bits import HEADS, INPUT, Fp8, find_fp8, find_int8, plain_int8
from .format import CHANNEL, DUMMY_STD, TENSOR, Scales, Stored, matched, named, quantised, section
from .fp4 import Fp4, find_fp4
from .settings import SCALES, Headers, names, whole_groups

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes
    from .format import Format

_READ = "fp8_e4m3, int8 and uint4/int4 per group and fp4 with e8m0 scales of 32 columns"
_ORDERS = {"reorder": (0, 4, 1, 5, 2, 6, 3, 7), "order": tuple(range(8))}  # nibble that holds row 8w + i of word w


@dataclass(frozen=True)
class QuarkInt4:
    """w = (q - z) · scale; `signed`: the nibbles q and z are -8 to 7. The matrix lies transposed."""

    group: int  # 0: one scale for all columns
    signed: bool
    zeros: bool
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"Quark int4 G={self.group or 'all'}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        whole_groups(columns, self.group or None)
        groups, words = -(-columns // (self.group or columns)), -(-rows // 8)
        tensors = {"weight": Stored((columns, words), ("I32",)), "weight_scale": Stored((groups, rows), SCALES)}
        if self.zeros:
            tensors["weight_zero_point"] = Stored((groups, words), ("I32",))
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        import torch

        from .codes import Codes

        scales = tensors["weight_scale"].float().t().contiguous()
        zeros = torch.full_like(scales, 8 if self.signed else 0)
        if self.zeros:
            zeros = self._unpack(tensors["weight_zero_point"], rows).float()
        return Codes(self._unpack(tensors["weight"], rows), scales, self.group or columns, bits=4, zeros=zeros)

    def _unpack(self, words: Tensor, rows: int) -> Tensor:
        """int32 [*, ceil(N / 8)] → uint8 [N, *]; signed ones with 8 added, to codes and zero points alike."""
        import torch

        shifts = torch.tensor(self.order, dtype=torch.int32, device=words.device) * 4
        nibbles = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)[:, :rows].t().contiguous()
        return nibbles ^ 8 if self.signed else nibbles

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes

        device, group = generator.device, self.group or columns
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device, generator=generator)
        scales = torch.full((rows, -(-columns // group)), DUMMY_STD / 4.6, device=device)  # 4.6: the spread of 0 to 15
        return Codes(codes, scales, group, bits=4, zeros=torch.full_like(scales, 8))


@dataclass(frozen=True)
class _Layer:
    """What the configuration says of some modules."""

    dtype: str | None  # None: their weights are not quantised
    qscheme: str = "per_tensor"
    group: int = 0
    static: bool = False  # of the input

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> _Layer:
        weight, inputs = values.get("weight"), values.get("input_tensors")
        if weight is None:
            return cls(None)
        if not isinstance(weight, Mapping):
            raise ModelError(
                f"quantization_config: a weight is quantized in several steps ({weight!r:.60}), of Quark's checkpoints "
                f"{_READ} are read: use the unquantized model with --quantization fp8"
            )
        dtype, qscheme = str(weight.get("dtype")), str(weight.get("qscheme"))
        size = weight.get("group_size")
        kinds = {
            "fp8_e4m3": ("per_tensor", "per_channel"),
            "int8": ("per_tensor", "per_channel"),
            "int4": ("per_group",),
            "uint4": ("per_group",),
            "fp4": ("per_group",),
        }
        mx = dtype != "fp4" or (size == 32 and weight.get("scale_format", "e8m0") == "e8m0")
        grouped = qscheme != "per_group" or (type(size) is int and (size > 0 or size == -1))
        if qscheme not in kinds.get(dtype, ()) or not mx or not grouped:
            raise ModelError(
                f"quantization_config: weights are {dtype} {qscheme}, group_size {size}, of Quark's checkpoints "
                f"{_READ} are read: use the unquantized model with --quantization fp8"
            )
        static = isinstance(inputs, Mapping) and not inputs.get("is_dynamic") and inputs.get("qscheme") == "per_tensor"
        return cls(dtype, qscheme, max(size or 0, 0), static and dtype in ("fp8_e4m3", "int8"))


class QuarkScheme:
    """quant_method quark. `kv_cache_scheme`: what it says of the cache, as compressed-tensors would."""

    method = "quark"

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.ignored = names(config, "exclude")
        self.default = _Layer.parse(section(config, "global_quant_config"))
        layers = section(config, "layer_quant_config")
        self.layers = {pattern: _Layer.parse(section(layers, pattern)) for pattern in layers}
        types = section(config, "layer_type_quant_config")
        for kind in {"Linear", "nn.Linear"} & types.keys():
            self.default = _Layer.parse(section(types, kind))
        export = section(config, "export")
        method = str(export.get("pack_method") or "reorder")
        if method not in _ORDERS:
            raise ModelError(
                f"quantization_config: pack_method is {method!r}, read are {' and '.join(_ORDERS)}: export the "
                "checkpoint again"
            )
        self.order = _ORDERS[method]
        cache = config.get("kv_cache_quant_config") or export.get("kv_cache_group")
        fp8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        self.kv_cache_scheme = fp8 if cache else None

    def format(self, path: str, stored: Headers | None) -> Format | None:
        layer = next((self.layers[pattern] for pattern in self.layers if matched(path, [pattern])), self.default)
        if stored is None:
            if layer.dtype is None or named(path, HEADS) or matched(path, self.ignored):
                return None
            return self._without_files(layer)
        if not quantised(stored):
            return None
        dtype = stored.get("weight", ("",))[0]
        match dtype:
            case "F8_E4M3":
                return find_fp8(path, stored, layer.static)
            case "I8":
                return find_int8(path, stored, static=layer.static)
            case "U8":
                return find_fp4(path, stored)
            case "I32" if layer.dtype in ("int4", "uint4"):
                return QuarkInt4(layer.group, layer.dtype == "int4", "weight_zero_point" in stored, self.order)
        raise ModelError(
            f"{path}.weight is {dtype}, where quantization_config says {layer.dtype or 'not quantized'}; read are "
            f"{_READ}: download the checkpoint again"
        )

    def _without_files(self, layer: _Layer) -> Format:
        """The format that the configuration alone says."""
        block = TENSOR if layer.qscheme == "per_tensor" else CHANNEL
        match layer.dtype:
            case "fp8_e4m3":
                return Fp8(Scales("weight_scale", block), INPUT if layer.static else None)
            case "int8":
                return plain_int8(block, 8, symmetric=True, static=layer.static)
            case "fp4":
                return Fp4("weight")
        return QuarkInt4(layer.group, layer.dtype == "int4", layer.dtype == "uint4", self.order)
