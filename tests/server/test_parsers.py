# ruff: noqa: E501, recorded texts are as long as they are
"""Each format on recorded outputs: what comes out, however the text is cut, and whatever garbage it is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vserve.server.parsers.formats import ReasoningFormat, ToolFormat, choose, known
from vserve.server.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning, merged
from vserve.server.parsers.reader import Reader
from vserve.server.parsers.text_reader import Reading

TOOLS, THOUGHTS = ({format.name: format for format in formats} for formats in known())
NAMES = {
    "get_weather": '{"type": "object", "properties": {"city": {"type": "string"}}}',
    "search": '{"properties": {"q": {"type": "string"}, "n": {"type": "integer"}, "m": {"type": ["string", "null"]}}}',
}
MARKED = '{"q": "</tool_call></tool_calls><|tool_call_end|><｜tool▁call▁end｜>```<|call|><|end|>"}'
PARIS, NESTED = '{"city": "Paris"}', '{"q": "a \\"quoted\\" } ]", "n": [1, {"x": null}], "u": "é 👩‍🚀 \\u00e9"}'

Told = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls with their arguments


def reader(tools: ToolFormat | None, thoughts: ReasoningFormat | None = None, *, open=False, streams=False) -> Reader:
    def read(reader: Reader) -> Reading[None]:
        if thoughts is not None:
            yield from thoughts.read(reader, open, tools)
        if tools is not None:
            yield from tools.read(reader)

    return Reader(read, NAMES, streams=streams, new_id=tools.new_id if tools else lambda: "")


def told(parts: list[Part]) -> Told:
    """Checks that the parts come in an order that endpoints can rely on."""
    reasoning = content = ""
    calls: list[tuple[str, str]] = []
    ids = set()
    for part in parts:
        if isinstance(part, Reasoning):
            assert not content and not calls
            reasoning += part.text
        elif isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallBegin):
            assert part.index == len(calls)
            ids.add(part.id)
            calls.append((part.name, ""))
        else:
            assert isinstance(part, CallArguments) and part.index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = name, arguments + part.text
        assert not isinstance(part, Content | Reasoning | CallArguments) or part.text
    assert len(ids) == len(calls)
    return reasoning, content, calls


def run(pieces: list[str], *arguments: Any, **options: Any) -> Told:
    one = reader(*arguments, **options)
    parts = [part for piece in pieces for part in one.feed(piece)]
    return told(parts + one.finish())


def call(name: str = "get_weather", arguments: str = PARIS) -> tuple[str, str]:
    return name, arguments


# (tool format, what the model wrote, content, calls)
RECORDED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [call()]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [call()]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "search", "arguments": {NESTED}}}\n</tool_call>',
        "Let me see.", [call(), call("search", NESTED)],
    ),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\nDone.', "Done.", [call(arguments="{}")]),
    ("hermes", '<tool_call>{"name": "get_weather"}</tool_call>', "", [call(arguments="{}")]),
    ("hermes", '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>', "", [call("search", '{"q": 1}')]),
    ("hermes", '<tool_call>{"name": "search", "arguments": null}</tool_call>', "", [call("search", "{}")]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [call()]),  # it stopped there
    ("hermes", "a <tool_calls> b < c </tool_call> d <tool_cal", "a <tool_calls> b < c </tool_call> d <tool_cal", []),
    ("hermes", '<tool_call>{"name": "steal", "arguments": {}}</tool_call>', "", []),
    ("hermes", 'x <tool_call>{"name": "search", "arguments": {"a": }}</tool_call>', "", []),
    ("hermes", 'x <tool_call>{"name": "search", "arguments": [1]}</tool_call>', "", []),
    ("hermes", 'x <tool_call>{"name": "search", "arguments": {"a": "b', "", []),
    ("hermes", 'no <tool_call> no\n<tool_call>{"name": "search"}</tool_call>', "no <tool_call> no", [call("search", "{}")]),
    ("hermes", "  only text \n", "  only text \n", []),
    (
        "solar_open",
        '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}<|tool_call:end|>'
        f"<|tool_call:begin|>a1b2c3d4e6<|tool_call:name|>search<|tool_call:args|>{NESTED}<|tool_call:end|><|calls|>",
        "", [call(), call("search", NESTED)],
    ),
    (
        "minicpm5",
        'See.\n<function name="get_weather"><param name="city">Paris</param></function>\n<function name="search">'
        '<param name="q"><![CDATA[a < b </param>\nc]]></param><param name="n">5</param></function>',
        "See.", [call(), call("search", '{"q": "a < b </param>\\nc", "n": 5}')],
    ),
    (
        "kimi_k3",
        'See.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="search" index="2"<|sep|><|open|>json type="object"<|sep|>{"q": 1}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        "See.", [call(), call("search", '{"q": 1}')],
    ),
    ("gigachat31", f'Yes.<|function_call|>{{"name": "get_weather", "arguments": {PARIS}}}', "Yes.", [call()]),
    ("gigachat3", f'Yes.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {PARIS}}}', "Yes.", [call()]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [call()]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [call()]),
    (
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}; {{"name": "search", "parameters": {NESTED}}}',
        "", [call(), call("search", NESTED)],
    ),
    ("llama3_json", f'Sure: <|python_tag|>{{"name": "search", "parameters": {NESTED}}}', "Sure:", [call("search", NESTED)]),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '{"name": "search"}', '{"name": "search"}', []),
    ("llama3_json", '{"capital": "Paris"} is it', '{"capital": "Paris"} is it', []),
    ("llama3_json", '{"name": "search", "parameters": {"q', '{"name": "search", "parameters": {"q', []),
    ("llama3_json", '<|python_tag|>print("hi")', 'print("hi")', []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "", [call()]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}, "id": "abc123xyz"}}, '
        f'{{"name": "search", "arguments": {NESTED}}}]', "", [call(), call("search", NESTED)],
    ),
    ("mistral", f"I look.[TOOL_CALLS]get_weather[ARGS]{PARIS}", "I look.", [call()]),
    ("mistral_args", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]search[ARGS]{NESTED}", "", [call(), call("search", NESTED)]),
    ("mistral_args", f"[TOOL_CALLS]get_weather[CALL_ID]abc123xyz[ARGS]{PARIS}", "", [call()]),
    ("mistral_args", f"[TOOL_CALLS]get_weather{PARIS}", "", [call()]),
    ("mistral_args", f"[TOOL_CALLS]steal[ARGS]{PARIS}", f"[TOOL_CALLS]steal[ARGS]{PARIS}", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": 3}}]', ', {"name": 3}]', [call()]),
    ("pythonic", "[get_weather(city='Paris')]", "", [call()]),
    (
        "pythonic", "[get_weather(city='Paris'), search(q='it\\'s (a) ]', n=[1, -2.5, {'x': None}], ok=True, no=false)]",
        "", [call(), call("search", '{"q": "it\'s (a) ]", "n": [1, -2.5, {"x": null}], "ok": true, "no": false}')],
    ),
    ("pythonic", "<|python_start|>[get_weather(city='Paris')]<|python_end|>", "", [call()]),
    ("pythonic", '[search(q="\\ud83d\\ude00")]', "", [call("search", '{"q": "😀"}')]),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("pythonic", "[steal()]", "[steal()]", []),
    ("pythonic", "[search(__import__('os'))]", "[search(__import__('os'))]", []),
    ("pythonic", "[search(q=open('x'))]", "[search(q=open('x'))]", []),
    ("pythonic", "[search(q=1e999)]", "[search(q=1e999)]", []),
    ("pythonic", "[search(q='", "[search(q='", []),
    ("json", f'[{{"name": "get_weather", "parameters": {PARIS}}}]', "", [call()]),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", "", [call()]),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", "", [call()]),
    (
        "glm45",
        "I look.\n<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>12 </tool_call> <é>\n</arg_value>\n"
        "<arg_key>n</arg_key> <arg_value> 3 </arg_value>\n<arg_key>m</arg_key><arg_value>null</arg_value></tool_call>\n"
        "<tool_call>search\n<arg_key>m</arg_key><arg_value>7</arg_value><arg_key>x</arg_key><arg_value>[1, {\"a\": null}]"
        "</arg_value></tool_call>",
        "I look.", [call("search", '{"q": "12 </tool_call> <é>\\n", "n": 3, "m": null}'),
                    call("search", '{"m": "7", "x": [1, {"a": null}]}')],
    ),
    ("glm45", "<tool_call>search</tool_call>\nDone.", "Done.", [call("search", "{}")]),
    ("glm45", "<tool_call>search\n<arg_key>n</arg_key>\n<arg_value>many</arg_value></tool_call>", "", [call("search", '{"n": "many"}')]),
    ("glm45", "<tool_call>steal\n<arg_key>q</arg_key>\n<arg_value>x</arg_value></tool_call>", "", []),
    ("glm45", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>it stops", "", []),
    ("glm45", "no <tool_call> no\n<tool_call>search</tool_call>", "no <tool_call> no", [call("search", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=q>\nif a:\n    </function>\n\n</parameter>\n<parameter=n>\n4\n</parameter>"
        "\n</function>\n</tool_call>\n<tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>",
        "", [call("search", '{"q": "if a:\\n    </function>\\n", "n": 4}'), call()],
    ),
    ("qwen3_coder", "<tool_call>\n<function=search>\n</function>\n</tool_call>", "", [call("search", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>", "", []),
    # A model forgets a tag.
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\n/a\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>", "", [call("search", '{"q": "/a", "n": 2}')]),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\n</function>\n</parameter\n</function>\n</tool_call> So.", "So.", [call("search", '{"q": "</function>\\n</parameter"}')]),
    ("qwen3_coder", "<function=search>\n<parameter=q>\nx\n</function>", "", [call("search", '{"q": "x"}')]),
    ("qwen3_coder", "<tool_call><function=search><parameter=n>1</parameter></tool_call>", "", [call("search", '{"n": 1}')]),
    ("qwen3_coder", "Well.\n<function=search>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\nDone.", "Well.\nDone.", [call("search", '{"n": 1}')]),
    (
        "qwen3_coder", "<tool_call>\n<function=search>\n<parameter=n>\n1\n</parameter>\n</function>\n<function=get_weather>\n"
        "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>", "", [call("search", '{"n": 1}'), call()],
    ),
    ("qwen3_coder", "<function=steal>\n<parameter=q>\nx\n</parameter>\n</function>", "", []),
    ("qwen3_coder", "<tool_call>\n<function=search>\n<parameter=q>\n<parameter=q>\n<parameter=z>\n</parameter>\n</function>", "", [call("search", '{"q": "<parameter=q>\\n<parameter=z>"}')]),
    (
        "qwen3_coder", "<tool_call><function=search><parameter=n>1</parameter></function><function=steal></function></tool_call>",
        "<function=steal></function></tool_call>", [call("search", '{"n": 1}')],
    ),
    ("glm45", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>x\n<arg_key>n</arg_key>\n<arg_value>2</tool_call>\n", "", [call("search", '{"q": "x", "n": 2}')]),
    (
        "seed_oss", "<seed:tool_call>\n<function=search>\n<parameter=q>\nx</parameter>\n<parameter=n>2</parameter>\n</function>\n</seed:tool_call>"
        "\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        "", [call("search", '{"q": "\\nx", "n": 2}'), call()],
    ),
    (
        "minimax_m2", 'I look.\n<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">"a" <b></parameter>\n</invoke>\n<invoke name="get_weather">'
        '\n<parameter name="city">Paris</parameter>\n</invoke>\n</minimax:tool_call>', "I look.", [call("search", '{"q": "\\"a\\" <b>"}'), call()],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="steal"></invoke></minimax:tool_call>', "", []),
    (
        "deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="m" string="true">null</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "", [call("search", '{"m": "null", "n": 2}')],
    ),
    (
        "hunyuan_v3", "<tool_calls:opensource>\n<tool_call:opensource>search<tool_sep:opensource>\n<arg_key:opensource>q</arg_key:opensource>\n"
        "<arg_value:opensource>x</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>", "", [call("search", '{"q": "x"}')],
    ),
    (
        "minimax_m3", "A.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"search\">]<]minimax[>[<q>a <b>]<]minimax[>[</q>]<]minimax[>[<n>2]<]minimax[>[</n>"
        "]<]minimax[>[<x>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</x>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "A.", [call("search", '{"q": "a <b>", "n": 2, "x": [1]}')],
    ),
    ("minimax_m3", ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="search">]<]minimax[>[<q>a]<]minimax[>[</n>]<]minimax[>[</invoke>', "", []),
    (
        "gemma4", 'Well.<|tool_call>call:search{q:<|"|>a "b" {<tool_call|>}<|"|>,n:2,x:{k:None,l:[<|"|>a<|"|>,true]}}<tool_call|>'
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        "Well.", [call("search", '{"q": "a \\"b\\" {<tool_call|>}", "n": 2, "x": {"k": null, "l": ["a", true]}}'), call()],
    ),
    ("gemma4", "<|tool_call>call:search{q:1<tool_call|>", "", []),
    ("gemma4", "<|tool_call>call:search{q:[}]<tool_call|>", "", []),
    (
        "cohere", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "search", "parameters": {}}\n]<|END_ACTION|>', "", [call(), call("search", "{}")],
    ),
    ("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL> So.', "So.", [call()]),
    ("apertus", f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"search": {NESTED}}}]<|tools_suffix|>', "", [call(), call("search", NESTED)]),
    ("apertus", '<|tools_prefix|>[{"steal": {}}]<|tools_suffix|>', "", []),
    ("olmo3", "<function_calls>\nget_weather(city=\"Paris\")\nsearch(q='(\\n')\n</function_calls>\nSo.", "So.", [call(), call("search", '{"q": "(\\n"}')]),
    ("olmo3", "<function_calls>steal()</function_calls>", "", []),
    ("functionary_v31", f"<function=get_weather>{PARIS}</function><function=search>{{}}</function>", "", [call(), call("search", "{}")]),
    ("pythonic", "[\n  get_weather(\n    city='Paris',\n  ),\n]", "", [call()]),
    ("lfm2", "<|tool_call_start|>[search(q='two\nlines', n=[1, {\"k\": null}])]<|tool_call_end|>", "", [call("search", '{"q": "two\\nlines", "n": [1, {"k": null}]}')]),
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {}}}\n</tool_call>', "", [call("search", "{}")]),
    ("hermes", f'<tool_call>\n{{"name": "search", "arguments": {{}}}}\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', "", [call("search", "{}"), call()]),
    ("hunyuan_a13b", f'<tool_calls>\n{{"name": "search", "arguments": {{}}}}\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_calls>', "", [call("search", "{}"), call()]),
    ("xlam", f'<think>Hm.</think>[{{"name": "get_weather", "arguments": {PARIS}}}]', "<think>Hm.</think>", [call()]),
    (
        "kimi_k2", f"<|tool_call_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        "<|tool_call_section_end|>", "", [call()],
    ),
    (
        "kimi_k2", f"<|tool_calls_section_begin|>I look. <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        "<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "I look.", [call(), call("search", "{}")],
    ),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [call()]),
    (
        "deepseek_v31",
        f"So.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{MARKED}<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜> So it is.",
        "So. So it is.", [call("search", MARKED), call()],
    ),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{NESTED}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "", [call(), call("search", NESTED)],
    ),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{PARIS}", "", [call()]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>steal\n```json\n{}\n```<｜tool▁call▁end｜>", "", []),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><｜tool▁calls▁end｜>", "", []),
    ("deepseek_v31", "<｜tool▁calls▁begin｜> none", "", []),
    (
        "kimi_k2",
        f"I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{NESTED}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.", [call(), call("search", NESTED)],
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|> <|tool_call_begin|> search:0 <|tool_call_argument_begin|> {MARKED} <|tool_call_end|>",
        "", [call("search", MARKED)],
    ),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.search<|tool_call_argument_begin|>{}<|tool_call_end|>", "", []),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"a": ', "", []),
    (
        "openai",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>", "", [call()],
    ),
    (
        "openai",
        f" to=functions.search<|channel|>commentary json<|message|>{NESTED}<|end|><|start|>assistant<|channel|>final<|message|>Done.",
        "Done.", [call("search", NESTED)],
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.search<|channel|>commentary <|constrain|>json"
        f"<|message|>{NESTED}<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{PARIS}<|call|>",
        "I look.", [call("search", NESTED), call()],
    ),
    ("openai", "<|channel|>final<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.<|return|>", "One.\nTwo.", []),
    ("openai", "  only text \n", "  only text \n", []),
    ("openai", "<|channel|>commentary to=functions.steal<|message|>{}", "", []),
    ("openai", '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"a": ', "", []),
    ("openai", "<|channel|>" + 100 * "ab " + "<|message|>", "", []),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "search", "arguments": {NESTED}}}]', "", [call(), call("search", NESTED)]),
    ("granite", f'So: <tool_call> [{{"name": "get_weather", "arguments": {PARIS}}}]', "So:", [call()]),
    ("granite", '<|tool_call|>[{"name": "steal", "arguments": {}}]', "", []),
    ("granite", "<|tool_call|>", "", []),
    (
        "hunyuan_a13b",
        f'I look.\n<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "search", "arguments": {MARKED}}}]</tool_calls>',
        "I look.", [call(), call("search", MARKED)],
    ),
    ("hunyuan_a13b", f'<tool_calls>\n[\n{{"name": "get_weather", "arguments": {PARIS}}}\n]\n</tool_calls> Done.', "Done.", [call()]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "search", "arguments": {"a": 1}', "", []),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "search", "arguments": {NESTED}}}]', "", [call(), call("search", NESTED)]),
    ("phi4_mini_json", f'<|tool_call|>[{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}]<|/tool_call|>', "", [call()]),
    ("phi4_mini_json", "Python's functools are nice", "Python's functools are nice", []),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Paris"), search(q="<|tool_call_end|>")]<|tool_call_end|>Let me see.',
     "Let me see.", [call(), call("search", '{"q": "<|tool_call_end|>"}')]),
    ("lfm2", "I look. <|tool_call_start|>[get_weather(city='Paris')]", "I look.", [call()]),
    ("lfm2", "<|tool_call_start|>[steal()]<|tool_call_end|>", "", []),
    ("xlam", f'[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "search", "arguments": {NESTED}}}]', "", [call(), call("search", NESTED)]),
    ("xlam", f'I look:\n```json\n[{{"name": "get_weather", "arguments": {PARIS}}}]\n```\nSo.', "I look:\nSo.", [call()]),
    ("xlam", f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}]</tool_call>', "", [call()]),
    ("xlam", '[{"name": "Bob", "age": 3}]', '[{"name": "Bob", "age": 3}]', []),
    ("xlam", "```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED)
def test_recorded_outputs_at_every_cut(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    format = TOOLS[name]
    whole = run([text], format)
    if content or calls:
        assert whole == ("", content, calls)
    else:  # a call that is none is text, all of it
        assert whole == ("", text, [])
    assert run(list(text), format) == whole
    for cut in range(len(text)):
        assert run([text[:cut], text[cut:]], format) == whole
    streamed = run([text], format, streams=True)
    assert all(run([text[:cut], text[cut:]], format, streams=True) == streamed for cut in range(len(text)))
    assert run(list(text), format, streams=True) == streamed
    if calls and name != "mistral":
        assert streamed == whole
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


def test_arguments_stream_only_where_a_grammar_guards_them() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"q": "one two'
    assert run([text], TOOLS["hermes"]) == ("", text, [])
    assert run([text], TOOLS["hermes"], streams=True) == ("", "", [("search", '{"q": "one two')])
    one = reader(TOOLS["hermes"], streams=True)
    assert [type(part) for part in one.feed(text)] == [CallBegin, CallArguments]
    assert one.feed(" three") == [CallArguments(0, " three")]
    held = reader(TOOLS["hermes"])
    assert held.feed(text) == [] and [type(part) for part in held.feed('"}}')] == [CallBegin, CallArguments]


def test_text_is_not_held_back_without_need() -> None:
    for format in TOOLS.values():
        one = reader(format)
        assert one.feed("Hello wor") == [Content("Hello wor")]
        assert one.feed("ld, a <b> is") == [Content("ld, a <b> is")]
    llama = reader(TOOLS["llama3_json"])
    assert llama.feed('{"answ') == []
    assert llama.feed('er": [{"x') == [Content('{"answer": [{"x')]


THINKING = [
    # format, open, text, reasoning, content
    ("think", False, "<think>\nHm, 12.\n</think>\n\nIt is 12.", "Hm, 12.", "It is 12."),
    ("think", True, "Hm, 12.\n</think>\n\nIt is 12.", "Hm, 12.", "It is 12."),
    ("think", True, "\n\n</think>\n\nIt is 12.\n", "", "It is 12.\n"),
    ("think", False, "It is 12, not <think>13</think>.", "", "It is 12, not <think>13</think>."),
    ("think", True, "it never ends </thin", "it never ends </thin", ""),
    ("think", False, "  <think>a < b</think>c</think>", "a < b", "c</think>"),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("granite", False, "Here is my thought process:\nHm.\n\nHere is my response:\nYes.", "Hm.", "Yes."),
    ("granite", False, "Here's my thought process: Hm. Here's my response: Yes.", "Hm.", "Yes."),
    ("granite", False, "Here is my answer: yes", "", "Here is my answer: yes"),
    ("granite_tags", False, "<think>Hm.</think>\n<response>\nYes.\n</response>\n", "Hm.", "Yes."),
    ("hunyuan_a13b", False, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
    ("hunyuan_a13b", False, "<answer>\nYes, <b>it</b> is.\n</answer>", "", "Yes, <b>it</b> is."),
    ("hunyuan_a13b", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("hunyuan_a13b", True, "Hm. <answer>", "Hm. <answer>", ""),
    ("seed_oss", False, "<seed:think>\nHm.\n</seed:think>\nYes.", "Hm.", "Yes."),
    ("minimax_m3", False, "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("cohere", False, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
    ("cohere_text", True, "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes."),
    ("apertus", False, "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("hunyuan_v3", False, "<think:opensource>Hm.</think:opensource>Yes.", "Hm.", "Yes."),
    (
        "openai_gptoss", True,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.", "Yes.",
    ),
    (
        "openai_gptoss", True,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}", "Hm.\nSo.", "{}",
    ),
    ("openai_gptoss", True, "<|channel|>analysis<|message|>it never ends <|e", "it never ends <|e", ""),
    ("openai_gptoss", False, "It is 12.", "", "It is 12."),
    ("solar_open", False, "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>", "Hm.", "Yes."),
    ("solar_open", False, "<|content|>Yes.<|end|>", "", "Yes."),
    ("kimi_k3", True, "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>", "Hm.", "Yes."),
    ("kimi_k3", False, "Yes.<|close|>response<|sep|><|close|>message<|sep|>", "", "Yes."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "open", "text", "reasoning", "content"), THINKING)
def test_reasoning_at_every_cut(name: str, open: bool, text: str, reasoning: str, content: str) -> None:
    for tools in (None, TOOLS["hermes"]):
        assert run([text], tools, THOUGHTS[name], open=open) == (reasoning, content, [])
        for cut in range(len(text)):
            assert run([text[:cut], text[cut:]], tools, THOUGHTS[name], open=open) == (reasoning, content, [])


def test_tools_are_called_after_the_reasoning() -> None:
    written = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    text = f"<think>I could {written} here</think>\n\nWell.\n{written}"
    assert run(list(text), TOOLS["hermes"], THOUGHTS["think"]) == (
        f"I could {written} here", "Well.", [("search", "{}")],
    )  # fmt: skip


def test_calls_within_what_stands_around_an_answer() -> None:
    call = f'[{{"name": "get_weather", "arguments": {PARIS}}}]'
    for thoughts, tools, text in (
        (
            "hunyuan_a13b",
            "hunyuan_a13b",
            f"<think>Hm.</think>\n<answer>I look.\n<tool_calls>{call}</tool_calls>\n</answer>",
        ),
        ("hunyuan_a13b", "hunyuan_a13b", f"<think>Hm.</think><answer>I look.</answer><tool_calls>{call}</tool_calls>"),
        ("granite_tags", "granite", f"<think>Hm.</think><response>I look.</response><|tool_call|>{call}"),
        ("granite_tags", "granite", f"<think>Hm.</think><response>I look.<|tool_call|>{call}</response>"),
        ("granite", "granite", f"Here is my thought process: Hm. Here is my response: I look. <|tool_call|>{call}"),
    ):
        for cut in range(len(text)):
            told = run([text[:cut], text[cut:]], TOOLS[tools], THOUGHTS[thoughts])
            assert told == ("Hm.", "I look.", [("get_weather", PARIS)])


def test_a_list_of_calls_at_the_beginning_of_what_stands_around_an_answer() -> None:
    """As a grammar has it written where the template knows of no tools; a list that is no call, and a later one, is text."""
    written = f'[{{"name": "get_weather", "parameters": {PARIS}}}]'
    for begin, end, content, calls in (
        (written, "", "", [("get_weather", PARIS)]),
        (written, " So.", "So.", [("get_weather", PARIS)]),
        ("[1, 2]", " is a list.", "[1, 2] is a list.", []),
        ("I write ", written, f"I write {written}", []),
    ):
        for thought in ("", "<|START_THINKING|>Hm.<|END_THINKING|>"):
            text = f"{thought}<|START_RESPONSE|>{begin}{end}<|END_RESPONSE|>"
            for cut in range(len(text)):
                heard = run([text[:cut], text[cut:]], TOOLS["json"], THOUGHTS["cohere"])
                assert heard == ("Hm." if thought else "", content, calls), (cut, text)


def test_calls_of_gpt_oss_come_after_its_analysis() -> None:
    text = (
        "<|channel|>analysis<|message|>I could <b>look</b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{NESTED}<|call|>"
    )
    for cut in range(len(text)):
        told = run([text[:cut], text[cut:]], TOOLS["openai"], THOUGHTS["openai_gptoss"], open=True)
        assert told == ("I could <b>look</b>.", "I look.", [("search", NESTED)])
    assert run(list(text), TOOLS["openai"])[1:] == ("I could <b>look</b>.\nI look.", [("search", NESTED)])


def test_ids_of_kimi_are_the_models_own() -> None:
    written = "".join(
        f"<|tool_call_begin|>functions.{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for id in ("search:3", "get_weather:4", "search:3")
    )
    parts = reader(TOOLS["kimi_k2"]).feed(f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>")
    ids = [part.id for part in parts if isinstance(part, CallBegin)]
    assert ids == ["functions.search:3", "functions.get_weather:4", "functions.search:4"]


@pytest.mark.parametrize("open", [True, False])
def test_a_call_in_reasoning_that_never_ends_is_one(open: bool) -> None:
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    begin = "" if open else "<think>"
    for text, expected in {
        f"I look it up.\n{call}\n": ("I look it up.", "", [("search", "{}")]),
        f"{call}{call}": ("", "", [("search", "{}")] * 2),
        f"Hm. {call}</think>Yes.": (f"Hm. {call}", "Yes.", []),
        f"Hm. {call[:-30]}": (f"Hm. {call[:-30]}", "", []),
        f"Hm. {call.replace('search', 'other')} Hm.": (f"Hm. {call.replace('search', 'other')} Hm.", "", []),
        "<tool_call> a < b": ("<tool_call> a < b", "", []),
    }.items():
        whole = begin + text
        for cut in range(len(whole) + 1):
            assert run([whole[:cut], whole[cut:]], TOOLS["hermes"], THOUGHTS["think"], open=open) == expected
        assert run(list(whole), TOOLS["hermes"], THOUGHTS["think"], open=open) == expected


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<think>",
     "</think>", "[THINK]", "[/THINK]", "[", "]", "{", "}", "(", ")", '"', "'", ",", ";", ":", " ", "\n", "\\", "=", "x",
     "get_weather", "search", '"name": ', '"arguments": ', '"parameters": ', '{"name": "search", "arguments": {', "-1",
     "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=", "<parameter=", "</parameter>", "</function>",
     "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json", "```", "<｜tool▁call▁end｜>",
     "<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.search:0", "<|tool_call_end|>",
     "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "<|start|>", "assistant", "<|channel|>", "analysis",
     "final", "commentary to=functions.search", "<|constrain|>json", "<|message|>", "<|end|>", "<|call|>", "<answer>",
     "</answer>", "<tool_calls>", "</tool_calls>", "functools", "<|tool_call|>", "<|tool_call_start|>",
     "Here is my thought process:", "Here's my response:", '"search"', "search(", "q='", "null", "true", "é", "👩‍🚀", PARIS, NESTED]
)  # fmt: skip


@given(
    fragments=st.lists(FRAGMENTS, max_size=24),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    name=st.sampled_from(sorted(TOOLS)),
    thoughts=st.sampled_from([None, *THOUGHTS.values()]),
    open=st.booleans(),
    streams=st.booleans(),
)
def test_whatever_is_written_and_however_it_is_cut(
    fragments: list[str], cuts: list[int], name: str, thoughts: Any, open: bool, streams: bool
) -> None:
    text = "".join(fragments)
    options = {"open": open and thoughts is not None, "streams": streams}
    whole = run([text], TOOLS[name], thoughts, **options)
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert run(pieces, TOOLS[name], thoughts, **options) == whole
    assert run(list(text), TOOLS[name], thoughts, **options) == whole
    if not streams:
        for called, arguments in whole[2]:
            assert called in NAMES and isinstance(json.loads(arguments), dict)


@given(
    arguments=st.lists(
        st.dictionaries(st.text(max_size=8), st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
        ), max_size=4),
        min_size=1, max_size=3,
    ),
    name=st.sampled_from(
        ["hermes", "llama3_json", "mistral", "mistral_args", "json", "deepseek_v3", "deepseek_v31", "openai", "granite",
         "hunyuan_a13b", "phi4_mini_json", "xlam"]
    ),
    size=st.integers(1, 9),
    indent=st.sampled_from([None, 2]),
    streams=st.booleans(),
)  # fmt: skip
def test_what_a_format_writes_it_reads(
    arguments: list[Any], name: str, size: int, indent: int | None, streams: bool
) -> None:
    format = TOOLS[name]
    texts = [json.dumps(one, ensure_ascii=False, indent=indent) for one in arguments]
    calls = [format.begin("search") + text + format.end for text in texts]
    text = format.opening + format.separator.join(calls) + format.closing
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert run(pieces, format, streams=streams) == ("", "", [("search", text) for text in texts])


TEMPLATES = {
    "hermes": "{% if tools %}<tools>{{ tools }}</tools> within <tool_call></tool_call> XML tags{% endif %}",
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": "{{ '[AVAILABLE_TOOLS] ' }}{{ '[TOOL_CALLS] [' }}",
    "mistral_args": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "pythonic": "put it in the format of [func_name1(params_name1=params_value1)] {{ tools }}",
    "glm45": "<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>{{ tools }}",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + t.type + '<｜tool▁sep｜>' + t.name + '\\n```json\\n' }}",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>{{ tools }}",
    "kimi_k2": "<|tool_calls_section_begin|>{% for t in m.tool_calls %}<|tool_call_begin|>{{ t.id }}{% endfor %}",
    "openai": "{{ '<|start|>assistant<|channel|>commentary to=functions.' + name + ' <|constrain|>json<|message|>' }}",
    "granite": "respond with <|tool_call|> followed by a JSON list of the tools {{ tools }}",
    "hunyuan_a13b": "within <tool_calls></tool_calls> tags: <tool_calls>[{{ tools }}]</tool_calls>",
    "phi4_mini_json": "{{ message.content + '<|tool|>' + message.tools + '<|/tool|>' }}",
    "lfm2": "List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>",
    "seed_oss": "{{ '<seed:tool_call>' }}<function=example>{{ tools }}",
    "minimax_m2": "{{ tools }}<minimax:tool_call>\n<invoke name='f'>",
    "minimax_m3": "{{ tools }}{%- set ns = ']<]minimax[>[' -%}{{ ns ~ '<tool_call>' }}",
    "deepseek_v32": "{%- set dsml_token = '｜DSML｜' -%}{{ tools }}<{{ dsml_token }}function_calls><{{ dsml_token }}invoke name='",
    "deepseek_v4": "{%- set dsml_token = '｜DSML｜' -%}{{ tools }}<{{ dsml_token }}tool_calls><{{ dsml_token }}invoke name='",
    "hunyuan_v3": "{{ '<tool_sep{}>'.format(suffix) }}{{ '<arg_key{}>'.format(suffix) }}{{ tools }}",
    "gemma4": "{{ '<|tool_call>call:' + name + '{' }}{{ tools }}",
    "cohere": "{{ tools }}write <|START_ACTION|> followed by a list of tool calls with <|END_ACTION|>",
    "nemotron": "{{ '<TOOLCALL>[' }}{{ tools }}",
    "apertus": "{{ tools }}{%- set tools_prefix = '<|tools_prefix|>' -%}",
    "olmo3": "{{ tools }}{{ '<function_calls>' }}",
    "solar_open": "{{ tools }}{{ '<|tool_call:begin|>' + tool_call.id + '<|tool_call:name|>' }}",
    "minicpm5": "{{ tools }}{{ '<function name=\"' ~ tool_call.name ~ '\">' }}{{ '<param name=\"' ~ name ~ '\">' }}",
    "kimi_k3": "{{ tools }}{{- open_tag('call', [('tool', fn.name), ('index', loop.index)]) -}}",
    "gigachat31": '{{ tools }}{%- set add_tokens = namespace(function_call="<|function_call|>") -%}',
    "gigachat3": "{{ tools }}{{ render({'role': 'function call', 'content': call}) }}",
    "functionary_v31": "<|python_tag|><{start_tag}={name}>{parameters}{end_tag} where start_tag => `<function` <function=f>{}</function>{{ tools }}",
    "xlam": 'make calls in a single JSON array: [{"name": "tool_call_name", "arguments": {"a": "b"}}] {{ tools }}',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_says_which_format(name: str) -> None:
    chosen = choose("", TEMPLATES[name], "llama", "auto", "auto")
    assert chosen.tools is TOOLS[name] and chosen.reasoning is None


def test_what_is_chosen_otherwise() -> None:
    assert choose("", "{{ messages }}", "qwen3", "auto", "auto").tools is None  # no tools in it at all
    assert choose("", "{{ tools }}", "qwen3", "auto", "auto").tools is TOOLS["hermes"]
    assert choose("", "{{ tools }}<function_calls><invoke name=f>", "qwen3", "auto", "auto").tools is None
    assert choose("", "<tool_call>", None, "none", "auto").tools is None
    assert choose("", "{{ messages }}", None, "pythonic", "deepseek_r1").tools is TOOLS["pythonic"]
    assert choose("", "", None, "none", "deepseek_r1").reasoning is THOUGHTS["think"]
    assert choose("<think></think>", "", None, "auto", "none").reasoning is None
    assert choose("a.split('</think>')", "", None, "auto", "auto").reasoning is THOUGHTS["think"]
    assert choose("[THINK]", "", None, "auto", "auto").reasoning is THOUGHTS["mistral"]
    with pytest.raises(
        ValueError, match="--tool-call-parser is 'x': choose one of auto, none, apertus, cohere, deepseek_v3"
    ):
        choose("", "", None, "x", "auto")
    with pytest.raises(ValueError, match="--reasoning-parser is 'x': choose one of auto, none"):
        choose("", "", None, "auto", "x")


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "deepseek_v31", "glm45", "glm47", "granite", "hermes", "hunyuan_a13b", "jamba", "kimi_k2", "lfm2",
     "llama3_json", "llama4_json", "llama4_pythonic", "mistral", "openai", "phi4_mini_json", "pythonic", "qwen3_coder",
     "qwen3_xml", "xlam"],
)  # fmt: skip
def test_calls_have_vllms_names(name: str) -> None:
    assert choose("", "", None, name, "none").tools is not None


@pytest.mark.parametrize(
    "name",
    ["deepseek_r1", "deepseek_v3", "glm45", "granite", "hunyuan_a13b", "kimi_k2", "mistral", "openai_gptoss", "qwen3"],
)
def test_reasoning_has_vllms_names(name: str) -> None:
    assert choose("", "", None, "none", name).reasoning is not None


def test_the_template_says_how_the_model_reasons() -> None:
    for template, name in {
        "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'": "granite",
        "thoughts between <think></think> and your response between <response></response>": "granite_tags",
        "{{ content.split('<answer>')[-1] }}<think>\n\n</think>": "hunyuan_a13b",
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking }}": "openai_gptoss",
        "{{ content.split('</think>')[-1] }}": "think",
        "{{ '<think>' }}{{ '</think>' }}{{ '\\n<response>' ~ result ~ '</response>' }}": "think",  # MiniMax's results
        "{%- set think_begin_token = '<seed:think>' -%}": "seed_oss",
        "{%- set think_begin_token = '<mm:think>' -%}<response>": "minimax_m3",
        "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>": "cohere",
        "<|START_THINKING|><|END_THINKING|><|START_TEXT|>": "cohere_text",
        "{{ '<|channel>thought\\n' }}": "gemma4",
    }.items():
        assert choose(template, "", None, "auto", "auto").reasoning is THOUGHTS[name]


def test_ids_of_mistral_have_nine_characters() -> None:
    format = TOOLS["mistral"]
    assert len(format.new_id()) == 9 and format.new_id() != format.new_id()
    assert format.history_id is not None
    assert format.history_id("abc123XYZ") == "abc123XYZ"
    other = format.history_id("chatcmpl-tool-0123")
    assert other == format.history_id("chatcmpl-tool-0123") and len(other) == 9 and other.isalnum()


LONG = {  # what is written again and again, after what, and how often
    "text": ("hermes", "", "word ", 2000),
    "white space": ("hermes", "", " ", 6000),
    "reasoning": ("hermes", "<think>", "word ", 2000),
    "white space in reasoning": ("hermes", "<think>x", "\n", 6000),
    "guarded arguments": ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": "', "word ", 20_000),
    "arguments": ("hermes", '<tool_call>\n{"name": "search", "arguments": {"q": "', "word ", 20_000),
    "white space before arguments": ("hermes", '<tool_call>\n{"name": "search", "arguments": ', " ", 6000),
    "white space in a call": ("hermes", "<tool_call>", " ", 6000),
    "calls": ("hermes", "", '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>\n', 500),
    "calls in a list": ("json", "[", '{"name": "search", "parameters": {"q": "' + 400 * "x" + '"}}, ', 400),
    "what is no call": ("hermes", "", 400 * "x" + '<tool_call>{"name":', 2000),
    "a text between tags": ("glm45", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>", "word ", 12_000),
    "arguments between tags": ("glm45", "<tool_call>search\n", "<arg_key>q</arg_key>\n<arg_value>1</arg_value>\n", 500),
    "sections": (
        "deepseek_v31",
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        400,
    ),
    "channels": ("openai", "", "<|channel|>final<|message|>x<|end|><|start|>assistant", 400),
    "a Python call": ("pythonic", "[search(q='", "word ", 12_000),
}


@pytest.mark.parametrize("name", LONG)
def test_the_time_grows_as_the_answer_does(name: str, costs_at_most: Any) -> None:
    """Four times as much should take four times as long."""
    format, lead, piece, count = LONG[name]

    def seconds(count: int) -> float:
        started = time.thread_time()
        one = reader(TOOLS[format], THOUGHTS["think"], streams=name.startswith("guarded"))
        one.feed(lead)
        for _ in range(count):
            one.feed(piece)
        one.finish()
        return time.thread_time() - started

    assert costs_at_most(6.5, lambda: seconds(4 * count), lambda: seconds(count))


def test_what_continues_is_joined_once(costs_at_most: Any) -> None:
    parts: list[Part] = [Reasoning("a"), Reasoning("b"), Content("c"), CallBegin(0, "x", "f"), CallArguments(0, "{")]
    parts += [CallArguments(0, "}"), CallBegin(1, "y", "g"), CallArguments(1, "{}"), Content("d"), Content("e")]
    assert merged(parts) == [
        Reasoning("ab"), Content("c"), CallBegin(0, "x", "f"), CallArguments(0, "{}"), CallBegin(1, "y", "g"),
        CallArguments(1, "{}"), Content("de"),
    ]  # fmt: skip
    assert merged([]) == [] and merged(parts[:1]) == parts[:1]

    def seconds(count: int) -> float:
        pieces: list[Part] = [Content("word ")] * count
        started = time.thread_time()
        assert merged(pieces) == [Content("word " * count)]
        return time.thread_time() - started

    assert costs_at_most(7, lambda: seconds(200_000), lambda: seconds(50_000))
