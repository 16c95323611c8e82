"""What its ranks are together: the limits of requests, the scheduler's configuration, and the executor of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..adapters.layout import AdapterStore
from ..describe.divide import more_cards
from ..describe.model_config import ModelConfig
from ..link.messages import Progress
from ..options.config import EngineConfig
from ..ranks.executor import RanksExecutor
from ..ranks.hang import StepLimit, stepping
from ..ranks.messages import Seat
from ..ranks.peers import Peers
from ..step.executor import Executor, ThreadExecutor
from ..step.runner import ModelRunner
from .rank import ALONE, Rank


class Engine:
    """Ready to step, in the process of rank 0."""

    def __init__(
        self, config: EngineConfig, report: Callable[[Progress], None],
        before_memory: Callable[[], None] = lambda: None, seat: Seat = ALONE,
    ) -> None:  # fmt: skip
        """`before_memory`: see Rank."""
        self.rank = rank = Rank(config, report, before_memory, seat)
        self.settings = settings = rank.settings
        fields = {
            "experts": rank.experts,
            "sees_pictures": settings.encoder_cache_tokens > 0,
            **served(rank.model.config),
        }
        if rank.runner.device.type == "cuda" and config.fits_cache:
            more = more_cards(rank.model.config, config, settings.plan.weights, settings.plan.cache)
            fields["more_cards"] = (more.option, more.size, more.times)
        self.info = settings.info(rank.seconds, rank.quantization, **fields)

    @property
    def adapter_store(self) -> AdapterStore | None:
        """Of the host's memory; None where no adapter is served."""
        tables = getattr(self.rank.runner, "adapters", None)  # an encoder's has none
        return None if tables is None else tables.store

    def executor(self, peers: Peers) -> Executor:
        mine = ThreadExecutor(self.rank.runner, num_threads=self.rank.num_threads)
        if not len(peers):
            return mine
        assert isinstance(self.rank.runner, ModelRunner), "encoders are not divided"
        effort, stages = stepping(self.rank.runner, mine.thread), self.rank.stage.count > 1
        limit = StepLimit(self.rank.longest_step, self.rank.settings.max_num_batched_tokens)
        return RanksExecutor(mine, peers, effort, limit, stages)


def served(model: ModelConfig) -> dict[str, Any]:
    """What requests may ask for, and what its head makes of it: fields of EngineInfo."""
    head = model.head
    if head is None or head.task == "embed":
        tasks = ("generate", "embed") if model.generates else ("embed",)
        width = model.hidden_size if head is None else head.width
        return {"tasks": tasks, "hidden_size": width, "reads_both_ways": not model.causal}
    return {
        "tasks": (head.task,), "labels": head.labels, "activation": head.activation, "by_token": head.by_token,
        "steps": head.steps, "reranks": head.reranks, "reads_both_ways": not model.causal,
    }  # fmt: skip
