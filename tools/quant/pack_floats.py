"""Fixtures of the 8-bit and float formats: tiny matrices packed by compressed-tensors, and what it reads them as.

Run by hand where it is installed (pip install torch compressed-tensors safetensors; it is no dependency):
    python tools/quant/pack_floats.py tests/quant/data
It writes floats.safetensors: "CASE/weight_packed", … as the library stores them and "CASE:decompressed" in fp32, with
each case's quantization arguments and shape as JSON in the file's metadata. Made with compressed-tensors 0.20.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.utils.match import is_match, match_targets
from safetensors.torch import save_file
from torch import Tensor

INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
NO_DATA = {"observer_kwargs", "scale_dtype", "zp_dtype"}
# case → (format, the weights' arguments or a preset, rows, columns)
CASES = {
    "fp8-tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, 24, 48),
    "fp8-channel": ("float-quantized", "FP8_DYNAMIC", 24, 48),
    "fp8-block": ("float-quantized", "FP8_BLOCK", 130, 136),
    "fp8-naive": ("naive-quantized", {**FP8, "strategy": "channel"}, 8, 32),
    "int8-channel": ("int-quantized", "W8A8", 24, 48),
    "int8-tensor": ("int-quantized", {**INT8, "strategy": "tensor"}, 8, 32),
    "int8-zeros": ("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}, 24, 48),
    "int8-group": ("int-quantized", {**INT8, "strategy": "group", "group_size": 16}, 8, 64),
    "int8-naive": ("naive-quantized", {**INT8, "strategy": "channel"}, 8, 32),
    "int4-bytes": ("int-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, 8, 32),
    "nvfp4": ("nvfp4-pack-quantized", "NVFP4A16", 24, 64),
    "mxfp4": ("mxfp4-pack-quantized", "MXFP4A16", 24, 64),
    "mxfp8": ("mxfp8-quantized", "MXFP8A16", 24, 64),
}


def block_of(args: object, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    match args.strategy:  # type: ignore[attr-defined]
        case "tensor":
            return rows, columns
        case "channel":
            return 1, columns
        case "block":
            return tuple(args.block_structure)  # type: ignore[attr-defined]
    return 1, args.group_size  # type: ignore[attr-defined]


def by_block(weight: Tensor, block: tuple[int, int], lowest: bool = False) -> Tensor:
    """The largest magnitude (or smallest value) of each block, [blocks down, blocks across]."""
    down, across = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    found = torch.empty(down, across)
    for i in range(down):
        for j in range(across):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            found[i, j] = part.min() if lowest else part.abs().max()
    return found


def pack(format: str, asked: str | dict[str, object], rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor, str]:
    """(tensors as stored, decompressed, the weights' arguments as JSON)."""
    if isinstance(asked, str):
        scheme = preset_name_to_scheme(asked, ["Linear"])
    else:
        scheme = QuantizationScheme(targets=["Linear"], weights=asked, input_activations=TOKEN)
    args = scheme.weights
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * 0.05
    largest = by_block(weight, block_of(args, rows, columns))
    state = {"weight": weight}
    zero = None
    if args.type == "int":
        half = 2 ** (args.num_bits - 1)
        scale = largest / (half - 1)
        if not args.symmetric:
            lowest = by_block(weight, block_of(args, rows, columns), lowest=True)
            zero = (-half + 10 - lowest / scale).round().clamp(-half, half - 1).to(torch.int8)
    elif format == "nvfp4-pack-quantized":
        factor = (448.0 * 6.0 / weight.abs().max()).reshape(1)
        scale = (factor * largest / 6).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = factor
    elif format.startswith("mx"):
        scale = torch.exp2(torch.ceil(torch.log2(largest / (6 if args.num_bits == 4 else 448))))
    else:
        scale = largest / 448
    state["weight_scale"] = scale if args.strategy != "tensor" else scale.reshape(1)
    state["weight_zero_point"] = torch.zeros_like(scale).to(torch.int8) if zero is None else zero
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    read = compressor.decompress(dict(stored), scheme)["weight"]
    return stored, read.detach().float(), args.model_dump_json(exclude=NO_DATA)


def every_code() -> dict[str, tuple[str, str, dict[str, Tensor]]]:
    """Case → (format, preset, tensors as stored): what random matrices would miss."""
    every = torch.arange(256, dtype=torch.uint8)
    bytes = {"weight_packed": every.view(16, 16).repeat(4, 1)}
    return {
        "every-e4m3": ("float-quantized", "FP8_DYNAMIC", {
            "weight": every.view(16, 16).view(torch.float8_e4m3fn), "weight_scale": torch.ones(16, 1),
        }),
        "every-e8m0": ("mxfp8-quantized", "MXFP8A16", {  # 255 is no number
            "weight": torch.full((51, 160), 1.0).to(torch.float8_e4m3fn), "weight_scale": every[:255].view(51, 5),
        }),
        "every-e2m1": ("mxfp4-pack-quantized", "MXFP4A16", {
            **bytes, "weight_scale": torch.full((64, 1), 127, dtype=torch.uint8),
        }),
        "every-nvfp4": ("nvfp4-pack-quantized", "NVFP4A16", {
            **bytes, "weight_scale": every[:127].repeat(2)[:128].view(64, 2).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([37.3]),
        }),
    }  # fmt: skip


PATHS = [f"model.layers.{i}.{name}" for i in (0, 1, 11) for name in ("self_attn.q_proj", "mlp.down_proj")] + ["lm_head"]
TARGETS = [
    (["Linear"], ["lm_head"]),
    (["re:.*mlp.*", "Linear"], ["re:model.layers.1\\..*"]),
    (["model.layers.0.mlp.down_proj", "re:.*down_proj", "re:.*"], []),
    (["re:layers.*", "mlp.down_proj"], []),
    (["re:.*q_proj$"], ["Linear"]),
    (["re:.*1.*", "re:.*0.*"], ["q_proj"]),
]


def matches() -> list[dict[str, object]]:
    """Which target counts for each path, by the library; None: none, or it is ignored."""
    module, found = torch.nn.Linear(1, 1), []
    for targets, ignore in TARGETS:
        first = {}
        for path in PATHS:
            matched = match_targets(path, module, targets)
            first[path] = matched[0] if matched and is_match(path, module, targets, ignore) else None
        found.append({"targets": targets, "ignore": ignore, "first": first})
    return found


def main() -> None:
    tensors: dict[str, Tensor] = {}
    about: dict[str, str] = {"matches": json.dumps(matches())}
    for case, (format, preset, stored) in every_code().items():
        scheme = preset_name_to_scheme(preset, ["Linear"])
        read = BaseCompressor.get_value_from_registry(format).decompress(dict(stored), scheme)["weight"].float()
        weights = json.loads(scheme.weights.model_dump_json(exclude=NO_DATA))
        rows, columns = read.shape
        about[case] = json.dumps({"format": format, "weights": weights, "rows": rows, "columns": columns})
        tensors |= {f"{case}/{name}": tensor.clone() for name, tensor in stored.items()} | {
            f"{case}:decompressed": read
        }
    for case, (format, asked, rows, columns) in CASES.items():
        stored, read, args = pack(format, asked, rows, columns)
        weights = json.loads(args)
        about[case] = json.dumps({"format": format, "weights": weights, "rows": rows, "columns": columns})
        tensors |= {f"{case}/{name}": tensor.detach().contiguous() for name, tensor in stored.items()}
        tensors[f"{case}:decompressed"] = read.contiguous()
        print(case, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()})
    save_file(tensors, Path(sys.argv[1]) / "floats.safetensors", about)


if __name__ == "__main__":
    main()
