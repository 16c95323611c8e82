"""Flags from the option dataclasses, and back: an option is declared once, with its dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import typing
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig, flag
from ...engine.options.model_path import is_gguf, is_hub_name
from ..options.config import ServerConfig
from ..options.given import VLLM_MODES, Given, performance_modes
from ..options.http import ENVIRONMENT
from ..options.reading import kind_of, options, read
from ..options.vllm import ANY, vllm_options
from .given import given_options
from .parser import refuse
from .words import take_parts

DEMO = Path(__file__).parents[2] / "configs" / "demo"


def add_flags(parser: argparse.ArgumentParser, *configs: type, only: tuple[str, ...] = ()) -> None:
    """A positional model, and a flag for every option (or those in `only`), in the groups that the options name."""
    if not any(action.dest == "model" for action in parser._actions):
        parser.add_argument(
            "model", nargs="?", help="folder of a Hugging Face model, its name on the hub, or a GGUF file"
        )
        parser.add_argument(
            "--config", dest="opt_config", metavar="FILE",
            help="YAML file with options, named as here; flags and VSERVE_… variables come before it",
        )  # fmt: skip
        parser.add_argument(
            "--performance-mode", dest="opt_performance_mode", choices=[*performance_modes(), *VLLM_MODES],
            help="options that suit latency or throughput; whatever is set elsewhere comes before them",
        )  # fmt: skip
    groups = {group.title: group for group in parser._action_groups}
    for config in configs:
        hints = typing.get_type_hints(config)
        for spec in dataclasses.fields(config):
            if only and spec.name not in only:
                continue
            title = spec.metadata["group"]
            group = groups[title] = groups.get(title) or parser.add_argument_group(title)
            _add_flag(group, spec, hints[spec.name])
    if not only:
        _add_vllm_flags(parser)


def _add_flag(group: Any, spec: dataclasses.Field[Any], hint: Any) -> None:
    help = spec.metadata["help"]
    default = spec.default
    if default is not dataclasses.MISSING and default not in (None, "", (), True, False):
        help += f" (default: {default})"
    elif isinstance(default, bool):
        help += f" (default: {'on' if default else 'off'})"
    options: dict[str, Any] = {"help": help.replace("%", "%%"), "dest": f"opt_{spec.name}", "default": None}
    kind = kind_of(hint)
    names = [flag(spec.name), *([f"-{spec.metadata['short']}"] if spec.metadata["short"] else [])]
    if spec.metadata["is_json"]:
        take_parts(group.add_argument(*names, metavar="JSON", **options))
    elif kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif kind is tuple:
        group.add_argument(flag(spec.name), nargs="+", metavar="NAME", **options)
    else:
        choices = spec.metadata["choices"] or None
        metavar = None if choices else {int: "N", float: "X"}.get(kind, "TEXT")
        as_typed = functools.partial(_typed, spec.name)
        group.add_argument(*names, type=as_typed, choices=choices, metavar=metavar, **options)


def _typed(name: str, text: str) -> Any:
    """As argparse wants it: raises ArgumentTypeError."""
    try:
        return read(name, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Known, so that each can be answered for itself; not shown."""
    for name, option in vllm_options().items():
        names = [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
        if f"--{option.name}" not in parser._option_string_actions:
            kind: Any = None if option.takes_value else argparse.BooleanOptionalAction
            several: dict[str, Any] = {"nargs": "+"} if option.takes_several else {"action": kind}
            action = parser.add_argument(*names, **several, dest=f"vllm_{name}", default=None, help=argparse.SUPPRESS)
            if option.is_json:
                take_parts(action)
            if option.accepted != ANY:
                refuse(action)


def sources(arguments: argparse.Namespace) -> dict[str, str]:
    """Where the options are from that are no defaults, by name."""
    given = {name: one.source for name, one in given_options(arguments).items()}
    given.setdefault("model", "default")
    for name, variables in ENVIRONMENT.items():
        if name not in given and any(os.environ.get(variable, "").strip() for variable in variables):
            given[name] = "environment"
    given.setdefault("served_model_name", "model")
    return given


def _check_lists(found: dict[str, Given]) -> None:
    """Where no model is named, a flag that takes several words may have taken it. Raises ConfigError."""
    for name, one in found.items():
        if one.source == "flag" and isinstance(one.value, list) and _looks_like_a_model(one.value[-1]):
            secret = options()[name][0].metadata["secret"]
            last = "what looks like a model" if secret else repr(one.value[-1])
            raise ConfigError(
                f"{one.where} took {last} as one of its words, and no model is named: put the model first, as in "
                f"`vserve MODEL {one.where} …`"
            )


def _looks_like_a_model(word: str) -> bool:
    """Also where there is none: a path that is mistyped, a GGUF file that is elsewhere."""
    if not word:
        return False
    path = word.startswith(("./", "../", "~/")) or (word[0] == "/" and word.count("/") > 1)
    there = os.path.exists(os.path.expanduser(word))
    return there or path or word.lower().endswith(".gguf") or ("/" in word and is_hub_name(word))


def read_flags(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """What was given, wherever, over the defaults. Without a model: the demo model. --hf-token goes into the
    environment, where the hub's library and other processes look for it. Raises ConfigError."""
    found = given_options(arguments)
    given = {name: one.value for name, one in found.items()}
    demo = "model" not in given
    if demo:
        _check_lists(found)
        given["model"] = str(DEMO)
    parts: list[dict[str, Any]] = []
    for config in (EngineConfig, ServerConfig):
        fields = {spec.name for spec in dataclasses.fields(config)}
        parts.append({k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in fields})
    engine, server = EngineConfig(**parts[0]), ServerConfig(**parts[1])
    if server.hf_token:
        os.environ["HF_TOKEN"] = server.hf_token
    if server.lora_modules and not engine.enable_lora:
        raise ConfigError("--lora-modules names adapters, which --enable-lora serves: add it, or leave both out")
    for module in server.modules():  # before a model is loaded for them
        if not os.path.isdir(os.path.expanduser(module.path)) and not is_hub_name(module.path):
            raise ConfigError(
                f"--lora-modules {module.name}={module.path}: there is no such folder; give the one that PEFT's "
                "save_pretrained has written, or a name on the hub"
            )
    if not server.served_model_name:
        # The folder's name is what people want to type; the path as given works too.
        path = Path(engine.model)
        names = ("demo",) if demo else (path.resolve().name, engine.model) if path.is_dir() else (engine.model,)
        if is_gguf(path):
            names = (path.stem, engine.model)
        server = dataclasses.replace(server, served_model_name=tuple(dict.fromkeys(names)))
    return engine, server
