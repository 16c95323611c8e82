"""What the integer formats ask of a checkpoint, what they refuse in its tensors, and their dummy weights."""

from __future__ import annotations

import json

import pytest
import torch

from vserve.engine.errors import ModelError
from vserve.engine.quant.bitsandbytes import Int8Rows, Table4
from vserve.engine.quant.compressed_tensors import PackedInts
from vserve.engine.quant.decoded import decoded
from vserve.engine.quant.eight_bits import Fp8, Int8
from vserve.engine.quant.format import Format, Scales, Stored
from vserve.engine.quant.gptq import Awq, Gptq
from vserve.engine.quant.hqq import Hqq
from vserve.engine.quant.quark import QuarkInt4

I32, F = ("I32",), ("F16", "BF16", "F32")


def shapes(found: Format, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {name: stored.shape for name, stored in found.expected(rows, columns).items()}


def loaded(found: Format, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> str:
    """What is said of it on the way in."""
    with pytest.raises(ModelError) as error:
        decoded(found, tensors, rows, columns, torch.device("cpu"))
    return str(error.value)


def refused(found: Format, tensors: dict[str, torch.Tensor], rows: int, columns: int) -> str:
    with pytest.raises(ModelError) as error:
        found.decode(tensors, rows, columns)
    return str(error.value)


def test_expected_of_gptq() -> None:
    assert Gptq(4, 128, symmetric=False).expected(256, 512) == {
        "qweight": Stored((64, 256), I32),
        "qzeros": Stored((4, 32), I32),
        "scales": Stored((4, 256), F),
        "g_idx": Stored((512,), ("I32", "I64"), optional=True),
    }
    assert shapes(Gptq(3, None, symmetric=True), 64, 96) == {
        "qweight": (9, 64), "qzeros": (1, 6), "scales": (1, 64), "g_idx": (96,),
    }  # fmt: skip
    assert Gptq(4, 128, symmetric=True).expected(256, 512)["qzeros"].optional


def test_expected_of_awq() -> None:
    assert Awq(64).expected(32, 128) == {
        "qweight": Stored((128, 4), I32), "qzeros": Stored((2, 4), I32), "scales": Stored((2, 32), F),
    }  # fmt: skip
    with pytest.raises(ModelError) as error:
        Awq(64).expected(12, 128)
    assert str(error.value) == (
        "AWQ packs 8 rows into a word, this matrix has 12: export the checkpoint again as gptq or compressed-tensors"
    )


def test_expected_of_compressed_tensors() -> None:
    assert PackedInts(3, 32, symmetric=False).expected(40, 96) == {
        "weight_packed": Stored((40, 9), I32),
        "weight_shape": Stored((2,), ("I64", "I32"), optional=True),
        "weight_g_idx": Stored((96,), ("I32", "I64"), optional=True),
        "weight_scale": Stored((40, 3), F),
        "weight_zero_point": Stored((4, 3), I32),
    }
    assert PackedInts(8, packed=False).expected(40, 96) == {
        "weight": Stored((40, 96), ("I8",)),
        "weight_scale": Stored((40, 1), F),
        "weight_zero_point": Stored((40, 1), ("I8",), optional=True),
    }
    assert shapes(PackedInts(4, per_tensor=True), 40, 96)["weight_scale"] == (1,)


def test_expected_of_hqq() -> None:
    assert Hqq(4, 64).expected(16, 128) == {
        "W_q": Stored((16, 64), ("U8",)), "scale": Stored((32, 1), F), "zero": Stored((32, 1), F),
    }  # fmt: skip
    assert Hqq(3, 64).expected(16, 128)["W_q"] == Stored((4, 64), I32)
    assert shapes(Hqq(2, None), 16, 100)["W_q"] == (4, 100)
    with pytest.raises(ModelError) as error:
        Hqq(1, 64).expected(6, 128)
    assert str(error.value) == (
        "HQQ packs 8 groups of 64 into one of bytes, a matrix [6, 128] has 12 groups: quantize the model again with "
        "axis=1, without quant_scale, quant_zero and view_as_float, and another group_size"
    )


def test_expected_of_bitsandbytes() -> None:
    assert Table4("nf4").expected(33, 7) == {
        "weight": Stored((116, 1), ("U8",)), "weight.absmax": Stored((4,), ("F32",)),
        "weight.quant_map": Stored((16,), ("F32",)),
    }  # fmt: skip
    nested = Table4("fp4", nested=True, storage="BF16", state=90).expected(260, 64)
    assert nested == {
        "weight": Stored((4160, 1), ("BF16",)),
        "weight.absmax": Stored((260,), ("U8",)),
        "weight.quant_map": Stored((16,), ("F32",)),
        "weight.nested_absmax": Stored((2,), ("F32",)),
        "weight.nested_quant_map": Stored((256,), ("F32",)),
        "weight.quant_state.bitsandbytes__fp4": Stored((90,), ("U8",)),
    }
    assert Int8Rows().expected(8, 4) == {
        "weight": Stored((8, 4), ("I8",)), "SCB": Stored((8,), ("F32",)),
        "weight_format": Stored((), ("U8",), optional=True),
    }  # fmt: skip


def gptq_tensors(rows: int, columns: int, groups: list[int]) -> dict[str, torch.Tensor]:
    qweight = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
    scales = 0.1 + torch.rand(max(groups) + 1, rows).half()
    return {"qweight": qweight, "scales": scales, "g_idx": torch.tensor(groups, dtype=torch.int32)}


def test_groups_in_the_order_of_columns_need_no_order() -> None:
    """Static groups, or no act-order at all: g_idx is there and says nothing."""
    tensors = gptq_tensors(8, 16, [0] * 8 + [1] * 8)
    codes = Gptq(4, 8, symmetric=True).decode(tensors, 8, 16)
    assert codes.order is None
    moved = Gptq(4, 8, symmetric=True).decode({**tensors, "g_idx": tensors["g_idx"].flip(0)}, 8, 16)
    assert moved.order is not None and moved.order.tolist() == [*range(8, 16), *range(8)]


def test_one_scale_a_row_whatever_the_order() -> None:
    codes = Gptq(4, None, symmetric=True).decode(gptq_tensors(8, 16, [0] * 16), 8, 16)
    assert codes.order is None and codes.group == 16 and codes.scales.shape == (8, 1)


def test_symmetric_codes_are_signed_and_have_no_zeros() -> None:
    tensors = gptq_tensors(8, 16, [0] * 8 + [1] * 8) | {"qzeros": torch.full((2, 1), 0x77777777, dtype=torch.int32)}
    signed = Gptq(4, 8, symmetric=True).decode(tensors, 8, 16)
    assert signed.zeros is None and signed.codes.dtype == torch.int8
    assert signed.codes.min() == -8 and signed.codes.max() == 7
    plain = Gptq(4, 8, symmetric=False).decode(tensors, 8, 16)
    assert plain.zeros is not None and plain.codes.dtype == torch.uint8
    assert torch.equal(plain.dequantize(), signed.dequantize())
    # said to be symmetric, and is not: the file counts
    other = Gptq(4, 8, symmetric=True, version=2).decode(tensors, 8, 16)
    assert other.zeros is not None and other.zeros.unique().tolist() == [7]


def test_groups_that_cannot_be() -> None:
    found = Gptq(4, 8, symmetric=True)
    tensors = gptq_tensors(8, 16, [0] * 8 + [1] * 8)
    uneven = torch.tensor([0] * 9 + [1] * 7, dtype=torch.int32)
    assert refused(found, {**tensors, "g_idx": uneven}, 8, 16) == (
        "g_idx has groups of 7 to 9 columns, each needs 8: quantize the model again"
    )
    outside = torch.tensor([0] * 8 + [2] * 8, dtype=torch.int32)
    assert refused(found, {**tensors, "g_idx": outside}, 8, 16) == (
        "g_idx holds groups from 0 to 2, there are scales for 0 to 1: download the checkpoint again"
    )


def test_groups_never_filled_in_are_passed_over() -> None:
    tensors = {
        "weight_packed": torch.zeros(2, 1, dtype=torch.int32), "weight_scale": torch.ones(2, 2),
        "weight_g_idx": torch.full((8,), -1, dtype=torch.int32),
    }  # fmt: skip
    assert PackedInts(4, 4).decode(tensors, 2, 8).order is None


def test_groups_that_do_not_divide_the_columns() -> None:
    said = (
        "groups of 5 columns do not divide a matrix with 8 of them: correct group_size in quantization_config, or "
        "download the checkpoint again"
    )
    by_group = Scales("weight_scale", (1, 5))
    for found in (Awq(5), QuarkInt4(5, True, False, tuple(range(8))), Int8(by_group), Fp8(by_group)):
        with pytest.raises(ModelError) as error:
            found.expected(8, 8)
        assert str(error.value) == said
    Awq(128).expected(8, 8)  # one scale a row, whatever it is called
    tensors = {"qweight": torch.zeros(1, 8, dtype=torch.int32), "scales": torch.ones(2, 8)}
    assert refused(Gptq(4, 5, symmetric=True), tensors, 8, 8) == said
    tensors["g_idx"] = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    assert Gptq(4, 5, symmetric=True).decode(tensors, 8, 8).group == 5  # the file says itself where they end
    tensors = {"weight_packed": torch.zeros(8, 1, dtype=torch.int32), "weight_scale": torch.ones(8, 2)}
    assert refused(PackedInts(4, 5), tensors, 8, 8) == said
    tensors["weight_g_idx"] = torch.full((8,), -1)
    assert refused(PackedInts(4, 5), tensors, 8, 8) == said


def test_shapes_and_codes_of_another_matrix() -> None:
    tensors = {
        "weight_packed": torch.zeros(2, 1, dtype=torch.int32), "weight_scale": torch.ones(2, 1),
        "weight_shape": torch.tensor([2, 7]),
    }  # fmt: skip
    assert refused(PackedInts(4), tensors, 2, 8) == (
        "weight_shape is [2, 7] in the checkpoint, config.json makes the matrix [2, 8]: the weights and the config are "
        "not of one model, download both again"
    )
    plain = {"weight": torch.tensor([[-9, 7]], dtype=torch.int8), "weight_scale": torch.ones(1, 1)}
    assert refused(PackedInts(4, packed=False), plain, 1, 2) == (
        "weight holds codes from -9 to 7, config.json says 4 bits: correct num_bits"
    )


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("axis", 0, "axis is 0 in the checkpoint, read is 1: "),
        ("quant_zero", 1, "quant_zero is 1 in the checkpoint, read is 0: "),
        ("axis", float("nan"), "axis is nan in the checkpoint, read is 1: "),
        ("nbits", float("inf"), "nbits is inf in the checkpoint, W_q's shape is that of 4 bits: download it again"),
        ("nbits", 8, "nbits is 8 in the checkpoint, W_q's shape is that of 4 bits: download it again"),
        (
            "shape", [4, 4],
            "shape is [4, 4] in the checkpoint, config.json makes the matrix [2, 8]: the weights and the config are "
            "not of one model, download both again",
        ),
    ],
)  # fmt: skip
def test_hqq_says_twice_how_it_is_stored(suffix: str, value: object, message: str) -> None:
    tensors = {"W_q": torch.zeros(1, 8, dtype=torch.uint8), "scale": torch.ones(2, 1), "zero": torch.ones(2, 1)}
    Hqq(4, 8).decode(tensors, 2, 8)
    if message.endswith(": "):
        message += "quantize the model again with axis=1, without quant_scale, quant_zero and view_as_float"
    assert refused(Hqq(4, 8), {**tensors, suffix: torch.tensor(value)}, 2, 8) == message


