"""The servers behind the router: who takes requests, what each serves, and which of them gets the next one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import httpx

from ..client.routing import Load, Router
from ..http.request_id import TAG_LENGTH, tag_of
from .asked import Asked

logger = logging.getLogger(__name__)

MISSES = 2  # questions without an answer until a server counts as lost, with all that it has not begun to answer
MODELS_EVERY = 10  # looks at a server's health for one at its models
MAX_IDS = 65_536


class Backend:
    def __init__(self, url: str) -> None:
        self.url = url
        # Behind each router the same, as long as it calls the server the same.
        self.tag = hashlib.sha256(url.encode()).hexdigest()[:TAG_LENGTH]
        self.takes = False  # it has said that it takes requests
        self.lost = asyncio.Event()  # it says nothing any more
        self.models: dict[str, Any] | None = None  # by name, their cards; None: it has not told
        self.keeps_models = False  # it refuses to tell, and that was said
        self.num_open = 0
        self.waiting_tokens = 0  # of prompts that it has not begun to answer

    @contextlib.contextmanager
    def waiting(self, num_tokens: int) -> Iterator[None]:
        self.waiting_tokens += num_tokens
        try:
            yield
        finally:
            self.waiting_tokens -= num_tokens

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models

    def max_model_len(self, model: str | None) -> float:
        """Tokens; infinite where it has not told."""
        cards = self.models or {}
        card = cards.get(model) if model in cards else next(iter(cards.values()), None)
        length = card.get("max_model_len") if isinstance(card, dict) else None
        return length if isinstance(length, int) else math.inf


class Backends:
    """Asks each of them again and again. Requests that fail tell of a death earlier than that."""

    def __init__(
        self, urls: Iterable[str], http: httpx.AsyncClient, *, api_key: str | None, interval: float, cache_tokens: int
    ) -> None:
        """`interval`: seconds between two questions; `cache_tokens`: what one server's prefix cache holds, about."""
        self.each = [Backend(url) for url in urls]
        self._http = http
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._interval = interval
        self._router = Router(len(self.each), cache_tokens)
        self._tagged = {backend.tag: backend for backend in self.each}
        self._owners: OrderedDict[str, Backend] = OrderedDict()  # who has made what has this id, which has no tag

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for backend in self.each:
                group.create_task(self._watch(backend))

    @property
    def serving(self) -> list[Backend]:
        return [backend for backend in self.each if backend.takes]

    def choose(self, asked: Asked, tried: Collection[Backend] = ()) -> tuple[Backend, int] | None:
        """→ (who gets it, tokens of its prompt that are probably to be computed). None where nobody is left to try."""
        left = [backend for backend in self.each if backend.takes and backend not in tried]
        if asked.longer_than is not None:
            left = [one for one in left if one.max_model_len(asked.model) > asked.longer_than]
        if not left:
            return None
        for id in asked.ids:
            if (owner := self._owner(id)) in left:
                assert owner is not None
                return owner, asked.num_tokens
        fit = self._roomy([one for one in left if one.serves(asked.model)] or left, asked)  # who lacks it says so
        loads = [Load(backend.waiting_tokens, backend.num_open) if backend in fit else None for backend in self.each]
        index, num_cached = self._router.choose(asked.keys, asked.num_tokens, loads, asked.session)
        return self.each[index], asked.num_tokens - num_cached

    def _roomy(self, backends: list[Backend], asked: Asked) -> list[Backend]:
        """Those whose context it fits in, or the longest."""
        lengths = [backend.max_model_len(asked.model) for backend in backends]
        least = max(lengths) if asked.longer_than is not None else min(asked.num_tokens, max(lengths))
        return [backend for backend, length in zip(backends, lengths, strict=True) if length >= least]

    def all_have(self, model: str | None) -> bool:
        """Whether all that take requests have said so. What they said may be old: an adapter comes at any time."""
        return model is None or all(backend.models is not None and model in backend.models for backend in self.serving)

    def _owner(self, id: str) -> Backend | None:
        return self._owners.get(id) or self._tagged.get(tag_of(id))

    def note(self, id: str, backend: Backend) -> None:
        """`backend` has made what has this id."""
        if self._tagged.get(tag_of(id)) is backend:
            return
        self._owners[id] = backend
        self._owners.move_to_end(id)
        if len(self._owners) > MAX_IDS:
            self._owners.popitem(last=False)

    def failed(self, backend: Backend) -> None:
        """It could not be reached: until it has answered a question again, it gets nothing."""
        if backend.takes:
            logger.warning("%s cannot be reached; it is asked again every %g s", backend.url, self._interval)
        backend.takes = False

    # ---- questions ----

    async def _watch(self, backend: Backend) -> None:
        misses = count = 0
        while True:
            try:
                answer = await self._http.get(f"{backend.url}/health", headers=self._headers, timeout=self._patience)
                if answer.status_code == 200 and (backend.models is None or count % MODELS_EVERY == 0):
                    await self._ask_models(backend)
            except Exception as error:  # of whatever kind: nobody else asks
                misses += 1
                if misses == 1 and not isinstance(error, httpx.HTTPError):
                    logger.exception("asking %s failed", backend.url)
                if misses == MISSES:
                    self._lose(backend, error)
            else:
                misses = 0
                self._heard(backend, answer.status_code == 200)
                count += 1
            await asyncio.sleep(self._interval)

    @property
    def _patience(self) -> float:
        return max(1.0, self._interval)

    def _heard(self, backend: Backend, takes: bool) -> None:
        backend.lost.clear()
        if takes != backend.takes:
            logger.info("%s %s", backend.url, "takes requests" if takes else "takes no requests now")
        backend.takes = takes

    def _lose(self, backend: Backend, error: Exception) -> None:
        if backend.takes:
            logger.warning("%s says nothing (%s)", backend.url, str(error) or type(error).__name__)
        backend.takes = False
        backend.lost.set()
        self._router.forget(self.each.index(backend))
        backend.models = None  # who comes back may be another

    async def _ask_models(self, backend: Backend) -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError, TypeError, KeyError, RecursionError):
            answer = await self._http.get(f"{backend.url}/v1/models", headers=self._headers, timeout=self._patience)
            if answer.status_code == 200:
                backend.models = {card["id"]: card for card in answer.json()["data"]}
            elif answer.status_code in (401, 403) and not backend.keeps_models:
                backend.keeps_models = True
                logger.warning(
                    "%s does not say which models it has (status %d for /v1/models), so that it is asked for any of "
                    "them: give --server-api-key a key that it takes", backend.url, answer.status_code,
                )  # fmt: skip
