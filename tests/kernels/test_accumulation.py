"""Every path of a product adds up in fp32: halves that nearly cancel, for every number of rows up to 512.

All operands are small multiples of powers of two, so that fp32 holds every partial sum exactly. In fp16 the sum of a
half overflows or is off by 8 and more, in bf16 by hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from vserve.kernels.linear.cublaslt import accumulate_in_fp32, algorithms, measured_linear, prepare
from vserve.kernels.linear.linear import MAX_ROWS, small_linear
from vserve.kernels.linear.linear_hopper import MANY_ROWS, HopperTile, linear_hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(256, 8192), (1024, 4096), (4096, 4096), (4096, 14336)]  # N, K; few columns and a long K invite to split it
ROWS = 512
FEW_ROWS = HopperTile(consumers=1, stages=4, group=1)


def operands(n: int, k: int, dtype: torch.dtype, device: str, scale: float) -> tuple[Tensor, Tensor]:
    """x [512, k] and a weight [n, k]: each half of a product is some ± 64 · scale · k / 2, their sum some hundreds."""
    half = k // 2
    x = torch.randint(4, 13, (ROWS, half)) / 8
    rest = torch.randint(-1, 2, (ROWS, half)) / 8 - x
    weight = torch.randint(4, 13, (n, half)) * (8 * scale)
    return torch.cat((x, rest), 1).to(device, dtype), torch.cat((weight, weight), 1).to(device, dtype)


def wrong_rows(
    multiply: Callable[[Tensor, int], Tensor], x: Tensor, expected: Tensor, numbers: Iterator[int] | range
) -> list[int]:
    """The numbers of rows with which multiply(x, rows) is off by more than two roundings to its dtype."""
    numbers = list(numbers)
    wrong = []
    for rows in numbers:
        y = multiply(x[:rows], rows)
        limit = expected[:rows].abs() * (2 * torch.finfo(x.dtype).eps) + 1
        wrong.append(((y.float() - expected[:rows]).abs() <= limit).all().logical_not())
    return [rows for rows, bad in zip(numbers, torch.stack(wrong).tolist(), strict=True) if bad]


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operands_tell(dtype: torch.dtype, scale: float) -> None:
    """On any machine: sums in fp32 are right, and halves that are rounded in between are not."""
    x, weight = operands(24, 4096, dtype, "cpu", scale)
    expected = (x.double() @ weight.double().t()).float()

    def whole(x: Tensor, rows: int) -> Tensor:
        return (x.float() @ weight.float().t()).to(dtype)

    def halves(x: Tensor, rows: int) -> Tensor:
        first, second = (a.float() @ b.float().t() for a, b in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True))
        return (first.to(dtype) + second.to(dtype)).to(dtype)

    assert wrong_rows(whole, x, expected, range(1, 33)) == []
    assert wrong_rows(halves, x, expected, range(1, 33)) == list(range(1, 33))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _as_the_engine(self, n: int, k: int, dtype: torch.dtype, scale: float) -> None:
        accumulate_in_fp32()
        self.x, self.weight = operands(n, k, dtype, "cuda", scale)
        self.expected = (self.x.double() @ self.weight.double().t()).float()

    def check(self, multiply: Callable[[Tensor, int], Tensor], numbers: Iterator[int] | range) -> None:
        assert wrong_rows(multiply, self.x, self.expected, numbers) == []

    def test_cublas(self) -> None:
        self.check(lambda x, rows: linear(x, self.weight), range(1, ROWS + 1))

    def test_cublas_that_adds(self) -> None:
        before = torch.zeros(ROWS, len(self.weight), device="cuda", dtype=self.x.dtype)
        self.check(lambda x, rows: before[:rows].clone().addmm_(x, self.weight.t()), range(1, ROWS + 1))

    def test_cublas_to_fp32(self) -> None:
        self.check(lambda x, rows: torch.mm(x, self.weight.t(), out_dtype=torch.float32), range(1, ROWS + 1))

    def test_measured_algorithms(self) -> None:
        table = algorithms(*self.weight.shape, self.x.dtype)
        numbers = [rows for rows in range(1, min(len(table), ROWS + 1)) if table[rows] is not None]
        if not numbers:
            pytest.skip("no algorithms for this weight, dtype, GPU and version of cuBLAS")
        prepare(torch.device("cuda", torch.cuda.current_device()))
        self.check(lambda x, rows: measured_linear(x, self.weight, table[rows]), iter(numbers))
        before = torch.zeros(ROWS, len(self.weight), device="cuda", dtype=self.x.dtype)
        self.check(lambda x, rows: measured_linear(x, self.weight, table[rows], before[:rows].clone()), iter(numbers))

    def test_few_rows(self) -> None:
        self.check(lambda x, rows: small_linear(x, self.weight), range(1, MAX_ROWS + 1))

    @pytest.mark.parametrize("tile", [MANY_ROWS, FEW_ROWS], ids=["many_rows", "few_rows"])
    def test_hopper(self, tile: HopperTile) -> None:
        self.check(lambda x, rows: linear_hopper(x, self.weight, tile), range(1, ROWS + 1))
        before = torch.zeros(ROWS, len(self.weight), device="cuda", dtype=self.x.dtype)
        self.check(lambda x, rows: linear_hopper(x, self.weight, tile, before[:rows].clone()), range(1, ROWS + 1))
