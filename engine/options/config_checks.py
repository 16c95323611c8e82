"""Options of the engine that contradict each other, said before anything is read or started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from .config import EngineConfig


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
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"--max-cpu-loras is {config.max_cpu_loras}: it must be at least --max-loras ({config.max_loras}), whose "
            "adapters are kept on the host too"
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
