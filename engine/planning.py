"""What a card, or several with a copy of the model each, would do under a load: from config.json alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checkpoint import checkpoint_bytes
from .config import ConfigError, EngineConfig, SchedulerConfig
from .cpu_memory import LOGIT_COPIES
from .host_memory import GIB, gib
from .kv_format import planned_format
from .kv_layout import KVLayout
from .latent_prompts import LatentPrompts
from .loader import count_parameters
from .model_config import ModelConfig
from .resolved import Machine, resolve
from .simulation import Answer, Ask, Simulation
from .speculation.settings import Speculation
from .step_model import Card, Costs, StepModel, shape_of
from .weight_size import weight_size

GRAPHS, OTHER = 2 * GIB, 1 * GIB  # of a card, about: CUDA graphs, and context and libraries
FRONT = 3.4e-3  # seconds from the client to the engine and back to its first token, beside the engine
SHARE = 0.95  # of requests that have to meet what is wanted
MOST_REPLICAS = 64


@dataclass(frozen=True)
class Setup:
    """One engine on one card."""

    card: Card
    weights: int  # bytes
    cache: int
    cache_tokens: int
    scheduler: SchedulerConfig
    model: StepModel
    acceptance: tuple[float, ...] = ()  # assumed, of drafts


@dataclass(frozen=True)
class Wanted:
    """Seconds that SHARE of the requests must not exceed; None: any."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, result: Result) -> bool:
        return (self.ttft is None or result.ttft(SHARE) <= self.ttft) and (
            self.tpot is None or result.tpot(SHARE) <= self.tpot
        )


@dataclass(frozen=True)
class Result:
    """Of one simulated load."""

    rate: float  # requests a second that came in
    answers: Sequence[Answer]  # those that count, by the time they were sent
    num_preemptions: int
    ends: Sequence[tuple[float, int]] = ()  # of all: when, and how many tokens they had

    def ttft(self, share: float) -> float:
        return FRONT + _percentile([answer.ttft for answer in self.answers], share)

    def tpot(self, share: float) -> float:
        return _percentile([answer.tpot for answer in self.answers], share)

    @property
    def seconds(self) -> float:
        return max(answer.last for answer in self.answers) - min(answer.sent for answer in self.answers)

    @property
    def output_rate(self) -> float:
        """Tokens a second, of answers that ended while requests came in; where all came at once, of all."""
        start, end = self.answers[0].sent, self.answers[-1].sent
        if not self.rate:
            return sum(answer.ask.num_output for answer in self.answers) / self.seconds
        return sum(tokens for time, tokens in self.ends if start <= time <= end) / (end - start)

    @property
    def keeps_up(self) -> bool:
        """Whether answers end as fast as requests come."""
        seconds = self.answers[-1].sent - self.answers[0].sent
        asked = sum(answer.ask.num_output for answer in self.answers)
        return not self.rate or self.output_rate * seconds >= 0.85 * asked


