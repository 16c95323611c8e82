"""what a model is: its class, size, context, quantisation, chat format, defaults; its weights are not read"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError, ModelError
from ...engine.files.gguf_file import read_gguf
from ...engine.files.model_file import read_config
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import find_model, is_gguf
from ..parsers import formats
from ..text.files import read_tokenizer
from ..text.gguf_tokenizer import read_gguf_tokenizer
from .download_line import size
from .flags import add_flags, read_flags
from .model_finding import from_hub_cache
from .terminal import printable

EXAMPLES = ("vserve show Qwen/Qwen3-0.6B", "vserve show llama3.2:1b")
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_HEADER = 100 << 20  # bytes of a file's table of tensors, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, only=("model", "revision", "download_dir"))


def run(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 where its files are broken, 2 where it is not here."""
    try:
        engine, _ = read_flags(arguments)
        folder = find_model(engine.model) or from_hub_cache(engine)
        if folder is None:
            print(f"vserve: {engine.model} is not on this machine: `vserve pull {engine.model}` downloads it, "
                  f"`vserve doctor {engine.model}` says whether it fits", file=sys.stderr)  # fmt: skip
            return 2
        rows = list(facts(folder))
    except ModelError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    for name, text in rows:
        print(f"{name:<14} {printable(text)}")
    return 0


def facts(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, value) of each. Raises ModelError."""
    config = read_config(folder)
    text = config.get("text_config") or config.get("llm_config") or config  # of a model of pictures
    yield "path", str(folder)
    yield "class", ", ".join(config.get("architectures") or ("?",)) + f" ({config.get('model_type', '?')})"
    files = [folder] if is_gguf(folder) else sorted(folder.glob("*.safetensors"))
    if files:
        yield (
            "weights",
            f"{size(sum(file.stat().st_size for file in files))} in {len(files)} file{'s'[: len(files) > 1]}",
        )
    quantised = config.get("quantization_config") or {}
    if (numbers := _parameters(files)) and not quantised:
        yield "parameters", f"{numbers / 1e9:.2f} billion" if numbers >= 1e8 else f"{numbers / 1e6:.1f} million"
    layers, width = text.get("num_hidden_layers"), text.get("hidden_size")
    if layers and width:
        experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts")
        yield "layers", f"{layers} of width {width}" + (f", {experts} experts" if experts else "")
    if length := text.get("max_position_embeddings"):
        yield "context", f"{length} tokens"
    if quantised:
        yield "quantization", str(quantised.get("quant_method", "?"))
    yield from _chat(folder, config.get("model_type"))
    if defaults := _defaults(folder):
        yield "defaults", ", ".join(f"{name} {value}" for name, value in defaults.items())


def _chat(folder: Path, model_type: str | None) -> Iterator[tuple[str, str]]:
    try:
        files = read_gguf_tokenizer(read_gguf(folder)) if is_gguf(folder) else read_tokenizer(folder)
    except (ModelError, ConfigError, OSError, ValueError) as error:
        yield "tokenizer", f"cannot be read: {error}"
        return
    if files is None:
        return
    yield "vocabulary", f"{files.core.get_vocab_size()} tokens"
    if not files.templates:
        yield "chat template", "none: it continues texts (`vserve complete`)"
        return
    template = files.templates.get("default") or next(iter(files.templates.values()))
    found = formats.choose(template, files.templates.get("tool_use", template), model_type, "auto", "auto")
    yield "tool calls", found.tools.name if found.tools is not None else "no format that is known"
    yield "reasoning", found.reasoning.name if found.reasoning is not None else "none"


def _parameters(files: list[Path]) -> int:
    """Of safetensors, by their headers alone; 0 where there are none."""
    total = 0
    for file in files:
        if file.suffix != ".safetensors":
            return 0
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= _HEADER:
                raise ModelError(f"{file} is no safetensors file: download it again")
            try:
                header: dict[str, Any] = json.loads(stream.read(length))
                total += sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
            except (ValueError, LookupError, TypeError):
                raise ModelError(f"{file} has no table of tensors: download it again") from None
    return total


def _defaults(folder: Path) -> dict[str, Any]:
    try:
        given = json.loads((folder / "generation_config.json").read_text())
        return {name: given[name] for name in _DEFAULTS if given.get(name) is not None}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
