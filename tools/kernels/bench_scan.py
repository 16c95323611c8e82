"""Checks the kernels of Mamba-2 and of LFM2's convolutions on a GPU and times them.

`python tools/kernels/bench_scan.py [part …]`. Parts: check (every kernel against its twin, in bf16 and fp32), decode,
prompts; all of them if none is named. Times and bounds as in bench_state.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from bench_state import BANDWIDTH, error, make_step, microseconds
from torch import Tensor

from vserve.kernels.state import gated_conv, group_norm, scan
from vserve.kernels.state.scan_decode import ScanWeights
from vserve.kernels.state.step import StateStep

# Heads, rows and columns of a head's state, groups.
MODELS = {
    "Granite 4 H Small": (128, 128, 64, 1), "Nemotron 3 Nano": (64, 128, 64, 8), "Falcon-H1 7B": (24, 256, 128, 1)
}  # fmt: skip
WIDTH, RING = 4, 8
LFM2 = 2048  # channels of LFM2's convolutions


@dataclass(frozen=True)
class Layer:
    weights: ScanWeights
    ring: Tensor
    state: Tensor
    groups: int

    @classmethod
    def make(cls, model: str, num_slots: int, dtype: torch.dtype, ring: int = RING) -> Layer:
        heads, rows, columns, groups = MODELS[model]
        channels = heads * columns + 2 * groups * rows
        decays = (0.693 / torch.logspace(0, 4, heads, device="cuda")).log()
        weights = ScanWeights(
            torch.randn(channels, WIDTH, device="cuda", dtype=dtype) / 2,
            torch.randn(channels, device="cuda", dtype=dtype), decays, torch.rand(heads, device="cuda"),
            torch.rand(heads, device="cuda") - 3,
        )  # fmt: skip
        state = torch.randn(num_slots, heads, rows, columns, device="cuda") / 10
        inputs = torch.randn(num_slots, ring, channels + heads, device="cuda", dtype=dtype)
        return cls(weights, inputs, state, groups)

    def copy(self) -> Layer:
        return replace(self, ring=self.ring.clone(), state=self.state.clone())

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """raw and time steps as parts of one product's result."""
        channels, heads = len(self.weights.conv), len(self.weights.D)
        both = torch.randn(tokens, channels + heads, device="cuda", dtype=self.ring.dtype)
        return both[:, :channels], both[:, channels:]

    def run(self, function: Callable[..., Tensor], raw: Tensor, dt: Tensor, step: StateStep) -> Tensor:
        return function(raw, dt, self.weights, self.ring, self.state, step, self.groups)


def prepare(tensors: list[Tensor], step: StateStep) -> Tensor:
    """NaN where nothing may be read → which slots are written, bool [num_slots]."""
    used = torch.zeros(len(tensors[0]), dtype=torch.bool, device="cuda")
    used[step.slots.long()] = True
    used[0] = False
    for tensor in tensors:
        tensor[~used] = float("nan")
        tensor[step.slots[step.state_len == 0].long()] = float("nan")
    written = used.clone()
    written[step.snap_slot[step.snap_at > 0].long()] = True
    return written


def check_step(name: str, model: str, slots: int, dtype: torch.dtype, step: StateStep, tolerance: float) -> None:
    layer = Layer.make(model, slots, dtype, 16 if step.decode_query_len > 1 else RING)
    raw, dt = layer.inputs(int(step.query_start[-1]))
    written = prepare([layer.state, layer.ring], step)
    twin = layer.copy()
    found, expected = layer.run(scan.scan_triton, raw, dt, step), twin.run(scan.scan_torch, raw, dt, step)
    z, weight = raw[:, : found[0].numel()], layer.weights.conv[: found[0].numel(), 0].contiguous()
    arguments = expected.flatten(1), z, weight, layer.groups, 1e-5
    normed = error(group_norm.gated_group_norm_triton(*arguments), group_norm.gated_group_norm_torch(*arguments))
    report(
        f"{model}, {name}", dtype, tolerance,
        max(error(found, expected), error(layer.state[written], twin.state[written]), normed),
        torch.equal(layer.ring.nan_to_num(7), twin.ring.nan_to_num(7)),
        bool(layer.state[~written].isnan().all() and layer.ring[~written].isnan().all()),
    )  # fmt: skip


def check_conv(name: str, slots: int, dtype: torch.dtype, step: StateStep, tolerance: float) -> None:
    ring = torch.randn(slots, 16 if step.decode_query_len > 1 else 4, LFM2, device="cuda", dtype=dtype)
    weight = torch.randn(LFM2, 3, device="cuda", dtype=dtype)
    products = torch.randn(int(step.query_start[-1]), 3 * LFM2, device="cuda", dtype=dtype)
    written = prepare([ring], step)
    twin = ring.clone()
    found = gated_conv.gated_conv_triton(products, weight, None, ring, step)
    expected = gated_conv.gated_conv_torch(products, weight, None, twin, step)
    rings, free = torch.equal(ring.nan_to_num(7), twin.nan_to_num(7)), bool(ring[~written].isnan().all())
    report(f"LFM2, {name}", dtype, tolerance, error(found, expected), rings, free)


