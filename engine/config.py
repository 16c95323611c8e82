"""Every option of the engine, declared, defaulted and validated in one place. Flags and /server_info derive from it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot work. The message names the value, the limit and the remedy in one line."""


def option(
    default: Any, help: str, *, choices: tuple[str, ...] | None = None, group: str = "engine", secret: bool = False
) -> Any:
    """A dataclass field that is also a command-line flag, `--field-name`, with this help text. Secrets stay hidden."""
    metadata = {"help": help, "choices": choices, "group": group, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """What the user asked for; None and "auto" are filled in by `resolve` once model and device are known."""

    model: str = option("", "folder of a Hugging Face model, or its name on the hub", group="model")
    revision: str | None = option(None, "branch, tag or commit of a model taken from the hub", group="model")
    dtype: str = option(
        "auto",
        "of weights and activations; auto: the checkpoint's on a GPU, float32 on the CPU",
        choices=("auto", "bfloat16", "float16", "float32"),
        group="model",
    )
    load_format: str = option(
        "auto",
        "auto: safetensors; dummy: random weights from config.json alone (benchmarks)",
        choices=("auto", "safetensors", "dummy"),
        group="model",
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens (default: the model's, or what fits the memory)", group="model"
    )
    seed: int = option(0, "seeds dummy weights and requests that bring no seed of their own", group="model")
    device: str = option("auto", "where the model runs", choices=("auto", "cuda", "cpu"))
    cpu_threads: int | None = option(None, "threads of the engine when it runs on the CPU (default: cores - 1)")
    block_size: int = option(16, "tokens in a block of the KV cache", group="cache")
    gpu_memory_utilization: float = option(0.9, "share of the card's memory that vserve may use, 0 to 1", group="cache")
    kv_cache_memory_bytes: int | None = option(
        None, "size of the KV cache in bytes (default: what is left on a GPU, 1 GiB on the CPU)", group="cache"
    )
    num_gpu_blocks_override: int | None = option(None, "number of blocks of the KV cache, whatever fits", group="cache")
    enable_prefix_caching: bool = option(True, "reuse the cache blocks of equal prefixes", group="cache")
    max_num_batched_tokens: int | None = option(
        None,
        "tokens computed in one step (default: 8192 on a card of 70 GB, 2048 on less, 512 on the CPU)",
        group="scheduler",
    )
    max_mixed_tokens: int | None = option(
        None,
        "tokens computed in a step that also decodes, 0: as in any other (default: 1024 on a GPU, 0 on the CPU)",
        group="scheduler",
    )
    backlog_steps: int | None = option(
        None,
        "steps in which a long queue of prompts should be worked off; fewer make larger steps: faster, but others wait "
        "longer for their next token (default: 32, offline 1)",
        group="scheduler",
    )
    max_num_seqs: int | None = option(
        None,
        "requests running at once (default: 1024 on a card of 70 GB, 256 on less, 16 on the CPU)",
        group="scheduler",
    )
    enable_chunked_prefill: bool = option(True, "split long prompts over several steps", group="scheduler")
    scheduling_policy: str = option(
        "fcfs",
        "who runs first: by arrival, or by the request's priority",
        choices=("fcfs", "priority"),
        group="scheduler",
    )
    enforce_eager: bool = option(False, "never use CUDA graphs")
    max_cudagraph_capture_size: int = option(512, "largest decode batch that gets a CUDA graph")
    max_logprobs: int = option(20, "most log-probabilities a request may ask for at a position")
    engine_in_process: bool = option(False, "run the engine loop inside the API process (tests, very small models)")

    def __post_init__(self) -> None:
        for name in ("max_model_len", "cpu_threads", "kv_cache_memory_bytes", "num_gpu_blocks_override",
                     "max_num_batched_tokens", "max_num_seqs", "backlog_steps"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} is {value}: it must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}: it is a share, above 0 and at most 1"
            )
        if self.block_size < 1 or self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ConfigError(f"--block-size is {self.block_size}: it must be a power of two from 1 to 256")
        if self.max_cudagraph_capture_size < 1:
            raise ConfigError(
                f"--max-cudagraph-capture-size is {self.max_cudagraph_capture_size}: it must be at least 1 "
                f"(--enforce-eager turns graphs off)"
            )
        if self.max_mixed_tokens is not None and self.max_mixed_tokens < 0:
            raise ConfigError(f"--max-mixed-tokens is {self.max_mixed_tokens}: it must be 0 (no limit) or more")
        if self.max_logprobs < 0:
            raise ConfigError(f"--max-logprobs is {self.max_logprobs}: it must be 0 or more")
        for spec in dataclasses.fields(self):
            choices = spec.metadata["choices"]
            if choices and getattr(self, spec.name) not in choices:
                raise ConfigError(
                    f"{flag(spec.name)} is {getattr(self, spec.name)!r}: choose one of {', '.join(choices)}"
                )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# So few decodes do not cut the chunk of a prompt short: it would leave a few tokens of a thousand for another step, and
