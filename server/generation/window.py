"""How many inputs for vectors are with an engine at a time: as many as keep it busy, and no more."""

from __future__ import annotations

from ..client.client import Client

STEPS_AHEAD = 4  # of inputs that are with an engine


class Window:
    """All of them at once would be copied to the engine for nothing, and whoever comes later would wait for them."""

    def __init__(self, client: Client, *, one_engine: bool) -> None:
        """one_engine: all go to the same of several."""
        self._client = client
        self._one_engine = one_engine
        self._num_open = self._num_tokens = 0  # prompts, and tokens of theirs

    def is_full(self) -> bool:
        if not self._num_open:
            return False
        info = self._client.info  # of the engine, or of one of several alike
        ahead = STEPS_AHEAD * (1 if self._one_engine else len(self._client.engines))
        return self._num_open >= ahead * info.max_num_seqs or self._num_tokens >= ahead * info.max_num_batched_tokens

    def opened(self, num_tokens: int) -> None:
        """A prompt of so many tokens has been sent."""
        self._num_open += 1
        self._num_tokens += num_tokens

    def closed(self, num_tokens: int) -> None:
        """It is finished."""
        self._num_open -= 1
        self._num_tokens -= num_tokens
