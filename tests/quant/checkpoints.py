"""Tiny quantised checkpoints, packed here from the formats' definitions, each with its twin of plain numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]  # suffix → tensor; what they mean
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_NF4 = torch.tensor([
    -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302, 0.2461123,
    0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
])  # fmt: skip


def _words(fields: Tensor) -> Tensor:
    """[..., 8 n] of 4 bits, lowest first → int32 [..., n]."""
    shifted = fields.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    total = shifted.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def _grouped(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """codes 0 … 15 [N, K], scales (as fp16 keeps them) and whole zero points, both [N, groups]."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1), scales, zeros


def _numbers(codes: Tensor, scales: Tensor, zeros: Tensor | float, group: int = GROUP) -> Tensor:
    offset = zeros[..., None] if isinstance(zeros, Tensor) else zeros
    return ((codes.unflatten(1, (-1, group)) - offset) * scales[..., None]).flatten(1)


def awq(weight: Tensor) -> Packed:
    codes, scales, zeros = _grouped(weight)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def along_rows(values: Tensor) -> Tensor:  # [N, n] → [n, N / 8]
        return _words(values.t().unflatten(1, (-1, 8))[..., order].flatten(1))

    packed = {"qweight": along_rows(codes), "qzeros": along_rows(zeros), "scales": scales.t().half()}
    return packed, _numbers(codes, scales, zeros)


def gptq(weight: Tensor) -> Packed:
    """With the columns quantised in an order of their own."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    codes, scales, zeros = _grouped(weight[:, order])
    zeros = zeros.clamp(min=1)
    back = torch.argsort(order)
    packed = {
        "qweight": _words(codes[:, back]).t(),
        "qzeros": _words((zeros - 1).t()),
        "scales": scales.t().half(),
        "g_idx": (back // GROUP).int(),
    }
    return packed, _numbers(codes, scales, zeros)[:, back]


def packed_ints(weight: Tensor) -> Packed:
    parts = weight.unflatten(1, (-1, GROUP))
    scales = (parts.abs().amax(2) / 7.5).bfloat16().float()
    codes = (parts / scales[..., None]).round().clamp(-8, 7).flatten(1)
    packed = {
        "weight_packed": _words(codes + 8),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return packed, _numbers(codes, scales, 0.0)


def int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().clamp(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_channel(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale.bfloat16().float()


def fp8_blocks(weight: Tensor) -> Packed:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    scales = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def nvfp4(weight: Tensor) -> Packed:
    whole = 448 * 6 / weight.abs().amax()
    parts = weight.unflatten(1, (-1, 16))
    scales = (parts.abs().amax(2) / 6 * whole).clamp(max=448).to(torch.float8_e4m3fn)
    spread = (scales.float() / whole).clamp(min=1e-9)[..., None]
    codes = ((parts / spread)[..., None] - _E2M1).abs().argmin(-1).flatten(1)
    packed = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_global_scale": whole.view(1),
    }
    return packed, (_E2M1[codes].unflatten(1, (-1, 16)) * (scales.float() / whole)[..., None]).flatten(1)


def nf4(weight: Tensor) -> Packed:
    blocks = weight.view(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax[:, None])[..., None] - _NF4).abs().argmin(-1).flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    packed = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": _NF4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return packed, (_NF4[codes].view(-1, 64) * absmax[:, None]).view_as(weight)


def _compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"], "config_groups": groups}


_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
# name → (the packer, quantization_config)
KINDS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}),
    "packed": (
        packed_ints,
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}, None,
        ),
    ),
    "int8": (
        int8,
        _compressed(
            "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            {"num_bits": 8, "type": "int", **_TOKEN},
        ),
    ),
    "fp8": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8_channel": (
        fp8_channel,
        _compressed(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            {"num_bits": 8, "type": "float", **_TOKEN},
        ),
    ),
    "fp8_blocks": (
        fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
    ),
    "nvfp4": (
        nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}, None,
        ),
    ),
    "nf4": (
        nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "float32"},
    ),
}  # fmt: skip


_TOWERS = tuple(f"{begin}{part}" for begin in ("", "model.") for part in ("vis", "multi_modal_projector", "mm_proj"))


def write(source: Path, folder: Path, kind: str) -> Path:
    """`source`'s model quantised into folder / "quantized"; its twin, with the numbers that these codes mean, into
    folder / "twin". → folder"""
    pack, config = KINDS[kind]
    plain = load_file(source / "model.safetensors")
    stored, twin = dict(plain), dict(plain)
    for name, weight in plain.items():
        path, _, suffix = name.rpartition(".")
        tower = path.startswith(_TOWERS)  # which published files leave as it is
        if suffix == "weight" and path.endswith(("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3")) and not tower:
            packed, numbers = pack(weight.float())
            del stored[name]
            stored |= {f"{path}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
            twin[name] = numbers.contiguous()
    for where, tensors, changes in (
        ("quantized", stored, {"quantization_config": config}), ("twin", twin, {}),
    ):  # fmt: skip
        target = Path(shutil.copytree(source, folder / where))
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        raw = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(raw | changes))
    return folder
