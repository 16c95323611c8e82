"""Low-rank adapters: the kernels against their twins, and these against a product a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.launch import pdl
from vserve.kernels.linear.linear import small_linear
from vserve.kernels.linear.planes import pack
from vserve.kernels.linear.quant_few import quant_few
from vserve.kernels.lora import lora as module
from vserve.kernels.lora.lora import (
    Columns,
    Tiles,
    column_blocks,
    expand_gluon,
    expand_silu_mul_gluon,
    expand_torch,
    expand_triton,
    look_up,
    max_tiles,
    shrink_gluon,
    shrink_torch,
    shrink_triton,
    tiling_of,
)
from vserve.kernels.norm.activation import silu_mul, silu_mul_torch
from vserve.kernels.norm.norm import rms_norm

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


def tiles_of(token_slots: list[int], num_slots: int, device: str, rows: int | None = None) -> Tiles:
    """Of every token's slot, -1 for none; behind the last tile empty ones of a slot that does not exist."""
    tiling = tiling_of(len(token_slots))
    if rows is not None and rows != tiling.rows:
        tiling = tiling._replace(rows=rows, chunk=min(rows, tiling.chunk))
    rows = tiling.rows
    slots, starts, ends, order = [], [], [], []
    for slot in range(num_slots):
        tokens = [token for token, of in enumerate(token_slots) if of == slot]
        for at in range(0, len(tokens), rows):
            slots.append(slot)
            starts.append(len(order) + at)
            ends.append(len(order) + min(at + rows, len(tokens)))
        order += tokens
    empty = max_tiles(len(token_slots), num_slots) - len(slots)
    assert empty >= 0 or rows != tiling_of(len(token_slots)).rows, "more tiles than there may be"
    empty = max(0, empty)
    table = [slots + [1 << 20] * empty, starts + [0] * empty, ends + [0] * empty, order or [0]]
    return Tiles(*(torch.tensor(line, dtype=torch.int32, device=device) for line in table), tiling)


def columns_of(sizes: list[int], device: str) -> Columns:
    return column_blocks(sizes, device)


def operands(
    rng: torch.Generator, device: str, dtype: torch.dtype, slots: int, k: int, sizes: list[int], rank: int
) -> tuple[Tensor, Tensor]:
    """A and B in memory whose slots lie apart."""
    a = torch.randn(slots, len(sizes) * rank + 1, k, generator=rng) / k**0.5
    b = torch.randn(slots, sum(sizes), rank, generator=rng)
    return a.to(device, dtype)[:, :-1], b.to(device, dtype)


def by_token(x: Tensor, y: Tensor, a: Tensor, b: Tensor, used: list[int], slots: list[int], sizes: list[int]) -> Tensor:
    """In fp64, a token at a time."""
    rank, wanted = b.shape[2], y.double().clone()
    for token, slot in enumerate(slots):
        if slot < 0 or not used[slot]:
            continue
        low = a[slot].double() @ x[token].double()
        first = 0
        for part, size in enumerate(sizes):
            delta = b[slot, first : first + size].double() @ low[part * rank : (part + 1) * rank]
            wanted[token, first : first + size] += delta
            first += size
    return wanted


