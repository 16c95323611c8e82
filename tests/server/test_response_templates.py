# ruff: noqa: E501, recorded texts are as long as they are
"""The response_template of a model: what it says is read as transformers reads it, however the text is cut, and grammars
are made of it; what cannot be read costs a line in the log."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_parsers import told
from tests.server.test_tool_grammars import CALLS, TOKENS, byte_vocabulary
from tests.server.test_tools import model_with, put_together
from vserve.engine.grammar.grammar import BACKENDS, GrammarMatcher
from vserve.server.grammar.compile import compile
from vserve.server.grammar.tools import tool_use
from vserve.server.parsers.formats import Formats
from vserve.server.parsers.parts import CallArguments, CallBegin, Part
from vserve.server.parsers.pattern_nodes import PatternError
from vserve.server.parsers.patterns import MAX_STEPS, MAX_WORK, Pattern, Search, find_all
from vserve.server.parsers.reader import Reader
from vserve.server.parsers.response_formats import formats
from vserve.server.parsers.response_template import TemplateError, read_template
from vserve.server.parsers.text_reader import Reading
from vserve.server.text.model import TextModel

__all__ = ["byte_vocabulary"]
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THOUGHTS = {"open": "<think>", "close_pattern": r"</think>\s*"}
TEXT = {"close_pattern": r"<\|end\|>\s*"}
IN_TAGS = {
    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
    "value_parser": {"name": "text"},
}


def spec(**fields: Any) -> dict[str, Any]:
    return {"version": 1, "defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>", "fields": fields}


def calls(opens: str, closes: str, **more: Any) -> dict[str, Any]:
    return {"open_pattern": opens, "close_pattern": closes, "repeats": True, "transform": FUNCTION, **more}


SPECS: dict[str, dict[str, Any]] = {
    "json": spec(
        thinking=THOUGHTS,
        tool_calls={
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        content=TEXT,
    ),
    "tags": spec(
        reasoning_content=THOUGHTS,
        tool_calls=calls(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>", r"</tool_call>\s*", content="xml-inline", content_args=IN_TAGS
        ),
        content=TEXT,
    ),
    "lines": spec(
        reasoning=THOUGHTS,
        tool_calls=calls(
            r"<tool_call>(?P<name>\S+)\n?", r"</tool_call>\s*", content="xml-inline",
            content_args={
                "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*\n<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
        ),
        content={"close_pattern": r"<\|user\|>\s*|$"},
    ),
    "channels": spec(
        thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        content={"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        tool_calls=calls(
            r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>", r"<\|call\|>", content="json"
        ),
    ),
    "list": spec(
        thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        content={"open": "<|START_TEXT|>", "close": "<|END_TEXT|>"},
        tool_calls={
            "open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    ),
    "bare keys": spec(
        thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
        tool_calls=calls(
            r"<\|tool_call>call:(?P<name>\w+)", r"<tool_call\|>", content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        content={"close": ["<turn|>", "<eos>"]},
    ),
    "blocks": spec(
        thinking={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|thinking\|>", "close": "<|end|>", "repeats": True, "join": "",
            "content_args": {"strip": False},
        },
        content={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|text\|>", "close": "<|end|>", "repeats": True, "join": "",
            "content_args": {"strip": False},
        },
        tool_calls={
            "open_pattern": r"(?:<\|message\|>)?[^<]*<\|invoke\|>", "close": "<|end|>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
    ),
    "at once": spec(
        thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        content={"open": "<response>\n", "close_pattern": r"\n?</response>"},
        tool_calls={
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    ),
    "Python": spec(
        thinking=THOUGHTS,
        tool_calls=calls(
            r"(?:<\|call\|>\[|,\s*)(?P<name>\w+)\(", r"\)(?:\]<\|called\|>)?\s*", content="xml-inline",
            content_args={
                "tag_pattern": r"(?P<key>\w+)=(?P<value>'[^']*'|\[[^\]]*\]|[^,)]*)",
                "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
            },
        ),
        content=TEXT,
    ),
}  # fmt: skip
TOOLS = {
    "search": '{"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}}',
    "get_weather": '{"type": "object", "properties": {"city": {"type": "string"}}}',
}
Q = '{"q": "a", "n": 5}'
# (name, what the model wrote, reasoning, content, calls)
RECORDED: list[tuple[str, str, str, str, list[tuple[str, str]]]] = [
    ("json", "<think>\nHm.\n</think>\n\nYes. <b>no tag</b>", "Hm.", "Yes. <b>no tag</b>", []),
    ("json", f'<think>Hm.</think>I look.\n\n<tool_call>\n{{"name": "search", "arguments": {Q}}}\n</tool_call>', "Hm.", "I look.", [("search", Q)]),
    ("json", f'<tool_call>\n{{"name": "search", "arguments": {Q}}}\n</tool_call>\n<tool_call>\n{{"name": "get_weather", "arguments": {{}}}}\n</tool_call>', "", "", [("search", Q), ("get_weather", "{}")]),
    ("tags", "<think>\nHm.\n</think>\n\n<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>", "Hm.", "", [("search", Q)]),
    ("tags", "Now.\n<tool_call>\n<function=get_weather>\n</function>\n</tool_call>", "", "Now.", [("get_weather", "{}")]),
    ("lines", "<think>Hm.</think>\n<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>a</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", "Hm.", "", [("search", Q)]),
    ("channels", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.", []),
    ("channels", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{Q}<|call|>", "Hm.", "", [("search", Q)]),
    ("list", f'<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "search", "parameters": {Q}}},\n    {{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {{}}}}\n]<|END_ACTION|>', "Hm.", "", [("search", Q), ("get_weather", "{}")]),
    ("list", "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes.", []),
    ("bare keys", '<|channel>thought\nHm.\n<channel|><|tool_call>call:search{q:<|"|>a<|"|>,n:5}<tool_call|>', "Hm.", "", [("search", Q)]),
    ("bare keys", "Yes.<turn|>", "", "Yes.", []),
    ("blocks", f'<|thinking|>Hm. <|end|><|message|>me<|thinking|>Hm.<|end|><|message|>me<|text|>Yes. <|end|><|message|>me<|text|>No.<|end|><|message|>me<|invoke|>{{"name": "search", "args": {Q}}}<|end|>', "Hm. Hm.", "Yes. No.", [("search", Q)]),
    ("at once", "Hm.\n</think>\n\n<response>\nYes.\n</response>", "Hm.", "Yes.", []),
    ("at once", f'Hm.</think>\n<tool_call>\n{{"name": "search", "arguments": {Q}}}\n</tool_call>', "Hm.", "", [("search", Q)]),
    ("Python", "<think>Hm.</think><|call|>[search(q='a', n=5), get_weather(city='b, c')]<|called|>", "Hm.", "", [("search", Q), ("get_weather", '{"city": "b, c"}')]),
]  # fmt: skip


def read(made: Formats, opened: bool | None = None) -> Any:
    def reading(reader: Reader) -> Reading[None]:
        if made.reasoning is not None:
            yield from made.reasoning.read(
                reader, True if opened is None and made.reasoning.at_once else opened, made.tools
            )
        if made.tools is not None:
            yield from made.tools.read(reader)

    return reading


def in_pieces(text: str, made: Formats, size: int, *, streams: bool = False, opened: bool | None = None) -> list[Part]:
    reader = Reader(read(made, opened), TOOLS, streams=streams)
    parts = [part for at in range(0, len(text), size) for part in reader.feed(text[at : at + size])]
    return parts + reader.finish()


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "called"), RECORDED)
@pytest.mark.parametrize("streams", [False, True])
def test_answers_at_every_cut(name: str, text: str, reasoning: str, content: str, called: Any, streams: bool) -> None:
    made = formats(read_template(SPECS[name]))
    for size in (*range(1, 8), len(text)):
        found = told(in_pieces(text, made, size, streams=streams))
        assert found[:2] == (reasoning, content), size
        assert [(one, json.loads(said)) for one, said in found[2]] == [(one, json.loads(said)) for one, said in called]


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "called"), RECORDED)
def test_transformers_reads_the_same(name: str, text: str, reasoning: str, content: str, called: Any) -> None:
    parsing = pytest.importorskip("transformers.utils.chat_parsing", reason="transformers 5.13 or later")
    tools = [
        {"type": "function", "function": {"name": one, "parameters": json.loads(said)}} for one, said in TOOLS.items()
    ]
    message = parsing.parse_response(text, SPECS[name], prefix="", tools=tools)
    found = [one["function"] for one in message.get("tool_calls", [])]
    assert [(one["name"], one["arguments"]) for one in found] == [(one, json.loads(said)) for one, said in called]
    assert message.get("content", "") == content
    assert (
        next((said for key, said in message.items() if key in ("thinking", "reasoning", "reasoning_content")), "")
        == reasoning
    )


def test_what_transformers_would_lose() -> None:
    """A call's closing within its texts, calls of tools that nobody offers, answers without any region."""
    tags, listed = (formats(read_template(SPECS[name])) for name in ("tags", "list"))
    text = "<tool_call>\n<function=search>\n<parameter=q>\n</tool_call> x\n</parameter>\n</function>\n</tool_call>"
    assert told(in_pieces(text, tags, 3))[2] == [("search", '{"q": "</tool_call> x"}')]
    text = '<tool_call>\n{"name": "search", "arguments": {"q": "</tool_call>"}}\n</tool_call>'
    assert told(in_pieces(text, formats(read_template(SPECS["json"])), 3))[2] == [("search", '{"q": "</tool_call>"}')]
    text = "<tool_call>\n<function=steal>\n</function>\n</tool_call>"
    assert told(in_pieces(text, tags, 3)) == ("", text, [])
    assert told(in_pieces("Just text. <b>", listed, 3)) == ("", "Just text. <b>", [])
    cut = "<tool_call>\n<function=search>\n<param"
    assert told(in_pieces(cut, tags, 3)) == ("", cut, [])
    broken = '<tool_call>\n{"name": "search", "arguments": '
    assert told(in_pieces(broken, formats(read_template(SPECS["json"])), 3)) == ("", broken, [])


