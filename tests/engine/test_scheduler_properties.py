"""Random workloads against a device that checks every cache slot it reads, and a model that needs no batch.

The "language model" is a chain of hashes: the state after a prefix decides the next token. The device stores in each
cache slot the state of the prefix it was written for, and compares the whole context of every row it computes: a wrong
page, a poisoned prefix hit, a block freed too early or a stale row shows at once, and so does a token too many or few.
"""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType

import numpy as np
import pytest

import vserve.engine.cache.kv_layout as kv_capacity_module
import vserve.engine.grammar.guide as guide_module
import vserve.engine.schedule.block_pool as block_pool_module
import vserve.engine.schedule.kv_cache as kv_cache_module
import vserve.engine.schedule.kv_group as kv_group_module
import vserve.engine.schedule.planner as planner_module
import vserve.engine.schedule.prompt_results as prompt_results_module
import vserve.engine.schedule.request as request_module
import vserve.engine.schedule.roster as roster_module
import vserve.engine.schedule.scheduler as scheduler_module
import vserve.engine.schedule.sharing as sharing_module
import vserve.engine.schedule.step as step_module
import vserve.engine.step.mask as mask_module
from vserve.engine.grammar.guide import Guide
from vserve.engine.link.media import MediaItem
from vserve.engine.link.messages import RequestOutput, unpack_tokens
from vserve.engine.link.plan import NewRow, StepPlan, StepResult, TokenLogprobs
from vserve.engine.link.sampling_params import CLS, LAST, MEAN, POOLINGS, Pooling, SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request, Status
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.schedule.sharing import Depth
from vserve.engine.step.mask import TokenMask, bound, make_mask

VOCAB = 11
GARBAGE = -1  # what a failed step leaves behind: states of no prefix, and the tokens sampled from them
TOTAL_STEPS = int(os.environ.get("VSERVE_PROPERTY_STEPS", "100000"))
PARTS = 5
ROOMS = {
    "guide": guide_module,
    "mask": mask_module,
    "planner": planner_module,
    "scheduler": scheduler_module,
    "kv_cache": kv_cache_module,
    "kv_group": kv_group_module,
    "kv_capacity": kv_capacity_module,
    "block_pool": block_pool_module,
    "prompt_results": prompt_results_module,
    "request": request_module,
    "roster": roster_module,
    "stage_turns": sharing_module,
    "step": step_module,
}


# ---- the model, unbatched ----
def first_state(salt: str | None) -> int:
    return hash((0, sum(salt.encode()) if salt is not None else -7))


def next_state(state: int, token: int) -> int:
    return hash((state, token)) | 1  # never GARBAGE, never None


def next_token(state: int, banned: tuple[int, ...]) -> int:
    token = (state >> 5) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


class Grammar:
    """Allows most tokens, which ones a hash of all it has accepted tells, as does its end; some break at some output.

    Its key: seed, what breaks ("" for nothing), before which output.
    """

    def __init__(self, key: str) -> None:
        seed, self.broken, at = key.split(":")
        self.state, self.left = hash((int(seed), 3)), int(at)
        self.before: list[tuple[int, int]] = []

    @property
    def banned(self) -> tuple[int, ...]:
        return tuple(token for token in range(VOCAB) if token % 3 == self.state % 3)

    def breaks(self, place: str) -> bool:
        return self.broken == place and self.left == 0

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        if self.breaks("fill"):
            raise RuntimeError("broken grammar")
        assert row.shape == (1,) and row.dtype == np.int32
        row[0] = sum(1 << token for token in range(VOCAB) if token not in self.banned)

    def accept(self, token: int) -> bool:
        if self.breaks("accept"):
            raise RuntimeError("broken grammar")
        if self.breaks("refuse") or token in self.banned:
            return False
        self.before.append((self.state, self.left))
        self.state, self.left = hash((self.state, token)), self.left - 1
        return True

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self.state, self.left = self.before.pop()

    @property
    def terminated(self) -> bool:
        return self.state % 29 == 0


def score(state: int, position: int) -> TokenLogprobs:
    return TokenLogprobs(float(state % 99_991), position, [], [])


def banned_tokens(sampling: SamplingParams, num_outputs: int) -> tuple[int, ...]:
    if num_outputs >= sampling.min_tokens:
        return ()
    return sampling.stop_token_ids + (() if sampling.ignore_eos else sampling.eos_token_ids)


def oracle(
    prompt: list[int], salt: str | None, sampling: SamplingParams, max_model_len: int, capacity: int
) -> tuple[list[int], str, int | None]:
    """The tokens that a request must get, its finish reason and stop reason."""
    outputs: list[int] = []
    state = first_state(salt)
    for token in prompt:
        state = next_state(state, token)
    if len(prompt) > capacity:
        return outputs, "error", None
    if sampling.pooling is not None:
        return outputs, "stop", None
    grammar = Grammar(sampling.grammar) if sampling.grammar is not None else None
    while True:
        banned = banned_tokens(sampling, len(outputs)) + (grammar.banned if grammar else ())
        token = next_token(state, banned)
        if grammar and (grammar.breaks("fill") or grammar.breaks("accept") or not grammar.accept(token)):
            return outputs, "error", None
        outputs.append(token)
        state = next_state(state, token)
        if token in sampling.eos_token_ids and not sampling.ignore_eos:
            return outputs, "stop", None
        if token in sampling.stop_token_ids:
            return outputs, "stop", token
        if grammar and grammar.terminated:
            return outputs, "stop", None
        if len(outputs) == sampling.max_tokens or len(prompt) + len(outputs) == max_model_len:
            return outputs, "length", None
        if len(prompt) + len(outputs) > capacity:
            return outputs, "error", None


# ---- the device ----
class Row:
    def __init__(self, new: NewRow, salt: str | None, num_groups: int) -> None:
        self.request_id = new.request_id
        self.num_prompt_tokens = new.num_prompt_tokens
        self.sampling = new.sampling
        self.computed = new.num_computed_tokens
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.seed = first_state(salt)
        self.states: list[int] = []  # states[i]: after token i
        self.tainted = False  # has read garbage: nothing it computes is worth anything
        self.drafts: list[int] = []  # behind the tokens that there are, once it has sampled
        for token in unpack_tokens(new.token_ids):
            self.push(token)

    @property
    def num_outputs(self) -> int:
        return len(self.states) - self.num_prompt_tokens

    def push(self, token: int) -> None:
        before = self.states[-1] if self.states else self.seed
        self.states.append(GARBAGE if token == GARBAGE or before == GARBAGE else next_state(before, token))


