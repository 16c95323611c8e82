"""Where tokens are on the device, through the real row tables: random loads, against what each request's text is."""

from __future__ import annotations

import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
import torch

from vserve.engine.cache.batch import BatchBuilder, Shape
from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.cache.rows import RowTables
from vserve.engine.families.layer_spec import KVSpec
from vserve.engine.link.messages import unpack_tokens
from vserve.engine.link.plan import StepPlan, StepResult
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.parallel.group import ALONE
from vserve.engine.parallel.pipeline import Ring, Stage
from vserve.engine.step.mask import TokenMask
from vserve.engine.step.relay import Relay
from vserve.engine.step.sampled import Launched, SampledTokens

from .test_scheduler_properties import VOCAB, Device, Simulation

NOTHING = 10**6  # a token that nobody has
CPU = torch.device("cpu")


class Paged(Device):
    """Beside what it checks of the cache, keeps every request's text and looks for it in the tables, whole, each time
    that a step computes some of it."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        super().__init__(config, salts)
        full = config.windows.index(0) if 0 in config.windows else None
        width = -(-config.max_model_len // config.block_size)
        self.tables = RowTables(
            config.max_num_seqs, config.max_model_len, width, len(config.windows), CPU, config.block_size, full,
            config.max_drafts,
        )  # fmt: skip
        self.tables.make_pages(config.num_blocks)
        self.tables.history.pages[1 if full is not None else 0 :] = NOTHING
        self.tables.history.recent[:] = NOTHING
        self.builder = BatchBuilder(self.tables, config.block_size, None)
        self.texts: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan, fails: bool) -> None:
        self.builder.write_rows(plan)
        for new in plan.new_rows:
            self.texts[new.row] = list(unpack_tokens(new.token_ids))
            self.seen["hit"] += new.num_computed_tokens > 0
        super().execute(plan, fails)
        history, counts = self.tables.history, self.tables.num_computed.tolist()
        wanted, texts = [], []
        for index, (row, num_new) in enumerate(zip(plan.rows, plan.num_tokens, strict=True)):
            drafts, text = self.drafts[index] if index < len(self.drafts) else [], self.texts[row]
            for place, token in enumerate(drafts):
                history.recent[row, (counts[row] + 1 + place) % history.ring] = token
            texts.append((text + drafts)[: counts[row] + num_new])
            wanted += texts[-1][counts[row] :]
            self.seen["chunk"] += counts[row] + num_new < len(text)
        self.shape = Shape.of(plan)
        self.header = torch.from_numpy(self.builder.header(plan, self.shape).numpy().copy())
        batch = self.builder.gather(self.header, self.shape, beside=False)
        tainted = any(row.tainted for row in self.batch)
        assert tainted or batch.input_ids.tolist() == wanted
        for row, text, state in zip(plan.rows, texts, self.batch, strict=True):
            found = history.computed(torch.full((len(text),), row), torch.arange(len(text))).tolist()
            assert state.tainted or found == text, f"row {row} of step {plan.step}"
            self.seen["read"] += len(text)

    def sample(
        self, plan: StepPlan, rng: random.Random, nan_rate: float, fails: bool, mask: TokenMask | None
    ) -> StepResult | None:
        result = super().sample(plan, rng, nan_rate, False, mask)
        assert result is not None
        kept, samples = result.tokens_by_row(), []
        postponed, cuts = (mask.postponed, mask.cuts) if mask is not None else ((), ())
        for index, tokens in enumerate(kept):
            drafting = index < len(self.drafts)
            samples += tokens + [VOCAB] * ((1 + plan.num_drafts) * drafting - len(tokens))
            if index not in postponed:
                self.texts[plan.rows[plan.sampled[index]]] += tokens
            self.seen["wrong draft"] += drafting and len(tokens) <= plan.num_drafts
        sampled = torch.tensor(samples, dtype=torch.int32)
        self.seen["cut"] += len(cuts)
        self.seen["late mask"] += len(postponed)
        self.append(plan, sampled, postponed, cuts, [len(tokens) for tokens in kept[: plan.num_decodes]])
        return None if fails else result

    def append(
        self, plan: StepPlan, sampled: torch.Tensor, postponed: tuple[int, ...], cuts: tuple[tuple[int, int], ...],
        counts: list[int],
    ) -> None:  # fmt: skip
        """counts: of those that decode, if there are drafts."""
        if cuts:
            self.builder.cut_drafts(plan, cuts, sampled)
        found = self.builder.commit(self.header, self.shape, sampled)
        assert found is None or found[0].tolist() == counts
        if postponed:
            self.builder.take_back(plan, postponed, found)
        for row, state in zip(plan.rows, self.batch, strict=True):
            computed = int(self.tables.num_computed[row])
            assert computed == state.computed
            text, history = self.texts[row], self.tables.history
            if computed < min(len(text), self.config.max_model_len):  # the next one is where heads and n-grams look
                known = history.tokens(row, computed + 1, computed).tolist()
                assert state.tainted or known == text[: computed + 1]


class Queue:
    """A ring where what the last stage has sampled waits for the first."""

    def __init__(self) -> None:
        self.waiting: deque[torch.Tensor] = deque()

    def receive(self, x: torch.Tensor) -> None:
        x.copy_(self.waiting.popleft())


class Late(Paged):
    """The first of several stages: takes a step's tokens when a plan needs them, some plans later."""

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        super().__init__(config, salts)
        self.queue = Queue()
        stage = Stage(0, config.pipeline_parallel_size, None, cast(Ring, self.queue))
        relay = Relay(stage, 1, torch.float32, CPU)
        self.sampled = SampledTokens(self.builder, relay, ALONE, drafter=None, model_drafter=None)

    def execute(self, plan: StepPlan, fails: bool) -> None:
        self.sampled.settle(plan)
        self.seen["late"] += len(self.queue.waiting)
        for row in {*plan.rows} - {new.row for new in plan.new_rows}:
            assert int(self.tables.num_computed[row]) == self.rows[row].computed
        super().execute(plan, fails)

    def append(
        self, plan: StepPlan, sampled: torch.Tensor, postponed: tuple[int, ...], cuts: tuple[tuple[int, int], ...],
        counts: list[int],
    ) -> None:  # fmt: skip
        if len(sampled):
            self.queue.waiting.append(sampled)
        step = SimpleNamespace(samples=SimpleNamespace(plan=plan), header=self.header, shape=self.shape)
        self.sampled.go_on(cast(Launched, step), postponed, cuts)


