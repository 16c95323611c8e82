# ruff: noqa: E501, recorded texts are as long as they are
"""What the grammars of tool calls let out, by random walks through them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from vserve.engine.grammar.grammar import BACKENDS, GrammarMatcher
from vserve.server.grammar import tool_calls as tool_grammar
from vserve.server.grammar.compile import CompileError, compile
from vserve.server.grammar.constraint import Constraint
from vserve.server.grammar.lark import lark
from vserve.server.grammar.service import MAX_SOURCE
from vserve.server.grammar.tools import ToolUse, tool_use
from vserve.server.parsers import values
from vserve.server.parsers.formats import ToolFormat, known
from vserve.server.parsers.parts import CallArguments, CallBegin
from vserve.server.parsers.reader import Reader

CALLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
    },
    "search": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False},
}  # fmt: skip


MARKERS = [b"[TOOL_CALLS]", b"[ARGS]", b"<|python_tag|>", b"<|channel|>", b"<|message|>", b"<|end|>"]
TOKENS = [b"", *(bytes([byte]) for byte in range(256)), b"<tool_call>", *MARKERS]


@pytest.fixture(scope="module")
def byte_vocabulary() -> Iterator[Any]:
    from vserve.engine.grammar.grammar import Vocabulary, pack, prepare

    yield Vocabulary(prepare(pack(TOKENS, (0,), range(258, len(TOKENS)))))


@pytest.mark.parametrize("name", [format.name for format in known()[0]])
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_what_a_grammar_lets_out_is_read_as_valid_calls(
    name: str, mode: str, byte_vocabulary: Any, examples: Callable[[int], int]
) -> None:
    """Random outputs that follow the grammar of each format."""
    format = next(format for format in known()[0] if format.name == name)
    tools = [{"type": "function", "function": {"name": called, "parameters": CALLS[called]}} for called in CALLS]
    choice = {"type": "function", "function": {"name": "search"}} if mode == "named" else mode
    use = tool_use(tools, choice, None)
    assert use is not None
    constraint = use.constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    grammar = BACKENDS[backend](byte_vocabulary, payload)
    size = byte_vocabulary.size
    num_calls = 0
    for seed in range(12 if mode == "required" else examples(12)):  # only there a second call may come
        rng = random.Random(seed)
        matcher = GrammarMatcher(byte_vocabulary, grammar, constraint.markers)
        text = b""
        if mode == "auto":
            lead = format.trigger or format.opening + format.begin("search")
            # Some formats know calls at the beginning of a message only.
            text = lead.encode() if name in ("json", "llama3_json", "pythonic", "xlam") else b"Well. " + lead.encode()
        elif format.lead is not None:
            text = LEAD.encode()
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
            text += TOKENS[token]
        reader = Reader(format.read, {tool.name: tool.schema for tool in use.callable}, new_id=format.new_id)
        parts = reader.feed(text.decode(errors="replace")) + reader.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        arguments = [part.text for part in parts if isinstance(part, CallArguments)]
        assert names and len(names) == len(arguments), (text, parts)
        for called, said in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(said), CALLS[called])
        assert mode != "named" or names == ["search"]
        num_calls += len(names)
    assert mode != "required" or num_calls > 12 or name == "hermes", "never two calls"


LEAD = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>commentary"  # of channels
TAGS = {
    "glm45": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    "qwen3_coder": "<parameter={}>\n{}\n</parameter>\n",
    "seed_oss": "<parameter={}>{}</parameter>\n",
    "minicpm5": '<param name="{}">{}</param>\n',
    "minimax_m2": '<parameter name="{}">{}</parameter>\n',
    "hunyuan_v3": "<arg_key:opensource>{}</arg_key:opensource>\n<arg_value:opensource>{}</arg_value:opensource>\n",
}
DSML = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
K3 = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
_BEFORE_NAME = {"cohere": '{{"tool_call_id": "{}", ', "solar_open": "<|tool_call:begin|>a1b2c3d4e{}"}
_AFTER_NAME = {"kimi_k2": "0<|tool_call_argument_begin|>", "kimi_k3": '1"<|sep|>'}
M3 = "]<]minimax[>[<{0}>{1}]<]minimax[>[</{0}>"


def opened(format: ToolFormat) -> str:
    """What stands before the first call."""
    return format.opening + _BEFORE_NAME.get(format.name, "").format(0)


def separator(format: ToolFormat) -> str:
    return format.separator + _BEFORE_NAME.get(format.name, "").format(1)


def begun(format: ToolFormat, name: str) -> str:
    return format.begin(name) + _AFTER_NAME.get(format.name, "")


def written(format: ToolFormat, arguments: dict[str, str]) -> str:
    """Arguments, whose values are JSON, as the format has them."""
    if format.name in TAGS:
        tag = TAGS[format.name]
        return "".join(tag.format(name, one.strip('"') or "x") for name, one in arguments.items())
    if format.name.startswith("deepseek_v") and not format.end.startswith(("<｜tool", "\n```")):
        return "".join(
            DSML.format(key, "true" if one[:1] == '"' else "false", one.strip('"')) for key, one in arguments.items()
        )
    if format.name == "kimi_k3":
        kinds = ("string" if one[:1] == '"' else "array" if one[:1] == "[" else "number" for one in arguments.values())
        return "".join(
            K3.format(key, kind, one.strip('"')) for kind, (key, one) in zip(kinds, arguments.items(), strict=True)
        )
    if format.name == "minimax_m3":
        return "".join(M3.format(key, one.strip('"')) for key, one in arguments.items())
    if format.name == "gemma4":
        return ",".join(
            f"{key}:{one.replace(chr(34), chr(60) + '|' + chr(34) + '|' + chr(62))}" for key, one in arguments.items()
        )
    if format.name in ("pythonic", "lfm2", "olmo3"):
        return ", ".join(f"{name}={one}" for name, one in arguments.items())
    return "{" + ", ".join(f'"{name}": {one}' for name, one in arguments.items()) + "}"


def many(num_tools: int, num_parameters: int, about: str = "what it is for") -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "array", "items": {"type": "string"}},
    ]  # fmt: skip
    tools = []
    for i in range(num_tools):
        names = [f"t{i}_p{j}" for j in range(num_parameters)]
        properties = {name: kinds[j % len(kinds)] | {"description": about} for j, name in enumerate(names)}
        schema = {"type": "object", "properties": properties, "required": names[: num_parameters // 2]}
        tools.append({"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}})
    return tools


def use_of(tools: list[dict[str, Any]], mode: str) -> ToolUse:
    use = tool_use(tools, mode, None)
    assert use is not None
    return use


@pytest.mark.parametrize("format", known()[0], ids=lambda format: format.name)
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.slow
def test_the_arguments_of_two_hundred_tools_are_followed(format: Any, mode: str, byte_vocabulary: Any) -> None:
    constraint = use_of(many(200, 10, "what it is for, in many words " * 10), mode).constraints(format, None)[0]
    assert len(constraint.text) < MAX_SOURCE // 2, "what is written for people is part of it"
    backend, payload = compile(constraint, byte_vocabulary)
    grammar = BACKENDS[backend](byte_vocabulary, payload)
    called = opened(format) + begun(format, "tool_77")
    # Lists of MiniMax M3 are tags within tags, whose grammar says no more than where they end.
    for value, ends in (("[]", True), ("7", format.name == "minimax_m3")):
        said = {"t77_p0": '"x"', "t77_p1": "7", "t77_p2": '"b"', "t77_p3": value, "t77_p4": '""'}
        matcher = GrammarMatcher(byte_vocabulary, grammar, constraint.markers)
        text = called + written(format, said) + format.end
        text += separator(format) + begun(format, "tool_3")  # and another one
        assert all(matcher.accept(1 + byte) for byte in text.encode()) == ends, value


@pytest.mark.parametrize("format", known()[0], ids=lambda format: format.name)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_grammar_grows_as_its_tools_do(format: Any, mode: str) -> None:
    few, more = (len(use_of(many(n, 2), mode).constraints(format, None)[0].text) for n in (100, 300))
    assert more < 3.2 * few


@pytest.mark.parametrize("format", known()[0], ids=lambda format: format.name)
def test_an_unknown_type_is_refused_where_a_call_is_demanded(format: Any, byte_vocabulary: Any) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "str"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for mode in ("required", {"type": "function", "function": {"name": "f"}}):
        use = tool_use(tools, mode, None)
        assert use is not None
        for constraint in use.constraints(format, None):
            with pytest.raises(CompileError, match="the schema's 'type' 'str' must be of array, boolean"):
                compile(constraint, byte_vocabulary)
    use = tool_use(tools, "auto", None)
    assert use is not None
    compile(use.constraints(format, None)[-1], byte_vocabulary)


TEXTS = {
    "plain": {"type": "string"},
    "city": {"type": "string", "enum": ["Oslo", "</Rome>"]},
    "code": {"type": "string", "pattern": "^[A-Z]+/$", "maxLength": 4},
    "any": {"type": "string", "pattern": "b", "minLength": 2},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "choice": {"anyOf": [{"enum": ["Oslo"]}, {"type": "null"}]},
}


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("plain", 'it\'s "so", \n< </arg_valu </parameter\n é', True), ("plain", "", True),
        ("city", "Oslo", True), ("city", "</Rome>", True), ("city", "Paris", False),
        ("code", "AB/", True), ("code", "AB", False), ("code", "ABCD/", False), ("code", "ab/", False),
        ("any", "ab", True), ("any", "b", False), ("any", "aa", False),
        ("maybe", '"x"', True), ("maybe", "null", True), ("maybe", "x", True), ("maybe", "12", True),
        ("choice", "Oslo", True), ("choice", "null", True), ("choice", "Rome", False),
    ],
)  # fmt: skip
def test_texts_between_tags_are_followed(name: str, key: str, value: str, allowed: bool, byte_vocabulary: Any) -> None:
    format = next(format for format in known()[0] if format.name == name)
    schema = {"type": "object", "properties": {key: TEXTS[key]}, "required": [key]}
    use = use_of([{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}], "required")
    constraint = use.constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    matcher = GrammarMatcher(byte_vocabulary, BACKENDS[backend](byte_vocabulary, payload), constraint.markers)
    text = format.opening + format.begin("f") + TAGS[name].format(key, value) + format.end + format.closing
    assert (all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.accept(0)) == allowed
    if allowed:
        reader = Reader(format.read, {"f": use.tools[0].schema})
        arguments = [part.text for part in reader.feed(text) + reader.finish() if isinstance(part, CallArguments)]
        said = json.loads("".join(arguments))
        assert said == {key: None if value == "null" else value}
        jsonschema.validate(said, schema)


@pytest.mark.parametrize("name", TAGS)
def test_what_no_text_between_tags_follows(name: str, byte_vocabulary: Any) -> None:
    """A strict tool is refused; of another one any arguments are read, whatever they are called."""
    format = next(format for format in known()[0] if format.name == name)
    schema = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}, "required": ["day"]}
    tool = {"name": "f", "parameters": schema}
    use = use_of([{"type": "function", "function": tool | {"strict": True}}], "required")
    with pytest.raises(CompileError, match="'format' is not supported for texts in this model's tool calls"):
        compile(use.constraints(format, None)[-1], byte_vocabulary)
    constraint = use_of([{"type": "function", "function": tool}], "required").constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    matcher = GrammarMatcher(byte_vocabulary, BACKENDS[backend](byte_vocabulary, payload), constraint.markers)
    text = TAGS[name].format("day", "2026-01-01") + TAGS[name].format("x", "[1]")
    text = format.opening + format.begin("f") + text + format.end + format.closing
    assert all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.accept(0)


ANY_ORDER = {
    "type": "object",
    "properties": {
        "a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "boolean"},
        "d": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
    },
    "required": ["a", "b"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_key>b</arg_key><arg_value>1</arg_value></tool_call>", True),
        ("glm45", "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", True),
        ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>1</arg_value></tool_call>", False),
        ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>", False),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter><parameter=b>1</parameter></function></tool_call>", True),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=c>\nTrue\n</parameter>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx", True),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=d>\n[1]\n</parameter>\n<parameter=b>", True),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=d>\n[x", False),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=d>\nx [\n</parameter>\n<parameter=b>", True),
        ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=b>1</parameter>\n<parameter=c>False</parameter>\n<parameter=a>", True),
        ("gemma4", '<|tool_call>call:f{b:1,c:true,a:<|"|>x "y"<|"|>}<tool_call|>', True),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>}', False),
        ("gemma4", '<|tool_call>call:f{d:[1,<|"|>x<|"|>,{k:2}],b:1,', True),
        ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "12", "tool_name": "f", "parameters": {"a": "x", "b": 1}}\n]<|END_ACTION|>', True),
        ("pythonic", '[f(b=1, a="x")]', True),
        ("pythonic", "[f(b=1)", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_models_own_spelling_is_allowed(
    name: str, text: str, allowed: bool, mode: str, byte_vocabulary: Any
) -> None:
    """Line ends or none, arguments in any order but each once and none missing, optional texts without quotes."""
    format = next(format for format in known()[0] if format.name == name)
    use = use_of([{"type": "function", "function": {"name": "f", "parameters": ANY_ORDER}}], mode)
    constraint = use.constraints(format, None)[0]
    backend, payload = compile(constraint, byte_vocabulary)
    matcher = GrammarMatcher(byte_vocabulary, BACKENDS[backend](byte_vocabulary, payload), constraint.markers)
    assert all(matcher.accept(1 + byte) for byte in text.encode()) == allowed


def test_any_order_takes_few_rules_however_many_tools_there_are(byte_vocabulary: Any) -> None:
    format = next(format for format in known()[0] if format.name == "qwen3_coder")
    sizes = []
    for num_tools in (200, 400):
        constraint = use_of(many(num_tools, 6), "required").constraints(format, None)[0]
        sizes.append(len(lark(**json.loads(constraint.text))))
    assert sizes[1] < 2.2 * sizes[0] and sizes[1] - sizes[0] < sizes[0], "rules of orders are bounded in all"


def test_gpt_oss_may_think_before_it_calls_or_answers(byte_vocabulary: Any) -> None:
    format = next(format for format in known()[0] if format.name == "openai")
    tools = [{"type": "function", "function": {"name": "search", "parameters": CALLS["search"]}}]
    thought = "<|channel|>analysis<|message|>Hm, to=functions.search?<|end|><|start|>assistant"
    called = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"deep": true}'
    said = '<|channel|>final<|message|>{"a": 1}'
    content = Constraint("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    for mode, answer, text, allowed in (
        ("required", None, called, True),
        ("required", None, thought + called, True),
        ("required", None, thought + thought + called, True),
        ("required", None, thought + said, False),
        ("required", None, called.replace("true", "1"), False),
        ("auto", None, thought + called, True),
        ("auto", None, thought + "<|channel|>final<|message|>Hello", True),
        ("auto", None, thought + called.replace("true", "1"), False),
        ("auto", content, thought + called, True),
        ("auto", content, thought + said, True),
        ("auto", content, said.replace("1", "x"), False),
    ):
        constraint = use_of(tools, mode).constraints(format, answer)[0]
        backend, payload = compile(constraint, byte_vocabulary)
        matcher = GrammarMatcher(byte_vocabulary, BACKENDS[backend](byte_vocabulary, payload), constraint.markers)
        accepted = all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.accept(0)
        assert accepted == allowed, (mode, text)


def test_alternatives_that_refer_to_themselves_are_not_looked_through_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too many looks is unknown, wherever schemas are read so."""
    visits: list[str] = []
    target = values._target
    monkeypatch.setattr(values, "_target", lambda name, root: visits.append(name) or target(name, root))

    def looks() -> int:
        num, visits[:] = len(visits), []
        return num

    one = {"anyOf": [{"$ref": "#/$defs/a"}] * 200}
    root = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": one}}
    assert values.branches(one, root) == [] and looks() <= values._MAX_VISITS
    assert values.kinds(one, root) == set() and looks() <= values._MAX_VISITS
    assert values.value_of("2", one, root) == 2 and looks() <= values._MAX_VISITS
    tools = [{"type": "function", "function": {"name": "f", "parameters": root, "strict": True}}]
    start = time.thread_time()
    for format in known()[0]:
        for constraint in use_of(tools, "required").constraints(format, None):
            assert constraint.text
    assert time.thread_time() - start < 2
    few = {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}
    assert values.kinds(few, {"$defs": {"text": {"type": "string"}}}) == {"string", "null"}


