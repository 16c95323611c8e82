"""Experts as packed codes beside a few pairs: the Gluon kernel against the twin of moe_codes.py, what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.experts import moe_few
from vserve.kernels.experts.gating import GELU
from vserve.kernels.experts.moe_blocks import Order
from vserve.kernels.experts.moe_codes import CodesTile, experts_codes_torch, experts_codes_triton
from vserve.kernels.experts.moe_few import ExpertsFewTile, experts_few, experts_few_tile

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")
Load = Callable[[Path], Any]


@pytest.fixture
def codes(load_module: Load) -> Any:
    """Random experts and what they are sent."""
    return load_module(Path(__file__).with_name("test_moe_codes.py"))


@pytest.fixture
def in_python(load_module: Load, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel's source, run on CPU tensors, for steps that it takes."""
    here = Path(__file__)
    model, ptx = (load_module(here.with_name(name)) for name in ("gluon_tiles.py", "ptx.py"))
    kernel = model.Kernel(moe_few.experts_few_kernel, ptx)
    monkeypatch.setattr(moe_few, "experts_few_kernel", kernel)
    monkeypatch.setattr(moe_few, "takes", lambda x, order: not order.sort)
    return kernel


def assert_same(
    codes: Any, rng: torch.Generator, device: str, kind: str, group: int, shifts: bool, tokens: int, top_k: int,
    experts: int, hidden: int, inner: int, limit: float, dtype: torch.dtype,
) -> None:  # fmt: skip
    """With biases where there is a limit, and one expert that is on another rank."""
    gate_up = codes.made(rng, kind, experts, 2, inner, hidden, group, shifts, device)
    down = codes.made(rng, kind, experts, 1, hidden, inner, group, shifts, device)
    ids, weights = codes.routed(rng, device, tokens, top_k, experts + 1)
    weights = weights.where(ids < experts, 0.0)
    x = codes.random(rng, device, tokens, hidden + 8, dtype=dtype)[:, :hidden]
    biases = (
        (codes.random(rng, device, experts, 2 * inner, dtype=dtype), codes.random(rng, device, experts, hidden))
        if limit
        else (None, None)
    )
    run = {"limit": limit, "beside": x if limit else None}
    wanted = experts_codes_torch(x.float(), ids, weights, gate_up, down, *biases, **run)
    found = experts_codes_triton(x, ids, weights, gate_up, down, *biases, **run, sort=False)
    codes.assert_near(found, wanted, 2e-3 if dtype == torch.float16 else 1e-2)


CASES = [
    # kind, group, shifts, tokens, top_k, experts, hidden, inner, limit
    ("int4", 128, False, 1, 2, 4, 256, 64, 0.0),
    ("int4", 32, True, 2, 2, 3, 200, 72, 0.5),
    ("int4", 64, True, 3, 2, 3, 136, 40, 0.5),
    ("e2m1", 32, False, 1, 3, 4, 200, 72, 0.5),
    ("e2m1", 16, False, 2, 2, 4, 80, 70, 0.0),
    ("table", 64, False, 3, 2, 2, 70, 36, 0.0),
    ("int8", 0, True, 2, 2, 4, 140, 70, 0.5),
    ("int8", 32, True, 1, 2, 2, 64, 64, 0.0),
    ("e4m3", 0, False, 3, 2, 4, 200, 72, 0.5),
    ("e4m3", 128, False, 2, 2, 3, 264, 136, 0.5),
    ("e4m3", 256, False, 1, 2, 3, 600, 40, 0.0),
    ("int4", 128, False, 1, 2, 3, 1024, 64, 0.0),  # as many blocks as warps take at once
    ("e2m1", 32, False, 1, 2, 3, 1160, 24, 0.5),  # more
    ("e5m2", 64, True, 1, 2, 3, 130, 72, 0.5),
    ("e2m1", 16, False, 2, 2, 4, 80, 70, GELU),
]
NAMES = ("kind", "group", "shifts", "tokens", "top_k", "experts", "hidden", "inner", "limit")


