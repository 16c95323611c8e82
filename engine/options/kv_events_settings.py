"""What --kv-events-config asks for: read, and refused where it cannot work."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from .extras import how_to_install

DEFAULTS: dict[str, Any] = {
    "enable_kv_cache_events": False, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "bind": None,
    "replay_endpoint": None, "buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": "",
    "event_format": "map", "data_parallel_rank": 0,
}  # fmt: skip
_CHOICES = {"publisher": ("zmq", "null"), "event_format": ("map", "array")}
_COUNTS = ("buffer_steps", "hwm", "max_queue_size", "data_parallel_rank")


def settings(text: str | None) -> dict[str, Any] | None:
    """Those of --kv-events-config over the defaults; None where nothing is to be published. It has been checked."""
    named = json.loads(text or "{}")
    given = DEFAULTS | named
    if given["bind"] is None:  # as vLLM decides, whose default would be open to the network
        given["bind"] = "endpoint" not in named or "*" in given["endpoint"] or "::" in given["endpoint"]
    return given if given["enable_kv_cache_events"] and given["publisher"] == "zmq" else None


def problem(text: str) -> str | None:
    """What is wrong with the option."""
    try:
        given = json.loads(text)
    except ValueError as error:
        return f"it is no JSON ({error})"
    if not isinstance(given, dict):
        return "it must be a JSON object"
    for name, value in given.items():
        if name not in DEFAULTS:
            return f"there is no {name!r}; there are {', '.join(DEFAULTS)}"
        if name == "enable_kv_cache_events":
            fine, wanted = isinstance(value, bool), "true or false"
        elif name == "bind":
            fine, wanted = value is None or isinstance(value, bool), "true, false or null"
        elif name in _CHOICES:
            fine, wanted = value in _CHOICES[name], " or ".join(_CHOICES[name])
        elif name in _COUNTS:
            fine, wanted = type(value) is int and value >= 0, "a number, 0 or more"
        elif name == "topic":
            fine, wanted = isinstance(value, str), "a text"
        else:
            fine, wanted = _is_endpoint(value) or (value is None and name == "replay_endpoint"), "like tcp://*:5557"
        if not fine:
            return f"its {name!r} is {json.dumps(value):.60}: it must be {wanted}"
    if settings(text) is not None and importlib.util.find_spec("zmq") is None:
        return f"publishing needs pyzmq: {how_to_install('kv-events')}"
    return None


def _is_endpoint(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    kind, _, rest = value.partition("://")
    host, _, port = rest.rpartition(":")
    return (kind in ("ipc", "inproc") and rest != "") or (kind == "tcp" and host != "" and port.isdecimal())


def of_rank(text: str | None, rank: int) -> str | None:
    """The option for one of several engines: each publishes at a port of its own, the next ones."""
    if text is None or settings(text) is None or not rank:
        return text
    given = json.loads(text)
    if "endpoint" not in given:
        given |= {"endpoint": DEFAULTS["endpoint"], "bind": given.get("bind") is not False}
    for name in ("endpoint", "replay_endpoint"):
        if value := given.get(name):
            start, colon, port = value.rpartition(":")
            shifted = f"{start}{colon}{int(port) + rank}" if value.startswith("tcp://") else f"{value}_dp{rank}"
            given[name] = shifted
    return json.dumps(given | {"data_parallel_rank": given.get("data_parallel_rank", 0) + rank})
