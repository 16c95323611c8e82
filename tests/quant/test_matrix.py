"""Products with codes: each kind that formats decode to, held equal to the product with the numbers they mean."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vserve.engine.layers.linear import Linear
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.quant.codes import Codes, joined
from vserve.engine.quant.eight_bits import Fp8
from vserve.engine.quant.format import CHANNEL, Scales, Stored
from vserve.engine.quant.matrix import CodesMatrix, Int4Matrix, make_matrix
from vserve.engine.quant.method import Dequantized
from vserve.engine.quant.weights import LinearShape, Placement

NF4 = torch.tensor([
    -1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803, 0.1609302, 0.2461123,
    0.33791524, 0.44070983, 0.562617, 0.72295684, 1,
])  # fmt: skip
KINDS = ("signed", "int4", "int4 zeros", "uint8 zeros", "int8", "minima", "table", "e4m3", "e5m2", "int3", "ordered")


def make_codes(kind: str, rows: int, columns: int, group: int, seed: int = 0) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)

    def draw(low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int32).to(dtype)

    def positive() -> Tensor:
        return 0.01 + 0.01 * torch.rand(rows, groups, generator=generator)

    zeros = torch.randint(0, 16, (rows, groups), generator=generator).float()
    scales = positive()
    if kind in ("int4", "int4 zeros", "ordered"):
        eights = torch.full_like(scales, 8.0)
        order = torch.randperm(columns, generator=generator) if kind == "ordered" else None
        return Codes(draw(0, 16, torch.uint8), scales, group, 4, zeros=eights if kind == "int4" else zeros, order=order)
    if kind == "signed":
        return Codes(draw(-8, 8, torch.int8), scales, group, 4)
    if kind == "int3":
        return Codes(draw(0, 8, torch.uint8), scales, group, 3, zeros=torch.full_like(scales, 4.0))
    if kind == "uint8 zeros":
        return Codes(draw(0, 256, torch.uint8), scales, group, 8, zeros=8 * zeros)
    if kind == "int8":
        return Codes(draw(-128, 128, torch.int8), scales, group, 8)
    if kind == "minima":
        return Codes(draw(0, 16, torch.uint8), scales, group, 4, minima=8 * positive())
    if kind == "table":
        return Codes(draw(0, 16, torch.uint8), scales, group, 4, table=NF4)
    dtype = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
    values = torch.randn(rows, columns, generator=generator).to(dtype)
    return Codes(values, scales, group, 8)


def exact(codes: Codes, x: Tensor) -> Tensor:
    return functional.linear(x.double(), codes.dequantize().double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(64, 256, 64), (10, 48, 16), (7, 200, 128), (5, 33, 33), (300, 8192, 128)]
)
def test_codes(kind: str, rows: int, columns: int, group: int) -> None:
    codes = make_codes(kind, rows, columns, group)
    matrix = CodesMatrix(codes)
    for tokens in (1, 2, 17):
        x = torch.randn(tokens, columns)
        expected = exact(codes, x)
        assert (matrix(x, torch.float32) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["signed", "int4", "int4 zeros", "minima", "int3", "ordered"])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 512])
def test_torchs_int4_product(kind: str, group: int) -> None:
    """Activations, scales and results in bf16: 8 bits of precision each."""
    columns = 576 if group == 96 else 512
    codes = make_codes(kind, 128, columns, group)
    matrix = make_matrix(codes)
    assert isinstance(matrix, Int4Matrix)
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, columns)
        expected = exact(codes, x)
        y = matrix(x, torch.float32)
        assert y.dtype is torch.float32 and (y - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["signed", "int4", "int4 zeros", "minima", "int3", "ordered"])
def test_a_dtype_that_was_named_is_kept_to(kind: str) -> None:
    codes = make_codes(kind, 128, 512, 64)
    matrix = make_matrix(codes, torch.float32, exact=True)
    for tokens in (1, 3, 40):
        x = torch.randn(tokens, 512)
        expected = exact(codes, x)
        assert (matrix(x, torch.float32) - expected).norm() <= 1e-6 * expected.norm()


def test_what_torchs_int4_product_does_not_take() -> None:
    for codes in (make_codes("table", 64, 256, 64), make_codes("int4", 64, 256, 16), make_codes("int4", 63, 256, 64),
                  make_codes("uint8 zeros", 64, 256, 64), make_codes("int4", 64, 96, 64)):  # fmt: skip
        assert isinstance(make_matrix(codes), CodesMatrix)


def test_every_code_of_e4m3() -> None:
    """Apart from NaN, which no checkpoint holds."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127], codes[255] = 0, 0
    stored = codes.view(torch.float8_e4m3fn).view(16, 16)
    matrix = CodesMatrix(Codes(stored, torch.ones(16, 1), 16, 8))
    assert torch.equal(matrix(torch.eye(16), torch.float32).t(), stored.float())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_quantised(kind: str) -> None:
    for make in (CodesMatrix, make_matrix):
        matrix = make(make_codes(kind, 1024, 1024, 128))
        size = sum(p.numel() * p.element_size() for p in matrix.parameters())
        bits = 8 * size / (1024 * 1024)
        assert bits <= (8.8 if kind in ("uint8 zeros", "int8", "e4m3", "e5m2") else 4.8), bits


