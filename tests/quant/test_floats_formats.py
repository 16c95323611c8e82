"""Floats of FP8, FBGEMM, DeepSeek, ModelOpt, Quark and gpt-oss against slow loops over their definitions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.quant import quantize
from vserve.engine.quant.codes import Codes
from vserve.engine.quant.compressed_tensors import CompressedTensorsScheme, PackedInts
from vserve.engine.quant.config_groups import Group, find_group
from vserve.engine.quant.decoded import decoded as loaded
from vserve.engine.quant.eight_bits import FbgemmFp8Scheme, Fp8Scheme, Int8, Mxfp8Scheme
from vserve.engine.quant.format import Format, Scheme, powers_of_two
from vserve.engine.quant.fp4 import Mxfp4Scheme, decode_experts
from vserve.engine.quant.modelopt import ModelOptScheme
from vserve.engine.quant.online import KINDS, Online, OnlineScheme
from vserve.engine.quant.quark import QuarkScheme

TYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.uint8: "U8", torch.int8: "I8",
    torch.int32: "I32",
}  # fmt: skip
PATH = "model.layers.3.mlp.down_proj"


def headers(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {suffix: (TYPES[tensor.dtype], tuple(tensor.shape)) for suffix, tensor in tensors.items()}


def found(scheme: Scheme, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Format:
    """The format that the headers tell, which expects just these tensors."""
    format = scheme.format(PATH, headers(tensors))
    assert format is not None
    expected = format.expected(rows, columns)
    assert expected.keys() == tensors.keys()
    for suffix, (dtype, shape) in headers(tensors).items():
        assert expected[suffix].shape == shape and dtype in expected[suffix].dtypes
    return format


def decoded(scheme: Scheme, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
    codes = found(scheme, tensors, rows, columns).decode(tensors, rows, columns)
    assert codes.shape == (rows, columns) and codes.scales.dtype == torch.float32
    assert codes.scales.shape == (rows, -(-columns // codes.group))
    return codes


def bytes_of(*shape: int, seed: int = 0) -> Tensor:
    """Random bytes, without e4m3's two that are no numbers."""
    values = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return torch.where(values & 127 == 127, values - 1, values)


def e4m3(byte: int) -> float:
    exponent, mantissa, sign = byte >> 3 & 15, byte & 7, -1 if byte >> 7 else 1
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


