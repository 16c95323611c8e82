"""Matchers against brute force over a tiny vocabulary."""

from __future__ import annotations

import itertools
import re
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from llguidance import LLTokenizer

from vserve.engine.grammar import grammar, grammar_libraries
from vserve.engine.grammar.grammar import GrammarError, Grammars, Matcher, pack, prepare
from vserve.engine.grammar.grammar_libraries import load as load_libraries
from vserve.engine.grammar.grammar_libraries import xgrammar
from vserve.engine.link.messages import AddGrammar, ToEngine

# Ids 7 and 8 stop, 9 is special, 10 and 11 are rows that no token uses.
TOKENS = [b"a", b"b", b"ab", b"ba", b"aa", b"c", b"abc", b"", b"", b"", b"", b""]
STOPS = (7, 8)
SIZE = 40  # wider than the vocabulary by more than a word of the mask
TOKENS += [b""] * (SIZE - len(TOKENS))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    grammars = Grammars()
    grammars.set_vocabulary(prepare(pack(TOKENS, STOPS)))
    return grammars


def payload(grammars: Grammars, backend: str, source: str) -> bytes:
    if backend == "llguidance":
        return f'%llguidance {{"no_forcing": true}}\n{source}'.encode()
    vocabulary = grammars._vocabulary
    assert vocabulary is not None
    compiler = xgrammar().GrammarCompiler(vocabulary.result().xgrammar, 1, False, -1)
    compiled = compiler.compile_grammar_ebnf(xgrammar().Grammar.from_ebnf(source, "root"))
    return str(compiled.serialize_json()).encode()


