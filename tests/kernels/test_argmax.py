"""Greedy tokens against loops over plain lists: ties, NaN, rows of -inf, and rows of every length."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.sampling import argmax

INF, NAN = float("inf"), float("nan")
TILE = 32  # so small that a row has many: a piece is eight


class Argmax:
    """argmax(logits [N, V]) → tokens, by one of the paths."""

    def __init__(self, path: str, device: str) -> None:
        self.path, self.device = path, device

    def __call__(self, logits: torch.Tensor, **options: Any) -> list[int]:
        if self.path == "argmax_triton":
            options["tile"] = TILE
        tokens = getattr(argmax, self.path)(logits.to(self.device), **options)
        assert tokens.dtype == torch.int32 and tokens.shape == (len(logits),)
        finite = torch.zeros(len(logits) + 2, dtype=torch.bool, device=self.device)
        again = getattr(argmax, self.path)(logits.to(self.device), finite=finite[1:-1], **options)
        assert torch.equal(again, tokens) and not finite[0] and not finite[-1]
        greatest = [max(row, key=lambda x: (math.isnan(x), x)) for row in logits.tolist()]
        assert finite[1:-1].tolist() == [math.isfinite(x) for x in greatest]
        return tokens.tolist()


@pytest.fixture(params=["torch", "triton", "public"])
def greedy(request: pytest.FixtureRequest, device: str) -> Argmax:
    if request.param == "torch":
        return Argmax("argmax_torch", "cpu")
    return Argmax("argmax_triton" if request.param == "triton" else "argmax", device)


def first_greatest(row: list[float]) -> int:
    """Of the numbers, the first that no other exceeds; but a NaN, the first of them, exceeds all."""
    return next((i for i, x in enumerate(row) if math.isnan(x)), row.index(max(row)))


def check(greedy: Argmax, logits: torch.Tensor) -> None:
    assert greedy(logits) == [first_greatest(row) for row in logits.tolist()]


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 32, 33, 255, 256, 257, 700, 2304])
def test_vocabularies_of_any_size(greedy: Argmax, vocabulary: int, rng: torch.Generator) -> None:
    logits = torch.randn(4, vocabulary, generator=rng) - 20  # below what lies beyond the end, were that 0
    logits[1, 0], logits[2, -1] = 3.0, 3.0
    check(greedy, logits)


@pytest.mark.parametrize("num_rows", [0, 1, 40])
def test_any_number_of_rows(greedy: Argmax, num_rows: int, rng: torch.Generator) -> None:
    check(greedy, torch.randn(num_rows, 300, generator=rng))


def test_of_equal_logits_the_first(greedy: Argmax, rng: torch.Generator) -> None:
    """Equal ones in one lane, one tile, one piece, and in different ones of each."""
    logits = torch.randn(24, 600, generator=rng)
    for row in range(12):
        logits[row, torch.randperm(600, generator=rng)[: 2 + row % 3]] = 9.0
    for row, at in enumerate(([64, 96], [40, 41], [37, 70], [70, 101], [255, 256], [100, 356], [300, 599]), start=12):
        logits[row, at] = 9.0
    logits[19], logits[20], logits[21] = 0.0, -3e38, 1e-45  # whole rows
    logits[22] = logits[22].round()
    logits[23] = torch.randint(0, 2, (600,), generator=rng) * 1e-45  # the least there is above 0
    check(greedy, logits)


def test_zeros_are_equal(greedy: Argmax, rng: torch.Generator) -> None:
    logits = torch.full((20, 300), -1.0)
    for row in range(20):
        places = torch.randperm(300, generator=rng)[:4]
        logits[row, places] = torch.tensor([0.0, -0.0, -0.0, 0.0 if row % 2 else -0.0])
    check(greedy, logits)


def test_infinities(greedy: Argmax, rng: torch.Generator) -> None:
    logits = torch.full((6, 300), -INF)
    logits[1, 280], logits[2, [7, 290]] = -3.4e38, -100.0
    logits[3] = torch.randn(300, generator=rng)
    logits[3, [150, 151, 299]] = INF
    logits[4] = INF
    logits[5, 299] = INF
    check(greedy, logits)


def test_nan_is_the_greatest(greedy: Argmax, rng: torch.Generator) -> None:
    """As of torch.argmax, whatever its sign and payload and wherever the infinities are."""
    logits = torch.randn(8, 600, generator=rng)
    logits[0, 33] = NAN
    logits[1, [65, 97, 400]] = NAN
    logits[2, [0, 64, 599]], logits[2, [20, 599]] = INF, NAN
    logits[3] = NAN
    logits[4], logits[4, 599] = -INF, NAN
    bits = logits.view(torch.int32)
    bits[5, 70], bits[5, 300] = -1, 0x7F800001  # the first is negative
    bits[6, 70], bits[6, 38] = 0x7FFFFFFF, -(1 << 31) | 0x7FC00000
    check(greedy, logits)


def test_rows_of_a_wider_buffer(greedy: Argmax, rng: torch.Generator) -> None:
    buffer = torch.full((9, 320), INF)
    buffer[:, :300] = torch.randn(9, 300, generator=rng)
    buffer = buffer.to(greedy.device)
    check(greedy, buffer[:, :300])
    check(greedy, buffer[1::2, :300])
    check(greedy, buffer[2:, 7:288])
    check(greedy, buffer[:, :1])


def test_out_is_used(greedy: Argmax, rng: torch.Generator) -> None:
    logits = torch.randn(5, 300, generator=rng)
    out = torch.full((7,), -5, dtype=torch.int32, device=greedy.device)
    tokens = greedy(logits, out=out[1:6])
    assert out.tolist() == [-5, *tokens, -5] and tokens == greedy(logits)


def test_other_layouts_are_refused(device: str) -> None:
    for logits in (torch.zeros(3, 8, dtype=torch.bfloat16, device=device), torch.zeros(8, 3, device=device).t()):
        with pytest.raises(ValueError, match="fp32"):
            argmax.argmax_triton(logits)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("vocabulary", [128256, 50257])
def test_of_real_models_sizes(vocabulary: int) -> None:
    """Against torch, with many ties or few, alone and in a CUDA graph that is replayed with other logits."""
    logits = torch.zeros(250, vocabulary, device="cuda")
    out = torch.empty(250, dtype=torch.int32, device="cuda")
    finite = torch.empty(250, dtype=torch.bool, device="cuda")
    argmax.argmax(logits, out, finite)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        argmax.argmax(logits, out, finite)
    for step in range(5):
        logits.copy_(torch.randint(-9, 9 + 2000 * step, logits.shape, device="cuda"))
        for row, value in enumerate((math.nan, math.inf, -math.inf)):
            logits[7 * step + row, :: vocabulary // 3 if row < 2 else 1] = value
        expected = logits.argmax(dim=-1).int()
        graph.replay()
        assert torch.equal(out, expected)
        assert finite.logical_not().nonzero().squeeze(1).tolist() == [7 * step, 7 * step + 1, 7 * step + 2]
        for num_rows in (1, 2, 17, 60):
            assert torch.equal(argmax.argmax(logits[:num_rows]), expected[:num_rows])


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: True
from vserve.kernels.sampling.argmax import argmax_triton

for num_rows in (1, 2, 16, 17, 60, 256, 1024):
    argmax_triton(torch.empty(num_rows, 128256))
    argmax_triton(torch.empty(num_rows, 128256), finite=torch.empty(num_rows, dtype=torch.bool))
print(json.dumps([
    {"kernel": name, "wide_loads": len(re.findall(r"ld\\.global[.\\w]*\\.v4", kernel.asm["ptx"])), **resources(kernel)}
    for name, kernel in kernels.values()
]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU")
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """One variant for all numbers of rows and uses; none spills; six programs fit an SM; loads are of 16 bytes."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    pieces, rows = run_for_hopper(_COMPILE)
    assert (pieces["kernel"], rows["kernel"]) == ("_piece_kernel", "_row_kernel")
    assert pieces["stack"] == pieces["local"] == rows["stack"] == rows["local"] == 0
    assert pieces["reg"] <= 40 and pieces["wide_loads"] == 8


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("cuts", [(0, 300), (150, 150), (130, 130, 40), (100, 100, 100, 0), (1, 299)])
def test_columns_in_parts(path: str, cuts: tuple[int, ...], device: str, rng: torch.Generator) -> None:
    """As ranks have them, the last of which may have fewer or none: equal ones on both sides of a cut, rows of -inf,
    NaN, zeros of both signs; the best of pieces are all that is left of a row."""
    logits = torch.randn(9, 300, generator=rng)
    logits[1, [99, 129, 130, 149, 150, 299]] = 9.0
    logits[2, [130, 299]] = 9.0
    logits[3] = -INF
    logits[4, [149, 150]] = INF
    logits[5, [20, 200]], logits[5, 149] = NAN, INF
    logits[6] = -1.0
    logits[6, [140, 160]] = torch.tensor([-0.0, 0.0])
    logits[7, 299], logits[8, 0] = 9.0, 9.0
    where = "cpu" if path == "torch" else device
    best, start = [], 0
    for part in logits.to(where).split(cuts, dim=1):
        if path == "torch":
            best.append(argmax.best_torch(part, start))
        else:
            best.append(argmax.best_triton(part.contiguous(), start, max(cuts), TILE))
        start += part.shape[1]
    gathered = torch.cat([part.t() for part in best]).t()  # ranks' one after the other, and seen as rows
    assert not gathered.is_contiguous()
    tokens, finite = getattr(argmax, f"of_pieces_{path}")(gathered)
    assert (tokens.dtype, finite.dtype) == (torch.int32, torch.bool)
    assert tokens.tolist() == [first_greatest(row) for row in logits.tolist()]
    assert finite.tolist() == [math.isfinite(max(row, key=lambda x: (math.isnan(x), x))) for row in logits.tolist()]