def test_text_goes_out_as_it_comes() -> None:
    made = formats(read_template(SPECS["tags"]))
    reader = Reader(read(made), TOOLS)
    assert [part.text for part in reader.feed("a < b")] == ["a < b"]  # type: ignore[union-attr]
    assert reader.feed(" <tool") == [] and [part.text for part in reader.feed("s>.")] == [" <tools>."]  # type: ignore[union-attr]
    reader = Reader(read(formats(read_template(SPECS["channels"]))), TOOLS, streams=True)
    assert [
        type(part) for part in reader.feed('<|channel|>commentary to=functions.search json<|message|>{"q": "a')
    ] == [CallBegin, CallArguments]
    assert reader.feed("b") == [CallArguments(0, "b")]


def test_reasoning_that_the_prompt_opened() -> None:
    made = formats(read_template(SPECS["tags"]))
    assert told(in_pieces("Hm.\n</think>\nYes.", made, 2, opened=True)) == ("Hm.", "Yes.", [])
    assert told(in_pieces("Yes.", made, 2, opened=False)) == ("", "Yes.", [])


BROKEN = [
    ([], "is no object"),
    ({"fields": {}}, "1 to 16 fields"),
    ({**SPECS["json"], "version": 2}, "version is '2'"),
    ({**SPECS["json"], "more": 1}, "'more' is not known"),
    (spec(content={}, other={}), "neither 'open' nor 'open_pattern'"),
    (spec(content={"open": "a", "open_pattern": "b"}), "'open' and 'open_pattern'"),
    (spec(content={"open": [""]}), "none of them empty"),
    (spec(content={"open": "a", "close_pattern": "b*"}), "nothing at all"),
    (spec(content={"open": "a", "close_pattern": "(b"}), "not closed"),
    (spec(content={"open": "a", "close_pattern": r"(b)\1"}), r"'\1' is not supported"),
    (spec(content={"open": "a", "close_pattern": "(?:" * 99}), "too deeply"),
    (spec(content={"open": "a", "close_pattern": "(?:(?:a{99}){99}){99}"}), f"more than {MAX_STEPS} steps"),
    (spec(content={"open": "a", "close_pattern": "a{999}"}), "counts above"),
    (spec(content={"content": "json"}), "must be text"),
    (spec(tool_calls={"content": "json"}), "nothing opens a call"),
    (spec(tool_calls={"open": "a", "content": "kv-lines"}), "json and xml-inline"),
    (spec(tool_calls={"open": "a", "content": "json", "transform": {"name": "{who}", "arguments": "{content}"}}), "nothing gives"),
    (spec(tool_calls={"open": "a", "content": "json", "transform": {"name": "x {content}"}}), "does not say where"),
    (spec(tool_calls=calls("a(?P<name>b)", "c", content="xml-inline", content_args={"tag_pattern": "(?P<key>a)"})), "groups key and value"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "clause"), BROKEN)
