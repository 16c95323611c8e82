"""8-bit and float matrices that compressed-tensors packed mean here what the library reads them as, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from vserve.engine.quant.compressed_tensors import CompressedTensorsScheme
from vserve.engine.quant.config_groups import Group, find_group

FILE = Path(__file__).parent / "data" / "floats.safetensors"
TYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32",
}  # fmt: skip


def load() -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(case → what it is, case → tensors as stored, case → what the library read)."""
    stored: dict[str, dict[str, Tensor]] = {}
    read = {}
    with safe_open(FILE, framework="pt") as file:
        about = {case: json.loads(text) for case, text in file.metadata().items()}
        for name in file.keys():  # noqa: SIM118
            if name.endswith(":decompressed"):
                read[name.removesuffix(":decompressed")] = file.get_tensor(name)
            else:
                case, _, suffix = name.partition("/")
                stored.setdefault(case, {})[suffix] = file.get_tensor(name)
    return about, stored, read


ABOUT, STORED, READ = load()


def headers(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {suffix: (TYPES[tensor.dtype], tuple(tensor.shape)) for suffix, tensor in tensors.items()}


def scheme_of(case: str, **changes: Any) -> CompressedTensorsScheme:
    about = ABOUT[case]
    group = {"targets": ["Linear"], "weights": about["weights"], "input_activations": None} | changes
    return CompressedTensorsScheme(
        {"format": about["format"], "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    )


def test_the_fixtures_are_of_every_format() -> None:
    assert len(READ) == 17
    assert STORED.keys() == READ.keys() == ABOUT.keys() - {"matches"}
    assert FILE.stat().st_size < 300_000


@pytest.mark.parametrize("case", READ)
def test_decodes_as_the_library(case: str) -> None:
    rows, columns = ABOUT[case]["rows"], ABOUT[case]["columns"]
    format = scheme_of(case).format("model.layers.0.mlp.up_proj", headers(STORED[case]))
    assert format is not None
    expected = format.expected(rows, columns)
    for suffix, (dtype, shape) in headers(STORED[case]).items():
        assert expected[suffix].shape == shape
        assert dtype in expected[suffix].dtypes
    assert STORED[case].keys() == {suffix for suffix, tensor in expected.items() if not tensor.optional}
    codes = format.decode(STORED[case], rows, columns)
    assert codes.shape == (rows, columns)
    assert codes.scales.dtype == torch.float32 and codes.scales.is_contiguous()
    values = codes.dequantize()
    if "nvfp4" in case or "mx" in ABOUT[case]["format"]:  # the library's own results are bf16 here
        values = values.bfloat16().float()
    assert torch.equal(values.isnan(), READ[case].isnan())
    assert torch.equal(values.nan_to_num(), READ[case].nan_to_num())


def test_every_code_is_in_the_fixtures() -> None:
    """All bytes of e4m3, of e8m0 but 255, and of pairs of e2m1; the values of e4m3 and e2m1 from their definitions."""
    assert STORED["every-e4m3"]["weight"].view(torch.uint8).unique().numel() == 256
    assert STORED["every-e8m0"]["weight_scale"].unique().numel() == 255
    assert STORED["every-e2m1"]["weight_packed"].unique().numel() == 256
    assert STORED["every-nvfp4"]["weight_scale"].view(torch.uint8).unique().numel() == 127
    for byte, value in zip(range(256), READ["every-e4m3"].flatten().tolist(), strict=True):
        exponent, mantissa, sign = byte >> 3 & 15, byte & 7, -1 if byte >> 7 else 1
        if byte & 127 == 127:
            assert value != value
        else:
            assert value == sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9)
    packed, values = STORED["every-e2m1"]["weight_packed"].flatten(), READ["every-e2m1"].flatten()
    for byte, low, high in zip(packed.tolist(), values[::2].tolist(), values[1::2].tolist(), strict=True):
        for nibble, value in ((byte & 15, low), (byte >> 4, high)):
            exponent, mantissa, sign = nibble >> 1 & 3, nibble & 1, -1 if nibble >> 3 else 1
            assert value == sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


@pytest.mark.parametrize("case", READ)
def test_the_configuration_alone_gives_the_same_tensors(case: str) -> None:
    """Without files (dummy weights) the format is the one that the files would have told."""
    if case == "fp8-naive" or ABOUT[case]["weights"]["type"] == "int":
        scheme = scheme_of(case, input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True})
    else:
        scheme = scheme_of(case)
    rows, columns = ABOUT[case]["rows"], ABOUT[case]["columns"]
    told, found = (scheme.format("model.layers.0.mlp.up_proj", stored) for stored in (None, headers(STORED[case])))
    assert told is not None and found is not None
    assert told.expected(rows, columns) == found.expected(rows, columns)
    assert told.name == found.name
    assert scheme.format("lm_head", None) is None
    dummy = told.dummy(256, 256, torch.Generator().manual_seed(0))
    decoded = found.decode(STORED[case], rows, columns)
    assert dummy.codes.dtype == decoded.codes.dtype and dummy.bits == decoded.bits
    assert (dummy.table is None) == (decoded.table is None) and (dummy.zeros is None) == (decoded.zeros is None)
    assert dummy.scales.shape == (256, -(-256 // dummy.group))
    values = dummy.dequantize()
    assert 0.018 < float(values.std()) < 0.022 and abs(float(values.mean())) < 0.001
    again = told.dummy(256, 256, torch.Generator().manual_seed(0))
    assert torch.equal(values, again.dequantize())


@pytest.mark.parametrize("number", range(6))
def test_targets_match_as_in_the_library(number: int) -> None:
    case = ABOUT["matches"][number]
    groups = [Group((target,), None) for target in case["targets"]]
    for path, target in case["first"].items():
        group = find_group(path, groups, case["ignore"])
        assert (None if group is None else group.targets[0]) == target, path
    assert len(ABOUT["matches"]) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", READ)
def test_decoded_on_a_gpu_as_on_a_cpu(case: str) -> None:
    rows, columns = ABOUT[case]["rows"], ABOUT[case]["columns"]
    format = scheme_of(case).format("model.layers.0.mlp.up_proj", headers(STORED[case]))
    assert format is not None
    here = format.decode(STORED[case], rows, columns)
    there = format.decode({name: tensor.cuda() for name, tensor in STORED[case].items()}, rows, columns)
    assert there.codes.is_cuda and torch.equal(here.codes.view(torch.uint8), there.codes.view(torch.uint8).cpu())
    for name in ("scales", "zeros", "table"):
        value, other = getattr(here, name), getattr(there, name)
        assert (value is None and other is None) or (other.is_cuda and torch.equal(value, other.cpu())), name
    dummy = format.dummy(256, 256, torch.Generator("cuda").manual_seed(0))
    assert dummy.codes.is_cuda and 0.018 < float(dummy.dequantize().std()) < 0.022
