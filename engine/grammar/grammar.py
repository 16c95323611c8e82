"""Grammars that outputs must follow: which tokens may come next. xgrammar and llguidance do the work, each where the
front end chose it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import numpy as np

from ..link.messages import AddGrammar, SetVocabulary
from .grammar_libraries import GrammarError, tokenizer, tokenizer_info, xgrammar

__all__ = [
    "BACKENDS",
    "GrammarError",
    "GrammarMatcher",
    "Grammars",
    "Matcher",
    "Vocabulary",
    "pack",
    "prepare",
    "unpack",
]

# CPU seconds for one mask or one token, after which a grammar has disturbed the other requests enough. Usual is 10 µs;
# the front end has tried each grammar on its own time before, so only a hostile one comes this far.
TOO_SLOW = 0.5
MAX_ROLLBACK = 16  # tokens; no step has more drafts of a request


class Matcher(Protocol):
    """Where one output stands in its grammar."""

    @property
    def ready(self) -> bool:
        """Nothing has to wait for the grammar to be loaded."""
        ...

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls this once it is loaded, or has failed to; on any thread."""
        ...

    def binds(self, ahead: int) -> bool:
        """Whether the token after the next `ahead` ones, whose values are not known yet, may have to be masked."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Writes the mask of the next token into row, int32 [ceil(V / 32)]: bit 1 = allowed. Stop tokens are allowed
        exactly when the grammar may end. Raises GrammarError when nothing is allowed."""
        ...

    def accept(self, token_id: int) -> bool:
        """Takes in the next token; False, and nothing changes, if the grammar does not allow it."""
        ...

    def rollback(self, count: int) -> None:
        """As if the last so many tokens had not been taken in; MAX_ROLLBACK at most."""
        ...

    @property
    def terminated(self) -> bool:
        """A stop token was accepted: nothing can follow."""
        ...


def pack(tokens: Iterable[bytes], stop_token_ids: Sequence[int], markers: Sequence[int] = ()) -> SetVocabulary:
    """`tokens`: by id; empty where no grammar may use it."""
    lengths, text = array("I"), bytearray()
    for token in tokens:
        lengths.append(len(token))
        text += token
    return SetVocabulary(lengths.tobytes(), bytes(text), tuple(stop_token_ids), tuple(markers))


def unpack(message: SetVocabulary) -> list[bytes]:
    """The tokens by id, as `pack` had them."""
    ends = np.cumsum(np.frombuffer(message.lengths, np.uint32)).tolist()
    return [message.text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def prepare(message: SetVocabulary) -> SetVocabulary:
    """With xgrammar's part. Takes most of a second for 150,000 tokens, and the interpreter's lock with it."""
    return msgspec.structs.replace(message, xgrammar=tokenizer_info(unpack(message), message.stop_token_ids))


class Vocabulary:
    """The tokens as the libraries want them. Takes a second for 150,000 tokens, of which the interpreter's lock is held
    for a few milliseconds: other threads go on."""

    def __init__(self, message: SetVocabulary) -> None:
        """`message`: as `prepare` has made it."""
        self.stop_token_ids = message.stop_token_ids
        self.lengths = np.frombuffer(message.lengths, np.uint32)  # bytes; 0: no text
        self.size = len(self.lengths)
        self.xgrammar = xgrammar().TokenizerInfo.deserialize_json(message.xgrammar.decode("ascii"))
        self.llguidance = tokenizer(self.lengths, message.text, message.stop_token_ids)
        stops = list(self.stop_token_ids)
        text = self.lengths > 0
        text[stops] = False
        self.marked = _mask(text)
        text[list(message.markers)] = False
        self.ordinary = _mask(text)
        self.stops = _mask(np.isin(np.arange(self.size), stops))


def _mask(allowed: np.ndarray) -> np.ndarray:
    """bool [V] → int32 [ceil(V / 32)]"""
    bits = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


class _Xgrammar:
    """A compiled grammar; `start` begins an output."""

    def __init__(self, vocabulary: Vocabulary, payload: bytes) -> None:
        self._compiled = xgrammar().CompiledGrammar.deserialize_json(payload.decode(), vocabulary.xgrammar)

    def start(self) -> _XgrammarState:
        # No stop tokens of its own, not ended without one, any rollback, no temperature.
        return _XgrammarState(xgrammar().GrammarMatcher(self._compiled, None, False, -1, None))


class _XgrammarState:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0, False)

    def accept(self, token_id: int) -> bool:
        accepted: bool = self._matcher.accept_token(token_id, False)
        return accepted

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def may_end(self) -> bool:
        completed: bool = self._matcher.is_completed()
        return completed


class _Llguidance:
    """A grammar that is compiled as outputs need it."""

    def __init__(self, vocabulary: Vocabulary, payload: bytes) -> None:
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        self._matcher = llguidance.LLMatcher(vocabulary.llguidance, payload.decode(), log_level=0, limits=limits)
        _check(self._matcher)

    def start(self) -> _LlguidanceState:
        return _LlguidanceState(self._matcher.deep_copy())


