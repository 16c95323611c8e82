"""Unpacking against loops over single bits, which share nothing with it."""

from __future__ import annotations

import pytest
import torch

from vserve.engine.quant.compressed_tensors import PackedInts
from vserve.engine.quant.gptq import Awq, Gptq
from vserve.engine.quant.integers import bit_stream, fields, nibbles


def pack_row(codes: list[int], bits: int) -> list[int]:
    """Signed 32-bit words, bit by bit."""
    stream = [code >> bit & 1 for code in codes for bit in range(bits)]
    words = []
    for start in range(0, len(stream), 32):
        word = sum(bit << place for place, bit in enumerate(stream[start : start + 32]))
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, count] → int32 [rows, words]."""
    return torch.tensor([pack_row(row, bits) for row in codes.tolist()], dtype=torch.int32)


def all_codes(rows: int, count: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    flat = torch.arange(rows * count) % (1 << bits)
    return flat[torch.randperm(rows * count, generator=generator)].view(rows, count)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 10, 32, 33, 96, 100])
def test_bit_stream(bits: int, count: int) -> None:
    codes = all_codes(8, count, bits)
    found = bit_stream(pack(codes, bits), bits, count)
    assert found.dtype == torch.uint8 and found.is_contiguous()
    assert torch.equal(found, codes.byte())


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_stream_may_lie_across(bits: int) -> None:
    """Down the columns, as GPTQ has it, one word high too, for which torch calls any stride contiguous."""
    for count in (8, 96):
        codes = all_codes(6, count, bits)
        words = pack(codes, bits).t().contiguous()
        assert torch.equal(bit_stream(words.t(), bits, count), codes.byte())


def test_fields_and_nibbles() -> None:
    words = torch.tensor([[0x12345678, -1], [-0x10000000, 0]], dtype=torch.int32)
    found = fields(words, 4, (0, 28), 1)
    assert found.tolist() == [[[8, 15], [1, 15]], [[0, 0], [15, 0]]]
    assert nibbles(torch.tensor([[0x1F], [0xA2], [0x30]], dtype=torch.uint8), 5).tolist() == [1, 15, 10, 2, 3]


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """[rows of the input, N] → int32 [rows, N / 8]: where each column goes is what AutoAWQ's kernels ask for."""
    nibble_of_column = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}
    words = []
    for row in codes.tolist():
        packed = [0] * (len(row) // 8)
        for column, code in enumerate(row):
            packed[column // 8] |= code << 4 * nibble_of_column[column % 8]
        words.append([word - (1 << 32) if word >= 1 << 31 else word for word in packed])
    return torch.tensor(words, dtype=torch.int32)


def test_awq_is_read_as_autoawq_writes_it() -> None:
    rows, columns, group = 16, 24, 8
    codes, zeros = all_codes(columns, rows, 4), all_codes(columns // group, rows, 4)
    scales = torch.rand(columns // group, rows).half()
    tensors = {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}
    found = Awq(group).decode(tensors, rows, columns).dequantize()
    for n in range(rows):
        for k in range(columns):
            g = k // group
            assert float(found[n, k]) == float(scales[g, n]) * int(codes[k, n] - zeros[g, n])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_element_by_element(bits: int, version: int) -> None:
    """With a last group, and a last word, that are cut short: where g_idx says so."""
    rows, columns, group, mask = 10, 40, 16, (1 << bits) - 1
    codes, zeros = all_codes(rows, columns, bits), all_codes(3, rows, bits)
    scales = torch.rand(3, rows).half()
    stored = (zeros - 1) & mask if version == 1 else zeros
    tensors = {"qweight": pack(codes, bits).t(), "qzeros": pack(stored, bits), "scales": scales}
    tensors["g_idx"] = torch.arange(columns) // group
    found = Gptq(bits, group, symmetric=False, version=version).decode(tensors, rows, columns)
    dequantized = found.dequantize()
    assert found.zeros is not None and found.codes.dtype == torch.uint8
    for n in range(rows):
        for k in range(columns):
            g = k // group
            assert float(dequantized[n, k]) == float(scales[g, n]) * int(codes[n, k] - zeros[g, n])


@pytest.mark.parametrize("bits", range(1, 9))
def test_compressed_tensors_element_by_element(bits: int) -> None:
    """Words that end in the middle of rows, zero points packed along N, and columns in an order of their own."""
    rows, columns, group, half = 6, 22, 11, 1 << (bits - 1)
    codes, zeros = all_codes(rows, columns, bits), all_codes(2, rows, bits)
    groups = torch.tensor([0, 1] * 11)
    scales = torch.rand(rows, 2).bfloat16()
    tensors = {
        "weight_packed": pack(codes, bits), "weight_scale": scales, "weight_g_idx": groups.int(),
        "weight_shape": torch.tensor([rows, columns]), "weight_zero_point": pack(zeros, bits).t(),
    }  # fmt: skip
    found = PackedInts(bits, group, symmetric=False).decode(tensors, rows, columns).dequantize()
    for n in range(rows):
        for k in range(columns):
            g = int(groups[k])
            code, zero = int(codes[n, k]) - half, int(zeros[g, n]) - half
            assert float(found[n, k]) == float(scales[n, g]) * (code - zero)


def test_compressed_tensors_without_groups() -> None:
    codes = torch.tensor([[-8, 7, 0], [3, -1, 2]], dtype=torch.int8)
    scale = torch.tensor([0.5])
    plain = PackedInts(4, packed=False, per_tensor=True)
    assert plain.decode({"weight": codes, "weight_scale": scale}, 2, 3).dequantize().tolist() == (codes * 0.5).tolist()
    zero = torch.tensor([-3], dtype=torch.int8)
    tensors = {"weight_packed": pack(codes.int() + 8, 4), "weight_scale": scale, "weight_zero_point": zero}
    packed = PackedInts(4, symmetric=False, per_tensor=True)
    assert packed.decode(tensors, 2, 3).dequantize().tolist() == ((codes + 3) * 0.5).tolist()
