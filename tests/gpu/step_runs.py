"""The same step in several ways: in a CUDA graph, launched kernel by kernel with and without padding, and in fp32.

Bit for bit, wherever the arithmetic is the same: hidden states, and each cell of every layer's cache. What a layer does
to a token that nobody samples shows in the keys and values that the next layer makes of it. Without a GPU the step is
launched in its graph's padded shape, decodes beside prompts, where the graph would be.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vserve.engine.cache.batch import WANTED, Batch, Shape
from vserve.engine.cache.kv_layout import GroupSpec, KVLayout
from vserve.engine.link.plan import BlockWrite, NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.planning.step_sizes import large_mixed_tokens
from vserve.engine.quant.weights import Placement
from vserve.engine.step.graph_table import LARGE_PREFILL_ROWS, MIXED_DECODE_ROWS
from vserve.engine.step.graphs import StepGraph, StepGraphs
from vserve.engine.step.runner import ModelRunner
from vserve.kernels.linear.linear_hopper import even_rows

PAGE, MAX_SEQS = 16, 1024
MAX_DECODES, MIXED_TOKENS, MAX_TOKENS = 512, 1024, 8192  # what the engine has by default on a card of 70 GB
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
UNFINISHED = 7  # tokens that a prompt still lacks when it does not end in this step
REPLAYS = 5  # races are rare


@dataclass(frozen=True)
class Mix:
    """How many decodes, and how many tokens of each prompt."""

    decodes: int
    prompts: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.decodes} decodes, prompts {self.prompts}"

    @property
    def num_tokens(self) -> list[int]:
        return [1] * self.decodes + list(self.prompts)

    def place(self, token: int) -> str:
        """Of the step's token of this number: "decode 3", "prompt 0 token 17"."""
        if token < self.decodes:
            return f"decode {token}"
        token -= self.decodes
        for number, length in enumerate(self.prompts):
            if token < length:
                return f"prompt {number} token {token}"
            token -= length
        return "padding"


@dataclass
class Step:
    """A plan, and what it must become on the device: of each of its T tokens."""

    mix: Mix
    plan: StepPlan
    input_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]


