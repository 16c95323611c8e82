"""Who may queue: a bounded number of requests and tokens. Whoever finds the queue full hears when to come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from ...engine.link.messages import EngineInfo
from ..client.board import FINISHED_REQUESTS, FINISHED_TOKENS, REQUESTS, TOKENS, Board
from ..client.client import Client
from ..errors import ApiError, bad_request, took_too_long
from ..options.config import ServerConfig
from .generation import Generation
from .tenants import Tenants

QUEUE_FACTOR = 4  # default limits: so many times what runs at once
RESERVE = 4  # beyond a limit, this part of it again is for tenants that hold less than an equal share
WINDOW = 30.0  # seconds that the drain rate looks back
UNKNOWN_WAIT = 5.0  # seconds to advise while nothing has finished yet
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 60.0
CHARACTERS_PER_TOKEN = 4  # a guess until the text is tokenised


def guess_tokens(num_bytes: int, num_prompts: int, info: EngineInfo) -> int:
    """Of a body, before it is tokenised. A prompt beyond the context is refused once it is: it keeps nobody out."""
    return min(num_bytes // CHARACTERS_PER_TOKEN, num_prompts * info.max_model_len)


class DrainRate:
    """What finishes a second, averaged over a window in which old events fade. Time without requests does not count."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._observed = 0.0  # seconds
        self._last = 0.0

    def begin(self, now: float) -> None:
        """The first request after an idle time."""
        self._last = now

    def add(self, amount: float, now: float) -> None:
        self._advance(now)
        self._weight += amount

    def per_second(self, now: float) -> float:
        """0 while nothing is known."""
        self._advance(now)
        if not self._weight or not self._observed:
            return 0.0
        return self._weight / (WINDOW * -math.expm1(-self._observed / WINDOW))

    def seconds_for(self, amount: float, now: float) -> float:
        """Until so much has finished; bounded, for whoever is told to wait."""
        rate = self.per_second(now)
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, amount / rate)) if rate else UNKNOWN_WAIT

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self._last)
        self._last = now
        self._observed += elapsed
        self._weight *= math.exp(-elapsed / WINDOW)


