"""The MLPs of a mixture of experts: each token goes through the few that were chosen for it (route in moe_route.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .gating import gated
from .moe_lora import ExpertLora, add_of_expert
from .moe_triton import experts_triton

Product = Callable[[int, torch.Tensor], torch.Tensor]  # (expert, its rows [n, K]) → [n, N]
ExpertMLP = Callable[[int, torch.Tensor, torch.Tensor | slice], torch.Tensor]  # and which tokens they are


class ExpertWeights(NamedTuple):
    """All experts of a layer. I: inner width, H: hidden width."""

    gate_up: torch.Tensor  # [E, 2I, H]: rows of gate, then those of up; without gates [E, I, H]
    down: torch.Tensor  # [E, H, I]
    gate_up_bias: torch.Tensor | None = None  # [E, 2I]
    down_bias: torch.Tensor | None = None  # [E, H]


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: ExpertWeights,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    of: int | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ_k weights[t, k] · down_e(act(gate_e x_t) · up_e x_t) with e = ids[t, k], for x [T, H] → [T, H] in x's dtype.

    ids int32 [T, k], those of a token all different; weights fp32 [T, k]. What has the id E and the weight 0 is left
    out: another rank has it. Sums are made in fp32, in an order that is always the same. limit: says
    which act is (gating.py). beside [T, H] is added. residual [T, H], which may be none of the
    other operands: is added to, before the one rounding, and returned. of: how many experts the k were chosen among
    (None: E), by which tiles are chosen. lora: what the adapters of tokens add to both products.
    The matrices' last dimensions are contiguous on a GPU, x's always.
    """
    if x.is_cuda:
        return experts_triton(
            x, ids, weights, *matrices, limit=limit, beside=beside, of=of, lora=lora, residual=residual
        )
    return experts_torch(x, ids, weights, matrices, limit, beside, lora, residual)


def experts_torch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: ExpertWeights,
    limit: float = 0.0,
    beside: torch.Tensor | None = None,
    lora: ExpertLora | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    gate_up, down, gate_up_bias, down_bias = matrices

    def first(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])

    def second(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, down[expert], None if down_bias is None else down_bias[expert])

    return sum_of_experts(x, ids, weights, expert_mlp(first, second, limit, lora), beside, residual)


def expert_mlp(first: Product, second: Product, limit: float, lora: ExpertLora | None = None) -> ExpertMLP:
    """One expert's MLP of its two products, with what adapters add to each."""

    def mlp(expert: int, rows: torch.Tensor, tokens: torch.Tensor | slice) -> torch.Tensor:
        inner = first(expert, rows)
        if lora is not None:
            inner = add_of_expert(inner, rows, expert, lora.gate_up, lora.slots[tokens])
        gates = gated(inner, limit).to(rows.dtype)
        y = second(expert, gates)
        return y if lora is None else add_of_expert(y, gates, expert, lora.down, lora.slots[tokens])

    return mlp


def sum_of_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    mlp: ExpertMLP,
    beside: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `experts`, on the CPU, where `mlp` is one expert's.

    Only experts that were chosen are touched, and added in their order: whatever company a token has.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if len(x) == 1:
        for expert, weight in sorted(zip(ids[0].tolist(), weights[0].tolist(), strict=True)):
            if weight != 0:  # NaN is not 0
                total.add_(mlp(expert, x, slice(None)), alpha=weight)
    else:
        pairs = ids.flatten().argsort(stable=True)  # (token, place among its k) as one number, by expert
        pairs = pairs[weights.flatten()[pairs] != 0]
        tokens, shares = pairs // ids.shape[1], weights.flatten()[pairs, None]
        ends = torch.bincount(ids.flatten()[pairs]).cumsum(0).tolist()
        for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start < end:
                chosen = tokens[start:end]
                total.index_add_(0, chosen, mlp(expert, x[chosen], chosen).float() * shares[start:end])
    if beside is not None:
        total += beside
    if residual is not None:
        return residual.copy_(total.add_(residual))
    return total.to(x.dtype)
