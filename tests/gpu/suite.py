"""All that needs a GPU, in one command: `make test-gpu`, or python tests/gpu/suite.py [GROUP] from a checkout.

    core (default)   kernels, steps, the engine, the noticing model in company and with planted faults, the 8B shape
    kernels          every case of the kernels' tests, where core has those in which each two parameters meet
    foreign          models that transformers' code computes: their forwards in graphs
    families         every native family against transformers
    images           towers against the CPU's, models with pictures against transformers
    encoders         models that read whole texts both ways, against the CPU's vectors
    spec             drafts: tokens in graphs of every depth, the noticing model in company, what a copy gains
    experts          the products and the routing of mixtures of experts
    quant            the products of quantised weights, a cache of 8 bits
    lora             adapters: their kernels, and the engine with many of them at once
    ranks            one model on two cards; stages, on one too
    soak             eight minutes of the noticing model in company, memory watched

What a part prints goes to a file of its own; the table at the end says what came of each. Exit code 1 where one failed.
A feature brings a group with its own parts in GROUPS.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

GPU = Path(__file__).resolve().parent
CHECKOUT = GPU.parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
CORES_EACH = 2  # of the workers that run tests side by side (own_cores.py)
LAST_LINES = 60  # of what a part that failed has printed
LIMIT = 1200.0  # seconds, of a part


@dataclass(frozen=True)
class Part:
    """fails: it is to find something, and so to end with exit code 1."""

    name: str
    command: tuple[str, ...]
    fails: bool = False
    workers: int = 1


@dataclass
class Outcome:
    part: Part
    code: int
    seconds: float
    output: Path

    @property
    def passed(self) -> bool:
        return self.code == int(self.part.fails)

    @property
    def lines(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines()

    @property
    def summary(self) -> str:
        found = [line for line in self.lines if line.startswith("FAULT ")]
        if self.part.fails and found:
            return f"noticed: {found[-1].removeprefix('FAULT ')}"
        return (found or [line for line in self.lines if line.strip()] or ["it printed nothing"])[-1].strip("= ")


def tests(name: str, *files: str, workers: int = 1, share: str = "loadfile") -> Part:
    """share: what goes to one worker, as of pytest-xdist's --dist."""
    parallel = ("-n", str(workers), "--dist", share, "-p", "own_cores") if workers > 1 else ()
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, *files)
    return Part(name, command, workers=workers)


