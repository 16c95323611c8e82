"""How long a card is likely to take for a step: what it has to read, to multiply, and what it costs to begin.

Nothing here runs on a card: a plan is made of numbers of config.json and of the card. Constants that no data sheet has
were fitted once, on measurements of one H200 (tests/gpu/RESULTS.md, tests/engine/test_step_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layer_spec import AttentionSpec, LayerSpec, MLPSpec
from .plan import StepPlan

# Where reading weights and multiplying take alike long, they hinder each other: times add up in this norm.
OVERLAP = 1.75


@dataclass(frozen=True)
class Card:
    """Of one GPU. `measured`: bandwidth and products are, not shares of what a data sheet says."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    products: float  # floating-point operations a second, 16 bit, dense
    measured: bool = False


CARDS = {
    card.name: card
    for card in (
        Card("h200", 150_754_820_096, 4.24e12, 783e12, measured=True),
        Card("h100", 85_520_809_984, 3.35e12 * 0.9, 989e12 * 0.75),
        Card("h20", 102_000_000_000, 4.0e12 * 0.9, 148e12 * 0.9),
        Card("a100", 85_198_045_184, 2.04e12 * 0.9, 312e12 * 0.8),
        Card("l40s", 48_318_382_080, 0.864e12 * 0.9, 362e12 * 0.7),
        Card("l4", 24_152_899_584, 0.3e12 * 0.9, 121e12 * 0.6),
        Card("b200", 191_000_000_000, 8.0e12 * 0.9, 2250e12 * 0.7),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What is fitted: factors of the times that follow from the card, and seconds beside them."""

    weights: float = 1.06  # of the time in which the card reads as many bytes
    products: float = 1.038
    cache: float = 1.22  # of the time in which the card reads the keys and values
    shared: float = 0.4  # of those keys and values that another request of the step reads too: they come from its cache
    attention: float = 1.75  # of prompts; of the card's rate for products
    step: float = 4.25e-4  # a step: launches, norms, sampling, and what lies between two of them
    token: float = 1.1e-6  # a token that is computed: norms, activations, the cache's writes
    row: float = 1.0e-6  # a request in the step, on the host


@dataclass(frozen=True)
class Shape:
    """Of a model, all in numbers of one token or one step."""

    weight_bytes: float  # read by every step, without the experts and the output matrix
    expert_bytes: float  # of one expert, all layers together
    num_experts: int
    top_k: int
    head_bytes: float  # of the output matrix
    flops: float  # a token, without attention and output matrix
    head_flops: float  # a sampled token
    kv_bytes: int  # a token, all layers
    pair_flops: float  # of attention, a query and a key
    windows: tuple[int, ...]  # of each layer; 0: none


def shape_of(
    layers: Sequence[LayerSpec], *, parameters: int, vocab: int, hidden: int, tied: bool, item: float, kv_item: int
) -> Shape:
    """item: bytes a weight, kv_item: bytes an element of the cache."""
    head = vocab * hidden
    expert = num_experts = top_k = 0
    routed = 0  # parameters of all experts
    for layer in layers:
        if not isinstance(layer.mlp, MLPSpec):
            routing = layer.mlp.routing
            num_experts, top_k = routing.num_experts, routing.top_k
            expert += 3 * layer.mlp.inner * hidden
            routed += 3 * layer.mlp.inner * hidden * num_experts
    dense = parameters - routed - head * (1 if tied else 2)
    pair = 0.0
    for layer in layers:
        spec = layer.attention
        if isinstance(spec, AttentionSpec):
            pair += 4 * spec.num_heads * spec.head_dim
        else:
            pair += 2 * spec.num_heads * (spec.kv.head_dim + spec.kv.value_dim)
    return Shape(
        weight_bytes=dense * item,
        expert_bytes=expert * item,
        num_experts=num_experts,
        top_k=top_k,
        head_bytes=head * item,
        flops=2.0 * (dense + expert * top_k),
        head_flops=2.0 * head,
        kv_bytes=sum(layer.attention.kv.token_elements for layer in layers) * kv_item,
        pair_flops=pair,
        windows=tuple(layer.attention.window for layer in layers),
    )


class StepModel:
    def __init__(self, shape: Shape, card: Card, costs: Costs | None = None) -> None:
        self.shape, self.card, self.costs = shape, card, costs or Costs()
        self._full = shape.windows.count(0) / len(shape.windows)  # share of the layers
        self._share = [(window, self.shape.windows.count(window) / len(shape.windows)) for window in set(shape.windows)]

    def seconds(self, plan: StepPlan, shared: int = 0) -> float:
        """Of the device and of what the host does between steps. `shared`: tokens of context that several requests of
        the step have, counted for each but one of them."""
        costs, tokens = self.costs, plan.total_tokens
        prompts = zip(plan.num_tokens[plan.num_decodes :], plan.num_computed[plan.num_decodes :], strict=True)
        contexts = sum(self._seen(computed + 1) for computed in plan.num_computed[: plan.num_decodes])
        contexts -= (1 - costs.shared) * self._full * shared  # layers with a window have read few of them
        pairs = sum(self._pairs(count, computed) for count, computed in prompts)
        return (
            self.product_seconds(tokens, plan.num_samples)
            + costs.cache * contexts * self.shape.kv_bytes / self.card.bandwidth
            + costs.attention * pairs * self.shape.pair_flops / self.card.products
            + costs.step + costs.token * tokens + costs.row * len(plan.rows)
        )  # fmt: skip

    def seconds_alone(self) -> float:
        """Of a step with one request and a short context."""
        return self.product_seconds(1, 1) + self.costs.step

    def product_seconds(self, tokens: int, sampled: int) -> float:
        """Of all matrices: reading them and multiplying by them overlap in part."""
        shape, card, costs = self.shape, self.card, self.costs
        touched = 0.0
        if shape.num_experts:  # of evenly routed tokens
            touched = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** tokens)
        read = (
            shape.weight_bytes + touched * shape.expert_bytes + (shape.head_bytes if sampled else 0)
        ) / card.bandwidth
        made = (shape.flops * tokens + shape.head_flops * sampled) / card.products
        return float(((costs.weights * read) ** OVERLAP + (costs.products * made) ** OVERLAP) ** (1 / OVERLAP))

    def _seen(self, context: int) -> float:
        """Keys of so many that a query reads in the mean layer."""
        return sum(share * (min(context, window) if window else context) for window, share in self._share)

    def _pairs(self, count: int, computed: int) -> float:
        """Of queries and keys, in the mean layer, of `count` tokens behind `computed`."""
        full = count * computed + count * (count + 1) / 2
        return sum(share * (min(full, count * window) if window else full) for window, share in self._share)