KINDS = {"plain": {}, "windows": {"windowed": True}, "drafts": {"drafts": True}, "stages": {"stages": True}}
KINDS["drafts and windows"] = KINDS["drafts"] | KINDS["windows"]
KINDS |= {"stages, late tokens": KINDS["stages"], "drafts and stages, late tokens": KINDS["drafts"] | KINDS["stages"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_token_is_where_it_is_looked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is cached, shared, preempted, aborted, failed, drafted or postponed."""
    monkeypatch.setattr(Paged, "seen", Counter())
    wanted = ["read", "chunk", "hit", *(["late"] if "late" in kind else [])]
    wanted += ["wrong draft", "cut", "late mask"] if "drafts" in kind else []
    seed = random.randrange(1 << 30)
    for number in range(200):  # some of it is rare: ten of them may not meet it
        if number >= 10 and all(Paged.seen[way] for way in wanted):
            break
        print(f"seed {seed + number}")
        simulation = Simulation(seed + number, device=Late if "late" in kind else Paged, check=False, **KINDS[kind])
        simulation.run(120)
    assert Paged.seen["read"] > 5000 and all(Paged.seen[way] for way in wanted), Paged.seen


def test_histories_take_what_the_cache_holds() -> None:
    """Of a million tokens of context and 256 rows, with a cache of a million tokens: not a gibibyte."""
    context, rows = 1 << 20, 256
    layout = KVLayout.of([KVSpec(8, 128, 128)] * 32, 16, context)
    pages = layout.page_bytes * (1 + context // 16)
    tables = layout.row_bytes(context) * (rows + 1)
    assert pages == 4 * (context + 16) and tables == 257 * context // 16 * 4
    assert pages + tables < 70 << 20 < 4 * rows * context  # 68 MiB; a table of tokens would take 1 GiB
    windows = KVLayout.of([KVSpec(8, 128, 128, 4096)] * 32, 16, context)
    assert windows.page_bytes == 0 and windows.row_bytes(context) > 4 * context, "blocks behind a window are given back"
