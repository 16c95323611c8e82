"""The formats that a model's response_template makes: how its answers are read, and how grammars write its calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .formats import MAX_WHITESPACE, Formats, Grammar, ReasoningFormat, ToolFormat, json_arguments, members
from .gemma4 import bare_arguments
from .parts import CallArguments, CallBegin
from .pattern_nodes import instance, literals
from .reader import Reader
from .response_template import CallRegion, Region, ResponseTemplate, TemplateError, found_in
from .text_reader import Reading

NAME = "response_template"
MAX_CLOSES = 8  # of a call: what closes it may stand within its texts
MAX_AFTER = 200  # characters between arguments and what closes the call
_SAMPLE = "a_tool"


def read_answer(reader: Reader, opened: bool | None, template: ResponseTemplate, thinks: bool) -> Reading[None]:
    """`opened`: as ReasoningFormat has it; `thinks`: reasoning is told from content."""
    regions = [one for one in template.regions if thinks or one is not template.reasoning]
    closes = [template.rest.close] if template.rest is not None and template.rest.close is not None else []
    patterns = [one.open for one in regions if one.open is not None] + closes
    loses = False  # what is in no region is left out; before the first one it is the answer of a model that has none
    last: Region | None = None  # that has said something
    trail = ""  # white space that it ended with
    if opened and thinks and template.reasoning is not None:
        last, loses = template.reasoning, template.rest is None
        if last.opening:
            yield from reader.skip(last.opening.strip())
        trail = yield from _said(reader, last, "")
    while (found := (yield from reader.matched(patterns, "dropped" if loses else "said"))) is not None:
        if found.which == len(regions):  # the content ends, and may begin again
            reader.turn(thinking=False)
            continue
        region = regions[found.which]
        loses = template.rest is None
        if isinstance(region, CallRegion):
            if not (yield from _called(reader, region, found.groups)):
                reader.reject()
        elif region is template.reasoning or template.is_content(region):
            space = ""
            if last is region:
                space = trail + ("\n" if region.join is None else region.join)
            last = region
            trail = yield from _said(reader, region, space)
        else:
            yield from reader.matched([region.close] if region.close is not None else [], "dropped")


def _said(reader: Reader, region: Region, space: str) -> Reading[str]:
    """Reads a region of text, before which stands `space`. The white space that it ends with, where that counts."""
    reader.turn(thinking=region.name != "content", space=space, strips=region.strips or not space)
    yield from reader.matched([region.close] if region.close is not None else [], "said")
    trail = "" if region.strips else reader.space
    reader.turn(thinking=False)
    return trail


def _called(reader: Reader, region: CallRegion, groups: dict[str, str]) -> Reading[bool]:
    """Reads what follows the opening of calls. False: it is none."""
    if region.called[1:-1] in groups and not reader.knows(groups[region.called[1:-1]]):
        return False
    if region.streams:
        name = groups.get(region.called[1:-1])
        if name is None or not (yield from reader.arguments(name)):
            return False
        yield from _closed(reader, region)
        return True
    closes = [region.close] if region.close is not None else []
    text = ""
    for _ in range(MAX_CLOSES):
        found = yield from reader.matched(closes, "kept")
        text += reader.left if found is None else found.before
        is_cut = found is None and bool(closes) and region.tags is not None  # JSON says itself whether it is whole
        calls = None if is_cut else region.calls(text, groups, reader.tools)
        if calls is not None:
            if found is None:
                reader.read_rest()
            for name, arguments in calls:
                reader.call(name, arguments)
            return True
        if found is None:
            return False
        text += found.text
    return False


def _closed(reader: Reader, region: CallRegion) -> Reading[None]:
    """Reads what closes a call, or what there is of it where the answer ends before."""
    reader.mark()
    if region.close is None:
        return
    found = yield from reader.matched([region.close], "kept", MAX_AFTER)
    if found is None and region.closing.startswith(reader.left.strip()):
        reader.read_rest()
    reader.mark()


# ---- the formats ----


@dataclass(frozen=True)
class Spelling:
    """How calls are written: what stands around their arguments, and these."""

    begin: Callable[[str], str]
    end: str
    between: str  # two calls
    arguments: Callable[[dict[str, Any]], Grammar]
    sample: Callable[[str, str], str]  # arguments: a key and its text


def formats(
    template: ResponseTemplate,
    one: str = "",
    two: str = "",
    tool: str = "",
    special: Collection[str] = (),
    ends: Collection[str] = (),
) -> Formats:
    """Without calls or reasoning where the template has no such region. `one`, `two`: a call of `tool` as the chat
    template writes it, and two of them; empty where it writes none. `special`: the special tokens, `ends`: those that
    end an answer, which no grammar writes.

    Raises TemplateError where calls that are written as it has them are not read.
    """
    markers = tuple(token for token in sorted(special) if any(token in text for text in template.literals))
    calls = None if template.calls is None else _tool_format(template, template.calls, one, two, tool, markers, ends)
    thought, content = template.reasoning, next((one for one in template.regions if one.name == "content"), None)
    if thought is None:
        return Formats(calls)
    reasoning = ReasoningFormat(
        name=NAME,
        begin=thought.opening.strip(),
        end=thought.closing.strip(),
        at_once=thought.at_once,
        channels=None if calls is None else partial(_read_all, template=template),
        answer=None if calls is not None or content is None else (content.opening.strip(), content.closing.strip()),
        special=markers,
    )
    return Formats(calls, reasoning)


def _read_all(reader: Reader, opened: bool | None, template: ResponseTemplate) -> Reading[None]:
    yield from read_answer(reader, opened, template, thinks=True)


def _read_calls(reader: Reader, template: ResponseTemplate) -> Reading[None]:
    yield from read_answer(reader, None, template, thinks=False)


def _tool_format(
    template: ResponseTemplate,
    region: CallRegion,
    one: str,
    two: str,
    tool: str,
    markers: tuple[str, ...],
    ends: Collection[str],
) -> ToolFormat:
    spellings = filter(None, [_shown(region, one, two, tool), _made(region, False), _made(region, True)])
    found = (_format_of(template, region, _without(spelling, ends), markers) for spelling in spellings)
    if (format := next(filter(None, found), None)) is None:
        written = " … ".join(region.sample(_SAMPLE, False))
        raise TemplateError(f"calls that are written as it has them, {written[:200]!r}, are not read")
    return format


def _without(spelling: Spelling, ends: Collection[str]) -> Spelling:
    """Without a token that ends the answer."""
    end = spelling.end.rstrip()
    return next((replace(spelling, end=end.removesuffix(token)) for token in ends if end.endswith(token)), spelling)


def _format_of(
    template: ResponseTemplate, region: CallRegion, spelling: Spelling, markers: tuple[str, ...]
) -> ToolFormat | None:
    """None: what is spelled so is not read."""
    assert region.open is not None
    begun = literals(region.open.node)[:1]
    format = ToolFormat(
        name=NAME,
        source=template.source,
        read=partial(_read_calls, template=template),
        begin=spelling.begin,
        end=spelling.end,
        separator=spelling.between,
        trigger=begun[0] if begun and spelling.begin("a").startswith(begun[0]) else None,
        arguments=spelling.arguments,
        markers=markers,
    )
    call = spelling.begin(_SAMPLE) + spelling.sample("query", "a word") + spelling.end
    for count in (1, 2):
        reader = Reader(format.read, {_SAMPLE: '{"properties": {"query": {"type": "string"}}}'})
        parts = reader.feed(spelling.between.join([call] * count)) + reader.finish()
        names = [part.name for part in parts if isinstance(part, CallBegin)]
        given = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
        is_all = all(isinstance(part, CallBegin | CallArguments) for part in parts)
        if not is_all or names != [_SAMPLE] * count or given != [{"query": "a word"}] * count:
            return None
    return format


def _made(region: CallRegion, is_loose: bool) -> Spelling:
    """In the shortest form that the region may have, or with line ends (`is_loose`)."""
    behind = region.sample("", is_loose)[1]
    if region.tags is not None:
        tag = instance(region.tags.node, {"key": "\0", "value": "\1"}, is_loose)
        before, _, rest = tag.partition("\0")
        sign, _, after = rest.partition("\1")
        return _in_tags(region, lambda name: region.sample(name, is_loose)[0], before, sign, after, "", behind)
    return _in_json(region, lambda name: region.sample(name, is_loose)[0], behind, "")


def _shown(region: CallRegion, one: str, two: str, tool: str) -> Spelling | None:
    """As the chat template writes them. None: it writes none that the region reads."""
    if (call := _divided(region, one, tool)) is None:
        return None
    between = ""
    if (first := _divided(region, two, tool)) is not None and region.open is not None:
        second = found_in(region.open, two, first.end)
        between = two[first.end : second[0]] if second is not None else ""
    if between.strip():
        return None
    text = one[call.begun : call.closed]
    opening, closing = one[call.start : call.begun], one[call.closed : call.end]

    def begin(before: str) -> Callable[[str], str]:
        return lambda name: before.replace(tool, name)

    if region.tags is not None:
        found = region.tagged(text)
        if not found:
            return None
        (key, key_end), (value, value_end) = found[0].groups["key"], found[0].groups["value"]
        before, sign, after = (
            text[found[0].start : key], text[key_end:value], text[value_end : found[0].end]
        )  # fmt: skip
        head, tail = text[: found[0].start], text[found[-1].end :]
        return _in_tags(region, begin(opening + head), before, sign, after, between, tail + closing)
    if region.quotes and region.bare_keys:
        return _in_json(region, begin(opening), closing, between)
    decoder = json.JSONDecoder()
    for at in [i for i, char in enumerate(text) if char == "{"][:MAX_CLOSES]:
        try:
            value, end = decoder.raw_decode(text, at)
        except ValueError:
            continue
        if value == json.loads(call.arguments):
            return _in_json(region, begin(opening + text[:at]), text[end:] + closing, between)
    return None


@dataclass(frozen=True)
class _Divided:
    """Where a call stands in a text."""

    start: int
    begun: int  # what opened it has ended
    closed: int  # what closes it begins
    end: int
    arguments: str


def _divided(region: CallRegion, text: str, tool: str) -> _Divided | None:
    if region.open is None or (opened := found_in(region.open, text)) is None:
        return None
    start, begun, groups = opened
    at = begun
    for _ in range(MAX_CLOSES):
        closed = None if region.close is None else found_in(region.close, text, at)
        at, end = (len(text), len(text)) if closed is None else closed[:2]
        if (calls := region.calls(text[begun:at], groups, {tool: "{}"})) is not None:
            return _Divided(start, begun, at, end, calls[0][1])
        if closed is None:
            return None
        at = end
    return None


def _in_json(region: CallRegion, begin: Callable[[str], str], end: str, between: str) -> Spelling:
    if not region.bare_keys or not region.quotes or region.quotes[0][0] != region.quotes[0][1]:
        return Spelling(begin, end, between, json_arguments, lambda key, text: json.dumps({key: text}))
    quote = region.quotes[0][0]
    return Spelling(
        begin=lambda name: begin(name) + "{",
        end="}" + end,
        between=between,
        arguments=partial(bare_arguments, quote=quote),
        sample=lambda key, text: f"{key}:{quote}{text}{quote}",
    )


def _in_tags(
    region: CallRegion, begin: Callable[[str], str], before: str, sign: str, after: str, between: str, tail: str
) -> Spelling:
    """Raises TemplateError where nothing ends a text, and nothing stands around it."""
    end = tail.lstrip()
    grammar: Grammar = {
        "type": "keywords", "is_bare": True, "exact": True, "before": before, "max_whitespace_cnt": MAX_WHITESPACE,
    }  # fmt: skip
    if not after:
        if not region.quotes:
            raise TemplateError("its 'tag_pattern' has nothing that ends a text")
        opens, closes = region.quotes[0]
        grammar |= {"signs": [sign + opens, sign], "after": closes, "after_others": "", "separator": ", "}

        def quoted(schema: dict[str, Any]) -> Grammar:
            return grammar | members(schema)

        return Spelling(begin, end, between, quoted, lambda key, text: f"{before}{key}{sign}{opens}{text}{closes}")
    rest = tail[: len(tail) - len(end)]
    around = "\n" if sign.endswith("\n") and after.startswith("\n") else ""
    grammar |= {
        "signs": [sign.removesuffix(around)] * 2, "around": around, "after": after.removeprefix(around), "rest": rest,
        "separator": "",
    }  # fmt: skip

    def arguments(schema: dict[str, Any]) -> Grammar:
        any_key = not schema.get("properties") and schema.get("additionalProperties") is not False
        return grammar | members(schema) | {"any": any_key}

    return Spelling(begin, end, between, arguments, lambda key, text: f"{before}{key}{sign}{text}{after}{rest}")
