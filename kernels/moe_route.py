"""Routing of a mixture of experts: from a router's logits to each token's experts and their weights."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """How experts are chosen and weighted, in the order of what is done."""

    top_k: int
    score: str = "softmax"  # of the logits, before the choice: softmax, sigmoid, none
    num_groups: int = 1  # of experts, of which only the best kept_groups may be chosen from
    kept_groups: int = 1
    group_score: str = "max"  # a group's best expert, or the sum of its best two ("top2")
    softmax_chosen: bool = False  # the weights are a softmax over what was chosen
    renormalize: bool = False  # the weights are divided by their sum + epsilon
    epsilon: float = 0.0
    factor: float = 1.0  # and multiplied by this


def route(
    logits: torch.Tensor, how: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] → experts int32 [T, k], the best first, and their weights fp32 [T, k]; computed in fp32.

    correction fp32 [E] is added to the scores for the choice alone. Of equal scores the lower expert is the better.
    """
    return route_torch(logits, how, correction)


def route_torch(
    logits: torch.Tensor, how: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float()
    if how.score == "softmax":
        scores = scores.softmax(dim=1)
    elif how.score == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if correction is None else scores + correction
    if how.num_groups > 1:
        choice = _in_kept_groups(choice, how)
    ids = _best(choice, how.top_k)
    weights = scores.gather(1, ids)
    if how.softmax_chosen:
        weights = weights.softmax(dim=1)
    if how.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + how.epsilon)
    return ids.int(), weights * how.factor


def _in_kept_groups(choice: torch.Tensor, how: Routing) -> torch.Tensor:
    """The same with -inf outside of the groups that may be chosen from."""
    grouped = choice.unflatten(1, (how.num_groups, -1))
    best = grouped.amax(dim=2) if how.group_score == "max" else grouped.topk(2, dim=2).values.sum(dim=2)
    dropped = torch.ones_like(best, dtype=torch.bool).scatter_(1, _best(best, how.kept_groups), False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest in each row, in order; torch.topk does not say which of equal ones it takes."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
