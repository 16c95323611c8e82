"""Packed codes and their products: decoders on all words, the Triton kernel against its twin, what is compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.linear import linear
from vserve.kernels.linear.planes import (
    BITS,
    Packed,
    decoders,
    pack,
    times_power_of_two,
    unpacked,
    unscaled_decoders,
    value_of,
)
from vserve.kernels.linear.quant_linear import QuantTile, quant_linear, quant_linear_triton

CUDA = torch.cuda.is_available()
TABLE = tuple(torch.linspace(-1, 1, 16).tanh().tolist())
KINDS = tuple(BITS)


def table_of(kind: str) -> tuple[float, ...]:
    return TABLE if kind == "table" else ()


def made(
    rng: torch.Generator, kind: str, n: int, k: int, group: int = 0, shifts: bool = False, device: str = "cpu"
) -> Packed:
    """Random codes of finite numbers."""
    finite = value_of(kind, table_of(kind)).isfinite().nonzero().flatten()
    codes = finite[torch.randint(0, len(finite), (n, k), generator=rng)].to(torch.uint8)
    groups = -(-k // group) if group else 1
    size = float(value_of(kind, table_of(kind))[finite].abs().max())
    scales = ((torch.rand(n, groups, generator=rng) + 0.5) / size).half().float()
    moved = torch.randn(n, groups, generator=rng) if shifts else None
    return pack(codes.to(device), scales.to(device), kind, group, None if moved is None else moved.to(device),
                table_of(kind))  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_assembly_on_all_words(kind: str, dtype: torch.dtype, load_module: Callable[[Path], Any]) -> None:
    evaluate = load_module(Path(__file__).with_name("ptx.py")).evaluate
    words = torch.arange(1 << 16)
    values, mask = value_of(kind, table_of(kind)).to(dtype).float(), (1 << BITS[kind]) - 1
    unscaled, exponent = unscaled_decoders(kind, table_of(kind), dtype)
    for all_asm, factor in ((decoders(kind, table_of(kind), dtype), 1.0), (unscaled, 2.0**exponent)):
        for plane, asm in enumerate(all_asm):
            pairs = evaluate(asm, [words | words.flip(0) << 16])
            for found, of in ((pairs & 0xFFFF, words), (pairs >> 16, words.flip(0))):
                numbers = found.to(torch.int32).to(torch.uint16).view(dtype).float() * factor
                expected = values[of >> (plane * BITS[kind]) & mask]
                assert torch.equal(numbers[expected.isfinite()], expected[expected.isfinite()])


def test_powers_of_two(load_module: Callable[[Path], Any]) -> None:
    evaluate = load_module(Path(__file__).with_name("ptx.py")).evaluate
    one = torch.tensor([0x3F80 << 16 | 0xBF80])
    for exponent in (-126, 1, 56, 63, 127):
        found = evaluate(times_power_of_two(exponent), [one])
        numbers = [int(half) << 16 for half in (found >> 16, found & 0xFFFF)]
        wanted = torch.tensor([2.0**exponent, -(2.0**exponent)]).view(torch.int32).tolist()
        assert numbers == [number & 0xFFFFFFFF for number in wanted]


@pytest.mark.parametrize(("kind", "group"), [
    ("int4", 16), ("int4", 32), ("int4", 96), ("table", 128), ("int8", 32), ("int8", 48), ("e4m3", 0),
])  # fmt: skip
def test_packing_loses_nothing(rng: torch.Generator, kind: str, group: int) -> None:
    codes = torch.randint(0, 1 << BITS[kind], (70, 200), generator=rng).to(torch.uint8)
    codes[value_of(kind, table_of(kind))[codes.int()].isnan()] = 0
    scales = torch.rand(70, -(-200 // group) if group else 1, generator=rng)
    matrix = pack(codes, scales, kind, group, scales + 1, table_of(kind))
    wide = scales.repeat_interleave(group or 200, dim=1)[:, :200]
    assert torch.equal(unpacked(matrix), value_of(kind, table_of(kind))[codes.int()] * wide - (wide + 1))


def test_groups_that_no_plane_fits() -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        pack(torch.zeros(4, 40, dtype=torch.uint8), torch.ones(4, 5), "int4", 8)


CASES = [
    # kind, group, shifts, m, n, k, tile
    ("int4", 128, False, 1, 70, 256, QuantTile(splits=2)),
    ("int4", 32, True, 3, 64, 200, QuantTile(splits=2)),
    ("int4", 64, True, 17, 65, 136, QuantTile()),
    ("int4", 16, False, 2, 10, 80, QuantTile()),
    ("int4", 0, True, 2, 20, 130, QuantTile(splits=4)),
    ("table", 64, False, 2, 64, 128, QuantTile()),
    ("e2m1", 16, False, 1, 64, 64, QuantTile()),
    ("int8", 0, False, 1, 70, 200, QuantTile(splits=2)),
    ("int8", 32, True, 2, 64, 96, QuantTile()),
    ("e4m3", 0, False, 2, 65, 130, QuantTile()),
    ("e4m3", 128, False, 1, 64, 300, QuantTile(splits=3)),
    ("e5m2", 0, False, 1, 16, 16, QuantTile()),
    ("int4", 128, False, 130, 20, 128, QuantTile()),
    ("int4", 64, True, 70, 130, 200, QuantTile(8, 3, 2, 0, 128, 128, True)),
    ("table", 128, False, 150, 70, 128, QuantTile(8, 3, 1, 0, 128, 256, True)),
    ("int8", 0, True, 70, 70, 128, QuantTile(8, 3, 1, 0, 128)),
    ("int8", 32, True, 70, 70, 128, QuantTile(8, 3, 1, 0, 128, 128, True)),
    ("int4", 16, True, 70, 70, 128, QuantTile(8, 3, 1, 0, 128)),
    # Groups that neither divide a block of columns nor are made of whole ones.
    ("int4", 48, False, 2, 16, 200, QuantTile(splits=2)),
    ("int4", 96, True, 3, 64, 250, QuantTile()),
    ("int4", 96, True, 70, 70, 192, QuantTile(8, 3, 1, 0, 128, 128, True)),
    ("int4", 80, False, 2, 16, 240, QuantTile()),
    ("table", 192, False, 2, 16, 400, QuantTile()),
    ("int8", 48, True, 2, 16, 200, QuantTile()),
    ("int8", 192, True, 2, 16, 400, QuantTile(splits=2)),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "group", "shifts", "m", "n", "k", "tile"), CASES)
def test_products(
    rng: torch.Generator, device: str, kind: str, group: int, shifts: bool, m: int, n: int, k: int, tile: QuantTile,
    bias: bool,
) -> None:  # fmt: skip
    matrix = made(rng, kind, n, k, group, shifts, device)
    x = torch.full((m + 1, k + 16), float("nan"), dtype=torch.float16)
    x[:m, :k] = torch.randn(m, k, generator=rng)
    x = x.to(device)[:m, :k]
    b = torch.randn(n, generator=rng).to(device) if bias else None
    out = torch.full((m + 1, n + 3), float("nan"), device=device)
    workspace = linear.prepare(x.device)
    workspace.partials.fill_(float("nan"))
    y = quant_linear_triton(x, matrix, b, out[:m, :n], tile=tile)
    expected = x.double() @ unpacked(matrix, torch.float64).t() + (0 if b is None else b)
    error = float((y.double() - expected).abs().max())
    assert error <= (1e-3 if m <= 64 else 2e-3) * float(expected.abs().max()) * (2 if kind == "table" else 1)
    assert out[m].isnan().all() and out[:, n:].isnan().all() and not workspace.counters.any()


def test_twin(rng: torch.Generator) -> None:
    matrix = made(rng, "int4", 20, 100, 32, True)
    x, b = torch.randn(3, 100, generator=rng), torch.randn(20, generator=rng)
    out = torch.empty(3, 20, dtype=torch.float64)
    assert quant_linear(x, matrix, b, out) is out
    torch.testing.assert_close(quant_linear(x, matrix, b), x @ unpacked(matrix).t() + b)


_COMPILE = """
from vserve.kernels.attention import kv_fp8
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
kv_fp8.packs = lambda device: True
from vserve.kernels.linear.dequantize import dequantize_triton
from vserve.kernels.linear.fp8_linear import Fp8Tile, fp8_linear_triton, fp8_tile, scaled_triton
from vserve.kernels.linear.fp8_rows import Product, fp8_rows_triton, silu_mul_fp8_triton
from vserve.kernels.linear.planes import pack
from vserve.kernels.linear.quant_linear import quant_linear_triton

