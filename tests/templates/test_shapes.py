"""What was said is in the prompt, whatever a template loses, refuses or misplaces."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from vserve.server.errors import ApiError
from vserve.server.text.capabilities import AS_SENT, Capabilities
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
