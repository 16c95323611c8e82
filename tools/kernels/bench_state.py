"""Checks the kernels of recurrent states on a GPU and times them: `python tools/kernels/bench_state.py [part …]`.

Parts: check (every kernel against its twin, in bf16 and fp32), decode, tiles, prompts, copies; all of them if none is
named. Times are of calls in a CUDA graph, one for each of many layers, whose states together exceed the L2 cache. The
bound beside them is the time of the bytes that must move, at the bandwidth of an H100 (3.35 TB/s).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from vserve.kernels.state import delta_chunk, delta_decode, delta_net, delta_pass, gated_norm, short_conv, slots
from vserve.kernels.state.step import StateStep

BANDWIDTH = 3.35e12
MODELS = {"35B-A3B": 32, "27B": 48}  # value heads; 16 key heads, heads of 128 x 128
KEY_HEADS, DIM, WIDTH, RING = 16, 128, 4, 8


@dataclass
class Layer:
    weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    ring: Tensor
    state: Tensor

    @classmethod
    def make(cls, heads: int, num_slots: int, dtype: torch.dtype, ring: int = RING) -> Layer:
        channels = 2 * KEY_HEADS * DIM + heads * DIM
        state = torch.randn(num_slots, heads, DIM, DIM, device="cuda") / 10
        return cls(
            torch.randn(channels, WIDTH, device="cuda", dtype=dtype) / 2,
            (0.693 / torch.logspace(0, 4, heads, device="cuda")).log(), torch.rand(heads, device="cuda") + 0.5,
            torch.randn(num_slots, ring, channels + 2 * heads, device="cuda", dtype=dtype), state,
        )  # fmt: skip

    def copy(self) -> Layer:
        return Layer(self.weight, self.A_log, self.dt_bias, self.ring.clone(), self.state.clone())

    def run(self, function: Callable[..., Tensor], raw: Tensor, gates: Tensor, step: StateStep) -> Tensor:
        return function(raw, gates, self.weight, self.A_log, self.dt_bias, self.ring, self.state, step, KEY_HEADS)


def i32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def make_step(
    lengths: list[int], starts: list[int], pending: list[int], num_decodes: int, query_len: int = 1,
    snaps: dict[int, tuple[int, int]] | None = None, fold_all: bool = False,
) -> StateStep:  # fmt: skip
    """Row b has slot 2 b + 1: those between are free."""
    folds = [
        start if index < num_decodes else start + length - (not fold_all)
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    at, to = zip(*((snaps or {}).get(index, (0, 0)) for index in range(len(lengths))), strict=True)
    state_len = [start - some for start, some in zip(starts, pending, strict=True)]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = [2 * index + 1 if length else 0 for index, length in enumerate(lengths)]
    return StateStep(
        i32(rows), i32(starts), i32(state_len), i32(folds), i32(at), i32(to), i32(ends), num_decodes, query_len
    )


def inputs(heads: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """raw, gates and z as parts of one product's result."""
    channels = 2 * KEY_HEADS * DIM + heads * DIM
    both = torch.randn(tokens, channels + heads * DIM + 2 * heads, device="cuda", dtype=dtype)
    return both[:, :channels], both[:, -2 * heads :], both[:, channels : channels + heads * DIM]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_step(name: str, layer: Layer, dtype: torch.dtype, step: StateStep, tolerance: float) -> None:
    heads = layer.state.shape[1]
    raw, gates, z = inputs(heads, int(step.query_start[-1]), dtype)
    used = torch.zeros(len(layer.state), dtype=torch.bool, device="cuda")
    used[step.slots.long()] = True
    used[0] = False
    layer.state[~used], layer.ring[~used] = float("nan"), float("nan")
    layer.state[step.slots[step.state_len == 0].long()] = float("nan")
    layer.ring[step.slots[step.start == 0].long()] = float("nan")
    twin = layer.copy()
    found = layer.run(delta_net.delta_net_triton, raw, gates, step)
    expected = twin.run(delta_net.delta_net_torch, raw, gates, step)
    written = used.clone()
    written[step.snap_slot[step.snap_at > 0].long()] = True
    worst = max(error(found, expected), error(layer.state[written], twin.state[written]))
    rings = torch.equal(layer.ring.nan_to_num(7), twin.ring.nan_to_num(7))
    free = bool(layer.state[~written].isnan().all() and layer.ring[~written].isnan().all())
    normed = error(
        gated_norm.gated_rms_norm_triton(expected, z, layer.A_log.new_ones(DIM), 1e-6),
        gated_norm.gated_rms_norm_torch(expected, z, layer.A_log.new_ones(DIM), 1e-6),
    )
    good = worst < tolerance and rings and free and normed < tolerance
    print(
        f"{'ok  ' if good else 'BAD '} {name:44s} {str(dtype)[6:]} error {worst:.1e} norm {normed:.1e} rings {rings}, "
        f"free slots {free}",
        flush=True,
    )