def matrix(kind, n, k, group=0, shifts=False):
    scales = torch.ones(n, k // group if group else 1, dtype=torch.float32 if kind == "e4m3" else torch.float16)
    codes = torch.zeros(n, k, dtype=torch.uint8)
    return pack(codes, scales, kind, group, scales if shifts else None, tuple(range(16)) if kind == "table" else ())

def x(m, k):
    return torch.empty(m, k, dtype=torch.bfloat16)

for m in (1, 2, 16, 33, 64, 65, 100, 128):
    quant_linear_triton(x(m, 512), matrix("int4", 128, 512, 128))
for m, kind, group, shifts in ((1, "e4m3", 0, 0), (64, "e4m3", 128, 0), (1, "table", 64, 0),
                               (64, "int4", 32, 1)):
    quant_linear_triton(x(m, 512), matrix(kind, 128, 512, group, shifts))
quant_linear_triton(x(1, 128), matrix("int4", 8256, 128, 128))
for m in (64, 4000):
    for k in (4096, 14336):
        fp8_rows_triton(x(m, k))
        fp8_rows_triton(x(m, k), True, x(1, k)[0], 1e-6, x(m, k))
    silu_mul_fp8_triton(Product(x(m, 8192), torch.empty(1, m), torch.empty(8192)), torch.bfloat16)
    scaled_triton(Product(x(m, 4096), torch.empty(1, m), torch.empty(4096)), torch.bfloat16)
    fp8_linear_triton(fp8_rows_triton(x(m, 512), True), matrix("e4m3", 128, 512, 128), None, fp8_tile(m, 128, True))
for kind, group in (("int4", 128), ("int8", 0)):
    dequantize_triton(matrix(kind, 128, 512, group), 64, x(64, 512))
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "shared": kernel.metadata.shared,
        "pdl": body.count("griddepcontrol"),
        "writes_before": len(re.findall(r"st\\.global|atom\\.global|\\bret;", before)) if waits else 0,
        "wgmma": body.count("wgmma.mma_async"),
        "shifted_bytes": body.count("shr.u16"),
        "moved": kernel.asm["ttgir"].count("ttg.local_load"),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.slow
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """Nothing spills; codes go from shared memory to the tensor cores' registers in one move, rows add no variants."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE)
    names = [kernel["kernel"] for kernel in kernels]
    assert names.count("_quant_kernel") == 3 + 5  # a BLOCK_M each; others
    assert names.count("_rows_kernel") == 5 and names.count("_silu_kernel") == names.count("_scale_kernel") == 1
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["shared"] <= 227 * 1024
        assert kernel["writes_before"] == 0
        if kernel["kernel"] in ("_quant_kernel", "_fp8_kernel"):
            assert kernel["wgmma"]
        if kernel["kernel"] in ("_rows_kernel", "_silu_kernel"):
            assert not kernel["shifted_bytes"], "ptxas loses such bytes of FP8: e4m3_words"
        if kernel["kernel"] == "_quant_kernel":
            assert kernel["moved"] == 1, "codes that are shuffled on the way"
