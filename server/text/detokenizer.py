"""Token ids to text as they come: whole characters only, and nothing that might be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers.decoders import DecodeStream

from .tokenizer import Tokenizer

# A character has at most four bytes. Where so many tokens still give no whole one, the model writes garbage, which goes
# out as replacement characters rather than being decoded again and again.
MAX_PENDING = 64
CONTEXT = 6  # tokens of the prompt that a decoder sees, see Tokenizer.byte_level


class Detokenizer:
    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._core = tokenizer.core
        self._skip = skip_special_tokens
        self._pending: list[int] = []  # tokens whose text has not come out
        # A byte-level decoder makes the same of a token wherever it stands, so it is asked once.
        self._texts = tokenizer.texts[skip_special_tokens] if tokenizer.byte_level else None
        self._stream = DecodeStream(
            ids=[] if tokenizer.byte_level else self._context(prompt), skip_special_tokens=skip_special_tokens
        )

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, starting at a whole character."""
        for length in range(CONTEXT, CONTEXT + 4):
            context = list(prompt[-length:])
            if "\ufffd" not in self._core.decode(context, skip_special_tokens=self._skip):
                return context
        return []

    def feed(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        texts = None if self._pending else self._texts
        if texts is not None and (known := texts.get(token_id)) is not None:
            return known
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._core, token_id)
        except (OverflowError, TypeError):  # no token id at all
            self._pending.pop()
            return ""
        except Exception:
            # "Invalid prefix encountered": the decoder changed its mind about text that it had given out, as byte
            # fallback does when a run of bytes turns out to be no character.
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) > MAX_PENDING else ""
        self._pending.clear()
        if texts is not None:
            texts[token_id] = text
        return text

    def interrupt(self) -> str:
        """What is held back, before a token that is no text."""
        return self._restart() if self._pending else ""

    def flush(self) -> str:
        """What is still held back; incomplete characters become U+FFFD."""
        text = self._core.decode(self._pending, skip_special_tokens=self._skip) if self._pending else ""
        self._pending.clear()
        return text

    def _restart(self) -> str:
        context = list(self._pending)
        text = self.flush()
        # A stream that starts with half a character would give the whole context out once more.
        self._stream = DecodeStream(ids=[] if text.endswith("\ufffd") else context, skip_special_tokens=self._skip)
        return text


class TightDetokenizer(Detokenizer):
    """Shows special tokens, and puts nothing between two of them, whatever the decoder would."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        super().__init__(tokenizer, prompt, skip_special_tokens=False)
        self._special = tokenizer.special  # made once: there may be thousands of them
        self._after_special = bool(prompt) and prompt[-1] in self._special

    def feed(self, token_id: int) -> str:
        text = super().feed(token_id)
        special = self._special.get(token_id)
        tight = special is not None and self._after_special
        self._after_special = special is not None
        return special if tight and special is not None else text


class NoText(Detokenizer):
    """For those who want token ids only."""

    def __init__(self) -> None: ...

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class StopStrings:
    """Finds the stop string that is complete first, whatever pieces the text comes in.

    It holds back one character less than the longest stop string has, so nothing of a stop string ever goes out.
    """

    __slots__ = ("_by_end", "_held", "_hold", "_include", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._by_end, self._hold = _by_end(tuple(stops))
        self._include = include  # leave the stop string in the text
        self._held = ""
        self.matched: str | None = None

    def push(self, new: str, armed: bool = True) -> str:
        """Takes text, returns what may go out. Unless `armed`, a stop string that ends in `new` does not count."""
        text = self._held + new
        if armed and (found := self._first(text, new)) is not None:
            end, self.matched = found
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        cut = max(0, len(text) - self._hold)
        self._held = text[cut:]
        return text[:cut]

    def completes(self, new: str, armed: bool) -> bool:
        """Whether a stop string would be complete with this, which is not taken; not before they are `armed`."""
        return armed and self._first(self._held + new, new) is not None

    def flush(self) -> str:
        """The rest, once nothing more comes."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str, new: str) -> tuple[int, str] | None:
        """Where the first one ends that ends in `new`, with which `text` ends; of several there the longest. Most
        pieces hold none of the characters that stop strings end with, however many there are of these."""
        by_end = self._by_end
        if by_end.keys().isdisjoint(new):
            return None
        for end, character in enumerate(new, len(text) - len(new) + 1):
            stops = by_end.get(character)
            if stops is not None and text.endswith(stops, 0, end):
                return end, next(stop for stop in stops if text.endswith(stop, 0, end))
        return None


@lru_cache(maxsize=8)  # the choices of a request are made one after the other
def _by_end(stops: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], int]:
    """Stop strings by their last character, the longest first, and how many characters are to be held back."""
    found: dict[str, tuple[str, ...]] = {}
    for stop in sorted(set(stops), key=len, reverse=True):
        found[stop[-1]] = (*found.get(stop[-1], ()), stop)
    return found, max(map(len, stops)) - 1