def test_what_is_wrong_is_said(given: Any, clause: str) -> None:
    with pytest.raises(TemplateError) as caught:
        read_template(given)
    assert clause in str(caught.value)


def test_reasoning_that_looks_ahead_is_left_to_the_chat_template() -> None:
    template = read_template(spec(thinking={"open_pattern": r"(?=[\s\S]*?</think>)", "close": "</think>"}, content={}))
    assert template.reasoning is None and "'(?=[' is not supported" in template.unread


# ---- grammars ----

CHAT = {  # how the chat template writes calls
    "json": '<tool_call>\n{"name": "KqtoolKz", "arguments": {"a": "b"}}\n</tool_call>',
    "tags": "<tool_call>\n<function=KqtoolKz>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>",
    "Python": "<|call|>[KqtoolKz(a='b')]<|called|>",
}


@pytest.mark.parametrize("mode", ["auto", "required", "named"])
@pytest.mark.parametrize(("name", "shown"), [*((name, False) for name in SPECS), *((name, True) for name in CHAT)])
def test_what_a_grammar_lets_out_is_read(name: str, mode: str, shown: bool, byte_vocabulary: Any) -> None:
    """Random outputs that follow the grammar which the template makes."""
    written = (CHAT[name], "\n".join([CHAT[name]] * 2)) if shown else ("", "")
    format = formats(read_template(SPECS[name]), *written, "KqtoolKz").tools
    assert format is not None
    tools = [{"type": "function", "function": {"name": called, "parameters": CALLS[called]}} for called in CALLS]
    use = tool_use(tools, {"type": "function", "function": {"name": "search"}} if mode == "named" else mode, None)
    assert use is not None
    constraint = use.constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    grammar = BACKENDS[backend](byte_vocabulary, payload)
    for seed in range(6):
        rng = random.Random(seed)
        matcher = GrammarMatcher(byte_vocabulary, grammar, constraint.markers)
        text = b""
        if mode == "auto":
            text = b"Well. " + (format.trigger or format.begin("search")).encode()
        assert all(matcher.accept(1 + byte) for byte in text)
        row = np.zeros(-(-byte_vocabulary.size // 32), dtype=np.int32)
        for _ in range(300):
            matcher.fill(row)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: byte_vocabulary.size])
            if 0 in allowed and (len(allowed) == 1 or len(allowed) > 100 or rng.random() < 0.5):
                break
            token = int(rng.choice(allowed[allowed > 0]))
            assert matcher.accept(token)
            text += TOKENS[token]
        reader = Reader(format.read, {tool.name: tool.schema for tool in use.callable})
        parts = reader.feed(text.decode(errors="replace")) + reader.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        given = [part.text for part in parts if isinstance(part, CallArguments)]
        assert names and len(names) == len(given), (text, parts)
        for called, said in zip(names, given, strict=True):
            jsonschema.validate(json.loads(said), CALLS[called])