@dataclass
class Steps:
    """Runs mixes on one tiny model; `failures` collects what differs, `against_fp32` the errors.

    models, errors: the modules step_models and step_errors. contexts: a decode has fewer tokens before it. Of the
    cache's blocks the first `history` are only read, by many requests; those behind are written, each by one.
    """

    models: Any
    errors: Any
    architecture: str
    layers: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    num_blocks: int = 2048
    history: int = 1200
    contexts: int = 1500
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False  # as the engine has it; the oracle must have it
        model = self.models.make_model(self.architecture, self.layers, Placement(self.dtype, self.device))
        self.models.fill(model, seed=1)
        max_len = self.models.MAX_LEN
        self.runner = ModelRunner(
            model, max_num_seqs=MAX_SEQS, max_model_len=max_len, block_size=PAGE, device=self.device
        )
        # One table for all layers, whatever their windows: the oracle keeps every key.
        specs = tuple(model.kv_specs())
        self.runner.cache.layout = KVLayout(specs, (GroupSpec(0, tuple(range(len(specs)))),), PAGE)
        self.runner.make_rows(max_len)
        self.runner.bind_cache(self.num_blocks, self.dtype)
        self.caches: list[Tensor] = self.models.caches_of(model)
        generator = torch.Generator(self.device).manual_seed(2)
        for cache in self.caches:
            cache.normal_(generator=generator)
        self.pristine = [cache.clone() for cache in self.caches]
        self.expected = [torch.empty_like(cache) for cache in self.caches]
        self.oracle = self.models.Oracle(self.architecture, self.layers, model, self.pristine)
        self.against_fp32 = self.errors.Errors(self.dtype)
        self.all_graphs = self._plan_graphs()
        nothing: Any = None
        self.all_graphs._graphs = {
            shape: StepGraph(shape, nothing, nothing, nothing, nothing) for shape in self.all_graphs.shapes()
        }

    # ---- graphs ----

    def _plan_graphs(self) -> StepGraphs:
        even = partial(even_rows, self.device)
        return self.runner.plan_graphs(MAX_DECODES, MIXED_TOKENS, large_mixed_tokens(MIXED_TOKENS, MAX_TOKENS, even))

    def graph_shape(self, mix: Mix) -> Shape | None:
        """Of the graph that the engine has for this step."""
        tokens = mix.num_tokens
        plan = StepPlan(1, list(range(len(tokens))), tokens, [], [], mix.decodes, [], [[]])
        found = self.all_graphs.find(plan)
        return None if found is None else found.shape

    def padded_shape(self, mix: Mix) -> Shape:
        """The graph's, or one like it for a step without."""
        if (shape := self.graph_shape(mix)) is not None:
            return shape
        decodes = next(rows for rows in MIXED_DECODE_ROWS if rows >= mix.decodes)
        tokens = decodes + sum(mix.prompts) + 19
        return Shape(decodes, LARGE_PREFILL_ROWS, tokens, tokens)

    def capture(self, mixes: Iterable[Mix]) -> None:
        """The graphs that these mixes find, and no others. On the CPU nothing."""
        if self.device.type != "cuda":
            return
        shapes = {shape: mix for mix in mixes if (shape := self.graph_shape(mix)) is not None}
        graphs = self._plan_graphs()
        setattr(graphs, "shapes", lambda: sorted(shapes, key=lambda shape: -shape.tokens))  # noqa: B010
        for shape, mix in shapes.items():  # each kernel must be ready before it is captured
            step = self.make_step(mix, 0)
            self.runner.builder.write_rows(step.plan)
            self._launch(step, shape, beside=True, wanted=shape.rows)
        self.runner.dummy_step(2, 20, GREEDY)
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()  # every capture begins with a collection, which takes longer than the capture of so small a model
        try:
            self.runner.capture_graphs(graphs)
        finally:
            gc.unfreeze()

    # ---- a step ----

    def make_step(self, mix: Mix, number: int) -> Step:
        """Random rows, contexts, blocks and tokens; `number` seeds them. Prompts begin anywhere, not all end."""
        rng = np.random.default_rng([7, number])
        starts = []
        for length in mix.prompts:
            most = min(600, self.contexts, self.models.MAX_LEN - length - UNFINISHED)
            start = int(rng.integers(0, most))
            starts.append((0, start // PAGE * PAGE, start)[int(rng.integers(0, 3))])
        computed = rng.integers(0, self.contexts, mix.decodes).tolist() + starts
        tokens = mix.num_tokens
        rows = rng.permutation(MAX_SEQS)[: len(tokens)].tolist()
        known = rng.integers(0, self.models.VOCAB, 2 * self.models.MAX_LEN)
        own = rng.permutation(np.arange(self.history, self.num_blocks)).tolist()
        new, writes, sampled, ids, positions, slots = [], [], [], [], [], []
        for index, (row, before, count) in enumerate(zip(rows, computed, tokens, strict=True)):
            end = before + count
            ends_here = index < max(1, mix.decodes) or bool(rng.integers(0, 3))
            if ends_here:
                sampled.append(index)
            first = int(rng.integers(0, self.models.MAX_LEN))
            text = known[first : first + end + (0 if ends_here else UNFINISHED)]
            new.append(NewRow(row, row, text.astype(np.int32).tobytes(), len(text), before, GREEDY))
            full = before // PAGE
            owned = [own.pop() for _ in range(-(-end // PAGE) - full)]
            blocks = np.concatenate((rng.integers(1, self.history, full), np.array(owned)))
            writes.append(BlockWrite(row, 0, blocks.tolist()))
            at = np.arange(before, end)
            ids.append(text[before:end])
            positions.append(at)
            slots.append(blocks[at // PAGE] * PAGE + at % PAGE)
        plan = StepPlan(1, rows, tokens, computed, sampled, mix.decodes, new, [writes])
        on_device = [torch.from_numpy(np.concatenate(part)).to(self.device) for part in (ids, positions, slots)]
        return Step(mix, plan, on_device[0].int(), on_device[1].int(), on_device[2].long())

    def check(self, mix: Mix, number: int, against_oracle: bool) -> None:
        """One step, in all ways."""
        step = self.make_step(mix, number)
        builder = self.runner.builder
        num_sampled = len(step.plan.sampled)  # one at least
        builder.write_rows(step.plan)
        plain, _ = self._launch(step, Shape.of(step.plan), beside=False, wanted=num_sampled)
        eager_rows = self._rows(self.caches, step)
        has_graph = self.runner.graphs is not None and self.graph_shape(mix) is not None
        if not has_graph:
            self._save()
            self._step_of_the_engine(step, plain)
            builder.write_rows(step.plan)  # the engine's step has moved the rows on
        shape = self.padded_shape(mix)
        padded, batch = self._launch(step, shape, beside=False, wanted=shape.rows)
        self._check_inputs(step, batch)
        self._save()
        self._check_others(step)
        padded_rows = self._rows(self.caches, step)
        for replay in range(REPLAYS if has_graph else 1):
            hidden = self._replay(step, shape) if has_graph else self._launch(step, shape, True, shape.rows)[0]
            self._compare(step, f"replay {replay}" if has_graph else "launch beside", hidden, padded)
        if against_oracle:
            exact, caches = self.oracle(builder, step.plan)
            rows = eager_rows, padded_rows, self._rows(caches, step)
            hidden = plain[:num_sampled], padded[:num_sampled], exact
            results = [self.errors.Result(*both) for both in zip(hidden, rows, strict=True)]
            decoding = sum(index < mix.decodes for index in step.plan.sampled)
            self.against_fp32.add(mix.name, mix.decodes, decoding, *results)
        if has_graph:
            self._step_of_the_engine(step, padded[:num_sampled])

    def _restore(self) -> None:
        for cache, pristine in zip(self.caches, self.pristine, strict=True):
            cache.copy_(pristine)

    def _save(self) -> None:
        """What the caches hold is what the runs to come must give."""
        for expected, cache in zip(self.expected, self.caches, strict=True):
            expected.copy_(cache)

    def _launch(self, step: Step, shape: Shape, beside: bool, wanted: int) -> tuple[Tensor, Batch]:
        """Kernel by kernel → hidden states of the wanted."""
        self._restore()
        builder = self.runner.builder
        header = builder.header(step.plan, shape).to(self.device)
        batch = builder.gather(header, shape, beside=beside)
        return self.runner.forward(batch, header[WANTED, :wanted]), batch

    def _replay(self, step: Step, shape: Shape) -> Tensor:
        self._restore()
        assert self.runner.graphs is not None
        graph = self.runner.graphs.find(step.plan)
        assert graph is not None and graph.shape == shape, f"{step.mix} found {graph and graph.shape}, not {shape}"
        graph.header.copy_(self.runner.builder.header(step.plan, shape))
        graph.hidden.fill_(float("nan"))
        graph.graph.replay()
        return graph.hidden

    def _step_of_the_engine(self, step: Step, expected: Tensor) -> None:
        """execute and sample: the same once more, and the tokens of these hidden states, which the rows then hold."""
        self._restore()
        plan, runner = step.plan, self.runner
        runner.execute(plan)
        assert runner._launched is not None
        hidden = runner._launched.hidden.clone()
        result = runner.sample().wait()
        self._compare(step, "step of the engine", hidden, expected)
        if result.errors:
            self._fail(step, f"the engine's step has errors: {result.errors}")
        logits = runner.model.logits(hidden)[: len(plan.sampled)]
        tokens = torch.tensor(result.token_ids, device=self.device)
        missed = int((logits.gather(1, tokens[:, None])[:, 0] < logits.amax(1)).sum())
        if missed:
            self._fail(step, f"{missed} of {len(tokens)} greedy tokens are not the most likely ones")
        rows = torch.tensor(plan.rows, device=self.device)
        ends = torch.tensor(plan.num_computed, device=self.device) + torch.tensor(plan.num_tokens, device=self.device)
        if not torch.equal(runner.tables.num_computed[rows].long(), ends):
            self._fail(step, "the rows' counts of computed tokens are not those after the step")
        sampled = torch.tensor(plan.sampled, device=self.device)
        held = runner.tables.history.recent[rows[sampled], ends[sampled] % runner.tables.history.ring]
        if not torch.equal(held.long(), tokens):
            self._fail(step, "the rows do not hold the tokens that were sampled")

    # ---- what must be the same ----

    def _fail(self, step: Step, what: str) -> None:
        self.failures.append(f"{step.mix.name}: {what}")

    def _check_inputs(self, step: Step, batch: Batch) -> None:
        count = len(step.slots)
        for name, got, want in (
            ("ids", batch.input_ids, step.input_ids),
            ("positions", batch.positions, step.positions),
            ("slots", batch.attention.slots[0].long(), step.slots),
        ):
            if not torch.equal(got[:count], want):
                self._fail(step, f"{int((got[:count] != want).sum())} of {count} {name} are wrong")
        if not bool((batch.attention.slots[0][count:] == -1).all()):
            self._fail(step, "padding tokens have slots")

    def _check_others(self, step: Step) -> None:
        """Whatever is no slot of the step's tokens is as it was."""
        for index, (cache, pristine) in enumerate(zip(self.expected, self.pristine, strict=True)):
            changed = _differing(cache, pristine)
            changed[step.slots] = False
            if bool(changed.any()):
                self._fail(step, f"{_cache_name(index)}: {int(changed.sum())} cells of others were written")

    def _compare(self, step: Step, what: str, hidden: Tensor, expected: Tensor) -> None:
        """With the saved caches, and the hidden states of those that are sampled."""
        count = len(step.plan.sampled)
        wrong = _differing(hidden[:count, None], expected[:count, None])
        differing = [_differing(cache, saved) for cache, saved in zip(self.caches, self.expected, strict=True)]
        counts = torch.stack([wrong.sum(), *(cells.sum() for cells in differing)]).tolist()
        if not any(counts):
            return
        found = [f"{what}: not the same bits as launched one by one in the same shape:"]
        if counts[0]:
            at = [step.plan.sampled[i] for i in wrong.nonzero()[:, 0].tolist()]
            found.append(f"hidden states of {counts[0]} of {count} sampled requests, {_few(at)};")
        slots = step.slots.tolist()
        for index, (cells, number) in enumerate(zip(differing, counts[1:], strict=True)):
            if number:
                where = set(cells.nonzero()[:, 0].tolist())
                tokens = [i for i, slot in enumerate(slots) if slot in where]
                places = _few([step.mix.place(token) for token in tokens])
                found.append(
                    f"{_cache_name(index)}: {len(tokens)} tokens ({places}), {number - len(tokens)} cells of others;"
                )
                break  # later layers only carry it on
        self._fail(step, " ".join(found))

    def _rows(self, caches: list[Tensor], step: Step) -> list[Tensor]:
        """By layer [T, ·]: keys and values of the step's tokens."""
        cells = [cache.flatten(0, 1)[step.slots].flatten(1) for cache in caches]
        return [torch.cat(both, dim=1) for both in zip(cells[::2], cells[1::2], strict=True)]


def _differing(a: Tensor, b: Tensor) -> Tensor:
    """bool [blocks · page]: which cells of a cache differ in any bit."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return (a.view(bits) != b.view(bits)).flatten(0, 1).flatten(1).any(dim=1)


def _cache_name(index: int) -> str:
    return f"layer {index // 2} {('keys', 'values')[index % 2]}"


def _few(things: Sequence[Any]) -> str:
    """The first and the last of them."""
    shown = [str(thing) for thing in things]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])} … {shown[-1]}"
