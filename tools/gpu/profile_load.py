"""Which kernels a second under load goes into: python tools/gpu/profile_load.py [--concurrency 64] [--input 1024] …

The offline engine in this process, the 8B shape with made-up weights, and torch's profiler for a second in the middle:
time and launches by kernel, gaps between kernels, and how long steps were. Of several ranks (-tp, -pp) it sees rank 0,
whose stage is the last: where it waits for another, a kernel of NCCL runs meanwhile.
"""

from __future__ import annotations

import argparse
import json
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
LONGEST_GAPS = 20  # shown
RECEIVES = "SendRecv"  # in the name of the kernel that waits for the stage before


def record(llm: LLM, arguments: argparse.Namespace, trace: Path) -> float:
    """Runs the load, profiles a second of it into the file → total tokens a second."""
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 128_000) for _ in range(arguments.input)]}
        for _ in range(arguments.requests)
    ]
    sampling = SamplingParams(max_tokens=arguments.output, temperature=0.0, ignore_eos=True)
    llm.generate(prompts[:4], sampling, use_tqdm=False)
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
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        time.sleep(1.0)
    thread.join()
    profiled.export_chrome_trace(str(trace))
    return len(prompts) * (arguments.input + arguments.output) / seconds[0]


def show(events: list[dict[str, Any]], num_kernels: int) -> None:
    """events: Chrome's, of kernels and copies; their times are microseconds."""
    events = sorted(events, key=lambda event: event["ts"])
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
    busy, until = 0.0, events[0]["ts"]
    for event in events:
        if RECEIVES not in event["name"]:
            busy += max(0.0, event["ts"] + event["dur"] - max(until, event["ts"]))
            until = max(until, event["ts"] + event["dur"])
    print(f"idle, in gaps or with nothing but transfers between stages: {1 - busy / span:.1%}")
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
        folder = write_model(Path(scratch) / arguments.shape, arguments.shape, arguments.layers)
        trace = Path(scratch) / "trace.json"
        options = {
            "max_model_len": max(8192, arguments.input + arguments.output),
            "max_num_seqs": arguments.concurrency, "engine_in_process": True,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "pipeline_parallel_size": arguments.pipeline_parallel_size,
        }  # fmt: skip
        with LLM(str(folder), load_format="dummy", **options) as llm:
            speed = record(llm, arguments, trace)
        events = json.loads(trace.read_text())["traceEvents"]
    print(f"{speed:,.0f} tok/s in all, the profiled second included")
    show([e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")], arguments.kernels)


if __name__ == "__main__":
    main()
