"""What is wrong with the values of options, by themselves or together, said before anything is read or started."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .option import json_object

if TYPE_CHECKING:
    from .config import EngineConfig


def power_of_two(number: int) -> str | None:
    return "it must be a power of two" if number & (number - 1) else None


def rope_scaling(text: str) -> str | None:
    if problem := json_object(text):
        return problem
    if {"rope_type", "type"} & json.loads(text).keys():
        return None
    return 'its "rope_type" is missing, as in \'{"rope_type": "yarn", "factor": 4.0}\''


def kv_events(text: str) -> str | None:
    from .kv_events_settings import problem

    return problem(text)


def speculation(text: str) -> str | None:
    from .speculation import problem

    return problem(text)


def partition(text: str) -> str | None:
    words = text.split(",")
    right = all(word.strip().isdecimal() and int(word) for word in words)
    return None if right else "it must be the number of layers of each stage, such as 12,10,10"


def no_text(text: str) -> str | None:
    return None if text else "it is empty: give it a text, or leave it out"


def no_file(path: str) -> str | None:
    return "it is a file, give a folder" if os.path.isfile(os.path.expanduser(path)) else None


def model(name: str) -> str | None:
    from .model_path import find_model

    try:
        find_model(name)
    except ConfigError as error:
        return str(error)
    return None


def check_stages(config: EngineConfig) -> None:
    size, counts = config.pipeline_parallel_size, config.stage_layers
    if counts and len(counts) != size:
        raise ConfigError(
            f"--pipeline-layer-partition {config.pipeline_layer_partition} is of {len(counts)} stages, and "
            f"--pipeline-parallel-size is {size}: name the layers of as many"
        )


def check_nodes(config: EngineConfig) -> None:
    backend, world, nodes = config.distributed_executor_backend, config.world_size, config.nnodes
    if backend == "uni" and world > 1:
        raise ConfigError(
            f"--distributed-executor-backend uni is for one rank, and {config.divided_by} makes {world}: take mp"
        )
    if backend == "ray" and config.engine_in_process:
        raise ConfigError("--engine-in-process is for ranks of this host: leave it out, or ray")
    if config.node_rank >= nodes:
        raise ConfigError(f"--node-rank {config.node_rank}: --nnodes is {nodes}, and the first node is 0")
    if nodes == 1:
        return
    if backend not in (None, "mp", "external_launcher"):
        raise ConfigError(f"--nnodes {nodes} is for --distributed-executor-backend mp, and it is {backend}: leave "
                          "one of them out")  # fmt: skip
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"--nnodes {nodes} divides one engine, and --data-parallel-size is {config.data_parallel_size}: start "
            "each replica on hosts of its own, and `vserve router` before them"
        )
    if world % nodes:
        raise ConfigError(
            f"--nnodes {nodes}: {world} ranks ({config.divided_by or 'nothing divides the model'}) cannot be dealt "
            "evenly to so many hosts"
        )


def check_events(config: EngineConfig) -> None:
    from .kv_events_settings import settings

    if config.kv_events_config and not config.enable_prefix_caching and settings(config.kv_events_config) is not None:
        raise ConfigError("--kv-events-config: a prefix cache that is off has no events; leave one of them out")


def check_adapters(config: EngineConfig) -> None:
    if (old := config.qlora_adapter_name_or_path) is not None:
        if config.merge_lora not in (None, old):
            raise ConfigError("--merge-lora and --qlora-adapter-name-or-path are one option: leave one out")
        object.__setattr__(config, "merge_lora", old)
    if config.enable_lora and config.merge_lora is not None:
        raise ConfigError("--merge-lora makes one model of two, and --enable-lora serves adapters beside: choose one")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.adapter_slots:
        raise ConfigError(
            f"--max-cpu-loras is {config.max_cpu_loras}: it must be at least --max-loras ({config.adapter_slots}), "
            "whose adapters are kept on the host too"
        )
    if config.merge_lora is not None and config.load_format == "dummy":
        raise ConfigError("--merge-lora has nothing to merge into with --load-format dummy: leave one of them out")


def check_batch(config: EngineConfig) -> None:
    """Here, where both were said: no model has to be read to know that they contradict each other."""
    tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
    if tokens and seqs and tokens < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {seqs}: every running request needs one "
            f"token a step; raise the first to {seqs} or lower the second to {tokens}"
        )


def check_partial_prefills(config: EngineConfig) -> None:
    most, longs = config.max_num_partial_prefills, config.max_long_partial_prefills
    if most and longs and longs > most:
        raise ConfigError(
            f"--max-long-partial-prefills is {longs}: it must be at most --max-num-partial-prefills ({most})"
        )
    threshold = config.long_prefill_token_threshold
    if config.max_model_len and threshold > config.max_model_len:
        raise ConfigError(
            f"--long-prefill-token-threshold is {threshold}: it must be at most --max-model-len "
            f"({config.max_model_len}), no prompt is longer"
        )
    if not config.enable_chunked_prefill and (threshold or longs or (most or 1) > 1):
        name = "long-prefill-token-threshold" if threshold else f"max-{'long' if longs else 'num'}-partial-prefills"
        raise ConfigError(f"--{name} needs chunked prefill: leave out one of it and --no-enable-chunked-prefill")


# vLLM's older option → the two that have taken its place.
_TASKS = {
    "auto": ("auto", "auto"), "generate": ("generate", "auto"), "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"), "classify": ("pooling", "classify"), "score": ("pooling", "classify"),
    "reward": ("pooling", "reward"),
}  # fmt: skip


@dataclass(frozen=True)
class Purpose:
    runner: str = "auto"  # generate: text, and embeddings beside it; pooling: no text; auto: what the model can
    convert: str = "auto"  # what is made of its hidden states; auto and none: what the architecture says

    @property
    def classifies(self) -> bool:
        return self.convert in ("classify", "reward")


ANY = Purpose()


def read_purpose(task: str, runner: str, convert: str) -> Purpose:
    """What the options of these names say. Raises ConfigError where they contradict each other."""
    if task == "transcription":
        raise ConfigError("--task transcription: models here read text only, no audio: use another server for it")
    if task != "auto":
        if (runner, convert) != ("auto", "auto"):
            raise ConfigError(f"--task {task} is an older name of --runner and --convert: leave it out")
        runner, convert = _TASKS[task]
    if runner == "generate" and convert not in ("auto", "none"):
        raise ConfigError(f"--convert {convert} makes a model that generates no text: leave out --runner generate")
    if convert in ("embed", "classify", "reward"):
        runner = "pooling"
    return Purpose(runner, convert)
