"""Memory is planned before it is taken: what weights and a step need, what is left for the cache, what fits in it."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ...kernels.attention.history import ring_for
from ..cache.batch import Shape
from ..cache.kv_layout import KVLayout, kv_layout
from ..cache.rows import NUM_COLUMNS
from ..describe.divide import more_cards
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..link.sampling_params import SamplingParams
from ..models.model import Model
from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig
from ..parallel.group import Group, gather
from ..parallel.pipeline import stage_of
from ..speculation.model_drafter import ModelDrafter
from ..step.runner import ModelRunner
from .host_memory import GIB, gib, machine_bytes
from .state_slots import RUNNING_SHARE, StateSlots, beside_blocks, divide_cache, wanted_bytes

if TYPE_CHECKING:
    from ..step.encoder_runner import EncoderRunner

FLOAT = 4  # bytes: what the CPU computes in
LOGIT_COPIES = 3  # of the sampler at its most expensive: the raw ones, a copy, what is sorted
ROW_BYTES = (NUM_COLUMNS + 1 + ring_for(0)) * 4 + 13  # of a row's parameters and counters, on both sides


def step_bytes(model: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Of the largest step, about: the widest block's activations, and logits with what the sampler makes of them."""
    token = 2 * model.hidden_size + max(max(layer.widths) for layer in set(model.layers))
    logits = LOGIT_COPIES * min(max_num_seqs, max_num_batched_tokens) * model.vocab_size
    return FLOAT * (max_num_batched_tokens * token + logits)


def row_bytes(max_num_seqs: int, max_model_len: int, layout: KVLayout) -> int:
    """Of the tables that are as long as rows are many: blocks, the newest tokens, parameters."""
    return (max_num_seqs + 1) * (layout.row_bytes(max_model_len) + ROW_BYTES)


def check_rows(model: Model, weights: int, settings: SchedulerConfig) -> None:
    """Raises ConfigError where rows and steps alone are more than the machine has: before they are made."""
    max_num_seqs, max_num_batched_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    max_model_len = settings.max_model_len
    layout = kv_layout(model, settings.block_size, max_model_len)

    def needed(seqs: int) -> tuple[int, int]:
        tokens = seqs if max_num_batched_tokens == max_num_seqs else max_num_batched_tokens  # it may have followed
        return row_bytes(seqs, max_model_len, layout), step_bytes(model.config, tokens, seqs)

    total = machine_bytes()
    rows, step = needed(max_num_seqs)
    if weights + rows + step <= total:
        return
    fits, beyond = 0, max_num_seqs
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if weights + sum(needed(middle)) <= total * 9 // 10 else (fits, middle)
    remedy = f"set --max-num-seqs {fits} or less" if fits else "lower --max-num-batched-tokens"
    raise ConfigError(
        f"{max_num_seqs} running requests (--max-num-seqs) of {max_model_len} tokens (--max-model-len) in steps of "
        f"{max_num_batched_tokens} (--max-num-batched-tokens) do not fit: of {total / GIB:.2f} GiB, weights take "
        f"{weights / GIB:.2f}, rows {rows / GIB:.2f} and a step {step / GIB:.2f} GiB; {remedy}, or lower "
        "--max-model-len"
    )


CPU_CACHE_BYTES = 1 * GIB
GRAPH_NODE_BYTES = 2 << 20  # of the nodes of one graph
# The sampler at its most expensive: penalties, bias, masks and every filter.
WORST_SAMPLING = SamplingParams(
    max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=0, logprobs=1,
    allowed_token_ids=(0, 1), bad_words=((0,), (0, 0)), logit_bias={0: 0.0},
)  # fmt: skip


