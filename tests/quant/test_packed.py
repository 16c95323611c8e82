"""What a GPU keeps of codes and multiplies by, on the CPU: the kernels' twins, held equal to the numbers codes mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.describe.reading import read_folder
from vserve.engine.layers import norm as norms
from vserve.engine.layers.linear import Linear
from vserve.engine.models.attention_block import AttentionBlock
from vserve.engine.models.mlp import MLP
from vserve.engine.quant import matrix as packed_module
from vserve.engine.quant import method
from vserve.engine.quant.codes import Codes
from vserve.engine.quant.matrix import PackedMatrix
from vserve.engine.quant.online import Online
from vserve.engine.quant.quantize import to_fp8, to_fp8_blocks
from vserve.engine.quant.weights import Placement
from vserve.engine.weights.loader import load_model
from vserve.kernels.linear import quant_few
from vserve.kernels.linear.fp8_rows import Fp8Rows, fp8_rows
from vserve.kernels.linear.quant_few import MAX_ROWS

from .test_matrix import KINDS, make_codes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 256, 64), (10, 48, 16), (70, 200, 128), (5, 33, 33)])
def test_packed_codes_mean_what_they_did(kind: str, rows: int, columns: int, group: int) -> None:
    """But for scales of whole numbers, which are rounded to fp16; one row's scale and a shift need no groups."""
    codes = make_codes(kind, rows, columns, group)
    assert PackedMatrix.takes(codes, torch.bfloat16) and not PackedMatrix.takes(codes, torch.float32)
    matrix = PackedMatrix(codes, torch.bfloat16)
    few = matrix(torch.eye(columns)[: matrix.few_rows], torch.float32)
    expected = codes.dequantize().t()
    assert (few - expected[: len(few)]).norm() <= 1e-3 * expected[: len(few)].norm()
    many = matrix(torch.eye(columns).repeat(3, 1), torch.float32)[:columns]
    assert (many - expected).norm() <= (1e-3 if not matrix.fp8 else 2e-3) * expected.norm()


def test_what_is_not_packed() -> None:
    assert not PackedMatrix.takes(make_codes("int4", 8, 96, 24), torch.float16)
    wide = Codes(torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 1), 64, 8, table=torch.arange(256.0))
    assert not PackedMatrix.takes(wide, torch.float16)


def test_cards_before_hopper_keep_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        packed_module.has_kernels.cache_clear()
        assert packed_module.has_kernels(torch.device("cuda", 0)) == (capability >= (9, 0))
    packed_module.has_kernels.cache_clear()


def test_scales_as_fine_as_they_are() -> None:
    """Those that fp16 holds, and those that it does not."""
    codes = make_codes("signed", 64, 128, 32)
    assert PackedMatrix(codes, torch.float16).scales.dtype == torch.float16
    codes.scales[3, 1] = 1e-7
    matrix = PackedMatrix(codes, torch.float16)
    assert matrix.scales.dtype == torch.float32
    assert torch.allclose(matrix(torch.eye(128), torch.float32), codes.dequantize().t(), rtol=1e-6)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU keeps what a GPU does."""
    monkeypatch.setattr(method, "make_matrix", lambda codes, dtype, exact: PackedMatrix(codes, dtype))


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_as_fp8(packed: None, kind: str, bias: bool) -> None:
    """gate and up, whose result comes as the next product takes it, and that one, which adds to the residual."""
    place = Placement(torch.float32, torch.device("cpu"))
    first = Linear(256, {"gate": 192, "up": 192}, place=place, bias=bias)
    second = Linear(192, {"out": 256}, place=place)
    generator, weights = torch.Generator().manual_seed(0), []
    for layer in (first, second):
        layer.choose({part: Online(kind) for part in layer.shape.parts})
        layer.create()
        for part, rows in layer.shape.parts.items():
            tensors = {"weight": torch.randn(rows, layer.shape.in_features, generator=generator) / 16}
            weights.append((to_fp8 if kind == "fp8" else to_fp8_blocks)(tensors["weight"]).dequantize())
            layer.load(part, {**tensors, **({"bias": torch.randn(rows, generator=generator)} if bias else {})})
        layer.finish()
    assert isinstance(first.method, method.Quantized)
    few = first.method.fp8_rows
    by_group = kind == "fp8_blocks"
    assert few is not None and first.fp8_input(few - 1) is None and first.fp8_input(few) is by_group
    for rows in (few - 1, few, 200):
        x, residual = torch.randn(rows, 256, generator=generator), torch.randn(rows, 256, generator=generator)
        halves = x @ torch.cat(weights[:2]).t() + (first.method.bias if bias else 0)
        gate, up = halves.chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        product = inner @ weights[2].t()
        expected = residual + product
        given = fp8_rows(x, by_group) if rows >= few else x
        between = first.activate(given, "silu", second)
        assert isinstance(between, Fp8Rows) == (rows >= few)
        added = second.add_to(residual, between)
        total = residual if added is None else residual + added
        assert (added is None) == (rows >= few)
        error = (total - expected).norm() / product.norm()
        assert error < (1e-5 if rows < few else 0.06), (rows, error)
    first.adapter = SimpleNamespace(active=True)  # type: ignore[assignment]
    assert first.fp8_input(1000) is None, "an adapter multiplies by the input, too"


@pytest.mark.parametrize("asked", ["fp8", "fp8_per_block", "int4"])
def test_a_model(packed: None, asked: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms give the products of a layer their input as FP8 where these take it."""
    folder, seen = tiny_model("llama"), []
    config = read_folder(folder, quantization=asked)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    model = load_model(folder, config, **options)
    for name in ("add_rms_norm_fp8", "rms_norm_fp8"):
        real = getattr(norms, name)
        monkeypatch.setattr(norms, name, lambda *given, _real=real, _name=name: (seen.append(_name), _real(*given))[1])
    layer = model.layers[1]
    assert isinstance(layer.mixer, AttentionBlock) and isinstance(layer.mlp, MLP)
    for rows in (3, 100):
        x, residual = torch.randn(rows, config.hidden_size), torch.randn(rows, config.hidden_size)
        for reader, norm in ((layer.mixer.qkv, layer.mixer_norm), (layer.mlp.gate_up, layer.mlp_norm)):
            seen.clear()
            given, kept = norm(x, residual.clone(), reader)
            plain, expected = norm(x.clone(), residual.clone())
            assert torch.equal(kept, expected)
            assert isinstance(given, Fp8Rows) == (asked != "int4" and rows > 48) == bool(seen)
            y, twin = reader(given), reader(plain)
            assert isinstance(y, Tensor) and (y - twin).norm() <= 0.05 * twin.norm()


