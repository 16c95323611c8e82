"""What a model's folder says of answers: defaults of sampling, their longest length, and the tokens that end them."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError
from ...engine.files.gguf_checkpoint import GGUFCheckpoint
from ...engine.options.model_path import is_gguf
from ..errors import shorten
from ..options.config import ServerConfig
from ..options.text import RANGES, as_default, default_problem

logger = logging.getLogger(__name__)

FILE = "generation_config.json"


@dataclass(frozen=True)
class ModelDefaults:
    sampling: dict[str, float]
    max_new_tokens: int | None  # no answer is longer, and one without a limit of its own is this long
    eos_token_ids: tuple[int, ...]
    sources: dict[str, str]  # where each of the above is from: a file's name, or "flag"


def read_defaults(
    folder: Path, config: ServerConfig, eos_token_id: int | None, listed_eos: Any = None
) -> ModelDefaults:
    """`eos_token_id`: the tokenizer's; `listed_eos`: config.json's, a number or a list.

    Raises ConfigError for files and flags that cannot be used.
    """
    of_model = read_described(folder, FILE)
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if config.generation_config == "auto":
        settings = _settings(of_model, FILE)
    elif config.generation_config != "vserve":
        path = Path(config.generation_config)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"--generation-config {config.generation_config!r} is no file: give auto, vserve, or the path of a "
                "generation_config.json"
            )
        # Its end tokens count too: whoever names a file means all of it.
        chosen = read_json(path)
        settings = _settings(chosen, str(path))
        of_model = {**of_model, **{k: v for k, v in chosen.items() if k == "eos_token_id"}}
    sources |= dict.fromkeys(settings, FILE if config.generation_config == "auto" else "flag")
    overrides = config.overrides()
    named = FILE if config.generation_config == "auto" else config.generation_config
    for where, own in (
        (named, {name: value for name, value in settings.items() if name not in overrides}),
        ("--override-generation-config", overrides),
    ):
        if own:
            listed = ", ".join(f"{name} {value}" for name, value in own.items())
            logger.info("%s sets the defaults of sampling: %s", where, listed)
    settings |= overrides
    sources |= dict.fromkeys(overrides, "flag")
    limit = settings.pop("max_new_tokens", None)
    # generation_config.json has the last word on where an answer ends; config.json stands in for it.
    if of_model.get("eos_token_id") is not None:
        listed_eos = of_model["eos_token_id"]
    eos = [eos_token_id, *(listed_eos if isinstance(listed_eos, list) else [listed_eos])]
    eos_token_ids = tuple(dict.fromkeys(token for token in eos if isinstance(token, int)))
    return ModelDefaults(settings, limit, eos_token_ids, sources)


def _settings(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Those that count. A model's author may have written anything: what makes no sense is left out, and said."""
    settings = {}
    for name in RANGES:
        value = content.get(name)
        if value is None:
            continue
        if problem := default_problem(name, value):
            logger.warning("%s has %s %s, which %s: ignored", where, name, shorten(value), problem)
            continue
        settings[name] = as_default(name, value)
    return settings


def read_described(model: Path, name: str) -> dict[str, Any]:
    """config.json or generation_config.json of a model's folder, or what a GGUF file says in its place; {} for nothing.

    Raises ConfigError.
    """
    if not is_gguf(model):
        return read_json(model / name)
    checkpoint = GGUFCheckpoint(model)
    return checkpoint.generation_config if name == FILE else checkpoint.config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the model's folder; {} where there is none. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.name} of {str(path.parent)!r} is no JSON ({error}): repair or delete the file"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} of {str(path.parent)!r} holds no JSON object: repair or delete the file")
    return content
