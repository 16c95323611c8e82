"""Generations that nobody watches: what the engine fails on leaves the others alone."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from ...engine.link.messages import RequestOutput
from ..client.client import Client
from ..generation.choice import Choice, Delta, Prompt, TextOptions
from ..generation.generation import Generation, Observer
from ..text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """What all requests of one call have in common."""

    client: Client
    tokenizer: Tokenizer
    counts: Observer
    cache_salt: str | None  # what other salts have in the prefix cache is not hit


class PatientGeneration(Generation):
    """Of one prompt, by the id that its output has. A choice that fails has the finish reason "error", and the cause as
    its stop reason."""

    def __init__(self, call: Call, id: str, prompt: Prompt, text: TextOptions, n: int = 1, priority: int = 0) -> None:
        super().__init__(
            call.client, call.counts, call.tokenizer, [prompt], arrival=time.monotonic(), n=n, text=text,
            priority=priority, cache_salt=call.cache_salt,
        )  # fmt: skip
        self.id = id
        self.prompt = prompt

    def _failed(self, choice: Choice, output: RequestOutput) -> Delta:
        choice.stop_reason = output.error or "the engine aborted this request"
        logger.error("request %s failed: %s", self.id, choice.stop_reason)
        self._finish(choice, "error")
        return Delta("", [], None, None, "error")
