"""Products of many rows: compiled anywhere, run on a Hopper GPU only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from vserve.kernels.linear import linear_hopper as module
from vserve.kernels.linear.linear_gluon import linear_kernel
from vserve.kernels.linear.linear_hopper import (
    MANY_ROWS,
    HopperTile,
    even_rows,
    hopper_tiles,
    linear_hopper,
    silu_mul_linear_hopper,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DTYPES = [torch.bfloat16, torch.float16]
TILES = {
    "few_rows": HopperTile(1, 4, 1),
    "stages": HopperTile(2, 3, 3),
    "many_rows": MANY_ROWS,
}
# rows, N, K: whole tiles and parts of them in each direction, more tiles than programs, and fewer steps than stages
SHAPES = [(1, 256, 64), (64, 512, 512), (129, 272, 136), (200, 1200, 4096), (1000, 14336, 320), (2048, 6144, 1024)]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")
class TestOnHopper:
    @pytest.fixture
    def operands(self, rng: torch.Generator) -> Callable[..., tuple[Tensor, Tensor]]:
        def make(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            x = torch.randn(m + 1, k, generator=rng).to("cuda", dtype)
            weight = torch.randn(n + 1, k, generator=rng).to("cuda", dtype) / k**0.5
            x[m:], weight[n:] = float("nan"), float("nan")  # behind the operands
            return x[:m], weight[:n]

        return make

    def check(self, y: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        tolerance = 4e-3 if dtype == torch.bfloat16 else 1e-3
        error = (y.double() - expected).norm() / expected.norm()
        assert y.dtype == dtype and error < tolerance, f"off by {error:.1e}"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
    def test_reference(self, tile: HopperTile, shape: tuple[int, ...], dtype: torch.dtype, operands: Any) -> None:
        x, weight = operands(*shape, dtype)
        self.check(linear_hopper(x, weight, tile), x.double() @ weight.double().t(), dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
    def test_residual(self, tile: HopperTile, shape: tuple[int, ...], dtype: torch.dtype, operands: Any) -> None:
        x, weight = operands(*shape, dtype)
        m, n, _ = shape
        whole = torch.randn(m + 2, n, device="cuda").to(dtype)
        before = whole.double()
        residual = whole[1:-1]
        assert linear_hopper(x, weight, tile, residual) is residual
        self.check(residual, before[1:-1] + x.double() @ weight.double().t(), dtype)
        assert torch.equal(whole[[0, -1]].double(), before[[0, -1]]), "rows beside it have changed"

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("tile", [*TILES.values(), HopperTile(2, 4, 8)], ids=[*TILES, "four_stages"])
    def test_gated(self, tile: HopperTile, shape: tuple[int, ...], dtype: torch.dtype, operands: Any) -> None:
        x, weight = operands(*shape, dtype)
        gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
        self.check(silu_mul_linear_hopper(x, weight, tile), silu(gate) * up, dtype)

    def test_large_values(self, operands: Any) -> None:
        """exp overflows for gates far below zero: they give 0, not NaN."""
        x, weight = operands(70, 512, 256, torch.bfloat16)
        gate, up = (x.double() * 300 @ weight.double().t()).chunk(2, dim=1)
        assert gate.min() < -300
        self.check(silu_mul_linear_hopper(x * 300, weight), silu(gate) * up, torch.bfloat16)

    def test_in_a_cuda_graph(self, operands: Any) -> None:
        x, weight = operands(300, 1024, 512, torch.bfloat16)
        silu_mul_linear_hopper(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear_hopper(silu_mul_linear_hopper(x, weight), weight)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, linear_hopper(silu_mul_linear_hopper(x, weight), weight), rtol=0, atol=0)

    @pytest.mark.parametrize("tile", [MANY_ROWS, HopperTile(2, 3, 1)], ids=str)
    def test_a_consumer_that_is_held_up(self, tile: HopperTile, operands: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each product of the second waits for 20 us, in which summands must not come where its weights are."""

        class Held:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
                return partial(linear_kernel[grid], HOLD_B=20_000)

        monkeypatch.setattr(module, "linear_kernel", Held())
        for m, n, k in ((128, 256, 512), (300, 1024, 512)):
            x, weight = operands(m, n, k, torch.bfloat16)
            for _ in range(10):
                residual = torch.randn(m, n, device="cuda").bfloat16()
                expected = residual.double() + x.double() @ weight.double().t()
                self.check(linear_hopper(x, weight, tile, residual), expected, torch.bfloat16)

    def test_no_rows(self, operands: Any) -> None:
        x, weight = operands(1, 512, 256, torch.bfloat16)
        assert silu_mul_linear_hopper(x[:0], weight).shape == (0, 256)


