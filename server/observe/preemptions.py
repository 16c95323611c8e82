"""A warning when requests lose their cache to others: how many, why, and what would help."""

from __future__ import annotations

import logging
import time

from ...engine.link.messages import StepOutputs
from ..client.client import Client

logger = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two warnings, however many are preempted


class Preemptions:
    """`total`: since this process began, whichever engine it was."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.total = 0
        self._unsaid = 0
        self._said = -INTERVAL
        client.stats_listeners.append(self._step)

    def _step(self, message: StepOutputs) -> None:
        self.total += len(message.preempted)
        self._unsaid += len(message.preempted)
        now = time.monotonic()
        if self._unsaid and now - self._said >= INTERVAL:
            self._warn(message)
            self._said, self._unsaid = now, 0

    def _ranks(self) -> str:
        """With more cards a rank has less of the weights, and a token takes less of its cache."""
        option, size, times = self._client.info.more_cards
        if not option:
            return ""
        now = getattr(self._client.config, option)
        name = option.replace("_", "-")
        return f" or --{name} (now {now}; with {size} the cache holds about {times} times as much)"

    def _warn(self, message: StepOutputs) -> None:
        info, stats = self._client.info, message.stats
        fields = {
            "preempted": self._unsaid,
            "preemption_mode": "recompute",
            "total_cumulative_preemption_cnt": self.total,
            "running": stats.num_running,
            "kv_blocks": stats.num_blocks,
        }
        share = self._client.config.gpu_memory_utilization
        more = f"--kv-cache-memory-bytes (now {info.memory.get('kv_cache', 0)})"
        if info.device != "cpu":
            more = f"--gpu-memory-utilization (now {share}) or {more}{self._ranks()}"
        logger.warning(
            "%d preempted, to be computed again (mode RECOMPUTE): the KV cache of %d blocks is full with %d running. "
            "Raise %s, or lower --max-num-seqs (now %d) to about %d, or --max-num-batched-tokens (now %d); "
            "total_cumulative_preemption_cnt=%d",
            self._unsaid, stats.num_blocks, stats.num_running, more, info.max_num_seqs // len(self._client.engines),
            max(1, stats.num_running), info.max_num_batched_tokens, self.total, extra={"fields": fields},
        )  # fmt: skip
