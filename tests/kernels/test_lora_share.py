"""Gated products that add what low-rank adapters do in their own pass: on a Hopper GPU (the kernel's order of events:
test_linear_gluon.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from vserve.engine.adapters.tables import Grouping
from vserve.kernels.linear.linear_hopper import MANY_ROWS, ByToken, HopperTile, Share, silu_mul_linear_hopper, takes
from vserve.kernels.lora.lora import Tiles, shrink, shrink_gluon
from vserve.kernels.norm.norm import rms_norm

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")]
SLOTS = 8


def tables(slots: list[int]) -> tuple[Tiles, ByToken]:
    """Of every token's slot, -1 for none."""
    grouping = Grouping(len(slots), SLOTS, torch.device("cuda"))
    grouping.fill(np.array(slots), np.ones(len(slots), dtype=np.int64), len(slots))
    return grouping.tiles(len(slots)), grouping.by_token(len(slots))


def adapters(
    rng: torch.Generator, dtype: torch.dtype, k: int, n: int, rank: int, parts: int = 2
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A [slots, parts · rank, k] and B [slots, n, rank] of one memory, as a slot has them. parts: 1 of gate and up that
    are one product."""
    size = parts * rank * k
    memory = torch.randn(SLOTS, size + n * rank, generator=rng)
    memory[:, :size] /= k**0.5
    flat = memory.to("cuda", dtype)
    return flat[:, :size].unflatten(1, (parts * rank, k)), flat[:, size:].unflatten(1, (n, rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rank", "parts"), [(16, 2), (32, 2), (16, 1)])
@pytest.mark.parametrize("tile", [HopperTile(1, 4, 1), HopperTile(2, 4, 16), MANY_ROWS], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 64), (64, 28672, 4096), (100, 528, 136), (777, 2048, 512)])
def test_reference(
    rng: torch.Generator, tile: HopperTile, m: int, n: int, k: int, rank: int, parts: int, dtype: torch.dtype
) -> None:  # fmt: skip
    """Tokens in any order, without adapter, and of one that is not used here: these have the bits of no adapters."""
    x = torch.randn(m, k, generator=rng).to("cuda", dtype)
    weight = (torch.randn(n, k, generator=rng) / k**0.5).to("cuda", dtype)
    a, b = adapters(rng, dtype, k, n, rank, parts)
    assert takes(x, b)
    used = torch.tensor([1, 0, *[1] * (SLOTS - 2)], dtype=torch.int32, device="cuda")
    a[1] = float("nan")
    by_turns = [token // 50 % (SLOTS + 1) - 1 for token in range(m)]  # each line of slots is another one
    for slots in (torch.randint(-1, SLOTS, (m,), generator=rng).tolist(), by_turns, [-1] * m):
        tiles, by_token = tables(slots)
        found = silu_mul_linear_hopper(x, weight, tile, Share(shrink(x, a, used, tiles), b, used, by_token, False))
        y = x.double() @ weight.double().t()
        for slot in {slot for slot in slots if slot >= 0 and slot != 1}:
            mine = torch.tensor([of == slot for of in slots], device="cuda")
            low = x[mine].double() @ a[slot].double().t()
            gate, up = low[:, :rank], low[:, -rank:]
            y[mine] += torch.cat([gate @ b[slot, : n // 2].double().t(), up @ b[slot, n // 2 :].double().t()], dim=1)
        gate, up = y.chunk(2, dim=1)
        expected = silu(gate) * up
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3), f"off by {error:.1e}"
        without = [token for token, slot in enumerate(slots) if slot in (-1, 1)]
        assert torch.equal(found[without], silu_mul_linear_hopper(x, weight, tile)[without])


def test_the_company_of_other_adapters(rng: torch.Generator) -> None:
    """Decides on where a share comes in the sums, and so on their rounding: on no more."""
    x, weight = (torch.randn(rows, 4096, generator=rng).to("cuda", torch.bfloat16) for rows in (64, 1024))
    a, b = adapters(rng, torch.bfloat16, 4096, 1024, 16)
    used, found = torch.ones(SLOTS, dtype=torch.int32, device="cuda"), []
    for others in ([5] * 63, [-1] * 63, [token % SLOTS for token in range(63)]):
        tiles, by_token = tables([5, *others])
        low = shrink(x, a, used, tiles)
        found.append(silu_mul_linear_hopper(x, weight / 64, MANY_ROWS, Share(low, b, used, by_token, False))[0].float())
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).norm() < 1e-3 * found[0].norm()


@pytest.mark.parametrize("m", [40, 64, 128])
def test_while_low_is_being_made(rng: torch.Generator, m: int) -> None:
    """A graph in which the product starts beside A x, layer after layer, each x where the last one was read: the bits
    of the same kernels one after the other."""
    hidden, width, layers, rank = 4096, 28672, 12, 16
    weight = (torch.randn(width, hidden, generator=rng) / 64).to("cuda", torch.bfloat16)
    down = (torch.randn(hidden, width // 2, generator=rng) / width**0.5).to("cuda", torch.bfloat16)
    a, b = adapters(rng, torch.bfloat16, hidden, width, rank)
    used, gain = torch.ones(SLOTS, dtype=torch.int32, device="cuda"), torch.ones(hidden, device="cuda").bfloat16()
    tiles, by_token = tables([token % (SLOTS + 1) - 1 for token in range(m)])
    stream, x = torch.randn(m, hidden, generator=rng).cuda().bfloat16(), gain.new_empty(m, hidden)
    tile = HopperTile(1 if m <= 64 else 2, 4, 1)

    def step(runs: bool) -> Tensor:
        residual = stream.clone()
        for _ in range(layers):
            rms_norm(residual, gain, 1e-6, out=x)
            low = shrink_gluon(x, a, used, tiles, leads=runs)
            y = silu_mul_linear_hopper(x, weight, tile, Share(low, b, used, by_token, runs))
            residual = residual + torch.nn.functional.linear(y / y.norm(), down)
        return residual

    graphs = []
    for runs in (False, True):
        step(runs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, step(runs)))
    for _ in range(200):
        stream.copy_(torch.randn(m, hidden, generator=rng).bfloat16())
        for graph, _ in graphs:
            graph.replay()
        assert torch.equal(*(found for _, found in graphs))
