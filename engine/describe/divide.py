"""How a model can be divided over ranks and stages, and what more of them would bring: by config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ModelError
from ..families.layer_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    KVSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    MoESpec,
    PairSpec,
    ScanSpec,
    StateSpec,
)
from ..options.speculation import drafts_by_model

if TYPE_CHECKING:
    from ..options.config import EngineConfig
    from .model_config import Foreign, ModelConfig


MOST = 64  # ranks that are looked at for those that would do
SLICE = 256  # gates of an expert that a rank should have at least: fewer make small products, and cut blocks of scales
BLOCK = 128  # columns that share a scale in quantised experts, at most as a rule


def check_divides(config: ModelConfig, size: int, expert_parallel: bool = False) -> None:
    """Raises ModelError where `size` ranks cannot share the model, naming the numbers that can."""
    if size == 1:
        return
    if config.foreign is not None:
        _check_foreign(config.foreign, size, expert_parallel)
    if not config.causal:
        _refuse(f"{config.architecture} reads texts both ways, which is not divided over ranks", size)
    if (why := fault(config, size, expert_parallel)) is None:
        return
    possible = sizes(config, expert_parallel)
    remedy = "leave it out, or take" if possible == [1] else f"take one of {', '.join(map(str, possible))}, or"
    stages = "; --pipeline-parallel-size deals out whole layers, to any number of ranks" if is_cut(config) else ""
    raise ModelError(
        f"--tensor-parallel-size {size}: {why} cannot be divided over {size} ranks: {remedy} --data-parallel-size "
        f"{size} for as many that each hold all of the model{stages}"
    )


def sizes(config: ModelConfig, expert_parallel: bool = False) -> list[int]:
    """Numbers of ranks that can share the model."""
    if not config.causal or (config.foreign is not None and _undivided(config.foreign)):
        return [1]
    return [n for n in range(1, MOST + 1) if fault(config, n, expert_parallel) is None]


def _check_foreign(foreign: Foreign, size: int, expert_parallel: bool) -> None:
    """Raises ModelError where no plan of transformers divides it, or another one is wanted."""
    if why := _undivided(foreign):
        _refuse(f"{foreign.architecture} is computed by transformers' code, and {why}", size)
    assert foreign.layout is not None
    if expert_parallel and foreign.layout.summed:
        raise ModelError(
            f"--enable-expert-parallel: the experts of {foreign.architecture}, which transformers' code computes, are "
            f"sliced over ranks as its plan says: leave it out"
        )


def _undivided(foreign: Foreign) -> str:
    """Why; "": it can be divided."""
    return "nobody has looked at its layers" if foreign.layout is None else foreign.layout.undivided


def refuse_encoder(model_type: str, size: int) -> None:
    """Raises ModelError."""
    _refuse(f"an encoder as {model_type} is not divided over ranks", size)


def _refuse(reason: str, size: int) -> None:
    if size > 1:
        raise ModelError(
            f"--tensor-parallel-size {size}: {reason}: leave it out, or take --data-parallel-size {size} for as many "
            f"that each hold all of the model"
        )


def kv_shares(config: ModelConfig, size: int, layers: Iterable[int] | None = None) -> list[KVSpec]:
    """What a rank keeps of a token in each layer that keeps keys and values, of `layers` (indexes) or all: neighbours
    share the heads of keys where these are fewer than ranks, and latents are whole on every rank."""
    layout, found = None if config.foreign is None else config.foreign.layout, []
    for index in range(len(config.layers)) if layers is None else layers:
        spec = config.layers[index].attention
        if spec is None or not spec.kv.num_kv_heads:
            continue
        if isinstance(spec, AttentionSpec) and (layout is None or layout.is_divided(layout.attention[index])):
            found.append(replace(spec.kv, num_kv_heads=max(1, spec.num_kv_heads // size)))
        else:
            found.append(spec.kv)
    return found


def state_shares(config: ModelConfig, size: int, layers: Iterable[int] | None = None) -> list[StateSpec]:
    """What a rank keeps of a request in each layer with a recurrent state, of `layers` (indexes) or all: of its
    heads."""
    found = []
    for index in range(len(config.layers)) if layers is None else layers:
        layer = config.layers[index]
        state = layer.mixer.share(size).state if isinstance(layer.mixer, DeltaSpec) else layer.state
        found += [] if state is None else [state]
    return found


def whole_experts(num_experts: int, inner: int, size: int, quantised: bool, wanted: bool) -> bool:
    """Whether ranks hold whole experts, not a slice of each: where that is wanted, or slices would be too thin.

    Slices give every rank the same work, whatever the router does."""
    if size == 1 or num_experts % size:
        return False
    thin = inner % size or inner // size < SLICE or (quantised and inner // size % BLOCK)
    return bool(wanted or thin)


def fault(config: ModelConfig, size: int, expert_parallel: bool) -> str | None:
    """What cannot be divided, for people."""
    if config.vocab_size <= size * (size - 1):
        return f"a vocabulary of {config.vocab_size}"
    if config.foreign is not None and config.foreign.layout is not None:
        return config.foreign.layout.fault(config.layers, size)
    return next((fault for layer in set(config.layers) for fault in _faults(layer, size, expert_parallel)), None)


def _faults(layer: LayerSpec, size: int, expert_parallel: bool) -> Iterator[str]:
    attention, mlp = layer.mixer, layer.mlp
    if isinstance(attention, LatentAttentionSpec):
        if attention.num_heads % size:
            yield f"{attention.num_heads} attention heads"
    elif isinstance(attention, DeltaSpec):
        if attention.num_key_heads % size:
            yield f"{attention.num_key_heads} heads of keys of a gated delta net"
    elif isinstance(attention, ConvSpec | ScanSpec | PairSpec):
        if size > 1:
            yield "a layer of short convolutions" if isinstance(attention, ConvSpec) else "a layer of Mamba-2"
    elif isinstance(attention, AttentionSpec):
        heads, keys = attention.num_heads, attention.num_kv_heads
        if heads % size or (keys % size and size % keys):
            yield f"{heads} attention heads" + (f" over {keys} of keys and values" if keys != heads else "")
    if mlp is None:
        return
    if isinstance(mlp, MLPSpec):
        if mlp.inner % size:
            yield f"an MLP of {mlp.inner}"
        return
    if mlp.shared_inner % size:
        yield f"a shared expert of {mlp.shared_inner}"
    if expert_parallel and mlp.routing.num_experts % size:
        yield f"{mlp.routing.num_experts} whole experts (--enable-expert-parallel)"
    elif mlp.routing.num_experts % size and mlp.inner % size:
        yield f"{mlp.routing.num_experts} experts of {mlp.inner}"


ATTENTION = 1.7  # times as long as products of as many operations: fitted on steps of a GPU (engine/planning)


def check_stages(config: ModelConfig, size: int, counts: Sequence[int] = ()) -> None:
    """Raises ModelError where the model cannot be cut into `size` stages, or not as `counts` (layers of each) says."""
    if size == 1:
        return
    if config.foreign is not None:
        refuse(f"{config.architecture} is computed by transformers' code, which is not cut into stages", size)
    if not config.causal:
        refuse(f"{config.architecture} reads texts both ways, which is not cut into stages", size)
    if not is_cut(config):
        refuse(f"layers of {config.architecture} read what others keep, and are not cut into stages", size)
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
    first = stage_layers(config, size, counts)[0]
    if config.vision is not None and (needed := len(config.vision.deepstack)) > len(first):
        raise ModelError(
            f"--pipeline-parallel-size {size}: pictures add to the first {needed} layers, which have to be in one "
            f"stage, and the first stage has {len(first)}: take fewer stages, or --language-model-only"
        )
    if config.has_state:
        for number, part in enumerate(stage_layers(config, size, counts), 1):
            layers = [config.layers[index] for index in part]
            kept = {"attention": any(layer.attention is not None for layer in layers)}
            kept["a recurrent state"] = any(layer.state is not None for layer in layers)
            if lacking := " and ".join(what for what, there in kept.items() if not there):
                raise ModelError(
                    f"--pipeline-parallel-size {size}: stage {number} would have no layer with {lacking}, and of such "
                    "a model each needs one: take fewer stages, or say --pipeline-layer-partition"
                )


def is_cut_into(config: ModelConfig, size: int) -> bool:
    """Whether check_stages lets so many stages have the layers."""
    try:
        check_stages(config, size)
    except ModelError:
        return False
    return True


def is_cut(config: ModelConfig) -> bool:
    """Whether stages can have some of the layers each: those of our own that need nothing of others but the stream."""
    whole = (layer.attention is None or layer.attention.kv.num_kv_heads > 0 for layer in config.layers)
    alone = all(whole) and not any(layer.token_vector for layer in config.layers)
    return config.foreign is None and config.causal and alone


def refuse(reason: str, size: int) -> None:
    """Raises ModelError."""
    if size > 1:
        raise ModelError(
            f"--pipeline-parallel-size {size}: {reason}: leave it out, or take --data-parallel-size {size} for as many "
            "that each hold all of the model"
        )


def stage_layers(config: ModelConfig, size: int, counts: Sequence[int] = ()) -> list[range]:
    """The layers of each stage; `counts`: how many each has, where --pipeline-layer-partition says it."""
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


SEEN_PATCHES = 4096  # of a picture of a megapixel: what a patch attends to


def patch_cost(config: ModelConfig) -> float:
    """What a patch that the tower looks at costs, in products of a token."""
    if config.vision is None:
        return 0.0
    blocks = config.vision.blocks
    of_block = blocks.hidden * (4 * blocks.hidden + (2 + blocks.gated) * blocks.inner + 2 * SEEN_PATCHES)
    return blocks.depth * of_block / sum(_parameters(layer, config.hidden_size)[1] for layer in config.layers)


def _parameters(layer: LayerSpec, hidden: int) -> tuple[int, int]:
    """(that a layer has, that a token meets), about: norms and biases are small."""
    mixer, mlp = 0 if layer.mixer is None else sum(_mixer(layer.mixer, hidden)), layer.mlp
    if mlp is None:
        return mixer, mixer
    if isinstance(mlp, MLPSpec):
        both = mixer + (2 + mlp.gated) * mlp.inner * hidden
        return both, both
    assert isinstance(mlp, MoESpec)
    expert, shared = mlp.expert_size(hidden), (2 + mlp.gated) * mlp.shared_inner * hidden + 2 * mlp.latent * hidden
    return (mixer + shared + mlp.routing.num_experts * expert, mixer + shared + mlp.routing.top_k * expert)


def _mixer(spec: MixerSpec, hidden: int) -> Iterator[int]:
    if isinstance(spec, DeltaSpec):
        yield hidden * (spec.channels + 2 * spec.value_size + 2 * spec.num_value_heads)
        return
    if isinstance(spec, ConvSpec):
        yield hidden * 4 * spec.channels
        return
    if isinstance(spec, ScanSpec):
        yield hidden * (spec.channels + 2 * spec.inner + spec.num_heads)
        return
    if isinstance(spec, PairSpec):
        yield from (*_mixer(spec.attention, hidden), *_mixer(spec.scan, hidden))
        return
    if isinstance(spec, AttentionSpec):
        value_dim = spec.value_dim or spec.head_dim
        yield hidden * ((2 if spec.output_gate else 1) * spec.num_heads + spec.num_kv_heads) * spec.head_dim
        yield hidden * (spec.num_heads + spec.num_kv_heads) * value_dim
        return
    query = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    yield spec.q_rank * (hidden + query) if spec.q_rank else hidden * query
    yield hidden * (spec.kv_rank + spec.rope_dim)
    yield spec.kv_rank * spec.num_heads * (spec.nope_dim + spec.value_dim)
    yield spec.num_heads * spec.value_dim * hidden


class Gain(NamedTuple):
    option: str  # the field of EngineConfig that brings it; "": none does
    size: int  # what to set that to
    times: float  # how many times as many tokens the cache then holds; 0.0: it holds none now
    left: int  # bytes of the cache, on each card


def more_cards(model: ModelConfig, config: EngineConfig, weights: int, cache: int) -> Gain:
    """More ranks; more stages where the model cannot be divided further. weights, cache: see more_ranks."""
    found = more_ranks(model, config.tensor_parallel_size, weights, cache, config.enable_expert_parallel)
    if found[0]:
        return Gain("tensor_parallel_size", *found)
    if not drafts_by_model(config.speculative_config):  # which it does beside a whole model only
        found = more_stages(model, config.pipeline_parallel_size, weights, cache)
    return Gain("pipeline_parallel_size" if found[0] else "", *found)


def more_ranks(model: ModelConfig, now: int, weights: int, cache: int, expert_parallel: bool) -> tuple[int, float, int]:
    """The next number of ranks that can share the model, how many times as many tokens the cache would then hold (0.0
    where it holds none now), and its bytes on each; (0, 0.0, 0) where there is no such number. weights, cache: bytes of
    a rank now, the latter may be below 0.
    """
    size = next((size for size in sizes(model, expert_parallel) if size > now), 0)
    if not size or (left := cache + weights - weights * now // size) <= 0:
        return 0, 0.0, 0
    times = left / cache * _token_elements(model, now) / _token_elements(model, size) if cache > 0 else 0.0
    return size, round(times, 1), left


def more_stages(model: ModelConfig, now: int, weights: int, cache: int) -> tuple[int, float, int]:
    """As more_ranks, of stages: the fewest that bring room. Each has its own layers, and the cache of these alone."""
    if not is_cut(model):
        return 0, 0.0, 0
    for count in range(now + 1, min(len(model.layers), MOST) + 1):
        if (left := cache + weights - weights * now // count) > 0 and is_cut_into(model, count):
            return count, round(left / cache * count / now, 1) if cache > 0 else 0.0, left
    return 0, 0.0, 0


def _token_elements(model: ModelConfig, size: int) -> int:
    """Of keys and values on one of so many ranks."""
    return sum(spec.token_elements for spec in kv_shares(model, size))