class Device:
    """Executes plans in order, knowing of a request only what plans have said."""

    row_type = Row

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        self.config = config
        self.salts = salts
        self.rows: dict[int, Row] = {}
        self.waiting: dict[int, int] = {}  # of a prompt that is pooled chunk by chunk, by its row
        self.luck = random.Random(len(salts) + config.num_blocks)
        self.hit_rate = self.luck.choice([0.0, 0.5, 0.9, 1.0])  # of a draft
        self.drafts: list[list[int]] = []  # of the first rows of a step
        self.cache = [[0] * config.block_size for _ in range(config.num_blocks)]

    def execute(self, plan: StepPlan, fails: bool) -> None:
        self.apply_diffs(plan)
        self.check_shape(plan)
        self.batch = batch = [self.rows[row] for row in plan.rows]
        self.drafts = [self.draft(row, plan.num_drafts) for row in batch[: plan.num_decodes]] if plan.num_drafts else []
        for row, num_new in zip(batch, plan.num_tokens, strict=True):  # KV of the whole batch first, as the kernels do
            self.write(row, num_new, fails)
        for row, num_new in zip(batch, plan.num_tokens, strict=True):
            row.tainted = row.tainted or fails
            self.attend(row, row.computed + num_new)
            row.computed += num_new
        self.scores = [self.score(batch[index], plan.num_tokens[index]) for index in plan.scored]
        self.embeddings = [e for i in plan.pooled if (e := self.pool(plan.rows[i], plan.num_tokens[i])) is not None]

    def draft(self, row: Row, count: int) -> list[int]:
        """What was written behind the tokens that there are when it sampled last; before, anything stands there."""
        assert row.computed == len(row.states) - 1
        drafts = row.drafts[:count] or [self.luck.randrange(VOCAB) for _ in range(count)]
        for token in drafts:
            row.push(token)
        return drafts

    def propose(self, row: Row) -> None:
        """It has sampled."""
        row.drafts, length = [], len(row.states)
        for place in range(self.config.max_drafts):
            right = next_token(row.states[-1], banned_tokens(row.sampling, row.num_outputs))
            row.drafts.append(right if self.luck.random() < self.hit_rate else (right + 1 + place) % VOCAB)
            row.push(row.drafts[-1])
        del row.states[length:]

    def verify(
        self, row: Row, drafts: list[int], rng: random.Random, nan_rate: float, masks: list[tuple[int, ...]], most: int
    ) -> tuple[list[int], bool]:
        """The tokens kept, and whether the last of them is none: NaN. `masks`: of the tokens behind the drafts, as far
        as there are any, of which `most` may hold."""
        row.computed -= len(drafts)
        del row.states[row.computed :]
        tokens: list[int] = []
        for place, draft in enumerate([*drafts, GARBAGE]):
            is_nan = not row.tainted and rng.random() < nan_rate
            row.tainted |= is_nan
            banned = banned_tokens(row.sampling, row.num_outputs) + (masks[place] if place < len(masks) else ())
            token = GARBAGE if row.tainted else next_token(row.states[-1], banned)
            draft = GARBAGE if place == most else draft
            row.push(token)
            tokens.append(token)
            if is_nan or token != draft or token == GARBAGE:
                row.computed += len(tokens) - 1
                return tokens, is_nan
        raise AssertionError("no draft is GARBAGE")

    def score(self, row: Row, num_new: int) -> list[TokenLogprobs]:
        assert row.sampling.prompt_logprobs is not None, "nobody asked"
        last = min(row.computed, row.num_prompt_tokens - 1)
        positions = range(row.computed - num_new, last)
        assert positions, "no prompt token follows these"
        return [score(GARBAGE if row.tainted else row.states[p], p) for p in positions]

    def pool(self, number: int, num_new: int) -> bytes | None:
        """None while the prompt goes on."""
        row = self.rows[number]
        assert row.sampling.pooling is not None, "nobody asked"
        kind, begin = row.sampling.pooling.kind, row.computed - num_new
        states = row.states[begin : row.computed]
        if kind == MEAN:
            state = sum(states) + (self.waiting.pop(number) if begin else 0)
        elif kind == CLS:
            state = self.waiting.pop(number) if begin else states[0]
        else:
            state = states[-1]
        if row.computed == row.num_prompt_tokens:
            return b"garbage" if row.tainted else b"%d" % state
        self.waiting[number] = state
        return None

    def sample(
        self, plan: StepPlan, rng: random.Random, nan_rate: float, fails: bool, mask: TokenMask | None
    ) -> StepResult | None:
        batch = self.batch
        masked = {}
        if mask is not None:
            words = (int(word) for (word,) in mask.bits)
            masked = {
                i: tuple(t for t in range(VOCAB) if not word >> t & 1) for i, word in zip(mask.rows, words, strict=True)
            }
        tokens, errors, counts, cuts = [], {}, [], dict(mask.cuts) if mask is not None else {}
        sampling_rows = {
            i for i, row in enumerate(batch) if row.computed == len(row.states) and row.sampling.pooling is None
        }
        assert sampling_rows == set(plan.sampled), "rows that reach their last token are not those that sample"
        for i, index in enumerate(plan.sampled):
            row = batch[index]
            if index < len(self.drafts):
                drafts = self.drafts[index]
                assert i == index and len(row.states) <= self.config.max_model_len - 1
                sample = i * (1 + len(drafts))
                masks = [masked.pop(sample + place) for place in range(1 + len(drafts)) if sample + place in masked]
                postponed = mask is not None and i in mask.postponed
                kept, is_nan = self.verify(
                    row, drafts, rng, 0 if postponed else nan_rate, masks, cuts.get(i, len(drafts))
                )
                if postponed:
                    row.computed -= len(kept)
                    del row.states[row.computed + 1 :]
                elif is_nan:
                    errors[len(tokens) + len(kept) - 1] = "NaN"
                tokens += kept
                counts.append(len(kept))
                continue
            counts.append(1)
            if mask is not None and i in mask.postponed:
                row.computed -= 1
                tokens.append(GARBAGE)
                continue
            num_outputs = row.num_outputs
            assert num_outputs < row.sampling.max_tokens or self.config.max_drafts, "scheduled past max_tokens"
            assert len(row.states) < self.config.max_model_len, "scheduled past max_model_len"
            if not row.tainted and rng.random() < nan_rate:
                errors[len(tokens)] = "NaN"
                row.tainted = True
            banned = banned_tokens(row.sampling, num_outputs) + masked.pop(i + len(self.drafts) * plan.num_drafts, ())
            token = GARBAGE if row.tainted else next_token(row.states[-1], banned)
            row.push(token)
            tokens.append(token)
        assert not masked, "masks of samples that there are not"
        for index in plan.sampled:
            self.propose(batch[index])
        told = [batch[plan.sampled[index]].drafts[: self.luck.choice([0, 1, 9, 9])] for index in plan.told]
        embeddings = [None if rng.random() < nan_rate else embedding for embedding in self.embeddings]
        return (
            None
            if fails
            else StepResult(
                plan.step,
                tokens,
                None,
                errors,
                0.0,
                self.scores,
                embeddings,
                counts=counts if self.drafts else [],
                drafts=told,
            )
        )

    def apply_diffs(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            assert new.num_computed_tokens < len(unpack_tokens(new.token_ids))
            self.rows[new.row] = self.row_type(new, self.salts[new.request_id], len(self.config.windows))
        for group, writes in enumerate(plan.new_blocks):
            for write in writes:
                row, window = self.rows[write.row], self.config.windows[group]
                table = row.tables[group]
                gap = write.start - len(table)
                assert gap == 0 or (gap > 0 and window and not table), "block numbers are missing"
                table += [0] * gap + write.block_ids
                assert 0 not in write.block_ids
                unseen = max(0, row.computed - window + 1) // self.config.block_size if window else 0
                assert 0 not in table[unseen:], "a null block that is still seen"

    def check_shape(self, plan: StepPlan) -> None:
        assert len(set(plan.rows)) == len(plan.rows) == len(plan.num_tokens) == len(plan.num_computed)
        assert plan.total_tokens <= self.config.max_num_batched_tokens
        assert all(n == 1 + plan.num_drafts for n in plan.num_tokens[: plan.num_decodes])
        assert plan.num_drafts or all(n > 1 for n in plan.num_tokens[plan.num_decodes :])
        assert plan.num_decodes or not plan.num_drafts
        surplus = self.config.max_drafts * (self.config.depth - 1)
        for row, computed in zip(plan.rows, plan.num_computed, strict=True):
            assert 0 <= computed - self.rows[row].computed <= surplus, "host and device count differently"

    def write(self, row: Row, num_new: int, fails: bool) -> None:
        size = self.config.block_size
        for group, table in enumerate(row.tables):
            for position in range(row.computed, row.computed + num_new):
                state = row.states[position]  # IndexError: asked to compute a token that does not exist
                spoilt = fails or row.tainted or state == GARBAGE
                assert table[position // size], "writes into the null block"
                self.cache[table[position // size]][position % size] = GARBAGE if spoilt else state + group

    def attend(self, row: Row, end: int) -> None:
        size = self.config.block_size
        for group, table in enumerate(row.tables):
            states = [state + group for state in row.states] if group else row.states
            window = self.config.windows[group]
            first = max(0, row.computed - window + 1) if window else 0  # that the step's first token sees
            for index in range(first // size, -(-end // size)):
                begin, stop = max(0, first - index * size), min(size, end - index * size)
                seen, wanted = self.cache[table[index]][begin:stop], states[index * size + begin : index * size + stop]
                if seen == wanted or row.tainted:
                    continue
                assert GARBAGE in seen, f"request {row.request_id} reads another prefix in block {table[index]}"
                row.tainted = True


# ---- a workload ----
@dataclass
class Client:
    """What the outside knows of a request."""

    prompt: list[int]  # as the model sees it
    salt: str | None
    sampling: SamplingParams
    ids: list[int]  # the prompt as the scheduler knows it
    outputs: list[int] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | None = None
    spoilt: bool = False  # an error was injected
    aborted: bool = False

    def scores(self) -> list[TokenLogprobs]:
        scores, state = [], first_state(self.salt)
        for position, token in enumerate(self.prompt[:-1]):
            state = next_state(state, token)
            scores.append(score(state, position))
        return scores

    def embedding(self, kind: str) -> bytes:
        states = [first_state(self.salt)]
        for token in self.prompt:
            states.append(next_state(states[-1], token))
        return b"%d" % {LAST: states[-1], CLS: states[1], MEAN: sum(states[1:])}[kind]


def random_config(rng: random.Random, windowed: bool) -> SchedulerConfig:
    block_size = rng.choice([1, 2, 4, 8, 16])
    windows = rng.choice([(0,), (0,), (0,), (0,), (0, 0)])
    if windowed:
        width = rng.choice([1, 2, 3, 5, 8, 13, 20])
        windows = rng.choice([(width,), (0, width), (0, width), (0, width, width), (0, width + 6, width)])
    max_num_seqs = rng.choice([1, 2, 3, 4, 8])
    roomy = rng.random() < 0.3
    chunked = rng.random() < 0.75
    config = SchedulerConfig(
        max_model_len=rng.choice([4, 12, 24, 48, 48]),
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 2, 5, 12, 60]),
        max_num_seqs=max_num_seqs,
        max_mixed_tokens=(mixed := rng.choice([0, 1, 4, 12]) if chunked else 0),
        large_mixed_tokens=(2 * mixed, 4 * mixed + 1) if mixed else (),
        backlog_steps=8 * max_num_seqs,
        block_size=block_size,
        num_blocks=1 + len(windows) * (rng.randint(20, 60) if roomy else rng.randint(1, 3 + 24 // block_size)),
        windows=windows,
        enable_prefix_caching=rng.random() < 0.75,
        enable_chunked_prefill=chunked,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        depth=rng.randint(1, 3),
        **(random_sharing(rng) if chunked else {}),
    )
    if not windowed or roomy:
        return config
    # Room for a request of some length, and not much more: windows want few blocks, but those of a whole step.
    length = max(1, config.max_model_len - rng.choice([0, 0, 3, 30]))
    alone = sum(most_held(length, window, config.max_num_batched_tokens, block_size) for window in windows)
    return replace(config, num_blocks=1 + alone + rng.randint(0, 3 + 12 // block_size))


def with_drafts(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """A step has room for everybody's, and for those of several steps of one request."""
    most = rng.randint(1, 7)
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs * (1 + most), 1 + config.depth * most)
    if any(config.windows):
        alone = sum(most_held(config.max_model_len, window, tokens, config.block_size) for window in config.windows)
        config = replace(config, num_blocks=max(config.num_blocks, 1 + alone))
    blocks = config.num_blocks + rng.choice([0, 0, len(config.windows) * 24 // config.block_size])  # nobody has drafts
    # where there is no room
    return replace(config, max_drafts=most, max_num_batched_tokens=tokens, num_blocks=blocks)


def with_stages(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    stages = rng.randint(2, 4)
    return replace(config, pipeline_parallel_size=stages, depth=stages + 1, context_cost=rng.choice([0.0, 0.01, 0.3]))


class RandomDepth(Depth):
    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__(((1 << 30, most),))
        self.most, self.rng = most, rng
        self.least = rng.choice([0, 0, most])

    def depth(self, num_running: int) -> int:
        return self.rng.randint(self.least, self.most)


def random_sharing(rng: random.Random) -> dict[str, int]:
    """Mostly off, as it mostly is. The rest of the workload is as it would be without."""
    rng = random.Random(str(rng.getstate()[1][:8]))
    if rng.random() < 0.6:
        return {}
    threshold = rng.choice([0, 1, 3, 8])
    return {
        "max_num_partial_prefills": rng.choice([0, 1, 2, 3]),
        "max_long_partial_prefills": rng.choice([0, 1, 2]) if threshold else 0,
        "long_prefill_token_threshold": threshold,
    }


@cache
def most_held(num_tokens: int, window: int, chunk: int, size: int) -> int:
    """Blocks that are seen or written in one step, of all steps that compute up to `chunk` tokens of so many."""
    return max(
        (computed + new - 1) // size - (max(0, computed - window + 1) // size if window else 0) + 1
        for computed in range(num_tokens)
        for new in range(1, min(chunk, num_tokens - computed) + 1)
    )


def capacity_of(config: SchedulerConfig) -> int:
    """Tokens of a request alone; what is beyond the context does not matter."""
    size, capacity = config.block_size, 0
    while capacity < config.max_model_len:
        longer = capacity + size
        held = [most_held(longer, window, config.max_num_batched_tokens, size) for window in config.windows]
        if sum(held) > config.num_blocks - 1:
            break
        capacity = longer
    return capacity


class Simulation:
    def __init__(
        self, seed: int, *, windowed: bool = False, drafts: bool = False, stages: bool = False, check: bool = True,
        device: type[Device] = Device, adapt: Callable[[SchedulerConfig, random.Random], SchedulerConfig] | None = None,
    ) -> None:  # fmt: skip
        """`windowed`: some KV groups have windows. `drafts`: steps have drafts, some of them wrong. `stages`: of a
        pipeline compute the steps. `check`: assert the scheduler's own invariants, too. `adapt` changes the settings
        that were drawn."""
        self.rng = rng = random.Random(seed)
        config = random_config(rng, windowed)
        config = with_stages(config, random.Random(seed + 5)) if stages else config
        config = with_drafts(config, rng) if drafts else config
        self.config = config = adapt(config, random.Random(seed + 7)) if adapt else config
        self.left_out: Counter[Request] = Counter()  # plans, of those who could decode
        self.scheduler = Scheduler(config)
        if drafts:
            self.scheduler.planner.drafting = RandomDepth(config.max_drafts, random.Random(seed + 4))
        self.capacity = capacity_of(config)
        self.check = check
        self.salts: dict[int, str | None] = {}
        self.device = device(config, self.salts)
        self.clients: dict[int, Client] = {}
        self.results: deque[tuple[int, list[int], StepResult | None]] = deque()
        self.seen: Counter[str] = Counter()
        self.num_plans = 0
        self.quiet = 0  # plans since the last output
        self.nan_rate = rng.choice([0, 0, 0.01])
        self.fail_rate = rng.choice([0, 0, 0.03, 0.15])
        self.threads = random.Random(seed + 2)  # a stream of its own
        self.tenants = random.Random(seed + 6)  # another
        self.num_tenants = self.tenants.choice([1, 1, 1, 1, 1, 2, 5])
        self.late_rate = self.threads.choice([0, 0, 0, 0.3])
        self.abort_rate = rng.choice([0, 0.02, 0.1])
        self.late = rng.choice([rng.randrange, lambda depth: depth - 1])  # how many results to leave in flight
        self.arrival_rate = rng.choice([0.1, 0.3, 0.8])
        self.grammar_rate = rng.choice([0, 0, 0.2, 0.6])
        self.score_rate = rng.choice([0, 0.2, 0.7])
        self.pool_rate = rng.choice([0, 0, 0.1, 0.5])
        self.stems = [self.tokens(rng.randint(1, config.max_model_len)) for _ in range(3)]

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def run(self, num_steps: int) -> None:
        while self.num_plans < num_steps:
            if self.rng.random() < self.arrival_rate and len(self.scheduler.roster.waiting) < 12:
                self.arrive()
            if self.rng.random() < self.abort_rate and self.clients:
                self.abort()
            self.turn()
        while self.scheduler.has_unfinished() or self.results:
            self.turn()
        self.check_end()

    def turn(self) -> None:
        """What the engine loop does: launch a step if there is one, then take in results, more or fewer of them."""
        launched = self.launch()
        allowed = self.late(self.config.depth) if launched else len(self.results) - 1
        while len(self.results) > max(0, allowed):
            self.take_result()
        if not launched and not self.results and self.scheduler.has_unfinished():
            self.make_late_masks(1.0)
            assert self.launch(), "nothing is in flight and nothing can be scheduled: stuck"
        if not self.scheduler.has_unfinished() and not self.results:
            self.num_plans += 1  # an idle turn counts, lest a sparse workload never ends

    def arrive(self) -> None:
        rng, config = self.rng, self.config
        pooling = Pooling(rng.choice(POOLINGS)) if rng.random() < self.pool_rate else None
        longest = config.max_model_len - (pooling is None)
        if not config.enable_chunked_prefill:
            longest = min(longest, config.max_num_batched_tokens)
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(0, len(stem))] + self.tokens(rng.choice([0, 1, 1, 3, 8]))
        if rng.random() < 0.1 and self.clients:  # a chat goes on
            earlier = rng.choice(list(self.clients.values()))
            prompt = earlier.ids + earlier.outputs + self.tokens(rng.randint(0, 3))
        prompt = prompt[:longest] or self.tokens(1)
        salt = rng.choice([None, None, None, "", "a", "b"])
        prompt, media = self.pictured(prompt)
        for _ in range(rng.choice([1, 1, 1, 1, 2, 5])):
            max_tokens = rng.choice([1, 2, 5, 12, 40])
            sampling = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, 0, rng.randint(0, max_tokens)]),
                eos_token_ids=rng.choice([(), (), (0,), (0, 1)]),
                stop_token_ids=rng.choice([(), (), (), (1, 2)]),
                ignore_eos=rng.random() < 0.3,
                prompt_logprobs=2 if rng.random() < self.score_rate and pooling is None else None,
                grammar=self.grammar_key() if rng.random() < self.grammar_rate and pooling is None else None,
                pooling=pooling,
            )
            id = len(self.clients) + 1000
            self.salts[id] = salt
            self.clients[id] = Client(self.seen_by_model(prompt, media), salt, sampling, prompt)
            self.scheduler.add(
                Request(
                    id, prompt, sampling, priority=rng.choice([0, 0, 1, -2]), cache_salt=salt, arrival=rng.random(),
                    tenant=self.tenants.randrange(self.num_tenants), media=media,
                    grammar=Guide(Grammar(sampling.grammar), VOCAB) if sampling.grammar is not None else None,
                )
            )  # fmt: skip
        self.check_books()

    def pictured(self, prompt: list[int]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The prompt, perhaps with pictures in the place of some tokens, and these."""
        return prompt, ()

    def seen_by_model(self, prompt: list[int], media: tuple[MediaItem, ...]) -> list[int]:
        """The prompt, where pictures are with what stands for them."""
        return prompt

    def grammar_key(self) -> str:
        broken = self.rng.choice(["", "", "", "", "", "fill", "accept", "refuse"])
        return f"{self.rng.randrange(100)}:{broken}:{self.rng.randrange(6)}"

    def abort(self) -> None:
        ids = self.rng.sample(list(self.clients), min(len(self.clients), self.rng.choice([1, 1, 3])))
        live = {id for id in ids if self.clients[id].reason is None and id in self.scheduler.roster.entries}
        for id in live:
            self.seen["abort in flight"] += self.scheduler.roster.entries[id][3].num_in_flight_steps > 0
        outputs = self.scheduler.abort([*ids, ids[0], 1, 2])
        assert {output.id for output in outputs} == live
        assert all(output.finish_reason == "abort" and not output.token_ids for output in outputs)
        for id in live:
            self.clients[id].aborted = True
        self.receive(outputs)
        self.check_books()

    def launch(self) -> bool:
        scheduler, rng = self.scheduler, self.rng
        self.make_late_masks(0.5)
        ready = [request for request in scheduler.roster.running.values() if self.is_ready(request)]
        plan = scheduler.schedule()
        self.check_books()
        if plan is None:
            return False
        self.num_plans += 1
        self.quiet += 1
        assert self.quiet <= self.config.max_model_len + 2 * self.config.depth + 2, "steps go by, but nobody gets on"
        planned = set(plan.rows)
        if self.config.pipeline_parallel_size > 1:
            self.check_turns(plan, ready)
        else:
            for request in ready:
                assert request.row in planned or request.status is Status.WAITING, f"{request} was ready, but left out"
        if plan.new_rows:
            waits = {request for request in ready if request.row not in planned}  # for its turn, where there are stages
            missing = sum(map(self.missing_blocks, set(scheduler.roster.running.values()) - waits))
            assert missing <= scheduler.kv.num_free_blocks, (
                "admitted into blocks that others will need for their prompts"
            )
        new_ids = {new.row: new.request_id for new in plan.new_rows}
        ids = [new_ids[row] if row in new_ids else self.device.rows[row].request_id for row in plan.rows]
        assert all(self.clients[id].reason is None for id in ids), "scheduled after its end"
        self.seen["mixed step"] += 0 < plan.num_decodes < len(plan.rows)
        small = self.config.max_mixed_tokens
        self.seen["large step"] += 0 < plan.num_decodes < plan.total_tokens - small and small > 0  # decodes are few
        self.seen["overlapped decode"] += len(self.results) > 0 and plan.num_decodes > 0
        self.seen["shared step"] += scheduler.planner.sharing is not None and sum(n > 1 for n in plan.num_tokens) > 1
        self.seen["drafts"] += plan.num_decode_tokens - plan.num_decodes
        self.seen["without drafts beside drafts"] += plan.num_drafts > 0 and 1 in plan.num_tokens
        self.seen["drafts on drafts"] += plan.num_drafts > 0 and any(
            self.device.rows[row].computed < computed
            for row, computed in zip(plan.rows, plan.num_computed, strict=True)
            if row not in new_ids
        )
        self.seen["hit"] += sum(new.num_computed_tokens > 0 for new in plan.new_rows)
        new = {new.row for new in plan.new_rows}
        hits = {write.row for writes in plan.new_blocks for write in writes if write.start and write.row in new}
        self.seen["window hit"] += len(hits)
        self.seen["left behind"] += sum(sum(table.left) > 0 for table in scheduler.kv.tables.values())
        if rng.random() < self.fail_rate / 2:  # the launch raises: nothing of the plan reaches the device
            self.fail(plan.step, ids)
            return True
        self.device.execute(plan, fails := rng.random() < self.fail_rate)
        self.seen["scored"] += len(plan.scored)
        self.seen["scored again"] += sum(r.num_preemptions > 0 for r, _ in scheduler.in_flight[-1].scored)
        mask = self.make_mask() if scheduler.in_flight[-1].constrained else None
        result = self.device.sample(plan, rng, self.nan_rate, fails, mask)
        if result is not None:
            owners = [i for i, kept in zip(plan.sampled, result.tokens_by_row(), strict=True) for _ in kept]
            for place in result.errors:
                self.clients[ids[owners[place]]].spoilt = True
        for request, embedding in zip(
            scheduler.in_flight[-1].pooled, result.embeddings if result else (), strict=False
        ):
            if request is None:
                continue  # while its step waited for a mask, one before it failed: it starts over
            self.clients[request.id].spoilt |= embedding is None
            self.seen["pooled"] += 1
            self.seen["pooled again"] += request.num_preemptions > 0
            self.seen["pooled after chunks"] += plan.num_tokens[ids.index(request.id)] < request.num_prompt_tokens
        self.results.append((plan.step, ids if fails else [], result))
        return True

    def check_turns(self, plan: StepPlan, ready: list[Request]) -> None:
        """Every stage gets some of those who decode, everybody has a turn, and nobody holds up the others."""
        ready = [request for request in ready if request.sampling.pooling is None]  # as a prompt
        stages, planned, new = self.config.pipeline_parallel_size, set(plan.rows), {new.row for new in plan.new_rows}
        able = [request for request in ready if request.status is Status.RUNNING and request.row not in new]
        chosen = [request for request in able if request.row in planned]
        assert len(chosen) <= -(-len(ready) // stages), "no decodes are left to the other stages"
        before = [step for step in self.scheduler.in_flight if 0 < plan.step - step.index < stages]
        unsampled = {request for step in before for request in step.sampled if request is not None}
        held_up = unsampled & set(chosen)
        assert not held_up or len(chosen) == len(planned), "a prompt waits for a token that is not sampled yet"
        self.seen["left to other stages"] += len(able) - len(chosen)
        self.seen["waits on the device"] += bool(held_up)
        for request in able:
            waits = request.row not in planned and request not in unsampled
            self.left_out[request] = self.left_out[request] + 1 if waits else 0
            assert self.left_out[request] <= stages, "left out again and again"

    def missing_blocks(self, request: Request) -> int:
        """Free ones that its prompt may still take: what windows leave behind comes back, unless others share it."""
        kv, size, chunk = self.scheduler.kv, self.config.block_size, self.config.max_num_batched_tokens
        missing = 0
        for blocks, window in zip(kv.tables[request.id].groups, self.config.windows, strict=True):
            to_come = max(0, -(-request.num_tokens // size) - len(blocks))
            own = sum(kv.pool.refs[block] == 1 for block in blocks if block)
            rounded = -(-request.num_tokens // size) * size
            missing += max(0, min(to_come, most_held(rounded, window, chunk, size) - own)) if window else to_come
        return missing

    def make_late_masks(self, rate: float) -> None:
        """What threads do meanwhile."""
        for request in self.scheduler.roster.running.values():
            if request.grammar is not None and request.grammar.filling and self.threads.random() < rate:
                request.grammar.fill()

    def make_mask(self) -> TokenMask | None:
        """Between the two calls of a step: the results of the steps before come in, and whatever else."""
        self.seen["overlapped mask"] += len(self.results) > 0
        while self.results:
            self.take_result()
            if self.rng.random() < self.abort_rate:
                self.abort()
        step = self.scheduler.in_flight[-1]
        for _, _, _, guide in bound(step):
            if not guide.settled and self.threads.random() < self.late_rate:
                guide.filling = True  # by a thread, that is not done before some later step
            elif not guide.settled:
                guide.fill()
        mask, errors, postponed = make_mask(step, VOCAB)
        self.seen["postponed with drafts"] += sum(1 for r in postponed if step.sampled.index(r) < step.num_drafting)
        self.scheduler.postpone(postponed)
        self.check_books()
        self.seen["postponed"] += len(postponed)
        self.seen["masked behind drafts"] += max(0, len(mask.rows) - len(list(bound(step)))) if mask else 0
        self.seen["cut"] += len(mask.cuts) if mask else 0
        self.quiet = 0 if postponed else self.quiet
        self.seen["masked"] += len(mask.rows) if mask else 0
        self.receive([self.scheduler.reject(request, error) for request, error in errors])
        return mask

    def is_ready(self, request: Request) -> bool:
        total = request.num_tokens + request.num_in_flight_tokens
        return (
            (request.grammar is None or not request.grammar.filling)
            and total - request.num_computed_tokens == 1
            and total - request.num_prompt_tokens < request.sampling.max_tokens
            and total < self.config.max_model_len
            and total <= self.capacity
        )

    def take_result(self) -> None:
        step, failed_ids, result = self.results.popleft()
        if result is None:
            self.fail(step, failed_ids)
            return
        self.receive(self.scheduler.update(result))
        self.check_books()

    def fail(self, step: int, ids: list[int]) -> None:
        for id in ids:
            self.clients[id].spoilt = True
        restarts = sum(step.sampled.count(None) for step in self.scheduler.in_flight)
        outputs = self.scheduler.fail(step, "device lost")
        ended = {output.id for output in outputs if output.error == "device lost"}
        expected = {id for id in ids if self.clients[id].reason is None}
        assert expected <= ended and ended - expected <= self.may_fail_too(ended - expected)
        self.quiet = 0
        self.seen["failed step"] += 1
        self.seen["thrown away"] += sum(step.sampled.count(None) for step in self.scheduler.in_flight) > restarts
        self.receive(outputs)
        self.check_books()

    def may_fail_too(self, ended: set[int]) -> set[int]:
        """Of those that ended with a step that failed, those that may though they were not in it."""
        return set()

    def receive(self, outputs: list[RequestOutput]) -> None:
        assert len({output.id for output in outputs}) == len(outputs), "two outputs of one request in one step"
        for output in outputs:
            client = self.clients[output.id]
            assert client.reason is None, "an output after the last"
            assert GARBAGE not in output.token_ids, "a token that was sampled from garbage"
            assert output.token_ids or output.finish_reason
            pooling = client.sampling.pooling if output.finish_reason == "stop" else None
            embedding = None if pooling is None else client.embedding(pooling.kind)
            assert output.embedding == embedding, f"request {output.id}: another embedding than alone"
            assert (output.error is not None) == (output.finish_reason == "error")
            if client.outputs:
                assert output.num_cached_tokens is None and output.first_scheduled is None
            elif output.token_ids:
                assert output.first_scheduled is not None and 0 <= output.num_cached_tokens < len(client.prompt)
            first = output.token_ids and not client.outputs
            wanted = client.scores() if first and client.sampling.prompt_logprobs is not None else None
            assert output.prompt_logprobs == wanted, f"request {output.id}: wrong prompt_logprobs"
            client.outputs += output.token_ids
            self.seen["several kept"] += len(output.token_ids) > 1
            client.reason, client.stop_reason = output.finish_reason, output.stop_reason
            self.quiet = 0

    def check_books(self) -> None:
        if self.check:
            self.scheduler.check_invariants(thorough=True)

    def check_end(self) -> None:
        scheduler = self.scheduler
        scheduler.check_invariants(thorough=True)
        assert len(scheduler.in_flight) == 0 and scheduler.schedule() is None and not scheduler.roster.waiting
        assert len(scheduler.roster.free_rows) == self.config.max_num_seqs, "idle, but rows are taken"
        assert scheduler.kv.num_free_blocks == self.config.num_blocks - 1, "idle, but blocks are referenced"
        for id, client in self.clients.items():
            wanted = oracle(client.prompt, client.salt, client.sampling, self.config.max_model_len, self.capacity)
            self.seen[str(client.reason)] += 1
            if client.aborted or (client.reason == "error" and client.spoilt):
                assert client.reason == ("abort" if client.aborted else "error")
                assert client.outputs == wanted[0][: len(client.outputs)], f"request {id}: other tokens than alone"
            else:
                assert (client.outputs, client.reason, client.stop_reason) == wanted, f"request {id}: not as alone"
        stats = scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0 and stats.prefix_hits <= stats.prefix_queries
        assert self.config.enable_prefix_caching or not self.seen["hit"]
        self.seen["preemption"] += stats.num_preemptions


def simulate(seed: int, num_steps: int, simulation_type: type[Simulation] = Simulation, **options) -> Simulation:
    simulation = simulation_type(seed, **options)
    try:
        simulation.run(num_steps)
    except Exception as error:
        raise AssertionError(f"seed {seed}, {simulation.config}: {error!r}") from error
    return simulation


# ---- the tests ----
@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("ERROR", logger="vserve.engine.schedule.scheduler")  # caches are tiny: thousands of preemptions
    # A collection of garbage in a mask of two lines would make it a slow one, which may be left out of a step.
    monkeypatch.setattr("vserve.engine.grammar.guide.QUICK", float("inf"))


def simulate_many(first_seed: int, steps: float, **options) -> tuple[int, Counter[str]]:
    """→ steps, at least so many, and how often what happened in them."""
    num_steps, seen, seed = 0, Counter[str](), first_seed
    while num_steps < steps:
        simulation = simulate(seed, 60, **options)
        num_steps += simulation.scheduler.num_scheduled_steps
        seen += simulation.seen
        seed += 1
    return num_steps, seen


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_any_workload_gives_what_each_request_gets_alone(part: int) -> None:
    num_steps, seen = simulate_many((0, 1, 2, 3, 7)[part] * 1_000_000, TOTAL_STEPS / PARTS)
    rare = 0.5 * num_steps / 20_000  # every way through the scheduler was taken, not once but often
    for event, count in {
        "preemption": 400, "hit": 500, "mixed step": 500, "large step": 200, "overlapped decode": 2000,
        "abort in flight": 50, "failed step": 100, "thrown away": 4, "error": 50, "stop": 500, "length": 500,
        "abort": 100, "masked": 1000, "overlapped mask": 300, "scored": 500, "scored again": 8, "pooled": 500,
        "pooled again": 4, "pooled after chunks": 100,
        "postponed": 100, "shared step": 200,
    }.items():  # fmt: skip
        assert seen[event] >= count * rare, f"{event} happened {seen[event]} times only in {num_steps} steps"


@pytest.mark.slow
def test_any_workload_with_windows_gives_what_each_request_gets_alone() -> None:
    num_steps, seen = simulate_many(7, TOTAL_STEPS / PARTS / 2, windowed=True)
    rare = 0.5 * num_steps / 20_000
    for event, count in {
        "preemption": 200, "hit": 500, "left behind": 10_000, "window hit": 500, "mixed step": 500, "failed step": 100,
        "overlapped decode": 2000, "postponed": 50, "pooled": 100, "stop": 500, "length": 500,
    }.items():  # fmt: skip
        assert seen[event] >= count * rare, f"{event} happened {seen[event]} times only in {num_steps} steps"


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.slow
def test_any_workload_with_drafts_gives_what_each_request_gets_alone(windowed: bool) -> None:
    drafts_are_right_or_wrong(11, TOTAL_STEPS / PARTS / 4, windowed)


@pytest.mark.slow
@pytest.mark.parametrize("windowed", [False, True])
def test_many_more_workloads_with_drafts(windowed: bool) -> None:
    drafts_are_right_or_wrong(2_000_000, 0.45 * TOTAL_STEPS, windowed)


def drafts_are_right_or_wrong(first_seed: int, steps: float, windowed: bool) -> None:
    num_steps, seen = simulate_many(first_seed, steps, windowed=windowed, drafts=True)
    rare = 0.5 * num_steps / 20_000
    for event, count in {
        "drafts": 20_000, "drafts on drafts": 1000, "without drafts beside drafts": 500, "several kept": 3000,
        "preemption": 200, "hit": 500, "mixed step": 500, "failed step": 100, "overlapped decode": 1000,
        "postponed": 30, "pooled": 100, "stop": 500, "length": 500, "masked": 500, "masked behind drafts": 200,
        "cut": 100, "postponed with drafts": 15,
    }.items():  # fmt: skip
        assert seen[event] >= count * rare, f"{event} happened {seen[event]} times only in {num_steps} steps"


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.slow
def test_any_workload_on_stages_gives_what_each_request_gets_alone(windowed: bool) -> None:
    num_steps, seen = simulate_many(23, TOTAL_STEPS / PARTS / 4, windowed=windowed, stages=True)
    rare = 0.5 * num_steps / 20_000
    for event, count in {
        "left to other stages": 4000, "waits on the device": 1000, "preemption": 200, "hit": 500, "mixed step": 300,
        "failed step": 100, "overlapped decode": 2000, "postponed": 20, "stop": 300, "length": 300, "masked": 500,
    }.items():  # fmt: skip
        assert seen[event] >= count * rare, f"{event} happened {seen[event]} times only in {num_steps} steps"


@pytest.mark.slow
def test_any_workload_with_drafts_on_stages_gives_what_each_request_gets_alone() -> None:
    """Drafts behind tokens that are still on their way round."""
    num_steps, seen = simulate_many(41, TOTAL_STEPS / PARTS / 4, drafts=True, stages=True)
    rare = 0.5 * num_steps / 20_000
    for event, count in {
        "drafts": 20_000, "drafts on drafts": 600, "several kept": 3000, "left to other stages": 4000,
        "waits on the device": 1000, "preemption": 200, "hit": 500, "mixed step": 300, "failed step": 100,
        "masked behind drafts": 500, "cut": 300, "postponed with drafts": 50, "stop": 300, "length": 300,
    }.items():  # fmt: skip
        assert seen[event] >= count * rare, f"{event} happened {seen[event]} times only in {num_steps} steps"


class TwoStreams(Device):
    """A device out of stream order: what a plan wrote lands once more, after the next plan has run."""

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        super().__init__(config, salts)
        self.written: list[tuple[int, int, int]] = []

    def write(self, row: Row, num_new: int, fails: bool) -> None:
        super().write(row, num_new, fails)
        size = self.config.block_size
        for table in row.tables:
            for position in range(row.computed, row.computed + num_new):
                block, offset = table[position // size], position % size
                self.written.append((block, offset, self.cache[block][offset]))

    def execute(self, plan: StepPlan, fails: bool) -> None:
        late, self.written = self.written, []
        super().execute(plan, fails)
        for block, offset, state in late:
            self.cache[block][offset] = state


def caught(num_seeds: int, **options) -> str:
    """How the first of some workloads fails, the scheduler's own checks off; "" when none does."""
    for seed in range(num_seeds):
        try:
            simulate(seed, 60, windowed=seed % 3 == 2, check=False, **options)
        except AssertionError as error:
            return str(error)
    return ""


KEYED = "self.keys[block] is not None"
FORGET = f"            if {KEYED}:\n                self.revoke"
AGREED = "num_agreed + 1 if len(hits[index]) == len(keys) else 1"
LEFT = "(num_computed_tokens - self.window + "
REGISTRABLE = "min(num_tokens // self.block_size, len(hashes))"
FIRST_CHUNK = "num_missing, needed = -(-num_new // size)"
MISSING = "num_missing, needed = -(-num_tokens // size) - num_hits"
ALL = "if True:\n"
KEPT = "scores = request.prompt_logprobs"
MUTATIONS = {  # what is broken: (file, line as it should be, as it should not)
    "hit up to the last token": ("kv_cache", "(num_tokens - 1) // size", "num_tokens // size"),
    "hash without its parent": ("kv_cache", "content = parent +", "content = self.seed +"),
    "salt left out": ("kv_cache", "if request.cache_salt is not None:", "if False:"),
    "hits not counted as consumption": ("kv_cache", "num_missing + free_hits", "num_missing"),
    "admitted on the first chunk": ("kv_cache", MISSING, FIRST_CHUNK),
    "hit blocks not referenced": ("kv_cache", "pool.share(block)", "pass"),
    "hits unlike in the groups": ("kv_group", "block = find(key + suffix)", "block = find(key)"),
    "keys never revoked": ("kv_cache", "if pool.keys[block] == key:", "if False:"),
    "left behind too early": ("kv_group", LEFT + "1)", LEFT + "2)"),
    "nothing left behind": ("kv_group", "if first <= left:", "if True:"),
    "blocks left behind kept": ("kv_group", "self.pool.release(reversed(blocks[left:first]))", "pass"),
    "a window's hit too short": ("kv_group", "self.num_seen = -(-(window - 1) //", "self.num_seen = ((window - 1) //"),
    "a prefix across a gap": ("kv_group", "length, blocks = index, []", "pass"),
    "groups that do not agree": ("kv_cache", AGREED, "num_agreed + 1"),
    "chunks not counted": ("kv_capacity", "(window + chunk - 2)", "(window - 1)"),
    "windows counted in full": ("kv_capacity", "return min(every,", "return max(every,"),
    "registered beyond what is computed": ("kv_cache", REGISTRABLE, "len(hashes)"),
    "content forgotten too late": ("block_pool", FORGET, FORGET.replace(KEYED, "False")),
    "shared blocks freed by one": ("block_pool", "            if refs[block]:\n", "            if refs[block] < 0:\n"),
    "registered before preemption is over": ("planner", "if request in step.scheduled:\n", "if True:\n"),
    "late keys not revoked": ("scheduler", "for planned in (failed, *later):", "for planned in (failed,):"),
    "built on a failed step": ("scheduler", "if num_hit_tokens and not request.finished:", "if False:"),
    "thrown-away samples kept": ("scheduler", "[None if sampled is request else sampled for", "[sampled for"),
    "resumed with a sample in flight": ("planner", "if request.num_in_flight_steps:", "if False:"),
    "plan of a victim kept": ("planner", "step.scheduled.pop(victim, 0)", "0"),
    "blocks of a victim kept": ("planner", "step.appended.pop(victim, None)", "pass"),
    "not started over": ("planner", "        request.num_computed_tokens = 0\n", ""),
    "past a sure end": ("scheduler", ", self.stop + 1)", ", 1 << 30)"),
    "past max_tokens": ("scheduler", "min(request.num_prompt_tokens + request.sampling.max_tokens, ", "max(0, "),
    "tokens of finished requests": ("scheduler", "if request.status is FINISHED:", "if False:"),
    "masks forgotten": ("step", "self.constrained = any(", "any("),
    "a grammar's end ignored": ("request", "request.grammar.terminated", "False"),
    "tokens kept from the grammar": ("scheduler", "return request.grammar.accept(token) if", "return '' if"),
    "a scored prompt read from the cache": ("prompt_results", "return request not in self.scoring", "return True"),
    "a pooled prompt read from the cache": ("prompt_results", "or pooling.kind == LAST", "or True"),
    "pooled before its end": ("prompt_results", "if request.num_computed_tokens == request.num_prompt_tokens:\n", ALL),
    "pooled and sampled": ("step", " and request not in pooling:", ":"),
    "embeddings of finished requests": ("scheduler", "if pooled and not pooled.finished:", "if pooled:"),
    "the end of a full context left out": ("planner", "request not in pooling  #", "True  #"),
    "scores taken in twice": ("prompt_results", "entries[len(known) - start :]", "entries"),
    "scores sent twice": ("scheduler", "scores, request.prompt_logprobs = request.prompt_logprobs, None", KEPT),
    "scores of too few steps": ("prompt_results", "computed < request.num_prompt_tokens - 1:", "computed == 0:"),
    "rows lost": ("roster", "self.free_rows.append(row_of(request))", "pass"),
    "batch order": ("step", "request, num_new in scheduled.items() if num_new == 1]", "request in scheduled]"),
}  # fmt: skip


EXTENDED = "and self._extend(step, request, end)"
DRAFTING = {  # of steps with drafts
    "wrong drafts counted as computed": ("scheduler", "request.num_computed_tokens -= wrong", "pass"),
    "wrong drafts counted as in flight": ("scheduler", "request.num_in_flight_tokens -= wrong", "pass"),
    "no blocks for drafts": ("planner", EXTENDED, ""),
    "drafts beyond the context": ("planner", "if total > self.stop or request in", "if request in"),
    "masks behind other drafts": ("guide", "if draft != masked:", "if False:"),
    "drafts not taken back from the grammar": ("guide", "matcher.rollback(accepted)", "pass"),
    "no mask behind a draft that may hold": ("mask", "if most < num_drafts:", "if False:"),
    "masks of the wrong samples": ("mask", "min(index, step.num_drafting) * step.num_drafts", "0"),
    "drafts of who waits for its mask": ("scheduler", "_computed_tokens -= 1 + num_drafts", "_computed_tokens -= 1"),
    "a full context not waited for": ("planner", "and (total > stop or not", "and (not"),
    "windows that count on drafts": ("kv_cache", "- request.num_in_flight_drafts  # at least", ""),
    "registered without a step in flight": ("scheduler", ".registered if self.in_flight else []", ".registered"),
    "errors of the wrong token": ("scheduler", "result, end - count + len(known) - before)", "result, end)"),
    "tokens behind the end": ("scheduler", "del tokens[len(known) - before :]", "pass"),
}  # fmt: skip


STAGES = {  # of pipelines
    "all in one plan": ("stage_turns", "-(-len(decodes) // num_stages)", "len(decodes)"),
    "the first ones first": ("stage_turns", 'key=attrgetter("last_sampled")', "key=lambda request: request.row"),
    "whose token is not sampled": ("stage_turns", "if not ready and not prompts:", "if not ready:"),
    "as soon as may be": ("stage_turns", ">= num_stages]", ">= 1]"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", [*MUTATIONS, *DRAFTING, *STAGES])
@pytest.mark.slow
def test_oracle_sees_a_broken_scheduler(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, right, wrong = {**MUTATIONS, **DRAFTING, **STAGES}[mutation]
    source = inspect.getsource(ROOMS[room])
    assert source.count(right) == 1, f"the line to break is in {room}.py {source.count(right)} times"
    broken = ModuleType(ROOMS[room].__name__)
    exec(compile(source.replace(right, wrong), f"broken {room}.py", "exec"), broken.__dict__)
    if room == "scheduler":
        monkeypatch.setitem(globals(), "Scheduler", broken.Scheduler)
    elif room == "planner":
        monkeypatch.setattr(scheduler_module, "Planner", broken.Planner)
    elif room == "guide":
        monkeypatch.setitem(globals(), "Guide", broken.Guide)
    elif room == "mask":
        monkeypatch.setitem(globals(), "make_mask", broken.make_mask)
    elif room == "prompt_results":
        monkeypatch.setattr(scheduler_module, "PromptResults", broken.PromptResults)
    elif room == "step":
        monkeypatch.setattr(scheduler_module, "Step", broken.Step)
    elif room == "stage_turns":
        monkeypatch.setattr(planner_module, "whose_turn", broken.whose_turn)
    elif room == "request":
        monkeypatch.setattr(scheduler_module, "ending", broken.ending)
    elif room == "roster":
        monkeypatch.setattr(scheduler_module, "Roster", broken.Roster)
    elif room == "kv_group":
        monkeypatch.setattr(kv_cache_module, "kv_groups", broken.kv_groups)
    elif room == "kv_capacity":
        monkeypatch.setattr(kv_group_module, "blocks_held", broken.blocks_held)
        monkeypatch.setattr(kv_cache_module, "longest_request", broken.longest_request)
    elif room == "kv_cache":
        monkeypatch.setattr(scheduler_module, "KVCacheManager", broken.KVCacheManager)
    else:
        monkeypatch.setattr(kv_cache_module, "BlockPool", broken.BlockPool)
    assert caught(800, drafts=mutation in DRAFTING, stages=mutation in STAGES), "nothing noticed"


def test_oracle_sees_a_device_out_of_stream_order() -> None:
    assert "reads another prefix" in caught(200, device=TwoStreams)


def test_unbroken_scheduler_passes_what_the_broken_ones_fail() -> None:
    assert caught(100) == "" and caught(100, drafts=True) == "" and caught(100, stages=True) == ""