def e2m1(nibble: int) -> float:
    return (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[nibble & 7] * (-1 if nibble & 8 else 1)


def same(codes: Codes, wanted: list[list[float]]) -> None:
    """In fp32, of one product: `wanted` is exact in fp64."""
    assert torch.equal(codes.dequantize(), torch.tensor(wanted, dtype=torch.float64).float())


def scaled(raw: Tensor, scale: Any) -> list[list[float]]:
    """e4m3 bytes × scale(row, column)."""
    return [[e4m3(byte) * scale(n, k) for k, byte in enumerate(row)] for n, row in enumerate(raw.tolist())]


def test_all_exponents() -> None:
    values = powers_of_two(torch.arange(256, dtype=torch.uint8))
    assert [math.ldexp(1.0, e - 127) for e in range(255)] == values[:255].tolist()
    assert values[255].isnan()
    typed = powers_of_two(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert torch.equal(typed[:255], values[:255]) and typed[255].isnan()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("static", [False, True])
def test_fp8_per_tensor(shape: tuple[int, ...], static: bool) -> None:
    raw, scale = bytes_of(6, 10), 0.0123
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale": torch.full(shape, scale)}
    tensors["input_scale"] = torch.full(shape, 0.5)
    scheme = Fp8Scheme({"activation_scheme": "static" if static else "dynamic"})
    codes = decoded(scheme, tensors, 6, 10)
    same(codes, scaled(raw, lambda n, k: float(torch.tensor(scale))))
    assert codes.input_scale == (0.5 if static else None)
    assert codes.group == 10 and codes.codes.dtype == torch.float8_e4m3fn
    assert found(scheme, tensors, 6, 10).expected(6, 10)["input_scale"].optional != static
    assert found(scheme, tensors, 6, 10).name == f"FP8 per tensor{', static' if static else ''}"


def test_transformers_names_of_scales() -> None:
    """weight_scale_inv is multiplied by here too, and the input's scale is the activation's."""
    raw = bytes_of(6, 10)
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale_inv": torch.tensor(0.5).bfloat16()}
    tensors["activation_scale"] = torch.tensor(0.25).bfloat16()
    config = {"activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    codes = decoded(Fp8Scheme(config), tensors, 6, 10)
    same(codes, scaled(raw, lambda n, k: 0.5))
    assert codes.input_scale == 0.25
    assert not found(Fp8Scheme(config), tensors, 6, 10).expected(6, 10)["activation_scale"].optional
    assert decoded(Fp8Scheme({}), tensors, 6, 10).input_scale is None


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [FbgemmFp8Scheme({}), Fp8Scheme({}), ModelOptScheme({"quant_algo": "FP8"})])
def test_fp8_per_channel(shape: tuple[int, ...], dtype: torch.dtype, scheme: Scheme) -> None:
    raw, scale = bytes_of(6, 10), (torch.rand(shape) + 0.1).to(dtype)
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}
    codes = decoded(scheme, tensors, 6, 10)
    same(codes, scaled(raw, lambda n, k: float(scale.flatten()[n])))
    assert codes.input_scale is None


@pytest.mark.parametrize("rows, columns", [(8, 12), (9, 14), (3, 5), (4, 6), (17, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
def test_fp8_blocks_with_ragged_ends(rows: int, columns: int, suffix: str) -> None:
    """`weight_scale_inv` is multiplied by, whatever its name says."""
    raw = bytes_of(rows, columns)
    scale = torch.rand(-(-rows // 4), -(-columns // 6), generator=torch.Generator().manual_seed(1)) + 0.1
    scheme = Fp8Scheme({"weight_block_size": [4, 6], "activation_scheme": "dynamic", "fmt": "e4m3"})
    codes = decoded(scheme, {"weight": raw.view(torch.float8_e4m3fn), suffix: scale}, rows, columns)
    same(codes, scaled(raw, lambda n, k: float(scale[n // 4, k // 6])))
    part = codes.rows(1, rows - 2) if rows > 2 else codes
    assert part.scales.shape[0] == part.shape[0]  # a cut inside a block is no trouble


def test_deepseeks_scales_as_powers_of_two() -> None:
    raw, exponents = bytes_of(130, 140), torch.tensor([[120, 127], [130, 125]], dtype=torch.uint8)
    scheme = Fp8Scheme({"weight_block_size": [128, 128], "scale_fmt": "ue8m0"})
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    codes = decoded(scheme, tensors, 130, 140)
    same(codes, scaled(raw, lambda n, k: 2.0 ** (int(exponents[n // 128, k // 128]) - 127)))
    assert scheme.format(PATH, headers(tensors)).name == "FP8 per 128×128 block"  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", [Mxfp8Scheme({}), ModelOptScheme({"quant_algo": "MXFP8"})])
def test_mxfp8(scheme: Scheme) -> None:
    raw = bytes_of(5, 96)
    exponents = torch.randint(110, 135, (5, 3), dtype=torch.uint8)
    codes = decoded(scheme, {"weight": raw.view(torch.float8_e4m3fn), "weight_scale": exponents}, 5, 96)
    same(codes, scaled(raw, lambda n, k: 2.0 ** (int(exponents[n, k // 32]) - 127)))
    assert codes.group == 32
    assert scheme.format(PATH, None) == scheme.format(PATH, None)
    told = scheme.format(PATH, None)
    assert told is not None and told.name == "MXFP8" and told.expected(5, 96)["weight_scale"].shape == (5, 3)


def test_modelopts_blocks_have_four_dimensions() -> None:
    raw, scale = bytes_of(256, 130), torch.rand(2, 1, 2, 1) + 0.1
    tensors = {"weight": raw.view(torch.float8_e4m3fn), "weight_scale": scale}
    codes = decoded(ModelOptScheme({"quant_algo": "fp8_pb_wo"}), tensors, 256, 130)
    same(codes, scaled(raw, lambda n, k: float(scale[n // 128, 0, k // 128, 0])))


@pytest.mark.parametrize("source", ["compressed-tensors", "modelopt", "mixed"])
def test_nvfp4(source: str) -> None:
    """compressed-tensors' global scale divides, modelopt's multiplies."""
    packed, scales = bytes_of(6, 24), bytes_of(6, 3, seed=1) & 127
    factor = 7.0 if source == "compressed-tensors" else 0.015625
    global_scale = torch.tensor([factor]) if source == "compressed-tensors" else torch.tensor(factor)
    path = {"weight_scale": scales.view(torch.float8_e4m3fn)}
    if source == "compressed-tensors":
        args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        scheme: Scheme = CompressedTensorsScheme({
            "format": "nvfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": args}},
        })  # fmt: skip
        tensors = {**path, "weight_packed": packed, "weight_global_scale": global_scale}
        tensors["input_global_scale"] = torch.tensor([3.0])
    else:
        layers = {"quantized_layers": {PATH: {"quant_algo": "NVFP4", "group_size": 16}}}
        scheme = ModelOptScheme(
            {"quant_algo": "MIXED_PRECISION", **layers} if source == "mixed" else {"quant_algo": "NVFP4"}
        )
        tensors = {**path, "weight": packed, "weight_scale_2": global_scale, "input_scale": torch.tensor(3.0)}
    codes = decoded(scheme, tensors, 6, 48)
    wanted = []
    for n in range(6):
        row = []
        for k in range(48):
            byte = int(packed[n, k // 2])
            group = torch.tensor(e4m3(int(scales[n, k // 16])))
            scale = group / factor if source == "compressed-tensors" else group * factor
            row.append(e2m1(byte >> 4 if k % 2 else byte & 15) * float(scale))
        wanted.append(row)
    same(codes, wanted)
    assert codes.bits == 4 and codes.group == 16 and codes.input_scale is None


@pytest.mark.parametrize("alternating", [False, True])
def test_experts_of_gpt_oss(alternating: bool) -> None:
    """Of the model's library too, whose result is transposed: [E, K, N]."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = bytes_of(3, 8, 2, 16), torch.randint(120, 130, (3, 8, 2), dtype=torch.uint8)
    experts = decode_experts(blocks, scales, alternating)
    reference = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert len(experts) == 3 and reference.shape == (3, 8, 64)
    for e, codes in enumerate(experts):
        values = codes.dequantize()
        order = [0, 2, 4, 6, 1, 3, 5, 7] if alternating else range(8)
        for n, row in enumerate(order):
            assert torch.equal(values[n], reference[e, row])
            for k in range(64):
                byte = int(blocks[e, row, k // 32, k % 32 // 2])
                wanted = e2m1(byte >> 4 if k % 2 else byte & 15) * 2.0 ** (int(scales[e, row, k // 32]) - 127)
                assert float(values[n, k]) == wanted
    assert Mxfp4Scheme({}).format(PATH, None) is None  # what is no expert is not quantised
    assert Mxfp4Scheme({}).format(PATH, {"weight": ("BF16", (4, 4))}) is None


@pytest.mark.parametrize(
    "dtype, pack", [("int4", "reorder"), ("uint4", "reorder"), ("int4", "order"), ("uint4", "order")]
)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_quarks_integers(dtype: str, pack: str, with_zeros: bool) -> None:
    rows, columns, group = 12, 32, 16
    low, high = (-8, 8) if dtype == "int4" else (0, 16)
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(low, high, (rows, columns), generator=generator)
    z = torch.randint(low, high, (rows, columns // group), generator=generator)
    scale = torch.rand(columns // group, rows, generator=generator).bfloat16()
    place = [0, 2, 4, 6, 1, 3, 5, 7] if pack == "reorder" else list(range(8))  # row that nibble i of a word holds

    def packed(values: Tensor) -> Tensor:
        """[N, X] → int32 [X, ceil(N / 8)]."""
        out = torch.zeros(values.shape[1], -(-rows // 8), dtype=torch.int32)
        for x in range(values.shape[1]):
            for word in range(out.shape[1]):
                bits = 0
                for nibble in range(8):
                    row = 8 * word + place[nibble]
                    bits |= (int(values[row, x]) & 15 if row < rows else 0) << (4 * nibble)
                out[x, word] = bits - (1 << 32) if bits >> 31 else bits
        return out

    tensors = {"weight": packed(q), "weight_scale": scale}
    if with_zeros:
        tensors["weight_zero_point"] = packed(z)
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": group}
    scheme = QuarkScheme({"global_quant_config": {"weight": weight}, "export": {"pack_method": pack}})
    codes = decoded(scheme, tensors, rows, columns)
    wanted = [
        [
            (int(q[n, k]) - (int(z[n, k // group]) if with_zeros else 0)) * float(scale[k // group, n])
            for k in range(columns)
        ]
        for n in range(rows)
    ]
    same(codes, wanted)
    assert codes.codes.dtype == torch.uint8 and codes.bits == 4


def test_quarks_floats_and_layers() -> None:
    fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
    mx = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    scheme = QuarkScheme({
        "global_quant_config": {"weight": fp8, "input_tensors": {**fp8, "is_dynamic": False}},
        "layer_quant_config": {"*down_proj": {"weight": mx}},
        "exclude": ["lm_head", "re:.*layers\\.7\\..*"],
    })  # fmt: skip
    raw, exponents = bytes_of(4, 32), torch.randint(120, 130, (4, 2), dtype=torch.uint8)
    codes = decoded(scheme, {"weight": raw, "weight_scale": exponents}, 4, 64)
    same(codes, [
        [e2m1(int(raw[n, k // 2]) >> 4 * (k % 2) & 15) * 2.0 ** (int(exponents[n, k // 32]) - 127) for k in range(64)]
        for n in range(4)
    ])  # fmt: skip
    told = {
        path: scheme.format(path, None) for path in (PATH, "model.layers.3.mlp.up_proj", "model.layers.7.mlp.up_proj")
    }
    assert [None if format is None else format.name for format in told.values()] == [
        "MXFP4",
        "FP8 per tensor, static",
        None,
    ]
    assert scheme.format("lm_head", None) is None


@pytest.mark.parametrize("zeros", [False, True])
def test_static_inputs_of_int8(zeros: bool) -> None:
    """A fixed scale is kept; one with a zero point gives way to a scale for each token."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": not zeros}
    scheme = CompressedTensorsScheme({
        "format": "int-quantized",
        "config_groups": {"g": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": inputs,
        }},
    })  # fmt: skip
    q = torch.randint(-128, 128, (3, 5), dtype=torch.int8)
    scale = torch.rand(3, 1).bfloat16()
    tensors = {"weight": q, "weight_scale": scale, "input_scale": torch.tensor([0.25])}
    if zeros:
        tensors["input_zero_point"] = torch.tensor([3], dtype=torch.int8)
    codes = decoded(scheme, tensors, 3, 5)
    same(codes, [[int(q[n, k]) * float(scale[n]) for k in range(5)] for n in range(3)])
    assert codes.input_scale == (None if zeros else 0.25)


FLOAT_WEIGHT = {"weight": ("BF16", (8, 8))}
SCHEMES: list[Scheme] = [
    Fp8Scheme({}), FbgemmFp8Scheme({}), Mxfp8Scheme({}), Mxfp4Scheme({}), ModelOptScheme({"quant_algo": "NVFP4"}),
    QuarkScheme({"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}),
    CompressedTensorsScheme({"config_groups": {"FP8": ["Linear"]}}),
]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.method)
def test_headers_decide(scheme: Scheme) -> None:
    """A plain matrix is one though the configuration says otherwise, and a module without tensors is none of ours."""
    assert scheme.format(PATH, FLOAT_WEIGHT) is None
    assert scheme.format("lm_head", {}) is None
    if scheme.method != "mxfp4":
        assert scheme.format(PATH, None) is not None


@pytest.mark.parametrize("scheme", SCHEMES[:-1], ids=lambda scheme: scheme.method)
def test_heads_and_embeddings_are_not_quantised_unless_the_files_are(scheme: Scheme) -> None:
    assert scheme.format("lm_head", None) is None and scheme.format("model.embed_tokens", None) is None
    if scheme.method not in ("mxfp4", "mxfp8"):
        head = {"weight": ("F8_E4M3", (8, 8)), "weight_scale": ("F32", ())}
        assert scheme.format("lm_head", head) is not None


@pytest.mark.parametrize(
    "scheme, ignored",
    [
        (Fp8Scheme({"ignored_layers": ["model.layers.3.mlp.down_proj"]}), [PATH]),
        (Fp8Scheme({"modules_to_not_convert": ["mlp.down_proj"]}), [PATH]),
        (ModelOptScheme({"quant_algo": "FP8", "ignore": ["model.layers.3.*"]}), [PATH]),
        (ModelOptScheme({"quantization": {"quant_algo": "FP8", "exclude_modules": ["*down_proj"]}}), [PATH]),
        (FbgemmFp8Scheme({"modules_to_not_convert": ["model.layers.3"]}), [PATH]),
    ],
)
def test_lists_of_modules_to_leave_alone(scheme: Scheme, ignored: list[str]) -> None:
    assert all(scheme.format(path, None) is None for path in ignored)
    assert scheme.format("model.layers.33.mlp.down_proj2", None) is not None


def test_the_caches_scheme() -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "attn_head", "dynamic": False, "symmetric": True}
    assert CompressedTensorsScheme({"config_groups": {}, "kv_cache_scheme": cache}).kv_cache_scheme == cache
    assert CompressedTensorsScheme({"config_groups": {}}).kv_cache_scheme is None
    only_cache = ModelOptScheme({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert only_cache.kv_cache_scheme == {**cache, "strategy": "tensor"}
    assert only_cache.format(PATH, None) is None and only_cache.format(PATH, FLOAT_WEIGHT) is None


BAD: list[tuple[Any, Any, str]] = [
    (Fp8Scheme, {"activation_scheme": "other"}, "activation_scheme is 'other', read are static and dynamic"),
    (Fp8Scheme, {"fmt": "e5m2"}, "fmt is 'e5m2', read is e4m3"),
    (Fp8Scheme, {"weight_block_size": [128]}, r"weight_block_size is \[128\], two whole numbers"),
    (Fp8Scheme, {"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head', a list"),
    (ModelOptScheme, {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', .* are read"),
    (ModelOptScheme, {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}, "quantized_layers is"),
    (
        QuarkScheme,
        {"global_quant_config": {"weight": {"dtype": "fp6_e2m3", "qscheme": "per_group"}}},
        "fp6_e2m3 per_group",
    ),
    (QuarkScheme, {"global_quant_config": {"weight": [{}, {}]}}, "several steps"),
    (QuarkScheme, {"export": {"pack_method": "other"}}, "pack_method is 'other', read are reorder and order"),
    (CompressedTensorsScheme, {"format": "marlin-24"}, "sparse layout 'marlin-24'"),
    (
        CompressedTensorsScheme,
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse layout 'sparse-24-bitmask'",
    ),
    (CompressedTensorsScheme, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config needs Hadamard"),
    (CompressedTensorsScheme, {"format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized', read are"),
    (CompressedTensorsScheme, {"config_groups": {"W9A16": ["Linear"]}}, "config_groups has 'W9A16', known are"),
    (CompressedTensorsScheme, {"config_groups": {"W8A4": ["Linear"]}}, "config_groups has 'W8A4', known are"),
    (CompressedTensorsScheme, {"config_groups": {"MXFP6A16": ["Linear"]}}, "weights are float6 per group of 32"),
    (CompressedTensorsScheme, {"config_groups": {"g": 3}}, "config_groups has 3"),
    (CompressedTensorsScheme, {"config_groups": {"g": {"weights": {"num_bits": 9}}}}, "of 9 bits"),
    (CompressedTensorsScheme, {"config_groups": {"g": {"weights": {"strategy": "token"}}}}, "is 'token'"),
    (CompressedTensorsScheme, {"config_groups": {"g": {"weights": {"group_size": 0}}}}, "group_size is 0"),
    (CompressedTensorsScheme, {"config_groups": [3]}, r"config_groups is \[3\], an object belongs there"),
    (QuarkScheme, {"export": [3]}, r"export is \[3\], an object belongs there"),
]


@pytest.mark.parametrize("kind, config, message", BAD)
def test_refused_configurations(kind: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        kind(config)
    assert "\n" not in str(error.value) and ": " in str(error.value)


JUNK = [0, 1, -3, 2.5, True, "x", "re:(", [], [1], ["x"], [["x"]], {}, {"x": 1}, {"x": {}}, {"Linear": 3}]
PASSED_OVER = ("kv_cache_quant_config", "input_tensors", "block_structure", "actorder")  # here at least
KEYS: dict[Any, tuple[dict[str, Any], tuple[str, ...]]] = {
    Fp8Scheme: ({}, ("activation_scheme", "fmt", "weight_block_size", "ignored_layers", "modules_to_not_convert")),
    FbgemmFp8Scheme: ({}, ("modules_to_not_convert",)),
    Mxfp8Scheme: ({}, ("modules_to_not_convert",)),
    ModelOptScheme: (
        {"quant_algo": "MIXED_PRECISION"},
        ("quantization", "quant_algo", "ignore", "exclude_modules", "quantized_layers", "kv_cache_scheme"),
    ),
    QuarkScheme: (
        {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group", "group_size": 32}}},
        ("global_quant_config", "layer_quant_config", "layer_type_quant_config", "exclude", "export",
         "global_quant_config/weight", "global_quant_config/input_tensors", "global_quant_config/weight/dtype",
         "global_quant_config/weight/qscheme", "global_quant_config/weight/group_size", "export/pack_method",
         "kv_cache_quant_config", "layer_quant_config/x"),
    ),
    CompressedTensorsScheme: (
        {"format": "float-quantized", "config_groups": {
            "g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}},
        }},
        ("config_groups", "ignore", "format", "sparsity_config", "transform_config", "kv_cache_scheme",
         "config_groups/g", "config_groups/g/targets", "config_groups/g/weights", "config_groups/g/input_activations",
         "config_groups/g/format", *(f"config_groups/g/weights/{key}" for key in (
             "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind, key", [(kind, key) for kind, (_, keys) in KEYS.items() for key in keys])
def test_no_value_brings_it_down(kind: Any, key: str) -> None:
    """Whatever stands in a configuration: it is read, or refused in one line."""
    refused = 0
    for junk in JUNK:
        config = json.loads(json.dumps(KEYS[kind][0]))
        *parents, last = key.split("/")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = junk
        try:
            scheme = kind(config)
            for path in (PATH, "lm_head"):
                scheme.format(path, None)
                scheme.format(path, {"weight": F8, "weight_scale": ("F32", ())})
        except ModelError as error:
            assert "\n" not in str(error) and ": " in str(error)
            refused += 1
    assert bool(refused) == (key.rpartition("/")[2] not in PASSED_OVER), key


F8, BLOCKS = ("F8_E4M3", (256, 256)), Fp8Scheme({"weight_block_size": [128, 128]})
WRONG: list[tuple[Scheme, dict[str, tuple[str, tuple[int, ...]]], str]] = [
    (Fp8Scheme({}), {"weight": F8}, "without a weight_scale beside it"),
    (Fp8Scheme({}), {"weight": F8, "weight_scale": ("F32", (7,))}, r"\[7\], expected is one scale, one for each of"),
    (BLOCKS, {"weight": F8, "weight_scale_inv": ("F32", (3, 2))}, r"\[3, 2\].*or \[2, 2\], one a block of 128 × 128"),
    (Fp8Scheme({}), {"weight": ("F8_E5M2", (2, 2)), "weight_scale": ("F32", ())}, "F8_E5M2"),
    (Fp8Scheme({}), {"weight": ("F8_E4M3", (8,)), "weight_scale": ("F32", ())}, r"F8_E4M3 \[8\]"),
    (Fp8Scheme({}), {"weight": ("I8", (2, 2)), "weight_scale": ("F32", ())}, "is I8"),
    (SCHEMES[4], {"weight": ("U8", (2, 2)), "weight_scale": ("F8_E4M3", (2, 1))}, "without the scales of NVFP4"),
    (SCHEMES[4], {"weight": ("U8", (2, 2)), "pre_quant_scale": ("BF16", (4,))}, "pre_quant_scale multiplies"),
    (SCHEMES[2], {"weight": F8, "pre_quant_scale": ("BF16", (4,))}, "pre_quant_scale multiplies"),
    (SCHEMES[5], {"weight": ("I8", (2, 2)), "pre_quant_scale": ("BF16", (4,))}, "pre_quant_scale multiplies"),
    (ModelOptScheme({"quant_algo": "FP8"}), {"weight": ("I8", (2, 2))}, "is I8, of modelopt's"),
    (SCHEMES[5], {"weight": ("I32", (2, 2))}, "is I32, where quantization_config says fp8_e4m3"),
    (SCHEMES[6], {"weight": ("I8", (2, 2)), "weight_scale": ("F32", ())}, "is I8, and .* says float8 per tensor"),
    (SCHEMES[6], {"weight_packed": ("I32", (2, 2))}, "weight_packed is I32, and quantization_config says"),
    (CompressedTensorsScheme({"config_groups": {}}), {"weight_packed": ("I32", (2, 2))}, "has no group for it"),
]  # fmt: skip


@pytest.mark.parametrize("scheme, stored, message", WRONG)
def test_files_that_do_not_fit(scheme: Scheme, stored: dict[str, tuple[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        scheme.format(PATH, stored)
    assert str(error.value).startswith(PATH) and "\n" not in str(error.value)


SUFFIXES = (
    "weight", "weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "weight_g_idx", "input_scale", "activation_scale", "input_zero_point", "bias",
)  # fmt: skip
VALID: list[dict[str, tuple[str, tuple[int, ...]]]] = [
    {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("F32", ())},
    {"weight": ("F8_E4M3", (64, 64)), "weight_scale_inv": ("F32", (1, 1)), "input_scale": ("F32", ())},
    {"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("U8", (64, 2))},
    {"weight": ("U8", (64, 32)), "weight_scale": ("U8", (64, 2))},
    {"weight": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_scale_2": ("F32", ())},
    {"weight_packed": ("U8", (64, 32)), "weight_scale": ("F8_E4M3", (64, 4)), "weight_global_scale": ("F32", (1,))},
    {"weight": ("I8", (64, 64)), "weight_scale": ("F32", (64, 1)), "weight_zero_point": ("I8", (64, 1))},
]
SHAPES = [
    (),
    (0,),
    (1,),
    (8,),
    (8, 1),
    (1, 8),
    (8, 8),
    (0, 8),
    (64, 2),
    (64, 4),
    (2, 1, 2, 1),
    (64, 32),
    *[(64, 64)] * 6,
]
DTYPES = [*TYPES.values(), *["F8_E4M3", "F32", "U8"] * 3]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.method)
def test_no_header_brings_it_down(scheme: Scheme) -> None:
    """Whatever lies in a file: it is a format that expects no other tensors than these, or refused in one line."""
    chance, found, refused = random.Random(0), 0, 0
    for _ in range(3000):
        stored = dict(chance.choice(VALID))
        for suffix in chance.sample(SUFFIXES, chance.randint(0, 2)):
            stored[suffix] = (chance.choice(DTYPES), chance.choice(SHAPES))
        if chance.random() < 0.2:
            del stored[chance.choice(list(stored))]
        try:
            format = scheme.format(PATH, stored)
            if format is not None:
                missing = {
                    name for name, tensor in format.expected(64, 64).items() if not tensor.optional
                } - stored.keys()
                assert missing <= {"weight_scale", "input_scale"}
                found += 1
        except ModelError as error:
            assert "\n" not in str(error) and ": " in str(error)
            refused += 1
    assert refused > 50 and found > 50


def test_broken_scales_are_found() -> None:
    weight = bytes_of(2, 4).view(torch.float8_e4m3fn)
    for scale in (float("nan"), float("inf")):
        tensors = {"weight": weight, "weight_scale": torch.tensor([scale])}
        with pytest.raises(ModelError, match=rf"weight_scale holds {scale} at \[0\], finite numbers belong there: "):
            loaded(found(Fp8Scheme({}), tensors, 2, 4), tensors, 2, 4, torch.device("cpu"))
    exponents = torch.tensor([[127], [255]], dtype=torch.uint8)
    tensors = {"weight": bytes_of(2, 32).view(torch.float8_e4m3fn), "weight_scale": exponents}
    with pytest.raises(ModelError, match=r"weight_scale makes scales of which one is nan at \[1, 0\], they have to be"):
        loaded(found(Mxfp8Scheme({}), tensors, 2, 32), tensors, 2, 32, torch.device("cpu"))
    for wrong in (torch.zeros(1), torch.ones(2), torch.tensor([float("nan")])):
        tensors = {"weight": weight, "weight_scale": torch.ones(1), "input_scale": wrong}
        with pytest.raises(ConfigError, match="input_scale has shape"):
            decoded(Fp8Scheme({"activation_scheme": "static"}), tensors, 2, 4)


def test_columns_that_do_not_divide() -> None:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    for scheme, group in ((SCHEMES[4], 16), (QuarkScheme({"global_quant_config": {"weight": weight}}), 32)):
        format = scheme.format(PATH, None)
        assert format is not None
        with pytest.raises(ModelError, match=f"with 40 columns has no whole groups of {group}"):
            format.expected(8, 40)


def test_quantised_at_load() -> None:
    """The kinds that quantize.py makes: of any float, and close to what it was."""
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    for kind, (function, _) in KINDS.items():
        scheme = OnlineScheme(kind)
        format = scheme.format(PATH, {"weight": ("BF16", (128, 256))})
        assert isinstance(format, Online) and scheme.format(PATH, None) == format
        assert format.expected(128, 256)["weight"].dtypes == ("F64", "F32", "F16", "BF16")
        codes, wanted = (
            format.decode({"weight": weight.bfloat16()}, 128, 256),
            getattr(quantize, function)(weight.bfloat16()),
        )
        assert torch.equal(codes.dequantize(), wanted.dequantize())
        error = (codes.dequantize() - weight).norm() / weight.norm()
        assert float(error) < (0.15 if codes.bits == 4 else 0.04)
        dummy = format.dummy(128, 256, torch.Generator().manual_seed(0)).dequantize()
        assert 0.018 < float(dummy.std()) < 0.022
        assert scheme.format("lm_head", {"weight": ("BF16", (128, 256))}) is None
        assert scheme.format("model.embed_tokens", None) is None
        assert scheme.format(PATH, {}) is None


PACKED = {"weight_packed": ("I32", (8, 16)), "weight_scale": ("BF16", (8, 1)), "weight_shape": ("I64", (2,))}
INT8 = {"weight": ("I8", (8, 128)), "weight_scale": ("F32", (8, 1))}


@pytest.mark.parametrize(
    "group, stored, wanted",
    [
        ("W4A16", PACKED, {"bits": 4, "group": 128}),
        ("W4A16", None, {"bits": 4, "group": 128}),
        ("W4A16_ASYM", PACKED, {"bits": 4, "group": 128, "symmetric": False}),
        ("W4AFP8", PACKED, {"bits": 4, "group": 128}),
        ("W3A16", PACKED, {"bits": 3, "group": 128}),
        ({"num_bits": 8, "strategy": "channel"}, PACKED, {"bits": 8}),
        ({"num_bits": 8, "strategy": "channel"}, None, {"bits": 8}),
        ({"num_bits": 4, "group_size": -1}, PACKED, {"bits": 4}),
        ({"num_bits": 4, "group_size": 64, "actorder": "group"}, PACKED, {"bits": 4, "group": 64}),
        ({"num_bits": 4}, PACKED, {"bits": 4, "per_tensor": True}),
        (
            {"num_bits": 8, "group_size": 64},
            {**INT8, "weight_scale": ("F32", (8, 2)), "weight_g_idx": ("I32", (128,))},
            {"bits": 8, "group": 64, "packed": False},
        ),
    ],
)
def test_integers_for_weights_alone(group: Any, stored: Any, wanted: dict[str, Any]) -> None:
    groups = {group: ["Linear"]} if isinstance(group, str) else {"g": {"targets": ["Linear"], "weights": group}}
    scheme = CompressedTensorsScheme({"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]})
    assert scheme.format(PATH, stored) == PackedInts(**wanted)


def test_each_group_has_its_own_format() -> None:
    """format is "mixed-precision" then: the groups' own counts, also where there are no files."""
    scheme = CompressedTensorsScheme({
        "format": "mixed-precision",
        "config_groups": {
            "a": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "group_size": 64}, "format": "pack-quantized"},
            "b": {
                "targets": ["re:.*attn.*"], "weights": {"num_bits": 8, "strategy": "channel"},
                "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}, "format": "int-quantized",
            },
            "FP8_BLOCK": ["model.layers.3.mlp.down_proj"],
        },
        "ignore": ["re:.*router"],
    })  # fmt: skip
    names = (
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        PATH,
        "model.layers.0.mlp.router",
        "other",
    )
    told = [None if (format := scheme.format(name, None)) is None else format.name for name in names]
    assert told == [PackedInts(4, 64).name, "INT8 per channel", "FP8 per 128×128 block", None, None]
    assert isinstance(scheme.format(names[1], INT8), Int8)


def test_int8_by_its_headers_alone() -> None:
    """In no group, and of a shape that no option could be mistaken for."""
    format = CompressedTensorsScheme({"config_groups": {}}).format(PATH, INT8)
    assert isinstance(format, Int8) and format.name == "INT8 per channel"


def test_blocks_of_packed_integers_are_refused() -> None:
    weights = {"num_bits": 4, "strategy": "block", "block_structure": "128x128"}
    scheme = CompressedTensorsScheme({"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}})
    with pytest.raises(ModelError, match="int4 per block, packed integers are read per tensor, channel and group: "):
        scheme.format(PATH, PACKED)


@pytest.mark.parametrize("mixed", [False, True])
def test_modelopts_static_inputs(mixed: bool) -> None:
    layers = {PATH: {"quant_algo": "FP8"}, "model.layers.4.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    scheme = ModelOptScheme({"quant_algo": "MIXED_PRECISION" if mixed else "FP8", "quantized_layers": layers})
    weight = bytes_of(2, 4).view(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": torch.tensor(0.5), "input_scale": torch.tensor(0.25)}
    assert decoded(scheme, tensors, 2, 4).input_scale == 0.25
    paths = (PATH, "model.layers.4.mlp.down_proj", "model.layers.5.mlp.down_proj")
    told = [None if (format := scheme.format(path, None)) is None else format.name for path in paths]
    static = "FP8 per tensor, static"
    assert told == ([static, "NVFP4", None] if mixed else [static] * 3)


@pytest.mark.parametrize("weights", [{"num_bits": 8, "type": "float"}, {"num_bits": 8, "strategy": "channel"}])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_are_static_where_the_configuration_says_so(weights: dict[str, Any], dynamic: bool) -> None:
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": dynamic}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    scheme = CompressedTensorsScheme({"config_groups": {"g": group}})
    told = scheme.format(PATH, None)
    assert told is not None and told.name.endswith(", static") != dynamic
    codes = bytes_of(2, 4)
    tensors = {
        "weight": codes.view(torch.float8_e4m3fn if weights.get("type") == "float" else torch.int8),
        "weight_scale": torch.ones(1) if weights.get("type") == "float" else torch.ones(2, 1),
        "input_scale": torch.tensor([0.25]),
    }
    assert decoded(scheme, tensors, 2, 4).input_scale == (None if dynamic else 0.25)


def test_an_exact_name_counts_before_an_expression() -> None:
    groups = [Group(("re:.*",), None), Group(("transformer.h.0",), None), Group(("Linear",), None)]
    assert find_group("transformer.h.0", groups, ()) is groups[1]
    assert find_group("transformer.h.1", groups, ()) is groups[0]
    assert find_group("transformer.h.1", groups[1:], ()) is groups[2]
    assert find_group("model.embed_tokens", groups[1:], ()) is None
