"""The options of `LLM(...)`: keywords named as the flags of `vserve serve`, with underscores."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ...engine.errors import ConfigError
from ...engine.options.config import EngineConfig, flag
from .config import ServerConfig
from .given import META, Given, judge, value_of, with_files
from .hint import did_you_mean
from .media import MediaConfig
from .reading import negated, options
from .text import TextConfig
from .vllm import vllm_options

# What has the options of `LLM`.
CONFIGS = (EngineConfig, TextConfig, MediaConfig)


def from_keywords(keywords: dict[str, Any]) -> tuple[EngineConfig, ServerConfig, list[str]]:
    """The two configurations, and a line for each keyword that changes nothing. None means the default.

    Raises TypeError for a keyword that does not exist, ConfigError for what cannot work.
    """
    engine = {spec.name for spec in dataclasses.fields(EngineConfig)}
    text = {spec.name for config in CONFIGS[1:] for spec in dataclasses.fields(config)}
    given: dict[str, Given] = {}
    for keyword, value in keywords.items():
        name = negated(keyword) or keyword
        if name not in options() and name not in vllm_options() and name not in META:
            raise TypeError(f"LLM has no option {name!r}{did_you_mean(name, sorted(engine | text))}")
        if value is not None:
            if name in given:
                raise ConfigError(f"{name} and {keyword} are one option: leave one out")
            found = value_of(name, value, keyword)
            given[name] = Given(found if name == keyword else not found, "flag", keyword)
    merged = with_files(given)
    lines = judge(merged)
    own = {name: one.value for name, one in merged.items() if name in options()}
    lines += [f"{name} changes nothing: it is an option of the server" for name in own if name not in engine | text]
    parts = [{k: v for k, v in own.items() if (k in engine) == of_engine} for of_engine in (True, False)]
    return EngineConfig(**parts[0]), ServerConfig(**parts[1]), lines


def in_keywords(text: str) -> str:
    """A message that names flags, as it is said to those who have keywords."""
    names = {flag(name): name for name in (*options(), *META, *vllm_options())}
    return re.sub(r"--[a-z][a-z0-9-]*", lambda found: names.get(found[0], found[0]), text)