CASES = [  # tokens' slots, slots, K, rows of the products, rank
    ([0], 1, 40, [24], 16),
    ([2, -1, 0, 2, 2, -1, 0], 3, 136, [32, 16, 48], 16),
    ([-1] * 5, 2, 32, [8], 16),
    ([1, 0, 3, 1] * 9 + [-1], 4, 72, [130, 24], 48),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_and_twins_equal_a_product_a_token(
    rng: torch.Generator, device: str, case: tuple[list[int], int, int, list[int], int], dtype: torch.dtype
) -> None:
    """Tokens in any order, without adapter, of a slot that is not used here, whose matrices are no numbers."""
    slots, num_slots, k, sizes, rank = case
    a, b = operands(rng, device, dtype, num_slots, k, sizes, rank)
    used = [1] * num_slots
    if num_slots > 2:
        used[1] = 0
        a[1], b[1] = float("nan"), float("nan")
    there = torch.tensor(used, dtype=torch.int32, device=device)
    x = torch.randn(len(slots), k + 8, generator=rng).to(device, dtype)[:, :k]
    y = torch.randn(len(slots), sum(sizes) + 8, generator=rng).to(device, dtype)[:, : sum(sizes)]
    tiles, columns = tiles_of(slots, num_slots, device), columns_of(sizes, device)
    wanted = by_token(x, y, a, b, used, slots, sizes)
    for shrink, expand in (
        (shrink_triton, expand_triton),
        (shrink_torch, expand_torch),
        (module.shrink, module.expand),
    ):
        found = y.clone()
        expand(shrink(x, a, there, tiles), b, columns, there, tiles, found)
        limit = 1e-5 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(found.double(), wanted, atol=limit * float(wanted.abs().max()), rtol=limit)
        without = [token for token, slot in enumerate(slots) if slot < 0 or not used[slot]]
        assert torch.equal(found[without], y[without]), "who has no adapter keeps its bits"


def test_large_tiles_and_splits(rng: torch.Generator, device: str) -> None:
    """Tiles of 64 tokens, of which the last of a slot is not full; an input that is cut, with a tail."""
    slots = torch.randint(-1, 3, (90,), generator=rng).tolist()
    sizes, k = [48, 16], 700
    a, b = operands(rng, device, torch.float32, 3, k, sizes, 16)
    used = torch.ones(3, dtype=torch.int32, device=device)
    x, y = torch.randn(90, k, generator=rng).to(device), torch.randn(90, 64, generator=rng).to(device)
    tiles, columns = tiles_of(slots, 3, device, rows=64), columns_of(sizes, device)
    h = shrink_triton(x, a, used, tiles)
    assert len(h) > 1
    found = y.clone()
    expand_triton(h, b, columns, used, tiles, found)
    torch.testing.assert_close(found.double(), by_token(x, y, a, b, [1] * 3, slots, sizes), atol=1e-4, rtol=1e-5)


GLUON = [  # tokens' slots, slots, rows of the products, rank, rows of a tile, splits
    ([0], 1, [24], 16, 8, 16),
    ([2, -1, 0, 2, 2, -1, 0, 2, 1], 3, [264, 16, 48], 16, 8, 3),
    ([-1] * 5, 2, [8], 32, 16, 1),
    ([1, 0, 3, 1] * 9 + [-1], 4, [600, 24], 64, 16, 8),
    ([0, 2, 2] * 40, 3, [528, 512], 32, 64, 2),
]


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize("case", GLUON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gluon_kernel_in_python(
    load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, dtype: torch.dtype,
    case: tuple[list[int], int, list[int], int, int, int],
) -> None:  # fmt: skip
    """Its source, run on CPU tensors: ragged and empty tiles, slots that are not used, several products, tails."""
    slots, num_slots, sizes, rank, rows, splits = case
    here = Path(__file__)
    model, ptx = (load_module(here.with_name(name)) for name in ("gluon_tiles.py", "ptx.py"))
    kernel = model.Kernel(module.lora_expand_kernel, ptx)
    monkeypatch.setattr(module, "lora_expand_kernel", kernel)
    _, b = operands(rng, "cpu", dtype, num_slots, 16, sizes, rank)
    used = torch.ones(num_slots, dtype=torch.int32)
    if num_slots > 2:
        used[1], b[1] = 0, float("nan")
    y = torch.randn(len(slots), sum(sizes) + 8, generator=rng).to(dtype)[:, : sum(sizes)]
    h = torch.randn(splits, len(slots), len(sizes) * rank, generator=rng)
    tiles, columns = tiles_of(slots, num_slots, "cpu", rows), column_blocks(sizes)
    empty = [
        torch.cat([line, torch.tensor([last, last])]) for line, last in zip(tiles[:3], (1 << 20, 0, 0), strict=True)
    ]
    tiles = Tiles(*(line.int() for line in empty), tiles.order, tiles.tiling)
    found, wanted = y.clone(), y.clone()
    expand_gluon(h, b, columns, used, tiles, found)
    expand_torch(h, b, columns, used, tiles, wanted)
    limit = 2e-2 if dtype == torch.bfloat16 else 3e-3  # the sums of h are rounded to the dtype
    torch.testing.assert_close(found.float(), wanted.float(), atol=limit * float(wanted.abs().max()), rtol=limit)
    without = [token for token, slot in enumerate(slots) if slot < 0 or not used[slot]]
    assert torch.equal(found[without], y[without]), "who has no adapter keeps its bits"
    assert kernel.launches == 1


GATED = [  # tokens' slots, slots, columns of gate, rank, splits, products
    ([0], 1, 24, 16, 16, 2),
    ([2, -1, 0, 2, 2, -1, 0, 2, 1], 3, 264, 16, 3, 2),
    ([2, -1, 0, 2, 2, -1, 0, 2, 1], 3, 264, 16, 3, 1),
    ([-1] * 21, 2, 8, 32, 1, 2),
    ([1, 0, 3, 1] * 9 + [-1] * 13, 4, 136, 32, 4, 2),
]


def counted(tiles: Tiles, slots: list[int]) -> tuple[Tiles, Tensor]:
    """With the tokens of none behind the others in the order, and how many others and their tiles there are."""
    others = [token for token, slot in enumerate(slots) if slot < 0]
    with_slots = tiles.order[: len(slots) - len(others)]
    order = torch.cat([with_slots, with_slots.new_tensor(others)])
    return tiles._replace(order=order), order.new_tensor([len(with_slots), int((tiles.starts < tiles.ends).sum())])


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize("case", GATED)
def test_the_gluon_kernel_that_activates_in_python(
    load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator,
    case: tuple[list[int], int, int, int, int, int],
) -> None:  # fmt: skip
    slots, num_slots, size, rank, splits, products = case
    sizes = [2 * size // products] * products
    here = Path(__file__)
    model, ptx = (load_module(here.with_name(name)) for name in ("gluon_tiles.py", "ptx.py"))
    monkeypatch.setattr(module, "lora_expand_silu_kernel", model.Kernel(module.lora_expand_silu_kernel, ptx))
    _, b = operands(rng, "cpu", torch.bfloat16, num_slots, 16, sizes, rank)
    used = torch.ones(num_slots, dtype=torch.int32)
    if num_slots > 2:
        used[1], b[1] = 0, float("nan")
    y = torch.randn(len(slots), 2 * size + 8, generator=rng).bfloat16()[:, : 2 * size]
    h = torch.randn(splits, len(slots), products * rank, generator=rng)
    tiles, counts = counted(tiles_of(slots, num_slots, "cpu", 8), slots)
    found = expand_silu_mul_gluon(h, b, used, tiles, counts, y)
    wanted = y.clone()
    expand_torch(h, b, column_blocks(sizes), used, tiles, wanted)
    wanted = silu_mul_torch(wanted)
    torch.testing.assert_close(found.float(), wanted.float(), atol=2e-2 * float(wanted.abs().max()), rtol=2e-2)
    without = [token for token, slot in enumerate(slots) if slot < 0 or not used[slot]]
    torch.testing.assert_close(found[without], wanted[without], atol=0, rtol=0.01)


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "sizes"), [(16, [1432, 1432]), (32, [1432, 1432]), (16, [2864])])
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 256, 500])
def test_activated_in_the_same_pass(
    rng: torch.Generator, num_tokens: int, rank: int, sizes: list[int], dtype: torch.dtype
) -> None:  # fmt: skip
    """The bits of the activation behind B h, whoever has an adapter, and none. Of gate and up that are one product,
    too."""
    k = 512
    a, b = operands(rng, "cuda", dtype, 8, k, sizes, rank)
    used, columns = torch.tensor([1, 0, *[1] * 6], dtype=torch.int32, device="cuda"), columns_of(sizes, "cuda")
    x = torch.randn(num_tokens, k, generator=rng).to("cuda", dtype)
    y = torch.randn(num_tokens, sum(sizes), generator=rng).to("cuda", dtype)
    for slots in (torch.randint(-1, 8, (num_tokens,), generator=rng).tolist(), [3] * num_tokens, [-1] * num_tokens):
        tiles, counts = counted(tiles_of(slots, 8, "cuda"), slots)
        h = module.shrink(x, a, used, tiles)
        found = expand_silu_mul_gluon(h, b, used, tiles, counts, y)
        wanted = y.clone()
        expand_gluon(h, b, columns, used, tiles, wanted)
        assert torch.equal(found, silu_mul(wanted))


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize(
    ("slots", "num_slots", "k", "n", "rows"),
    [([0], 1, 40, 16, 8), ([2, -1, 0, 2, 1, 2, 0, 2, 2, 2, 2, 2, 2], 3, 4104, 48, 8), ([0, 1] * 20, 2, 1024, 192, 16)],
)
def test_the_gluon_kernel_of_low_in_python(
    load_module: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, slots: list[int],
    num_slots: int, k: int, n: int, rows: int,
) -> None:  # fmt: skip
    here = Path(__file__)
    model, ptx = (load_module(here.with_name(name)) for name in ("gluon_tiles.py", "ptx.py"))
    monkeypatch.setattr(module, "lora_shrink_kernel", model.Kernel(module.lora_shrink_kernel, ptx))
    a = (torch.randn(num_slots, n + 1, k, generator=rng) / k**0.5).bfloat16()[:, :-1]
    used = torch.ones(num_slots, dtype=torch.int32)
    if num_slots > 2:
        used[1], a[1] = 0, float("nan")
    x = torch.randn(len(slots), k + 8, generator=rng).bfloat16()[:, :k]
    tiles = tiles_of(slots, num_slots, "cpu", rows)
    empty = [torch.cat([line, torch.tensor([last])]) for line, last in zip(tiles[:3], (1 << 20, 0, 0), strict=True)]
    h = shrink_gluon(x, a, used, Tiles(*(line.int() for line in empty), tiles.order, tiles.tiling))
    assert (len(h) > 1) == (k > 512)
    wanted = shrink_torch(x, a, used, tiles)[0]
    for place, token in enumerate(tiles.order.tolist() if max(slots) >= 0 else []):
        if used[slots[token]]:
            torch.testing.assert_close(h[:, place].sum(0), wanted[place], atol=1e-4, rtol=1e-4)


