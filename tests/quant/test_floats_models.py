"""Models whose floats ModelOpt, Quark, FBGEMM and compressed-tensors stored, from their files to their products."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.describe.reading import read_folder
from vserve.engine.layers.linear import Linear
from vserve.engine.models.blocks import CausalLM
from vserve.engine.quant.matrix import Int4Matrix
from vserve.engine.weights.loader import load_model

from . import checkpoints
from .checkpoints import Packed

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def static_fp8(weight: Tensor) -> Packed:
    packed, numbers = checkpoints.fp8_tensor(weight)
    return packed | {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(1.0)}, numbers


def row_fp8(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def exponents(weight: Tensor, highest: float) -> tuple[Tensor, Tensor]:
    """Bytes [N, K / 32], and each group's scale [N, K / 32, 1]."""
    power = torch.log2(weight.unflatten(1, (-1, 32)).abs().amax(2) / highest).ceil()
    return (power + 127).to(torch.uint8), torch.exp2(power)[..., None]


def mxfp8(weight: Tensor) -> Packed:
    stored, scale = exponents(weight, 448)
    codes = (weight.unflatten(1, (-1, 32)) / scale).to(torch.float8_e4m3fn)
    return {"weight": codes.flatten(1), "weight_scale": stored}, (codes.float() * scale).flatten(1)


def nibbles(values: Tensor) -> tuple[Tensor, Tensor]:
    """[N, G, 32] → the bytes of the nearest e2m1 [N, K / 2], and these numbers."""
    codes = (values[..., None] - E2M1).abs().argmin(-1)
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, ::2] | flat[:, 1::2] << 4, E2M1[codes]


def mxfp4(weight: Tensor) -> Packed:
    stored, scale = exponents(weight, 6)
    packed, values = nibbles(weight.unflatten(1, (-1, 32)) / scale)
    return {"weight": packed, "weight_scale": stored}, (values * scale).flatten(1)


def packed_mxfp4(weight: Tensor) -> Packed:
    stored, numbers = mxfp4(weight)
    return {"weight_packed": stored["weight"], "weight_scale": stored["weight_scale"]}, numbers


def nvfp4(weight: Tensor) -> Packed:
    factor = weight.abs().amax() / (448 * 6)
    parts = weight.unflatten(1, (-1, 16))
    scales = (parts.abs().amax(2) / 6 / factor).clamp(max=448).to(torch.float8_e4m3fn)
    scale = (scales.float() * factor)[..., None]
    packed, values = nibbles(parts / scale)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor}, (values * scale).flatten(1)


def quark_int4(weight: Tensor) -> Packed:
    parts = weight.unflatten(1, (-1, 32))
    scale = (parts.abs().amax(2) / 7).bfloat16()
    codes = (parts / scale.float()[..., None]).round().clamp(-8, 7)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    fields = (codes.flatten(1).t().long() & 15).unflatten(1, (-1, 8))[..., order]
    words = (fields << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight": packed, "weight_scale": scale.t()}, (codes * scale.float()[..., None]).flatten(1)


def compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}


GROUP = {"type": "float", "strategy": "group", "group_size": 32}
KINDS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any], str]] = {
    "modelopt-fp8": (static_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "FP8 per tensor, static"),
    "modelopt-nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "fbgemm": (row_fp8, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FP8 per channel"),
    "mxfp8": (mxfp8, compressed("mxfp8-quantized", {**GROUP, "num_bits": 8}), "MXFP8"),
    "mxfp4": (packed_mxfp4, compressed("mxfp4-pack-quantized", {**GROUP, "num_bits": 4}), "MXFP4"),
    "quark-mxfp4": (mxfp4, quark(dtype="fp4", qscheme="per_group", group_size=32), "MXFP4"),
    "quark-int4": (quark_int4, quark(dtype="int4", qscheme="per_group", group_size=32), "Quark int4 G=32"),
}


def load(folder: Path, asked: str | None = None) -> CausalLM:
    config = read_folder(folder, quantization=asked)
    return load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)


def matrices(model: CausalLM) -> dict[str, Tensor]:
    """Of each Linear, its matrix transposed: what it makes of the unit vectors."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: layer(torch.eye(layer.shape.in_features)) for name, layer in found.items()}


def names(model: CausalLM) -> set[str]:
    """Of the formats that its matrices are stored in."""
    layers = [layer.method for layer in model.modules() if isinstance(layer, Linear)]
    return {format.name for method in layers for format in getattr(method, "formats", {}).values()}


@pytest.mark.parametrize(("kind", "aside"), [*((kind, False) for kind in KINDS), ("modelopt-nvfp4", True)])
def test_a_model_multiplies_by_what_its_files_mean(
    kind: str, aside: bool, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aside`: told in ModelOpt's own file beside config.json."""
    pack, config, name = KINDS[kind]
    monkeypatch.setitem(checkpoints.KINDS, kind, (pack, config))
    folder = checkpoints.write(tiny_model("llama"), tmp_path, kind)
    if aside:
        file = folder / "quantized" / "config.json"
        raw = json.loads(file.read_text())
        del raw["quantization_config"]
        file.write_text(json.dumps(raw))
        told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": config["quant_algo"]}}
        (folder / "quantized" / "hf_quant_config.json").write_text(json.dumps(told))
    asked = None if aside else config["quant_method"]
    model, twin = load(folder / "quantized", asked), load(folder / "twin")
    assert names(model) == {name}
    expected = matrices(twin)
    # torch's int4 product for the CPU rounds scale and result to bf16.
    fast = any(isinstance(module, Int4Matrix) for module in model.modules())
    assert fast == (kind == "quark-int4")
    for path, found in matrices(model).items():
        assert (found - expected[path]).norm() <= (5e-3 if fast else 1e-6) * expected[path].norm(), path
