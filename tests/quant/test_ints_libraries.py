"""What the decoders make of files that the libraries packed: bit for bit what the libraries make of them.

tools/quant/pack_ints.py wrote the file, and says how.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vserve.engine.errors import ModelError
from vserve.engine.quant.bitsandbytes import BitsAndBytesScheme
from vserve.engine.quant.codes import Codes
from vserve.engine.quant.compressed_tensors import PackedInts
from vserve.engine.quant.format import Format
from vserve.engine.quant.gptq import AutoRoundScheme, AwqScheme, GptqScheme
from vserve.engine.quant.hqq import HqqScheme
from vserve.engine.quant.quantize import to_nf4

FILE = Path(__file__).parent / "data" / "ints.safetensors"
SCHEMES = {
    "gptq": GptqScheme, "awq": AwqScheme, "auto_round": AutoRoundScheme, "bitsandbytes": BitsAndBytesScheme,
}  # fmt: skip
NAMES = {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16"}
NAMES |= {torch.bfloat16: "BF16", torch.float32: "F32"}
PATH = "model.layers.0.mlp.up_proj"


@cache
def cases() -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
    held: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(FILE, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            case, name = key.split("/")
            held.setdefault(case, {})[name] = file.get_tensor(key)
        return held, {case: json.loads(settings) for case, settings in file.metadata().items()}


def read(case: str) -> tuple[Format, dict[str, torch.Tensor], torch.Tensor]:
    """→ the format that headers and configuration give, the checkpoint's tensors, and the library's own result."""
    held, settings = cases()
    tensors = dict(held[case])
    plain = tensors.pop("dequantized")
    library, config = case.split()[0], settings[case]
    headers = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    if library == "compressed":
        return PackedInts(**config), tensors, plain
    if library == "hqq":
        found = HqqScheme({"quant_config": {"weight_quant_params": config}}).format(PATH, headers)
    else:
        found = SCHEMES[library](config).format(PATH, headers)
    assert found is not None
    return found, tensors, plain


@pytest.mark.parametrize("case", [case for case in sorted(cases()[0]) if case != "bitsandbytes 8"])
def test_decoded_as_the_library_does(case: str) -> None:
    found, tensors, plain = read(case)
    codes = found.decode(tensors, *plain.shape)
    assert codes.scales.dtype == torch.float32
    # Where the library computes in bfloat16, its product is rounded once, as this is.
    assert torch.equal(codes.dequantize(plain.dtype), plain)


def test_int8_rows_are_rounded_once_where_bitsandbytes_rounds_twice() -> None:
    """It multiplies with SCB first and 1 / 127 then, both in fp32."""
    found, tensors, plain = read("bitsandbytes 8")
    codes = found.decode(tensors, *plain.shape)
    assert torch.equal(codes.codes, tensors["weight"])
    torch.testing.assert_close(codes.dequantize(), plain.float(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("case", sorted(cases()[0]))
def test_expected_is_what_the_library_wrote(case: str) -> None:
    found, tensors, plain = read(case)
    expected = found.expected(*plain.shape)
    for name, tensor in tensors.items():
        assert expected[name].shape == tuple(tensor.shape), name
        assert NAMES[tensor.dtype] in expected[name].dtypes, name
    assert {name for name, stored in expected.items() if not stored.optional} <= set(tensors)


@pytest.mark.parametrize(
    ("case", "bits"),
    [
        ("gptq {} v1", (2, 3, 4, 8)),
        ("auto_round {} gptq", (4, 6)),
        ("compressed {}", range(1, 9)),
        ("hqq {}", (4, 3, 2, 1)),
    ],
)
def test_the_files_hold_all_codes(case: str, bits: Any) -> None:
    for width in bits:
        found, tensors, plain = read(case.format(width))
        assert len(found.decode(tensors, *plain.shape).codes.unique()) == 1 << width


def test_columns_in_an_order_of_their_own_stay_with_their_inputs() -> None:
    found, tensors, plain = read("gptq 4 desc_act")
    codes = found.decode(tensors, *plain.shape)
    assert codes.order is not None and codes.group == 16
    assert torch.equal(tensors["g_idx"][codes.order].sort().values, tensors["g_idx"][codes.order])
    x = torch.randn(3, plain.shape[1])
    in_file_order = Codes(codes.codes, codes.scales, codes.group, codes.bits, codes.zeros)
    torch.testing.assert_close(x[:, codes.order] @ in_file_order.dequantize().T, x @ plain.T)


def test_version_1_of_another_writer_wraps_each_zero_by_itself() -> None:
    _, tensors, plain = read("gptq 4 v1")
    found = GptqScheme({"bits": 4, "group_size": 16, "sym": False}).format(PATH, {"qweight": ("I32", (4, 32))})
    assert found is not None
    # zeros 0, 5, 0, 1, … less 1, field by field: 15, 4, 15, 0
    zeros = [0, 5, 0, 1, 15, 7, 8, 2]
    word = sum(((zero - 1) % 16) << (4 * i) for i, zero in enumerate(zeros))
    qzeros = torch.tensor([[word] * 4] * 2, dtype=torch.int64).to(torch.int32)
    codes = found.decode({**tensors, "qzeros": qzeros}, *plain.shape)
    assert codes.zeros is not None
    assert codes.zeros[:, 0].tolist() == zeros * 4


def test_a_nested_state_of_another_shape_is_refused() -> None:
    found, tensors, _ = read("bitsandbytes nf4 nested bf16")
    with pytest.raises(ModelError) as error:
        found.decode(tensors, 64, 260)
    assert str(error.value) == (
        "weight.quant_state.bitsandbytes__nf4 has shape [260, 64], the files make it [64, 260]: download the "
        "checkpoint again"
    )


def test_nf4_on_the_way_in_has_the_codes_of_bitsandbytes() -> None:
    """The values that a file stands for are quantised to the same file again."""
    found, tensors, plain = read("bitsandbytes nf4")
    codes, again = found.decode(tensors, *plain.shape), to_nf4(plain)
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.dequantize(), plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", sorted(cases()[0]))
def test_decoded_on_a_gpu_as_on_a_cpu(case: str) -> None:
    found, tensors, plain = read(case)
    here = found.decode(tensors, *plain.shape)
    there = found.decode({name: tensor.cuda() for name, tensor in tensors.items()}, *plain.shape)
    for name in ("codes", "scales", "zeros", "table", "order"):
        value, other = getattr(here, name), getattr(there, name)
        assert (value is None and other is None) or (other.is_cuda and torch.equal(value, other.cpu())), name
    assert torch.equal(here.dequantize(), there.dequantize().cpu())
    dummy = found.dummy(64, 192, torch.Generator("cuda").manual_seed(0))
    assert dummy.codes.is_cuda and 0.016 < dummy.dequantize().std() < 0.024
