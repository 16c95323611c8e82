"""One engine on cards that are not here: what fits them, and the settings that it would choose, from config.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import torch

from ..cache.kv_format import KVFormat, planned_format
from ..cache.kv_layout import KVLayout
from ..cache.latent_prompts import LatentPrompts
from ..cache.states import StateLayout
from ..describe.divide import check_divides, kv_shares, stage_layers, state_shares
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..files.checkpoint import checkpoint_bytes
from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig
from ..options.speculation import Speculation
from ..parallel.pipeline import WHOLE, Stage
from .card import Card
from .host_memory import GIB, gib
from .machine import Machine
from .memory import LOGIT_COPIES, MemoryPlan
from .settings import Settings, choose_dtype, resolve
from .shape import Weights, kept_weights, shape_of
from .state_slots import StateSlots, divide_cache
from .step_model import Costs, StepModel
from .weight_size import weight_size

CUDA = torch.device("cuda")  # a name: nothing of it is here
GRAPHS, OTHER = 2 * GIB, 1 * GIB  # of a card, about: CUDA graphs, and context and libraries
EXCHANGE = GIB // 2  # of each of several ranks, about: what NCCL keeps


class TooLarge(ConfigError):
    """The cards' memory does not hold it."""


@dataclass(frozen=True)
class Setup:
    """One engine on one card or several. Bytes are those of the card with the least room."""

    card: Card
    ranks: int  # that divide every layer
    weights: int
    cache: int
    cache_tokens: int
    scheduler: SchedulerConfig
    stages: tuple[StepModel, ...]
    acceptance: tuple[float, ...] = ()  # assumed, of drafts

    @property
    def cards(self) -> int:
        return self.ranks * len(self.stages)

    @property
    def options(self) -> str:
        """That divide it so: " -tp 2 -pp 2", or nothing."""
        sizes = {"tp": self.ranks, "pp": len(self.stages)}
        return "".join(f" -{name} {size}" for name, size in sizes.items() if size > 1)

    def seconds_alone(self) -> float:
        """Of a token of the only request, with a short context."""
        handing = sum(stage.handing_seconds(1) for stage in self.stages[:-1])
        return sum(stage.seconds_alone() for stage in self.stages) + handing


@dataclass(frozen=True)
class _Room:
    """Of one stage's card."""

    weights: int
    step: int  # with graphs and all else
    cache: int
    blocks: int
    layout: KVLayout
    states: StateSlots | None


def weights_of(model: ModelConfig, config: EngineConfig, card: Card) -> Weights:
    """How they are kept on that card."""
    return kept_weights(model, choose_dtype(config.dtype, model.dtype, CUDA), card.codes)


def set_up(
    stored: int, model: ModelConfig, config: EngineConfig, card: Card, costs: Costs | None = None,
    weights: Weights | None = None,
) -> Setup:  # fmt: skip
    """The engine's settings on so many of that card, resolved as the engine itself does. `stored`: bytes of the
    weights' files; 0 where they are not here. weights: those of `weights_of`, where they are known. Raises ConfigError,
    TooLarge where the model does not fit, ModelError where it cannot be divided so."""
    if not model.causal:
        raise ConfigError(f"{model.architecture} generates no text: only loads of generation are planned")
    ranks, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    check_divides(model, ranks, config.enable_expert_parallel)
    machine = Machine(CUDA, card.name, card.memory, 1, card.memory, card.codes)
    settings = resolve(dataclasses.replace(config, load_format="dummy"), model, machine)  # no file is read
    check_drafts(settings.speculation)
    format, weights = planned_format(settings, model), weights or weights_of(model, config, card)
    stages = [WHOLE]
    if num_stages > 1:
        layers = stage_layers(model, num_stages, config.stage_layers)
        stages = [Stage(index, num_stages, layers[index]) for index in range(num_stages)]
    sized = partial(shape_of, model, weights, format, size=ranks, expert_parallel=config.enable_expert_parallel)
    shapes = [sized(stage=stage) for stage in stages]
    if stored and card.codes:  # the files are here: what they take is known
        whole = shape_of(model, weights, format)
        stored = weight_size(model, whole.num_weights, settings.dtype, stored, on_card=True)
        sizes = [int(stored * shape.num_bytes / whole.num_bytes) for shape in shapes]
    else:
        sizes = [shape.num_bytes for shape in shapes]
    rooms = [
        _room(stage, size, model, config, settings, format, card) for stage, size in zip(stages, sizes, strict=True)
    ]
    tightest = min(rooms, key=lambda room: room.blocks)
    blocks, layout, chunk = tightest.blocks, tightest.layout, settings.max_num_batched_tokens
    longest = layout.longest_request(blocks, chunk, settings.max_model_len) if blocks > 1 else 0
    needed = config.max_model_len or min(config.block_size, settings.max_model_len)
    if longest < needed:
        raise TooLarge(_too_large(config, card, tightest, longest))
    length = min(settings.max_model_len, longest)
    plan = MemoryPlan(
        card.memory, card.memory, tightest.weights, tightest.step, 0, 0, tightest.cache, blocks, length, layout,
        states=tightest.states,
    )  # fmt: skip
    tokens = plan.num_tokens
    # Of a tiny model millions fit, of which no load needs more than these; a pool of all would take minutes to make.
    most = 1 + 2 * settings.max_num_seqs * layout.request_blocks(length, chunk)
    plan = dataclasses.replace(plan, num_blocks=min(blocks, most))
    # On one card its depth is 1: the clock knows a step's result before the next is planned.
    depth = num_stages + 1 if num_stages > 1 else 1
    scheduler = dataclasses.replace(settings.fit(plan), depth=depth)
    models = tuple(StepModel(shape, card, costs, ranks * num_stages) for shape in shapes)
    acceptance = settings.speculation.acceptance
    return Setup(card, ranks, tightest.weights, tightest.cache, tokens, scheduler, models, acceptance)


