"""NVIDIA's model optimizer: FP8, MXFP8 and NVFP4, told in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .eight_bits import HEADS, INPUT, Fp8, find_fp8
from .format import CHANNEL, EXPONENTS, TENSOR, Scales, matched, named, quantised, section
from .fp4 import Fp4, find_fp4
from .settings import Headers, names

if TYPE_CHECKING:
    from .format import Format

_BLOCK = (128, 128)
# quant_algo → the format where there are no files. With files, their headers tell them apart.
_FORMATS: dict[str, Format] = {
    "FP8": Fp8(Scales("weight_scale", TENSOR), INPUT),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(Scales("weight_scale", CHANNEL)),
    "FP8_PB_WO": Fp8(Scales("weight_scale", _BLOCK)),
    "MXFP8": Fp8(Scales("weight_scale", (1, 32), dtypes=EXPONENTS)),
    "NVFP4": Fp4("weight", "weight_scale_2", shape=()),
    "W4A16_NVFP4": Fp4("weight", "weight_scale_2", shape=()),
}
_MIXED = "MIXED_PRECISION"


class ModelOptScheme:
    """quant_method modelopt. `kv_cache_scheme`: what it says of the cache, as compressed-tensors would."""

    method = "modelopt"

    def __init__(self, config: Mapping[str, Any]) -> None:
        values = section(config, "quantization") or config
        self.ignored = names(values, "exclude_modules", "ignore")
        self.kv_cache_scheme = _kv_cache_scheme(values)
        self.algorithm = _known(values.get("quant_algo"))
        layers = section(values, "quantized_layers")
        self.layers = {path: _known(section(layers, path).get("quant_algo")) for path in layers}

    def format(self, path: str, stored: Headers | None) -> Format | None:
        algorithm = self.layers.get(path) if self.algorithm == _MIXED else self.algorithm
        if stored is None:
            if algorithm is None or named(path, HEADS) or matched(path, self.ignored):
                return None
            return _FORMATS.get(algorithm)
        if not quantised(stored):
            return None
        dtype = stored.get("weight", ("",))[0]
        if dtype == "U8":
            return find_fp4(path, stored)
        if dtype == "F8_E4M3":
            static = algorithm == "FP8" and "input_scale" in stored
            return find_fp8(path, stored, static, _BLOCK if algorithm == "FP8_PB_WO" else None)
        raise ModelError(
            f"{path}.weight is {dtype}, of modelopt's checkpoints F8_E4M3 and U8 are read: use the unquantized model "
            "with --quantization fp8"
        )


def _known(algorithm: Any) -> str | None:
    """None: only the cache is quantised. Raises ModelError for what is not read."""
    if algorithm is None:
        return None
    if isinstance(algorithm, str) and algorithm.upper() in (*_FORMATS, _MIXED):
        return algorithm.upper()
    raise ModelError(
        f"quant_algo is {algorithm!r}, of modelopt's checkpoints {', '.join([*_FORMATS, _MIXED])} are read: use one of "
        "these, or the unquantized model with --quantization fp8"
    )


def _kv_cache_scheme(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if scheme := section(values, "kv_cache_scheme"):
        return scheme
    if values.get("kv_cache_quant_algo") == "FP8":
        return {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return None  # NVFP4's and others' need no scale of the checkpoint to be served in 16 bits
