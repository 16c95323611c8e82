"""What was given, and where: by flag, else in the environment, else in a file, else by a preset."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from ...engine.config import ConfigError, EngineConfig, flag
from ..config import ServerConfig
from ..http_config import ENVIRONMENT
from ..vllm_options import vllm_options
from .parser import did_you_mean

PRESETS = Path(__file__).parents[2] / "configs" / "presets"
PREFIX = "VSERVE_"
HIDDEN = "(hidden)"
# Beside the options themselves: names that flags, file and environment may use.
META = ("config", "performance_mode")
_VLLM_VALUES = {
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("generation_config", "vllm"): "vserve",
}
# Variables that are no options; typos are looked for among the others.
_OTHER_VARIABLES = ("VSERVE_FAULT", "VSERVE_ALLOW_FAULTS", "VSERVE_NO_PDL")


@dataclass(frozen=True)
class Given:
    value: Any
    source: str  # flag, environment, file, preset
    where: str  # the flag, the variable, the file, or the mode


@cache
def options() -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Every option by name, with its type: bool, int, float, str, or tuple for several words."""
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for config in (EngineConfig, ServerConfig):
        hints = typing.get_type_hints(config)
        found |= {spec.name: (spec, kind_of(hints[spec.name])) for spec in dataclasses.fields(config)}
    return found


def kind_of(hint: Any) -> Any:
    """int of `int | None`, tuple of `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (argument for argument in typing.get_args(hint) if argument is not types.NoneType)
    return typing.get_origin(hint) or hint


def performance_modes() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def given_options(arguments: argparse.Namespace) -> dict[str, Given]:
    """By name of the option; nothing that has its default. Raises ConfigError."""
    _vllm_notices(arguments)
    flags = {
        name[4:]: Given(value, "flag", flag(name[4:]))
        for name, value in vars(arguments).items()
        if name.startswith("opt_") and value is not None
    }
    if arguments.model:
        if "model" in flags and flags["model"].value != arguments.model:
            raise ConfigError(
                f"two models are named, {arguments.model!r} and --model {flags['model'].value!r}: leave one out"
            )
        flags["model"] = Given(arguments.model, "flag", "MODEL")
    above = _environment() | flags
    if "config" in above:
        above = _file(above["config"]) | above
    if "performance_mode" in above:
        above = _preset(above["performance_mode"]) | above
    return {name: one for name, one in above.items() if name not in META}


def _vllm_notices(arguments: argparse.Namespace) -> list[str]:
    """Raises ConfigError for the first of vLLM's options that asks for what is not here."""
    given = [(option, getattr(arguments, f"vllm_{name}", None)) for name, option in vllm_options().items()]
    lines = [option.judge(value, f"--{option.name}") for option, value in given]
    return [line for line in lines if line is not None]


def notices(arguments: argparse.Namespace) -> list[str]:
    """Lines for the log: what was set elsewhere than on the command line, where nobody sees it. Raises ConfigError."""
    groups: dict[str, list[str]] = {}
    for name, one in given_options(arguments).items():
        if one.source != "flag":
            secret = options()[name][0].metadata["secret"]
            place = {"environment": "the environment", "file": one.where, "preset": f"--performance-mode {one.where}"}
            groups.setdefault(place[one.source], []).append(f"{name}={HIDDEN if secret else one.value}")
    lines = [f"set by {place}: {', '.join(settings)}" for place, settings in groups.items()]
    lines += _vllm_notices(arguments)
    known = [PREFIX + name.upper() for name in (*options(), *META)] + list(_OTHER_VARIABLES)
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in known and (hint := did_you_mean(variable, known)):
            lines.append(f"the variable {variable} is no option{hint}")
    return lines


def _environment() -> dict[str, Given]:
    found = {}
    for name in (*options(), *META):
        variable = PREFIX + name.upper()
        text = os.environ.get(variable, "").strip()
        # Keys are read by those who compare them. tcp://… is what Kubernetes tells of a service called vserve.
        if text and name not in ENVIRONMENT and not text.startswith(("tcp://", "udp://")):
            found[name] = Given(_value(name, text, variable), "environment", variable)
    return found


def _file(given: Given) -> dict[str, Given]:
    path = Path(given.value).expanduser()
    values = read_yaml(path, f"{given.where} {given.value!r}")
    return {name: Given(value, "file", str(path)) for name, value in values.items()}


def _preset(given: Given) -> dict[str, Given]:
    mode, modes = given.value, performance_modes()
    if mode not in modes:
        where = f"{given.where}: performance-mode" if given.source == "file" else given.where
        raise ConfigError(f"{where} is {mode!r}: choose one of {', '.join(modes)}")
    values = read_yaml(PRESETS / f"{mode}.yaml", f"preset {mode!r}")
    return {name: Given(value, "preset", mode) for name, value in values.items()}


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Options by name, each of its type; names as the flags have them, with - or _. Raises ConfigError."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} cannot be read ({error.strerror}): give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{what} is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{what} must have lines such as `max-model-len: 4096`")
    known = [name.replace("_", "-") for name in (*options(), "performance_mode")]
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).lstrip("-").replace("-", "_")
        if (option := vllm_options().get(name)) is not None:
            if line := option.judge(value, f"{what}: {key}"):
                raise ConfigError(f"{line}; leave it out")
            continue
        if name.replace("_", "-") not in known:
            raise ConfigError(f"{what}: unknown option {str(key)!r}{did_you_mean(name.replace('_', '-'), known)}")
        if name in values:
            raise ConfigError(f"{what} sets {name} twice: leave one out")
        if value is not None:  # nothing after the colon: the default
            values[name] = _value(name, value, f"{what}: {key}")
    return values


def _value(name: str, value: Any, where: str) -> Any:
    """Text or a value of YAML as the option's type. Raises ConfigError."""
    if name in META:
        return str(value)
    kind = options()[name][1]
    text = value.strip() if isinstance(value, str) else value
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if (found := words.get(str(text).lower())) is not None:
            return found
        raise ConfigError(f"{where} is {value!r}: it must be true or false")
    if kind is tuple:
        return tuple(map(str, text)) if isinstance(text, list) else tuple(str(text).replace(",", " ").split())
    if kind is str:
        return json.dumps(text) if isinstance(text, dict | list | bool) else spelled(name, str(text))
    if isinstance(text, str):
        try:
            return NUMBERS[kind](text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{where} is {error}") from None
    if isinstance(text, bool) or not isinstance(text, int | float) or (kind is int and isinstance(text, float)):
        raise ConfigError(f"{where} is {value!r}: it must be {'an integer' if kind is int else 'a number'}")
    return kind(text)


def integer(text: str) -> int:
    """32768, or as vLLM has it, 32K = 32 × 1024 and 32k = 32,000; so for M, G, T. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([+-]?\d+|\d+\.\d+)(?:([kmgt])|([KMGT])(?:iB)?)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be an integer such as 4096 or 4K")
    digits, thousands, powers = found.groups()
    factor = 1000 ** (1 + "kmgt".index(thousands)) if thousands else 1024 ** (1 + "KMGT".index(powers)) if powers else 1
    number = Fraction(digits) * factor
    if number.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be an integer")
    return int(number)


def spelled(name: str, text: str) -> str:
    """An option's value by vserve's name for it, where it was given by vLLM's."""
    return _VLLM_VALUES.get((name, text), text)


def number(text: str) -> float:
    """Raises ArgumentTypeError."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a number such as 0.9") from None


NUMBERS: dict[type, Callable[[str], float]] = {int: integer, float: number}