@pytest.mark.skipif(CUDA, reason="the same runs on the GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(NAMES, CASES)
@pytest.mark.slow
def test_the_kernel_in_python(
    codes: Any, in_python: Any, rng: torch.Generator, kind: str, group: int, shifts: bool, tokens: int, top_k: int,
    experts: int, hidden: int, inner: int, limit: float, dtype: torch.dtype,
) -> None:  # fmt: skip
    assert_same(codes, rng, "cpu", kind, group, shifts, tokens, top_k, experts, hidden, inner, limit, dtype)
    assert in_python.launches == 2


@pytest.mark.skipif(CUDA, reason="needs the interpreter")
def test_other_steps_are_not_taken(codes: Any, in_python: Any, rng: torch.Generator) -> None:
    """Sorted pairs, a tile of the other kernel's; what it takes, it takes twice."""
    gate_up, down = (codes.made(rng, "int4", 2, parts, 64, 64, 32) for parts in (2, 1))
    ids, weights = codes.routed(rng, "cpu", 1, 2, 2)
    x = codes.random(rng, "cpu", 1, 64)
    tile = CodesTile(16, 64, 4, 2)
    for choice, launches in (({"sort": True}, 0), ({"sort": False, "tiles": (tile, tile)}, 0), ({"sort": False}, 2)):
        experts_codes_triton(x, ids, weights, gate_up, down, **choice)
        assert in_python.launches == launches


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(NAMES, [
    *CASES,
    ("e2m1", 32, False, 1, 4, 32, 2880, 2880, 7.0),  # gpt-oss-20b
    ("e4m3", 128, False, 1, 8, 16, 2048, 768, 0.0),  # Qwen3-30B-A3B, with fewer experts
    ("int4", 128, False, 3, 8, 16, 2048, 768, 0.0),
])  # fmt: skip
def test_products_with_codes(
    codes: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, kind: str, group: int, shifts: bool, tokens: int,
    top_k: int, experts: int, hidden: int, inner: int, limit: float, dtype: torch.dtype,
) -> None:  # fmt: skip
    calls = []
    monkeypatch.setattr(moe_few, "experts_few", lambda *args: (calls.append(1), experts_few(*args)))
    assert_same(codes, rng, "cuda", kind, group, shifts, tokens, top_k, experts, hidden, inner, limit, dtype)
    assert len(calls) == 2


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tile", [ExpertsFewTile(warps, ahead) for warps in (1, 4, 8, 16) for ahead in (1, 2)])
def test_tiles(codes: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, tile: ExpertsFewTile) -> None:
    monkeypatch.setattr(moe_few, "experts_few_tile", lambda bits, blocks: tile)
    for kind, group, hidden in (("e2m1", 32, 2880), ("e4m3", 128, 2048), ("int4", 128, 768)):
        assert_same(codes, rng, "cuda", kind, group, False, 1, 4, 8, hidden, 256, 0.5, torch.bfloat16)


def test_sorted_pairs_are_refused(codes: Any, rng: torch.Generator) -> None:
    matrices, ids = codes.made(rng, "int4", 1, 1, 64, 64, 32), torch.zeros(2, 1, dtype=torch.int32)
    x = torch.ones(2, 64).half()
    with pytest.raises(ValueError, match="got 2 sorted blocks: sort=False"):
        experts_few(x, matrices, None, x, Order(ids, ids.view(-1), ids, True), 1, 2)


def test_a_tile_for_any_columns() -> None:
    for bits in (4, 8):
        for blocks in (1, 6, 16, 23, 112):
            tile = experts_few_tile(bits, blocks)
            assert tile.warps <= 16 and tile.warps * tile.ahead <= 32


_COMPILE = """
from triton.experimental.gluon._runtime import GluonJITFunction
GluonJITFunction.__getitem__ = warm_up_instead
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from vserve.kernels.experts.moe_blocks import order_pairs
from vserve.kernels.experts.expert_codes import ExpertCodes
from vserve.kernels.experts.moe_few import experts_few
from vserve.kernels.linear.planes import pack

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

for kind, group, hidden, inner, experts, top_k, bias in (
    ("e2m1", 32, 2880, 2880, 32, 4, True), ("e4m3", 128, 2048, 768, 128, 8, False),
    ("e4m3", 0, 2048, 768, 128, 8, False), ("int4", 128, 2048, 768, 128, 8, False),
):
    for parts, n, k in ((2, inner, hidden), (1, hidden, inner)):
        scales = torch.ones(n, -(-k // group) if group else 1, dtype=torch.float32 if kind == "e4m3" else torch.float16)
        one = pack(torch.zeros(n, k, dtype=torch.uint8), scales, kind, group)
        one = one._replace(words=one.words.to("meta"), scales=one.scales.to("meta"))
        order = order_pairs(meta(1, top_k, dtype=torch.int32), experts, 16, False)
        x = meta(1 if parts == 2 else top_k, k)
        experts_few(x, ExpertCodes.empty(experts, parts, one), meta(experts, parts * n) if bias else None,
                    meta(top_k, n), order, top_k if parts == 2 else 1, 1, 7.0 if bias else 0.0)
report = []
for name, kernel in kernels.values():
    body, before, waits, after = around_wait(kernel)
    first, last = body.find("mma.sync"), body.rfind("mma.sync")
    report.append({
        "kernel": name,
        "touched_before": len(re.findall(r"(ld|st|atom)\\.global|\\bret;", before)) if waits else -1,
        "mma": body.count("mma.sync"),
        "shared_between": len(re.findall(r"(ld|st)\\.shared|bar\\.sync|ldmatrix|shfl", body[first:last])),
        "loads_of_codes": sorted(set(re.findall(r"ld\\.global\\.L1::evict_first\\S*?\\.(v\\d|b\\d+)", body))),
        **resources(kernel),
    })
print(json.dumps(report))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.slow
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """Codes go to registers in wide loads and from there to the tensor cores: no shared memory, no barrier on the way,
    and no spilt register."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE)
    assert [kernel["kernel"] for kernel in kernels] == ["experts_few_kernel"] * 8
    for kernel in kernels:
        assert kernel["stack"] == kernel["local"] == 0, f"{kernel} spills registers"
        assert kernel["reg"] <= 128 and kernel["touched_before"] == 0
        assert kernel["mma"] and not kernel["shared_between"]
        assert kernel["loads_of_codes"] in (["v2"], ["v4"])
