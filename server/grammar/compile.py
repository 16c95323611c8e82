"""From what a client asks for to what the engine follows. Runs in a process of its own: it may hang or crash."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...engine.grammar.grammar import BACKENDS, GrammarError, GrammarMatcher, Vocabulary
from ...engine.grammar.grammar_libraries import xgrammar
from .constraint import Constraint
from .json_schema import Schema, SchemaError
from .lark import JSON_OPTIONS, between_tokens, lark, whitespace
from .regex import RegexError, translate

# Above, xgrammar's compiled form takes the engine longer than 50 ms to read; llguidance needs a few at most.
MAX_PAYLOAD = 4 << 20
# A grammar is tried before the engine meets it: some compile in no time and then take seconds a token.
TRIAL_TOKENS = 100
TRIAL_SECONDS = 0.1  # of CPU, for one mask or one token
_LARK_OPTIONS = re.compile(r"%llguidance\s*\{[^}]*\}")
# Of EBNF: a text in quotes, or characters in brackets; [^…]: all but those.
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(\^?)(?:\\.|[^\]\\])*\]')
_WHITESPACE_PATTERN = re.compile(r"(\\[nrts]|[ \n\r\t*+?()|\[\]]|\{\d*,?\d*\})+")


# What the libraries say that would not help a client.
_WORDS = {
    "NoExtension": "nothing satisfies it",
    "oneOf constraints are not supported": "the alternatives of its 'oneOf' overlap; use 'anyOf'",
    "Regex is empty": "no string satisfies it",
    "lookarounds not supported": "'^', '$' and the like are supported at its ends only",
}


class CompileError(ValueError):
    """One sentence for the client."""


Attempt = tuple[str, Callable[[Vocabulary], bytes]]  # the library, and what makes its payload


def compile(constraint: Constraint, vocabulary: Vocabulary, skip: frozenset[str] = frozenset()) -> tuple[str, bytes]:
    """(backend, payload) for AddGrammar. `skip`: backends that were tried in vain. Raises CompileError."""
    error: Exception | None = None
    try:
        for backend, make in _attempts(constraint):
            if backend in skip:
                continue
            try:
                payload = make(vocabulary)
                _try(backend, payload, vocabulary, constraint.markers)
                return backend, payload
            except Exception as failure:  # the libraries raise whatever their languages do
                error = failure
    except (SchemaError, CompileError) as refusal:
        raise CompileError(str(refusal)) from None
    except RegexError as refusal:
        raise CompileError(f"the regular expression cannot be followed: {refusal}.") from None
    except RecursionError:
        raise CompileError(f"the {_name(constraint)} is nested too deeply.") from None
    if error is None:
        raise CompileError(f"the {_name(constraint)} takes too long to compile, or too much memory; simplify it.")
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        raise CompileError(f"the {_name(constraint)} needs too much memory.")
    raise CompileError(f"the {_name(constraint)} cannot be followed: {_cause(error, constraint.kind)}.")


def _name(constraint: Constraint) -> str:
    names = {"json": "JSON schema", "regex": "regular expression", "structural_tag": "structural tag"}
    return names.get(constraint.kind, constraint.kind)


def _cause(error: Exception, kind: str) -> str:
    """The libraries' words, with places in the client's text only."""
    text = re.sub(r"\[[\d:]+\] \S+: |Check failed: \(.*?\) is false: |failed to compile JSON schema: ", "", str(error))

    def place(match: re.Match[str]) -> str:
        return f"line {int(match[1]) - 1}, column {match[2]}: " if kind == "grammar" else ""  # line 1 is ours

    text = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", place, text.strip())
    text = text.splitlines()[0] if text else type(error).__name__
    for theirs, ours in _WORDS.items():
        if theirs in text:
            return ours
    return (text if len(text) <= 200 else text[:199] + "…").rstrip(". ")


def _attempts(constraint: Constraint) -> Iterator[Attempt]:
    """The best one first."""
    kind, text = constraint.kind, constraint.text
    if kind in ("json", "json_object"):
        yield from _json(constraint)
    elif kind == "choice":
        choices = json.loads(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise CompileError("the choice must be a list of strings, none of them empty.")
        rule = " | ".join(map(_quote, choices))
        yield "xgrammar", _xgrammar_of(f"root ::= {rule}")
        yield "llguidance", _llguidance("start: " + " | ".join(json.dumps(c) for c in choices))
    elif kind == "regex":
        # Nothing in the translation escapes a slash or a line end.
        regex = translate(text).replace("/", r"\/").replace("\n", r"\n").replace("\r", r"\r")
        yield "llguidance", _llguidance(f"start: /{regex or '(?:)'}/")
    elif kind == "grammar" and "::=" in text:
        yield "xgrammar", _xgrammar_of(text)
    elif kind == "grammar":
        yield "llguidance", _llguidance(_LARK_OPTIONS.sub("", text))
    elif kind == "tools":
        yield "llguidance", _llguidance(lark(**json.loads(text)))
    else:
        tag = _structural_tag(json.loads(text), constraint)
        yield "xgrammar", _xgrammar(lambda compiler: compiler.compile_structural_tag(tag))


def _json(constraint: Constraint) -> Iterator[Attempt]:
    source = json.loads(constraint.text) if constraint.kind == "json" else {"type": "object"}
    schema = Schema(source, additional_properties=constraint.additional_properties)
    text = json.dumps(schema.root)
    flexible = constraint.any_whitespace or constraint.whitespace_pattern is not None
    if constraint.whitespace_pattern is not None:
        if not _WHITESPACE_PATTERN.fullmatch(constraint.whitespace_pattern):
            raise CompileError("the whitespace pattern may match spaces, tabs and line ends only.")
        between = translate(constraint.whitespace_pattern.replace(r"\s", "[ \\t\\n\\r]"))
    else:
        between = whitespace()
    # xgrammar would need a mask for each space that may follow another: 18 MB for two properties and 150,000 tokens.
    if schema.obstacle is None and not flexible:
        yield "xgrammar", _xgrammar(lambda compiler: compiler.compile_grammar_ebnf(_ebnf(_of_characters(text))))
    compact = JSON_OPTIONS | {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options = between_tokens(between) if flexible else compact
    yield "llguidance", _llguidance("start: %json " + json.dumps(schema.root | {"x-guidance": options}))


def _of_characters(schema: str) -> str:
    """xgrammar's EBNF of a schema, whose strings it would also let have halves of surrogate pairs, written as if they
    were characters: no text has those bytes, and what is decoded of them is longer than the schema may allow."""
    # No white space, indent or separators of its own; not strict; no limit of white space; nothing printed; in order.
    grammar = str(xgrammar().Grammar.from_json_schema(schema, False, None, None, False, None, False, False).to_string())
    return _LITERAL.sub(lambda found: rf"{found[0][:-1]}\ud800-\udfff]" if found[1] else found[0], grammar)


def _quote(text: str) -> str:
    """A string of EBNF."""
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\\x7f' else c for c in text)
    return f'"{escaped}"'


def _xgrammar_of(ebnf: str) -> Callable[[Vocabulary], bytes]:
    return _xgrammar(lambda compiler: compiler.compile_grammar_ebnf(_ebnf(ebnf)))


def _ebnf(text: str) -> Any:
    return xgrammar().Grammar.from_ebnf(text, "root")


def _xgrammar(make: Callable[[Any], Any]) -> Callable[[Vocabulary], bytes]:
    def run(vocabulary: Vocabulary) -> bytes:
        # One thread, no cache, no limit of it.
        compiled = make(xgrammar().GrammarCompiler(vocabulary.xgrammar, 1, False, -1))
        payload = str(compiled.serialize_json()).encode()
        if len(payload) > MAX_PAYLOAD:
            raise GrammarError(f"it is too large: {len(payload) >> 20} MiB compiled, at most {MAX_PAYLOAD >> 20}")
        return payload

    return run


def _llguidance(lark: str) -> Callable[[Vocabulary], bytes]:
    def run(vocabulary: Vocabulary) -> bytes:
        from llguidance import LLMatcher

        # Where only one text can follow, the model still chooses its tokens, as it does with xgrammar.
        grammar = '%llguidance {"no_forcing": true}\n' + lark
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary.llguidance)
        if failed:
            raise GrammarError(messages[0])
        return grammar.encode()

    return run


def _structural_tag(tag: Any, constraint: Constraint) -> str:
    """Its text for xgrammar, which alone knows structural tags: each schema in it must be one that xgrammar honours."""

    def schema(value: Any) -> Any:
        ready = Schema(value, additional_properties=constraint.additional_properties)
        if ready.obstacle is not None:
            raise CompileError(f"the keyword {ready.obstacle!r} is not supported in the schema of a structural tag.")
        return ready.root

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(one) for one in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "regex" and isinstance(value.get("pattern"), str):
            translate(value["pattern"])  # refuses what xgrammar would ignore, such as look-ahead
        return {
            name: schema(one) if name == "json_schema" and isinstance(one, dict) else visit(one)
            for name, one in value.items()
        }

    if not isinstance(tag, dict):
        raise CompileError("the structural tag must be an object.")
    structures = tag.get("structures")
    if structures is None:
        return json.dumps(visit(tag))
    try:
        tags = [
            {"type": "tag", "begin": s["begin"], "end": s["end"],
             "content": {"type": "json_schema", "json_schema": schema(s["schema"])}}
            for s in structures
        ]  # fmt: skip
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        return json.dumps({"type": "structural_tag", "format": form})
    except (KeyError, TypeError) as error:
        raise CompileError(f"the structural tag lacks what its older form needs: {error}.") from None


def _try(backend: str, payload: bytes, vocabulary: Vocabulary, markers: bool) -> None:
    """Follows the grammar for some tokens. Raises GrammarError where that fails or takes long: twice, for a machine
    may have been slow for once, and then a good grammar would be refused."""
    if all(_is_slow(backend, payload, vocabulary, markers) for _ in range(2)):
        raise GrammarError("it is too slow to follow")


def _is_slow(backend: str, payload: bytes, vocabulary: Vocabulary, markers: bool) -> bool:
    """The same tokens each time."""
    matcher = GrammarMatcher(vocabulary, BACKENDS[backend](vocabulary, payload), markers)
    size = vocabulary.size
    row = np.zeros(-(-size // 32), dtype=np.int32)
    rng = random.Random(0)
    for _ in range(TRIAL_TOKENS):
        started = time.thread_time()
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits((row & ~vocabulary.stops).view(np.uint8), bitorder="little"))
        if allowed.size == 0:
            return False
        if not matcher.accept(int(rng.choice(allowed))):
            raise GrammarError("it contradicts itself")
        if time.thread_time() - started > TRIAL_SECONDS:
            return True
    return False