def test_cut_columns_and_rows() -> None:
    for kind in KINDS:
        codes = make_codes(kind, 12, 512, 128).ordered()
        numbers = codes.dequantize()
        for start, size in ((0, 512), (0, 256), (128, 384), (64, 64), (96, 160), (32, 480)):
            assert torch.equal(codes.columns(start, size).dequantize(), numbers[:, start : start + size]), kind
        assert torch.equal(codes.rows(3, 5).dequantize(), numbers[3:8])
    with pytest.raises(ValueError, match="order of their own"):
        make_codes("ordered", 12, 512, 128).columns(0, 256)


def test_parts_that_are_stored_alike_become_one() -> None:
    a, b, c = (make_codes("int4", rows, 64, 32, seed) for seed, rows in enumerate((4, 6, 8)))
    d, e = make_codes("e4m3", 4, 64, 64), make_codes("int4", 4, 64, 64)
    (one,) = joined([a, b, c])
    assert isinstance(one, Codes)
    assert torch.equal(one.dequantize(), torch.cat([part.dequantize() for part in (a, b, c)]))
    assert len(joined([a, d, b])) == 3 and len(joined([a, e])) == 2 and len(joined([d, d])) == 1
    plain = torch.randn(3, 64)
    assert len(joined([plain, plain, a])) == 2
    assert len(joined([a, replace(b, zeros=None)])) == 2 and len(joined([a, replace(b, table=NF4)])) == 2


class Given:
    """A format whose tensors are codes and scales."""

    name = "as given"

    def __init__(self, kind: str, group: int) -> None:
        self.kind, self.group = kind, group

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        return {"codes": Stored((rows, columns), ("U8",))}

    def decode(self, tensors: Any, rows: int, columns: int) -> Codes:
        codes = make_codes(self.kind, rows, columns, self.group)
        return replace(codes, codes=tensors["codes"])

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        return make_codes(self.kind, rows, columns, self.group)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rule", ["column", "row", "replicated"])
def test_a_layer_of_parts_stored_in_their_own_ways(rule: Any, size: int) -> None:
    """q in 4 bits, k as numbers, v in 8 bits; over ranks, with a bias."""
    parts, columns = {"q": 64, "k": 32, "v": 32}, 128
    formats = {"q": Given("ordered", 32), "v": Given("uint8 zeros", 128)}
    x, weights, total = torch.randn(3, columns), {}, torch.zeros(3, 128)
    tensors: dict[str, dict[str, Tensor]] = {}
    for part, rows in parts.items():
        bias = torch.randn(rows)
        if part in formats:
            codes = formats[part].dummy(rows, columns, torch.Generator())
            tensors[part], weights[part] = {"codes": codes.codes, "bias": bias}, codes.dequantize()
        else:
            weights[part] = torch.randn(rows, columns)
            tensors[part] = {"weight": weights[part], "bias": bias}
    expected = {part: functional.linear(x, weights[part], tensors[part]["bias"]) for part in parts}
    for rank in range(size):
        place = Placement(torch.float32, torch.device("cpu"), SingleGroup(rank, size))
        layer = Linear(columns, parts, place=place, rule=rule, unit=16, bias=True)
        layer.choose(formats)
        assert set(layer.expected("q")) == {"codes", "bias"} and set(layer.expected("k")) == {"weight", "bias"}
        layer.create()
        for part in ("v", "q", "k"):
            layer.load(part, tensors[part])
        layer.finish()
        y = layer(x.narrow(1, *layer.shape.input_span))
        if rule == "row":
            total += y
        else:
            for (part, (start, count)), found in zip(
                layer.shape.spans.items(), y.split([n for _, n in layer.shape.spans.values()], dim=1), strict=True
            ):
                torch.testing.assert_close(found, expected[part][:, start : start + count], rtol=1e-2, atol=3e-2)
    if rule == "row":
        torch.testing.assert_close(total, torch.cat(list(expected.values()), dim=1), rtol=1e-2, atol=3e-2)