def side_by_side(name: str, *files: str) -> Part:
    """Tests whatever file they are of: most of their time compilers run."""
    return tests(name, *files, workers=max(1, min(8, CORES // CORES_EACH)), share="load")


def noticing(name: str, *options: str, fails: bool = False) -> Part:
    return Part(name, (str(GPU / "noticing.py"), *options), fails)


def fault(kind: str) -> Part:
    return noticing(
        f"planted fault: {kind}", f"--fault={kind}", "--streams=100", "--answers=600", "--no-small-cache", fails=True
    )


NGRAMS = "--spec-method=ngram --ngram-prompt-lookup-max=4"
ALWAYS = (
    '--speculative-config={"method":"ngram","prompt_lookup_min":1,"prompt_lookup_max":3,'
    '"num_speculative_tokens_per_batch_size":[[1,32,7],[33,64,3],[65,512,1]]}'
)
EXPERTS_AS_CODES = side_by_side(
    "experts as codes",
    "tests/kernels/test_moe_codes.py",
    "tests/kernels/test_moe_few.py",
    "tests/gpu/test_experts_gpu.py",
)
# A group is lanes of parts: those of a lane one after the other, the lanes at the same time. The last lane runs alone:
# it measures the card's memory.
GROUPS: dict[str, list[list[Part]]] = {
    "core": [
        [tests("kernels", "tests/kernels", "-m", "not product", workers=max(1, min(6, CORES // 2)), share="load")],
        [side_by_side("steps", "tests/gpu/test_steps.py")],
        [noticing("the noticing model")],
        [fault(kind) for kind in ("cell", "table", "stale")],
        [
            tests(
                "engine",
                "tests/gpu/test_engine_gpu.py",
                "tests/gpu/test_windows_gpu.py",
                "tests/gpu/test_request_parameters_gpu.py",
                "tests/gpu/test_pdl_gpu.py",
            )
        ],
        [tests("the 8B shape", "tests/gpu/test_serve_8b.py")],
    ],
    "kernels": [[side_by_side("kernels", "tests/kernels")]],
    "foreign": [[side_by_side("foreign", "tests/gpu/test_foreign_gpu.py")]],
    "families": [[side_by_side("families", "tests/gpu/test_families_gpu.py")]],
    "images": [[tests("images", "tests/gpu/test_images_gpu.py")]],
    "encoders": [[tests("encoders", "tests/gpu/test_encoders_gpu.py")]],
    "experts": [
        [side_by_side("experts", "tests/kernels/test_moe.py", "tests/kernels/test_moe_route.py")],
        [EXPERTS_AS_CODES],
    ],
    "quant": [
        [side_by_side("layouts", "tests/gpu/test_quant_gpu.py")],
        [EXPERTS_AS_CODES],
        *(
            [
                noticing(
                    f"the noticing model in {kind}",
                    f"--options=--quantization={kind}",
                    "--streams=1,100,400",
                    "--answers=400",
                    "--no-small-cache",
                )
            ]
            for kind in ("fp8", "int4")
        ),
        [Part("the noticing model in each layout", (str(GPU / "noticing_layouts.py"),))],
        [
            side_by_side(
                "kernels",
                "tests/kernels/test_quant_linear.py",
                "tests/kernels/test_quant_few.py",
                "tests/kernels/test_quant_many.py",
                "tests/kernels/test_fp8_linear.py",
                "tests/kernels/test_fp8_rows.py",
            )
        ],
        [side_by_side("FP8 cache", "tests/kernels/test_kv_fp8.py", "tests/gpu/test_kv8_gpu.py")],
        [
            noticing(
                "the noticing model, FP8 cache",
                "--options=--kv-cache-dtype=fp8",
                "--streams=100,400",
                "--answers=1000",
            )
        ],
    ],
    "spec": [
        [tests("drafts", "tests/gpu/test_spec_gpu.py")],
        [noticing("the noticing model, with n-grams", f"--options={NGRAMS}", "--streams=1,8,40,100")],
        # drafts, mostly wrong ones, however many run
        [noticing("the same, at every load", f"--options={ALWAYS}", "--streams=20,60,200", "--answers=1200")],
    ],
    "lora": [
        [side_by_side("kernels", *(f"tests/kernels/test_{name}.py" for name in ("lora", "lora_share", "moe_lora")))],
        [side_by_side("adapters", "tests/gpu/test_lora_gpu.py")],
        [noticing("the noticing model, 40 adapters", "--adapters=40", "--streams=1,100,400", "--answers=2000")],
    ],
    "ranks": [
        [  # in turns: ranks that wait for each other on cards which others use wait for their turn each time
            tests("sums over ranks", "tests/gpu/test_ranks_gpu.py"),
            tests("engines of two ranks", "tests/gpu/test_rank_engines_gpu.py"),
            tests("stages on one card", "tests/gpu/test_stages_gpu.py"),
        ],
        [noticing("the noticing model on two cards", "--options=-tp 2", "--streams=1,100", "--answers=1000")],
    ],
    "soak": [[noticing("soak", "--soak=480")]],
}


def run(part: Part, folder: Path, environment: dict[str, str]) -> Outcome:
    output = folder / f"{part.name.replace(' ', '-').replace(':', '')}.log"
    started = time.monotonic()
    with output.open("wb") as out:
        try:
            code = subprocess.run(
                [sys.executable, *part.command], cwd=CHECKOUT, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, timeout=LIMIT, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            out.write(f"\nFAULT took more than {LIMIT:.0f} s\n".encode())
            code = -1
    outcome = Outcome(part, code, time.monotonic() - started, output)
    print(f"{part.name}: {'passed' if outcome.passed else 'FAILED'} after {outcome.seconds:.0f} s", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="?", default="core", choices=GROUPS)
    parser.add_argument("--only", default="", metavar="WORD", help="parts whose name has it")
    parser.add_argument("--logs", type=Path, help="keep what the parts print in this folder")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print(
            f"{sys.executable} sees no GPU: check nvidia-smi and the driver; everything else is tested by `make test`"
        )
        return 1
    lanes = [[part for part in lane if args.only in part.name] for lane in GROUPS[args.group]]
    *beside, alone = [lane for lane in lanes if lane] or [[]]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vserve-test-gpu-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        (Path(scratch) / "packages").mkdir()
        (Path(scratch) / "packages" / "vserve").symlink_to(CHECKOUT)  # this checkout, whatever is installed
        paths = [str(Path(scratch) / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths.append(str(GPU))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        first = itertools.accumulate((max(part.workers for part in lane) * CORES_EACH for lane in beside), initial=0)

        def lane(parts: list[Part], first: int = 0) -> list[Outcome]:
            return [run(part, folder, environment | {"TEST_CORES": f"{first}:{CORES_EACH}"}) for part in parts]

        with ThreadPoolExecutor(max(1, len(beside))) as pool:
            outcomes = [outcome for found in pool.map(lane, beside, first) for outcome in found]
        outcomes += lane(alone)
        for outcome in outcomes:
            if not outcome.passed:
                print(f"\n---- {outcome.part.name}\n" + "\n".join(outcome.lines[-LAST_LINES:]))
        for outcome in outcomes:
            if outcome.passed and any(line.startswith("| setting") for line in outcome.lines):
                print(f"\n{outcome.part.name}:\n" + "\n".join(line for line in outcome.lines if line.startswith("|")))
        seconds = time.monotonic() - started
        name = torch.cuda.get_device_name()
        print(f"\n{args.group} on one {name}, {time.strftime('%Y-%m-%d')}, {seconds:.0f} s:\n\n"
              "| part | result | seconds | |\n|---|---|---|---|")  # fmt: skip
        for outcome in outcomes:
            result = "passed" if outcome.passed else "**failed**"
            print(f"| {outcome.part.name} | {result} | {outcome.seconds:.0f} | {outcome.summary[:160]} |")
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
