"""y = x Wᵀ through cuBLAS, with an algorithm that was measured instead of the one that its heuristic takes.

cuBLAS holds hundreds of kernels; which one runs is a guess from the sizes, and for some weights and rows not the best
(28672 x 4096 by 448 rows: 280 µs, where 165 are possible). configs/tiles holds the winners of tools/kernels/tune.py as
cuBLAS's own 64-byte descriptions of an algorithm, which are valid for the version of cuBLAS that made them; with any
other version the table stays unused. The library is the one that torch has loaded, called through ctypes.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ..launch.tiles import assign_rows, tile_table

WORKSPACE_BYTES = 32 << 20
TRANSA, COMPUTE_32F, REAL_32F = 3, 68, 0  # of cublasLt.h, cublas_api.h and library_types.h
DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
ONE, ZERO = c_float(1.0), c_float(0.0)
COLUMNS = 3  # CUBLASLT_MATRIX_LAYOUT_COLS
REDUCTION = 3  # CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: how the sums of a split K are put together
FP32_REDUCTIONS = (0, 2)  # none, and in the type that is computed in; the others round partial sums to the result's

Algorithm = ctypes.c_uint64 * 8
Algorithms = tuple["ctypes.Array[c_uint64] | None", ...]


class Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, what it needs, and whether it can run."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Product(NamedTuple):
    """cuBLAS's descriptions of one product's operands, in its column-major terms: Cᵀ = A Bᵀ with A = W, B = x."""

    operation: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p


@lru_cache
def library() -> ctypes.CDLL:
    """libcublasLt as torch has loaded it; OSError where torch has none."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")


@lru_cache
def version() -> int:
    """Of the library, as it counts; 0 where there is none."""
    try:
        get_version = library().cublasLtGetVersion
    except OSError:
        return 0
    get_version.restype = c_size_t
    return get_version()


def check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS refused a product with status {status}")


@lru_cache
def handle(device: torch.device) -> c_void_p:
    made = c_void_p()
    with torch.cuda.device(device):
        check(library().cublasLtCreate(byref(made)))
    return made


def prepare(device: torch.device) -> None:
    """Allocate what calls on this device share, 32 MiB: before a CUDA graph is captured."""
    handle(device)
    workspace(device)


@lru_cache
def workspace(device: torch.device) -> torch.Tensor:
    """Shared by all calls on a device: they belong on one stream, or one after the other. RuntimeError where it would
    have to be made while a CUDA graph is captured: it would lie in that graph's memory."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"cuBLAS has no workspace on {device} and a graph is captured: call prepare first")
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def accumulate_in_fp32() -> None:
    """For this process: torch's products through cuBLAS add up in fp32 only.

    By default torch lets cuBLAS round the partial sums of a product whose K is split to fp16 or bf16, where they lose
    what large terms of opposite signs leave, or overflow. Measured algorithms (`runs`) never do.
    """
    settings = torch.backends.cuda.matmul
    settings.allow_tf32 = False
    settings.allow_fp16_accumulation = False
    settings.allow_fp16_reduced_precision_reduction = False
    settings.allow_bf16_reduced_precision_reduction = False


def describe(m: int, n: int, k: int, dtype: torch.dtype, stride_x: int, stride_w: int, stride_out: int) -> Product:
    lt = library()

    def layout(rows: int, columns: int, stride: int) -> c_void_p:
        made = c_void_p()
        kind = DATA_TYPES[dtype]
        check(lt.cublasLtMatrixLayoutCreate(byref(made), kind, c_uint64(rows), c_uint64(columns), c_int64(stride)))
        return made

    operation = c_void_p()
    check(lt.cublasLtMatmulDescCreate(byref(operation), COMPUTE_32F, REAL_32F))
    check(lt.cublasLtMatmulDescSetAttribute(operation, TRANSA, byref(c_int(1)), c_size_t(4)))
    return Product(operation, layout(k, n, stride_w), layout(k, m, stride_x), layout(n, m, stride_out))


product = cache(describe)


def runs(algorithm: ctypes.Array[c_uint64], described: Product, device: torch.device) -> bool:
    """Whether the algorithm can compute this product on this device within the workspace, adding up in fp32 only."""
    operation, a, b, c = described
    found, scheme = Candidate(), c_uint32()
    lt = library()
    status = lt.cublasLtMatmulAlgoCheck(handle(device), operation, a, b, c, c, byref(algorithm), byref(found))
    if status or found.workspace_bytes > WORKSPACE_BYTES:
        return False
    status = lt.cublasLtMatmulAlgoConfigGetAttribute(
        byref(algorithm), REDUCTION, byref(scheme), c_size_t(4), byref(c_size_t())
    )
    return not status and scheme.value in FP32_REDUCTIONS


def resize(described: Product, m: int) -> None:
    """Make it a product of m rows: many times faster than to describe another, where thousands are asked about."""
    for layout in (described.x, described.out):
        check(library().cublasLtMatrixLayoutSetAttribute(layout, COLUMNS, byref(c_uint64(m)), c_size_t(8)))


def measured_linear(
    x: torch.Tensor, weight: torch.Tensor, algorithm: ctypes.Array[c_uint64], residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x Wᵀ, added up in fp32 and rounded to x's dtype, by this algorithm of cuBLAS on the current stream.

    x [M, K] and weight [N, K], bf16 or fp16, with contiguous rows that start on multiples of 16 bytes. residual, like
    such a result [M, N]: is added to and returned (cuBLAS 13 rounds the product before it adds). RuntimeError where
    cuBLAS refuses.
    """
    out = x.new_empty(x.shape[0], weight.shape[0]) if residual is None else residual
    operation, a, b, c = product(
        x.shape[0], weight.shape[0], x.shape[1], x.dtype, x.stride(0), weight.stride(0), out.stride(0)
    )
    target = c_void_p(out.data_ptr())
    check(
        library().cublasLtMatmul(
            handle(x.device), operation, byref(ONE), c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b,
            byref(ZERO if residual is None else ONE), target, c, target, c, byref(algorithm),
            c_void_p(workspace(x.device).data_ptr()), c_size_t(WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
    )  # fmt: skip
    return out


@lru_cache
def algorithms(n: int, k: int, dtype: torch.dtype) -> Algorithms:
    """By number of rows: what beats cuBLAS's own choice for a weight [n, k] on this process's GPU; None: nothing."""
    found: list[ctypes.Array[c_uint64] | None] = []
    if dtype != torch.bfloat16 or not torch.cuda.is_available():
        return ()
    device = torch.device("cuda", torch.cuda.current_device())
    for row in tile_table("cublas"):
        if (row["n"], row["k"], row["version"]) != (n, k, version()):
            continue
        algorithm = Algorithm.from_buffer_copy(bytes.fromhex(row["algorithm"]))
        # The table may be another GPU's; and what runs for the first and the last number of rows need not between.
        described = describe(row["max_rows"], n, k, dtype, k, k, n)
        for m in range(row["min_rows"], row["max_rows"] + 1):
            resize(described, m)
            if runs(algorithm, described, device):
                assign_rows(found, {"min_rows": m, "max_rows": m}, algorithm)
    return tuple(found)
