"""Writes tests/quant/data/ints.safetensors: tiny matrices as the libraries themselves pack and read them.

Run by hand, in an environment with bitsandbytes, compressed-tensors, hqq, auto-round and GPTQModel:
python tools/quant/pack_ints.py [FILE]. Names: "LIBRARY CASE/TENSOR", where "dequantized" is what the library makes of
it, in fp32 where the library can, and the metadata hold the settings of each case as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parents[2] / "tests" / "quant" / "data" / "ints.safetensors"
Case = tuple[dict[str, Any], dict[str, torch.Tensor]]  # settings; tensors as in a checkpoint, and "dequantized"


def weights(rows: int, columns: int) -> torch.Tensor:
    return 0.02 * torch.randn(rows, columns)


def gptq(bits: int, group: int, sym: bool = False, desc_act: bool = False, version: int = 2) -> Case:
    """Version 2 as GPTQModel holds it, version 1 as it writes it; all codes and zeros are among it."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = 32, 32
    size = columns if group == -1 else group
    layer = TorchLinear(bits, group, sym, desc_act, columns, rows, bias=False)
    count = 1 << bits
    codes = torch.arange(rows * columns).view(rows, columns)[:, torch.randperm(columns)] % count
    scales = (0.001 + 0.01 * torch.rand(rows, columns // size)).half().float()
    zeros = torch.arange(scales.numel()).view(scales.shape).float() % count
    if sym:
        zeros = torch.full_like(scales, count // 2)
    groups = torch.arange(columns, dtype=torch.int32) // size
    if desc_act:
        groups = groups[torch.randperm(columns)]
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (codes - zeros[:, groups.long()]) * scales[:, groups.long()]
    layer.pack_original(linear, scales, zeros, groups)
    layer.post_init()
    layer.eval()
    stored = layer.scales
    layer.scales = stored.float()  # the product is not rounded then
    plain = TorchLinear.dequantize_weight(layer).T.contiguous()
    settings = dict(bits=bits, group_size=group, sym=sym, desc_act=desc_act, checkpoint_format="gptq_v2")
    if version == 1:
        convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        settings |= dict(checkpoint_format="gptq", meta=dict(quantizer=["gptqmodel:7.7.0"]))
    tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "g_idx")}
    return settings, {**tensors, "scales": stored, "dequantized": plain}


def auto_round(bits: int, packing: str) -> Case:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    rows, columns, group, count = 32, 32, 16, 1 << bits
    layer = (qlinear_torch_zp if "gptq" in packing else qlinear_torch).QuantLinear(bits, group, columns, rows, False)
    codes = torch.arange(rows * columns).view(rows, columns)[:, torch.randperm(columns)] % count
    scales = (0.001 + 0.01 * torch.rand(rows, columns // group)).half().float()
    zeros = 1 + torch.arange(scales.numel()).view(scales.shape).float() % (count - 1)  # it has no zero of 0
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    layer.pack(linear, scales, zeros)
    tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    layer.scales = layer.scales.float()
    plain = layer(torch.eye(columns)).T.contiguous()  # 1 · w + 0 + 0 …: not rounded
    return dict(bits=bits, group_size=group, sym=False, packing_format=packing), {**tensors, "dequantized": plain}


def awq(rows: int = 32, columns: int = 64, group: int = 32) -> Case:
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq

    codes = (torch.arange(rows * columns) % 16).view(rows, columns)[:, torch.randperm(columns)]
    zeros = (torch.arange(rows * columns // group) % 16).view(rows, -1)
    scales = (0.001 + 0.01 * torch.rand(columns // group, rows)).half()
    qweight, qzeros = pack_awq(codes.T.contiguous().int(), zeros.T.contiguous().int(), 4)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    plain = dequantize_gemm(qweight, qzeros, scales.float(), 4, group)
    return dict(bits=4, group_size=group, version="gemm"), {**tensors, "dequantized": plain.T.contiguous()}


def compressed(bits: int, group: int | None, symmetric: bool, form: str, dtype: torch.dtype = torch.float32) -> Case:
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    rows, columns = 16, 48  # no whole words
    size = group or columns
    strategy = "group" if group else "channel"
    args = QuantizationArgs(num_bits=bits, group_size=group, symmetric=symmetric, strategy=strategy)
    count = 1 << bits
    codes = (torch.arange(rows * columns) % count).view(rows, columns)[:, torch.randperm(columns)] - count // 2
    scales = (0.001 + 0.01 * torch.rand(rows, columns // size)).to(dtype)
    zeros = torch.zeros_like(scales, dtype=torch.int8)
    if not symmetric:
        zeros = ((torch.arange(zeros.numel()) % count).view(zeros.shape) - count // 2).to(torch.int8)
    spread = lambda values: values.float().repeat_interleave(size, 1)  # noqa: E731
    state = {
        "weight": (codes - spread(zeros)) * spread(scales), "weight_scale": scales, "weight_zero_point": zeros,
    }  # fmt: skip
    compressor = PackedQuantizationCompressor if form == "pack-quantized" else IntQuantizationCompressor
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors = compressor.compress(state, scheme)
    plain = compressor.decompress(tensors, scheme)["weight"]
    settings = dict(bits=bits, group=group, symmetric=symmetric, packed=form == "pack-quantized")
    return settings, {**tensors, "dequantized": plain}


def hqq(bits: float, group: int | None, rows: int = 16, columns: int = 64) -> Case:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = weights(rows, columns)
    config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
    layer = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
    tensors = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    plain = Quantizer.dequantize(layer.W_q, layer.meta).clone()
    return dict(nbits=bits, group_size=group, axis=1), {**tensors, "dequantized": plain}


def bitsandbytes4(kind: str, nested: bool, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Case:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(
        weights(rows, columns).to(dtype), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    tensors = {"weight": packed} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    settings = dict(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    if columns % 64 and rows * columns % 64 == 0:  # with these its kernel for CPUs takes scales of other blocks
        state.shape = torch.Size([rows * columns // 64, 64])
    plain = functional.dequantize_4bit(packed, state).view(rows, columns)
    return settings, {**tensors, "dequantized": plain}


def bitsandbytes8(rows: int = 16, columns: int = 96) -> Case:
    from bitsandbytes import functional

    codes, absmax, _ = functional.int8_vectorwise_quant(weights(rows, columns).half())
    plain = functional.int8_vectorwise_dequant(codes, absmax)
    tensors = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return dict(load_in_8bit=True), {**tensors, "dequantized": plain}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for bits in (2, 3, 4, 8):
        found[f"gptq {bits} desc_act"] = gptq(bits, 16, desc_act=True)
        found[f"gptq {bits} v1"] = gptq(bits, 16, version=1)
    found["gptq 4 sym"] = gptq(4, 16, sym=True, desc_act=True)
    found["gptq 4 channel"] = gptq(4, -1, sym=True)
    found["awq"] = awq()
    for bits in (4, 6):
        found[f"auto_round {bits} gptq"] = auto_round(bits, "auto_round:auto_gptq")
        found[f"auto_round {bits - 1}"] = auto_round(bits - 1, "auto_round")
    for bits in range(1, 9):
        if bits in (2, 4, 8):
            found[f"compressed {bits} sym"] = compressed(bits, 16, True, "pack-quantized")
        found[f"compressed {bits}"] = compressed(bits, 16, False, "pack-quantized")
    found["compressed 4 channel"] = compressed(4, None, False, "pack-quantized")
    found["compressed 4 bf16"] = compressed(4, 16, False, "pack-quantized", torch.bfloat16)
    found["compressed 8 int"] = compressed(8, None, True, "int-quantized")
    found["compressed 4 int"] = compressed(4, 16, False, "int-quantized")
    for bits in (8, 5, 4, 3, 2, 1):
        found[f"hqq {bits}"] = hqq(bits, 64)
    found["hqq 4 channel"] = hqq(4, None)
    found["hqq 4 across rows"] = hqq(4, 64, rows=16, columns=96)
    for kind in ("nf4", "fp4"):
        found[f"bitsandbytes {kind}"] = bitsandbytes4(kind, False, 16, 64)
        found[f"bitsandbytes {kind} nested"] = bitsandbytes4(kind, True, 16, 64)
    found["bitsandbytes nf4 across rows"] = bitsandbytes4("nf4", False, 16, 96)
    found["bitsandbytes nf4 odd"] = bitsandbytes4("nf4", False, 7, 33)
    found["bitsandbytes nf4 nested bf16"] = bitsandbytes4("nf4", True, 260, 64, torch.bfloat16)  # more than 256 blocks
    found["bitsandbytes 8"] = bitsandbytes8()
    return found


def main() -> None:
    torch.manual_seed(0)
    found = cases()
    tensors = {f"{case}/{name}": t.contiguous() for case, (_, held) in found.items() for name, t in held.items()}
    settings = {case: json.dumps(settings) for case, (settings, _) in found.items()}
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    save_file(tensors, file, settings)
    print(f"{file}: {len(found)} cases, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