def test_what_is_kept_of_tools_is_bounded() -> None:
    format = known()[0][0]
    kept = tool_grammar.kept

    def sized(name: str, count: int) -> ToolUse:
        schema = {"type": "object", "properties": {"x": {"enum": ["y" * 250_000]}}, "required": ["x"]}
        return use_of(
            [
                {"type": "function", "function": {"name": f"{name}_{i}", "parameters": schema, "strict": True}}
                for i in range(count)
            ],
            "required",
        )

    before = kept.num_bytes
    large = sized("large", 5).constraints(format, None)
    assert len(large[0].text) > tool_grammar.MAX_ENTRY and kept.num_bytes == before
    for i in range(80):
        use = sized(f"tool_{i}", 1)
        assert use.constraints(format, None)[0] is use.constraints(format, None)[0], "it is not kept"
        assert kept.num_bytes <= tool_grammar.MAX_KEPT


ANYTHING = '<|tool_call>call:f{city:<|"|>Oslo<|"|>,days:[1,{deep:true}],more:{a:<|"|>{b}<|"|>}}<tool_call|>'


@pytest.mark.parametrize("parameters", [{"type": "object"}, {"type": "object", "uniqueItems": True, "x": 1}])
def test_gemma_may_say_anything_to_a_tool_whose_schema_says_nothing(parameters: Any, byte_vocabulary: Any) -> None:
    format = next(format for format in known()[0] if format.name == "gemma4")
    use = use_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    constraint = use.constraints(format, None)[-1]
    backend, payload = compile(constraint, byte_vocabulary)
    for text in (ANYTHING, "<|tool_call>call:f{}<tool_call|>"):
        matcher = GrammarMatcher(byte_vocabulary, BACKENDS[backend](byte_vocabulary, payload), constraint.markers)
        assert all(matcher.accept(1 + byte) for byte in text.encode()), text
