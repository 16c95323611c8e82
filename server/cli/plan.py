"""how many cards hold a load, over how many a model is best divided: the real scheduler under a virtual clock"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.config import ConfigError, EngineConfig
from .flags import add_flags, read_flags
from .given import given_options
from .plan_inputs import fitted_costs, read_trace

if TYPE_CHECKING:
    from ...engine.model_config import ModelConfig
    from ...engine.planning.card import Card
    from ...engine.planning.load import Result, Wanted
    from ...engine.planning.setup import Setup

EXAMPLES = (
    "vserve plan Qwen/Qwen3-8B --gpu h200 --rate 20 --in 1024 --out 256 --ttft 500 --tpot 40",
    "vserve plan ./my-70b --gpu h100 -tp 4 --ttft 1000 --tpot 50",
    "vserve plan ./my-model --gpu h100 --trace requests.jsonl --replicas 2 --output plan.svg",
)
_ENGINE = (
    "model", "revision", "max_model_len", "dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "quantization",
    "kv_cache_dtype", "calculate_kv_scales", "max_num_batched_tokens", "max_num_seqs", "max_mixed_tokens", "block_size",
    "backlog_steps", "enable_chunked_prefill", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold", "speculative_config", "tensor_parallel_size", "pipeline_parallel_size",
    "pipeline_layer_partition", "enable_expert_parallel",
)  # fmt: skip
_DIVIDE = ("tensor_parallel_size", "pipeline_parallel_size")
MOST_ENGINES = 64
SHARES = (0.25, 0.5, 0.75, 1.0, 1.1, 1.25)  # of the knee, that are looked at around it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, only=_ENGINE)
    group = parser.add_argument_group("plan")

    def add(name: str, text: str, **options: Any) -> None:
        group.add_argument(name, help=text, **options)

    number, whole = {"type": _above(float), "metavar": "N"}, {"type": _above(int), "metavar": "N"}
    cards = "h200 (measured), h100, h20, a100, l40s, l4, b200 (from data sheets)"
    add("--gpu", f"the card: {cards}; default: h200", default="h200", metavar="NAME")
    add("--rate", "requests a second", **number)
    add("--in", "tokens of a prompt (default: 1024)", default=1024, dest="num_prompt", **whole)
    add("--out", "tokens of an answer (default: 256)", default=256, dest="num_output", **whole)
    add("--ttft", "time to first token that 95 of 100 requests must not exceed", type=_above(float), metavar="MS")
    add("--tpot", "time an output token that 95 of 100 must not exceed", type=_above(float), metavar="MS")
    add("--replicas", "so many engines, instead of as many as are needed", **whole)
    add("--trace", "JSON lines with timestamp (ms), input_length and output_length, instead of --rate", metavar="FILE")
    add("--fit", "a vserve server with this model on such a card: its last steps, under a load like --in and --out, "
        "correct the numbers of the card", metavar="URL")  # fmt: skip
    add("--output", "also write what was computed: a picture (.svg), or JSON", metavar="FILE")


def _above(kind: type) -> Any:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text}: a number above 0 and below 1e9 belongs here")
        return float(value) if kind is float else value

    read.__name__ = "number"
    return read


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where the plan was made, 1 where the model does not fit or nothing meets what is wanted, 2 for a wrong
    option."""
    try:
        engine, _ = read_flags(arguments)
        return _plan(arguments, engine)
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace, engine: EngineConfig) -> int:
    from ...engine.model_file import ModelError
    from ...engine.model_source import resolve_model_path
    from ...engine.overrides import read_model_config
    from ...engine.planning.card import CARDS
    from ...engine.planning.load import Wanted
    from ...engine.planning.setup import stored_bytes
    from .plan_table import write

    if (card := CARDS.get(arguments.gpu.lower())) is None:
        raise ConfigError(f"--gpu {arguments.gpu}: there are numbers of {', '.join(CARDS)}; choose the nearest")
    if arguments.rate is None and arguments.trace is None and arguments.ttft is None and arguments.tpot is None:
        raise ConfigError("say what is asked: --rate (requests a second), --trace, or --ttft and --tpot for the knee")
    try:
        folder = resolve_model_path(engine.model, engine.revision, engine.download_dir, "dummy")
        model = read_model_config(folder, engine)
        named = any(name in given_options(arguments) for name in _DIVIDE)
        setups = _setups(arguments, engine, model, card, stored_bytes(folder), named)
        wanted = Wanted(*(None if ms is None else ms / 1e3 for ms in (arguments.ttft, arguments.tpot)))
        rows, code = _Question(arguments, wanted, setups, model.architecture, engine.model, named).answer()
    except (ModelError, ConfigError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    if arguments.output:
        write(Path(arguments.output), {"gpu": card.name, "model": engine.model, "rows": rows})
    return code


def _setups(
    arguments: argparse.Namespace, engine: EngineConfig, model: ModelConfig, card: Card, stored: int, named: bool
) -> list[Setup]:
    """Ways to divide the model that fit, fewest cards first; where one is named, that. Raises ConfigError or
    ModelError."""
    from ...engine.planning.divisions import divisions, fitting
    from ...engine.planning.setup import TooLarge, set_up, weights_of

    costs, weights = None, weights_of(model, engine, card)
    if arguments.fit is not None:
        context = arguments.num_prompt + arguments.num_output // 2
        costs = fitted_costs(arguments.fit, engine, model, card, context)
    configs = [engine] if named else divisions(model, engine)
    try:
        return fitting(configs, lambda config: set_up(stored, model, config, card, costs, weights))
    except TooLarge as error:
        more = "more cards (-tp, -pp)" if named else "several hosts (-tp and -pp name the cards)"
        raise ConfigError(f"{error}; take a larger card, {more}, or a smaller model") from None


@dataclasses.dataclass(frozen=True)
class _Question:
    """What was asked of which engines, the smallest first."""

    arguments: argparse.Namespace
    wanted: Wanted
    setups: list[Setup]
    architecture: str
    model: str
    named: bool  # there is one division only, which was asked for

    def answer(self) -> tuple[list[dict[str, Any]], int]:
        """→ the rows of the table, the exit code."""
        from ...engine.planning.divisions import fewest
        from .plan_table import head, row, table

        arguments, wanted, setups = self.arguments, self.wanted, self.setups
        head(setups[0], self.architecture, self.model)
        if arguments.rate is None and arguments.trace is None:
            return self._around_the_knee()
        ask, searches = self._asked(), arguments.replicas is None and (self._has_target or arguments.rate is not None)
        if searches:
            best, asked = fewest(setups, wanted, ask, self._likely)
        else:
            best, asked = self._of_so_many(ask, arguments.replicas or 1)
        if not asked:
            return self._too_slow()
        rows = [row(fleet.setup, fleet.replicas, fleet.result, wanted) for fleet in asked]
        table(rows)
        if best is None:
            print("\nnone of these meets what is wanted")
            return rows, 1
        self._tell_of(best.setup)
        if best.replicas > 1:
            left = ask(best.setup, best.replicas - 1)
            rows.append({"one_dies": row(best.setup, best.replicas - 1, left, wanted)})
            verdict = "still" if wanted.met(left) and left.keeps_up else "no longer"
            done = "meets it" if self._has_target else "is worked off as it comes"
            print(
                f"\nwith one of them dead, the load {verdict} {done}: TTFT p95 {left.ttft(0.95) * 1e3:.0f} ms, "
                f"TPOT p95 {left.tpot(0.95) * 1e3:.1f} ms"
            )
        elif searches:
            print("\nwith its only engine dead, nobody is served until that has started again: -dp 2 would go on")
        if searches:
            print(f"\n{self._command(best.setup, best.replicas)}")
        return rows, 0

    @property
    def _has_target(self) -> bool:
        return self.wanted.ttft is not None or self.wanted.tpot is not None

    @property
    def _size(self) -> tuple[int, int]:
        return self.arguments.num_prompt, self.arguments.num_output

    def _asked(self) -> Callable[[Setup, int], Result]:
        """What answers a load: a rate, or a trace."""
        from ...engine.planning.load import replay, steady

        if self.arguments.trace is None:
            return lambda setup, replicas: steady(setup, self.arguments.rate, *self._size, replicas)
        asks = read_trace(Path(self.arguments.trace))
        return lambda setup, replicas: replay(setup, asks, replicas)

    def _of_so_many(self, ask: Callable[[Setup, int], Result], replicas: int) -> tuple[Any, list[Any]]:
        """The least divided engines of which so many are enough; where nothing is wanted of them, the smallest."""
        from ...engine.planning.divisions import Fleet

        asked = []
        for setup in self.setups:
            asked.append(Fleet(setup, replicas, ask(setup, replicas)))
            if self.wanted.met(asked[-1].result) or not self._has_target:
                return asked[-1], asked
        return None, asked

    def _likely(self, setup: Setup) -> int:
        """Engines that a load needs, about; 0: no number of them is enough. Says what one holds."""
        from ...engine.planning.load import knee, likely_rate

        arguments = self.arguments
        if arguments.trace is not None:
            return 1
        rate = likely_rate(setup, *self._size)
        if self._has_target:
            if (best := knee(setup, self.wanted, *self._size)) is None:
                return 0
            rate = best.rate
            print(
                f"{_engine(setup)} holds {rate:.3g} requests a second ({best.output_rate:.0f} output tokens a second)"
            )
        if (count := max(1, int(arguments.rate / rate))) > MOST_ENGINES:
            raise ConfigError(
                f"--rate {arguments.rate:g} needs some {count} engines: at most {MOST_ENGINES} are computed; ask for a "
                "smaller rate"
            )
        return count

    def _around_the_knee(self) -> tuple[list[dict[str, Any]], int]:
        from ...engine.planning.load import knee, steady
        from .plan_table import row, table

        count = self.arguments.replicas or 1
        for setup in self.setups:
            if (best := knee(setup, self.wanted, *self._size, count)) is None:
                continue
            holds = f"{count} of them hold" if count > 1 else f"{_engine(setup)} holds"
            print(f"{holds} {best.rate:.3g} requests a second ({best.output_rate:.0f} output tokens a second)")
            rows = [
                row(setup, count, steady(setup, best.rate * share, *self._size, count), self.wanted) for share in SHARES
            ]
            table(rows)
            self._tell_of(setup)
            print(f"\n{self._command(setup, count)}")
            return rows, 0
        return self._too_slow()

    def _too_slow(self) -> tuple[list[dict[str, Any]], int]:
        from ...engine.planning.load import alone
        from .plan_table import row, table

        rows = [row(setup, 1, alone(setup, *self._size), self.wanted) for setup in self.setups]
        table(rows)
        print(
            "\nno rate meets this, not even one request at a time: take a faster card, "
            + ("another division (-tp), " if self.named else "")
            + "or more time"
        )
        return rows, 1

    def _tell_of(self, setup: Setup) -> None:
        """What was not told of it above, and how sure times between cards are."""
        from .plan_table import head

        if setup is not self.setups[0]:
            print()
            head(setup, self.architecture, self.model)
        if setup.cards > 1:
            stage = setup.stages[0]
            links = [stage.link] if setup.ranks > 1 else []
            links += [stage.way] if len(setup.stages) > 1 and stage.way not in links else []
            print(
                "\nwhat cards tell each other is computed of data sheets, and was not measured: "
                + "; ".join(
                    f"{link.name}, {link.bandwidth / 1e9:.0f} GB/s each way, of which {link.share:.0%} are used, "
                    f"{link.latency * 1e6:.0f} µs to begin"
                    for link in links
                )
            )

    def _command(self, setup: Setup, replicas: int) -> str:
        words = (
            " ".join(filter(None, ("vserve", self.arguments.model)))
            + setup.options
            + (f" -dp {replicas}" if replicas > 1 else "")
        )
        words += " --enable-expert-parallel" if self.arguments.opt_enable_expert_parallel and setup.ranks > 1 else ""
        return words + (" --spec-method ngram" if setup.acceptance else "")


def _engine(setup: Setup) -> str:
    return "one card" if setup.cards == 1 else f"one engine of {setup.cards} cards ({setup.options.strip()})"
