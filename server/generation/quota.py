"""How much one key may ask for: requests, and tokens of prompts and answers, in a minute; and requests at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from ...engine.errors import ConfigError
from ..client.board import MOST_KEYS, Board
from ..errors import ApiError, bad_request
from .admission import retry_after
from .generation import Generation

logger = logging.getLogger(__name__)

LOOK_UP = 1.0  # seconds between two looks at what the other API processes take


async def watch(board: Board) -> None:
    """Until it is cancelled. A bucket that looked only when its process is asked would not know when the others took
    what they took: before it was full, or after."""
    while True:
        board.look(time.monotonic())
        await asyncio.sleep(LOOK_UP)


class Shared:
    """What all API processes have taken of one bucket."""

    def __init__(self, board: Board, place: int, kind: int) -> None:
        self._board, self._place, self._kind = board, place, kind

    def used(self) -> float:
        return self._board.used(self._place, self._kind)

    @property
    def looked(self) -> float:
        """When the board was looked at: until then nothing was used that the bucket does not know."""
        return self._board.looked

    def use(self, amount: float) -> None:
        self._board.use(self._place, self._kind, amount)

    def note(self, per_minute: int, level: float) -> None:
        self._board.note_level(self._place, self._kind, per_minute, level)

    def noted(self, per_minute: int) -> float | None:
        return self._board.noted_level(self._place, self._kind, per_minute)


class Bucket:
    """So much a minute, which flows in evenly; a minute's worth at most waits there. What was known too late to refuse
    is taken all the same, and then the bucket lacks it.

    Until a bucket is full, its level is what flows in less what is used, plus a constant: the level at time 0. That is
    one number, which stays true whatever the others use, and falls when a full bucket flows over. So it is what
    processes note for each other: one that takes the place of another goes on where that has stopped.
    """

    def __init__(self, per_minute: int, shared: Shared | None = None) -> None:
        """`per_minute`: 0: no limit. `shared`: with other processes."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._last = time.monotonic()
        self._shared = shared
        self._seen = 0.0  # by all processes, that the level lacks already
        if shared is not None:
            known = shared.noted(per_minute)
            self._seen = shared.used()
            if known is not None:
                self._level = min(self._level, known + self._flown(self._last) - self._seen)

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there, or the bucket full where it is more than that holds."""
        if not self.per_minute:
            return 0.0
        self.look(time.monotonic())
        return max(0.0, (min(amount, self.per_minute) - self._level) * 60 / self.per_minute)

    def look(self, now: float) -> None:
        """What has flown in since the last look, less what was used meanwhile: what a full bucket lost is neither."""
        if self._shared is not None:
            self._flow(max(self._last, min(now, self._shared.looked)), 0.0)
            used = self._shared.used()
            self._flow(now, used - self._seen)
            self._seen = used
            self._shared.note(self.per_minute, self._level - self._flown(now) + used)
        else:
            self._flow(now, 0.0)

    def _flow(self, until: float, used: float) -> None:
        self._level = min(self.per_minute, self._level + self._flown(until - self._last) - used)
        self._last = until

    def _flown(self, seconds: float) -> float:
        return seconds * self.per_minute / 60

    def take(self, amount: float) -> None:
        if self._shared is None:
            self._level -= amount
        else:  # the next look finds it there
            self._shared.use(amount)


class OpenRequests:
    """Of one key, choices counted one by one: of all API processes where they share a board."""

    def __init__(self, board: Board | None = None, place: int | None = None) -> None:
        self._board, self._place = board, place
        self._number = 0  # where there is no board

    @property
    def number(self) -> int:
        return self._number if self._board is None or self._place is None else self._board.open(self._place)

    def count(self, num_requests: int) -> None:
        if self._board is None or self._place is None:
            self._number += num_requests
        else:
            self._board.count_open(self._place, num_requests)


class Quota:
    """Of one key."""

    def __init__(
        self, requests_per_minute: int, tokens_per_minute: int, board: Board | None = None, digest: bytes = b"",
        max_open_requests: int = 0,
    ) -> None:  # fmt: skip
        """`board`: of several API processes, which share it; `digest`: of the key, by which they know it. Raises
        ConfigError where they know too many keys to share the limits of this one. Where the board cannot be asked
        now, this process counts for itself."""
        place, has_room = None, True
        if board is not None:
            try:  # what is open has a place without a limit, too: one may be set while it is open
                place = board.place(digest)
                has_room = place is not None
            except TimeoutError as error:
                logger.warning("this process counts for itself what a key uses, and not with the others: %s", error)
        if not has_room and (requests_per_minute or tokens_per_minute or max_open_requests):
            raise ConfigError(
                f"a key has limits that hold over all API processes, and these have no room for more than {MOST_KEYS} "
                "keys since the server's start: leave its limits out, or start the server again"
            )
        each: list[Shared | None] = [None, None]
        if board is not None and place is not None and (requests_per_minute or tokens_per_minute):
            each = [Shared(board, place, kind) for kind in (0, 1)]
            board.watch(place, self)
        self._requests = Bucket(requests_per_minute, each[0])
        self._tokens = Bucket(tokens_per_minute, each[1])
        self.max_open_requests = max_open_requests
        self.open = OpenRequests(board, place)

    @property
    def limits(self) -> tuple[int, int, int]:
        """Requests and tokens a minute, and requests at once; 0: no limit."""
        return self._requests.per_minute, self._tokens.per_minute, self.max_open_requests

    def look(self, now: float) -> None:
        for bucket in (self._requests, self._tokens):
            bucket.look(now)

    def check_open(
        self, num_requests: int, param: str, seconds_for: Callable[[int], float], rejected: Callable[[str], None]
    ) -> None:
        """Whether so many may be open beside those that are. `seconds_for`: in which so many finish. Raises ApiError:
        400, naming `param`, for more than may be open at any time, 429, which `rejected` counts."""
        most = self.max_open_requests
        if not most:
            return
        if num_requests > most:
            raise bad_request(
                f"The request asks for {num_requests} answers (prompts times n), and this key may have {most} requests "
                "open at once, choices counted one by one (--max-open-requests): ask for fewer at a time.",
                param,
            )
        if (over := self.open.number + num_requests - most) > 0:
            rejected("key_open_requests")
            wait = seconds_for(over)
            raise ApiError(
                429,
                f"This key has {self.open.number} requests open, choices counted one by one, this request brings "
                f"{num_requests}, and --max-open-requests allows {most}; try again in {math.ceil(wait)} s.",
                type="rate_limit_error",
                code="key_open_requests",
                headers=retry_after(wait),
            )

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

    def begin(self, num_tokens: int, num_requests: int = 1) -> Charge:
        """`num_requests`: that are open until the charge is finished."""
        self._requests.take(1)
        self.open.count(num_requests)
        return Charge(self._tokens, num_tokens, self.open, num_requests)


class Charge:
    """The tokens that one request takes: a guess, then those of its prompts, and at its end those of its answers."""

    def __init__(self, tokens: Bucket, num_tokens: int, opened: OpenRequests, num_requests: int) -> None:
        self.generation: Generation | None = None  # once there is one
        self._tokens = tokens
        self._num_tokens = 0
        self._open, self._num_requests = opened, num_requests
        self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def finish(self) -> None:
        """Who never came so far as to the engine pays for the request alone. Idempotent."""
        self._open.count(-self._num_requests)
        self._num_requests = 0
        self.settle(0 if self.generation is None else self.generation.usage()["total_tokens"])