def check() -> None:
    for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float32, 1e-5)):
        for rows in (1, 2, 33, 256):
            starts = [int(start) for start in torch.randint(1, 9000, (rows,))]
            starts[0] = 1
            pending = [1] * rows
            snaps = {rows - 1: (starts[-1] // 64 * 64, 2)} if starts[-1] % 64 == 0 else {}
            step = make_step([1] * rows + [0] * 3, starts + [0] * 3, pending + [0] * 3, rows + 3, 1, snaps)
            check_step(f"decode, {rows} rows", Layer.make(32, 2 * rows + 8, dtype), dtype, step, tolerance)
        lengths, starts = [1, 1, 0, 1000, 64, 3, 130, 1, 700, 0], [9, 700, 0, 0, 128, 5, 100, 64, 0, 0]
        step = make_step(lengths, starts, [1, 1, 0, 0, 0, 0, 1, 1, 0, 0], 3, 1, {3: (640, 2), 6: (192, 4)})
        check_step("decodes and prompts", Layer.make(32, 24, dtype), dtype, step, tolerance)
        split(dtype)
        for drafts in (1, 3, 7):
            check_drafts(drafts, dtype, tolerance)


def check_drafts(drafts: int, dtype: torch.dtype, tolerance: float) -> None:
    """Rows with any number of pending tokens, which drafts have left: with drafts, some beside such and some prompts,
    and all without."""
    most, ring = 1 + drafts, 1 << (WIDTH - 1 + 2 * (1 + drafts) - 1).bit_length()
    pending = [1 + index % most for index in range(40)]
    starts = [64 * (1 + index // 8) + index % 8 for index in range(40)]
    passing = [row for row in range(1, 40) if row % 8 < pending[row] and row != 35]
    snaps = {row: (starts[row] // 64 * 64, 2 * row + 2) for row in passing}
    parts = {
        f"decode with {drafts} drafts": ([most] * 40, 40, most),
        f"beside {drafts} drafts": ([most] * 20 + [1] * 15 + [0, 3, 64, 130, 1], 20, most),
        f"behind {drafts} drafts": ([1] * 40, 40, 1),
    }
    for name, (lengths, num_decodes, query_len) in parts.items():
        step = make_step(lengths, starts, pending, num_decodes, query_len, snaps)
        check_step(name, Layer.make(32, 84, dtype, ring=ring), dtype, step, tolerance)


def split(dtype: torch.dtype) -> None:
    layer = Layer.make(32, 8, dtype)
    raw, gates, _ = inputs(32, 500, dtype)
    whole = layer.run(delta_net.delta_net_triton, raw, gates, make_step([500], [0], [0], 0))
    state = layer.state[1].clone()
    parts = []
    for first, end in ((0, 64), (64, 448), (448, 500)):
        step = make_step([end - first], [first], [0], 0, fold_all=end < 500)
        parts.append(layer.run(delta_net.delta_net_triton, raw[first:end], gates[first:end], step))
    same = torch.equal(torch.cat(parts), whole) and torch.equal(state, layer.state[1])
    print(f"{'ok  ' if same else 'BAD '} a prompt in three steps is bitwise the whole, {str(dtype)[6:]}", flush=True)


def microseconds(functions: list[Callable[[], object]], replays: int = 20) -> float:
    """Of one of the functions, called in turn in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            for function in functions[:2]:
                function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for function in functions:
                function()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(replays):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(functions))
    return sorted(times)[len(times) // 2]


def decode_case(heads: int, rows: int, state_dtype: torch.dtype) -> tuple[list[Callable[[], object]], float]:
    num_layers = max(4, min(30, 512 // rows))
    layers = [Layer.make(heads, 2 * rows + 2, torch.bfloat16) for _ in range(num_layers)]
    for layer in layers:
        layer.state = layer.state.to(state_dtype)
    raw, gates, _ = inputs(heads, rows, torch.bfloat16)
    step = make_step([1] * rows, [1000] * rows, [1] * rows, rows)
    bound = 2 * rows * heads * DIM * DIM * layers[0].state.element_size() / BANDWIDTH * 1e6
    return [lambda one=one: one.run(delta_net.delta_net_triton, raw, gates, step) for one in layers], bound


def decode() -> None:
    for model, heads in MODELS.items():
        for state_dtype in (torch.float32, torch.float16):
            for rows in (1, 32, 64, 128, 256):
                functions, bound = decode_case(heads, rows, state_dtype)
                time = microseconds(functions)
                print(
                    f"decode {model} {str(state_dtype)[6:]} rows {rows:3d}: {time:7.1f} µs, bytes {bound:6.1f} µs, "
                    f"{bound / time:.0%}",
                    flush=True,
                )
        for rows in (1, 64, 256):
            o = torch.randn(rows, heads, DIM, device="cuda", dtype=torch.bfloat16)
            z, weight = inputs(heads, rows, torch.bfloat16)[2], torch.randn(DIM, device="cuda", dtype=torch.bfloat16)
            time = microseconds([lambda o=o, z=z, w=weight: gated_norm.gated_rms_norm(o, z, w, 1e-6)] * 20)
            print(f"gated norm {model} rows {rows:3d}: {time:.1f} µs", flush=True)


def tiles() -> None:
    chosen = delta_decode.COLUMNS, delta_decode.WARPS
    for rows in (1, 32, 256):
        for columns, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8)):
            delta_decode.COLUMNS, delta_decode.WARPS = {4: columns}, warps
            functions, _ = decode_case(32, rows, torch.float32)
            print(f"tile {columns:3d} x {warps} warps, rows {rows:3d}: {microseconds(functions):7.1f} µs", flush=True)
    delta_decode.COLUMNS, delta_decode.WARPS = chosen


def prompts() -> None:
    for model, heads in MODELS.items():
        for lengths in ([1024], [8192], [32768], [1024] * 8, [64] * 128):
            tokens = sum(lengths)
            layer = Layer.make(heads, 2 * len(lengths) + 2, torch.bfloat16)
            raw, gates, _ = inputs(heads, tokens, torch.bfloat16)
            step = make_step(lengths, [0] * len(lengths), [0] * len(lengths), 0)
            time = microseconds([lambda a=(layer, raw, gates, step): a[0].run(delta_net.delta_net_triton, *a[1:])] * 3)
            keys = torch.randn(tokens, 2 * KEY_HEADS * DIM, device="cuda", dtype=torch.bfloat16)
            out, weights = (torch.randn(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            shares = torch.empty(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
            decays = torch.empty(tokens, heads, device="cuda")
            flat = out.view(tokens, -1)
            parts = {
                "convolution": lambda a=(raw, layer.weight, layer.ring, step, DIM, keys, flat): (
                    short_conv.convolve_heads(*a)
                ),
                "chunks": lambda a=(
                    keys, out, gates, layer.A_log, layer.dt_bias, step, weights, shares, decays
                ): delta_chunk.solve_chunks(*a),
                "ring": lambda a=(raw, gates, layer.ring, step, WIDTH): short_conv.write_ring_triton(*a),
            }  # fmt: skip
            spent = ", ".join(f"{name} {microseconds([part] * 3):.0f}" for name, part in parts.items())
            print(f"prompts {model} {len(lengths)} x {lengths[0]}: {time:8.0f} µs ({spent}, rest the pass)", flush=True)
    chosen = delta_pass.COLUMNS, delta_pass.WARPS, delta_pass.STAGES
    layer = Layer.make(32, 4, torch.bfloat16)
    raw, gates, _ = inputs(32, 8192, torch.bfloat16)
    for columns, warps, stages in ((16, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2), (128, 8, 1)):
        delta_pass.COLUMNS, delta_pass.WARPS, delta_pass.STAGES = columns, warps, {2: stages}
        step = make_step([8192], [0], [0], 0)
        try:
            time = microseconds([lambda s=step: layer.run(delta_net.delta_net_triton, raw, gates, s)] * 3)
            print(f"pass {columns:3d} columns, {warps} warps, {stages} stages, 8192 tokens: {time:.0f} µs", flush=True)
        except (RuntimeError, triton.OutOfResources) as failure:
            print(f"pass {columns} columns, {warps} warps, {stages} stages: {str(failure)[:80]}", flush=True)
    delta_pass.COLUMNS, delta_pass.WARPS, delta_pass.STAGES = chosen


def copies() -> None:
    layers = [Layer.make(32, 20, torch.bfloat16) for _ in range(30)]
    tensors = [tensor for layer in layers for tensor in (layer.state, layer.ring)]
    for count in (1, 8):
        source, target = i32(range(1, 1 + count)), i32(range(10, 10 + count))
        slots.copy_slots(tensors, source, target)
        good = all(torch.equal(tensor[10 : 10 + count], tensor[1 : 1 + count]) for tensor in tensors)
        time = microseconds([lambda s=source, t=target: slots.copy_slots(tensors, s, t)] * 3)
        moved = 2 * count * sum(tensor[0].nbytes for tensor in tensors)
        print(
            f"{'ok  ' if good else 'BAD '} copies of {count} slots of 35B-A3B: {time:.0f} µs, "
            f"bytes {moved / BANDWIDTH * 1e6:.0f} µs",
            flush=True,
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench_state measures a GPU, and there is none here")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name())
    for part in (check, decode, tiles, prompts, copies):
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            part()


if __name__ == "__main__":
    main()
