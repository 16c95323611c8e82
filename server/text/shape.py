"""Messages and tools as one model's template can take them: nothing that was said is lost on the way to the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from .capabilities import Capabilities

Message = dict[str, Any]

NOTHING = "…"  # said where somebody's turn has to be
THOUGHTS = ("reasoning", "reasoning_content", "thinking")
_RESULTS = ("tool", "function")
_RULES = ("system", "developer")


def shape(messages: list[Message], can: Capabilities, *, continued: bool = False) -> list[Message]:
    """The same conversation. `continued`: the last message is to be gone on with, so it stays the last, as one text.

    What is taken as it is stays the same object.
    """
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    by_old_names = not can.function_call and any(
        "function_call" in one or one["role"] == "function" for one in messages
    )
    if can.as_sent and not in_parts and not by_old_names:
        return messages
    if in_parts:
        messages = _texts(messages, can, continued)
    if by_old_names:
        messages = _as_tools(messages)
    messages = list(_calls(_rules(messages, can), can))
    if in_parts and not can.pictures_of_tools:
        messages = list(_pictures_of_tools(messages))
    messages = list(_turns(messages, can, continued))
    if not can.takes_text:
        messages = [_in_parts(message) for message in messages]
    return messages


def shape_tools(tools: list[dict[str, Any]], can: Capabilities) -> list[dict[str, Any]]:
    """The same tools, with what the template demands of each."""
    return [{**tool, "function": _filled(tool["function"], can)} for tool in tools] if can.tool_fields else tools


def _filled(function: dict[str, Any], can: Capabilities) -> dict[str, Any]:
    filled = dict(function)
    if "description" in can.tool_fields and filled.get("description") is None:
        filled["description"] = ""
    if "parameters" in can.tool_fields:
        filled["parameters"] = {"type": "object", "properties": {}, **(filled.get("parameters") or {})}
    if "properties" in can.tool_fields and isinstance(schema := filled.get("parameters"), dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            named = {name: _described(value) for name, value in properties.items()}
            filled["parameters"] = {**schema, "properties": named}
    return filled


def _described(schema: Any) -> dict[str, Any]:
    """A property with a description and one type: of several alternatives the first that is not null."""
    if not isinstance(schema, dict):
        return {"description": "", "type": "object"}
    types = schema.get("type")
    if types is None:
        listed = [value for word in ("anyOf", "oneOf", "allOf") if isinstance(value := schema.get(word), list)]
        others = [one for value in listed for one in value if isinstance(one, dict)]
        types = [one["type"] for one in others if isinstance(one.get("type"), str)]
    if isinstance(types, list):
        types = next((one for one in types if one != "null"), "string")
    return {"description": "", **schema, "type": types}


# ---- content ----


def text_of(content: Any) -> str:
    """Of a message, whose parts are lines; pictures have none."""
    if isinstance(content, list):
        return "\n".join(part.get("text", "") for part in content if "text" in part)
    return content or ""


def has_picture(content: Any) -> bool:
    return isinstance(content, list) and any(part.get("type") == "image" for part in content)


def _texts(messages: list[Message], can: Capabilities, continued: bool) -> list[Message]:
    found = []
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "developer" and not can.knows_developer:
            role = "system"
        taken = role in can.parts and not (continued and i == len(messages) - 1)
        if isinstance(content := message.get("content"), list) and not taken and not has_picture(content):
            message = {**message, "content": text_of(content)}
        found.append(message)
    return found


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _joined(*messages: Message) -> Message:
    """One message of several, with the first one's role and everything else that they have."""
    whole: Message = {}
    for message in reversed(messages):
        whole |= message
    for message in messages:
        whole |= {name: message[name] for name in ("tool_calls", *THOUGHTS) if name in message}
    if any(has_picture(message.get("content")) for message in messages):
        return {**whole, "role": messages[0]["role"], "content": _parts_of(messages)}
    texts = [text for message in messages if (text := text_of(message.get("content")))]
    return {**whole, "role": messages[0]["role"], "content": "\n\n".join(texts)}


def _parts_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The contents of several messages as one, a line between the texts of two."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        own = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
        if parts and own and "text" in parts[-1] and "text" in own[0]:
            own = [{**own[0], "text": f"\n\n{own[0]['text']}"}, *own[1:]]
        parts += own
    return parts


# ---- system and developer ----


def _rules(messages: list[Message], can: Capabilities) -> list[Message]:
    if not any(message["role"] in _RULES for message in messages):
        return messages
    if not can.knows_developer:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    num_first = next((i for i, one in enumerate(messages) if one["role"] not in _RULES), len(messages))
    first, rest = messages[:num_first], list(_later(messages[num_first:], can))
    roles = {message["role"] for message in first}
    if len(first) > 1 and not (can.developer_beside_system if len(roles) > 1 else can.many_systems):
        first = [{**_joined(*first), "role": "system" if "system" in roles else "developer"}]
    if can.knows_system or not first:
        return first + rest
    before = {**_joined(*first), "role": "user"}
    if rest and rest[0]["role"] == "user":
        return [_joined(before, rest[0]), *rest[1:]]
    return [before, *rest]


