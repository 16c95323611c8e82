"""What was given, where it is from, and what files and presets add to it: for the command line and for `LLM`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError
from .fleet import with_fleet
from .hint import did_you_mean
from .parts import put
from .reading import is_json, negated, options, read
from .speculation import with_speculation
from .vllm import vllm_options

PRESETS = Path(__file__).parents[2] / "configs" / "presets"
# Beside the options themselves: names that flags, environment, file and keywords may use.
META = ("config", "performance_mode")
VLLM_MODES = {"balanced": "", "interactivity": "latency"}  # vLLM's names of modes, as presets; "": the defaults
# Options of vLLM that say the same as one of ours, and what our value is.
_SAME: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: ("max_cudagraph_capture_size", lambda sizes: max(_numbers(sizes)))
       for name in ("cudagraph_capture_sizes", "cuda_graph_sizes")},
    "disable_uvicorn_access_log": ("access_log", lambda off: not off),
    "sse_keep_alive_interval": ("sse_ping_interval", str),
}  # fmt: skip


@dataclass(frozen=True)
class Given:
    value: Any
    source: str  # flag (or keyword), environment, file, preset
    where: str  # the flag, the keyword, the variable, the file, or the mode


def performance_modes() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def with_files(above: dict[str, Given]) -> dict[str, Given]:
    """What `above` says, and below it what the file says that it names, and then the preset. Raises ConfigError."""
    if "config" in above:
        above = _file(above["config"]) | above
    if "performance_mode" in above:
        above = _preset(above["performance_mode"]) | above
    return with_fleet(with_speculation(_with_same({name: one for name, one in above.items() if name not in META})))


def _with_same(merged: dict[str, Given]) -> dict[str, Given]:
    """What vLLM's names say put under ours; they stay, to be told of. Raises ConfigError."""
    for name, (ours, convert) in _SAME.items():
        if name in merged and ours in merged:
            raise ConfigError(f"{merged[name].where} and {merged[ours].where} are one option: leave one out")
        if name in merged:
            value = value_of(ours, convert(merged[name].value), merged[name].where)
            merged = merged | {ours: replace(merged[name], value=value)}
    return merged


def _numbers(sizes: Any) -> list[int]:
    """Of "1 2 4", "[1, 2, 4]" or several words. Raises ConfigError."""
    words = re.findall(r"[^\s,\[\]'\"]+", str(sizes))
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(f"the sizes of CUDA graphs are {sizes!r:.60}: give numbers, such as 1 2 4 8")
    return [int(word) for word in words]


def judge(merged: dict[str, Given]) -> list[str]:
    """A line for each of vLLM's options that changes nothing. Raises ConfigError for what is not here."""
    lines = []
    for name, one in merged.items():
        if (option := vllm_options().get(name)) is not None:
            where = f"{one.where}: {option.name}" if one.source in ("file", "preset") else one.where
            lines.append(option.judge(one.value, where))
    return [line for line in lines if line is not None]


def _file(given: Given) -> dict[str, Given]:
    path = Path(given.value).expanduser()
    values = read_yaml(path, f"{given.where} {given.value!r}")
    return {name: Given(value, "file", str(path)) for name, value in values.items()}


def _preset(given: Given) -> dict[str, Given]:
    mode = VLLM_MODES.get(given.value, given.value)
    if not mode:
        return {}
    modes = performance_modes()
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
    for key, value in _nested(content, what).items():
        given = _name(str(key))
        name = negated(given) or given
        if name.replace("_", "-") not in known and name not in vllm_options():
            raise ConfigError(f"{what}: unknown option {str(key)!r}{did_you_mean(name.replace('_', '-'), known)}")
        if name in values:
            raise ConfigError(f"{what} sets {name} twice: leave one out")
        if value is not None:  # nothing after the colon: the default
            read_value = value_of(name, value, f"{what}: {key}")
            values[name] = read_value if name == given else not read_value
    return values


def _nested(content: dict[Any, Any], what: str) -> dict[Any, Any]:
    """`hf-overrides.rope_theta: 1` as `hf-overrides: {rope_theta: 1}`. Raises ConfigError."""
    parts = [key for key in content if isinstance(key, str) and is_json(_name(key.partition(".")[0])) and "." in key]
    whole = {
        key: dict(value) if isinstance(value, dict) else value for key, value in content.items() if key not in parts
    }
    for key in parts:
        base, _, path = key.partition(".")
        tree = whole.setdefault(base, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{what} sets {base} twice: leave one out")
        try:
            put(tree, path, content[key])
        except ValueError as error:
            raise ConfigError(f"{what}: {key}: {error}") from None
    return whole


def _name(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def value_of(name: str, value: Any, where: str) -> Any:
    """Raises ConfigError."""
    if name in META:
        return str(value)
    try:
        return read(name, value)
    except ValueError as error:
        raise ConfigError(f"{where} is {error}") from None
