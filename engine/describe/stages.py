"""Which layers the stages of a pipeline have, known from config.json alone: without torch, before weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..families.layer_spec import AttentionSpec, LatentAttentionSpec, LayerSpec, MLPSpec, MoESpec

if TYPE_CHECKING:
    from .model_config import ModelConfig

ATTENTION = 1.7  # times as long as products of as many operations: fitted on steps of a GPU (engine/planning)


def check_stages(config: ModelConfig, size: int, counts: Sequence[int] = ()) -> None:
    """Raises ModelError where the model cannot be cut into `size` stages, or not as `counts` (layers of each) says."""
    if size == 1:
        return
    if config.foreign is not None:
        refuse(f"{config.architecture} is computed by transformers' code, which is not cut into stages", size)
    if not config.causal:
        refuse(f"{config.architecture} reads texts both ways, which is not cut into stages", size)
    num_layers = len(config.layers)
    if size > num_layers:
        raise ModelError(
            f"--pipeline-parallel-size {size}: the model has {num_layers} layers, and every stage needs one: take "
            f"{num_layers} or less, or divide layers as well (--tensor-parallel-size)"
        )
    if counts and sum(counts) != num_layers:
        raise ModelError(
            f"--pipeline-layer-partition {','.join(map(str, counts))} deals out {sum(counts)} layers, and the model "
            f"has {num_layers}: name so many, or leave it out for {','.join(map(str, split(config, size)))}"
        )


def refuse(reason: str, size: int) -> None:
    """Raises ModelError."""
    if size > 1:
        raise ModelError(
            f"--pipeline-parallel-size {size}: {reason}: leave it out, or take --data-parallel-size {size} for as many "
            "that each hold all of the model"
        )


def stage_layers(config: ModelConfig, size: int, counts: Sequence[int] = ()) -> list[range]:
    """Of each stage; `counts`: how many layers each has, where somebody has said so."""
    ends, found = 0, []
    for count in counts or split(config, size):
        found.append(range(ends, ends + count))
        ends += count
    return found


def split(config: ModelConfig, size: int) -> tuple[int, ...]:
    """Layers of each of `size` stages, so that the costliest costs least, then all about alike.

    What a stage costs is its share of the weights, which limits the cache, and its share of a token's products, which
    is its time: the first has the embedding's memory as well, the last the output matrix's memory and time.
    """
    hidden, table = config.hidden_size, config.vocab_size * config.hidden_size
    held, used = zip(*(_parameters(layer, hidden) for layer in config.layers), strict=True)
    of_all, of_products = sum(held) + 2 * table, sum(used) + table
    costs = [h / of_all + u / of_products for h, u in zip(held, used, strict=True)]
    first, last = table / of_all, table / of_all + table / of_products

    num_layers = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # (the costliest stage's, the sum of squares) of the first layers in so many stages → and where the last one begins
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(size):
        found: dict[int, tuple[float, float, int]] = {}
        beside = first * (stage == 0) + last * (stage == size - 1)
        for end in range(stage + 1, num_layers - (size - stage - 1) + 1):
            found[end] = min(
                (max(most, mine), squares + mine * mine, begin)
                for begin, (most, squares, _) in best[-1].items()
                if begin < end
                for mine in (round(before[end] - before[begin] + beside, 9),)
            )
        best.append(found)
    counts: list[int] = []
    end = num_layers
    for stage in range(size, 0, -1):
        begin = best[stage][end][2]
        counts.append(end - begin)
        end = begin
    return tuple(reversed(counts))


def context_cost(config: ModelConfig) -> float:
    """What a key that a prompt's token sees costs, in products of a token, in the mean layer that sees all."""
    pairs = products = 0.0
    for layer in config.layers:
        spec = layer.attention
        if isinstance(spec, AttentionSpec) and not spec.window:
            pairs += spec.num_heads * (spec.head_dim + (spec.value_dim or spec.head_dim))
        elif isinstance(spec, LatentAttentionSpec):
            pairs += spec.num_heads * (spec.nope_dim + spec.rope_dim + spec.value_dim)
        products += _parameters(layer, config.hidden_size)[1]
    return ATTENTION * pairs / products


def _parameters(layer: LayerSpec, hidden: int) -> tuple[int, int]:
    """(that a layer has, that a token meets), about: norms and biases are small."""
    attention, mlp = sum(_attention(layer.attention, hidden)), layer.mlp
    if isinstance(mlp, MLPSpec):
        both = attention + (2 + mlp.gated) * mlp.inner * hidden
        return both, both
    assert isinstance(mlp, MoESpec)
    expert, shared = 3 * mlp.inner * hidden, 3 * mlp.shared_inner * hidden
    return (
        attention + shared + mlp.routing.num_experts * expert,
        attention + shared + mlp.routing.top_k * expert,
    )


def _attention(spec: AttentionSpec | LatentAttentionSpec, hidden: int) -> Iterator[int]:
    if isinstance(spec, AttentionSpec):
        value_dim = spec.value_dim or spec.head_dim
        yield hidden * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        yield hidden * (spec.num_heads + spec.num_kv_heads) * value_dim
        return
    query = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    yield spec.q_rank * (hidden + query) if spec.q_rank else hidden * query
    yield hidden * (spec.kv_rank + spec.rope_dim)
    yield spec.kv_rank * spec.num_heads * (spec.nope_dim + spec.value_dim)
    yield spec.num_heads * spec.value_dim * hidden
