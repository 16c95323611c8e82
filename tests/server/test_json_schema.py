"""JSON Schemas: whatever follows the grammar made of one satisfies it, in the eyes of `jsonschema`."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vserve.engine.grammar.grammar import BACKENDS, GrammarMatcher, Vocabulary, pack, prepare
from vserve.server.grammar.compile import CompileError, compile
from vserve.server.grammar.constraint import Constraint
from vserve.server.grammar.finite import texts_of
from vserve.server.grammar.regex import RegexError, translate

PIECES = [
    b'":',
    b'",',
    b'{"',
    b'": "',
    b'"}',
    b"}}",
    b"]]",
    b"[]",
    b", ",
    b"true",
    b"12",
    b"0.",
    b"e+",
    b"\\u00",
    b"ab",
]
TOKENS = [bytes([i]) for i in range(256)] + PIECES + ["é".encode(), "日".encode(), b"\n  "]
STOP = len(TOKENS)
TOKENS += [b""] * 4
# What trips careless grammars: keys written in two ways, numbers that are integers in disguise, control characters.
WORDS = [b'"a"', b'"b"', b'"ab"', b'"\\u0061"', b'"a\\/b"', b"1.0", b"1e1", b"-0", b"\\n", b"\x1e", b"12345", b'"z"']
USUAL = set(b'{}[]":,0123456789abc-.') | set(range(256, STOP))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(prepare(pack(TOKENS, (STOP,))))


def walk(matcher: GrammarMatcher, rng: random.Random, limit: int = 150) -> bytes | None:
    """A random text that follows the grammar, drawn to where mistakes are; None if it has not ended by then."""
    row = np.empty(-(-len(TOKENS) // 32), dtype=np.int32)
    text, planned = b"", b""
    for _ in range(limit):
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        if STOP in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            assert matcher.accept(STOP)
            return text
        allowed = [token for token in allowed if token != STOP]
        planned = planned or (rng.choice(WORDS) if rng.random() < 0.3 else b"")
        closing = [token for token in allowed if token in (34, 93, 125)]
        usual = [token for token in allowed if token in USUAL]
        if planned and planned[0] in allowed:
            token, planned = planned[0], planned[1:]
        elif closing and rng.random() < 0.35:
            token, planned = rng.choice(closing), b""
        else:
            token, planned = rng.choice(usual if usual and rng.random() < 0.9 else allowed), b""
        assert matcher.accept(token)
        text += TOKENS[token]
    return None


def check(schema: Any, vocabulary: Vocabulary, seed: int, num_texts: int, **options: Any) -> int:
    """Walks and validates; how many texts ended. Raises CompileError if the schema is refused."""
    backend, payload = compile(Constraint("json", json.dumps(schema), **options), vocabulary)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    rng = random.Random(seed)
    grammar = BACKENDS[backend](vocabulary, payload)
    num_ended = 0
    for _ in range(num_texts):
        text = walk(GrammarMatcher(vocabulary, grammar), rng)
        if text is not None:
            num_ended += 1
            value = json.loads(text.decode())
            assert not [error.message for error in validator.iter_errors(value)], (backend, text)
    return num_ended


SCHEMAS = r"""
{}
{"type": "object"}
{"type": "array"}
{"type": ["integer", "null"]}
{"enum": ["a", 1, null, {"x": [1]}, "é\n"]}
{"type": "string", "enum": ["a", 1, "b"]}
{"const": {"a": [1, "x"]}}
{"minimum": 5}
{"type": "integer", "minimum": -13}
{"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9}
{"type": "number", "minimum": -1.25, "maximum": 3.5}
{"type": "integer", "multipleOf": 7}
{"type": "string", "minLength": 2, "maxLength": 3}
{"minLength": 3}
{"type": "string", "pattern": "^a+b?$"}
{"type": "string", "pattern": "ab"}
{"type": "string", "pattern": "^a|b$"}
{"type": "string", "pattern": "^[^a]{2}$"}
{"type": "string", "pattern": "^a+$", "maxLength": 3}
{"pattern": "^\"\\\\$"}
{"type": "string", "format": "date-time"}
{"type": "string", "format": "date", "pattern": "^2"}
{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
{"minItems": 1}
{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": false, "minItems": 2}
{"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}], "additionalItems": false}
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["z"]}
{"type": "object", "required": ["z", "a"]}
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": true}
{"type": "object", "properties": {"a/b": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
{"type": "object", "properties": {"a": false, "b": {"type": "null"}}, "additionalProperties": true}
{"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
{"type": "object", "maxProperties": 1}
{"type": "object", "properties": {"ab": {"type": "integer"}}, "patternProperties": {"^a": {"minimum": 5}}}
{"type": "object", "properties": {"a\"\\é\n": {"type": "integer"}, "": {}}, "required": ["a\"\\é\n", ""]}
{"anyOf": [{"type": "integer"}, {"type": "null"}]}
{"type": "integer", "anyOf": [{"maximum": 5}, {"minimum": 8}]}
{"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["b"]}, {"required": ["c"]}]}
{"oneOf": [{"type": "integer"}, {"type": "string"}]}
{"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}
{"allOf": [{"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}}]}
{"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"type": "integer", "minimum": 1}}}
{"$ref": "#/definitions/a%20b", "definitions": {"a b": {"type": "integer"}}}
{"title": "t", "default": 1, "x-guidance": {}}
{"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "null"}}}
{"uniqueItems": false, "nullable": true, "minItems": 0}
{"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["n"]}
""".strip().splitlines()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_what_follows_the_grammar_is_valid(schema: str, vocabulary: Vocabulary, examples: Callable[[int], int]) -> None:
    count = examples(40)
    for whitespace in (True, False):  # llguidance's, and xgrammar's where it can
        assert check(json.loads(schema), vocabulary, 1, count, any_whitespace=whitespace) > count // 4


_LEAVES = st.one_of(
    st.sampled_from(
        [
            {},
            {"type": "null"},
            {"type": "boolean"},
            {"type": "string"},
            {"enum": ["a", 2, None]},
            {"type": ["null", "string"]},
        ]
    ),
    st.builds(
        lambda kind, limits: {"type": kind, **limits},
        st.sampled_from(["integer", "number"]),
        st.dictionaries(st.sampled_from(["minimum", "maximum", "exclusiveMinimum"]), st.integers(-30, 30)),
    ),
    st.builds(
        lambda limits: {"type": "string", **limits},
        st.dictionaries(st.sampled_from(["minLength", "maxLength"]), st.integers(0, 4)),
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^a", "b$", "^[ab]{1,3}$", r"^\w-\d$", "é")]),
)


def follows(schema: dict[str, Any], value: Any, vocabulary: Vocabulary) -> bool:
    constraint = Constraint("json", json.dumps(schema))
    backend, payload = compile(constraint, vocabulary)
    matcher = GrammarMatcher(vocabulary, BACKENDS[backend](vocabulary, payload))
    text = json.dumps(value, ensure_ascii=False).encode()
    return all(matcher.accept(byte) for byte in text) and matcher.accept(STOP)


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
LISTED = {"properties": {"id": NUMBER}, "patternProperties": {"^x_": TEXT}, "additionalProperties": False}
CLOSED = LISTED | {"required": ["id"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # A required property that no pattern matches, wherever the object stands
        (CLOSED, {"id": 1, "x_a": "b"}, {"x_a": "b"}),
        ({"type": "object"} | CLOSED, {"id": 1}, {"id": 1, "y": 1}),
        ({"type": ["object", "null"]} | CLOSED, {"id": 1}, {}),
        ({"properties": {"in": CLOSED}, "required": ["in"]}, {"in": {"id": 1}}, {"in": {}}),
        ({"$ref": "#/$defs/in", "$defs": {"in": CLOSED}}, {"id": 1}, {}),
        ({"anyOf": [CLOSED, {"type": "null"}]}, {"id": 1}, {}),
        ({"allOf": [{"type": "object"} | LISTED, {"required": ["id"]}]}, {"id": 1}, {}),
        (LISTED | {"required": ["id", "x_b"]}, {"id": 1, "x_b": ""}, {"id": 1}),
        ({"patternProperties": {"^x_": TEXT}, "additionalProperties": NUMBER, "required": ["id"]},
         {"id": 1}, {"id": ""}),
        # Patterns that match a few names, which are listed too
        (CLOSED | {"patternProperties": {"^id$": {"minimum": 2}}}, {"id": 2}, {"id": 1}),
        (CLOSED | {"patternProperties": {"^(id|b)$": {}}}, {"id": 2, "b": []}, {"id": 1, "c": 1}),
        (CLOSED | {"patternProperties": {"^x$": TEXT, "^[xy]$": {"maxLength": 1}}},
         {"id": 1, "x": "a"}, {"id": 1, "x": "ab"}),
        ({"patternProperties": {"^ab?$": NUMBER}, "additionalProperties": False, "required": ["a", "ab"]},
         {"a": 1, "ab": 2}, {"a": 1, "abb": 2}),
        ({"properties": {"id": NUMBER}, "patternProperties": {"^x$": TEXT}, "required": ["id"]},
         {"id": 1, "x": "a", "y": 2}, {"id": 1, "x": 3}),
        ({"patternProperties": {"^$": TEXT}, "additionalProperties": False, "required": [""]}, {"": ""}, {"a": ""}),
    ],
)  # fmt: skip
def test_required_names_that_patterns_match_or_not(
    schema: dict[str, Any], right: Any, wrong: Any, vocabulary: Vocabulary
) -> None:
    assert follows(schema, right, vocabulary) and not follows(schema, wrong, vocabulary)
    jsonschema.validate(right, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"^x_": TEXT}, "additionalProperties": False, "required": ["id"]},
        {"patternProperties": {"^x$": TEXT}, "additionalProperties": False, "required": ["id"]},
        CLOSED | {"properties": {"id": False}},
        CLOSED | {"patternProperties": {"^id$": TEXT}},
    ],
)
def test_what_nothing_satisfies_is_said(schema: dict[str, Any], vocabulary: Vocabulary) -> None:
    with pytest.raises(CompileError, match="required property 'id' is unsatisfiable"):
        follows({"type": "object"} | schema, {}, vocabulary)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^x$", ["x"]), ("^(a|bc)$", ["a", "bc"]), ("^(?:a|b)c?$", ["a", "ac", "b", "bc"]),
        ("^[a-c1]$", ["a", "b", "c", "1"]),
        ("^a{0,2}$", ["", "a", "aa"]), ("^$", [""]), ("^a\\.b$", ["a.b"]),
        ("x", None), ("^x", None), ("x$", None), ("^a|b$", None), ("^a*$", None), ("^.$", None), ("^\\d$", None),
        ("^[^a]$", None), ("^(?=a)a$", None), ("^(", None), ("^[a-z]{2}$", None), ("^(a)\\1$", None),
        ("^(?i:a)$", None),
    ],
)  # fmt: skip
def test_patterns_of_a_few_texts(pattern: str, texts: list[str] | None) -> None:
    assert texts_of(pattern) == texts


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required, more: {"type": "object", "properties": properties, "required": required, **more},
        st.dictionaries(st.sampled_from(["a", "b", "ab", "c d"]), inner, max_size=3),
        st.lists(st.sampled_from(["a", "b", "z"]), unique=True, max_size=2),
        st.one_of(st.just({}), st.builds(lambda rest: {"additionalProperties": rest}, inner | st.booleans())),
    )


_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(
            lambda items, limits: {"type": "array", "items": items, **limits},
            inner,
            st.dictionaries(st.sampled_from(["minItems", "maxItems"]), st.integers(0, 3)),
        ),
        st.builds(
            lambda first, rest: {"prefixItems": first, "items": rest}, st.lists(inner, min_size=1, max_size=2), inner
        ),
        st.builds(
            lambda kind, parts, more: {kind: parts, **more},
            st.sampled_from(["anyOf", "allOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
            st.sampled_from([{}, {"type": "object"}, {"minimum": 2}, {"maxLength": 3}]),
        ),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "schema, before, backend",
    [
        ({}, '"', "xgrammar"),
        ({"type": "object"}, '{"', "xgrammar"),
        ({"type": "array", "items": {"type": "string"}}, '["', "xgrammar"),
        (
            {"type": "object", "properties": {"a": {"enum": ['"[^']}, "b": {"type": "string"}}, "required": ["a", "b"]},
            '{"a": "\\"[^", "b": "',
            "xgrammar",
        ),
        ({"type": "string", "maxLength": 3}, '"', "llguidance"),
    ],
)
def test_strings_have_no_halves_of_characters(
    schema: dict[str, Any], before: str, backend: str, vocabulary: Vocabulary
) -> None:
    """Halves of surrogate pairs, written as if they were characters, are no UTF-8: of each three would become."""
    found, payload = compile(Constraint("json", json.dumps(schema), any_whitespace=False), vocabulary)
    assert found == backend

    def follows(text: bytes) -> bool:
        matcher = GrammarMatcher(vocabulary, BACKENDS[backend](vocabulary, payload))
        return all(matcher.accept(byte) for byte in before.encode() + text)

    for text in ("\ud7ff", "\ue000", "a", "日", "\U00010000", "\U0010ffff"):
        assert follows(text.encode())
    for half in (0xD800, 0xDBFF, 0xDC00, 0xDFFF):
        assert not follows(chr(half).encode(errors="surrogatepass"))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=_SCHEMAS, seed=st.integers(0, 999), closed=st.booleans(), compact=st.booleans())
def test_what_follows_any_grammar_is_valid(
    schema: Any, seed: int, closed: bool, compact: bool, vocabulary: Vocabulary
) -> None:
    with contextlib.suppress(CompileError):  # contradictions, mostly
        check(schema, vocabulary, seed, 6, additional_properties=not closed, any_whitespace=not compact)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^abc$", r"a|^b$", r"\d{2,3}-\w+", r"[^\W\d]+", r'[^\s"]{3}', r"\S\W\D", r"[\S,]+", r"[\W-]+", r"[]a]",
        r"[+--]", r"[&&~~\[[]", r"a{,3}b", r"a{2}{", r"{a}", r"\.\/\"\ \#\-", r"[\b]", r"[^\n]*", r".", r"[à-ü]+",
        r"[\x41-\x43]\u00e9", r"[^a-z0-9\-_]", r"a{}", r"[*+?()|^$.{}]", r"(\+\d{1,2}\s)?\(?\d{3}\)?", r"[^\D]",
        r"[^\S\n]", r"\0\t\v", r"[#\-~]", r"[\]\\\-\^]", r"\\d", r"[\\d]", r"(a|b)*?c", r"a{2,}?", r"[\w\W]{2}",
        r"(?:a|b)(?P<x>c)", r"[ -~]/", "a\\\n/b", "", "//",
    ],
)  # fmt: skip
def test_texts_of_a_regex_match_it_in_python(pattern: str, vocabulary: Vocabulary) -> None:
    backend, payload = compile(Constraint("regex", pattern), vocabulary)
    rng, grammar, num_ended = random.Random(3), BACKENDS[backend](vocabulary, payload), 0
    for _ in range(60):
        text = walk(GrammarMatcher(vocabulary, grammar), rng, 60)
        if text is not None:
            num_ended += 1
            assert re.fullmatch(pattern, text.decode()), text
    assert num_ended


@pytest.mark.parametrize("pattern", ["(", "a++", "(?=a)", r"(a)\1", r"\bfoo", "(?i)a", r"\p{L}", "(?#c)", r"\A"])
def test_what_only_some_engines_understand_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        translate(pattern)


@pytest.mark.parametrize("always", [False, True])
def test_a_machine_that_stands_still_for_once_refuses_no_grammar(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """One token seems to take three tenths of a second. Where each does, the grammar is too slow."""
    calls, clock = itertools.count(), time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: clock() + 0.3 * (next(calls) if always else next(calls) >= 5))
    constraint = Constraint("json", json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 50}))
    with pytest.raises(CompileError, match="too slow") if always else contextlib.nullcontext():
        compile(constraint, vocabulary)
    assert next(calls) > (3 if always else 200)
