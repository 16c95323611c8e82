"""What weights will take in memory, known from headers: those that cannot fit are refused before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from ..describe.divide import MOST, is_cut, is_cut_into, sizes
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..families.layer_spec import MoESpec
from ..options.config import EngineConfig
from ..options.speculation import drafts_by_model
from ..quant.format import FLOATS, TensorInfo
from ..quant.online import OnlineScheme
from ..speculation.loading import Draft
from ..weights.loader import count_ordered_experts, count_parameters
from .host_memory import available_bytes, gib, machine_bytes
from .machine import Machine

LARGEST_SHARE = 0.97  # of a card: its context and libraries need the rest
HELPERS = 5 << 30  # bytes of a card that our own processes may have, which compile kernels and end
EVEN = 0.9  # of the largest stage's weights, that the mean stage has at least
STEP_SHARE = 0.02  # of a card, beside the weights, for a step and a little cache


def weight_size(config: ModelConfig, parameters: int, dtype: torch.dtype, stored: int, on_card: bool) -> int:
    """Bytes. Codes stay codes, on a card where activations are not in fp32, but for those of experts whose columns have
    an order of their own. `stored`: bytes in the checkpoint; `parameters`: as if not quantised."""
    if config.quantization is None or (on_card and dtype.itemsize > 2):
        return parameters * dtype.itemsize
    online = config.quantization if isinstance(config.quantization, OnlineScheme) else None
    bytes_each = online.bytes_each if online else stored / parameters
    if online and online.experts_alone:
        if _without_gates(config):
            return parameters * dtype.itemsize
        experts = _experts(config)
        return int(experts * bytes_each + (parameters - experts) * dtype.itemsize)
    size = _with_codes(config, parameters, dtype, bytes_each)
    return size + int(_ordered_experts(config, parameters, on_card) * (dtype.itemsize - bytes_each))


def _experts(config: ModelConfig) -> int:
    """Parameters of experts."""
    mixtures = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)]
    return sum(mlp.routing.num_experts * mlp.expert_size(config.hidden_size) for mlp in mixtures)


def orders_experts(config: ModelConfig, on_card: bool) -> bool:
    """Whether codes of experts become numbers: where experts have no gates, and on a card, whose kernels take no order
    of columns."""
    return _without_gates(config) or (on_card and count_ordered_experts(config) > 0)


def _without_gates(config: ModelConfig) -> bool:
    return any(isinstance(layer.mlp, MoESpec) and not layer.mlp.gated for layer in config.layers)


def _ordered_experts(config: ModelConfig, parameters: int, on_card: bool) -> float:
    """Those of a rank's `parameters`."""
    if not orders_experts(config, on_card):
        return 0.0
    count = _experts(config) if _without_gates(config) else count_ordered_experts(config)
    return parameters * count / count_parameters(config)


def _with_codes(config: ModelConfig, parameters: int, dtype: torch.dtype, bytes_each: float) -> int:
    outside = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)  # seldom quantised
    return int((parameters - outside) * bytes_each + outside * dtype.itemsize)


def check_weights(
    config: EngineConfig, model: ModelConfig, machine: Machine, dtype: torch.dtype, parameters: int, stored: int,
    drafts: int = 0,
) -> int:  # fmt: skip
    """→ bytes of the weights; of one rank, as `parameters` and `stored` are, and `drafts`, the bytes of who drafts.
    Raises ConfigError where this machine cannot hold them, with what would do."""
    on_card = machine.device.type == "cuda"
    size = drafts + weight_size(model, parameters, dtype, stored, on_card)
    share, room, free = config.gpu_memory_utilization, available_bytes() // config.num_ranks, 0
    where = f"the machine has {gib(room)} free of {gib(machine_bytes())}"
    if on_card:
        room, free = int(machine.card_bytes * share), machine.card_free
        where = f"{machine.name} has {gib(free)} free of {gib(machine.card_bytes)}"
        where += f", of which vserve may use {gib(room)} (--gpu-memory-utilization {share})"
        room -= max(0, machine.card_bytes - free - HELPERS)
    if size <= room:
        return size
    remedies = list(_utilization(machine, share, size)) if on_card else []
    if drafts and size - drafts <= room:
        remedies.append("leave --speculative-config out")
    remedies += list(_ranks(config, model, size, room)) if on_card else []
    remedies += smaller_weights(model, parameters, dtype, stored, room - drafts, on_card)
    remedies += list(_stages(config, model, size, room)) if on_card else []
    more = "a larger card" if on_card else "more memory"
    name = str(dtype).removeprefix("torch.")
    told = f"{parameters:,} parameters in {name}" + (f", and {gib(drafts)} of who drafts" if drafts else "")
    raise ConfigError(
        f"the weights take {gib(size)} ({told}), and {where}: "
        f"{', or '.join([*remedies, 'serve a smaller model'])}, or take {more}"
    )


