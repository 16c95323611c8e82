"""The kernels of states, compiled for a Hopper GPU on a machine that needs none: nothing is spilt but on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

COMPILE = """
from vserve.kernels.launch import pdl
from vserve.kernels.state import delta_net
from vserve.kernels.state.step import StateStep

pdl.pdl_available = lambda device: True
heads, drafts, rows = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
state_dtype = getattr(torch, sys.argv[4])
channels = 32 * 128 + heads * 128
both = torch.zeros(40, channels + 8 * heads, dtype=torch.bfloat16)
columns = [torch.zeros(3, dtype=torch.int32) for _ in range(6)]
step = StateStep(*columns, torch.zeros(4, dtype=torch.int32), rows, 1 + drafts)  # the rows behind them: prompts
ring = torch.zeros(4, 8 if drafts == 0 else 16, channels + 2 * heads, dtype=torch.bfloat16)
state = torch.zeros(4, heads, 128, 128, dtype=state_dtype)
delta_net.delta_net_triton(
    both[:, :channels], both[:, channels : channels + 2 * heads], torch.zeros(channels, 4, dtype=torch.bfloat16),
    torch.zeros(heads), torch.zeros(heads), ring, state, step, 16,
)
print(json.dumps([
    dict(name=name, shared=kernel.metadata.shared, wgmma="wgmma.mma" in kernel.asm["ptx"], **resources(kernel))
    for name, kernel in kernels.values()
]))
"""


@pytest.mark.parametrize(
    ("heads", "drafts", "rows", "state_dtype"), [(32, 0, 1, "float32"), (48, 0, 3, "float16"), (32, 3, 3, "float32")]
)
def test_compiles_without_spills(
    heads: int, drafts: int, rows: int, state_dtype: str, run_for_hopper: Callable[..., Any]
) -> None:
    found = run_for_hopper(COMPILE, str(heads), str(drafts), str(rows), state_dtype)
    names = {kernel["name"] for kernel in found}
    prompts = {"_conv_kernel", "_chunk_kernel", "_pass_kernel", "_write_ring_kernel"}
    assert names == {"_delta_decode_kernel"} | (prompts if rows < 3 else set())
    for kernel in found:
        # Decodes of 16-bit states keep 16 numbers aside in tiles of 32 columns, which are faster by half on a card than
        # tiles of 16, which keep none.
        wide = kernel["name"] == "_delta_decode_kernel" and state_dtype == "float16"
        assert kernel["local"] <= 64 * wide and kernel["stack"] <= 64 * wide, kernel
        assert kernel["wgmma"] == (kernel["name"] in ("_chunk_kernel", "_pass_kernel")), kernel
        assert kernel["shared"] <= 227 << 10, kernel


SCAN = """
from vserve.kernels.launch import pdl
from vserve.kernels.state import gated_conv, scan, scan_decode
from vserve.kernels.state.step import StateStep

pdl.pdl_available = lambda device: True
heads, size, groups, drafts, rows = (int(word) for word in sys.argv[1:6])
dtype = getattr(torch, sys.argv[6])
channels = heads * 64 + 2 * groups * size
both = torch.zeros(40, channels + heads, dtype=torch.bfloat16)
columns = [torch.zeros(3, dtype=torch.int32) for _ in range(6)]
step = StateStep(*columns, torch.zeros(4, dtype=torch.int32), rows, 1 + drafts)  # the rows behind them: prompts
ring = torch.zeros(4, 8 if drafts == 0 else 16, channels + heads, dtype=torch.bfloat16)
vectors = [torch.zeros(heads) for _ in range(3)]
weights = scan_decode.ScanWeights(
    torch.zeros(channels, 4, dtype=torch.bfloat16), torch.zeros(channels, dtype=torch.bfloat16), *vectors
)
state = torch.zeros(4, heads, size, 64, dtype=dtype)
scan.scan_triton(both[:, :channels], both[:, channels:], weights, ring, state, step, groups)
if rows < 3:
    products, ring = torch.zeros(40, 6144, dtype=torch.bfloat16), torch.zeros(4, 4, 2048, dtype=torch.bfloat16)
    gated_conv.gated_conv_triton(products, torch.zeros(2048, 3, dtype=torch.bfloat16), None, ring, step)
print(json.dumps([
    dict(name=name, shared=kernel.metadata.shared, wgmma="wgmma.mma" in kernel.asm["ptx"], **resources(kernel))
    for name, kernel in kernels.values()
]))
"""


@pytest.mark.parametrize(
    ("heads", "size", "groups", "drafts", "rows", "state_dtype"),
    [
        (128, 128, 1, 0, 1, "float32"),
        pytest.param(64, 128, 8, 3, 3, "float32", marks=pytest.mark.slow),
        pytest.param(24, 256, 1, 0, 1, "float32", marks=pytest.mark.slow),
    ],
)
def test_scans_compile_without_spills(
    heads: int, size: int, groups: int, drafts: int, rows: int, state_dtype: str, run_for_hopper: Callable[..., Any]
) -> None:
    found = run_for_hopper(SCAN, str(heads), str(size), str(groups), str(drafts), str(rows), state_dtype)
    names = {kernel["name"] for kernel in found}
    prompts = {"_conv_kernel", "_pass_kernel", "_write_ring_kernel", "_gated_conv_kernel"}
    assert names == {"_scan_decode_kernel"} | (prompts if rows < 3 else set())
    for kernel in found:
        # Of 256 rows a chunk's operands alone fill the registers.
        spills = 256 * (size > 128 and kernel["name"] == "_pass_kernel")
        assert kernel["local"] == 0 and kernel["stack"] <= spills, kernel
        assert kernel["wgmma"] == (kernel["name"] == "_pass_kernel"), kernel
        assert kernel["shared"] <= 227 << 10, kernel