def _later(messages: list[Message], can: Capabilities) -> Iterator[Message]:
    """A rule between a call and its results comes after them, where it has to be a user's."""
    held: list[Message] = []
    for message in messages:
        if message["role"] == "developer" and not can.later_developer:
            message = {**message, "role": "system"}
        # Between turns that must alternate it would hide that two are the same person's.
        lost = message["role"] == "system" and not can.later_system
        if lost or (message["role"] in _RULES and not can.user_turns):
            held.append({**message, "role": "user"})
            continue
        if message["role"] not in _RESULTS:
            yield from held
            held = []
        yield message
    yield from held


# ---- calls ----


def _as_tools(messages: list[Message]) -> list[Message]:
    """OpenAI's older names of calls and results as the present ones."""
    found = []
    id = ""
    for i, message in enumerate(messages):
        if (call := message.get("function_call")) is not None:
            id = f"call{i:05}"
            message = {name: value for name, value in message.items() if name != "function_call"}
            message.setdefault("tool_calls", [{"id": id, "type": "function", "function": call}])
        elif message["role"] == "function":
            message = {**message, "role": "tool", **({"tool_call_id": id} if id else {})}
        found.append(message)
    return found


def _calls(messages: list[Message], can: Capabilities) -> Iterator[Message]:
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not calls:
            yield message
            continue
        message = {**message, "tool_calls": [_call(call, can) for call in calls]}
        end = at
        while end < len(messages) and messages[end]["role"] in _RESULTS:
            end += 1
        results, at = messages[at:end], end
        if can.result_names:
            results = [_named(result, calls, i) for i, result in enumerate(results)]
        thought = any(name in message for name in THOUGHTS)
        if thought and not can.thought_with_call:
            message = _without_thought(message)
        if text_of(message.get("content")) and not (can.text_with_call and (can.text_with_thought or not thought)):
            yield {"role": "assistant", "content": message["content"]}
            message = {**message, "content": ""}
        if len(calls) == 1 or can.parallel_calls:
            yield _without_text(message, can)
            yield from results
            continue
        for i, (call, own) in enumerate(_apart(message["tool_calls"], results)):
            turn = message if i == 0 else {**_without_thought(message), "content": ""}
            yield _without_text({**turn, "tool_calls": [call]}, can)
            yield from own


def _call(call: Message, can: Capabilities) -> Message:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict) and can.arguments == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif isinstance(arguments, str) and can.arguments == "object" and not can.cut_arguments:
        arguments = {"arguments": arguments}
    else:
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _named(result: Message, calls: list[Message], index: int) -> Message:
    """With the name of the tool, which clients need not give."""
    if "name" in result:
        return result
    id = result.get("tool_call_id")
    own = (call for call in calls if id is not None and call.get("id") == id)
    called = next(own, calls[index % len(calls)])
    return {**result, "name": called["function"]["name"]}


def _apart(calls: list[Message], results: list[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each call with its results; those of none come with the last one."""
    ids = [call.get("id") for call in calls]
    by_id = all(isinstance(id, str) for id in ids) and all(result.get("tool_call_id") in ids for result in results)
    left = list(results)
    for i, call in enumerate(calls):
        if i == len(calls) - 1:
            own = left
        elif by_id:
            own = [result for result in left if result["tool_call_id"] == call["id"]]
        else:
            own = left[:1]
        left = [result for result in left if not any(result is one for one in own)]
        yield call, own


def _without_thought(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in THOUGHTS}


def _without_text(message: Message, can: Capabilities) -> Message:
    if message.get("content") or can.call_content == "empty":
        return message
    if can.call_content == "null":
        return {**message, "content": None}
    return {name: value for name, value in message.items() if name != "content"}


def _pictures_of_tools(messages: list[Message]) -> Iterator[Message]:
    """Pictures in the results of tools come in a user's message behind them."""
    held: list[dict[str, Any]] = []
    for message in messages:
        if held and message["role"] not in _RESULTS:
            yield {"role": "user", "content": held}
            held = []
        content = message.get("content")
        if message["role"] in _RESULTS and has_picture(content):
            assert isinstance(content, list)
            held = [*held, *(part for part in content if part.get("type") == "image")]
            message = {**message, "content": text_of(content) or "[The picture follows.]"}
        yield message
    if held:
        yield {"role": "user", "content": held}


# ---- turns ----


def _turns(messages: list[Message], can: Capabilities, continued: bool) -> Iterator[Message]:
    """`messages` with those joined that may not follow each other."""
    last: Message | None = None
    for i, message in enumerate(messages):
        role, before = message["role"], None if last is None else last["role"]
        opens = continued and i == len(messages) - 1  # rendering gives it a text, whose place is where one goes on
        if role == "assistant" and not can.empty_answer and _says_nothing(message) and not opens:
            continue
        if last is None:
            last = message
        elif (
            (role == before == "user" and not can.user_turns)
            or (role == before == "assistant" and not can.assistant_turns and _may_join(last, message, can))
            or (role == "user" and before in _RESULTS and can.user_after_result == "joined")
        ):
            last = _joined(last, message)
        else:
            yield last
            if role == "user" and before in _RESULTS and can.user_after_result == "answered":
                yield {"role": "assistant", "content": NOTHING}
            elif role == before == "assistant" and not can.assistant_turns:
                yield {"role": "user", "content": NOTHING}
            last = message
    if last is not None:
        yield last


def _says_nothing(message: Message) -> bool:
    return not text_of(message.get("content")) and "tool_calls" not in message


def _may_join(first: Message, second: Message, can: Capabilities) -> bool:
    """Whether one turn may have what both have."""
    return "tool_calls" not in first and ("tool_calls" not in second or can.text_with_call)
