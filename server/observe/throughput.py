"""Tokens a second over the last seconds: a log line while the engine is busy, and two gauges."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...engine.link.messages import StepOutputs
from ..client.client import Client

logger = logging.getLogger("vserve.stats")


class Throughput:
    """Steps drive it: an idle engine has no clock to run, and says nothing."""

    def __init__(self, client: Client, tokens: Callable[[], tuple[int, int]], interval: float, log: bool) -> None:
        """`tokens`: (computed of prompts, generated) so far; `interval`: seconds."""
        self._client = client
        self._tokens = tokens
        self._interval = interval
        self._log = log
        self._last_step = -interval
        self._rates = (0.0, 0.0)
        self._begin(0.0)
        client.stats_listeners.append(self._step)

    def rates(self) -> tuple[float, float]:
        """(prompt, generated) tokens a second of the last interval that is over; zero when idle."""
        return self._rates if time.monotonic() - self._last_step <= 2 * self._interval else (0.0, 0.0)

    def _begin(self, now: float) -> None:
        stats = self._client.stats
        self._since = now
        self._counts = self._tokens()
        self._prefix = stats.prefix_queries, stats.prefix_hits

    def _step(self, message: StepOutputs) -> None:
        now = time.monotonic()
        if now - self._last_step > self._interval:  # it was idle: that time counts for nothing
            self._begin(now)
        self._last_step = now
        if now - self._since >= self._interval:
            self._end(now)
            self._begin(now)

    def _end(self, now: float) -> None:
        stats, seconds = self._client.stats, now - self._since
        prompt, generated = (now - then for now, then in zip(self._tokens(), self._counts, strict=True))
        self._rates = prompt / seconds, generated / seconds
        if not self._log:
            return
        queries, hits = stats.prefix_queries - self._prefix[0], stats.prefix_hits - self._prefix[1]
        fields = {
            "prompt_tokens_per_second": round(self._rates[0], 1),
            "generation_tokens_per_second": round(self._rates[1], 1),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_cache_usage": round((stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks), 4),
            "prefix_cache_hit_rate": round(hits / queries, 4) if queries > 0 else 0.0,
            "preemptions": stats.num_preemptions,
        }
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%, Preemptions: %d",
            *self._rates, stats.num_running, stats.num_waiting, 100 * fields["kv_cache_usage"],
            100 * fields["prefix_cache_hit_rate"], stats.num_preemptions, extra={"fields": fields},
        )  # fmt: skip