class _LlguidanceState:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: np.ndarray) -> None:
        if self._matcher.is_stopped():  # only a stop token can follow, or it failed
            row[:] = 0
        else:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        _check(self._matcher)

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        _check(self._matcher)

    def may_end(self) -> bool:
        return self._matcher.is_accepting()


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(matcher.get_error().strip().splitlines()[0])


BACKENDS: dict[str, Callable[[Vocabulary, bytes], _Xgrammar | _Llguidance]] = {
    "xgrammar": _Xgrammar,
    "llguidance": _Llguidance,
}


class GrammarMatcher:
    """The Matcher of both libraries."""

    ready = True

    def binds(self, ahead: int) -> bool:
        return True

    def __init__(self, vocabulary: Vocabulary, grammar: _Xgrammar | _Llguidance, markers: bool = False) -> None:
        """`markers`: the output may have those special tokens that the vocabulary knows by their names."""
        self.terminated = False
        self._vocabulary = vocabulary
        self._allowed = vocabulary.marked if markers else vocabulary.ordinary
        self._state = grammar.start()

    def when_ready(self, call: Callable[[], object]) -> None:
        call()

    def fill(self, row: np.ndarray) -> None:
        started = time.thread_time()
        self._state.fill(row)
        # Whatever a grammar says, special tokens are no text, and an output ends only where the grammar may end.
        row &= self._allowed
        if self._state.may_end():
            row |= self._vocabulary.stops
        elif not row.any():
            raise GrammarError("no token can follow: nothing satisfies the grammar")
        if time.thread_time() - started > TOO_SLOW:
            raise GrammarError(f"a mask took longer than {TOO_SLOW} s: simplify the grammar")

    def accept(self, token_id: int) -> bool:
        if token_id in self._vocabulary.stop_token_ids:
            self.terminated = not self.terminated and self._state.may_end()
            return self.terminated
        if self.terminated or not self._vocabulary.lengths[token_id]:
            return False
        started = time.thread_time()
        accepted = self._state.accept(token_id)
        if time.thread_time() - started > TOO_SLOW:
            if accepted:
                self._state.rollback(1)
            raise GrammarError(f"a token took longer than {TOO_SLOW} s: simplify the grammar")
        return accepted

    def rollback(self, count: int) -> None:
        if count and self.terminated:  # by a stop token, which the library has not seen
            self.terminated, count = False, count - 1
        if count:
            self._state.rollback(count)


class LoadingMatcher:
    """A Matcher that was made before its grammar was loaded. What needs the grammar first waits for it."""

    def __init__(self, load: Future[GrammarMatcher]) -> None:
        self._load = load

    @property
    def ready(self) -> bool:
        return self._load.done()

    def when_ready(self, call: Callable[[], object]) -> None:
        self._load.add_done_callback(lambda _: call())

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        self._load.result().fill(row)

    def accept(self, token_id: int) -> bool:
        return self._load.result().accept(token_id)

    def rollback(self, count: int) -> None:
        self._load.result().rollback(count)

    @property
    def terminated(self) -> bool:
        return self._load.result().terminated


class Grammars:
    """The grammars that requests may name. Loading happens on a thread, which the libraries leave the GIL to."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._vocabulary: Future[Vocabulary] | None = None
        self._grammars: dict[str, Future[_Xgrammar | _Llguidance]] = {}
        self._marked: set[str] = set()  # keys of those that may use the vocabulary's markers

    def set_vocabulary(self, message: SetVocabulary) -> None:
        """Grammars that were added before are forgotten."""
        self._grammars.clear()
        self._vocabulary = self._thread.submit(Vocabulary, message)

    def add(self, message: AddGrammar) -> None:
        """What goes wrong with the payload is raised by the matchers. Raises KeyError for an unknown backend,
        GrammarError before set_vocabulary."""
        vocabulary, backend = self._vocabulary, BACKENDS[message.backend]
        if vocabulary is None:
            raise GrammarError("a grammar came before the vocabulary")
        self._grammars[message.key] = self._thread.submit(lambda: backend(vocabulary.result(), message.payload))
        (self._marked.add if message.markers else self._marked.discard)(message.key)

    def drop(self, keys: list[str]) -> None:
        """Outputs that follow one of these go on."""
        for key in keys:
            self._grammars.pop(key, None)
            self._marked.discard(key)

    def matcher(self, key: str) -> Matcher:
        """A new one, at the beginning. Raises KeyError if the key is unknown."""
        grammar, vocabulary, markers = self._grammars[key], self._vocabulary, key in self._marked
        assert vocabulary is not None
        if grammar.done():
            return GrammarMatcher(vocabulary.result(), grammar.result(), markers)
        return LoadingMatcher(
            self._thread.submit(lambda: GrammarMatcher(vocabulary.result(), grammar.result(), markers))
        )
