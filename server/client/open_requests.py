"""What one engine has been asked for and has not finished: the mailboxes, and what can be sent elsewhere as well."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec

from ...engine.link.media import MediaItem
from ...engine.link.messages import AbortRequests, AddRequest, StepOutputs, ToEngine
from ...engine.link.sampling_params import SamplingParams
from .mailbox import EngineDeadError, Mailbox


class OpenRequests:
    def __init__(self, send: Callable[[ToEngine], None], first_id: int = 0) -> None:
        """`send` raises EngineDeadError where nobody takes it. Ids are counted from `first_id` on."""
        self.waiting_tokens = 0  # of prompts that the engine has said nothing of
        self._send = send
        self._last_id = first_id
        self._mailboxes: dict[int, Mailbox] = {}

    def __len__(self) -> int:
        return len(self._mailboxes)

    def new_ids(self, count: int = 1) -> range:
        first = self._last_id + 1
        self._last_id += count
        return range(first, first + count)

    def submit_packed(
        self,
        n: int,
        prompt: bytes,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: int = 0,
        num_cached: int = 0,
        media: tuple[MediaItem, ...] = (),
    ) -> list[Mailbox]:
        """As Client.submit_choices, of a prompt that is packed, and of which so many tokens are probably cached."""
        ids, now = self.new_ids(n), time.monotonic()
        request = AddRequest(ids.start, prompt, sampling, priority, cache_salt, now, n, tenant, media)
        self._send(request)
        mailboxes = {id: Mailbox(id, now, request, self) for id in ids}
        self._mailboxes |= mailboxes
        self._count_in(mailboxes[ids.start], num_cached)  # the others find it in the cache
        return list(mailboxes.values())

    def adopt(self, mailbox: Mailbox) -> None:
        """Sends the request of a mailbox that another engine gave up once more. Raises EngineDeadError when there is
        nobody."""
        sent = mailbox.request
        assert sent is not None, "who has begun to answer cannot begin again"
        (id,) = self.new_ids()
        sampling = sent.sampling.of_choice(mailbox.id - sent.id)
        request = msgspec.structs.replace(sent, id=id, sampling=sampling, n=1)
        self._send(request)
        mailbox.id, mailbox.request, mailbox.owner = id, request, self
        mailbox.rescued = True
        self._mailboxes[id] = mailbox
        self._count_in(mailbox, 0)
        if mailbox.expired:  # its engine may have gone before it read that
            self._send(AbortRequests([id], unless_begun=True))

    def abort(self, mailboxes: Iterable[Mailbox]) -> None:
        """Idempotent; what has finished is left alone. Nothing more arrives in these mailboxes."""
        ids = []
        for mailbox in mailboxes:
            if mailbox.owner is self and self._mailboxes.pop(mailbox.id, None) is not None:
                ids.append(mailbox.id)
                self._count_out(mailbox)
        self._send_abort(ids)

    def expire(self, mailboxes: Iterable[Mailbox]) -> None:
        """Ends them with the finish reason "abort", unless the engine has begun with one of them."""
        ids = []
        for mailbox in mailboxes:
            if mailbox.owner is self:
                ids.append(mailbox.id)
                mailbox.expired = True
        self._send_abort(ids, unless_begun=True)

    def fail_all(self, error: EngineDeadError) -> None:
        """Ends every open request with `error`, at once."""
        mailboxes, self._mailboxes = self._mailboxes, {}
        self._send_abort(list(mailboxes))
        for mailbox in mailboxes.values():
            self._count_out(mailbox)
            mailbox.fail(error)

    def hand_over(self, take: Callable[[list[Mailbox]], list[Mailbox]]) -> None:
        """Gives `take` those that the engine has said nothing of; those that it returns stay. Only once each: a request
        that takes its engine down must not take down one after the other."""
        unheard = [box for box in self._mailboxes.values() if box.request is not None and not box.rescued]
        for mailbox in unheard:
            del self._mailboxes[mailbox.id]
            self.waiting_tokens -= mailbox.waiting_tokens
            mailbox.waiting_tokens = 0
        self._send_abort([mailbox.id for mailbox in unheard])
        self._mailboxes |= {mailbox.id: mailbox for mailbox in take(unheard)}

    def receive(self, message: StepOutputs) -> None:
        for id in message.preempted:
            if id in self._mailboxes:
                self._mailboxes[id].num_preemptions += 1
        for output in message.outputs:
            mailbox = self._mailboxes.get(output.id)
            if mailbox is None:
                continue  # aborted by us: the engine had not read it yet
            if mailbox.request is not None:
                self._count_out(mailbox)
            mailbox.put(output)
            if mailbox.finished:
                del self._mailboxes[output.id]

    def _send_abort(self, ids: list[int], unless_begun: bool = False) -> None:
        if ids:
            with contextlib.suppress(EngineDeadError):  # then it has nothing to abort
                self._send(AbortRequests(ids, unless_begun=unless_begun))

    def _count_in(self, mailbox: Mailbox, num_cached: int) -> None:
        assert mailbox.request is not None
        mailbox.waiting_tokens = max(1, len(mailbox.request.prompt) // 4 - num_cached)
        self.waiting_tokens += mailbox.waiting_tokens

    def _count_out(self, mailbox: Mailbox) -> None:
        """Its engine has begun with it, or never will."""
        self.waiting_tokens -= mailbox.waiting_tokens
        mailbox.request, mailbox.waiting_tokens = None, 0
