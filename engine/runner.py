"""The runner owns the device: model, cache, rows. It turns a plan into sampled tokens without waiting for them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from ..kernels.attention import DecodeWorkspace
from ..kernels.attention_inputs import PagedCache
from .batch import WANTED, Batch, BatchBuilder, SampleBatch, Shape
from .graphs import StepGraphs
from .kv_layout import KVLayout
from .kv_storage import allocate
from .mask import TokenMask
from .models.model import Model
from .plan import NOT_FINITE, NOTHING_ALLOWED, NewRow, StepPlan, StepResult, TokenLogprobs
from .pooling import Pooled, Pooler
from .prompt_logprobs import PromptScorer, PromptScores
from .request import Pooling, SamplingParams
from .rows import RowTables
from .sampler import Sampler, Samples

logger = logging.getLogger(__name__)

LOGIT_ROWS = 32
POOLED = SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling(head=True))


@dataclass
class Pending:
    """A step on its way. The device tensors are held until the copies out of them have been made."""

    plan: StepPlan
    host: list[Tensor]
    samples: Samples
    scores: PromptScores | None
    pooled: Pooled | None
    started: float
    events: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event] | None = None  # start, end, copied
    held: list[Tensor] | None = None

    def wait(self) -> StepResult:
        """Blocks (without the GIL) until the step is over. May be called on any thread."""
        if self.events is not None:
            self.events[2].synchronize()
            seconds = self.events[0].elapsed_time(self.events[1]) / 1e3
        else:
            seconds = time.perf_counter() - self.started
        host = iter(self.host)
        tokens, finite = next(host).tolist(), next(host).numpy()
        errors = {}
        if self.samples.possible is not None:
            errors = dict.fromkeys(np.flatnonzero(~next(host).numpy()).tolist(), NOTHING_ALLOWED)
        if not finite.all():
            for i in np.flatnonzero(~finite):
                errors[int(i)] = NOT_FINITE
        embeddings = self.pooled.embeddings(next(host)) if self.pooled is not None else []
        logprobs: list[TokenLogprobs | None] | None = None
        if self.samples.logprob_rows is not None:
            logprobs = [None] * len(tokens)
            values, ranks, ids, tops = (next(host).tolist() for _ in range(4))
            for j, i in enumerate(self.samples.logprob_rows):
                logprobs[i] = TokenLogprobs(values[j], ranks[j], ids[j], tops[j])
        scores = self.scores.lists(*host) if self.scores is not None else []
        return StepResult(self.plan.step, tokens, logprobs, errors, seconds, scores, embeddings)


def padded_logits(num_sampled: int, num_rows: int) -> int:
    """Of how many of the rows behind a graph logits are computed: of few different numbers, all met at the start.

    cuBLAS has a kernel for every few rows, and the driver waits for the device to be idle when it loads one.
    """
    if num_sampled < LOGIT_ROWS:
        rounded = 1 << (num_sampled - 1).bit_length() if num_sampled else 0
    else:
        rounded = -(-num_sampled // LOGIT_ROWS) * LOGIT_ROWS
    return min(rounded, num_rows)


@dataclass
class Launched:
    """A step between `execute` and `sample`."""

    header: Tensor
    num_rows: int
    samples: SampleBatch
    hidden: Tensor  # [≥ S, hidden], rows of padding behind
    scores: PromptScores | None
    pooled: Pooled | None
    started: float
    event: torch.cuda.Event | None


class ModelRunner:
    def __init__(
        self, model: Model, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.model = model
        self.device = device
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.layout = KVLayout.of(model.kv_specs(), block_size, max_model_len)
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.workspace = self._make_workspace() if device.type == "cuda" else None
        self.graphs: StepGraphs | None = None
        self.num_graph_misses = 0
        self._late_compilations: list[int] = []
        self._launched: Launched | None = None
        self.make_rows(max_model_len)

    def make_rows(self, max_model_len: int) -> None:
        """(Re)makes the row tables: their width is the context, which may shrink when memory has been planned.

        Layers lose their caches, which come with the old block tables: `bind_cache` comes afterwards.
        """
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // self.block_size)
        # The old ones go first: with a long context there is no room for both, nor should the cache be without theirs.
        for layer in self.model.attention_layers():
            layer.bind(None)
        for name in ("tables", "builder", "sampler", "scorer", "pooler"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tables = RowTables(self.max_num_seqs, max_model_len, max_blocks, len(self.layout.groups), self.device)
        self.builder = BatchBuilder(self.tables, self.block_size, self.workspace)
        self.sampler = Sampler(self.tables)
        # Beside these logits live the hidden states of the whole step, and no clone or counts as when sampling.
        self.scorer = PromptScorer(self.tables, self.model.logits, max(16, self.max_num_seqs // 2))
        self.pooler = Pooler(self.tables, self.model.pooling_head)

    # ---- a step: execute, then sample ----

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launches the forward pass. `sample` must follow: two calls, so that a mask can be made in between."""
        started, event = time.perf_counter(), self._record()
        builder = self.builder
        builder.write_rows(plan)
        num_sampled, num_wanted = len(plan.sampled), len(plan.sampled) + len(plan.pooled)
        wants_all = bool(plan.scored) or self.pooler.needs_all(plan)
        graph = self.graphs.find(plan) if self.graphs is not None and not wants_all else None
        every: Tensor | None = None  # the hidden states of all tokens
        num_logits = num_sampled
        if graph is not None:
            shape = graph.shape
            num_logits = padded_logits(num_sampled, shape.rows)
            host = builder.header(plan, shape)
            header = graph.header.copy_(host, non_blocking=True)
            graph.graph.replay()
            batch, hidden = graph.batch, graph.hidden
        else:
            shape = Shape.of(plan)
            host = builder.header(plan, shape)
            header = host.to(self.device, non_blocking=True)
            # Dummy steps compile what graphs will launch.
            batch = builder.gather(header, shape, beside=plan.step < 0)
            wanted = header[WANTED, : max(1, num_wanted)]  # at least one, or kernels would meet products of no row
            if wants_all:
                every = self.forward(batch, None)
                hidden = every.index_select(0, wanted)
            else:
                hidden = self.forward(batch, wanted)
                self.num_graph_misses += self.graphs is not None and self.graphs.expects(plan)
        scores = self.scorer(plan, every) if every is not None and plan.scored else None
        pooled = self.pooler(plan, hidden[num_sampled:num_wanted], every) if plan.pooled else None
        samples = builder.samples(plan, header, host, batch)
        self._launched = Launched(header, shape.rows, samples, hidden[:num_logits], scores, pooled, started, event)

    @torch.inference_mode()
    def sample(self, mask: TokenMask | None = None) -> Pending:
        assert self._launched is not None, "sample() without execute()"
        step, self._launched = self._launched, None
        logits = self.model.logits(step.hidden)[: len(step.samples.plan.sampled)]
        samples = self.sampler(logits, step.samples, mask)
        self.builder.commit(step.header, step.num_rows, samples.tokens)
        if mask is not None and mask.postponed:
            self.builder.take_back(step.samples, mask.postponed)
        plan, scores, pooled = step.samples.plan, step.scores, step.pooled
        outputs = [samples.tokens, samples.finite]
        if samples.possible is not None:
            outputs.append(samples.possible)
        if pooled is not None:
            outputs.append(pooled.vectors)
        outputs += samples.logprobs or ()
        outputs += scores.tensors if scores is not None else ()
        if self.copy_stream is None:
            return Pending(plan, outputs, samples, scores, pooled, step.started)
        end = self._record()
        assert step.event is not None and end is not None
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(end)
            host = [t.to("cpu", non_blocking=True) for t in outputs]
            copied = torch.cuda.Event(blocking=True)
            copied.record(self.copy_stream)
        return Pending(plan, host, samples, scores, pooled, step.started, (step.event, end, copied), outputs)

    def forward(self, batch: Batch, wanted: Tensor | None) -> Tensor:
        """Hidden states of the wanted tokens, or of all."""
        return self.model(batch.input_ids, batch.positions, batch.attention, wanted=wanted)

    def _record(self) -> torch.cuda.Event | None:
        if self.copy_stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # ---- cache and warm-up ----

    def bind_cache(self, num_blocks: int, dtype: torch.dtype) -> None:
        """Allocates the paged cache; each layer's comes with the block tables that the rows have now."""
        layers, caches = self.model.attention_layers(), allocate(self.layout, num_blocks, dtype, self.device)
        for index, group in enumerate(self.layout.groups):
            for layer in group.layers:
                layers[layer].bind(PagedCache(*caches[layer], self.tables.block_tables[index]), index)

    def row_bytes(self, max_model_len: int) -> int:
        """Bytes of the row tables that grow with the context: tokens, and a block table for each KV group."""
        width = max_model_len + len(self.layout.groups) * -(-max_model_len // self.block_size)
        return (self.max_num_seqs + 1) * width * 4

    def plan_graphs(self, max_decodes: int, max_mixed_tokens: int, large_mixed_tokens: tuple[int, ...]) -> StepGraphs:
        """For steps with up to this many decodes, or these numbers of tokens in all; `capture_graphs` makes them."""
        decodes = min(max_decodes, self.max_num_seqs)
        return StepGraphs(None, self.forward, decodes, max_mixed_tokens, large_mixed_tokens)

    @torch.inference_mode()
    def capture_graphs(self, graphs: StepGraphs) -> None:
        """Steps that fit one of these graphs replay it from here on."""
        graphs.builder = self.builder
        torch.cuda.empty_cache()  # or what the warm-up left would be given back meanwhile, and hide what is taken
        before = torch.cuda.mem_get_info()[0]
        graphs.capture()
        rows = {shape.rows for shape in graphs.shapes()}
        hidden = torch.zeros(max(rows), self.model.config.hidden_size, dtype=self.model.place.dtype, device=self.device)
        for count in {padded_logits(n, most) for most in rows for n in range(1, min(most, self.max_num_seqs) + 1)}:
            self.model.logits(hidden[:count])
        self.graphs = graphs
        logger.info(
            "%d CUDA graphs took %.2f GiB", len(graphs.shapes()), (before - torch.cuda.mem_get_info()[0]) / 2**30
        )

    @property
    def num_late_compilations(self) -> int:
        return len(self._late_compilations)

    def count_compilations(self) -> None:
        """From here on every kernel should be ready: one that is compiled holds up all requests."""
        late = self._late_compilations  # not self: Triton keeps the hook longer than this runner is wanted

        def compiled(**_: object) -> None:
            late.append(1)

        triton.knobs.runtime.jit_post_compile_hook = compiled

    def dummy_step(self, num_seqs: int, num_tokens: int, sampling: SamplingParams) -> StepResult:
        """A step through the real path that leaves nothing behind: its block tables point to the null block."""
        if not self.model.config.generates:
            sampling = POOLED
        num_seqs = min(num_seqs, num_tokens, self.max_num_seqs)
        lengths = [
            min(num_tokens // num_seqs + (i < num_tokens % num_seqs), self.max_model_len) for i in range(num_seqs)
        ]
        lengths.sort(key=lambda n: n != 1)
        rows = [NewRow(i, 0, bytes(4 * n), n, 0, sampling) for i, n in enumerate(lengths)]
        every, generates = list(range(num_seqs)), self.model.config.generates
        plan = StepPlan(
            -1, every, lengths, [0] * num_seqs, every if generates else [], lengths.count(1), rows,
            [[] for _ in self.layout.groups], pooled=[] if generates else every,
        )  # fmt: skip
        self.execute(plan)
        return self.sample().wait()

    def _make_workspace(self) -> DecodeWorkspace:
        layers = self.model.attention_layers()
        return DecodeWorkspace.create(
            self.max_num_seqs,
            max(layer.num_heads for layer in layers),
            max(layer.spec.value_dim for layer in layers),
            self.device,
        )