def test_bitsandbytes_says_twice_how_it_is_stored() -> None:
    tensors = {
        "weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.absmax": torch.ones(2),
        "weight.quant_map": torch.ones(16),
    }  # fmt: skip
    name = "weight.quant_state.bitsandbytes__nf4"

    def state(**changed: object) -> dict[str, torch.Tensor]:
        said = {"quant_type": "nf4", "blocksize": 64, "shape": [2, 64], **changed}
        return {**tensors, name: torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)}

    found = Table4("nf4", state=1)
    found.decode(state(), 2, 64)
    assert refused(found, state(blocksize=128), 2, 64) == (
        f"{name} has blocksize 128, the files make it 64: download the checkpoint again"
    )
    nested = {
        "weight.absmax": torch.zeros(2, dtype=torch.uint8), "weight.nested_absmax": torch.ones(1),
        "weight.nested_quant_map": torch.ones(256),
    }  # fmt: skip
    assert refused(Table4("nf4", nested=True, state=1), {**state(nested_blocksize=256), **nested}, 2, 64) == (
        f"{name} has no nested_offset: download the checkpoint again"
    )
    broken = {**tensors, name: torch.tensor(list(b"{no"), dtype=torch.uint8)}
    assert refused(found, broken, 2, 64).startswith(f"{name} is no JSON (")
    rows = {"weight": torch.zeros(2, 4, dtype=torch.int8), "SCB": torch.ones(2), "weight_format": torch.tensor(2)}
    assert refused(Int8Rows(), rows, 2, 4) == (
        "weight_format is 2, which is a layout of single GPUs, read is 0 (rows): save the model again with "
        "bitsandbytes 0.45 or later"
    )