def test_calls_are_spelled_as_the_chat_template_does() -> None:
    format = formats(read_template(SPECS["tags"]), CHAT["tags"], "\n".join([CHAT["tags"]] * 2), "KqtoolKz").tools
    assert format is not None and format.separator == "\n"
    assert format.begin("f") == "<tool_call>\n<function=f>\n" and format.end == "</function>\n</tool_call>"


# ---- patterns ----

PATTERNS = [
    r"<a>\s*<b=(?P<n>[^\n>]+)>", r"(?:<\||,\s*)(?P<n>\w+)\(", r"a(?:b|c)*?d", r"(?P<n>a+?)(b{2,3}|c)?x", r"(?:aa|a)(?P<n>b?)c",
    r"[^a]*b", r"\w+?:.*?a", r"[\]\w-]+\x62", r"a|ab", r"\.\.|[.]a",
]  # fmt: skip


@given(st.sampled_from(PATTERNS), st.text("abcdx:<>=|,( .\n]", max_size=14), st.integers(1, 5))
def test_patterns_find_what_pythons_find(source: str, text: str, size: int) -> None:
    search = Search(Pattern(source))
    for at in range(0, len(text), size):
        search.feed(text[at : at + size])
        if search.found is not None:
            break
    search.end()
    expected = re.compile(source, re.DOTALL).search(text)
    found = search.found
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.start, found.end) == expected.span()
        groups = {name: text[a:b] for name, (a, b) in found.groups.items()}
        assert groups == {name: said for name, said in expected.groupdict().items() if said is not None}
    together = find_all(Pattern(source), text)
    assert together is not None
    assert [(one.start, one.end) for one in together] == [
        one.span() for one in re.compile(source, re.DOTALL).finditer(text)
    ]


