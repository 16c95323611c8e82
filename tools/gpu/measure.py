"""Measures what tests/gpu/RESULTS.md holds: one command, on a machine with one GPU, from a checkout.

Usage: python tools/gpu/measure.py [--modes NAME,...] [--in-process] [--startup] [--drafts] [--only NAME,...]
           [--times N] [--output FILE]

Every load comes from `vserve bench` of this checkout. A median in bold reaches its target, which is meant for the shape
of Llama-3.1-8B on an H200. What fails is printed, the rest is measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from model_folder import SHAPES, add_weights, write_model
from processes import Server, VServe
from report import Figure, Report, Row

CONTEXT = 8192  # --max-model-len
REPEATS = 3
CLIENTS = 4  # processes
MODES = ("default", "latency", "throughput")  # the last two are those of --performance-mode

TTFT, TTFT_P99 = Figure("TTFT p50, ms", "median_ttft_ms"), Figure("TTFT p99, ms", "p99_ttft_ms")
TPOT, ITL_P99 = Figure("TPOT p50, ms", "median_tpot_ms"), Figure("ITL p99, ms", "p99_itl_ms")
TOTAL = Figure("total tok/s", "total_token_throughput", more_is_better=True)
OUTPUT = Figure("output tok/s", "output_throughput", more_is_better=True)
TOKENS_A_STEP = Figure("tokens a step with drafts", "spec_decode_acceptance_length", more_is_better=True)


@dataclass(frozen=True)
class Workload:
    """Requests over HTTP. Lengths in tokens; the input's does not count the prefix."""

    title: str
    num_requests: int
    input_len: int
    output_len: int
    figures: tuple[Figure, ...]
    concurrency: int | None = None  # None: no limit
    rate: float | None = None  # requests per second, Poisson; None: all at once
    prefix_len: int = 0
    num_prefixes: int = 1

    def scaled(self, factor: float) -> Workload:
        """Fewer and shorter requests; answers keep two tokens, without which there is no time between tokens."""
        return replace(
            self,
            num_requests=scale(self.num_requests, factor, 1),
            input_len=scale(self.input_len, factor, 1),
            output_len=scale(self.output_len, factor, 2),
            concurrency=self.concurrency and scale(self.concurrency, factor, 1),
            prefix_len=self.prefix_len and scale(self.prefix_len, factor, 1),
        )

    def multiplied(self, times: int) -> Workload:
        """So many times the requests, at once too: what as many replicas are asked."""
        if times == 1:
            return self
        return replace(
            self,
            title=f"{self.title}, times {times}",
            num_requests=times * self.num_requests,
            concurrency=self.concurrency and times * self.concurrency,
            rate=self.rate and times * self.rate,
        )

    def flags(self) -> list[str]:
        """Of `vserve bench serve` and, without concurrency and rate, of `vserve bench throughput`."""
        words: dict[str, object] = {
            "num-prompts": self.num_requests, "input-len": self.input_len, "output-len": self.output_len,
            "max-concurrency": self.concurrency, "request-rate": self.rate,
        }  # fmt: skip
        if self.prefix_len:
            words |= {"dataset-name": "prefix_repetition", "prefix-len": self.prefix_len}
            words["num-prefixes"] = self.num_prefixes
        return [f"--{name}={value}" for name, value in words.items() if value is not None]


def scale(number: int, factor: float, least: int) -> int:
    return max(least, round(number * factor))


WORKLOADS = {
    "one-stream": Workload(
        "1 stream, 128/256", 8, 128, 256, (TPOT.aims(4.4), TTFT), concurrency=1,
    ),
    "long-prompt": Workload(
        "1 stream, 8000/64", 8, 8000, 64, (TTFT.aims(205),), concurrency=1,
    ),
    "all-at-once": Workload(
        "512 at once, 1024/128", 512, 1024, 128, (TOTAL.aims(37_500),),
    ),
    "many-streams": Workload(
        "768 requests, 256 at a time, 128/256", 768, 128, 256, (OUTPUT.aims(20_500),), concurrency=256,
    ),
    "sustained": Workload(
        "256 requests, 64 at a time, 1024/128", 256, 1024, 128, (TOTAL.aims(32_000), TTFT.aims(300), ITL_P99),
        concurrency=64,
    ),
    "poisson": Workload(
        "256 requests, Poisson 8/s, 1024/128", 256, 1024, 128,
        (TTFT.aims(32), TTFT_P99.aims(65), TPOT.aims(5.6), ITL_P99), rate=8,
    ),
    "shared-prefix": Workload(
        "256 requests, 64 at a time, 2048 in, 1920 shared by all, 64 out", 256, 128, 64, (TOTAL.aims(190_000),),
        concurrency=64, prefix_len=1920, num_prefixes=1,
    ),
}  # fmt: skip
IN_PROCESS, STARTUP, DRAFTS = "in-process", "startup", "drafts"
# What drafts bring and cost: three tokens in each step, imposed, against none; and a search that finds nothing, on
# sampled text, against none. Decodes alone, nearly: of each, options, temperature and streams.
IMPOSED = (
    '--speculative-config={"method":"ngram","num_speculative_tokens":3,"rejection_sample_method":"synthetic",'
    '"synthetic_acceptance_length":3.0,"num_speculative_tokens_per_batch_size":[[1,64,3]]}'
)
DRAFTING: dict[str, tuple[list[str], float, tuple[int, ...]]] = {
    "none": ([], 0, (1, 32, 64, 256)),
    "3 tokens a step": ([IMPOSED], 0, (1, 32, 64, 256)),
    "none, sampled": ([], 1, (1, 64)),
    "n-grams, sampled": (['--speculative-config={"method":"ngram"}'], 1, (1, 64)),
}
IN_PROCESS_FIGURE = Figure("total tok/s", "tokens_per_second", 38_500, more_is_better=True)
STARTUP_FIGURES = (
    Figure("cold: command to first token, s", "cold.first_token", 30),
    Figure("warm: command to first token, s", "warm.first_token", 15),
)