# if the next prompt fills that one, the first has to wait for twice as long.
FEW_DECODES = 16
# Times max_mixed_tokens, when many prompts wait: larger products are no faster, and those who decode wait longer.
LARGE_CHUNKS = (2, 4)
BACKLOG_STEPS = 32  # in which a long queue of prompts should be worked off


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler and the cache need: no None left."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_mixed_tokens: int = 0  # of a step in which some request decodes; 0 = max_num_batched_tokens
    # Sorted; instead of max_mixed_tokens as long as that many tokens wait for each of backlog_steps.
    large_mixed_tokens: tuple[int, ...] = ()
    backlog_steps: int = BACKLOG_STEPS
    block_size: int = 16
    num_blocks: int = 1024  # the null block included
    num_groups: int = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    depth: int = 1  # steps in flight


def default_limits(device: str, memory_bytes: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) by device; `memory_bytes` is the card's."""
    if device == "cpu":
        return 512, 16
    return (8192, 1024) if memory_bytes >= 70e9 else (2048, 256)


def resolve_limits(config: EngineConfig, device: str, memory_bytes: int) -> tuple[int, int, str | None]:
    """Batched tokens and sequences that agree: every running request must be able to decode in each step.

    Returns (max_num_batched_tokens, max_num_seqs, a notice or None). Raises ConfigError when two explicit settings
    contradict each other.
    """
    tokens, seqs = default_limits(device, memory_bytes)
    tokens = config.max_num_batched_tokens or tokens
    seqs = config.max_num_seqs or seqs
    if seqs <= tokens:
        return tokens, seqs, None
    if config.max_num_batched_tokens and config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is below --max-num-seqs {seqs}: every running request needs one token "
            f"a step; raise the first to {seqs} or lower the second to {tokens}"
        )
    if config.max_num_seqs:
        return seqs, seqs, f"max_num_batched_tokens raised to {seqs}, the value of --max-num-seqs"
    return tokens, tokens, f"max_num_seqs lowered to {tokens}, the value of --max-num-batched-tokens"


def resolve_max_mixed_tokens(config: EngineConfig, device: str, max_num_batched_tokens: int) -> int:
    """Without chunked prefill a prompt needs a whole step, whoever decodes beside it."""
    if not config.enable_chunked_prefill:
        return 0
    if config.max_mixed_tokens is not None:
        return config.max_mixed_tokens
    return 0 if device == "cpu" else min(1024, max_num_batched_tokens)


def large_mixed_tokens(
    max_mixed_tokens: int, max_num_batched_tokens: int, even: Callable[[int], int]
) -> tuple[int, ...]:
    """Of mixed steps when many prompts wait; `even`: a number of rows → one near it that suits the device."""
    sizes = [times * max_mixed_tokens for times in LARGE_CHUNKS if max_mixed_tokens]
    within = [size for size in sizes if size <= max_num_batched_tokens]
    return tuple(even(size) if even(size) <= max_num_batched_tokens else size for size in within)


def default_cpu_threads() -> int:
    """One core is left to the API process."""
    return max(1, len(os.sched_getaffinity(0)) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 2) - 1)