@pytest.mark.parametrize(
    "source",
    [r"(?P<n>a", "a)", "[a", "*a", r"(?!a)b", r"(?i)a", r"\b", "a++", "(?P<n>a)(?P<n>b)", 3000 * "a", r"[\d-a]"],
)
def test_patterns_that_are_not_read(source: str) -> None:
    with pytest.raises(PatternError):
        Pattern(source)


@pytest.mark.parametrize("source", [r"(?:a*)*b", r"(?:a?){60}b", r"(?:a|a)*b", r"(?:.*?,){20}x", r"a.*z|c"])
def test_the_work_of_a_pattern_grows_as_the_text_does(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted: no clock is asked."""
    steps = 0
    follow = Search._add

    def counted(self: Search, threads: Any, seen: set[int], *more: Any) -> bool:
        nonlocal steps
        before = len(seen)
        is_match = follow(self, threads, seen, *more)
        steps += 1 + len(seen) - before
        return is_match

    monkeypatch.setattr(Search, "_add", counted)
    pattern = Pattern(source)
    search = Search(pattern)
    search.feed(1500 * "a,c")
    assert steps <= 4500 * 3 * len(pattern.steps)


def test_a_template_that_wastes_its_reader_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each region ends where a longer one might: characters are looked at again, but not without end."""
    work = 0
    step = Search._step

    def counted(self: Search, char: str) -> None:
        nonlocal work
        before = self.work
        step(self, char)
        work += self.work - before

    monkeypatch.setattr(Search, "_step", counted)
    called = calls(r"T(?P<name>\w+)!", "U", content="json")
    made = formats(
        read_template(spec(thinking={"open_pattern": "a.*z|b", "close_pattern": "c.*z|d"}, tool_calls=called))
    )
    text = 1000 * "abcd"
    work = 0
    assert in_pieces(text, made, len(text)) and work < 2 * MAX_WORK * len(text)
    work = 0
    assert find_all(Pattern("a.*z|b"), text) is None and work < 2 * MAX_WORK * len(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["", "a", "{name}", "{content.a}", "(", "json"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["open", "close", "name", "a"]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@given(st.sampled_from(sorted(SPECS)), JSON, st.data())
def test_whatever_a_folder_says_it_is_a_template_or_a_clause(name: str, value: Any, data: st.DataObject) -> None:
    """Any part of a good one is replaced by anything."""
    given = json.loads(json.dumps(SPECS[name]))
    place = given
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            place[key] = value
            break
        place = place[key]
    try:
        made = formats(read_template(given))
    except TemplateError as error:
        assert str(error)
    else:
        in_pieces("<think>Hm.</think> Yes. <tool_call>search", made, 5)


# ---- served ----

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}@{{ call.function.name }}({{ call.function.arguments | tojson }});{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)  # no format that is known by itself
OWN = spec(
    thinking={"open": "~~", "close": "~~"},
    tool_calls=calls(r"@(?P<name>\w+)\(", r"\);", content="json"),
    content={},
)


def with_template(folder: Path, into: Path, given: Any, **options: Any) -> TextModel:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    middle = into / "middle"
    middle.mkdir()
    for file in folder.iterdir():
        (middle / file.name).write_bytes(file.read_bytes())
    (middle / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": given}))
    (into / "made").mkdir()
    return model_with(middle, into / "made", CHAT_TEMPLATE, (), False, **options)


def test_a_model_that_ships_one_is_read_by_it(
    engine: Any, model_folder: Path, tmp_path: Path, new_thinking: Any
) -> None:
    model = with_template(model_folder, tmp_path, OWN)
    format = model.formats.tools
    assert format is not None and format.name == "response_template" and format.begin("f") == "@f("
    assert model.formats.reasoning is not None
    text = '~~Well.~~ I look.\n@search({"q": "é"});@search({"q": "b"});'
    ids = [*model.tokenizer.encode(text, False), 2]
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "search"}}],
    }
    client = new_thinking(model).client
    whole = None
    for size in range(1, 8):
        engine.script = lambda request, size=size: [ids[at : at + size] for at in range(0, len(ids), size)]
        answer = client.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        said = [message["reasoning_content"], message["content"], [one["function"] for one in message["tool_calls"]]]
        whole = whole or said
        assert said == whole
        streamed = client.post("/v1/chat/completions", {**body, "stream": True})
        together, reason = put_together([json.loads(event[6:]) for event in streamed.text.split("\n\n")[:-2]])
        assert [
            together["reasoning"],
            together["content"],
            [one["function"] for one in together["tool_calls"]],
        ] == whole
        assert reason == "tool_calls"
    assert whole == [
        "Well.",
        "I look.",
        [{"name": "search", "arguments": '{"q": "é"}'}, {"name": "search", "arguments": '{"q": "b"}'}],
    ]


@pytest.mark.parametrize(
    ("given", "clause"),
    [
        ("text", "it is no object"),
        ({**OWN, "fields": {**OWN["fields"], "content": {"close_pattern": "("}}}, "a '(' is not closed"),
        ({**OWN, "fields": {**OWN["fields"], "tool_calls": calls(r"%(?P<name>\w+)\(", r"\);", content="json")}}, "does not read the calls"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_serve_is_said_and_left(
    given: Any, clause: str, model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        model = with_template(model_folder, tmp_path, given)
    lines = [record.message for record in caplog.records if "response_template" in record.message]
    assert len(lines) == 1 and clause in lines[0] and "is not used" in lines[0]
    assert model.formats == Formats(None, None)


def test_parsers_that_are_named_come_first(model_folder: Path, tmp_path: Path) -> None:
    model = with_template(model_folder, tmp_path, OWN, tool_call_parser="hermes")
    assert model.formats.tools is not None and model.formats.tools.name == "hermes" and model.formats.reasoning is None
