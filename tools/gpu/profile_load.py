"""Which kernels a second under load goes into: python tools/gpu/profile_load.py [--concurrency 64] [--input 1024] …

The offline engine in this process, the 8B shape with made-up weights, and torch's profiler for a second in the middle:
time and launches by kernel, gaps between kernels, and how long steps were. Of several ranks (-tp, -pp) it shows rank 0,
whose stage is the last: where it waits for another, a kernel of NCCL runs meanwhile. Of all it says how long they were
idle, and of those that do a step together how long each works in one, and by how much they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from model_folder import SHAPES, write_model
from torch.profiler import ProfilerActivity, profile

from vserve import LLM, SamplingParams

STEP_KERNEL = "_build_inputs_kernel"  # one a step
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of Chrome's events
LONGEST_GAPS = 20  # shown
RECEIVES = "SendRecv"  # in the name of the kernel that waits for the stage before
WAITS = ("all_reduce", "nccl")  # in the names of kernels in which ranks wait for each other
PATIENCE = 60.0  # seconds, for the traces of other ranks


def record(llm: LLM, arguments: argparse.Namespace, folder: Path) -> float:
    """Runs the load, profiles a second of it into 0.json → total tokens a second. Other ranks: see rank_profile/."""
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 128_000) for _ in range(arguments.input)]}
        for _ in range(arguments.requests)
    ]
    sampling = SamplingParams(max_tokens=arguments.output, temperature=0.0, ignore_eos=True)
    llm.generate(prompts[:4], sampling, use_tqdm=False)
    (folder / "READY").touch()
    with profile(activities=[ProfilerActivity.CUDA]):  # the first takes seconds to begin
        torch.cuda.synchronize()
    seconds: list[float] = []

    def load() -> None:
        started = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)

    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(arguments.after)
    (folder / "GO").touch()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        time.sleep(1.0)
    thread.join()
    profiled.export_chrome_trace(str(folder / "0.json"))
    return len(prompts) * (arguments.input + arguments.output) / seconds[0]


def read(trace: Path) -> list[dict[str, Any]]:
    """Its kernels and copies, in order; their times are microseconds."""
    give_up = time.monotonic() + PATIENCE
    while not trace.exists():
        if time.monotonic() > give_up:
            sys.exit(f"rank {trace.stem} wrote no profile within {PATIENCE:.0f} s")
        time.sleep(0.1)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") in ON_CARD]
    return sorted(events, key=lambda event: event["ts"])


def idle(events: list[dict[str, Any]]) -> float:
    """Share of the time in gaps, or with nothing but transfers between stages."""
    if not events:
        return 1.0
    first = until = events[0]["ts"]
    busy, last = 0.0, first
    for event in events:
        last = max(last, event["ts"] + event["dur"])
        if RECEIVES not in event["name"]:
            busy += max(0.0, event["ts"] + event["dur"] - max(until, event["ts"]))
            until = max(until, event["ts"] + event["dur"])
    return 1 - busy / (last - first)


def show_balance(ranks: list[list[dict[str, Any]]]) -> None:
    """Of ranks that do a step together: what each has to do in one, and so how much of it some wait for others."""
    own, steps = [], []
    for events in ranks:
        starts = [event["ts"] for event in events if STEP_KERNEL in event["name"]]
        if len(starts) < 3:
            return print("no balance of ranks: there were less than three steps in that second")
        busy, until = 0.0, starts[0]
        for event in events:
            end = min(event["ts"] + event["dur"], starts[-1])
            if not any(name in event["name"].lower() for name in WAITS):
                busy += max(0.0, end - max(until, event["ts"]))
            until = max(until, end)
        own.append(busy / (len(starts) - 1))
        steps.append((starts[-1] - starts[0]) / (len(starts) - 1))
    print("work of a step beside sums, ms, by rank: " + ", ".join(f"{us / 1e3:.3f}" for us in own), end="; ")
    print(f"a step: {steps[0] / 1e3:.3f}; imbalance {(max(own) - min(own)) / steps[0]:.2%}")


def show(events: list[dict[str, Any]], num_kernels: int) -> None:
    if not events:
        sys.exit("nothing ran in that second: choose another --after")
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    gaps, end = [], events[0]["ts"]
    for event in events:
        entry = totals[event["name"][:100]]
        entry[0] += 1
        entry[1] += event["dur"]
        if event["ts"] > end:
            gaps.append(event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    span = end - events[0]["ts"]
    gaps.sort()
    longest = ", ".join(f"{gap:.0f}" for gap in gaps[: -1 - LONGEST_GAPS : -1])
    print(
        f"{span / 1e3:.1f} ms, {sum(gaps) / span:.1%} in {len(gaps)} gaps: median {gaps[len(gaps) // 2]:.1f} us, "
        f"longest {longest}"
    )
    for name, (count, time_us) in sorted(totals.items(), key=lambda item: -item[1][1])[:num_kernels]:
        print(f"{time_us / 1e3:8.1f} ms {time_us / span:6.1%} {count:7.0f} x {time_us / count:8.1f} us  {name}")
    starts = [event["ts"] for event in events if STEP_KERNEL in event["name"]]
    lengths = sorted(after - before for before, after in pairwise(starts))
    if lengths:
        shares = {share: lengths[int(share * (len(lengths) - 1))] / 1e3 for share in (0.05, 0.25, 0.5, 0.75, 0.95)}
        print("steps, ms:", ", ".join(f"p{share * 100:.0f} {length:.1f}" for share, length in shares.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--concurrency", type=int, default=64, help="requests at once (default: 64)")
    add("--requests", type=int, default=192, help="in all (default: 192)")
    add("--input", type=int, default=1024, help="tokens of a prompt (default: 1024)")
    add("--output", type=int, default=128, help="tokens of an answer (default: 128)")
    add(
        "--after",
        type=float,
        default=4.0,
        help="seconds from the begin of the load to that of the profile (default: 4)",
    )
    add("--shape", default="llama-8b", choices=SHAPES, help="(default: llama-8b)")
    add("--layers", type=int, metavar="N", help="of --shape, where all of them do not fit (default: all)")
    add("-tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help="(default: 1)")
    add("-pp", "--pipeline-parallel-size", type=int, default=1, metavar="N", help="(default: 1)")
    add("--kernels", type=int, default=25, help="how many to list (default: 25)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_load.py profiles a GPU: run it on a machine with one")
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / arguments.shape, arguments.shape, arguments.layers)
        traces = Path(scratch) / "traces"
        traces.mkdir()
        paths = [str(Path(__file__).with_name("rank_profile")), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PROFILE_RANKS_INTO": str(traces)}
        options = {
            "max_model_len": max(8192, arguments.input + arguments.output),
            "max_num_seqs": arguments.concurrency, "engine_in_process": True,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "pipeline_parallel_size": arguments.pipeline_parallel_size,
        }  # fmt: skip
        with LLM(str(model), load_format="dummy", **options) as llm:
            speed = record(llm, arguments, traces)
            size = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
            ranks = [read(traces / f"{rank}.json") for rank in range(size)]
    print(f"{speed:,.0f} tok/s in all, the profiled second included")
    show(ranks[0], arguments.kernels)
    shares = ", ".join(f"{idle(events):.1%}" for events in ranks)
    print(f"idle, in gaps or with nothing but transfers between stages, by rank: {shares}")
    if arguments.tensor_parallel_size > 1:
        show_balance(ranks[: arguments.tensor_parallel_size])
    if size > 1:
        sys.stdout.flush()
        os._exit(0)  # NCCL waits at an ordinary exit for ranks that are gone


if __name__ == "__main__":
    main()
