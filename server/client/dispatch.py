"""Which of several engines gets a request, now and when the one that had it dies."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from ...engine.link.sampling_params import SamplingParams
from .engine_client import EngineClient
from .grammar_news import GrammarNews
from .mailbox import EngineDeadError, Mailbox
from .routing import ANYWHERE, Load, Route, Router, prefix_keys

if TYPE_CHECKING:
    from .board import Board

logger = logging.getLogger(__name__)


def cached_apart(salt: str | None, sampling: SamplingParams) -> str | None:
    """What tells prefixes apart that have the same tokens: salts, and adapters."""
    return f"{sampling.adapter} {salt or ''}" if sampling.adapter else salt


class Dispatch:
    def __init__(self, engines: Sequence[EngineClient], leaving: Set[EngineClient], board: Board | None) -> None:
        """`engines` and `leaving`, those of them that get no requests, are as they are whenever it is asked; `board`:
        of several API processes, whose requests are at these engines too."""
        self.router: Router | None = None  # once all of them have been ready
        self.news: defaultdict[EngineClient, GrammarNews] = defaultdict(GrammarNews)  # what each knows
        self._engines, self._leaving = engines, leaving
        self._board = board

    @property
    def down(self) -> str | None:
        """Why none of them serves."""
        if any(engine.ready for engine in self._engines):
            return None
        return next((engine.down for engine in self._engines if engine.down), None)

    def choose(self, prompt: bytes, salt: str | None, route: Route, grammar: str | None = None) -> tuple[int, int]:
        """→ (engine, tokens that it probably has cached). `grammar`: one that it must know already. Raises
        EngineDeadError where there is none."""
        router = self.router
        if router is None or not any(engine.ready for engine in self._engines):
            raise EngineDeadError(self.down or "the engines are not ready")
        if route.engine is not None:
            engine = self._engines[route.engine] if route.engine < len(self._engines) else None
            if engine is None or engine in self._leaving:
                raise EngineDeadError(f"engine {route.engine}, which was asked for, is being added or removed")
            if not engine.ready:
                raise EngineDeadError(f"engine {route.engine}, which was asked for, is down: {engine.down}")
        fit = [
            engine.ready
            and engine not in self._leaving
            and route.engine in (None, index)
            and (grammar is None or self.news[engine].knows(engine.epoch, grammar))
            for index, engine in enumerate(self._engines)
        ]
        if not any(fit):
            raise EngineDeadError("no engine that serves can take this request")
        awake = [fits and engine.stalled is None for engine, fits in zip(self._engines, fit, strict=True)]
        # Where all that serve are stalled, one that may go on is better than none.
        fit = awake if any(awake) else fit
        loads = [self._load(index) if fits else None for index, fits in enumerate(fit)]
        if len(self._engines) == 1:
            return 0, 0
        return router.choose(prefix_keys(prompt, salt), len(prompt) // 4, loads, route.session, route.together)

    def _load(self, index: int) -> Load:
        """With what other API processes have there."""
        engine = self._engines[index]
        if self._board is None:
            return Load(engine.waiting_tokens, engine.num_open)
        waiting_tokens, num_open = self._board.other_load(index)
        return Load(engine.waiting_tokens + waiting_tokens, engine.num_open + num_open)

    def publish_load(self, index: int) -> None:
        if self._board is not None and index < len(self._engines):  # it may just have been removed
            engine = self._engines[index]
            self._board.set_load(index, engine.waiting_tokens, engine.num_open)

    def rescuer(self, index: int) -> Callable[[list[Mailbox]], list[Mailbox]]:
        """For EngineClient.rescue of this engine."""

        def rescue(mailboxes: list[Mailbox]) -> list[Mailbox]:
            if self.router is not None:
                self.router.forget(index)
            left = []
            for mailbox in mailboxes:
                sent = mailbox.request
                assert sent is not None
                try:
                    apart = cached_apart(sent.cache_salt, sent.sampling)
                    chosen, _ = self.choose(sent.prompt, apart, ANYWHERE, sent.sampling.grammar)
                    self._engines[chosen].adopt(mailbox)
                except EngineDeadError:
                    left.append(mailbox)
            if len(left) < len(mailboxes):
                logger.warning(
                    "engine %d: %d of %d requests without a token go on elsewhere",
                    index, len(mailboxes) - len(left), len(mailboxes),
                )  # fmt: skip
            return left

        return rescue
