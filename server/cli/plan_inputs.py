"""What a plan may be told beside its options: a recorded load, and the steps of a server that runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig

if TYPE_CHECKING:
    from ...engine.describe.model_config import ModelConfig
    from ...engine.planning.card import Card
    from ...engine.planning.simulation import Ask
    from ...engine.planning.step_model import Costs

_OF_A_STEP = ("num_tokens", "num_decodes", "num_requests", "device_seconds")


def read_trace(path: Path) -> list[Ask]:
    """Raises ConfigError."""
    from ...engine.planning.simulation import Ask

    asks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ask = Ask(float(entry["timestamp"]) / 1e3, int(entry["input_length"]), int(entry["output_length"]))
            if ask.num_prompt < 1 or ask.num_output < 1 or ask.arrival < 0:
                raise ValueError("lengths are at least 1, timestamps at least 0")
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"--trace {path}, line {number}: {what}; a line is "
                '{"timestamp": 27.5, "input_length": 1024, "output_length": 256}'
            ) from None
        asks.append(ask)
    if not asks:
        raise ConfigError(f"--trace {path} has no requests: give a file with a JSON object a line")
    return asks


def fitted_costs(url: str, engine: EngineConfig, model: ModelConfig, card: Card, context: int) -> Costs:
    """By the last steps of a server with this model on such cards, divided however it is. context: tokens of the mean
    context of who decoded in them. Says how far off they are. Raises ConfigError."""
    from ...engine.planning.setup import set_up
    from ...engine.planning.step_model import fit

    info = _server_info(url)
    try:
        ranks, stages = (
            int(info["settings"][name]["value"]) for name in ("tensor_parallel_size", "pipeline_parallel_size")
        )
        vocab_size = int(info["model"]["vocab_size"])
        steps = [{name: float(step[name]) for name in _OF_A_STEP} for step in info["steps"]]
    except (KeyError, TypeError, ValueError) as failure:
        what = f"lacks {failure}" if isinstance(failure, KeyError) else f"is none of vserve's ({failure})"
        raise ConfigError(f"--fit {url}: its /server_info {what}; name a vserve server of this version") from None
    if vocab_size != model.vocab_size:
        raise ConfigError(
            f"--fit {url}: it serves a model with a vocabulary of {vocab_size}, and {model.architecture} here has one "
            f"of {model.vocab_size}: name a server with the same model"
        )
    if stages > 1:
        raise ConfigError(
            f"--fit {url}: it has --pipeline-parallel-size {stages}, and what it tells of a step is not of one stage: "
            "name a server without stages"
        )
    divided = dataclasses.replace(
        engine, tensor_parallel_size=ranks, pipeline_parallel_size=1, pipeline_layer_partition=None
    )
    costs, error, count = fit(set_up(0, model, divided, card).stages[0], steps, context)
    print(
        f"fitted on {count} steps: products × {costs.products:.2f}, weights × {costs.weights:.2f}, a step "
        f"{costs.step * 1e6:.0f} µs; on as many others the median error is {100 * error:.1f} %"
    )
    return costs


def _server_info(url: str) -> Any:
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/server_info?steps=1024", timeout=30)
        answer.raise_for_status()
        return answer.json()
    except (httpx.HTTPError, ValueError) as failure:
        raise ConfigError(f"--fit {url}: {failure}; name a vserve server that has answered requests") from None
