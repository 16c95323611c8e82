"""How long a card is likely to take for a step: what it has to read, to multiply, and what it costs to begin.

Nothing here runs on a card: a plan is made of numbers of config.json and of the card. What no data sheet says was
fitted once, on measurements of one H200 (tests/gpu/RESULTS.md, tests/engine/test_step_model.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..link.plan import StepPlan
from .card import Card
from .shape import Kept, Shape

# What hides another only in part: reading weights, multiplying by them, and the chain of kernels that wait for each
# other. Their times add up in this norm.
OVERLAP = 1.75
# Rows of an expert in the mean up to which its tiles have so many rows, and beyond (kernels/experts/moe_triton.py).
TILES, LARGEST_TILE = ((8, 16), (24, 32), (48, 64)), 128
FEW_ROWS = 8  # up to which codes that become numbers on their way hide behind their reading
FP8_ROWS = 48  # up to which FP8 weights are multiplied by 16-bit activations
# Up to which codes that are not FP8 become numbers in registers; beyond in memory, before the product.
CODES_ROWS = 1023


@dataclass(frozen=True)
class Costs:
    """Factors of the times that follow from the card, and seconds beside them."""

    weights: float = 1.0  # of the time in which the card reads as many bytes
    products: float = 1.038
    # Of products with experts, beside that: their kernels reach less, in FP8 no more than in 16 bits.
    tiles: float = 1.48
    cache: float = 1.22  # of the time in which the card reads the keys and values
    shared: float = 0.4  # of those keys and values that another request of the step reads too: they come from its cache
    attention: float = 1.75  # of prompts; of the card's rate for products
    moved: float = 0.45  # of the time in which all that layers make of a token is written and read: some never is
    unfused: float = 1.0  # the same beside products of FP8, whose activations and results pass more kernels
    codes: float = 1 / 3.6e12  # a weight that becomes a number in registers, for more than a few rows
    layer: float = 49e-6  # a layer's kernels one after the other, with next to nothing to read: 10, some 5 µs each
    step: float = 1.7e-4  # embedding, sampling, and what lies between two steps
    row: float = 1.0e-6  # a request in the step, on the host


class StepModel:
    """Of one stage, whose ranks all do the same at the same time."""

    def __init__(self, shape: Shape, card: Card, costs: Costs | None = None, cards: int = 1) -> None:
        """cards: of the whole engine."""
        self.shape, self.card, self.costs = shape, card, costs or Costs()
        self.link, self.way = card.joined(shape.ranks), card.joined(cards)  # between ranks, and to the next stage
        count = shape.windows.count
        self._full = count(0) / len(shape.windows)  # share of the layers with attention
        self._share = [(window, count(window) / len(shape.windows)) for window in set(shape.windows)]

    def seconds(self, plan: StepPlan, shared: int = 0) -> float:
        """Of the device and of what the host does between steps. `shared`: tokens of context that several requests of
        the step have, counted for each but one of them."""
        costs, tokens, shape = self.costs, plan.total_tokens, self.shape
        prompts = zip(plan.num_tokens[plan.num_decodes :], plan.num_computed[plan.num_decodes :], strict=True)
        contexts = sum(self._seen(computed + 1) for computed in plan.num_computed[: plan.num_decodes])
        contexts -= (1 - costs.shared) * self._full * shared  # layers with a window have read few of them
        pairs = sum(self._pairs(count, computed) for count, computed in prompts)
        return (
            self.product_seconds(tokens, plan.num_samples)
            + self.attention_seconds(contexts, pairs)
            + self.moving_seconds(tokens)
            + self.state_seconds(len(plan.rows))
            + self.sum_seconds(tokens, plan.num_samples if shape.head else 0)
            + costs.step + costs.row * len(plan.rows)
        )  # fmt: skip

    def seconds_alone(self) -> float:
        """Of a step with one request and a short context."""
        return self.product_seconds(1, 1) + self.sum_seconds(1, 1 if self.shape.head else 0) + self.costs.step

    def product_seconds(self, tokens: int, sampled: int) -> float:
        """Of all matrices, and of the chain of kernels that they are part of."""
        shape, costs = self.shape, self.costs
        touched, rows = self._experts(tokens)
        layers, experts = shape.weights.layers, shape.weights.experts
        read = shape.dense * layers.item + touched * shape.expert * experts.item
        read += shape.head * shape.weights.item if sampled else 0
        rate = self.card.products
        fp8 = self._is_fp8(layers, tokens)
        made = 2 * shape.dense * tokens / (self.card.fp8 * rate if fp8 else rate)
        made += costs.tiles * 2 * shape.expert * rows / rate
        made += 2 * shape.head * sampled / rate
        made *= costs.products
        if tokens > FEW_ROWS:
            made += costs.codes * touched * shape.expert if experts.is_converted else 0
            made += costs.codes * shape.dense if layers.is_converted and tokens <= CODES_ROWS else 0
        terms = costs.weights * read / self.card.bandwidth, made, costs.layer * shape.num_layers
        found: float = sum(term**OVERLAP for term in terms) ** (1 / OVERLAP)
        if layers.is_converted and tokens > CODES_ROWS:
            found += costs.weights * shape.dense * (layers.item + shape.weights.item) / self.card.bandwidth
        return found

    def attention_seconds(self, contexts: float, pairs: float) -> float:
        """contexts: keys that those who decode read; pairs: of prompts."""
        costs, shape = self.costs, self.shape
        read = costs.cache * contexts * shape.kv_bytes / self.card.bandwidth
        return read + costs.attention * pairs * shape.pair_flops / self.card.products

    def state_seconds(self, rows: int) -> float:
        """Of recurrent states, each read and written once."""
        return self.costs.cache * 2 * rows * self.shape.state_bytes / self.card.bandwidth

    def moving_seconds(self, tokens: int) -> float:
        """Norms, activations, the cache's writes."""
        costs, fp8 = self.costs, self._is_fp8(self.shape.weights.layers, tokens)
        factor = costs.unfused if fp8 else costs.moved
        return factor * 2 * self.shape.moved * self.shape.weights.item * tokens / self.card.bandwidth

    def sum_seconds(self, tokens: int, sampled: int) -> float:
        """Of ranks that tell each other: sums of rows, then logits, as where somebody samples, and tokens."""
        shape, link = self.shape, self.link
        if shape.ranks == 1:
            return 0.0
        found = shape.num_sums * link.sum_seconds(tokens * shape.hidden * shape.weights.item, shape.ranks)
        if sampled:
            found += link.gather_seconds(4 * sampled * shape.head_rows, shape.ranks) + link.latency
        return found

    def handing_seconds(self, tokens: int) -> float:
        """Until the next stage has what this one made."""
        return self.way.send_seconds(tokens * self.shape.hidden * self.shape.weights.item)

    def _experts(self, tokens: int) -> tuple[float, float]:
        """→ (experts that evenly routed tokens touch, rows that their tiles have, full or not)."""
        shape = self.shape
        if not shape.num_experts:
            return 0.0, 0.0
        touched = shape.num_experts * (1 - (1 - shape.chosen / shape.num_experts) ** tokens)
        rows = shape.chosen * tokens
        mean = rows / shape.num_experts
        tile = next((tile for most, tile in TILES if mean <= most), LARGEST_TILE)
        return touched, max(touched * tile, rows + touched * tile / 2)  # the last tile of each is half full

    def _is_fp8(self, kept: Kept, tokens: int) -> bool:
        """Whether products with these weights take activations in FP8."""
        return kept.fp8 and self.card.fp8 > 0 and tokens > FP8_ROWS

    def _seen(self, context: int) -> float:
        """Keys of so many that a query reads in the mean layer."""
        return sum(share * (min(context, window) if window else context) for window, share in self._share)

    def _pairs(self, count: int, computed: int) -> float:
        """Of queries and keys, in the mean layer, of `count` tokens behind `computed`."""
        full = count * computed + count * (count + 1) / 2
        return sum(share * (min(full, count * window) if window else full) for window, share in self._share)


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
