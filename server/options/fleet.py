"""The names that vLLM has for engines that are spread over several servers: how many of them are this server's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ...engine.errors import ConfigError
from ...engine.options import kv_events_settings

SIZE, LOCAL, RANK = "data_parallel_size", "data_parallel_size_local", "data_parallel_rank"
EXTERNAL, HYBRID = "data_parallel_external_lb", "data_parallel_hybrid_lb"
START, EVENTS = "data_parallel_start_rank", "kv_events_config"


def with_fleet(merged: dict[str, Any]) -> dict[str, Any]:
    """data_parallel_size as the engines that run here, where those say so; they stay, to be told of. KV events have the
    rank of this server's first engine. Of Given, by name. Raises ConfigError."""
    here = _engines_here(merged)
    if here is None:
        return merged
    given = merged.get(SIZE) or merged.get(LOCAL) or merged[RANK]
    return merged | {SIZE: dataclasses.replace(given, value=here)} | _events(merged)


def _events(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Of engines that lie on one host each has a port of its own, as vLLM's has: whoever listens counts by ranks."""
    first = _number(merged, RANK, 0) or _number(merged, START, 0)
    if first is None or EVENTS not in merged:
        return {}
    value = merged[EVENTS].value
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    if kv_events_settings.problem(text) is not None:
        return {}  # whoever checks the options says it
    return {EVENTS: dataclasses.replace(merged[EVENTS], value=kv_events_settings.of_rank(text, first))}


def _engines_here(merged: Mapping[str, Any]) -> int | None:
    """None: as data_parallel_size says."""
    rank, local = (_number(merged, name, least) for name, least in ((RANK, 0), (LOCAL, 1)))
    size = merged[SIZE].value if SIZE in merged else None
    if rank is not None:
        if size is None or rank >= size:
            raise ConfigError(
                f"{merged[RANK].where} is {rank}, of {'1 engine' if size in (None, 1) else f'{size} engines'}: say "
                "with --data-parallel-size how many there are, each a server of its own, or leave it out"
            )
        if local not in (None, 1):
            raise ConfigError(
                f"{merged[LOCAL].where} is {local}: a server that is one of several, as {merged[RANK].where} says, has "
                "one engine: leave one of them out"
            )
        return 1
    if EXTERNAL in merged and merged[EXTERNAL].value is True:
        raise ConfigError(f"{merged[EXTERNAL].where}: say with --data-parallel-rank which of them this server is")
    if local is None or size is None or local == size:
        return local
    if local < size and HYBRID in merged and merged[HYBRID].value is True:
        return local
    raise ConfigError(
        f"{merged[LOCAL].where} is {local}, and {merged[SIZE].where} is {size}: a server's engines are all on its own "
        f"host. Start one on each host, with --data-parallel-size {local} here, and `vserve router` before them"
    )


def _number(merged: Mapping[str, Any], name: str, least: int) -> int | None:
    if name not in merged:
        return None
    text = str(merged[name].value)
    if not (text.isascii() and text.isdigit() and least <= int(text) < 10**6):
        raise ConfigError(f"{merged[name].where} is {text!r:.40}: it must be an integer of at least {least}")
    return int(text)
