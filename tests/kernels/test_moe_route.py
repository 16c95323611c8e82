"""Routing of a mixture: the twin against transformers' routers, the kernels against their twins."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.experts.moe_route import (
    Routing,
    most_blocks,
    route_torch,
    route_triton,
    sort_pairs_torch,
    sort_pairs_triton,
)

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
        outputs = theirs(x)  # in an order that its version chooses
    ids = next(found for found in outputs if not found.is_floating_point())
    logits, weights = sorted(
        (found for found in outputs if found.is_floating_point()), key=lambda found: -found.shape[1]
    )
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


HOWS = {
    "softmax": Routing(5, renormalize=True),
    "chosen": Routing(3, "none", softmax_chosen=True),
    "one": Routing(1),
    "sigmoid": Routing(4, "sigmoid", renormalize=True, epsilon=1e-20, factor=2.5),
    "groups": Routing(5, num_groups=4, kept_groups=2),
    "top2": Routing(4, "sigmoid", 4, 2, "top2", renormalize=True, epsilon=1e-20, factor=2.5),
    "odd groups": Routing(4, "sigmoid", 3, 2, "top2"),
}


@pytest.mark.parametrize("how", HOWS)
def test_the_kernel_routes_as_its_twin(rng: torch.Generator, device: str, how: str) -> None:
    """Also with equal logits, with many ties, and with a correction that turns the order over."""
    num_experts, routing = 24 if "odd" not in how else 21, HOWS[how]
    logits = torch.randn(4, num_experts + 3, generator=rng)[:, :num_experts].to(device)
    for values in (logits, torch.cat((logits.round()[:2], torch.zeros_like(logits)[:1])), 10 * logits):
        for correction in (None, torch.randn(num_experts, generator=rng).to(device)):
            counts = torch.arange(num_experts, device=device)
            load, expected = counts.clone(), counts.clone()
            ids, weights = route_triton(values, routing, correction, load)
            ids_twin, weights_twin = route_torch(values, routing, correction, expected)
            assert torch.equal(ids, ids_twin)
            torch.testing.assert_close(weights, weights_twin, atol=1e-6, rtol=1e-5)
            assert torch.equal(load, expected) and load.sum() == counts.sum() + ids.numel()
            ends = torch.tensor([0, 1, 1, 2], dtype=torch.int32, device=device)  # of requests: what follows is padding
            real = counts.clone()
            route_triton(values, routing, correction, real, query_start=ends)
            route_torch(values, routing, correction, counts, query_start=ends)
            assert torch.equal(real, counts) and int(real.sum()) == int(load.sum()) - ids[2:].numel()


@pytest.mark.parametrize("how", HOWS)
def test_not_a_number_is_seen_and_harms_nobody(device: str, how: str) -> None:
    """Experts stay in range and different, the weights say so, and the other token's are what they were."""
    num_experts = 24 if "odd" not in how else 21
    logits = torch.zeros(2, num_experts, device=device)
    logits[0] = float("nan")
    ids, weights = route_triton(logits, HOWS[how])
    assert all(len(set(row)) == len(row) and min(row) >= 0 and max(row) < num_experts for row in ids.tolist())
    assert weights[0].isnan().all()
    assert torch.equal(ids[1], route_torch(logits[1:], HOWS[how])[0][0])


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 8, 128), (3, 2, 5), (40, 3, 6), (300, 4, 60)])
def test_pairs_are_sorted(
    rng: torch.Generator, device: str, num_tokens: int, top_k: int, num_experts: int, block: int
) -> None:
    scores = torch.rand(num_tokens, num_experts, generator=rng)
    even = scores.topk(top_k).indices.int()
    crowded = torch.arange(num_experts - top_k, num_experts, dtype=torch.int32).expand(num_tokens, -1).contiguous()
    for ids in (even, crowded):
        found, twin = sort_pairs_triton(ids.to(device), num_experts, block), sort_pairs_torch(ids, num_experts, block)
        used = int(twin.num_blocks)
        assert used <= found.max_blocks == twin.max_blocks == most_blocks(ids.numel(), num_experts, block)
        assert int(found.num_blocks) == used
        assert torch.equal(found.experts[:used].cpu(), twin.experts[:used])
        assert torch.equal(found.pairs[: used * block].cpu(), twin.pairs[: used * block])
        real = twin.pairs[twin.pairs < ids.numel()]
        assert real.sort().values.tolist() == list(range(ids.numel()))


def test_the_bound_of_blocks_is_reached_and_never_passed(rng: torch.Generator) -> None:
    reached = 0
    for _ in range(300):
        num_experts, num_pairs = (int(torch.randint(1, high, (), generator=rng)) for high in (9, 60))
        ids = torch.randint(0, num_experts, (num_pairs,), generator=rng)
        used = int((-(-torch.bincount(ids) // 4)).sum())
        bound = most_blocks(num_pairs, num_experts, 4)
        assert used <= bound
        reached += used == bound
    assert reached > 5