def test_codes_that_were_stored_as_floats() -> None:
    """As FSDP wants them: the same bytes."""
    data = torch.randint(0, 256, (64, 1), dtype=torch.uint8)
    rest = {"weight.absmax": torch.rand(2), "weight.quant_map": torch.randn(16)}
    plain = Table4("nf4").decode({"weight": data, **rest}, 2, 64)
    floats = data.flatten().view(torch.bfloat16).view(-1, 1)
    assert torch.equal(Table4("nf4", storage="BF16").decode({"weight": floats, **rest}, 2, 64).codes, plain.codes)


def test_what_makes_numbers_of_codes_is_finite() -> None:
    """Whatever it is called, and whichever half of it is wrong."""
    nan, rest = float("nan"), "finite numbers belong there: download the checkpoint again"
    hqq = {"W_q": torch.zeros(1, 8, dtype=torch.uint8), "scale": torch.ones(2, 1), "zero": torch.ones(2, 1)}
    for suffix in ("scale", "zero"):
        wrong = {**hqq, suffix: torch.tensor([[1.0], [nan]])}
        assert loaded(Hqq(4, 8), wrong, 2, 8) == f"{suffix} holds nan at [1, 0], {rest}"
    table = {"weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.absmax": torch.ones(2)}
    table["weight.quant_map"] = torch.tensor([0.0] * 15 + [float("inf")])
    assert loaded(Table4("nf4"), table, 2, 64) == f"weight.quant_map holds inf at [15], {rest}"
    rows = {"weight": torch.zeros(2, 4, dtype=torch.int8), "SCB": torch.tensor([nan, 1.0])}
    assert loaded(Int8Rows(), rows, 2, 4) == f"SCB holds nan at [0], {rest}"
    quark = {"weight": torch.zeros(8, 1, dtype=torch.int32), "weight_scale": torch.full((1, 8), nan)}
    assert (
        loaded(QuarkInt4(0, True, False, tuple(range(8))), quark, 8, 8) == f"weight_scale holds nan at [0, 0], {rest}"
    )