def _utilization(machine: Machine, share: float, size: int) -> Iterable[str]:
    """Where others leave enough of the card."""
    used = machine.card_bytes - machine.card_free
    needed = math.ceil(100 * ((size + used) / machine.card_bytes + STEP_SHARE)) / 100
    if share < needed <= LARGEST_SHARE:
        yield f"raise --gpu-memory-utilization to {needed}"


def _ranks(config: EngineConfig, model: ModelConfig, size: int, room: int) -> Iterable[str]:
    """The fewest that would do, each with a card like this one."""
    now = config.tensor_parallel_size
    for count in sizes(model, config.enable_expert_parallel):
        each = size * now // count
        if count > now and each <= room:
            yield f"set --tensor-parallel-size {count} ({gib(each)} a card)"
            return


def _stages(config: EngineConfig, model: ModelConfig, size: int, room: int) -> Iterable[str]:
    """As _ranks; whole layers are dealt out, so that it is not quite as even."""
    now = config.pipeline_parallel_size
    if is_cut(model) and not drafts_by_model(config.speculative_config):
        for count in range(now + 1, min(len(model.layers), MOST) + 1):
            if (each := size * now // count) <= room * EVEN and is_cut_into(model, count):
                yield f"set --pipeline-parallel-size {count} (about {gib(each)} a card)"
                return


def smaller_weights(
    model: ModelConfig, parameters: int, dtype: torch.dtype, stored: int, room: int, on_card: bool
) -> Iterable[str]:
    """The ways to store them that fit `room` bytes. `stored`: bytes in the checkpoint."""
    ordered = orders_experts(model, on_card) and not _without_gates(model)
    if ordered and _with_codes(model, parameters, dtype, stored / parameters) <= room:
        yield (
            "take a checkpoint without desc_act (actorder group): with it, on a GPU experts are kept as numbers of "
            f"{8 * dtype.itemsize} bits"
        )
    if model.quantization is not None:
        return
    if dtype.itemsize > 2 and parameters * 2 <= room:
        yield f"add --dtype bfloat16 ({gib(parameters * 2)})"
    if not on_card or dtype.itemsize == 2:
        for kind in ("fp8" if on_card else "int8", "int4"):
            size = weight_size(replace(model, quantization=OnlineScheme(kind)), parameters, dtype, stored, on_card)
            if size <= room:
                yield f"add -q {kind} ({gib(size)})"


_WHOLE = ("embed_tokens.weight", "fc.weight", "eh_proj.weight")  # of a head, on every rank


def draft_bytes(
    draft: Draft, target: ModelConfig, dtype: torch.dtype, num_ranks: int, expert_parallel: bool, on_card: bool
) -> int:
    """Of one of the target's ranks, about."""
    size = 1 if draft.settings.num_ranks == 1 else num_ranks
    stored = sum(info.num_bytes for info in draft.tensors.values())
    described = draft.described
    if isinstance(described, ModelConfig):
        parameters = count_parameters(described, size, expert_parallel)
        share = parameters / count_parameters(described)
        return weight_size(described, parameters, dtype, int(stored * share), on_card)
    scheme = (target if described is None else described.config).quantization
    each = scheme.bytes_each if isinstance(scheme, OnlineScheme) else dtype.itemsize
    found = 0.0
    for name, info in draft.tensors.items():
        taken = _bytes(info, dtype.itemsize if name.endswith(_WHOLE[0]) else each)
        found += taken if name.endswith(_WHOLE) else taken / size
    return int(found)


def _bytes(info: TensorInfo, each: float) -> float:
    """Codes stay codes."""
    return prod(info.shape) * each if info.dtype in FLOATS else info.num_bytes
