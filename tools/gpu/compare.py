"""Two checkouts on one GPU, in turns: is the new one slower than the old?

    python tools/gpu/compare.py OLD_CHECKOUT [--pairs 3] [--only NAME,...]

Both serve the 8B shape (or --shape) at the same time, each with half of the card's memory for its cache; only one has
work. Each workload of measure.py, shortened, goes to the old, the new, the new, the old … The table gives the ratio
of the medians of the pairs, above 1 where the new is better, and in brackets each pair's. Then, on the new one alone,
what parameters of requests cost: rows with each of them against rows without, in turns. Exit code 1 where a ratio is
below --least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import CLIENTS, CONTEXT, OUTPUT, TPOT, WORKLOADS, Workload
from model_folder import SHAPES, write_model
from processes import CHECKOUT, Server, VServe
from report import Figure, number

CACHE = 40e9  # bytes, of each server
SHORTER = {"one-stream": 4, "long-prompt": 6, "all-at-once": 256, "many-streams": 512, "sustained": 192, "poisson": 64}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
ROWS = Workload("64 at a time, 128/128", 128, 128, 128, (TPOT,), concurrency=64)
COSTS: dict[str, dict[str, Any]] = {
    "sampled (0.8, top-p 0.95)": SAMPLED,
    "logit_bias of 300": {"logit_bias": {str(token): 1.0 for token in range(1000, 1300)}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "a grammar": {"structured_outputs": {"regex": "([a-z]+ )+"}, "ignore_eos": False},
}


def workloads() -> dict[str, tuple[Workload, dict[str, Any]]]:
    found = {
        name: (replace(one, num_requests=SHORTER.get(name, one.num_requests)), {}) for name, one in WORKLOADS.items()
    }
    sampled = replace(found["many-streams"][0], title=f"{WORKLOADS['many-streams'].title}, sampled", figures=(OUTPUT,))
    return {**found, "sampled": (sampled, SAMPLED)}


def run(vserve: VServe, server: Server, workload: Workload, extra: dict[str, Any], seed: int) -> dict[str, Any]:
    before = server.cpu_seconds()
    result = vserve.bench(
        "serve", f"--port={server.port}", "--ready-check-timeout-sec=30", "--ignore-eos", "--temperature=0",
        f"--num-clients={CLIENTS}", "--metric-percentiles=50,99", f"--seed={seed}", "--disable-tqdm",
        f"--extra-body={json.dumps(extra)}", *workload.flags(), json_flag="save-result",
    )  # fmt: skip
    result["api_us"] = 1e6 * (server.cpu_seconds() - before) / result["total_output_tokens"]
    return result


def ratio(figure: Figure, old: float, new: float) -> float:
    """Above 1: the new is better."""
    return new / old if figure.more_is_better else old / new


def compare(title: str, figure: Figure, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    values = [(figure.value({"bench": old}), figure.value({"bench": new})) for old, new in pairs]
    each = [ratio(figure, old, new) for old, new in values]
    old, new = (statistics.median(column) for column in zip(*values, strict=True))
    found = ratio(figure, old, new)
    cells = [title, figure.label, number(old), number(new), f"{found:.3f}", " ".join(f"{one:.3f}" for one in each)]
    print("| " + " | ".join(cells) + " |", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("old", type=Path, help="the other checkout")
    add("--pairs", type=int, default=3, help="(default: 3)")
    add("--only", default="", metavar="NAME,...", help="of the workloads, or costs")
    add("--least", type=float, default=0.99, help="ratio (default: 0.99)")
    add("--cost", type=float, default=0.95, help="least ratio of rows with parameters (default: 0.95)")
    add("--model", type=Path, metavar="DIR", help="has config.json and a tokenizer (default: of --shape)")
    add("--shape", default="llama-8b", choices=SHAPES, help="(default: llama-8b)")
    add("--options", default="", help="more options of both servers, in one word")
    args = parser.parse_args()
    wanted = set(filter(None, args.only.split(",")))
    low: list[str] = []
    api = Figure("API CPU, µs a token", "api_us")
    with tempfile.TemporaryDirectory(prefix="vserve-compare-") as folder:
        scratch = Path(folder)
        model = args.model.resolve() if args.model else write_model(scratch / args.shape, args.shape)
        options = ["--load-format=dummy", f"--max-model-len={CONTEXT}", f"--kv-cache-memory-bytes={CACHE:.0f}"]
        servers: list[Server] = []
        commands: list[VServe] = []
        try:
            for checkout, name in ((args.old, "old"), (CHECKOUT, "new")):
                (scratch / name).mkdir()
                commands.append(VServe(scratch / name, 300, checkout))
                servers.append(Server(commands[-1], model, [*options, *args.options.split()]))
                start = servers[-1].wait_until_ready()
                print(f"{name}: ready after {start['ready']:.1f} s", flush=True)
            print("\n| workload | figure | old | new | ratio | pairs |\n|---|---|---|---|---|---|")
            seed = 0
            for name, (workload, extra) in workloads().items():
                if wanted and name not in wanted:
                    continue
                pairs = []
                for pair in range(args.pairs):
                    seed += 1
                    order = (0, 1) if pair % 2 == 0 else (1, 0)
                    results = {i: run(commands[1], servers[i], workload, extra, seed) for i in order}
                    pairs.append((results[0], results[1]))
                for figure in workload.figures:
                    if compare(workload.title, figure, pairs) < args.least:
                        low.append(f"{workload.title}: {figure.label}")
                compare(workload.title, api, pairs)
            for name, extra in COSTS.items():
                if wanted and "costs" not in wanted:
                    continue
                pairs = []
                for _ in range(args.pairs):
                    seed += 1
                    plain = run(commands[1], servers[1], ROWS, {}, seed)
                    pairs.append((plain, run(commands[1], servers[1], ROWS, extra, seed + 1000)))
                if compare(f"{ROWS.title}: with {name}, on the new one", TPOT, pairs) < args.cost:
                    low.append(f"{ROWS.title}: {name}")
        finally:
            for server in servers:
                server.stop()
    for text in low:
        print(f"FAULT slower: {text}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
