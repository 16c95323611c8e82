"""What the grammars of tool calls let out, by random walks through them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from vserve.engine.grammar import BACKENDS, GrammarMatcher
from vserve.server.grammar_compile import compile
from vserve.server.parsers.formats import known
from vserve.server.parsers.parts import CallArguments, CallBegin
from vserve.server.parsers.reader import Reader
from vserve.server.tools import tool_use

CALLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
    },
    "search": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def byte_vocabulary() -> Iterator[Any]:
    from vserve.engine.grammar import Vocabulary
    from vserve.engine.messages import SetVocabulary

    markers = [b"[TOOL_CALLS]", b"[ARGS]", b"<|python_tag|>"]
    tokens = [b"", *(bytes([byte]) for byte in range(256)), b"<tool_call>", *markers]
    yield Vocabulary(SetVocabulary(tokens, (0,), tuple(range(258, 258 + len(markers)))))


@pytest.mark.parametrize("name", [format.name for format in known()[0]])
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_what_a_grammar_lets_out_is_read_as_valid_calls(name: str, mode: str, byte_vocabulary: Any) -> None:
    """Random outputs that follow the grammar of each format."""
    format = next(format for format in known()[0] if format.name == name)
    tools = [{"type": "function", "function": {"name": called, "parameters": CALLS[called]}} for called in CALLS]
    choice = {"type": "function", "function": {"name": "search"}} if mode == "named" else mode
    use = tool_use(tools, choice, None)
    assert use is not None
    constraint = use.constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    grammar = BACKENDS[backend](byte_vocabulary, payload)
    size = len(byte_vocabulary.tokens)
    num_calls = 0
    for seed in range(12):
        rng = random.Random(seed)
        matcher = GrammarMatcher(byte_vocabulary, grammar, constraint.markers)
        text = b""
        if mode == "auto":
            lead = format.trigger or format.opening + format.begin("search")
            # Some formats know calls at the beginning of a message only.
            text = lead.encode() if name in ("json", "llama3_json", "pythonic") else b"Well. " + lead.encode()
            for byte in text:
                assert matcher.accept(1 + byte)
        row = np.zeros(-(-size // 32), dtype=np.int32)
        for _ in range(300):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size])
            if 0 in allowed and (len(allowed) == 1 or len(allowed) > 100 or rng.random() < 0.5):
                break  # an end, or free text
            token = int(rng.choice(allowed[allowed > 0]))
            assert matcher.accept(token)
            text += byte_vocabulary.tokens[token]
        reader = Reader(format.read, frozenset(tool.name for tool in use.callable), new_id=format.new_id)
        parts = reader.feed(text.decode(errors="replace")) + reader.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        arguments = [part.text for part in parts if isinstance(part, CallArguments)]
        assert names and len(names) == len(arguments), (text, parts)
        for called, said in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(said), CALLS[called])
        assert mode != "named" or names == ["search"]
        num_calls += len(names)
    assert mode != "required" or num_calls > 12 or name == "hermes", "never two calls"
