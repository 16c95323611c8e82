"""The command that a plan advises: the server's, with what the plan was told of the engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...engine.options.config import FITTING, flag

if TYPE_CHECKING:
    from ...engine.planning.setup import Setup
    from ..options.given import Given

ENGINE = (
    "model", "revision", "max_model_len", "dtype", "gpu_memory_utilization", "kv_cache_memory_bytes", "quantization",
    "kv_cache_dtype", "calculate_kv_scales", "max_num_batched_tokens", "max_num_seqs", "max_mixed_tokens", "block_size",
    "backlog_steps", "enable_chunked_prefill", "max_num_partial_prefills", "max_long_partial_prefills",
    "long_prefill_token_threshold", "speculative_config", "tensor_parallel_size", "pipeline_parallel_size",
    "pipeline_layer_partition", "enable_expert_parallel",
)  # fmt: skip
DIVIDE = ("tensor_parallel_size", "pipeline_parallel_size")
_APART = ("model", "speculative_config", *DIVIDE)  # options that are not passed on as they were given
_ASSUMED = ("rejection_sample_method", "acceptance_method", "synthetic_acceptance_rates", "synthetic_acceptance_length")


def advised(given: Mapping[str, Given], setup: Setup, replicas: int) -> str:
    """For a shell. given: the options by name, those that were not given left out."""
    words = ["vserve"]
    if "model" in given and _is_said(given["model"]):
        words.append(given["model"].value)
    # Files and presets are named, not copied: they may have options that are the server's alone.
    places = {one.source: one.where for one in given.values()}  # there is one file, and one preset
    for source, name in (("file", "config"), ("preset", "performance_mode")):
        if source in places:
            words += _option(name, places[source])
    for name in ENGINE:
        if name in given and name not in _APART and _is_said(given[name]) and _counts(name, setup):
            words += _option(name, given[name].value)
    if "speculative_config" in given:
        words += _drafts(given["speculative_config"], "file" in places)
    sizes = {"tensor_parallel_size": ("-tp", setup.ranks), "pipeline_parallel_size": ("-pp", len(setup.stages)),
             "data_parallel_size": ("-dp", replicas)}  # fmt: skip
    for name, (short, size) in sizes.items():
        if size > 1 or (name in given and given[name].source != "flag"):  # what a file says of it must not stay
            words += [short, str(size)]
    return shlex.join(words)


def _is_said(one: Given) -> bool:
    """By itself, where the server may be started without it: another host has other variables."""
    return one.source in ("flag", "environment")


def _counts(name: str, setup: Setup) -> bool:
    """Whether the option says something of engines that are divided so."""
    needs = {"enable_expert_parallel": setup.ranks, "pipeline_layer_partition": len(setup.stages)}
    return needs.get(name, 2) > 1


def _option(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    text = "auto" if name == "max_model_len" and value == FITTING else str(value)
    return [f"{flag(name)}={text}"] if text.startswith("-") else [flag(name), text]


def _drafts(one: Given, beside_file: bool) -> list[str]:
    """As they were asked for, without how many are assumed to hold: a server would let as many hold, right or not.
    Always said, and whole where a file may have them too: only the whole option comes before what that says."""
    asked = {key: value for key, value in json.loads(one.value).items() if key.replace("-", "_") not in _ASSUMED}
    if not asked.keys() - {"method"} and one.source == "flag" and not beside_file:
        return _option("spec_method", asked.get("method") or "ngram")
    return _option("speculative_config", json.dumps(asked))
