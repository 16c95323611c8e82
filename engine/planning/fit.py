"""Costs of a step that follow those of a server which runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..errors import ConfigError
from .step_model import Costs, StepModel


def fit(model: StepModel, steps: Sequence[dict[str, float]], context: int) -> tuple[Costs, float, int]:
    """→ costs that follow measured steps, the median relative error on those that were left out, steps fitted on.

    `steps`: as /server_info?steps= has them; `context`: tokens of the mean context of who decoded in them. What the
    products and the rest of a step cost is fitted, on every other step. Raises ConfigError for too few.
    """
    known = [step for step in steps if step["device_seconds"] > 0 and step["num_tokens"] > 0]
    if len(known) < 64:
        raise ConfigError(f"{len(known)} steps are too few to fit on: give the server a load first, 64 are needed")
    costs = model.costs

    def parts(step: dict[str, float]) -> tuple[float, float]:
        tokens, decodes = int(step["num_tokens"]), int(step["num_decodes"])
        products = model.product_seconds(tokens, int(step["num_requests"]))
        rest = model.attention_seconds(decodes * context, (tokens - decodes) * context / 2)
        rest += model.moving_seconds(tokens) + model.sum_seconds(tokens, int(step["num_requests"]))
        return products, rest + costs.row * int(step["num_requests"])

    table = torch.tensor([[*parts(step), step["device_seconds"]] for step in known], dtype=torch.float64)
    products, rest, measured = table.unbind(1)
    fitted, others = slice(0, None, 2), slice(1, None, 2)
    matrix = torch.stack((products, torch.ones_like(products)), dim=1) / measured[:, None]
    target = ((measured - rest) / measured)[:, None]
    scale, constant = torch.linalg.lstsq(matrix[fitted], target[fitted]).solution.flatten().tolist()
    if scale <= 0 or constant < 0:  # steps of one size say nothing of what a step costs beside
        constant = costs.step
        left = target[fitted, 0] - constant / measured[fitted]
        scale = float(left.mean() / matrix[fitted, 0].mean())
    predicted = scale * products + rest + constant
    error = float(((predicted - measured).abs() / measured)[others].median())
    scaled = {name: getattr(costs, name) * scale for name in ("products", "weights", "codes", "layer")}
    found = dataclasses.replace(costs, step=constant, **scaled)
    return found, error, len(known[fitted])