@dataclass(frozen=True)
class MemoryPlan:
    total: int  # of the card (or the machine)
    budget: int  # what vserve may use
    weights: int
    activations: int  # peak of the largest step, sampling included
    graphs: int  # CUDA graphs, an estimate: they are captured when the cache exists
    other: int  # context, libraries, what others use of the card, tokens of the blocks; on the CPU, rows of requests
    cache: int
    num_blocks: int  # the null block included
    max_model_len: int
    layout: KVLayout
    notices: tuple[str, ...] = ()
    states: StateSlots | None = None  # None: no layer keeps a recurrent state
    pictures: int = 0  # features in the encoder cache
    tightest: str = ""  # of several ranks, the one whose numbers these are: the others have as much room or more

    @property
    def needed(self) -> int:
        """Bytes beside the blocks of the cache."""
        return self.weights + self.activations + self.graphs + self.other + self.pictures + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self.states is None else self.states.num_bytes

    @property
    def num_tokens(self) -> int:
        """Of context that the cache holds, in requests of full length: layers with a window keep no more of one."""
        size = self.layout.block_size
        length = -(-self.max_model_len // size) * size
        return (self.num_blocks - 1) * length // self.layout.request_blocks(self.max_model_len)

    def table(self) -> str:
        blocks = f"{self.num_blocks - 1} blocks of {self.layout.block_size}"
        beside = (
            ("activations, at most", self.activations),
            ("CUDA graphs, about", self.graphs),
            ("other", self.other),
            ("encoder cache", self.pictures),
        )
        rows = [
            ("weights", gib(self.weights)),
            *((name, gib(size)) for name, size in beside if size),  # on the CPU: no graphs
            *((("tightest", self.tightest),) if self.tightest else ()),
            *((("recurrent states", self.states.describe()),) if self.states is not None else ()),
            ("KV cache", f"{gib(self.cache)} = {blocks} = {self.num_tokens} tokens"),
            *((("KV groups", self._kept()),) if any(self.layout.windows) else ()),
            ("in all", f"{gib(self.needed + self.cache)} of {gib(self.budget)}"),
            ("full-length requests", f"{self.num_tokens / self.max_model_len:.1f} of {self.max_model_len} tokens"),
        ]
        return "\n".join(f"  {name:<22}{value}" for name, value in rows)

    def _kept(self) -> str:
        groups = self.layout.groups
        kept = [
            f"{sum(len(group.layers) for group in groups if group.window == window)} layers keep "
            + (f"the last {window} tokens" if window else "all tokens")
            for window in dict.fromkeys(self.layout.windows)
        ]
        blocks = self.layout.request_blocks(self.max_model_len)
        return f"{', '.join(kept)}; tokens are those of full-length requests, {blocks} blocks each"


def weight_bytes(model: Model, drafter: ModelDrafter | None = None) -> int:
    parameters = chain(model.parameters(), drafter.network.parameters() if drafter is not None else ())
    seen = {p.data_ptr(): p.numel() * p.element_size() for p in parameters}
    return sum(seen.values())


def plan_memory(
    runner: ModelRunner,
    config: EngineConfig,
    dtype: torch.dtype,
    max_num_batched_tokens: int,
    graph_shapes: Sequence[Shape] = (),
    world: Group | None = None,
) -> MemoryPlan:
    """Profiles the largest step, then sizes the cache. `world`: all ranks of the engine, whose tightest decides; None:
    those that share the layers. Raises ConfigError when not even a short context fits."""
    layout, chunk = runner.layout, max_num_batched_tokens
    block_bytes = layout.block_bytes(dtype.itemsize)
    each = block_bytes + layout.page_bytes  # with its tokens, which are counted beside the cache
    weights = weight_bytes(runner.model, runner.model_drafter)
    slot_bytes = 0 if runner.cache.states is None else runner.cache.states.slot_bytes(dtype.itemsize)
    pictures = 0 if runner.seeing is None else runner.seeing.cache_bytes
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        adapted = runner.adapters is not None  # what their sums need, too
        runner.dummy_step(runner.max_num_seqs, max_num_batched_tokens, WORST_SAMPLING, adapted=adapted)
        for most, drafts in runner.draft_depths:  # more logits than requests, where few may run
            runner.dummy_step(most, most * (1 + drafts), WORST_SAMPLING, drafts)
        if runner.seeing is not None:
            runner.seeing.warm_up()
        torch.cuda.synchronize()
        activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        budget = int(total * config.gpu_memory_utilization)
        other = total - free - weights
        graphs = _graph_bytes(runner, graph_shapes, activations // max_num_batched_tokens, dtype)
        # the same in every step
        activations += runner.cache.prompt_page_bytes(dtype.itemsize) + runner.cache.scratch_bytes(dtype.itemsize)
        activations += _sent_bytes(runner, max_num_batched_tokens, dtype)
        available = budget - weights - activations - graphs - other - pictures
        advice = f"raise --gpu-memory-utilization (now {config.gpu_memory_utilization})"
    else:
        total = budget = machine_bytes() // config.num_ranks
        activations, graphs = step_bytes(runner.model.config, max_num_batched_tokens, runner.max_num_seqs), 0
        activations += 0 if runner.seeing is None else runner.seeing.step_bytes
        other = row_bytes(runner.max_num_seqs, runner.max_model_len, layout)
        other += runner.cache.scratch_bytes(dtype.itemsize)
        other += 0 if runner.adapters is None else runner.adapters.num_bytes
        # Enough for every request at full length, and as much again to keep prefixes; a small model needs no gigabyte.
        wanted = 2 * runner.max_num_seqs * layout.request_blocks(runner.max_model_len, chunk) * each
        wanted = wanted_bytes(wanted, slot_bytes, config, runner.max_num_seqs) if slot_bytes else wanted
        available = min(CPU_CACHE_BYTES, wanted, budget - weights - activations - other - pictures)
        advice = "raise --kv-cache-memory-bytes"
    if config.kv_cache_memory_bytes is not None:
        available, each = config.kv_cache_memory_bytes, block_bytes
        advice = f"raise --kv-cache-memory-bytes (now {config.kv_cache_memory_bytes})"
    states: StateSlots | None = None
    if slot_bytes and config.num_gpu_blocks_override is not None:
        named, running = config.num_gpu_blocks_override, runner.max_num_seqs
        if config.max_num_seqs is None:
            running = max(1, min(running, int(available * RUNNING_SHARE) // slot_bytes))
        states = beside_blocks(named, slot_bytes, block_bytes, config, running)
    elif slot_bytes and available > 0:  # else _fit says what has taken it all
        states = divide_cache(available, slot_bytes, each, config, runner.max_num_seqs, advice)
        available -= states.num_bytes
    num_blocks = max(0, available) // each
    if runner.device.type == "cuda" and config.fits_cache:
        advice += _ranks(runner, config, weights, available)
        num_blocks, given_back = _with_narrow_rows(runner, available, num_blocks, each, chunk)
        other -= given_back
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override + 1
        advice = f"raise --num-gpu-blocks-override (now {config.num_gpu_blocks_override})"
    cache = num_blocks * block_bytes
    other += num_blocks * layout.page_bytes
    plan = _tightest(runner, world or runner.model.place.group, MemoryPlan(
        total, budget, weights, activations, graphs, other, cache, num_blocks, runner.max_model_len, layout,
        states=states, pictures=pictures,
    ))  # fmt: skip
    if runner.device.type == "cpu" and plan.needed + plan.cache > plan.budget:
        raise ConfigError(_too_large(config, plan, block_bytes))
    return _fit(runner, config, advice, plan, chunk)


def _ranks(runner: ModelRunner, config: EngineConfig, weights: int, cache: int) -> str:
    """Where more would do; stages where the model cannot be divided further."""
    more = more_cards(runner.model.config, config, weights, cache)
    if not more.option:
        return ""
    gain = (
        f"the cache then holds about {more.times} times as much"
        if more.times
        else f"{gib(more.left)} a card for the cache"
    )
    return f", or set --{more.option.replace('_', '-')} {more.size} ({gain})"


def _sent_bytes(runner: ModelRunner, num_tokens: int, dtype: torch.dtype) -> int:
    """Hidden states that a stage keeps until the next one has them: of all plans that are under way."""
    if runner.is_last:
        return 0
    stages: int = runner.model.place.stage.count
    return int((stages + 2) * num_tokens * runner.model.config.hidden_size * dtype.itemsize)


def _tightest(runner: ModelRunner, world: Group, plan: MemoryPlan) -> MemoryPlan:
    """Of all ranks' plans the one with the least room: one scheduler hands out the same blocks on every rank.

    Blocks are not as large in all stages, so where their number was named, the one that needs most for them."""
    if world.size == 1:
        return plan
    names = ("num_blocks", "total", "budget", "weights", "activations", "graphs", "other", "pictures", "cache")
    found = gather(world, runner.device, [getattr(plan, name) for name in names])
    room = [numbers[2] - sum(numbers[3:]) for numbers in found]
    rank = min(range(world.size), key=lambda rank: (found[rank][0], room[rank]))
    device = f"cuda:{rank}" if runner.device.type == "cuda" else "cpu"
    if (stages := runner.model.place.stage.count) > 1:
        device += f", stage {stage_of(rank, world.size, stages) + 1} of {stages}"
    least: dict[str, Any] = dict(zip(names, found[rank], strict=True))
    if runner.cache.states is not None:  # each rank has room for as many as it has planned, and so for the fewest
        states = plan.states or StateSlots(0, 0, 0)
        slots = gather(world, runner.device, [states.running, states.snapshots, states.slot_bytes])
        running, snapshots, _ = map(min, zip(*slots, strict=True))
        least["states"] = StateSlots(slots[rank][2], running, snapshots) if running else None
    return dataclasses.replace(plan, tightest=f"rank {rank} of {world.size} ({device})", **least)


def _too_large(config: EngineConfig, plan: MemoryPlan, block_bytes: int) -> str:
    """On the CPU. What is advised leaves a tenth to the processes themselves, and to others, where there is as much."""
    page_bytes = plan.layout.page_bytes

    def most_blocks(budget: int) -> int:
        return max(0, budget - plan.needed + plan.num_blocks * page_bytes) // (block_bytes + page_bytes)

    blocks = most_blocks(plan.budget * 9 // 10)
    blocks = blocks if blocks > 1 else most_blocks(plan.budget)
    option, most = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}", blocks * block_bytes
    if config.num_gpu_blocks_override is not None:
        option, most = f"--num-gpu-blocks-override {config.num_gpu_blocks_override}", blocks - 1
    remedy = f"set it to {most} or less"
    if blocks < 2:  # one is nobody's
        remedy = "lower --max-num-seqs or --max-num-batched-tokens, or take a smaller model"
    return (
        f"{option} does not fit{_at(plan)}: the KV cache would take {gib(plan.cache)}; of {gib(plan.budget)}, weights "
        f"take {gib(plan.weights)}, a step {gib(plan.activations)} and rows {gib(plan.other)}{_and(plan)}; {remedy}"
    )


def _and(plan: MemoryPlan) -> str:
    if not plan.pictures:
        return ""
    return (
        f", the encoder cache {gib(plan.pictures)} (--mm-encoder-cache-tokens; --mm-processor-kwargs says how large "
        "pictures may be, of which a step has room for the largest)"
    )


def _at(plan: MemoryPlan) -> str:
    return f" on {plan.tightest}" if plan.tightest else ""


def _with_narrow_rows(runner: ModelRunner, available: int, num_blocks: int, each: int, chunk: int) -> tuple[int, int]:
    """(blocks, bytes that the row tables give back to them) where the context has to be cut to what the cache holds.

    The tables are there while memory is planned, as wide as the whole context: 256 MiB a group for a million tokens and
    1,024 rows. `each`: bytes of a block.
    """
    context = runner.max_model_len
    tables = runner.cache.row_bytes(context)

    def rows(blocks: int) -> int:
        return runner.cache.row_bytes(min(context, runner.layout.longest_request(blocks, chunk, context)))

    more = range(num_blocks + 1, num_blocks + tables // each + 2)
    grown = num_blocks + bisect_right(more, available + tables, key=lambda blocks: blocks * each + rows(blocks))
    return (grown, tables - rows(grown)) if grown > num_blocks else (num_blocks, 0)


def _graph_bytes(runner: ModelRunner, shapes: Sequence[Shape], token_bytes: int, dtype: torch.dtype) -> int:
    """Each graph keeps its hidden states and its nodes; the other activations lie in one pool, as large as the largest.

    `token_bytes`: activations of a token in the profiled step.
    """
    if not shapes:
        return 0
    hidden = runner.model.config.hidden_size * dtype.itemsize
    each = GRAPH_NODE_BYTES * (1 if runner.model_drafter is None else 2)  # drafts have graphs of their own
    kept = sum(shape.samples * hidden + each for shape in shapes)
    tokens = max(shape.tokens for shape in shapes)
    kept += 0 if runner.seeing is None else runner.seeing.input_bytes(tokens)
    return kept + tokens * token_bytes


def _fit(runner: ModelRunner, config: EngineConfig, advice: str, plan: MemoryPlan, chunk: int) -> MemoryPlan:
    """Shrinks the context to what the cache holds, unless the user named a context: then that is an error."""
    fits = plan.layout.longest_request(plan.num_blocks, chunk, runner.max_model_len)
    if fits < min(config.block_size, runner.max_model_len):
        raise ConfigError(
            f"no memory is left for the KV cache{_at(plan)}: of {gib(plan.budget)}, weights take {gib(plan.weights)}, "
            f"a step {gib(plan.activations)}, graphs {gib(plan.graphs)} and others {gib(plan.other)}{_and(plan)}; "
            f"{advice}, or lower --max-num-batched-tokens or --max-num-seqs"
        )
    if fits >= runner.max_model_len:
        return plan
    if config.max_model_len is not None:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit{_at(plan)}: the KV cache holds {fits} tokens; "
            f"{advice}, or set --max-model-len {fits} or less"
        )
    notice = f"context cut from {runner.max_model_len} to {fits} tokens, what the KV cache holds; for more, {advice}"
    return dataclasses.replace(plan, max_model_len=fits, notices=(notice,))


def plan_encoder(runner: EncoderRunner, config: EngineConfig, settings: SchedulerConfig) -> MemoryPlan:
    """Runs the largest step, whose memory is kept: engines that start later see what is left. Raises ConfigError."""
    weights, length = weight_bytes(runner.model), settings.max_model_len
    num_texts, num_tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if runner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        for count in (-(-num_tokens // length), num_texts):
            runner.dummy_step(count, num_tokens)
            runner.dummy_step(count, num_tokens, runner.largest_pooling)
        activations = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        free, total = torch.cuda.mem_get_info()
        budget = int(total * config.gpu_memory_utilization)
        other = total - free - weights - activations  # of the card, whosever it is
        advice = f"raise --gpu-memory-utilization (now {config.gpu_memory_utilization})"
    else:
        total = budget = machine_bytes()
        widest = max(max(layer.widths) for layer in runner.model.config.layers)
        activations = 4 * num_tokens * (3 * runner.model.config.hidden_size + widest)
        other, advice = 0, "take a smaller model"
    plan = MemoryPlan(total, budget, weights, activations, 0, other, 0, num_texts + 1, length, runner.layout)
    if plan.needed > budget:
        raise ConfigError(
            f"a step of {num_tokens} tokens (--max-num-batched-tokens) does not fit: weights take {gib(weights)}, the "
            f"step {gib(activations + other)}, of {gib(budget)}; lower --max-num-batched-tokens or {advice}"
        )
    return plan
