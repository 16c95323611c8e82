"""Generations that nobody watches: what the engine fails on leaves the others alone."""

from __future__ import annotations

import logging
import time

from ...engine.link.messages import RequestOutput
from ..client.client import Client
from ..generation.choice import Choice, Delta, Prompt, TextOptions
from ..generation.generation import Generation
from ..text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Nobody:
    """Counts nothing."""

    generation_tokens = 0

    def first_output(self, generation: Generation, choice: Choice, now: float) -> None: ...

    def more_output(self, choice: Choice, now: float, num_tokens: int) -> None: ...

    def finished(self, generation: Generation, choice: Choice, last_of_prompt: bool) -> None: ...


class PatientGeneration(Generation):
    """Of one prompt, by the id that its output has. A choice that fails has the finish reason "error", and the cause as
    its stop reason."""

    def __init__(
        self, client: Client, tokenizer: Tokenizer, id: str, prompt: Prompt, text: TextOptions, n: int = 1,
        priority: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            client, Nobody(), tokenizer, [prompt], arrival=time.monotonic(), n=n, text=text, priority=priority
        )
        self.id = id
        self.prompt = prompt

    def _failed(self, choice: Choice, output: RequestOutput) -> Delta:
        choice.stop_reason = output.error or "the engine aborted this request"
        logger.error("request %s failed: %s", self.id, choice.stop_reason)
        self._finish(choice, "error")
        return Delta("", [], None, None, "error")
