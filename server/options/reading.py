"""One reading of options, for flags, environment, YAML and the keywords of `LLM`: what one accepts, all accept."""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
import re
import types
import typing
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from ...engine.options.config import FITTING, EngineConfig
from .config import ServerConfig
from .vllm import vllm_options

# Values as vLLM, or people, spell them.
_VLLM_VALUES = {
    **{("dtype", word): "float16" for word in ("half", "fp16")},
    **{("dtype", word): "float32" for word in ("float", "fp32")},
    ("dtype", "bf16"): "bfloat16",
    ("log_level", "warn"): "warning",
    ("generation_config", "vllm"): "vserve",
    # What a folder holds is seen, and files are read ahead: these ask for no more than that.
    **{("load_format", word): "auto" for word in (
        "gguf", "bitsandbytes", "mistral", "fastsafetensors", "instanttensor", "runai_streamer",
    )},
    **{("tokenizer_mode", word): "auto" for word in ("mistral", "deepseek_v32", "deepseek_v4", "cohere", "kimi_k3")},
}  # fmt: skip
_CARDS = "vserve runs on NVIDIA GPUs and CPUs: choose auto, cuda or cpu"
_FEWER = "its numbers are not written so here: choose fp8, or leave it out"
# Values of vLLM's that nothing here is the same as.
_REFUSED = {
    **{("device", word): _CARDS for word in ("neuron", "openvino", "tpu", "xpu", "hpu")},
    ("load_format", "tensorizer"): "serialised tensors are not read: give a folder with safetensors files",
    **{("load_format", word): "shards of one rank are not read: give the folder that they were made of"
       for word in ("sharded_state", "runai_streamer_sharded")},
    ("tokenizer_mode", "custom"): "vserve loads no code of others: use a folder with a tokenizer.json",
    ("model_impl", "terratorch"): "models of terratorch are not served: choose auto",
    **{("kv_cache_dtype", word): _FEWER for word in (
        "fp8_inc", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "int8_per_token_head", "int4_per_token_head",
        "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
    )},
    **{(option, "draft"): "the model that drafts is named beside the one that serves: --speculative-config"
       for option in ("runner", "task")},
    ("convert", "mm_encoder_only"): "towers of pictures are not served alone: leave it out",
}  # fmt: skip
_NUMBER_WORDS = {("max_model_len", "auto"): FITTING}
_WORDS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


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


def read(name: str, value: Any) -> Any:
    """Text, or a value of YAML or Python, as what the option `name` has; an option of vLLM too.

    Raises ValueError: the value, and what it must be.
    """
    text = value.strip() if isinstance(value, str) else _plain(value)
    if (foreign := vllm_options().get(name)) is not None:
        if foreign.takes_value:
            return _json(text) if isinstance(text, dict | list) else text
        return switch(text)
    spec, kind = options()[name]
    if kind is bool:
        return switch(text)
    if kind is tuple:
        if isinstance(text, dict):
            return (_json(text),)
        if isinstance(text, list | tuple):
            return tuple(_json(word) if isinstance(word, dict) else str(word) for word in text)
        return _words(str(text))
    if kind is str:
        return _json(text) if isinstance(text, dict | list | bool) else _spelled(spec, str(text))
    if (word := _NUMBER_WORDS.get((name, str(text).lower()))) is not None:
        return word
    if isinstance(text, str):
        return NUMBERS[kind](text)
    wanted = numbers.Integral if kind is int else numbers.Real  # NumPy's, too
    if isinstance(text, bool) or not isinstance(text, wanted):
        raise ValueError(f"{value!r}: it must be {'an integer' if kind is int else 'a number'}")
    return kind(text)


def is_json(name: str) -> bool:
    """Whether the option's value is a JSON object, which may be given key by key."""
    foreign = vllm_options().get(name)
    return foreign.is_json if foreign is not None else name in options() and options()[name][0].metadata["is_json"]


def negated(name: str) -> str:
    """The switch that `no_…` turns off; "" where the name is no such form of one."""
    base = name.removeprefix("no_")
    foreign = vllm_options().get(base)
    is_switch = not foreign.takes_value if foreign is not None else base in options() and options()[base][1] is bool
    return base if base != name and is_switch else ""


def switch(value: Any) -> bool:
    """Raises ValueError."""
    if (found := _WORDS.get(str(value).lower())) is None:
        raise ValueError(f"{value!r}: it must be true or false")
    return found


def _words(text: str) -> tuple[str, ...]:
    return (text,) if text[:1] in "{[" else tuple(text.replace(",", " ").split())


def _plain(value: Any) -> Any:
    """A path, or a number of NumPy's, as YAML would have it; whatever else as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _json(value: Any) -> str:
    """Raises ValueError."""

    def of_python(part: Any) -> Any:
        if (found := _plain(part)) is part:
            raise ValueError(f"{value!r}: {part!r} in it is no JSON")
        return found

    try:
        return json.dumps(value, default=of_python)
    except TypeError as error:  # of keys
        raise ValueError(f"{value!r:.60}: {error}") from None


def _spelled(spec: dataclasses.Field[Any], text: str) -> str:
    """By vserve's name for it where it was given by vLLM's or torch's; choices in either case. Raises ValueError."""
    choices = spec.metadata["choices"]
    word = text.lower().removeprefix("torch.") if choices else text
    if (problem := _REFUSED.get((spec.name, word))) is not None:
        raise ValueError(f"{text!r}: {problem}")
    word = _VLLM_VALUES.get((spec.name, word), word)
    return word if not choices or word in choices else text


def _integer(text: str) -> int:
    """32768, or as vLLM has it, 32K = 32 × 1024 and 32k = 32,000; so for M, G, T."""
    found = re.fullmatch(r"([+-]?\d+|\d+\.\d+)(?:([kmgt])|([KMGT])(?:iB)?)?", text)
    if found is None:
        raise ValueError(f"{text!r}: it must be an integer such as 4096 or 4K")
    digits, thousands, powers = found.groups()
    factor = 1000 ** (1 + "kmgt".index(thousands)) if thousands else 1024 ** (1 + "KMGT".index(powers)) if powers else 1
    number = Fraction(digits) * factor
    if number.denominator != 1:
        raise ValueError(f"{text!r}: it must be an integer")
    return int(number)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r}: it must be a number such as 0.9") from None


NUMBERS: dict[type, Callable[[str], float]] = {int: _integer, float: _number}
