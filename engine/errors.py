"""What the engine raises for what it is given, and for what it finds wrong with itself."""

from __future__ import annotations

import os
from pathlib import Path


class ConfigError(ValueError):
    """A setting that cannot work. The message names the value, the limit and the remedy in one line."""


class ModelError(ConfigError):
    """This model cannot be served. The message is one line: what is wrong, and what to do."""


class InvariantError(AssertionError):
    """The books do not balance: a defect of vserve's, whatever its clients did."""


def require(holds: bool, what: str) -> None:
    """Raises InvariantError, with `what`, unless it holds: `assert` would say nothing under `python -O`."""
    if not holds:
        raise InvariantError(what)


def unreadable(file: Path) -> ModelError:
    return ModelError(
        f"{file} may not be read by the user with the id {os.geteuid()}, who runs vserve: permit it (chmod)"
    )


def absent(file: Path) -> ModelError:
    """Of a file that its folder has by name: a link of the hub's cache outlives what it points to."""
    if file.is_symlink():
        return ModelError(f"{file} is a link to {file.readlink()}, which is not there: download the model again")
    return ModelError(f"{file} is not there: download the model again")


def and_more(names: list[str]) -> str:
    """How many there are beside the first; "": none."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def one_line(error: BaseException) -> str:
    """Its message in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]