def test_looking_up_is_a_product_with_one_hot_rows(rng: torch.Generator, device: str) -> None:
    slots = [1, -1, 0, 1, 1]
    table = torch.randn(2, 11, 16, generator=rng).to(device)
    used = torch.ones(2, dtype=torch.int32, device=device)
    ids = torch.tensor([3, 10, 0, 3, 7], dtype=torch.int32, device=device)
    tiles = tiles_of(slots, 2, device)
    found = look_up(ids, table, used, tiles)
    for place, token in enumerate(tiles.order.tolist()):
        assert torch.equal(found[0, place], table[slots[token], ids[token]])


def test_tiles_are_bounded() -> None:
    assert max_tiles(1, 8) == 1
    assert max_tiles(64, 8) == 56 // 8 + 8
    assert max_tiles(8192, 8) == 8184 // 64 + 8 and max_tiles(4, 8) == 4


def test_who_is_a_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens, as everybody, and many; not those between them, whose A x has a stream of its own."""
    monkeypatch.setattr(pdl, "pdl_available", lambda device: True)
    takes_part = [
        tokens for tokens in (1, 16, 17, 64, 65, 512, 513) if module._dependence(torch.zeros(1), tokens)["PDL"]
    ]
    assert takes_part == [1, 16, 65, 512]


def test_tilings_fit_together() -> None:
    """In the order in which they are looked for; chunks fill a tile."""
    assert [tiling.tokens for tiling in module.TILINGS] == sorted(tiling.tokens for tiling in module.TILINGS)
    assert all(tiling.rows % tiling.chunk == tiling.chunk % 8 == 0 for tiling in module.TILINGS)


_COMPILE = """
from triton.experimental.gluon._runtime import GluonJITFunction
GluonJITFunction.__getitem__ = warm_up_instead
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from vserve.kernels.lora.lora import Tiles, column_blocks, max_tiles, tiling_of
from vserve.kernels.lora.lora import expand_gluon, expand_silu_mul_gluon, expand_triton, shrink_gluon, shrink_triton