def allowed(matcher: Matcher) -> set[int]:
    row = np.full(-(-SIZE // 32), -1, dtype=np.int32)  # what was in the row before does not count
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


CASES = [
    ("xgrammar", 'root ::= ("ab" | "c")* "a"?', r"(ab|c)*a?"),
    ("llguidance", 'start: ("ab" | "c")* "a"?', r"(ab|c)*a?"),
    ("llguidance", "start: /(a|bc){2,3}/", r"(a|bc){2,3}"),
    ("xgrammar", 'root ::= "abc"', r"abc"),
    ("llguidance", 'start: "abc"', r"abc"),
]


@pytest.mark.parametrize("backend, source, pattern", CASES)
def test_masks_are_those_of_brute_force(grammars: Grammars, backend: str, source: str, pattern: str) -> None:
    """Every way of at most three tokens: allowed is what some text of the language continues."""
    key = f"{backend} {source}"
    grammars.add(AddGrammar(key, backend, payload(grammars, backend, source)))
    words = {
        "".join(letters)
        for length in range(11)
        for letters in itertools.product("abc", repeat=length)
        if re.fullmatch(pattern, "".join(letters))
    }
    prefixes = {word[:end] for word in words for end in range(len(word) + 1)}
    texts = {token_id: token.decode() for token_id, token in enumerate(TOKENS) if token}
    checked = 0

    def explore(path: list[int], text: str) -> None:
        nonlocal checked
        matcher = grammars.matcher(key)
        assert all(matcher.accept(token) for token in path)
        expected = {token for token, part in texts.items() if text + part in prefixes}
        expected |= set(STOPS) if text in words else set()
        if not expected:
            return
        assert allowed(matcher) == expected and allowed(matcher) == expected, "filling changes nothing"
        checked += 1
        for token in set(range(SIZE)) - expected:
            again = grammars.matcher(key)
            assert all(again.accept(earlier) for earlier in path)
            assert not again.accept(token) and not again.terminated
        for token in expected - set(STOPS) if len(path) < 2 else ():
            explore([*path, token], text + texts[token])

    explore([], "")
    assert checked > 3


@pytest.mark.parametrize("backend, source, pattern", CASES[:2])
def test_a_stop_token_ends_it(grammars: Grammars, backend: str, source: str, pattern: str) -> None:
    grammars.add(AddGrammar("end", backend, payload(grammars, backend, source)))
    for stop in STOPS:
        matcher = grammars.matcher("end")
        assert matcher.accept(0) and not matcher.terminated
        assert matcher.accept(stop) and matcher.terminated
        assert not matcher.accept(stop) and not matcher.accept(0)


def test_matchers_of_one_grammar_are_independent_and_outlive_it(grammars: Grammars) -> None:
    for backend, source, _ in CASES[:2]:
        grammars.add(AddGrammar("n", backend, payload(grammars, backend, source)))
        one, two = grammars.matcher("n"), grammars.matcher("n")
        assert one.accept(0)
        grammars.drop(["n", "unknown"])
        assert allowed(one) == {1, 3, 7, 8} and allowed(two) == {0, 2, 5, 6, 7, 8}
        with pytest.raises(KeyError):
            grammars.matcher("n")


def test_what_cannot_go_on_says_so(grammars: Grammars) -> None:
    grammars.add(AddGrammar("dead", "xgrammar", payload(grammars, "xgrammar", 'root ::= "a" "é"')))
    matcher = grammars.matcher("dead")
    assert matcher.accept(0)
    with pytest.raises(GrammarError, match="no token can follow"):
        allowed(matcher)


def test_a_broken_payload_fails_its_users_only(grammars: Grammars) -> None:
    for backend, broken in (("xgrammar", b"{}"), ("llguidance", b"start: /(/")):
        grammars.add(AddGrammar("broken", backend, broken))
        with pytest.raises(Exception, match=r"."):
            allowed(grammars.matcher("broken"))
    with pytest.raises(KeyError):
        grammars.add(AddGrammar("other", "nobody", b""))
    with pytest.raises(GrammarError):
        Grammars().add(AddGrammar("early", "llguidance", b""))


def test_a_slow_grammar_ends(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.add(AddGrammar("slow", "llguidance", payload(grammars, "llguidance", 'start: "ab"*')))
    monkeypatch.setattr(grammar, "TOO_SLOW", -1.0)
    with pytest.raises(GrammarError, match="simplify"):
        allowed(grammars.matcher("slow"))
    with pytest.raises(GrammarError, match="simplify"):
        grammars.matcher("slow").accept(0)


def words(size: int) -> list[bytes]:
    """A vocabulary as large as models have: the bytes, then words, some of which begin as others do."""
    letters = b"etaoinshrdlucmfw"
    digits = ([letters[number >> shift & 15] for shift in range(0, 20, 4)] for number in range(size - 257))
    ends = (bytes(word[: 2 + number % 4]) + b"%x" % number for number, word in enumerate(digits))
    return [*(bytes([byte]) for byte in range(256)), *ends, b""]


def test_a_large_vocabulary_and_first_grammars_keep_no_thread_waiting(longest_gap: Any, settles_within: Any) -> None:
    """What an engine does with them while it streams: a thread that held the interpreter's lock would be a stall of
    every stream."""
    tokens = words(150_000)
    told = prepare(pack(tokens, (len(tokens) - 1,)))
    message = msgspec.msgpack.encode(told)
    compiler = xgrammar().GrammarCompiler(grammar.Vocabulary(told).xgrammar, 1, False, -1)
    source = xgrammar().Grammar.from_ebnf('root ::= "e" [a-z]* | "q"', "root")
    compiled = str(compiler.compile_grammar_ebnf(source).serialize_json()).encode()

    def load() -> None:
        grammars = Grammars()
        grammars.set_vocabulary(msgspec.msgpack.decode(message, type=ToEngine))
        grammars.add(AddGrammar("x", "xgrammar", compiled))
        grammars.add(AddGrammar("l", "llguidance", b"start: /e[a-z]*|q/"))
        for key in "xl":
            row = np.zeros(-(-len(tokens) // 32), dtype=np.int32)
            grammars.matcher(key).fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            assert bits[ord("e")] and bits[ord("q")] and not bits[ord("a")]

    load_libraries()  # as an engine does before it is ready
    assert settles_within(0.15, lambda: longest_gap(load)), "some call keeps the interpreter's lock"


@pytest.mark.parametrize("name", ["_try_xgrammar", "_try_llguidance"])
def test_libraries_are_tried_before_anybody_needs_them(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A release whose names are there, and do something else."""
    load_libraries()
    assert not caplog.records
    if name == "_try_xgrammar":
        matcher = SimpleNamespace(fill_next_token_bitmask=lambda *given: None, accept_token=lambda *given: True)
        other = SimpleNamespace(**{**vars(xgrammar()), "GrammarMatcher": lambda *given: matcher})
        monkeypatch.setattr(grammar_libraries, "xgrammar", lambda: other)
    else:
        monkeypatch.setattr(grammar_libraries, "tokenizer", lambda *given: LLTokenizer("byte"))
    load_libraries()
    (record,) = caplog.records
    assert "structured outputs are unavailable" in record.getMessage() and "is not known" in record.getMessage()


def test_loading_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a matcher meanwhile gets one at once, and hears when it is ready."""
    go = threading.Event()

    class Slow(grammar.Vocabulary):
        def __init__(self, message: Any) -> None:
            go.wait(60)
            super().__init__(message)

    monkeypatch.setattr(grammar, "Vocabulary", Slow)
    grammars = Grammars()
    grammars.set_vocabulary(prepare(pack(TOKENS, STOPS)))
    grammars.add(AddGrammar("late", "llguidance", b'start: "ab"'))
    matcher = grammars.matcher("late")
    told = threading.Event()
    matcher.when_ready(told.set)
    assert not matcher.ready and not told.is_set()
    go.set()
    assert told.wait(60) and matcher.ready
    assert matcher.accept(2) and not matcher.terminated and matcher.accept(8) and matcher.terminated
    assert grammars.matcher("late").ready
