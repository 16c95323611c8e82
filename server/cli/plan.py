"""how many cards hold a load, over how many a model is best divided: the real scheduler under a virtual clock"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig
from .flags import add_flags, read_flags
from .given import given_options
from .plan_command import DIVIDE, ENGINE
from .plan_inputs import fitted_costs, read_trace

if TYPE_CHECKING:
    from ...engine.describe.model_config import ModelConfig
    from ...engine.planning.card import Card
    from ...engine.planning.setup import Setup

EXAMPLES = (
    "vserve plan Qwen/Qwen3-8B --gpu h200 --rate 20 --in 1024 --out 256 --ttft 500 --tpot 40",
    "vserve plan ./my-70b --gpu h100 -tp 4 --ttft 1000 --tpot 50",
    "vserve plan ./my-model --gpu h100 --trace requests.jsonl --replicas 2 --output plan.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, only=ENGINE)
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
    add("--output", "also write what was computed: a picture (.svg), or JSON (.json)", metavar="FILE")


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
    from ...engine.describe.model_source import resolve_model_path
    from ...engine.describe.reading import read_model_config
    from ...engine.errors import ModelError
    from ...engine.planning.card import CARDS
    from ...engine.planning.load import MOST_ENGINES, Wanted
    from ...engine.planning.setup import stored_bytes
    from .plan_question import Question
    from .plan_table import check_output, write

    if (card := CARDS.get(arguments.gpu.lower())) is None:
        raise ConfigError(f"--gpu {arguments.gpu}: there are numbers of {', '.join(CARDS)}; choose the nearest")
    if arguments.rate is None and arguments.trace is None and arguments.ttft is None and arguments.tpot is None:
        raise ConfigError("say what is asked: --rate (requests a second), --trace, or --ttft and --tpot for the knee")
    if (arguments.replicas or 1) > MOST_ENGINES:
        raise ConfigError(
            f"--replicas {arguments.replicas}: at most {MOST_ENGINES} engines are computed, as many as a server may "
            "have; ask for fewer, or for engines of more cards (-tp, -pp)"
        )
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None:
        check_output(output)
    try:
        folder = resolve_model_path(engine.model, engine.revision, engine.download_dir, "dummy")
        model = read_model_config(folder, engine)
        given = given_options(arguments)
        named = any(name in given for name in DIVIDE)
        trace = () if arguments.trace is None else read_trace(Path(arguments.trace))
        setups = _setups(arguments, engine, model, card, stored_bytes(folder), named)
        wanted = Wanted(*(None if ms is None else ms / 1e3 for ms in (arguments.ttft, arguments.tpot)))
        question = Question(arguments, given, wanted, setups, trace, model.architecture, engine.model, named)
        rows, code = question.answer()
        if output is not None:
            write(output, {"gpu": card.name, "model": engine.model, "rows": rows})
    except (ModelError, ConfigError) as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    return code


def _setups(
    arguments: argparse.Namespace, engine: EngineConfig, model: ModelConfig, card: Card, stored: int, named: bool
) -> list[Setup]:
    """Ways to divide the model that fit, fewest cards first; where one is named, that. Raises ConfigError or
    ModelError."""
    from ...engine.planning.load import divisions, fitting
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
