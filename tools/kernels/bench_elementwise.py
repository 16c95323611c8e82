"""Times the kernels around attention on a GPU: `python tools/kernels/bench_elementwise.py [name part …]`.

A line a case: µs a call, and GB/s of the bytes that the call must read and write at least. Calls are recorded several
times into one CUDA graph, as a decode step replays them, so launch overhead on the host is not in the figures. What
fits into the L2 cache stays there between calls, as it mostly does in a model: such a case can exceed the memory's
bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

from vserve.kernels.attention import rope_kv
from vserve.kernels.attention.history import History
from vserve.kernels.norm import activation, norm
from vserve.kernels.rows import batch_inputs
from vserve.kernels.sampling import penalties, sampling

Case = tuple[str, Callable[[], object], int]


def microseconds(function: Callable[[], object], calls: int = 20, replays: int = 10) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(replays):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def i32(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def norm_cases() -> Iterator[Case]:
    weight = bf16(4096)
    for num_tokens in (1, 256, 8192):
        x, residual = bf16(num_tokens, 4096), bf16(num_tokens, 4096)
        yield (
            f"add_rms_norm T={num_tokens} D=4096",
            lambda x=x, residual=residual: norm.add_rms_norm(x, residual, weight, 1e-6),
            4 * x.nbytes,
        )
        yield f"rms_norm T={num_tokens} D=4096", lambda x=x: norm.rms_norm(x, weight, 1e-6), 2 * x.nbytes


def rope_cases() -> Iterator[Case]:
    angles = torch.randn(4096, 128, device="cuda")
    weight = bf16(128)
    for num_tokens in (1, 256, 8192):
        qkv = bf16(num_tokens, 48 * 128).view(num_tokens, 48, 128)
        positions = torch.arange(num_tokens, device="cuda").int() % 4096
        cache = bf16(2, num_tokens // 16 + 1, 16, 8, 128)
        slots = torch.arange(num_tokens, device="cuda").int()
        arguments = (qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], positions, angles, cache[0], cache[1], slots)
        name = f"rope_write_kv T={num_tokens} 32+8x128"
        yield name, lambda a=arguments: rope_kv.rope_write_kv(*a), 2 * qkv.nbytes
        yield (
            f"rope_write_kv, norm T={num_tokens} 32+8x128",
            lambda a=arguments: rope_kv.rope_write_kv(*a, weight, weight, 1e-6),
            2 * qkv.nbytes,
        )


def activation_cases() -> Iterator[Case]:
    for num_tokens in (1, 256, 8192):
        x = bf16(num_tokens, 2 * 14336)
        yield f"silu_mul T={num_tokens} I=14336", lambda x=x: activation.silu_mul(x), x.nbytes * 3 // 2


def batch_cases() -> Iterator[Case]:
    max_len, page = 32768, 16
    block_table = i32(torch.randint(0, 100000, (1025, max_len // page)))
    pages, recent = (i32(torch.randint(0, 128000, shape)) for shape in ((100000, page), (1025, 16)))
    computed = i32(torch.randint(0, 20000, (1025,)))
    tokens = History(pages, block_table, recent, computed.clone(), max_len)  # what decodes is not given
    for name, lengths in (("decode", [1] * 256), ("decode", [1] * 1024), ("prefill", [1] * 63 + [8129])):
        num_rows, num_tokens = len(lengths), sum(lengths)
        rows, start = i32(torch.randperm(1024)[:num_rows]), i32([0, *torch.tensor(lengths).cumsum(0).tolist()])
        ids, positions, slots = (i32(torch.zeros(num_tokens)) for _ in range(3))
        seq_lens = i32(torch.zeros(num_rows))

        def build(
            rows: torch.Tensor = rows, start: torch.Tensor = start, ids: torch.Tensor = ids,
            positions: torch.Tensor = positions, slots: torch.Tensor = slots, seq_lens: torch.Tensor = seq_lens,
        ) -> None:  # fmt: skip
            batch_inputs.build_inputs(tokens, computed, rows, start, ids, positions, seq_lens)
            batch_inputs.build_slots(block_table, rows, start, positions, slots, page)

        yield f"build_inputs+build_slots {name} B={num_rows} T={num_tokens}", build, num_tokens * 24 + num_rows * 20


def sampling_cases() -> Iterator[Case]:
    vocabulary = 128256
    settings = {
        "greedy": (0.0, 0, 1.0, 0.0),
        "temperature": (1.0, 0, 1.0, 0.0),
        "top-k + top-p": (0.7, 50, 0.95, 0.0),
        "top-p": (1.0, 0, 0.95, 0.0),
        "top-p, cooler": (0.8, 0, 0.95, 0.0),
        "top-p, flat": (6.0, 0, 0.95, 0.0),
        "min-p": (1.0, 0, 1.0, 0.05),
    }
    for num_rows in (1, 64, 256):
        # About as peaked as a language model's: the best of 128,256 is some 13 above the mean.
        logits = torch.randn(num_rows, vocabulary, device="cuda") * 3
        one = torch.ones(num_rows, device="cuda")
        seed = torch.arange(num_rows, device="cuda")
        for name, (temperature, top_k, top_p, min_p) in settings.items():
            arguments = (logits, one * temperature, (one * top_k).int(), one * top_p, one * min_p, seed, seed)
            yield (
                f"sample {name} S={num_rows} V={vocabulary}",
                lambda a=arguments, g=name == "greedy": sampling.sample(*a, all_greedy=g),
                logits.nbytes,
            )
        blocks = i32(torch.randperm(num_rows * 512)).view(num_rows, 512)
        pages = i32(torch.randint(0, vocabulary, (num_rows * 512, 16)))
        history = History(pages, blocks, blocks[:, :16].contiguous(), blocks[:, 0], 8192)
        rows, lengths = i32(torch.arange(num_rows)), i32(one * 4096)
        counts = torch.zeros(64, vocabulary, dtype=torch.int32, device="cuda")
        yield (
            f"apply_penalties S={num_rows} L=4096",
            lambda a=(logits, history, rows, lengths // 2, lengths, one, one * 0.1, one * 0.1, rows, counts): (
                penalties.apply_penalties(*a)
            ),
            2 * logits.nbytes + num_rows * 4096 * 4,
        )
        entries = i32(torch.stack([torch.randint(0, vocabulary, (num_rows * 300,)), torch.zeros(num_rows * 300)], 1))
        offsets = i32(torch.arange(num_rows + 1) * 300)
        yield (
            f"apply_logit_bias S={num_rows} of 300",
            lambda a=(logits, rows, offsets, entries): penalties.apply_logit_bias(*a),
            num_rows * 300 * 16,
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench_elementwise measures a GPU, and there is none here")
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for cases in (norm_cases, rope_cases, activation_cases, batch_cases, sampling_cases):
        for name, function, size in cases():
            if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:]):
                time = microseconds(function)
                print(f"{name:52s} {time:10.1f} µs {size / time / 1e3:10.0f} GB/s", flush=True)


if __name__ == "__main__":
    main()