@pytest.mark.alone
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="torch's int4 product is made for AVX-512"
)
def test_what_products_with_codes_cost() -> None:
    """Against fp32's, one row and four: 4 bits no less than its speed, the others at least 0.4 of it, in proportion
    where the processor makes numbers even of int8 at less than 0.9 of it. In most turns: each is compared with fp32 a
    moment before, and what else the machine does slows down both or spoils one turn.
    """
    torch.manual_seed(0)
    shape, threads = (2048, 4096), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight = torch.randn(shape).t().contiguous().t()
        matrices = {kind: make_matrix(make_codes(kind, *shape, 128)) for kind in KINDS}
        fast = {kind for kind, matrix in matrices.items() if isinstance(matrix, Int4Matrix)}
        for tokens in (1, 4):
            x, turns = torch.randn(tokens, shape[1]), []
            enough = dict.fromkeys(KINDS, 0)  # turns in which it was
            while len(turns) < 61 and (len(turns) < 11 or min(enough.values()) <= len(turns) // 2):
                speeds = {kind: _speed(matrices[kind], weight, x) for kind in KINDS}
                others = 0.4 * min(1.0, speeds["int8"] / 0.9)
                for kind, speed in speeds.items():
                    enough[kind] += speed >= (1.0 if kind in fast else 0.4 if kind == "int8" else others)
                turns.append(speeds)
            middle = {kind: sorted(speeds[kind] for speeds in turns)[len(turns) // 2] for kind in KINDS}
            print(tokens, "rows:", ", ".join(f"{kind} {speed:.2f}" for kind, speed in middle.items()))
            for kind, count in enough.items():
                assert count > len(turns) // 2, (kind, count, len(turns), middle)
    finally:
        torch.set_num_threads(threads)


def _speed(matrix: Any, weight: Tensor, x: Tensor) -> float:
    """Times fp32's; the better of two each, the first of which finds nothing in the processor's cache."""
    seconds = [math.inf, math.inf]
    for _ in range(2):
        for which, multiply in enumerate((lambda: functional.linear(x, weight), lambda: matrix(x, torch.float32))):
            started = time.perf_counter()
            multiply()
            seconds[which] = min(seconds[which], time.perf_counter() - started)
    return seconds[0] / seconds[1]


@pytest.mark.parametrize("size", [1, 2])
def test_codes_kept_as_numbers(size: int) -> None:
    """What a device without products with codes does."""
    parts, formats = {"q": 32, "k": 16}, {"q": Given("ordered", 32)}
    codes, plain, bias = formats["q"].dummy(32, 64, torch.Generator()), torch.randn(16, 64), torch.randn(48)
    x, expected = torch.randn(3, 64), torch.cat((codes.dequantize(), plain))
    for rank in range(size):
        place = Placement(torch.float32, torch.device("cpu"), SingleGroup(rank, size))
        method = Dequantized(LinearShape(64, parts, place, "column", 16, True), formats)
        method.create()
        method.load("k", {"weight": plain, "bias": bias[32:]})
        assert set(method.expected("q")) == {"codes", "bias"}
        method.load("q", {"codes": codes.codes, "bias": bias[:32]})
        method.finish()
        y = (functional.linear(x, expected) + bias).split([32, 16], dim=1)
        mine = torch.cat([y[0].chunk(size, dim=1)[rank], y[1]], dim=1)
        torch.testing.assert_close(method.multiply(x), mine)


@pytest.mark.parametrize("rule", ["column", "row"])
def test_a_rank_takes_its_part_of_the_file(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where codes are as the file has them, no more than that part goes to the device."""
    weight, moved = torch.randn(64, 128).to(torch.float8_e4m3fn), []
    to = Codes.to
    monkeypatch.setattr(Codes, "to", lambda codes, device: moved.append(codes) or to(codes, device))
    for rank in range(2):
        place = Placement(torch.float32, torch.device("meta"), SingleGroup(rank, 2))
        layer = Linear(128, {"out": 64}, place=place, rule=rule, unit=16)
        layer.choose({"out": Fp8(Scales("weight_scale", CHANNEL))})
        layer.create()
        monkeypatch.setattr(layer.method, "_take", lambda part, share: None)
        layer.load("out", {"weight": weight, "weight_scale": torch.rand(64, 1)})
        (share,) = moved
        moved.clear()
        mine = weight.narrow(0, *layer.shape.spans["out"]).narrow(1, *layer.shape.input_span)
        assert share.codes.data_ptr() == mine.data_ptr() and share.shape == tuple(mine.shape)
