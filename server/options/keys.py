"""The file of --api-key-file: a key a line, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...engine.errors import ConfigError

_LIMITS = ("requests-per-minute", "tokens-per-minute", "max-open-requests")


@dataclass(frozen=True)
class KeyLine:
    key: str
    name: str  # in the log
    requests_per_minute: int | None  # None: as the options say, 0: no limit
    tokens_per_minute: int | None
    max_open_requests: int | None


def read_key_file(path: str, option: str) -> list[KeyLine]:
    """`KEY name=ada requests-per-minute=60 tokens-per-minute=100000`, all but the key optional; # begins a comment.
    Raises ConfigError, which names the line and never a key."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path!r} cannot be read ({error}): give a text file with a key a line") from None
    found = [
        _line(line.split(), f"{Path(path).name}:{number}", f"{option} {path!r}, line {number},")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not found:
        raise ConfigError(f"{option} {path!r} holds no key: write one a line, or leave the option out")
    return found


def _line(words: list[str], place: str, where: str) -> KeyLine:
    key, *settings = words
    given: dict[str, str] = {}
    for number, setting in enumerate(settings, 2):
        name, equals, value = setting.partition("=")
        name = name.replace("_", "-")
        if not equals or name not in ("name", *_LIMITS) or name in given:
            # Not the word itself: it may be the end of a key that has a space in it.
            raise ConfigError(
                f"{where} has as word {number} what is no setting: write KEY name=… {'=… '.join(_LIMITS)}=…"
            )
        given[name] = value
    for name in _LIMITS:
        if name in given and not (given[name].isascii() and given[name].isdigit() and len(given[name]) < 16):
            raise ConfigError(f"{where} has {name}={given[name]}: it must be a whole number; 0: no limit")
    requests, tokens, opened = (int(given[name]) if name in given else None for name in _LIMITS)
    return KeyLine(key, given.get("name") or place, requests, tokens, opened)
