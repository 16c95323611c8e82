"""What transformers' models call in place of their own attention and mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.modeling_utils import AttentionInterface

from ...kernels.experts.moe import ExpertWeights, experts
from ..errors import ConfigError

NAME = "vserve"  # of both, in a config
CALLED = "paged"  # attribute of a module that calls attention: what is to answer


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **given: Any
) -> tuple[Tensor, None]:
    """query [1, H, T, D], rotated, key [1, KV, T, D], value [1, KV, T, Dv] → [1, T, H, Dv].

    transformers makes no mask for an implementation that it does not know: attention_mask is None, or the model's own.
    """
    return module.__dict__[CALLED](query, key, value, attention_mask, given), None


def run_experts(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """x [T, hidden], ids int64 and weights [T, k] of each token's experts → [T, hidden].

    The same numbers whatever shares the batch in fp32, no atomics. Most mixtures go to our own kernels, the others to
    torch's grouped product, for which the host does not wait in bf16 on Hopper and later.
    """
    if x.device.type == "meta":
        return x.new_empty(x.shape)
    if _are_gated_by_silu(module):
        matrices = ExpertWeights(module.gate_up_proj, module.down_proj)  # type: ignore[arg-type]
        return experts(x.contiguous(), ids.int(), weights.float(), matrices)
    if x.is_cuda and torch.cuda.is_current_stream_capturing() and not _goes_into_a_graph(x):
        raise ConfigError(
            "these experts, which transformers' code computes, go into CUDA graphs in bfloat16 on Hopper GPUs and "
            "later only: pass --dtype bfloat16 there, or --enforce-eager"
        )
    result: Tensor = moe.grouped_mm_experts_forward(module, x, ids, weights)
    return result


def expert_sizes(model: nn.Module) -> set[tuple[int, int]]:
    """(experts a token, experts) of the mixtures that our own kernels compute."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    found = set()
    for module in model.modules():
        stacked = getattr(module, "gate_up_proj", None)
        if isinstance(stacked, Tensor) and hasattr(module, "has_gate") and _are_gated_by_silu(module):
            found.add((int(chosen), stacked.shape[0]))
    return found


def _are_gated_by_silu(module: Any) -> bool:
    """down(silu(gate(x)) · up(x)) with [E, 2I, H] and [E, H, I], and nothing else."""
    return (
        module.has_gate
        and module.is_concatenated
        and not (module.is_transposed or module.has_bias or getattr(module, "has_post_expert_norm", False))
        and type(module)._apply_gate is moe._default_apply_gate
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def _goes_into_a_graph(x: Tensor) -> bool:
    """Elsewhere torch's grouped product loops over the groups, for which the host waits."""
    return x.dtype is torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def register() -> None:
    AttentionInterface.register(NAME, attend)
    moe.ExpertsInterface.register(NAME, run_experts)