def report(name: str, dtype: torch.dtype, tolerance: float, worst: float, rings: bool, free: bool) -> None:
    good = "ok  " if worst < tolerance and rings and free else "BAD "
    print(f"{good} {name:44s} {str(dtype)[6:]} error {worst:.1e} rings {rings}, free slots {free}", flush=True)


def check() -> None:
    lengths, starts = [1, 1, 0, 1000, 64, 3, 130, 1, 700, 0], [9, 700, 0, 0, 128, 5, 100, 64, 0, 0]
    mixed = make_step(lengths, starts, [1, 1, 0, 0, 0, 0, 1, 1, 0, 0], 3, 1, {3: (640, 2), 6: (192, 4)})
    drafts = make_step([4] * 9, [64] * 9, [1 + index % 4 for index in range(9)], 9, 4, {6: (64, 2)})
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float32, 1e-5)):
        for rows in (1, 2, 33, 256):
            starts = [1, *(int(start) for start in torch.randint(1, 9000, (rows - 1,)))]
            decode = make_step([1] * rows + [0] * 3, starts + [0] * 3, [1] * rows + [0] * 3, rows + 3)
            check_step(f"decode, {rows} rows", "Nemotron 3 Nano", 2 * rows + 8, dtype, decode, tolerance)
            check_conv(f"decode, {rows} rows", 2 * rows + 8, dtype, decode, tolerance)
        for model in MODELS:
            check_step("decodes and prompts", model, 24, dtype, mixed, tolerance)
            check_step("decode with 3 drafts", model, 20, dtype, drafts, tolerance)
            split(model, dtype)
        check_conv("decodes and prompts", 24, dtype, mixed, tolerance)
        check_conv("decode with 3 drafts", 20, dtype, drafts, tolerance)


def split(model: str, dtype: torch.dtype) -> None:
    layer = Layer.make(model, 8, dtype)
    raw, dt = layer.inputs(500)
    whole = layer.run(scan.scan_triton, raw, dt, make_step([500], [0], [0], 0))
    state, parts = layer.state[1].clone(), []
    for first, end in ((0, 64), (64, 448), (448, 500)):
        step = make_step([end - first], [first], [0], 0, fold_all=end < 500)
        parts.append(layer.run(scan.scan_triton, raw[first:end], dt[first:end], step))
    same = torch.equal(torch.cat(parts), whole) and torch.equal(state, layer.state[1])
    print(f"{'ok  ' if same else 'BAD '} {model}, a prompt in three steps is bitwise the whole, {str(dtype)[6:]}")


def decode() -> None:
    for model in MODELS:
        for rows in (1, 32, 128, 256):
            layers = [Layer.make(model, 2 * rows + 2, torch.bfloat16) for _ in range(max(4, min(30, 512 // rows)))]
            raw, dt = layers[0].inputs(rows)
            step = make_step([1] * rows, [1000] * rows, [1] * rows, rows)
            time = microseconds([lambda a=(one, raw, dt, step): a[0].run(scan.scan_triton, *a[1:]) for one in layers])
            bound = 2 * rows * layers[0].state[0].nbytes / BANDWIDTH * 1e6
            print(f"decode {model}, {rows:3d} rows: {time:7.1f} µs, bytes {bound:6.1f} µs, {bound / time:.0%}")
    products, weight = (torch.randn(256, 3 * LFM2), torch.randn(LFM2, 3))
    for rows in (1, 64, 256):
        ring = torch.randn(2 * rows + 2, 4, LFM2, device="cuda", dtype=torch.bfloat16)
        step = make_step([1] * rows, [1000] * rows, [1] * rows, rows)
        operands = products[:rows].cuda().bfloat16(), weight.cuda().bfloat16(), None, ring, step
        time = microseconds([lambda a=operands: gated_conv.gated_conv_triton(*a)] * 20)
        print(f"decode LFM2's convolution, {rows:3d} rows: {time:.1f} µs", flush=True)


def prompts() -> None:
    for model in MODELS:
        for lengths in ([1024], [8192], [32768], [1024] * 8, [64] * 128):
            layer = Layer.make(model, 2 * len(lengths) + 2, torch.bfloat16)
            raw, dt = layer.inputs(sum(lengths))
            step = make_step(lengths, [0] * len(lengths), [0] * len(lengths), 0)
            time = microseconds([lambda a=(layer, raw, dt, step): a[0].run(scan.scan_triton, *a[1:])] * 3)
            print(f"prompts {model} {len(lengths)} x {lengths[0]}: {time:8.0f} µs", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench_scan measures a GPU, and there is none here")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name())
    for part in (check, decode, prompts):
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            part()


if __name__ == "__main__":
    main()
