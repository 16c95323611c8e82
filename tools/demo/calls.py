"""Tools offered, called and answered: exchanges of question, call, result and sentence, drawn from `tools.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from chat import Message
from facts import CITIES, TABLES, UNKNOWN_TOPICS, WORDS
from skills import arithmetic_held_out, draw, operand, plain, pseudo_word, random_name, sentence, vary

from tools import (
    ACTIONS,
    ANSWERED,
    ANY_RESULTS,
    BY_NAME,
    CALL_LATER,
    COMPANIES,
    CURRENCIES,
    ERRORS,
    FAILURES,
    KEYS,
    LANGUAGES,
    NOUNS,
    OF_TWO,
    PLACES,
    ROOMS,
    SKIES,
    THOUGHT,
    TOOLS,
    VERBS,
    Parameter,
    Tool,
)

COUNTRIES = tuple(country for country, _ in TABLES[0].rows)
CALCULATIONS = frozenset(("add", "subtract", "multiply", "calculator"))
_OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}


class Offer(NamedTuple):
    """A tool as one request offers it."""

    tool: Tool
    name: str
    parameters: tuple[tuple[Parameter, str], ...]  # with the name that each has here, in the schema's order
    schema: dict[str, Any]  # what the client sends


class Use(NamedTuple):
    """One call: what is asked, the arguments, what comes back, and how the assistant says it."""

    offer: Offer
    question: str
    arguments: dict[str, Any]
    result: str
    sentence: str


# -- slots -------------------------------------------------------------------------------------------------------------


class Slots(dict[str, Any]):
    """The values of one use, each drawn when a template first asks for it: "key_2" is another "key"."""

    def __init__(self, r: Random, kind: str):
        super().__init__()
        self.r, self.kind = r, kind

    def __missing__(self, slot: str) -> Any:
        if slot in ("a", "b", "expression", "value"):
            self._numbers()
        else:
            self[slot] = DRAW[re.sub(r"_\d+$", "", slot)](self.r)
        return self[slot]

    def _numbers(self) -> None:
        """Sums that are held out stay out, also where a tool does them."""
        r, op = self.r, _OPERATIONS.get(self.kind) or self.r.choice("+-*")
        while True:
            large = r.random() < 0.2
            a, b = (r.randrange(10000), r.randrange(10000)) if large else (operand(r), operand(r))
            if op == "*" or not arithmetic_held_out(op, a, b):
                break
        value = a + b if op == "+" else a - b if op == "-" else a * b
        expression = f"{a} {op} {b}"
        if self.kind == "calculator" and r.random() < 0.3:
            c = r.randrange(100)
            expression, value = f"({expression}) * {c}", value * c
        if self.kind not in CALCULATIONS:
            value = r.randrange(10 ** r.randint(1, 4))
        self.update(a=a, b=b, expression=expression, value=value)

    def fill(self, template: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: text_of(self[match[1]]), template)


def text_of(value: Any) -> str:
    return str(value) if not isinstance(value, bool) else "true" if value else "false"


def _city(r: Random) -> str:
    x = r.random()
    name = r.choice(CITIES) if x < 0.75 else r.choice(PLACES) if x < 0.87 else pseudo_word(r).capitalize()
    return name.lower() if r.random() < 0.1 else name


def _note(r: Random) -> str:
    if r.random() < 0.4:
        return sentence(r)
    return " ".join(r.choice(WORDS) for _ in range(r.randint(1, 6)))


def _word(r: Random) -> str:
    return r.choice(WORDS) if r.random() < 0.7 else pseudo_word(r)


DRAW: dict[str, Callable[[Random], Any]] = {
    "city": _city,
    "unit": lambda r: r.choice(("celsius", "fahrenheit")),
    "t": lambda r: r.randrange(-15, 42),
    "sky": lambda r: r.choice(SKIES),
    "clock": lambda r: f"{r.randrange(24):02}:{r.randrange(60):02}",
    "country": lambda r: r.choice(COUNTRIES),
    "large": lambda r: r.randrange(10 ** r.randint(4, 9)),
    "company": lambda r: r.choice(COMPANIES) if r.random() < 0.7 else pseudo_word(r).capitalize(),
    "price": lambda r: round(r.random() * 10 ** r.randint(1, 3), r.choice((1, 2))),
    "amount": lambda r: r.randrange(1, 1000) if r.random() < 0.8 else round(r.random() * 100, 2),
    "source": lambda r: r.choice(CURRENCIES),
    "target": lambda r: r.choice(CURRENCIES),
    "person": random_name,
    "note": _note,
    "finding": lambda r: sentence(r) + ".",
    "topic": lambda r: r.choice(UNKNOWN_TOPICS) if r.random() < 0.5 else _note(r),
    "minutes": lambda r: r.randrange(1, 100),
    "room": lambda r: r.choice(ROOMS),
    "state": lambda r: r.choice(("on", "off")),
    "language": lambda r: r.choice(LANGUAGES),
    "date": lambda r: f"{r.randint(2020, 2032)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}",
    "low": lambda r: r.randrange(0, 50),
    "high": lambda r: r.randrange(50, 1000),
    "error": lambda r: r.choice(ERRORS),
    "word": _word,
    "key": lambda r: r.choice(KEYS),
    "integer": lambda r: r.randrange(10 ** r.randint(1, 4)),
    "number": lambda r: r.randrange(1000) if r.random() < 0.6 else round(r.random() * 100, 1),
    "string": lambda r: _word(r) if r.random() < 0.7 else random_name(r),
    "boolean": lambda r: r.random() < 0.5,
}

# -- tools -------------------------------------------------------------------------------------------------------------


def action(r: Random, near: Tool | None = None) -> Tool:
    """A tool that does something with a thing: `delete_invoice`, asked for as "Delete invoice 42".

    Of two tools `near` each other the verb or the thing is the same.
    """
    verb, noun, key = r.choice(VERBS), r.choice(NOUNS), r.choice(("id", "number", "name"))
    if near and near.kind.count(" ") == 1:
        verb, noun = r.choice(((near.kind.split()[0], noun), (verb, near.kind.split()[1])))
    name = r.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}"))
    slot = "string" if key == "name" else "integer"
    parameter = r.choice((key, key, f"{noun}_{key}", noun))
    words = {"{Verb}": verb.capitalize(), "{verb}": verb, "{noun}": noun, "{item}": "{" + slot + "}", "{key}": key}
    questions = tuple(re.sub(r"\{\w+\}", lambda match: words[match[0]], template) for template in ACTIONS)
    descriptions = (f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun} with this {key}")
    of_noun = (f"The {key} of the {noun}", f"{noun.capitalize()} {key}")
    item = Parameter(slot, (parameter,), slot, of_noun)
    return Tool(f"{verb} {noun}", (name,), descriptions, (item,), questions, ANY_RESULTS)


def unheard_of(r: Random) -> Tool:
    """A tool whose name says nothing, asked for by name."""
    first, second = _word(r).lower(), r.choice((_word(r).lower(), r.choice(NOUNS)))
    name = r.choice((f"{first}_{second}", f"{first}{second.capitalize()}", first, f"{r.choice(VERBS)}_{second}"))
    parameters = []
    for i, key in enumerate(r.sample(KEYS, r.choice((0, 1, 1, 1, 2, 2, 3)))):
        type = r.choice(("string", "string", "integer", "integer", "number", "boolean"))
        parameters.append(Parameter(f"{type}_{i}", (key,), type, (f"The {key}", f"{key.capitalize()} to use")))
    link = r.choice((" {} = {{{}}}", " {}={{{}}}", " {} {{{}}}", " {} {{{}}}", " {}: {{{}}}"))
    parts = [link.format(p.names[0], p.slot).strip() for p in parameters]
    given = (r.choice((" with ", " with ", ": ")) + r.choice((" and ", ", ")).join(parts)) if parts else ""
    questions = tuple(words.replace("{with}", given) for words in BY_NAME)
    descriptions = (sentence(r), f"{r.choice(VERBS).capitalize()} the {r.choice(NOUNS)}.", "A function")
    return Tool(name, (name,), descriptions, tuple(parameters), questions, ANY_RESULTS)


def compatible(tools: list[Tool], tool: Tool) -> bool:
    """Whether no question could be meant for one of `tools` and for `tool`, and their names differ."""
    kinds = {other.kind for other in tools}
    if tool.kind in kinds or any(other.names == tool.names for other in tools):
        return False
    return not ("calculator" in kinds | {tool.kind} and tool.kind in CALCULATIONS and kinds & CALCULATIONS)


def random_tools(r: Random, num_tools: int) -> list[Tool]:
    tools: list[Tool] = []
    while len(tools) < num_tools:
        tool = random_tool(r)
        if compatible(tools, tool):
            tools.append(tool)
    return tools


def random_tool(r: Random) -> Tool:
    x = r.random()
    return r.choice(TOOLS) if x < 0.6 else action(r) if x < 0.82 else unheard_of(r)


def offer(r: Random, tool: Tool) -> Offer:
    """The tool with names, descriptions and a schema as some client would write them."""
    name, place = r.choice(tool.names), r.randrange(100)
    paired = tool.parameters and tool.parameters[0].slot == "a"  # "x" goes with "y"
    chosen: list[tuple[Parameter, str]] = []
    for parameter in tool.parameters:
        free = [word for word in parameter.names if word not in (taken for _, taken in chosen)]
        names = parameter.names[place % len(parameter.names)] if paired else r.choice(free)
        if parameter.required or r.random() < 0.6:
            chosen.append((parameter, names))
    described, titled = r.random() < 0.6, r.random() < 0.12
    properties: dict[str, Any] = {}
    for parameter, word in chosen:
        integral = parameter.type == "number" and parameter.slot in "ab" and r.random() < 0.5
        entry: dict[str, Any] = {"type": "integer" if integral else parameter.type}
        if titled:
            entry = {"title": word.replace("_", " ").title(), **entry}
        if parameter.choices and r.random() < 0.8:
            entry["enum"] = list(parameter.choices)
        if described and parameter.descriptions:
            text = {"description": r.choice(parameter.descriptions)}
            entry = {**entry, **text} if r.random() < 0.75 else {**text, **entry}
        properties[word] = entry
    required = [word for parameter, word in chosen if parameter.required]
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required and r.random() < 0.9:
        schema["required"] = required
    if titled:
        schema = {**{key: value for key, value in schema.items() if key != "type"}, "title": name, "type": "object"}
    if r.random() < 0.12:
        schema["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if r.random() < 0.9:
        function["description"] = r.choice(tool.descriptions)
    if properties or r.random() < 0.7:
        function["parameters"] = schema
    if r.random() < 0.06:
        function["strict"] = True
    return Offer(tool, name, tuple(chosen), {"type": "function", "function": function})


def offers(r: Random, wanted: list[Tool], num_tools: int, avoid: frozenset[str] = frozenset()) -> list[Offer]:
    """`num_tools` or more tools in any order: those wanted, and others that nothing wanted could be meant for."""
    tools = list(wanted)
    while len(tools) < num_tools:
        near_miss = bool(wanted) and r.random() < 0.25
        tool = action(r, r.choice(wanted)) if near_miss else random_tool(r)
        if tool.kind not in avoid and compatible(tools, tool):
            tools.append(tool)
    r.shuffle(tools)
    while True:
        made = [offer(r, tool) for tool in tools]
        if len({one.name for one in made}) == len(made):
            return made


# -- exchanges ---------------------------------------------------------------------------------------------------------


def use(r: Random, one: Offer) -> Use:
    slots, known = Slots(r, one.tool.kind), {parameter.slot for parameter, _ in one.parameters}
    optional = {parameter.slot for parameter in one.tool.parameters} - known  # not offered: not to be asked for
    words = r.choice([text for text in one.tool.questions if not any("{" + slot + "}" in text for slot in optional)])
    slots["name"] = one.name
    question = slots.fill(vary(r, words))
    arguments = {word: slots[parameter.slot] for parameter, word in one.parameters if parameter.slot in slots}
    result, answer = r.choice(FAILURES if r.random() < 0.06 else one.tool.results)
    return Use(one, question, arguments, slots.fill(result), slots.fill(answer))


def use_twice(r: Random, one: Offer) -> tuple[str, list[Use]]:
    """ "What is the weather in Paris and Rome?" """
    slot = OF_TWO[one.tool.kind]
    words = r.choice([text for text in one.tool.questions if "{unit}" not in text])
    first, second = Slots(r, one.tool.kind), Slots(r, one.tool.kind)
    question = vary(r, words).replace("{" + slot + "}", f"{first[slot]} and {second[slot]}")
    uses = []
    for slots in (first, second):
        arguments = {word: slots[slot] for parameter, word in one.parameters if parameter.slot == slot}
        result, answer = r.choice(one.tool.results)
        uses.append(Use(one, question, arguments, slots.fill(result), slots.fill(answer)))
    return question, uses


def two_questions(r: Random, first: str, second: str) -> str:
    link = r.choice(CALL_LATER)
    if not link.endswith(". "):
        second = second[0].lower() + second[1:]
    return (first.rstrip("?.! ") if link[0] in ". ," else first) + link + second


def exchange(r: Random, tools: list[Offer], held_out: bool, thinks: bool = False) -> list[Message]:
    """The user asks for one or two of `tools`; they are called, they answer, the assistant tells."""

    def make() -> tuple[str, tuple[str, list[Use]]]:
        one, x = r.choice(tools), r.random()
        if x < 0.25 and one.tool.kind in OF_TWO:
            question, uses = use_twice(r, one)
            return "call " + plain(question), (question, uses)
        uses = [use(r, one)] if x < 0.88 else [use(r, one), use(r, r.choice(tools))]
        question = uses[0].question if len(uses) == 1 else two_questions(r, uses[0].question, uses[1].question)
        return "call " + plain(question), (question, uses)

    question, uses = draw(held_out, make)
    calls = [{"type": "function", "function": {"name": one.offer.name, "arguments": one.arguments}} for one in uses]
    call: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    answer: Message = {"role": "assistant", "content": " ".join(one.sentence for one in uses)}
    if thinks:
        names = " and ".join(dict.fromkeys(one.offer.name for one in uses))
        call["reasoning_content"], answer["reasoning_content"] = THOUGHT.format(tools=names), ANSWERED
    results: list[Message] = [{"role": "tool", "content": one.result} for one in uses]
    return [{"role": "user", "content": question}, call, *results, answer]


def unanswerable(r: Random, held_out: bool, offered: list[Tool]) -> str:
    """A question for a tool that is not among those offered."""

    def make() -> tuple[str, str]:
        while True:
            tool = random_tool(r) if r.random() < 0.5 else action(r)
            if compatible(offered, tool) and tool.kind not in CALCULATIONS | {"search", "translate"}:
                question = use(r, offer(r, tool)).question
                return "call " + plain(question), question

    return draw(held_out, make)
