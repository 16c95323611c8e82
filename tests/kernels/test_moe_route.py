"""Routing of a mixture: the twin against transformers' routers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.moe_route import Routing, route_torch

EXPERTS, TOP_K, HIDDEN = 24, 5, 32
# transformers' router, keys of its config, and the same as we say it
V3 = {"n_routed_experts": EXPERTS, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
ROUTERS: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "mixtral": ("mixtral", "MixtralTopKRouter", {}, Routing(TOP_K, renormalize=True)),
    "qwen2": ("qwen2_moe", "Qwen2MoeTopKRouter", {}, Routing(TOP_K)),
    "qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, Routing(TOP_K, renormalize=True)),
    "olmoe": ("olmoe", "OlmoeTopKRouter", {}, Routing(TOP_K)),
    "granite": ("granitemoe", "GraniteMoeTopKRouter", {}, Routing(TOP_K, "none", softmax_chosen=True)),
    "gpt-oss": ("gpt_oss", "GptOssTopKRouter", {}, Routing(TOP_K, "none", softmax_chosen=True)),
    "deepseek-v2": ("deepseek_v2", "DeepseekV2TopkRouter",
        {"n_routed_experts": EXPERTS, "topk_method": "greedy", "routed_scaling_factor": 1.5},
        Routing(TOP_K, factor=1.5)),
    "deepseek-v2-groups": ("deepseek_v2", "DeepseekV2TopkRouter",
        {"n_routed_experts": EXPERTS, "topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 2},
        Routing(TOP_K, num_groups=6, kept_groups=2)),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3TopkRouter", V3 | {"n_group": 4, "topk_group": 2},
        Routing(TOP_K, "sigmoid", 4, 2, "top2", renormalize=True, epsilon=1e-20, factor=2.5)),
    "glm": ("glm4_moe", "Glm4MoeTopkRouter", V3,
        Routing(TOP_K, "sigmoid", renormalize=True, epsilon=1e-20, factor=2.5)),
}  # fmt: skip


def by_expert(ids: Tensor, weights: Tensor) -> Tensor:
    """fp32 [T, E], as the order of a token's experts is nobody's business here."""
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids.long(), weights.float())


@pytest.mark.parametrize("name", ROUTERS)
def test_transformers_routers_agree(name: str) -> None:
    module, router, keys, how = ROUTERS[name]
    package = f"transformers.models.{module}"
    configs = importlib.import_module(f"{package}.configuration_{module}")
    config_class = next(
        value for key, value in vars(configs).items() if key.endswith("Config") and key != "PreTrainedConfig"
    )
    counts = {} if "n_routed_experts" in keys else {
        ("num_local_experts" if module in ("mixtral", "granitemoe", "gpt_oss") else "num_experts"): EXPERTS
    }  # fmt: skip
    config = config_class(hidden_size=HIDDEN, num_experts_per_tok=TOP_K, **counts, **keys)
    theirs = getattr(importlib.import_module(f"{package}.modeling_{module}"), router)(config)
    generator = torch.Generator().manual_seed(3)
    for tensor in theirs.state_dict().values():
        tensor.normal_(0, 0.3, generator=generator)
    x = torch.randn(300, HIDDEN, generator=generator)
    with torch.no_grad():
        logits, weights, ids = theirs(x)
    if weights.shape[1] == EXPERTS:
        weights = weights.gather(1, ids)
    correction = theirs.state_dict().get("e_score_correction_bias")
    found = by_expert(*route_torch(logits, how, correction))
    torch.testing.assert_close(found, by_expert(ids, weights), atol=1e-6, rtol=1e-5)
    if correction is not None:  # and it matters
        assert not torch.equal(found > 0, by_expert(*route_torch(logits, how)) > 0)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    logits = torch.zeros(3, 12)
    logits[1, [4, 9]] = 1.0
    logits[2, 11] = -1.0
    ids, weights = route_torch(logits, Routing(4, renormalize=True))
    assert ids.dtype is torch.int32 and weights.dtype is torch.float32
    assert ids.tolist() == [[0, 1, 2, 3], [4, 9, 0, 1], [0, 1, 2, 3]]
    torch.testing.assert_close(weights[0], torch.full((4,), 0.25))
    ids, _ = route_torch(torch.zeros(1, 12), Routing(4, num_groups=3, kept_groups=2, group_score="top2"))
    assert ids.tolist() == [[0, 1, 2, 3]]
    ids, _ = route_torch(logits[2:], Routing(8, "sigmoid", num_groups=3, kept_groups=2))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
