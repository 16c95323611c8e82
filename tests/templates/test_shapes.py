"""What was said is in the prompt, whatever a template loses, refuses or misplaces."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest

from vserve.server.errors import ApiError
from vserve.server.text.capabilities import AS_SENT, Capabilities
from vserve.server.text.probe import SECONDS, ask
from vserve.server.text.shape import shape, shape_tools

from .histories import TOOLS, as_templates_get, history, lost, tokenizer
from .own import TEMPLATES

SEEDS = range(6)
UNSHOWN = [name for name, (_, known) in TEMPLATES.items() if {"shows_tools", "shows_calls"} & known.keys()]
GENERATION = {"add_generation_prompt": True}


def capabilities(name: str) -> Capabilities:
    made = tokenizer(TEMPLATES[name][0])
    return made.capabilities(made.template())


def render(name: str, chat: list[dict[str, Any]], tools: Any = None, *, in_system: bool = False, **more: Any) -> str:
    made = tokenizer(TEMPLATES[name][0], in_system=in_system)
    return made.render(as_templates_get(chat), {**GENERATION, "tools": tools, **more})


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_differs_is_found(name: str) -> None:
    can = capabilities(name)
    found = {spec.name: getattr(can, spec.name) for spec in fields(can)}
    differs = {key: value for key, value in found.items() if value != getattr(AS_SENT, key) and key != "function_call"}
    known = TEMPLATES[name][1]
    assert differs | known == differs, differs
    # The rest follows from what is known: a template that joins roles, say, takes no parts.
    if name == "takes everything":
        assert differs == {} and list(can.deviations()) == []
    elif known.keys() - {"parts"}:
        assert list(can.deviations())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in UNSHOWN])
@pytest.mark.parametrize("agent", [False, True])
def test_nothing_that_was_said_is_missing(name: str, agent: bool) -> None:
    for seed in SEEDS:
        chat, tools = history(seed, agent=agent), TOOLS if agent else None
        assert lost(render(name, chat, tools), chat, tools) == []


@pytest.mark.parametrize("name", UNSHOWN)
def test_what_is_not_shown_is_refused_or_written(name: str) -> None:
    for seed in SEEDS:
        chat = history(seed, agent=True)
        with pytest.raises(ApiError, match="--tools-in-system") as refused:
            render(name, chat, TOOLS)
        assert refused.value.status == 400
        assert lost(render(name, chat, TOOLS, in_system=True), chat, TOOLS) == []
        talk = history(seed, agent=False)
        assert lost(render(name, talk), talk) == []


def test_a_template_that_takes_everything_gets_it_as_it_is() -> None:
    for seed in SEEDS:
        chat = [one for one in as_templates_get(history(seed, agent=True)) if isinstance(one["content"], str)]
        can = capabilities("takes everything")
        assert shape(chat, can) is chat and shape_tools(TOOLS, can) is TOOLS


def prompt_of(name: str, *chat: dict[str, Any], **more: Any) -> str:
    return render(name, list(chat), **more)


def test_rules_between_a_call_and_its_result_come_after_it() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = (
        {"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "system", "content": "Mind."}, {"role": "tool", "tool_call_id": "a", "content": "2"},
    )  # fmt: skip
    assert prompt_of("system comes first", *chat).endswith("[tool]2[user]Mind.[assistant]")


def test_results_follow_their_calls() -> None:
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("a", "f"), ("b", "g"))
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": id * 3} for id in "ba"]
    told = prompt_of(
        "one call a turn", {"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *results
    )
    assert told == "[user]Hi[assistant]<call>f {}</call>[tool]aaa[assistant]<call>g {}</call>[tool]bbb[assistant]"


def test_parts_go_to_templates_that_join_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}
    assert prompt_of("loops over parts", parts) == "[user]Hithere[assistant]"
    assert prompt_of("takes everything", parts) == "[user]Hi\nthere[assistant]"
    last = [parts, {**parts, "role": "assistant"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert render("loops over parts", last, **more) == "[user]Hithere[assistant]Hi\nthere"


@pytest.mark.parametrize("name", ["takes everything", "answers have text", "wants parts"])
@pytest.mark.parametrize("text", ["", "Well"])
def test_the_last_answer_is_gone_on_with(name: str, text: str) -> None:
    """Also where it has no text yet, and where a template wants parts."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(name, chat, **more) == f"[user]Hi[assistant]{text}"
    assert render(name, [*chat, *chat], **more).endswith(f"[user]Hi[assistant]{text}")


def test_results_without_ids_are_named_in_the_order_of_their_calls() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in "fg"]
    chat = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "2"} for _ in "fg"),
    ]
    shaped = shape(chat, Capabilities(result_names=True))
    assert [message.get("name") for message in shaped] == [None, "f", "g"]


def test_alternatives_that_are_no_list_say_nothing() -> None:
    properties = {"a": {"anyOf": 1}, "b": {"oneOf": {"type": "string"}}, "c": {"allOf": [{"type": "null"}, 7]}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    (shaped,) = shape_tools([tool], Capabilities(tool_fields=frozenset({"parameters", "properties"})))
    types = [one["type"] for one in shaped["function"]["parameters"]["properties"].values()]
    assert types == ["string", "string", "string"]


def test_a_slow_template_is_not_asked_for_long() -> None:
    """One that takes all that it may is rendered a few times, not once a question."""
    rendered = []

    def render(chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        rendered.append(chat)
        end = time.thread_time() + SECONDS / 2
        while time.thread_time() < end:
            pass
        return str(chat)

    ask(render)
    assert len(rendered) <= 3
