"""Small templates of our own, each with a way of real models' that loses, refuses or misplaces what clients send."""
# ruff: noqa: E501 (templates are one line each)

from __future__ import annotations

from typing import Any

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}" + CALLS + "{% endfor %}"
BEGIN = "{% if add_generation_prompt %}[assistant]{% endif %}"


def _refusing(condition: str, body: str = EACH) -> str:
    check = "{% if " + condition + " %}{{ raise_exception('not so') }}{% endif %}"
    return TOOLS + "{% for m in messages %}" + check + "{% endfor %}" + body + BEGIN


def _losing(condition: str) -> str:
    return TOOLS + EACH.replace("{% for m in messages %}", "{% for m in messages if not (" + condition + ") %}") + BEGIN


def _calling(calls: str) -> str:
    return TOOLS + EACH.replace(CALLS, calls) + BEGIN


_ALTERNATE = (
    "{% set ns = namespace(i=0) %}{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endfor %}"
)
# name → (source, what is known of it that differs from a template that takes everything)
TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "takes everything": (TOOLS + EACH + BEGIN, {}),
    "drops developers": (_losing("m.role == 'developer'"), {"knows_developer": False}),
    "refuses developers": (_refusing("m.role == 'developer'"), {"knows_developer": False}),
    "knows no system": (
        _refusing("m.role in ('system', 'developer')"),
        {"knows_system": False, "later_system": False, "later_developer": False},
    ),
    "system comes first": (
        _refusing("m.role == 'system' and not loop.first"), {"many_systems": False, "later_system": False}
    ),
    "the last system only": (
        "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
        "{{ ns.s }}" + _losing("m.role == 'system'"), {"many_systems": False, "later_system": False},
    ),
    "the first as instructions": (  # gpt-oss
        _losing("m.role in ('system', 'developer') and not loop.first").replace(
            " if not (m.role in ('system', 'developer') and not loop.first) %}",
            " %}{% if m.role in ('system', 'developer') and not loop.first %}{% continue %}{% endif %}",
        ), {"many_systems": False, "developer_beside_system": False, "later_system": False, "later_developer": False},
    ),
    "roles alternate": (
        _ALTERNATE + TOOLS + EACH + BEGIN, {"user_turns": False, "assistant_turns": False}
    ),
    "no user after a result": (
        _refusing("m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool'"),
        {"user_after_result": "answered"},
    ),
    "arguments joined as text": (
        _calling("{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}"),
        {"arguments": "text"},
    ),
    "arguments printed by Python": (
        _calling("{% for c in m.tool_calls or [] %}{{ '<call>' ~ c.function.name ~ c.function.arguments }}{% endfor %}"),
        {"arguments": "text"},
    ),
    "arguments one by one": (
        _calling("{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
                 "<{{ k }}>{{ v }}{% endfor %}{% endfor %}"),
        {"cut_arguments": False},
    ),
    "a call has no content": (
        TOOLS + "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}" + CALLS
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}" + BEGIN,
        {"call_content": "null", "text_with_call": False},
    ),
    "a call lacks content": (
        _refusing("m.tool_calls and m.content is defined"), {"call_content": "absent", "text_with_call": False}
    ),
    "one call a turn": (_refusing("m.tool_calls and m.tool_calls | length > 1"), {"parallel_calls": False}),
    "the first call only": (
        _calling(CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")), {"parallel_calls": False}
    ),
    "text or reasoning": (
        _refusing("m.tool_calls and m.content and m.thinking"), {"text_with_thought": False}
    ),
    "no reasoning with a call": (_refusing("m.tool_calls and m.thinking"),
                                 {"thought_with_call": False}),
    "text after the call": (
        _calling("{% if m.tool_calls %}{% endif %}").replace(
            "{{ m.content or '' }}", CALLS + "{{ m.content or '' }}"), {"text_with_call": False},
    ),
    "results have names": (_refusing("m.role == 'tool' and not m.name"), {"result_names": True}),
    "tools have descriptions": (
        "{% for t in tools or [] %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}" + EACH + BEGIN,
        {"tool_fields": frozenset({"description"})},
    ),
    "tools have parameters": (
        "{% for t in tools or [] %}{{ t.function.name }}{% for k, v in t.function.parameters.properties | items %}{{ k }}"
        "{% endfor %}{% endfor %}" + EACH + BEGIN, {"tool_fields": frozenset({"parameters"})},
    ),
    "properties have one type": (
        "{% for t in tools or [] %}{{ t.function.name }}{% for v in (t.function.parameters or {'properties': {}})"
        ".properties.values() if t.function.parameters %}{{ '' + v.type }}{% endfor %}{% endfor %}" + EACH + BEGIN,
        {"tool_fields": frozenset({"parameters", "properties"})},
    ),
    "shows no tools": (EACH + BEGIN, {"shows_tools": False}),
    "shows no calls": (_calling(""), {"shows_calls": False}),
    "shows neither": (
        EACH.replace(CALLS, "").replace("%}[", "%}{% if m.role == 'tool' %}{% continue %}{% endif %}[", 1) + BEGIN,
        {"shows_tools": False, "shows_calls": False, "shows_results": False},
    ),
    "answers have text": (
        _refusing("m.role == 'assistant' and not m.content and not m.tool_calls"), {"empty_answer": False}
    ),
    "loops over parts": (
        TOOLS + EACH.replace(
            "{{ m.content or '' }}",
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
            "{% endif %}",
        ) + BEGIN,
        {"parts": frozenset({"system", "developer", "user", "assistant", "tool"})},
    ),
    "wants parts": (
        TOOLS + EACH.replace("{{ m.content or '' }}", "{% for p in m.content if p.text %}{{ p.text }}{% endfor %}") + BEGIN,
        {"takes_text": False, "parts": frozenset({"system", "developer", "user", "assistant", "tool"})},
    ),
}  # fmt: skip