@dataclass
class Measurement:
    """What all measurements share."""

    vserve: VServe
    report: Report
    model: Path
    scratch: Path
    factor: float
    repeats: int
    targets: bool  # these are for the 8B shape and the defaults
    more_options: list[str]
    times: int = 1  # of each load over HTTP, and of the processes that ask
    layers: int | None = None  # where they are fewer than the shape's

    def options(self) -> list[str]:
        """Of whatever loads a model; the context holds the longest workload and the test request of `vserve bench`."""
        return [f"--max-model-len={scale(CONTEXT, self.factor, 64)}", *self.more_options]

    def row(self, name: str, title: str, figures: tuple[Figure, ...], mode: str = "default") -> Row:
        """The targets are for the defaults, at full size."""
        if mode != "default" or self.factor != 1 or not self.targets:
            figures = tuple(replace(figure, target=None) for figure in figures)
        if self.factor != 1:
            title += f", scaled by {self.factor:g}"
        if self.layers:
            title += f", of {self.layers} layers"
        return self.report.add(Row(name, mode, title, figures))

    def over_http(self, names: list[str], mode: str) -> None:
        """After a failure, the next workload finds a fresh server."""
        workloads = {name: WORKLOADS[name].scaled(self.factor).multiplied(self.times) for name in names}
        rows = {name: self.row(name, one.title, one.figures, mode) for name, one in workloads.items()}
        more = [] if mode == "default" else [f"--performance-mode={mode}"]
        self._serve(workloads, rows, mode, more)

    def drafts(self) -> None:
        for kind, (options, temperature, streams) in DRAFTING.items():
            workloads, rows = {}, {}
            for count in streams:
                name = f"{count} at a time, 128/256, drafts: {kind}"
                figures = (TPOT, OUTPUT, TOKENS_A_STEP) if IMPOSED in options and count <= 64 else (TPOT, OUTPUT)
                plain = Workload(name, 6 * count, 128, 256, figures, concurrency=count)
                workloads[name] = plain.scaled(self.factor).multiplied(self.times)
                rows[name] = self.row(DRAFTS, workloads[name].title, figures)
            self._serve(workloads, rows, "default", options, temperature)

    def _serve(
        self, workloads: dict[str, Workload], rows: dict[str, Row], mode: str, more: list[str], temperature: float = 0
    ) -> None:
        server: Server | None = None
        options = ["--load-format=dummy", *self.options(), *more]
        try:
            for name, workload in workloads.items():
                if server is None:
                    server = Server(self.vserve, self.model, options)
                    try:
                        self.report.started(mode, server.wait_until_ready())
                    except Exception as error:
                        self.report.failed(f"the server ({mode})", error)
                        return
                try:
                    self._run_workload(workload, server, rows[name], temperature)
                except Exception as error:  # whatever it is, the rest is measured
                    self.report.failed(f"{name} ({mode})", error)
                    server.stop()
                    server = None
        finally:
            if server is not None:
                server.stop()

    def _run_workload(self, workload: Workload, server: Server, row: Row, temperature: float) -> None:
        for _ in range(self.repeats):
            counters, cpu_seconds = server.counters(), server.cpu_seconds()
            result = self.vserve.bench(
                "serve", f"--port={server.port}", "--ready-check-timeout-sec=30", "--ignore-eos",
                f"--temperature={temperature:g}", f"--num-clients={self.times * CLIENTS}", "--metric-percentiles=50,99",
                *workload.flags(), json_flag="save-result",
            )  # fmt: skip
            cpu_seconds = server.cpu_seconds() - cpu_seconds
            run = {
                "counters": {name: count - counters[name] for name, count in server.counters().items()},
                "api_us_per_token": 1e6 * cpu_seconds / result["total_output_tokens"],
                "bench": result,
            }
            self.report.ran(row, run)

    def in_process(self) -> None:
        workload = WORKLOADS["all-at-once"].scaled(self.factor)
        row = self.row(IN_PROCESS, f"{workload.title}, in process", (IN_PROCESS_FIGURE,))
        command = ["throughput", str(self.model), "--load-format=dummy", *self.options(), *workload.flags()]
        try:
            for _ in range(self.repeats):
                self.report.ran(row, {"bench": self.vserve.bench(*command, json_flag="output-json")})
        except Exception as error:
            self.report.failed(IN_PROCESS, error)

    def startup(self) -> None:
        """With weights on the disk: `vserve bench startup` drops them from the page cache for the cold starts."""
        row = self.row(STARTUP, "start-up", STARTUP_FIGURES)
        try:
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                size = add_weights(self.model, Path(folder))
                row.title += f" with {size / 1e9:.2g} GB of weights"
                iterations = [f"--num-iters-{kind}={self.repeats}" for kind in ("cold", "warm")]
                limit = f"--start-timeout={self.vserve.timeout:.0f}"
                command = ["startup", folder, "--host=127.0.0.1", limit, *self.options(), *iterations]
                result = self.vserve.bench(*command, json_flag="output-json", times=2 * self.repeats + 1)
            for cold, warm in zip(result["cold"], result["warm"], strict=True):
                self.report.ran(row, {"bench": {"cold": cold, "warm": warm}})
        except Exception as error:
            self.report.failed(STARTUP, error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="has config.json and a tokenizer (default: of --shape)")
    add("--shape", default="llama-8b", choices=SHAPES, help="(default: llama-8b)")
    add("--options", default="", metavar="WORDS", help="more options of the server, in one word")
    add("--only", metavar="NAME,...", help=f"of {', '.join([*WORKLOADS, IN_PROCESS, STARTUP, DRAFTS])}")
    add("--drafts", action="store_true", help="also what drafts bring where they hold, and cost where they do not")
    add("--in-process", action="store_true", help="also the load of all-at-once without HTTP")
    add("--startup", action="store_true", help="also starts with weights (16 GB are written) and cold and warm caches")
    add("--modes", default=MODES[0], metavar="NAME,...", help=f"of {', '.join(MODES)} (default: {MODES[0]})")
    add("--repeats", type=int, default=REPEATS, metavar="N", help=f"runs of each (default: {REPEATS})")
    add("--scale", type=float, default=1.0, metavar="X", help="of counts and lengths, to try this script (default: 1)")
    add(
        "--times",
        type=int,
        default=1,
        metavar="N",
        help="of requests, streams and clients, for N replicas (default: 1)",
    )
    add("--layers", type=int, metavar="N", help="of --shape, where all of them do not fit (default: all)")
    add("--timeout", type=float, default=300, metavar="S", help="for a start or a run, in seconds (default: 300)")
    add("--work-dir", type=Path, metavar="DIR", help="for models and logs, emptied at the end (default: the system's)")
    add("--output", type=Path, metavar="FILE", help="the table and all results, as JSON")
    arguments = parser.parse_args()
    more = ((IN_PROCESS, arguments.in_process), (STARTUP, arguments.startup), (DRAFTS, arguments.drafts))
    extra = [name for name, on in more if on]
    names = list(dict.fromkeys([*(arguments.only.split(",") if arguments.only else WORKLOADS), *extra]))
    if unknown := [name for name in names if name not in (*WORKLOADS, IN_PROCESS, STARTUP, DRAFTS)]:
        parser.error(f"--only names {unknown[0]!r}: choose from {', '.join([*WORKLOADS, IN_PROCESS, STARTUP, DRAFTS])}")
    modes = arguments.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes names {unknown[0]!r}: choose from {', '.join(MODES)}")
    if arguments.layers and arguments.model:
        parser.error("--layers is of --shape: a model's own config.json says how many it has")
    if arguments.times < 1:
        parser.error(f"--times is {arguments.times}: it must be at least 1")
    if arguments.repeats < 1 or not 0 < arguments.scale <= 1:
        parser.error("--repeats must be at least 1, --scale above 0 and at most 1")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # not without stopping the server
    with tempfile.TemporaryDirectory(prefix="vserve-measure-", dir=arguments.work_dir) as folder:
        scratch = Path(folder)
        vserve = VServe(scratch, arguments.timeout)
        report = Report(arguments.output, {"command": sys.argv[1:], "environment": vserve.environment()})
        if arguments.model:
            model = arguments.model.resolve()
        else:
            model = write_model(scratch / arguments.shape, arguments.shape, arguments.layers)
        usual = (
            arguments.shape == "llama-8b" and not arguments.layers and not arguments.options and arguments.times == 1
        )
        measurement = Measurement(
            vserve, report, model, scratch, arguments.scale, arguments.repeats, usual, arguments.options.split(),
            arguments.times, arguments.layers,
        )  # fmt: skip
        try:
            if workloads := [name for name in names if name in WORKLOADS]:
                for mode in modes:
                    measurement.over_http(workloads, mode)
            if DRAFTS in names:
                measurement.drafts()
            if IN_PROCESS in names:
                measurement.in_process()
            if STARTUP in names:
                measurement.startup()
        finally:  # also of a measurement that was interrupted
            print("\n" + report.table(), flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
