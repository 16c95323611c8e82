"""The options of `LLM` as a value of its own, and as flags of a program."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ...engine.errors import ConfigError
from ...engine.options.config import flag
from ..options.keywords import CONFIGS, from_keywords, in_keywords
from ..options.reading import options


class EngineArgs:
    """Keywords of `LLM`, which `LLM.from_engine_args` takes. Raises ConfigError and TypeError as that does."""

    def __init__(self, model: str, **options: Any) -> None:
        self.options: dict[str, Any] = {"model": model, **options}
        known = {name: value for name, value in self.options.items() if name not in _OF_LLM}
        try:
            from_keywords(known)
        except ConfigError as error:
            raise ConfigError(in_keywords(str(error))) from None

    def __getattr__(self, name: str) -> Any:
        """An option that was given; None: it has its default."""
        if name in options():
            return self.__dict__["options"].get(name)
        raise AttributeError(f"EngineArgs has no option {name}")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds every option of `LLM` as a flag: `LLM(**vars(parser.parse_args()))`, where the program has no others."""
        group = parser.add_argument_group("vserve", "options of LLM, as `vserve serve --help` explains them")
        for config in CONFIGS:
            for spec in dataclasses.fields(config):
                kind = options()[spec.name][1]
                told: dict[str, Any] = {"dest": spec.name, "default": None, "help": argparse.SUPPRESS}
                if kind is bool:
                    told["action"] = argparse.BooleanOptionalAction
                elif kind is tuple:
                    told["nargs"] = "+"
                group.add_argument(flag(spec.name), **told)
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> EngineArgs:
        """Of the flags that `add_cli_args` added; others of the program are left alone."""
        known = {spec.name for config in CONFIGS for spec in dataclasses.fields(config)}
        return cls(**{name: value for name, value in vars(arguments).items() if name in known and value is not None})


_OF_LLM = ("hf_token", "use_tqdm_on_load", "disable_log_stats")  # no options of the engine's
