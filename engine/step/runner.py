"""The runner owns the device: model, cache, rows. It turns a plan into sampled tokens without waiting for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels.attention.attention import DecodeWorkspace
from ..adapters.tables import AdapterTables
from ..cache.batch import WANTED, Batch, BatchBuilder, Shape
from ..cache.kv_format import NUMBERS, KVFormat
from ..cache.kv_layout import KVLayout
from ..cache.rows import RowTables
from ..layers.routing import ExpertCounter, ExpertLoad
from ..link.plan import StepPlan, StepResult
from ..link.sampling_params import SamplingParams
from ..models.model import Model
from ..options.speculation import NO_DRAFTS, Speculation
from ..speculation.drafter import Always, Drafter, NgramDrafter, thresholds
from ..speculation.model_drafter import ModelDrafter
from .compilations import LateCompilations, dummy_plan
from .device_cache import DeviceCache
from .graph_table import GraphTable, logit_counts, most_drafting_rows, padded_logits
from .graphs import StepGraphs
from .mask import TokenMask
from .prompt_results import Pooler, PromptScorer
from .relay import Relay
from .sampled import Launched, Pending, SampledTokens
from .sampler import Sampler, Samples
from .seeing import Seeing

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ModelRunner:
    def __init__(
        self,
        model: Model,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        kv_format: KVFormat = NUMBERS,
        speculation: Speculation = NO_DRAFTS,
        model_drafter: ModelDrafter | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.model_drafter = model_drafter
        of_ngrams = speculation.depths and not speculation.by_model
        self.drafter: Drafter | None = NgramDrafter(speculation) if of_ngrams else None
        if self.drafter is not None and speculation.acceptance:
            self.drafter = Always(self.drafter, speculation.num_drafts)
        self.acceptance = speculation.acceptance
        self.num_drafts = speculation.num_drafts  # of each row, at most
        self.draft_depths = [depth for depth in speculation.depths if depth[1]]
        self.device = device
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.cache = DeviceCache(
            model, model_drafter, max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size,
            kv_format=kv_format, device=device, num_drafts=self.num_drafts, state_dtype=state_dtype,
        )  # fmt: skip
        self.layers = self.cache.layers
        self.latent_prompts = self.cache.latent_prompts
        self.copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.workspace = self._make_workspace() if device.type == "cuda" else None
        if model_drafter is not None:
            model_drafter.prepare(most_drafting_rows(self.draft_depths), block_size, device)
        self.graphs: StepGraphs | None = None
        self.seeing = Seeing.of(model, device)
        self.adapters: AdapterTables | None = None
        self.adapter_graphs: StepGraphs | None = None  # of steps with adapters
        self.num_graph_misses = 0
        self._late = LateCompilations()
        self._launched: Launched | None = None
        stage = model.place.stage
        self.is_last = stage.is_last  # and the other stages take what it has sampled
        ring = stage.ring is not None
        drafts, width = self.drafter is not None, model.config.hidden_size
        self.relay = Relay(stage, width, model.place.dtype, device, drafts) if ring else None
        self._counter = ExpertCounter()
        self.make_rows(max_model_len)

    @property
    def layout(self) -> KVLayout:
        return self.cache.layout

    def make_rows(self, max_model_len: int) -> None:
        """(Re)makes the row tables: their width is the context, which may shrink when memory has been planned.

        Layers lose their caches, which come with the old block tables: `bind_cache` comes afterwards.
        """
        if max_model_len != self.max_model_len:
            for rotary in {layer.rotary for layer in self.layers}:
                rotary.fit(max_model_len)
        self.max_model_len = self.cache.max_model_len = max_model_len
        max_blocks = -(-max_model_len // self.block_size)
        # The old ones go first: with a long context there is no room for both, nor should the cache be without theirs.
        self.cache.unbind()
        for name in ("tables", "builder", "sampler", "sampled", "scorer", "pooler"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tables = RowTables(
            self.max_num_seqs, max_model_len, max_blocks, len(self.layout.groups), self.device, self.block_size,
            self.layout.history_group, self.num_drafts, self.cache.states is not None,
            self.seeing is not None and self.seeing.axes is not None,
        )  # fmt: skip
        self.builder = BatchBuilder(self.tables, self.block_size, self.workspace)
        self.builder.thresholds = thresholds(self.acceptance, self.device) if self.acceptance else None
        self.sampler = Sampler(self.tables)
        self.sampled = SampledTokens(
            self.builder, self.relay, self.model.place.group, drafter=self.drafter, model_drafter=self.model_drafter
        )
        # Beside these logits live the hidden states of the whole step, and no clone or counts as when sampling.
        self.scorer = PromptScorer(self.tables, self.model.logits, max(16, self.max_num_seqs // 2))
        self.pooler = Pooler(self.tables, self.model.pooling_head)

    # ---- a step: execute, then sample ----

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launches the forward pass. `sample` must follow: two calls, so that a mask can be made in between."""
        started, event = time.perf_counter(), self._record()
        builder, relay = self.builder, self.relay
        self.sampled.settle(plan)
        builder.write_rows(plan)
        seeing = self.seeing if self.seeing is not None and self.seeing.begin(plan) else None
        num_sampled, num_wanted = plan.num_samples, plan.num_samples + len(plan.pooled)
        self.pooler.forget(plan.left)
        wants_all = bool(plan.scored) or self.pooler.needs_all(plan)
        adapters = self.adapters if self.adapters is not None and self.adapters.begin(plan) else None
        graphs = self.graphs  # None until they are captured: what warms up misses none
        if graphs is not None and adapters is not None:
            graphs = self.adapter_graphs
        graph = graphs.find(plan) if graphs is not None and not wants_all and not plan.seen else None
        expanded = None  # latents of prompts: not in a graph, for how long contexts are, the host has to know
        if self.latent_prompts is not None and self.latent_prompts.expands(plan, graph is not None):
            graph, expanded = None, self.latent_prompts
        every: Tensor | None = None  # the hidden states of all tokens
        num_logits = num_sampled
        if graph is not None:
            shape = graph.shape
            num_logits = padded_logits(num_sampled, shape.samples)
            if adapters is not None:
                adapters.group(plan, shape.tokens, num_logits)
            host = builder.header(plan, shape)
            header = graph.header.copy_(host, non_blocking=True)
            if self.seeing is not None and shape.prefill_rows:
                self.seeing.fill(plan)
            if relay is not None:
                relay.take_in(shape.tokens)
            graph.graph.replay()
            batch, hidden = graph.batch, graph.hidden
        else:
            shape = Shape.of(plan)
            if adapters is not None:
                adapters.group(plan, shape.tokens, num_logits)
            host = builder.header(plan, shape)
            header = host.to(self.device, non_blocking=True)
            # Dummy steps compile what graphs will launch.
            batch = builder.gather(header, shape, beside=plan.step < 0)
            if expanded is not None:
                batch.attention.expanded = expanded.prompts(plan, batch.attention.prompts, self.max_model_len)
            if seeing is not None:
                seeing.place(plan, batch)
            if relay is not None:
                relay.take_in(shape.tokens)
            wanted = header[WANTED, : max(1, num_wanted)]  # at least one, or kernels would meet products of no row
            if wants_all:
                every = self.forward(batch, None)
                hidden = every.index_select(0, wanted)
            else:
                hidden = self.forward(batch, wanted)
                if graphs is not None and expanded is None and not plan.seen:
                    self.num_graph_misses += graphs.table.expects(plan)
        samples = builder.samples(plan, header, host, batch)
        if not self.is_last:
            assert relay is not None
            relay.hand_over(shape.tokens)
            self._launched = Launched(header, shape, samples, hidden[:0], None, None, started, event, batch, graph)
            return
        scores = self.scorer(plan, every) if every is not None and plan.scored else None
        pooled = self.pooler(plan, hidden[num_sampled:num_wanted], every) if plan.pooled else None
        self._launched = Launched(
            header, shape, samples, hidden[:num_logits], scores, pooled, started, event, batch, graph
        )

    @torch.inference_mode()
    def sample(self, mask: TokenMask | None = None) -> Pending:
        assert self._launched is not None, "sample() without execute()"
        step, self._launched = self._launched, None
        plan = step.samples.plan
        if self._takes_greatest(step, mask is not None and mask.limits):
            tokens, finite = self._behind(step, self.model.greatest)
            samples = Samples(tokens[: plan.num_samples], finite[: plan.num_samples])
        else:
            logits = self._behind(step, self.model.logits)[: plan.num_samples]
            samples = self.sampler(logits, step.samples, mask)
        drafts = self.sampled.take(step, samples.tokens, *((mask.postponed, mask.cuts) if mask is not None else ()))
        if plan.told:
            drafts.told = self.builder.tell_drafts(plan, self.num_drafts)
        scores, pooled = step.scores, step.pooled
        outputs = [samples.tokens, samples.finite, *drafts.tensors]
        if samples.possible is not None:
            outputs.append(samples.possible)
        if pooled is not None:
            outputs.append(pooled.vectors)
        outputs += samples.logprobs or ()
        outputs += scores.tensors if scores is not None else ()
        load, counter = self._counter.due(getattr(self.model, "expert_load", None)), self._counter
        unseen = {} if self.seeing is None else self.seeing.take_unseen()
        of_step = plan, samples, drafts, scores, pooled, step.started
        if self.copy_stream is None:
            experts = None if load is None else load.clone()
            return Pending(*of_step, outputs, experts=experts, counter=counter, unseen=unseen)
        end = self._record()
        assert step.event is not None and end is not None
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(end)
            host = [t.to("cpu", non_blocking=True) for t in outputs]
            experts = None if load is None else load.to("cpu", non_blocking=True)  # while later steps add to it
            copied = torch.cuda.Event(blocking=True)
            copied.record(self.copy_stream)
        return Pending(*of_step, host, (step.event, end, copied), outputs, experts, counter, unseen)

    @torch.inference_mode()
    def follow(
        self, postponed: tuple[int, ...] = (), cuts: tuple[tuple[int, int], ...] = (), masked: bool = False
    ) -> None:
        """What `sample` is on the other ranks: rank 0 samples, they take its tokens. The rest is as in its mask;
        masked: whether that limits any sample."""
        assert self._launched is not None, "follow() without execute()"
        step, self._launched = self._launched, None
        if not self.is_last:
            self.sampled.go_on(step, postponed, cuts)
            return
        head = self.model.greatest if self._takes_greatest(step, masked) else self.model.logits
        self._behind(step, head)  # rank 0 needs this rank's part of either
        tokens = torch.empty(step.samples.plan.num_samples, dtype=torch.int32, device=self.device)
        self.sampled.take(step, tokens, postponed, cuts)

    @torch.inference_mode()
    def settle(self) -> None:
        """On other stages than the last: appends all tokens that are still to come."""
        self.sampled.settle(None)

    def _takes_greatest(self, step: Launched, masked: bool) -> bool:
        """Whether all samples are those of the greatest logits, so that ranks need not gather them. All ranks find the
        same: what a row asks for travels with the plan that brings it, and whether a mask limits it with `follow`."""
        return self.model.place.group.size > 1 and not masked and not self.sampler.wants(step.samples)

    def _behind(self, step: Launched, head: Callable[[Tensor], T]) -> T:
        """What the model's head makes of a step's hidden states."""
        if self.adapters is None:
            return head(step.hidden)
        self.adapters.begin_sampling()
        found = head(step.hidden)
        self.adapters.end()
        return found

    def forward(self, batch: Batch, wanted: Tensor | None) -> Tensor:
        """Hidden states of the wanted tokens, or of all."""
        late: Tensor | None = None
        if self.adapters is not None and self.adapters.step.tokens is not None:
            late, wanted = wanted, None  # the tiles of adapters are of all tokens, in the last layer too
        if self.relay is None:
            hidden = self.model(batch.input_ids, batch.rope_positions, batch.attention, wanted=wanted)
        else:
            residual = self.relay.residual(len(batch.input_ids))
            embeddings = None if self.relay.stage.is_first else residual
            hidden = self.model(batch.input_ids, batch.rope_positions, batch.attention, embeddings, wanted)
            if not self.is_last:
                hidden, late = residual.copy_(hidden), None
        self.builder.folded(batch)
        return hidden if late is None else hidden.index_select(0, late)

    def _record(self) -> torch.cuda.Event | None:
        if self.copy_stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # ---- cache and warm-up ----

    def bind_cache(self, num_blocks: int, dtype: torch.dtype) -> None:
        """Allocates the paged cache; block tables are those that the rows have now."""
        self.builder.prompt_pages = self.cache.bind(self.tables, num_blocks, dtype)

    def bind_states(self, num_slots: int) -> None:
        """Allocates slots for recurrent states, where layers keep some."""
        self.builder.states = self.cache.bind_states(num_slots)

    def _forward_adapted(self, batch: Batch, wanted: Tensor | None) -> Tensor:
        """While graphs are captured."""
        assert self.adapters is not None
        self.adapters.use(len(batch.input_ids))
        hidden = self.forward(batch, wanted)
        self.adapters.end()
        return hidden

    def _propose(self, batch: Batch, header: Tensor, shape: Shape) -> Tensor:
        """While graphs are captured, which are planned before the rows are made for good."""
        return self.sampled.propose(batch, header, shape)

    def plan_graphs(self, max_decodes: int, max_mixed_tokens: int, large_mixed_tokens: tuple[int, ...]) -> StepGraphs:
        """For steps with up to this many decodes, or these numbers of tokens in all; `capture_graphs` makes them."""
        decodes = min(max_decodes, self.max_num_seqs)
        drafts = {count: most for most, count in self.draft_depths}
        propose = self._propose if self.model_drafter is not None else None
        if self.adapters is not None:  # who drafts has none
            coarse = GraphTable(decodes, max_mixed_tokens, (), drafts, coarse=True)
            self.adapter_graphs = StepGraphs(coarse, self._forward_adapted, propose, self.seeing)
        table = GraphTable(decodes, max_mixed_tokens, large_mixed_tokens, drafts)
        return StepGraphs(table, self.forward, propose, self.seeing)

    @torch.inference_mode()
    def capture_graphs(self, graphs: StepGraphs) -> None:
        """Steps that fit one of these graphs replay it from here on."""
        torch.cuda.empty_cache()  # or what the warm-up left would be given back meanwhile, and hide what is taken
        before = torch.cuda.mem_get_info()[0]
        if self.model_drafter is not None:
            self.model_drafter.reserve(max(shape.tokens for shape in graphs.shapes()))
        every = [graphs] if self.adapter_graphs is None else [graphs, self.adapter_graphs]
        num_tokens = max(shape.tokens for one in every for shape in one.shapes())
        if self.seeing is not None:
            self.seeing.make_inputs(num_tokens)
        if self.relay is not None:
            self.relay.reserve(num_tokens)
        if self.adapters is not None:
            self.adapters.clear()
        pool = torch.cuda.graph_pool_handle()  # one, as the memory plan has it
        for one in every:
            one.builder = self.builder
            one.capture(pool)
        counts = logit_counts(graphs.shapes(), self.max_num_seqs, self.draft_depths) if self.is_last else set()
        place = self.model.place
        hidden = torch.zeros(
            max(counts, default=0), self.model.config.hidden_size, dtype=place.dtype, device=place.device
        )
        for count in counts:
            self.model.logits(hidden[:count])
        self.graphs = graphs
        taken = (before - torch.cuda.mem_get_info()[0]) / 2**30
        logger.info("%d CUDA graphs took %.2f GiB", sum(len(one.shapes()) for one in every), taken)

    @property
    def num_late_compilations(self) -> int:
        return len(self._late)

    @property
    def compiling_seconds(self) -> float:
        """That these have taken."""
        return self._late.seconds

    def count_compilations(self) -> None:
        """From here on every kernel should be ready, and tokens are requests'."""
        self._late.count()
        load: ExpertLoad | None = getattr(self.model, "expert_load", None)
        if load is not None:
            load.clear()
            self._counter = ExpertCounter()

    def dummy_step(
        self, num_seqs: int, num_tokens: int, sampling: SamplingParams, num_drafts: int = 0, adapted: bool = False
    ) -> StepResult:
        """A step through the real path that leaves nothing behind, as dummy_plan makes it."""
        plan = dummy_plan(
            num_seqs, num_tokens, sampling, num_drafts, adapted, max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len, num_groups=len(self.layout.groups), generates=self.model.config.generates,
        )  # fmt: skip
        self.execute(plan)
        if self.is_last:
            return self.sample().wait()
        self.follow()
        self.settle()
        return StepResult(plan.step, [])

    def _make_workspace(self) -> DecodeWorkspace:
        return DecodeWorkspace.create(
            self.max_num_seqs,
            max(layer.num_heads for layer in self.layers),
            max(layer.spec.value_dim for layer in self.layers),
            self.device,
            1 + max((drafts for _, drafts in self.draft_depths), default=0),
        )
