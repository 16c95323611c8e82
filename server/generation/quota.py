"""How much one key may ask for in a minute: requests, and tokens of prompts and answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..errors import ApiError
from .admission import retry_after
from .generation import Generation


class Bucket:
    """So much a minute, which flows in evenly; a minute's worth at most waits there. What was known too late to refuse
    is taken all the same, and then the bucket lacks it."""

    def __init__(self, per_minute: int) -> None:
        """`per_minute`: 0: no limit."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._last = time.monotonic()

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there, or the bucket full where it is more than that holds."""
        if not self.per_minute:
            return 0.0
        now = time.monotonic()
        self._level = min(self.per_minute, self._level + (now - self._last) * self.per_minute / 60)
        self._last = now
        return max(0.0, (min(amount, self.per_minute) - self._level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Quota:
    """Of one key."""

    def __init__(self, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._requests = Bucket(requests_per_minute)
        self._tokens = Bucket(tokens_per_minute)

    @property
    def limits(self) -> tuple[int, int]:
        """Requests and tokens a minute; 0: no limit."""
        return self._requests.per_minute, self._tokens.per_minute

    def check(self, num_tokens: int, rejected: Callable[[str], None]) -> None:
        """Whether one request more, with so many tokens in its prompts, may come. Raises ApiError (429), which
        `rejected` counts."""
        needed = (("requests", self._requests, 1), ("tokens", self._tokens, num_tokens))
        for what, bucket, amount in needed:
            if (wait := bucket.wait(amount)) > 0:
                rejected(f"key_{what}")
                raise ApiError(
                    429,
                    f"This key may use {bucket.per_minute} {what} a minute; try again in {math.ceil(wait)} s.",
                    type="rate_limit_error",
                    code=f"key_{what}_per_minute",
                    headers=retry_after(wait),
                )

    def begin(self, num_tokens: int) -> Charge:
        self._requests.take(1)
        return Charge(self._tokens, num_tokens)


class Charge:
    """The tokens that one request takes: a guess, then those of its prompts, and at its end those of its answers."""

    def __init__(self, tokens: Bucket, num_tokens: int) -> None:
        self.generation: Generation | None = None  # once there is one
        self._tokens = tokens
        self._num_tokens = 0
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def finish(self) -> None:
        """Who never came so far as to the engine pays for the request alone. Idempotent."""
        self.settle(0 if self.generation is None else self.generation.usage()["total_tokens"])