class Admission:
    """Counts what has been let in and is not finished. All of it happens in the event loop's thread."""

    def __init__(
        self, client: Client, config: ServerConfig, rejected: Callable[[str], None], timed_out: Callable[[str], None],
        board: Board | None = None,
    ) -> None:  # fmt: skip
        """`board`: of several API processes, whose limits hold for all of them together."""
        self.num_requests = 0  # open ones, choices counted one by one
        self.num_tokens = 0  # of their prompts
        self.tenants = Tenants(board)
        self._board = board
        self.client = client
        self.timed_out = timed_out
        self.request_timeout = config.request_timeout
        self.queue_timeout = config.queue_timeout
        self._max_requests = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._rejected = rejected
        self._request_rate = DrainRate()
        self._token_rate = DrainRate()
        if board is not None:
            self._seen = self._finished()
            board.watch_looks(self)

    @property
    def most_requests(self) -> int | None:
        """So many run and wait at once, choices counted one by one; None: no limit."""
        limit = self._request_limit
        return self.client.info.max_num_seqs + limit if limit else None

    @property
    def most_tokens(self) -> int | None:
        """Prompt tokens that run and wait at once; None: no limit."""
        limit = self._token_limit
        return self.capacity + limit if limit else None

    def admit(
        self, num_requests: int, num_tokens: int, arrival: float, begun: float | None = None, *, param: str = "n",
        tenant: int = 0,
    ) -> Ticket:  # fmt: skip
        """Counts a request in, until its ticket is released. `num_tokens` may be a guess, see Ticket.settle. `begun`:
        when its head had arrived, where that was earlier: its body may have taken a while. `tenant`: whose it is.

        Raises ApiError: 400, naming `param`, for more than could be let in at any time, 429 when the queue is full.
        """
        if (most := self.most_requests) is not None and num_requests > most:
            raise bad_request(
                f"The request asks for {num_requests} answers (prompts times n); this server runs "
                f"{self.client.info.max_num_seqs} at once and lets {self._request_limit} wait: at most {most}. Ask for "
                "fewer at a time, or raise --max-num-queued-reqs or --max-num-seqs.",
                param,
            )
        now = time.monotonic()
        if self.num_requests or self._others(REQUESTS):
            self._check(tenant, num_requests, num_tokens, now)
        else:
            self._begin(now)
        self.count(tenant, num_requests, num_tokens)
        return Ticket(self, tenant, num_requests, num_tokens, arrival, arrival if begun is None else begun)

    def _begin(self, now: float) -> None:
        self._request_rate.begin(now)
        self._token_rate.begin(now)

    def look(self, now: float) -> None:
        """What all API processes together have finished since the last look: that is how fast the queue moves."""
        requests, tokens = self._finished()
        if not self.num_requests and not self._others(REQUESTS) and requests == self._seen[0]:
            self._begin(now)
        self._request_rate.add(requests - self._seen[0], now)
        self._token_rate.add(tokens - self._seen[1], now)
        self._seen = requests, tokens

    def _finished(self) -> tuple[int, int]:
        assert self._board is not None
        return self._board.all(FINISHED_REQUESTS), self._board.all(FINISHED_TOKENS)

    def _check(self, tenant: int, num_requests: int, num_tokens: int, now: float) -> None:
        info, stats = self.client.info, self.client.stats
        open_requests, open_tokens = self.num_requests + self._others(REQUESTS), self.num_tokens + self._others(TOKENS)
        # The engine's word is a step old, and a burst may come in between: what has been let in bounds it.
        limit = self._request_limit
        queued = max(open_requests - info.max_num_seqs, min(stats.num_waiting, open_requests))
        over = max(open_requests + num_requests - info.max_num_seqs, queued and queued + num_requests) - limit
        if limit and over > 0:
            held, _ = self.tenants.held(tenant)
            if not self._has_share(tenant, held + num_requests, info.max_num_seqs + limit, over, limit):
                wait = self._request_rate.seconds_for(over, now)
                raise self._full("requests", "--max-num-queued-reqs", queued, num_requests, limit, held, wait)
        capacity, limit = self.capacity, self._token_limit
        over = open_tokens + num_tokens - capacity - limit
        if limit and over > 0:
            _, held = self.tenants.held(tenant)
            if not self._has_share(tenant, held + num_tokens, capacity + limit, over, limit):
                queued = max(0, open_tokens - capacity)
                wait = self._token_rate.seconds_for(over, now)
                raise self._full("tokens", "--max-num-queued-tokens", queued, num_tokens, limit, held, wait)

    def _has_share(self, tenant: int, held: int, most: int, over: int, limit: int) -> bool:
        """Whether a tenant that would then hold so much of `most` is let in beside others though the queue is full:
        one of them cannot fill it for all."""
        if over > max(1, limit // RESERVE):
            return False
        number = self.tenants.number_with(tenant)
        return number > 1 and held <= max(1, most // number)

    def count(self, tenant: int, num_requests: int, num_tokens: int) -> None:
        self.tenants.count(tenant, num_requests, num_tokens)
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        if self._board is not None:
            self._board.set(REQUESTS, self.num_requests)
            self._board.set(TOKENS, self.num_tokens)

    def _others(self, field: int) -> int:
        """What the other API processes have let in."""
        return 0 if self._board is None else self._board.others(field)

    @property
    def _request_limit(self) -> int:
        """That may wait; 0: no limit."""
        return QUEUE_FACTOR * self.client.info.max_num_seqs if self._max_requests is None else self._max_requests

    @property
    def _token_limit(self) -> int:
        """Of prompt tokens that may wait; 0: no limit."""
        return QUEUE_FACTOR * self.capacity if self._max_tokens is None else self._max_tokens

    @property
    def capacity(self) -> int:
        """Tokens that run at once, of requests as long as the context: where layers have windows, of short ones fewer
        do."""
        return self.client.info.num_kv_tokens

    def _full(self, what: str, option: str, queued: int, new: int, limit: int, held: int, wait: float) -> ApiError:
        self._rejected(f"queued_{what}")
        return ApiError(
            429,
            f"The queue is full: {queued} {what} wait, this request brings {new}, and {option} allows {limit}; this "
            f"key or address has {held} {what} open; try again in {math.ceil(wait)} s.",
            type="rate_limit_error",
            code="queue_full",
            headers=retry_after(wait),
        )

    def release(self, tenant: int, num_requests: int, num_tokens: int) -> None:
        now = time.monotonic()
        self.count(tenant, -num_requests, -num_tokens)
        if self._board is None:
            self._request_rate.add(num_requests, now)
            self._token_rate.add(num_tokens, now)
        else:
            self._board.add(FINISHED_REQUESTS, num_requests)
            self._board.add(FINISHED_TOKENS, num_tokens)
            self.look(now)

    def seconds_for(self, num_requests: int) -> float:
        """Until about so many have finished."""
        return self._request_rate.seconds_for(num_requests, time.monotonic())

    def retry_after(self) -> float:
        """Seconds until about everything that is open now has finished."""
        return self.seconds_for(self.num_requests + self._others(REQUESTS))


class Ticket:
    """A request that was let in, and its clocks. Release it when it is over, however it ends."""

    def __init__(
        self, admission: Admission, tenant: int, num_requests: int, num_tokens: int, arrival: float, begun: float
    ) -> None:
        self._admission = admission
        self.tenant = tenant
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._arrival = arrival  # time.monotonic()
        self._begun = begun
        self.on_release: Callable[[], None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._counted = False

    def settle(self, num_tokens: int, *, param: str = "prompt") -> None:
        """The number of prompt tokens, now that it is known. Raises ApiError (400), naming `param`, for more than could
        be let in at any time: everybody else would be turned away for as long as they are read.
        """
        if (most := self._admission.most_tokens) is not None and num_tokens > most:
            raise bad_request(
                f"The prompts have {num_tokens} tokens together; this server lets {most} run and wait at once. Send "
                "fewer prompts at a time, or raise --max-num-queued-tokens.",
                param,
            )
        self._admission.count(self.tenant, 0, num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def watch(self, generation: Generation) -> None:
        """Starts the clocks that the server was told to run."""
        late = (
            (self._admission.request_timeout, self._begun, self._too_long),
            (self._admission.queue_timeout, self._arrival, self._not_begun),
        )
        for limit, since, action in late:
            if limit:
                left = max(0.0, since + limit - time.monotonic())
                self._timers.append(asyncio.get_running_loop().call_later(left, action, generation))

    def release(self) -> None:
        """Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._num_requests:
            self._admission.release(self.tenant, self._num_requests, self._num_tokens)
            self._num_requests = 0
            if self.on_release is not None:
                self.on_release()

    def _too_long(self, generation: Generation) -> None:
        error = took_too_long(self._admission.request_timeout)
        self._admission.timed_out("request")
        generation.abort_reason, generation.ended = "timeout", error
        mailboxes = generation.awaited
        self._admission.client.abort(mailboxes)  # a slow reader may be long in hearing of it
        for mailbox in mailboxes:
            mailbox.fail(error)

    def _not_begun(self, generation: Generation) -> None:
        """Only the engine knows whether it has begun: it ends the request, or leaves it alone."""
        if any(choice.first_token is not None for choice in generation.choices):
            return
        generation.on_abort = self._expired
        self._admission.client.expire([choice.mailbox for choice in generation.choices])

    def _expired(self) -> ApiError:
        if not self._counted:  # each choice hears of it
            self._admission.timed_out("queue")
            self._counted = True
        limit = self._admission.queue_timeout
        return ApiError(
            503, f"The request waited longer than --queue-timeout, {limit:g} s.", type="service_unavailable_error",
            code="queue_timeout", headers=retry_after(self._admission.retry_after()),
        )  # fmt: skip


def retry_after(seconds: float) -> dict[str, str]:
    """Headers: whole seconds for everybody, milliseconds for the OpenAI SDKs."""
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
