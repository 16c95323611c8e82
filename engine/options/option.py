"""How an option is declared: a field of a dataclass with its default, its help, and what values it takes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Bounds:
    """Of a number. `zero`: what 0 means; `unit`, `note`: what an error message says beside them."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    zero: str = ""
    unit: str = ""
    note: str = ""

    def problem(self, value: float) -> str | None:
        """What is wrong with a value."""
        least, most, above = self.at_least, self.at_most, self.above
        # `value < least` would let NaN pass
        if (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most):
            return None
        low = f"0 ({self.zero})" if self.zero else least
        if above is not None:
            bounds = f"above {above}" + ("" if most is None else f" and at most {most}")
        elif most is not None:
            bounds = f"from {low} to {most}"
        else:
            bounds = f"{low} or more" if least == 0 else f"at least {low}"
        return f"it must be {bounds}{self.unit and f' {self.unit}'}{self.note and f'; {self.note}'}"


POSITIVE = Bounds(1)
PORT = Bounds(1, 65535)
FITTING = -1  # of --max-model-len: what fits
UNLIMITED = Bounds(0, zero="no limit")
SECONDS = Bounds(0.1, 86_400, unit="seconds")
SECONDS_OR_NONE = Bounds(0, 86_400, zero="no limit", unit="seconds")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), bounds: Bounds | None = None,
    problem: Callable[[Any], str | None] | None = None, group: str = "engine", secret: bool = False,
    is_json: bool = False, short: str = "",
) -> Any:  # fmt: skip
    """A dataclass field that is also a command-line flag, `--field-name`, with this help text.

    `problem`: what is wrong with a value beside its bounds, in words. Secrets stay hidden. `is_json`: the text of a
    JSON object, which may also be given key by key, `--field-name.key value`. `short`: another flag, with one hyphen.
    """
    metadata = {
        "help": help, "choices": choices, "bounds": bounds, "problem": problem, "group": group, "secret": secret,
        "is_json": is_json, "short": short,
    }  # fmt: skip
    return field(default=default, repr=not secret, metadata=metadata)


def check_options(config: Any) -> None:
    """Raises ConfigError for the first option of a dataclass that is not as it was declared; None is always allowed."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if value is not None and (problem := _problem(spec.metadata, value)):
            shown = "" if spec.metadata["secret"] else f" is {value!r}"
            raise ConfigError(f"{flag(spec.name)}{shown}: {problem}")


def _problem(declared: Mapping[str, Any], value: Any) -> str | None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # bytes of a command line that are no text: files' names may have any
            return "it is no UTF-8: rename the file or folder, or give another text"
    choices, bounds, problem = declared["choices"], declared["bounds"], declared["problem"]
    if choices and value not in choices:
        return f"choose one of {', '.join(choices)}"
    if bounds is not None and (found := bounds.problem(value)):
        return str(found)
    return problem(value) if problem is not None else None


def json_object(text: str) -> str | None:
    """What is wrong with the text of a JSON object."""
    try:
        return None if isinstance(json.loads(text), dict) else "it must be a JSON object"
    except ValueError as error:
        return f"it is no JSON ({error}): give an object such as '{{\"rope_theta\": 1000000}}'"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