@pytest.fixture
def on_hopper(packed: None, load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel of few rows, run on the CPU from its source."""
    kernels = Path(__file__).parents[1] / "kernels"
    model, ptx = (load_module(kernels / name) for name in ("gluon_tiles.py", "ptx.py"))
    kernel = model.Kernel(quant_few.quant_few_kernel, ptx)
    monkeypatch.setattr(quant_few, "quant_few_kernel", kernel)
    monkeypatch.setattr(packed_module, "streams_codes", lambda device: True)
    return kernel


@pytest.mark.parametrize("kind", ["int4", "fp8_blocks"])
def test_products_of_few_rows_add_to_the_residual(on_hopper: Any, kind: str) -> None:
    place, generator = Placement(torch.bfloat16, torch.device("cpu")), torch.Generator().manual_seed(0)
    layer = Linear(128, {"out": 40}, place=place, bias=True)
    layer.adds_few_rows = True
    layer.choose({"out": Online(kind)})
    layer.create()
    weight, bias = torch.randn(40, 128, generator=generator) / 8, torch.randn(40, generator=generator)
    layer.load("out", {"weight": weight, "bias": bias})
    layer.finish()
    for rows in (1, MAX_ROWS, MAX_ROWS + 1):
        x, before = (torch.randn(rows, size, generator=generator).bfloat16() for size in (128, 40))
        residual, launches = before.clone(), on_hopper.launches
        y = layer.add_to(residual, x)
        assert (y is None) == (rows <= MAX_ROWS) == (on_hopper.launches == launches + 1)
        total = residual if y is None else residual + y
        wanted = before.float() + x.float() @ weight.t() + bias
        assert (total - wanted).norm() <= 0.15 * (wanted - before).norm()


def test_whose_products_add(on_hopper: Any) -> None:
    """Where there is a kernel for it, in the order of what is read; as the only matrix."""
    for kind, wanted in (("int4", MAX_ROWS), ("ordered", 0)):
        assert PackedMatrix(make_codes(kind, 64, 128, 64), torch.bfloat16).add_up_to == wanted
    place = Placement(torch.bfloat16, torch.device("cpu"))
    for formats, wanted in (
        ({"k": Online("int4"), "v": Online("int4")}, MAX_ROWS), ({"k": Online("int4"), "v": Online("fp8")}, 0),
        ({"k": Online("int4")}, 0),
    ):  # fmt: skip
        layer = Linear(128, {"k": 32, "v": 32}, place=place)
        layer.choose(formats)
        layer.create()
        for part in layer.shape.parts:
            layer.load(part, {"weight": torch.randn(32, 128)})
        layer.finish()
        assert layer.method.add_up_to == wanted
    assert not quant_few.streams_codes(torch.device("cpu"))
