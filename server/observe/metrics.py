"""What happens, counted: plain numbers, touched by the event loop alone. exposition.py makes a page of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...engine.link.messages import EngineStats, StepOutputs, sum_of
from ..client.client import Client
from ..client.engine_client import EngineClient
from ..generation.choice import Choice
from ..generation.generation import Generation
from ..histogram import COMPILE, Histogram
from ..media.pictures import Pictures
from ..options.config import ServerConfig
from .preemptions import Preemptions
from .throughput import Throughput
from .unknown_fields import UnknownFields

if TYPE_CHECKING:
    from ..grammar.service import GrammarService  # loaded with the first request for structured output

# vLLM's buckets, and finer ones below the first of them: a superset keeps histogram_quantile panels working.
TTFT = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
PHASE = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8,
    1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
LENGTH = tuple(m * 10**e for e in range(7) for m in (1, 2, 5) if m * 10**e <= 1_000_000)

MOST_ADAPTERS = 100  # that have series of their own
OTHER_ADAPTERS = "(others)"

FINISHED_REASONS = ("stop", "length", "abort", "error")
# A series is there from the start, at zero: an alert on its increase must not miss the first one.
REJECTED = (
    "queued_requests", "queued_tokens", "queued_text", "queued_pictures", "bodies", "key_requests", "key_tokens",
    "key_open_requests", "loading", "draining", "engine_down",
)  # fmt: skip
TIMED_OUT = ("request", "queue", "write")
ABORTED = ("disconnect", "cancel", "timeout", "error")

TOTALS = (
    "num_preemptions", "prefix_queries", "prefix_hits", "num_steps", "device_seconds", "host_seconds",
    "num_graph_misses", "num_late_compilations", "num_corrupted_requests",
    "num_invariant_violations", "num_drafts", "num_draft_tokens", "num_state_restores", "num_restored_tokens",
    "num_state_exports", "num_skipped_state_exports", "encoder_queries", "encoder_hits", "num_encoded_patches",
)  # fmt: skip


@dataclass
class GrammarCounts:
    """As GrammarService has them, while there is none."""

    compile_seconds: Histogram = field(default_factory=lambda: Histogram(COMPILE))
    num_hits: int = 0
    num_misses: int = 0
    num_failures: int = 0


class EngineCounts:
    """What one engine says of itself, through its deaths."""

    def __init__(self, engine: EngineClient, index: int) -> None:
        self.engine = engine
        self.name = str(index)

    def totals(self) -> dict[str, float]:
        """The counters of EngineStats, over all engines that have taken this place: a counter never falls."""
        past, stats = self.engine.past_stats, self.engine.stats
        return {name: getattr(past, name) + getattr(stats, name) for name in TOTALS}

    def accepted_by_position(self) -> dict[str, float]:
        """Drafts that held, by their place in what was drafted of a request for a step."""
        accepted = sum_of(self.engine.past_stats, self.engine.stats).num_accepted_tokens
        return {str(place): float(count) for place, count in enumerate(accepted)}

    def tokens_by_expert(self) -> dict[str, float]:
        """That each expert of a mixture got."""
        tokens = sum_of(self.engine.past_stats, self.engine.stats).expert_tokens
        return {str(expert): float(count) for expert, count in enumerate(tokens)}

    def tokens_by_rank(self) -> dict[str, float]:
        """That the experts of each rank got, where ranks hold whole ones."""
        if not self.engine.ready or not (ranks := int(self.engine.info.experts.get("ranks", 0))):
            return {}
        tokens = list(self.tokens_by_expert().values())
        each = len(tokens) // ranks
        return {str(rank): sum(tokens[rank * each : (rank + 1) * each]) for rank in range(ranks)} if tokens else {}

    def state(self) -> EngineStats:
        """Of the engine that serves now; that of a dead one says nothing any more."""
        return self.engine.stats if self.engine.ready else EngineStats()


class Metrics:
    def __init__(self, client: Client, config: ServerConfig) -> None:
        self._client = client
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished_requests = dict.fromkeys(FINISHED_REASONS, 0)
        self.rejected_requests = dict.fromkeys(REJECTED, 0)
        self.timed_out_requests = dict.fromkeys(TIMED_OUT, 0)
        self.aborted_requests = dict.fromkeys(ABORTED, 0)
        self.unknown_fields = UnknownFields()
        self.adapter_requests: dict[str, int] = {}  # by name; see _name_of
        self.adapter_tokens: dict[str, int] = {}
        self.time_to_first_token = Histogram(TTFT)
        self.inter_token_latency = Histogram(TOKEN)
        self.time_per_output_token = Histogram(TOKEN)
        self.e2e_latency = Histogram(PHASE)
        self.queue_time = Histogram(PHASE)
        self.tokenizer_queue = Histogram(PHASE)
        self.picture_queue = Histogram(PHASE)
        self.pictures: Pictures | None = None  # where the model sees any
        self.inference_time = Histogram(PHASE)
        self.prefill_time = Histogram(PHASE)
        self.decode_time = Histogram(PHASE)
        self.request_prompt_tokens = Histogram(LENGTH)
        self.request_generation_tokens = Histogram(LENGTH)
        self.request_prefill_kv_computed_tokens = Histogram(LENGTH)
        self.request_max_num_generation_tokens = Histogram(LENGTH)
        self.request_params_max_tokens = Histogram(LENGTH)
        self.request_params_n = Histogram(CHOICES)
        self.request_num_preemptions = Histogram(PREEMPTIONS)
        self.iteration_tokens = Histogram(ITERATION)
        # (running, waiting): names of adapters; None: none can be served
        self.adapters: Callable[[], tuple[list[str], list[str]]] | None = None
        self.grammars: GrammarCounts | GrammarService = GrammarCounts()
        client.stats_listeners.append(self._step)
        self.preemptions = Preemptions(client)
        self.throughput = Throughput(client, self.tokens, config.log_stats_interval, log=not config.disable_log_stats)

    @property
    def engines(self) -> list[EngineCounts]:
        """Those that there are now."""
        return [EngineCounts(engine, index) for index, engine in enumerate(self._client.engines)]

    def tokens(self) -> tuple[int, int]:
        """(prompt tokens that were computed, tokens that were generated) so far"""
        return self.prompt_tokens - self.prompt_tokens_cached, self.generation_tokens

    # ---- the engine ----

    def _step(self, message: StepOutputs) -> None:
        if num_tokens := message.stats.step_tokens:
            # A prompt's last token gives the first of the answer, which is a token of this step as well; each later one
            # is computed where the next is generated.
            for output in message.outputs:
                if output.num_cached_tokens is not None and output.token_ids:
                    num_tokens += 1
            self.iteration_tokens.observe(num_tokens)

    # ---- requests ----

    def rejected(self, reason: str, times: int = 1) -> None:
        """Turned away before it was submitted, for the server's sake: overload, start-up, shutdown."""
        self.rejected_requests[reason] += times

    def timed_out(self, reason: str, times: int = 1) -> None:
        self.timed_out_requests[reason] += times

    def _name_of(self, adapter: str) -> str:
        """Its label: adapters come and go while a server runs, and a label has an end."""
        if adapter not in self.adapter_requests and len(self.adapter_requests) >= MOST_ADAPTERS:
            adapter = OTHER_ADAPTERS
        self.adapter_requests.setdefault(adapter, 0)
        self.adapter_tokens.setdefault(adapter, 0)
        return adapter

    def first_output(self, generation: Generation, choice: Choice, now: float) -> None:
        if choice.prompt.sampling.pooling is None:
            self.time_to_first_token.observe(now - generation.arrival)
        if choice.index % generation.n == 0:  # a prompt counts once, as in the usage that the client reads
            self.prompt_tokens += len(choice.prompt.token_ids)
            self.prompt_tokens_cached += choice.num_cached_tokens

    def more_output(self, choice: Choice, now: float, num_tokens: int) -> None:
        assert choice.last_token is not None
        self.inter_token_latency.observe((now - choice.last_token) / num_tokens, num_tokens)

    def finished(self, generation: Generation, choice: Choice, last_of_prompt: bool) -> None:
        reason = choice.finish_reason
        assert reason is not None
        self.finished_requests[reason] += 1
        if generation.adapter:
            name = self._name_of(generation.adapter)
            self.adapter_requests[name] += 1
            self.adapter_tokens[name] += choice.num_tokens
        if reason == "abort":
            self.aborted_requests[generation.abort_reason] += 1
        first, last = choice.first_token, choice.last_token
        if reason not in ("stop", "length") or first is None or last is None:
            return
        self.e2e_latency.observe(time.monotonic() - generation.arrival)
        if (scheduled := choice.first_scheduled) is not None:
            self.queue_time.observe(max(0.0, scheduled - choice.submitted))
            self.prefill_time.observe(first - scheduled)
            self.inference_time.observe(last - scheduled)
        self.request_prefill_kv_computed_tokens.observe(len(choice.prompt.token_ids) - choice.num_cached_tokens)
        if choice.prompt.sampling.pooling is not None:  # it has no output
            self.request_prompt_tokens.observe(len(choice.prompt.token_ids))
            return
        self.decode_time.observe(last - first)
        if choice.num_tokens > 1:
            self.time_per_output_token.observe((last - first) / (choice.num_tokens - 1))
        self.request_generation_tokens.observe(choice.num_tokens)
        self.request_params_max_tokens.observe(choice.prompt.sampling.max_tokens)
        self.request_num_preemptions.observe(choice.mailbox.num_preemptions)
        if last_of_prompt:
            prompt = choice.index // generation.n
            siblings: Sequence[Choice] = generation.choices[prompt * generation.n : (prompt + 1) * generation.n]
            self.request_prompt_tokens.observe(len(choice.prompt.token_ids))
            self.request_max_num_generation_tokens.observe(max(sibling.num_tokens for sibling in siblings))
            self.request_params_n.observe(generation.n)
