"""How much of whole texts a step computes, and what that takes in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..options.config import EngineConfig
from .cpu_memory import machine_bytes
from .host_memory import gib
from .memory import MemoryPlan, weight_bytes

if TYPE_CHECKING:
    from ..step.encoder_runner import EncoderRunner
    from .settings import Settings


def plan_encoder(runner: EncoderRunner, config: EngineConfig, settings: Settings) -> MemoryPlan:
    """Runs the largest step, whose memory is kept: engines that start later see what is left. Raises ConfigError."""
    weights, length = weight_bytes(runner.model), settings.max_model_len
    num_texts, num_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for count in (-(-num_tokens // length), num_texts):
            runner.dummy_step(count, num_tokens)
            runner.dummy_step(count, num_tokens, runner.largest_pooling)
        activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        budget = int(total * config.gpu_memory_utilization)
        other = total - free - weights - activations  # of the card, whosever it is
        advice = f"raise --gpu-memory-utilization (now {config.gpu_memory_utilization})"
    else:
        total = budget = machine_bytes()
        widest = max(max(layer.attention.width, layer.mlp.width) for layer in runner.model.config.layers)
        activations = 4 * num_tokens * (3 * runner.model.config.hidden_size + widest)
        other, advice = 0, "take a smaller model"
    plan = MemoryPlan(total, budget, weights, activations, 0, other, 0, num_texts + 1, length, runner.layout)
    if plan.needed > budget:
        raise ConfigError(
            f"a step of {num_tokens} tokens (--max-num-batched-tokens) does not fit: weights take {gib(weights)}, the "
            f"step {gib(activations + other)}, of {gib(budget)}; lower --max-num-batched-tokens or {advice}"
        )
    return plan
