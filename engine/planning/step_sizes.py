"""How many tokens and requests a step has at most, where nobody has said so: by the model and the device."""

from __future__ import annotations

from collections.abc import Callable

from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig
from ..schedule.planner import FEW_DECODES
from .machine import Machine

# Times max_mixed_tokens, when many prompts wait: larger products are no faster, and those who decode wait longer.
LARGE_CHUNKS = (2, 4)
CHUNK = 1024  # tokens of a step with prompts beside decodes, on a GPU
# The same of a mixture of experts: some fifty tokens already read the weights of nearly all experts, so that a few
# hundred take as long as a few thousand.
MIXTURE_CHUNK = 4096
# The same of weights that are codes: FP8 multiplies twice as fast, and other codes become numbers first, which takes a
# step of 1,024 tokens a seventh of its time. With the FEW_DECODES that leave a chunk whole, 2,048 rows.
CODES_CHUNK = 2048 - FEW_DECODES
SMALLEST_CHUNK = 1024  # tokens of a prompt that a stage computes about as fast, each, as it does many


def default_limits(card_bytes: int, mixture: bool = False) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs). `card_bytes`: 0 on the CPU."""
    if not card_bytes:
        return 512, 16
    return (8192, 1024) if card_bytes >= 70e9 else (MIXTURE_CHUNK if mixture else 2048, 256)


def resolve_limits(
    config: EngineConfig, machine: Machine, mixture: bool
) -> tuple[int, int, tuple[str, ...], tuple[str, ...]]:
    """Batched tokens and sequences that agree: every running request must be able to decode in each step.

    Returns (max_num_batched_tokens, max_num_seqs, which of them had to follow the other, notices). EngineConfig has
    refused two explicit settings that contradict each other.
    """
    tokens, seqs = default_limits(machine.card_bytes, mixture)
    # The steps in flight together are about what one card would compute at once: a long prompt keeps all stages busy.
    tokens = max(min(tokens, SMALLEST_CHUNK), tokens // config.pipeline_parallel_size)
    tokens = config.max_num_batched_tokens or tokens
    seqs = config.max_num_seqs or seqs
    if seqs <= tokens:
        return tokens, seqs, (), ()
    if config.max_num_seqs:
        notice = f"max_num_batched_tokens raised to {seqs}, the value of --max-num-seqs"
        return seqs, seqs, ("max_num_batched_tokens",), (notice,)
    notice = f"max_num_seqs lowered to {tokens}, the value of --max-num-batched-tokens"
    return tokens, tokens, ("max_num_seqs",), (notice,)


def default_chunk(mixture: bool, codes: bool, drafts: bool) -> int:
    """drafts: are made in some steps, whose graphs with prompts end at CHUNK tokens."""
    return MIXTURE_CHUNK if mixture else CODES_CHUNK if codes and not drafts else CHUNK


def resolve_max_mixed_tokens(config: EngineConfig, device: str, max_num_batched_tokens: int, chunk: int) -> int:
    """Without chunked prefill a prompt needs a whole step, whoever decodes beside it. Whoever names the tokens of a
    step means mixed steps too."""
    if not config.enable_chunked_prefill:
        return 0
    if config.max_mixed_tokens is not None:
        return config.max_mixed_tokens
    if device == "cpu" or config.max_num_batched_tokens is not None:
        return 0
    return min(chunk, max_num_batched_tokens)


def default_backlog_steps(chunk: int) -> int:
    """Who gains by larger steps has them until as few tokens wait as others keep to theirs."""
    return SchedulerConfig.backlog_steps // (1 if chunk == CHUNK else 2)


def large_mixed_tokens(
    max_mixed_tokens: int, max_num_batched_tokens: int, even: Callable[[int], int]
) -> tuple[int, ...]:
    """Of mixed steps when many prompts wait; `even`: a number of rows → one near it that suits the device."""
    sizes = [times * max_mixed_tokens for times in LARGE_CHUNKS if max_mixed_tokens]
    within = [size for size in sizes if size <= max_num_batched_tokens]
    return tuple(even(size) if even(size) <= max_num_batched_tokens else size for size in within)
