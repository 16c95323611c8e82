"""Prompts to token ids, in turns that others can come between: of a text that is too long, only its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..errors import ApiError
from ..lanes import Lanes
from .spelled import unmarked
from .tokenizer import Tokenizer

TURN = 256 << 10  # characters that are tokenised in one go: about a tenth of a second
USUAL = 6  # characters a token that few texts exceed
MOST = 64  # characters a token that no text reaches
FREE = 4 << 20  # characters that a text may have in any case


class Encoder:
    """Of prompts for one request. `limit`: tokens of the context."""

    def __init__(self, lanes: Lanes, tokenizer: Tokenizer, limit: int, param: str, *, fits: bool = True) -> None:
        """`fits`: a prompt that is longer than the context is refused; without it, one is tokenised as it is."""
        self._lanes = lanes
        self._tokenizer = tokenizer
        self._limit = limit
        self._param = param
        self._fits = fits

    def is_short(self, num_characters: int) -> bool:
        """Whether it may be tokenised in one go, whatever it is."""
        return num_characters <= (max(TURN, USUAL * self._limit) if self._fits else TURN)

    async def encode(self, text: str, special: bool) -> list[int]:
        """The ids of a text that is not short. Raises ApiError (400)."""
        await self._check(text)
        return await self._lanes.run(len(text), lambda: self._tokenizer.encode(text, special))

    async def encode_rendered(self, text: str, special: bool) -> list[int]:
        """The same of what `Tokenizer.render` gave."""
        await self._check(unmarked(text))
        return await self._lanes.run(len(text), lambda: self._tokenizer.encode_rendered(text, special))

    async def encode_all(self, prompts: Sequence[str | list[int]], special: bool) -> list[list[int]]:
        """What is no text has ids already."""
        encoded: list[list[int]] = []
        turn: list[str | list[int]] = []
        size = 0
        for prompt in prompts:
            length = len(prompt) if isinstance(prompt, str) else 0
            if turn and size + length > TURN:  # also where a text comes that has turns of its own
                encoded += await self._turn(turn, size, special)
                turn, size = [], 0
            if isinstance(prompt, str) and not self.is_short(length):
                encoded.append(await self.encode(prompt, special))
            else:
                turn.append(prompt)
                size += length
        return encoded + (await self._turn(turn, size, special) if turn else [])

    async def _turn(self, prompts: list[str | list[int]], size: int, special: bool) -> list[list[int]]:
        encode = self._tokenizer.encode
        return await self._lanes.run(
            size, lambda: [encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    async def _check(self, text: str) -> None:
        """Tokenises pieces of it until there are too many tokens. Each piece may have a token more than its part of the
        whole text, so a quarter more than the limit is needed to say so.
        """
        if len(text) > max(FREE, MOST * self._limit):
            raise ApiError(
                400,
                f"'{self._param}' has a text of {len(text)} characters; at most {max(FREE, MOST * self._limit)} are "
                "allowed. Please reduce its length.",
                param=self._param,
                code="context_length_exceeded",
            )
        if not self._fits:
            return
        found = 0
        for start in range(0, len(text), TURN):
            piece = text[start : start + TURN]
            found += await self._lanes.run(len(piece), partial(self._tokenizer.count, piece))
            if found > self._limit + self._limit // 4:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self._limit} tokens. However, your prompt's first "
                    f"{start + len(piece)} of {len(text)} characters contain some {found} input tokens. Please reduce "
                    "the length of the input prompt.",
                    param=self._param,
                    code="context_length_exceeded",
                )
