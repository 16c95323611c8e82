"""Over how many ranks a model can be divided, known from config.json alone: without torch, before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..families.layer_spec import AttentionSpec, KVSpec, LatentAttentionSpec, LayerSpec, MLPSpec

if TYPE_CHECKING:
    from .choice import Foreign
    from .model_config import ModelConfig

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
    possible = ", ".join(map(str, sizes(config, expert_parallel)))
    raise ModelError(
        f"--tensor-parallel-size {size}: {why} cannot be divided over {size} ranks: take one of {possible}, or "
        f"--data-parallel-size {size} for as many that each hold all of the model; --pipeline-parallel-size deals out "
        "whole layers, to any number of ranks"
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


def kv_share(config: ModelConfig, index: int, size: int) -> KVSpec:
    """What a rank keeps of a token in a layer: neighbours share the heads of keys where these are fewer than ranks, and
    latents are whole on every rank."""
    spec = config.layers[index].attention
    layout = None if config.foreign is None else config.foreign.layout
    if not isinstance(spec, AttentionSpec) or (layout is not None and not layout.is_divided(layout.attention[index])):
        return spec.kv
    return replace(spec.kv, num_kv_heads=max(1, spec.num_kv_heads // size))


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
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, LatentAttentionSpec):
        if attention.num_heads % size:
            yield f"{attention.num_heads} attention heads"
    elif isinstance(attention, AttentionSpec):
        heads, keys = attention.num_heads, attention.num_kv_heads
        if heads % size or (keys % size and size % keys):
            yield f"{heads} attention heads" + (f" over {keys} of keys and values" if keys != heads else "")
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
