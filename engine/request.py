"""What a request asks for, and what the engine knows of it while it lives."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, in token ids only: strings and defaults were resolved before the engine sees this."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None = the engine draws one
    logit_bias: dict[int, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = off, 0 = of the sampled token, k = and of the k most likely

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Status(enum.IntEnum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """One sequence of tokens. A step gives it some tokens so that `num_computed_tokens` catches up with `target`."""

    __slots__ = (
        "arrival",
        "block_hashes",
        "cache_salt",
        "finish_reason",
        "first_scheduled",
        "id",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_steps",
        "num_in_flight_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "row",
        "sampling",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival: float = 0.0,
    ) -> None:
        self.id = id
        self.token_ids = list(prompt)  # the prompt, then every output whose value has reached the host
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.first_scheduled: float | None = None  # time.monotonic()
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None  # the stop token id; None for EOS
        self.row: int | None = None  # of the device tables, for as long as it runs
        self.block_hashes: list[bytes] = []  # of its full blocks, chained
        self.num_computed_tokens = 0  # advanced when a step is scheduled, not when its result arrives
        self.num_in_flight_tokens = 0  # sampled on the device, value not yet on the host
        self.num_in_flight_steps = 0  # scheduled steps that contain it and have not returned
        self.num_cached_tokens: int | None = None  # prefix hit of its first admission
        self.num_preemptions = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def target(self) -> int:
        """Tokens that exist, counting those whose value is still on the device."""
        return len(self.token_ids) + self.num_in_flight_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.status.name}, tokens={self.num_tokens}+{self.num_in_flight_tokens}, "
            f"computed={self.num_computed_tokens})"
        )