def set_up(stored: int, model: ModelConfig, config: EngineConfig, card: Card, costs: Costs | None = None) -> Setup:
    """The engine's settings on that card, resolved as the engine itself does. `stored`: bytes of the weights' files; 0
    where they are not here. Raises ConfigError where the model does not fit."""
    if not model.causal:
        raise ConfigError(f"{model.architecture} generates no text: only loads of generation are planned")
    machine = Machine(torch.device("cuda"), card.name, card.memory, 1, card.memory)
    settings = resolve(dataclasses.replace(config, load_format="dummy"), model, machine)  # no file is read
    check_drafts(settings.speculation)
    parameters, dtype = count_parameters(model), settings.dtype
    weights = weight_size(model, parameters, dtype, stored or parameters * dtype.itemsize, on_card=True)
    widest = max(max(layer.attention.width, layer.mlp.width) for layer in model.layers)
    step = dtype.itemsize * settings.max_num_batched_tokens * (2 * model.hidden_size + widest)
    step += 4 * LOGIT_COPIES * settings.max_num_seqs * model.vocab_size // 2
    if (latents := LatentPrompts.planned(model)) is not None:
        longest = -(-settings.max_model_len // config.block_size) * config.block_size
        step += latents.elements(settings.max_num_seqs, longest, dtype.itemsize) * dtype.itemsize
    budget = int(card.memory * config.gpu_memory_utilization)
    cache = budget - weights - step - GRAPHS - OTHER
    if config.kv_cache_memory_bytes is not None:
        cache = min(config.kv_cache_memory_bytes, card.memory - weights - step - GRAPHS - OTHER)
    specs, chunk = [layer.attention.kv for layer in model.layers], settings.max_num_batched_tokens
    format = planned_format(settings, model)
    layout = KVLayout.of(specs, config.block_size, settings.max_model_len, format)
    blocks = max(0, cache) // (layout.block_bytes(dtype.itemsize) + layout.page_bytes)
    longest = layout.longest_request(blocks, chunk, settings.max_model_len) if blocks > 1 else 0
    if longest < min(config.block_size, settings.max_model_len):
        raise ConfigError(
            f"the model does not fit one {card.name}: of {gib(budget)}, weights take {gib(weights)}, a step and graphs "
            f"{gib(step + GRAPHS + OTHER)}; take a larger card or a smaller model; `vserve serve` "
            "divides one over several cards (-tp, -pp), and plans are of one"
        )
    length = min(settings.max_model_len, longest)
    # Its depth is 1: the clock knows a step's result before the next is planned.
    scheduler = SchedulerConfig(
        max_model_len=length, max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs, max_mixed_tokens=settings.max_mixed_tokens,
        large_mixed_tokens=settings.large_mixed_tokens, backlog_steps=settings.backlog_steps,
        block_size=config.block_size, num_blocks=blocks, windows=layout.windows,
        enable_prefix_caching=config.enable_prefix_caching, enable_chunked_prefill=config.enable_chunked_prefill,
        max_drafts=max((drafts for _, drafts in settings.draft_depths), default=0), draft_depths=settings.draft_depths,
    )  # fmt: skip
    shape = shape_of(
        model.layers, parameters=parameters, vocab=model.vocab_size, hidden=model.hidden_size,
        tied=model.tie_word_embeddings, item=dtype.itemsize,
        kv_item=format.item_bytes(dtype.itemsize),
    )  # fmt: skip
    tokens = (blocks - 1) * length // max(1, layout.request_blocks(length))
    acceptance = settings.speculation.acceptance
    return Setup(card, weights, cache, tokens, scheduler, StepModel(shape, card, costs), acceptance)


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


def steady(
    setup: Setup, rate: float, num_prompt: int, num_output: int, replicas: int = 1, seconds: float = 0
) -> Result:
    """Requests that arrive at random (Poisson), of one size, for so long (0: what shows a queue that grows), the first
    fifth of them not counted."""
    alone = num_output * setup.model.seconds_alone()
    count = round(min(4000 * replicas, max(100 * replicas, rate * (seconds or max(20.0, 6 * alone)))))
    source, now, asks = random.Random(0), 0.0, []
    for _ in range(count):
        asks.append(Ask(now, num_prompt, num_output))
        now += source.expovariate(rate)
    return replay(setup, asks, replicas, rate, skip=count // 5)


def replay(setup: Setup, asks: Sequence[Ask], replicas: int = 1, rate: float = 0.0, skip: int = 0) -> Result:
    """A load as it came. Raises ConfigError for a request that no engine here takes."""
    limit = setup.scheduler.max_model_len
    for ask in asks:
        if ask.num_prompt + ask.num_output > limit:
            raise ConfigError(
                f"a request has {ask.num_prompt} + {ask.num_output} tokens: at most {limit} fit; shorten it, or raise "
                "--max-model-len"
            )
    config = setup.scheduler
    if not any(ask.prefix for ask in asks):
        config = dataclasses.replace(config, enable_prefix_caching=False)  # nothing is found: hashing is saved
    simulation = Simulation(config, setup.model.seconds, replicas, setup.acceptance)
    answers = sorted(simulation.run(asks), key=lambda answer: answer.sent)
    ends = [(answer.last, answer.ask.num_output) for answer in answers]
    return Result(rate, answers[skip:], simulation.num_preemptions, ends)


def knee(setup: Setup, wanted: Wanted, num_prompt: int, num_output: int, replicas: int = 1) -> Result | None:
    """The highest rate of requests that meets what is wanted, to 3 %; None: none does."""

    def asked(rate: float) -> Result:
        return steady(setup, rate, num_prompt, num_output, replicas)

    low = high = None
    rate = 1.0 * replicas
    # Who asks for little only, time a token for instance, is served at any rate while a queue grows: the load has to be
    # worked off as well.
    while low is None or high is None or high.rate > 1.03 * low.rate:
        result = asked(rate)
        if wanted.met(result) and result.keeps_up:
            low = result
            rate = rate * 2 if high is None else (low.rate + high.rate) / 2
        else:
            high = result
            rate = rate / 2 if low is None else (low.rate + high.rate) / 2
        if rate < 0.005 * replicas:
            return None
    return low


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def stored_bytes(folder: object) -> int:
    """Of the weights in a folder; 0 where there are none."""
    try:
        return checkpoint_bytes(folder)  # type: ignore[arg-type]
    except Exception:
        return 0


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
        pairs = (tokens - decodes) * context / 2
        rest = costs.cache * decodes * context * model.shape.kv_bytes / model.card.bandwidth
        rest += costs.attention * pairs * model.shape.pair_flops / model.card.products
        return products, rest + costs.token * tokens + costs.row * int(step["num_requests"])

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
    found = dataclasses.replace(costs, products=costs.products * scale, weights=costs.weights * scale, step=constant)
    return found, error, len(known[fitted])
