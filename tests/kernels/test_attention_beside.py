"""What follows attend_beside in a CUDA graph waits for its three launches, none of which waits for the one before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vserve.kernels.attention.attention import DecodeWorkspace, PrefillWork, decode_attention, prefill_attention
from vserve.kernels.attention.attention_beside import attend_beside

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
requires_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")]


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData; all zero: the second node begins when the first has ended."""

    _fields_ = [("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5)]


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [
        ("function", c_void_p), ("sizes", c_uint * 7), ("parameters", c_void_p), ("extra", c_void_p),
        ("kernel", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


class Edge(NamedTuple):
    source: int
    target: int
    full: bool


def _driver(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert status == 0, f"{name} answers {status}"


def edges_of(graph: torch.cuda.CUDAGraph) -> list[Edge]:
    """Of a graph captured with keep_graph=True, its nodes as numbers that `kernel_name` takes."""
    captured, count = c_void_p(graph.raw_cuda_graph()), c_size_t()
    _driver("cuGraphGetEdges_v2", captured, None, None, None, byref(count))
    sources, targets = (c_void_p * count.value)(), (c_void_p * count.value)()
    data = (_EdgeData * count.value)()
    _driver("cuGraphGetEdges_v2", captured, sources, targets, data, byref(count))
    return [
        Edge(source, target, not any((edge.from_port, edge.to_port, edge.type)))
        for source, target, edge in zip(sources, targets, data, strict=True)
    ]


def kernel_name(node: int) -> str:
    kind, params, name = c_int(), _KernelParams(), c_char_p()
    _driver("cuGraphNodeGetType", c_void_p(node), byref(kind))
    if kind.value != 0:
        return "no kernel"
    _driver("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(params))
    if params.kernel:
        _driver("cuKernelGetName", byref(name), c_void_p(params.kernel))
    else:
        _driver("cuFuncGetName", byref(name), c_void_p(params.function))
    return (name.value or b"").decode()


class TestOnHopper:
    pytestmark = requires_hopper

    @pytest.fixture(scope="class")
    def step(self, load_module: Callable[[Path], Any]) -> Any:
        """64 decodes of 8k, which take long, and a prompt of one token, whose two launches end at once."""
        paged = load_module(Path(__file__).with_name("test_attention.py"))
        return paged.make_batch(
            torch.Generator().manual_seed(3), "cuda", torch.bfloat16, [8192] * 64 + [1], [1] * 65,
            heads=8, kv_heads=2, size=128,
        )  # fmt: skip

    def capture(self, step: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """fill → attend_beside → copy, and where the copy is."""
        decodes, prompts = step.decodes(64), step.prompts(64)
        workspace = DecodeWorkspace.create(64, 8, 128, "cuda")
        out, copied = step.poisoned_out, step.poisoned_out

        def run() -> None:
            work = PrefillWork(prompts)
            out.fill_(float("nan"))
            attend_beside(
                step.query, step.cache, decodes, prompts, step.scoring, workspace=workspace, work=work, out=out
            )
            torch.mul(out, 1, out=copied)  # a kernel: a copy would be a node of another kind

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            run()
        return graph, copied

    def test_three_full_edges(self, step: Any) -> None:
        graph, _ = self.capture(step)
        edges = edges_of(graph)
        (last,) = {edge.target for edge in edges} - {edge.source for edge in edges}
        into_last = [edge for edge in edges if edge.target == last]
        names = sorted(kernel_name(edge.source) for edge in into_last)
        assert len(names) == 3 and all(edge.full for edge in into_last), (names, into_last)
        assert names[0] in ("_decode_kernel", "_merge_kernel") and names[1:] == ["prefill_hopper_kernel"] * 2
        # The launches themselves overlap: else there would be nothing to wait for.
        assert any(not edge.full for edge in edges if kernel_name(edge.target) == "prefill_hopper_kernel")

    def test_what_follows_sees_all(self, step: Any) -> None:
        query, cache, scoring = step.query, step.cache, step.scoring
        expected = step.poisoned_out
        decode_attention(query[:64], cache, step.decodes(64), scoring, out=expected[:64])
        prefill_attention(query, cache, step.prompts(64), scoring, out=expected)
        assert expected.isfinite().all()
        graph, copied = self.capture(step)
        for replay in range(50):
            copied.fill_(float("nan"))
            graph.replay()
            assert torch.equal(copied, expected), f"replay {replay} differs"