def _room(
    stage: Stage, weights: int, model: ModelConfig, config: EngineConfig, settings: Settings,
    format: KVFormat, card: Card,
) -> _Room:  # fmt: skip
    """What is left for the cache once weights and the largest step have theirs."""
    item, tokens = settings.dtype.itemsize, settings.max_num_batched_tokens
    ranks = config.tensor_parallel_size
    widest = max(max(layer.widths) for layer in model.layers) // ranks
    step = item * tokens * (2 * model.hidden_size + widest)
    if stage.is_last:
        step += 4 * LOGIT_COPIES * settings.max_num_seqs * model.vocab_size // 2
    else:
        step += item * tokens * model.hidden_size * (stage.count + 2)  # sent, and not all received yet
    if (latents := LatentPrompts.planned(model, ranks)) is not None:
        longest = -(-settings.max_model_len // config.block_size) * config.block_size
        step += latents.elements(settings.max_num_seqs, longest, item) * item
    step += GRAPHS + OTHER + (EXCHANGE if ranks * stage.count > 1 else 0)
    cache = int(card.memory * config.gpu_memory_utilization) - weights - step
    if config.kv_cache_memory_bytes is not None:
        cache = min(config.kv_cache_memory_bytes, card.memory - weights - step)
    specs = kv_shares(model, ranks)
    layout = KVLayout.of(specs, config.block_size, settings.max_model_len, format)
    if stage.count > 1:
        layers = model.kv_places(stage.indices(len(model.layers)))
        layout = layout.of_stage([specs[index] for index in layers], layers)
    mine = stage.indices(len(model.layers)) if stage.count > 1 else None
    each, states = layout.block_bytes(item) + layout.page_bytes, None
    slots = StateLayout.of(state_shares(model, ranks, mine), settings.speculation.num_drafts, settings.state_dtype)
    if slots is not None and cache > 0:  # else the model itself does not fit
        advice = f"take another card than {card.name}"
        states = divide_cache(cache, slots.slot_bytes(item), each, config, settings.max_num_seqs, advice)
        cache -= states.num_bytes
    return _Room(weights, step, cache, max(0, cache) // each, layout, states)


def _too_large(config: EngineConfig, card: Card, room: _Room, longest: int) -> str:
    cards = config.world_size
    where = f"one {card.name}" if cards == 1 else f"{cards} cards of {card.name} ({config.divided_by})"
    if longest >= config.block_size:
        return (
            f"--max-model-len {config.max_model_len} does not fit {where}, whose cache holds {longest} tokens: set it "
            f"to {longest} or less"
        )
    budget = int(card.memory * config.gpu_memory_utilization)
    return (
        f"the model does not fit {where}: of {gib(budget)} each, weights take {gib(room.weights)}, a step and graphs "
        f"{gib(room.step)}"
    )


def check_drafts(speculation: Speculation) -> None:
    """Raises ConfigError for what no plan can know of drafts."""
    if speculation.by_model:
        raise ConfigError(
            "--speculative-config: what a model that drafts takes of a step has not been measured, and is not planned; "
            'say "method": "ngram" for the most that drafts would bring which cost nothing'
        )
    if speculation.num_drafts and not speculation.acceptance:
        raise ConfigError(
            "--speculative-config: how many drafts hold follows from the texts: assume it, with "
            '"rejection_sample_method": "synthetic" and "synthetic_acceptance_length", the tokens that a request gets '
            "in a step, such as 2.5 (`vserve bench serve` shows it of a load); or leave it out"
        )


def stored_bytes(folder: object) -> int:
    """Of the weights in a folder; 0 where there are none."""
    try:
        return checkpoint_bytes(folder)  # type: ignore[arg-type]
    except Exception:
        return 0