FORMATS = [
    *(Gptq(bits, 32, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
    Gptq(4, None, True), Awq(32), Awq(32, symmetric=True), *(Hqq(bits, 64) for bits in (8, 4, 3, 2, 1)),
    Table4("nf4"), Table4("fp4", nested=True), Int8Rows(), *(PackedInts(bits, 32) for bits in range(1, 9)),
    PackedInts(4, 32, symmetric=False), PackedInts(4, per_tensor=True), PackedInts(8, packed=False),
]  # fmt: skip


@pytest.mark.parametrize("found", FORMATS, ids=str)
def test_dummy_weights_are_like_those_of_a_model(found: Format) -> None:
    codes = found.dummy(64, 192, torch.Generator().manual_seed(0))
    weights = codes.dequantize()
    assert weights.shape == codes.shape == (64, 192)
    assert 0.016 < weights.std() < 0.024
    # one bit without zeros of its own has no two values around zero
    assert abs(weights.mean()) < (0.021 if codes.bits == 1 else 0.002)
    assert codes.codes.unique().numel() >= (1 << codes.bits) - 1
    again = found.dummy(64, 192, torch.Generator().manual_seed(0))
    assert torch.equal(again.codes, codes.codes)
    other = found.dummy(64, 192, torch.Generator().manual_seed(1))
    assert not torch.equal(other.codes, codes.codes)


def test_dummy_codes_are_of_the_kind_that_files_give() -> None:
    assert Gptq(4, 32, True).dummy(8, 64, torch.Generator()).zeros is None
    assert Gptq(4, 32, False).dummy(8, 64, torch.Generator()).zeros is not None
    assert Table4("nf4").dummy(8, 64, torch.Generator()).table is not None


def test_names() -> None:
    assert [found.name for found in (Gptq(4, 128, True), Gptq(8, None, False), Awq(128), Hqq(3, 64))] == [
        "GPTQ int4 G=128", "GPTQ int8 G=channel asymmetric", "AWQ int4 G=128", "HQQ int3 G=64",
    ]  # fmt: skip
    others = Table4("fp4"), Int8Rows(), PackedInts(4, 128), PackedInts(8, per_tensor=True)
    assert [found.name for found in others] == [
        "bitsandbytes FP4", "bitsandbytes int8", "compressed-tensors int4 G=128", "compressed-tensors int8 G=tensor",
    ]  # fmt: skip