class TestTiles:
    @pytest.fixture(autouse=True)
    def _a_hopper_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
        row = {"consumers": 1, "stages": 4, "group": 2, "gated": True, "n": 512, "k": 64}
        rows = [{**row, "min_rows": 5, "max_rows": 8}, {**row, "min_rows": 11, "max_rows": 12, "group": 3}]
        monkeypatch.setattr(module, "tile_table", lambda table: rows)
        hopper_tiles.cache_clear()
        yield
        hopper_tiles.cache_clear()

    def test_rows_of_the_table(self) -> None:
        first, second = HopperTile(1, 4, 2), HopperTile(1, 4, 3)
        expected = (*[None] * 5, *[first] * 4, None, None, second, second)
        assert hopper_tiles(512, 64, torch.bfloat16, gated=True) == expected

    def test_other_weights(self) -> None:
        """Large gated ones go by what holds for those measured; small ones and plain ones stay with cuBLAS."""
        assert hopper_tiles(512, 64, torch.bfloat16, gated=False) == ()
        assert hopper_tiles(37888, 3584, torch.float16, gated=True)[-2:] == (None, MANY_ROWS)
        assert hopper_tiles(1024, 512, torch.bfloat16, gated=True) == ()

    @pytest.mark.parametrize(("n", "k"), [(37896, 3584), (37888, 3588)])
    def test_rows_that_tma_cannot_address(self, n: int, k: int) -> None:
        assert hopper_tiles(n, k, torch.bfloat16, gated=True) == ()

    def test_other_dtypes_and_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hopper_tiles(37888, 3584, torch.float32, gated=True) == ()
        monkeypatch.setattr(module, "num_processors", lambda device: 0)
        assert hopper_tiles(37888, 3584, torch.bfloat16, gated=True) == ()


@pytest.mark.parametrize(
    ("processors", "rows", "expected"),
    [(132, 4096, 4224), (132, 8192, 8448), (132, 2048, 2048), (132, 1, 1), (78, 4096, 4096), (0, 4096, 4096)],
)
def test_even_rows(monkeypatch: pytest.MonkeyPatch, processors: int, rows: int, expected: int) -> None:
    monkeypatch.setattr(module, "num_processors", lambda device: processors)
    assert even_rows(torch.device("cuda"), rows) == expected
    assert even_rows(torch.device("cpu"), rows) == rows


_COMPILE = """
import subprocess
import triton
from vserve.kernels.linear import linear_hopper as module
from vserve.kernels.linear.linear_hopper import ByToken, Share

module.pdl_available = lambda device: True
module.num_processors = lambda device: 132
x = torch.empty(1024, 4096, dtype=torch.bfloat16)
weight = torch.empty(28672, 4096, dtype=torch.bfloat16)
found = []
residual = torch.empty(1024, 28672, dtype=torch.bfloat16)
def add(x, weight, tile):
    module.linear_hopper(x, weight, tile, residual[:len(x)])

def adapted(rank, splits, runs):
    def product(x, weight, tile):
        ints = torch.empty(1024, dtype=torch.int32)
        b = torch.empty(8, 28672, rank, dtype=torch.bfloat16)
        by_token = ByToken(ints[:1], ints[:len(x)], ints[:len(x)], ints.view(8, -1))
        share = Share(torch.empty(splits, len(x), 2 * rank), b, ints[:8], by_token, runs)
        assert module.takes(x, b)
        module.silu_mul_linear_hopper(x, weight, tile, share)
    return product

joined = [module.silu_mul_linear_hopper, adapted(16, 8, True), adapted(32, 14, False), adapted(32, 4, True)]
for product in (module.linear_hopper, add, *joined):
    for tile in ((1, 4, 1), (2, 3, 16), (2, 4, 8)):
        if tile[1] == 4 and tile[0] == 2 and product not in joined:
            continue
        kernels.clear()
        for rows, columns in ((1024, 4096), (999, 4096), (1, 64)):  # none of which makes a variant of its own
            product(x[:rows, :columns], weight[:, :columns], module.HopperTile(*tile))
        (_, kernel), = kernels.values()
        with open(sys.argv[1] + ".ptx", "w") as file:
            file.write(kernel.asm["ptx"])
        tools = triton.knobs.nvidia
        assemble = [tools.ptxas.path, "-v", "--gpu-name", "sm_90a", sys.argv[1] + ".ptx", "-o", sys.argv[1] + ".cubin"]
        said = subprocess.run(assemble, capture_output=True, text=True, check=True)
        code = subprocess.check_output([tools.nvdisasm.path, "-c", sys.argv[1] + ".cubin"], text=True)
        found.append({"shared": kernel.metadata.shared, "said": said.stdout + said.stderr,
                      "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
                      "instructions": sorted(set(re.findall(r"HGMMA\\S+", code)))})
print(json.dumps(found))
"""


@pytest.mark.slow
def test_compiles(run_for_hopper: Callable[..., Any], tmp_path: Any) -> None:
    """With the large instruction, no register spilled, no products one by one, and room in shared memory."""
    found = run_for_hopper(_COMPILE, str(tmp_path / "linear"))
    assert len(found) == 4 + 4 * 3
    for number, kernel in enumerate(found):
        assert kernel["instructions"] == ["HGMMA.64x256x16.F32.BF16"]
        consumers = 1 if number in (7, 13) else 2
        assert kernel["waits"] == (consumers if 7 <= number < 10 or number >= 13 else 0)  # for h, nobody else
        assert " 0 bytes spill stores, 0 bytes spill loads" in kernel["said"]
        assert "wgmma" not in kernel["said"].lower(), "products are serialized"
        assert kernel["shared"] <= 227 << 10