hidden, rank = map(int, sys.argv[1:3])
sizes = [4096, 1024, 1024]

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

for rows in map(int, sys.argv[3].split(",")):
    count = max_tiles(rows, 8)
    tiles = Tiles(*(empty(n, dtype=torch.int32) for n in (count, count, count, rows)), tiling_of(rows))
    used = empty(8, dtype=torch.int32)
    shrink = shrink_gluon if rank <= 64 and rows <= 512 else shrink_triton
    h = shrink(empty(rows, hidden), empty(8, 3 * rank, hidden), used, tiles)
    if rows <= 8 and shrink is shrink_gluon:
        shrink(empty(rows, hidden), empty(8, 3 * rank, hidden), used, tiles, beside=True)
    if rows == 64 and shrink is shrink_gluon:
        shrink(empty(rows, hidden), empty(8, 3 * rank, hidden), used, tiles, leads=True)
    columns = column_blocks(sizes, "meta")
    if rank <= 32 and rows <= 512:
        halves = empty(rows, 2 * 14336)
        low = empty(len(h), rows, 2 * rank, dtype=torch.float32)
        expand_silu_mul_gluon(low, empty(8, 2 * 14336, rank), used, tiles, empty(2, dtype=torch.int32), halves)
    expand = expand_gluon if rank <= 64 else expand_triton
    expand(h, empty(8, sum(sizes), rank), columns, used, tiles, empty(rows, sum(sizes)))
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    report.append({
        "kernel": name,
        "shared": kernel.metadata.shared,
        "y": sorted(set(re.findall(r"st\\.global[.\\w]*", body))),
        "barriers": body.count("bar.sync"),
        "griddepcontrol": body.count("griddepcontrol"),
        "writes_before": len(re.findall(r"(st|atom)\\.global|\\bret;|\\bexit;", before)) if waits else 0,
        "atomics": bool(re.search(r"\\b(atom|red)\\.", body)),
        "beside": "mma.sync" in before and bool(waits),
        "waits_at_ends": body[body.rindex("st.global") :].count("griddepcontrol.wait"),
        "past_l1": body.count("ld.global.cg"),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize("rank", ["16", *(pytest.param(more, marks=pytest.mark.slow) for more in ("32", "64", "256"))])
def test_compiles_for_hopper(rank: str, run_for_hopper: Callable[..., Any]) -> None:
    """Without atomics and spilt registers; few rows as dependent launches; few variants, as each is a compilation."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE, "4096", rank, "1,2,8,16,17,64,512,1024,8192")
    names = {"lora_shrink_kernel", "shrink_kernel", "lora_expand_kernel", "lora_expand_silu_kernel"}
    if rank == "256":
        names = {"shrink_kernel", "expand_kernel"}
    assert {kernel["kernel"] for kernel in kernels} == names - ({"lora_expand_silu_kernel"} if rank == "64" else set())
    leads = 0
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024
        spilt = 48 if kernel["beside"] and rank in ("32", "64") else 0  # of A x of three products: 80 registers
        assert kernel["stack"] <= spilt and kernel["local"] == 0, f"{kernel} spills registers"
        assert not kernel["atomics"]
        if kernel["beside"]:
            assert kernel["kernel"] == "lora_shrink_kernel" and kernel["griddepcontrol"] == 3
            assert kernel["waits_at_ends"] == 2 and kernel["past_l1"] > 0  # behind the sums, and where there is nothing
            continue
        assert kernel["griddepcontrol"] in (0, 1, 2) and kernel["writes_before"] == 0
        leads += kernel["griddepcontrol"] == 1
        if kernel["kernel"].startswith("lora_expand"):  # what B and y are goes straight into registers
            assert kernel["y"] == ["st.global.v4.b32"] and kernel["shared"] <= 4096 and kernel["barriers"] <= 4
            assert kernel["reg"] <= 248  # of 64 tokens in eight parts; measured to be faster than with fewer
    assert sum(kernel["beside"] for kernel in kernels) == leads == (0 if rank == "256" else 1)
    assert len(kernels) <= 12


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("width", [2048, 28672])  # programs for some multiprocessors; for more than all
@pytest.mark.parametrize("codes", [False, True])
def test_low_beside_its_product(rng: torch.Generator, width: int, codes: bool) -> None:
    """A graph in which each x is made just before by a kernel that writes where the last one was read: the bits of the
    same kernels one after the other."""
    hidden, rank, layers = 4096, 16, 24
    weight = (torch.randn(width, hidden, generator=rng) / 64).to("cuda", torch.bfloat16)
    down = (torch.randn(hidden, width, generator=rng) / width**0.5).to("cuda", torch.bfloat16)
    a, b = operands(rng, "cuda", torch.bfloat16, 2, hidden, [width], rank)
    used, tiles = torch.ones(2, dtype=torch.int32, device="cuda"), tiles_of([1], 2, "cuda")
    columns, gain = columns_of([width], "cuda"), torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    scales = torch.full((width, hidden // 128), 0.01, dtype=torch.float16)
    numbers = torch.randint(0, 16, (width, hidden), generator=rng).to(torch.uint8)
    matrix = pack(numbers.cuda(), scales.cuda(), "int4", 128, None)
    stream, x = torch.randn(1, hidden, generator=rng).to("cuda", torch.bfloat16), gain.new_empty(1, hidden)

    def step(beside: bool) -> Tensor:
        residual = stream.clone()
        for _ in range(layers):
            rms_norm(residual, gain, 1e-6, out=x)
            low = None if beside else shrink_gluon(x, a, used, tiles)
            if codes:
                y = quant_few(x, matrix, None, x.new_empty(1, width))
            else:
                y = small_linear(x, weight, late=beside)
            low = shrink_gluon(x, a, used, tiles, beside=True) if low is None else low
            expand_gluon(low, b, columns, used, tiles, y)
            residual = residual + small_linear(y / y.norm(), down)
        return residual

    graphs = []
    for beside in (False, True):
        step(beside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, step(beside)))
    for _ in range(300):
        stream.copy_(torch.randn(1, hidden, generator=rng).bfloat16())
        for graph, _ in graphs:
            graph.replay()
        assert torch.equal(*(found for _, found in graphs))


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [16, 64, 256])
@pytest.mark.parametrize("kernels", ["chosen", "triton"])
def test_real_shapes(rng: torch.Generator, device: str, rank: int, dtype: torch.dtype, kernels: str) -> None:
    """One token to a long chunk; twice the same, and in a graph that is replayed with other adapters."""
    sizes, k = [4096, 1024, 1024], 4096
    a, b = operands(rng, device, dtype, 8, k, sizes, rank)
    used, columns = torch.ones(8, dtype=torch.int32, device=device), columns_of(sizes, device)
    for num_tokens in (1, 7, 64, 300, 2048):
        x = torch.randn(num_tokens, k, generator=rng).to(device, dtype)
        y = torch.randn(num_tokens, sum(sizes), generator=rng).to(device, dtype)
        given = [torch.randint(-1, 8, (num_tokens,), generator=rng).tolist() for _ in range(2)]
        tiles, others = (tiles_of(slots, 8, device) for slots in given)

        def run(tiles: Tiles, x: Tensor = x, y: Tensor = y) -> Tensor:
            out = y.clone()
            shrink, expand = (module.shrink, module.expand) if kernels == "chosen" else (shrink_triton, expand_triton)
            expand(shrink(x, a, used, tiles), b, columns, used, tiles, out)
            return out

        def assert_right(found: Tensor, tiles: Tiles, x: Tensor = x, y: Tensor = y) -> None:
            wanted = y.float().clone()
            expand_torch(shrink_torch(x, a, used, tiles), b, columns, used, tiles, wanted)
            torch.testing.assert_close(found.float(), wanted, atol=0.03 * float(wanted.abs().max()), rtol=0.03)

        found = run(tiles)
        assert_right(found, tiles)
        assert torch.equal(run(tiles), found)
        places = max(len(tiles.order), len(others.order))
        static = Tiles(*(t.clone() for t in tiles[:3]), tiles.order.new_zeros(places), tiles.tiling)
        static.order[: len(tiles.order)] = tiles.order
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(static)
        for target, source in zip(static[:4], others[:4], strict=True):
            target[: len(source)] = source
        graph.replay()
        assert_right(out, others)
