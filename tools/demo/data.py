"""The demo model's training text: synthetic conversations over the skills of `skills.py`, of one or more turns.

`python data.py` prints a few of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

import phrases as say
from calls import CALCULATIONS, exchange, offers, random_tools, unanswerable
from chat import Chat, Turn, answer_text, messages_of
from facts import ANIMALS, CITIES, COLOURS, FOODS, JSON_SYSTEM_PROMPTS, SYSTEM_PROMPTS, TABLES
from skills import (
    UNKNOWN_REPLY,
    addition,
    arithmetic,
    arithmetic_held_out,
    calculate,
    counting,
    draw,
    fact,
    facts,
    fill,
    greeting,
    identity,
    is_held_out,
    json_answer,
    json_fields,
    operand,
    random_name,
    repeating,
    sentence,
    subtraction,
    times_table,
    unknown,
    vary,
)
from thoughts import NO_STEPS, reckoning, without_thinking

from tools import NO_TOOL, TOOLS


def statement(r: Random, held_out: bool) -> Turn:
    return sentence(r) + ".", "I see."


def short_turn(r: Random) -> Turn:
    """Any turn of the training set that is short enough to be quoted later."""
    skills = (addition, subtraction, facts, facts, greeting, identity, unknown, statement, statement, repeating,
              json_answer)  # fmt: skip
    while True:
        turn = r.choice(skills)(r, False)
        if len(turn[0]) < 70 and "\n" not in turn[0]:
            return turn


def chain(r: Random, held_out: bool, num_turns: int) -> list[Turn]:
    """ "What is 12 + 30?", "Add 5 to that." Of a held-out chain the last step is held out."""
    while True:
        turns = [arithmetic(r, r.choice("+-"), False)]
        while len(turns) < num_turns:
            op, a = r.choice("+-"), int(turns[-1][1])
            b = abs(operand(r)) if r.random() < 0.3 else r.randrange(1, 30)
            is_last = len(turns) == num_turns - 1
            if abs(a) > 999 or arithmetic_held_out(op, a, b) != (held_out and is_last):
                break
            words = r.choice(say.ADD_TO_THAT if op == "+" else say.SUBTRACT_FROM_THAT)
            turns.append((vary(r, words).format(b=b), str(calculate(op, a, b))))
        if len(turns) == num_turns:
            return turns


def follow_up(r: Random, held_out: bool, num_turns: int) -> list[Turn]:
    """ "What is the capital of France?", "And of Spain?" """
    while True:
        table = r.choice([table for table in TABLES if table.follow_ups])
        question, answer, _ = fact(r, False, table)
        turns = [(vary(r, question), answer)]
        while len(turns) < num_turns:
            (x, y), i = r.choice(table.rows), r.randrange(len(table.follow_ups))
            is_last = len(turns) == num_turns - 1
            if is_held_out(f"follow {turns[-1][1]} {x} {i}") != (held_out and is_last):
                break
            turns.append((vary(r, fill(table.follow_ups[i], x, y)), fill(table.answer, x, y)))
        if len(turns) == num_turns:
            return turns


def told(r: Random, held_out: bool) -> tuple[Turn, Turn]:
    """ "My name is Tom." and, later, "What is my name?" """

    def make() -> tuple[str, tuple[Turn, Turn]]:
        tell, reply, ask, answer = r.choice(say.TELL_AND_ASK)
        known = {"name": random_name(r), "n": r.randint(1, 99), "city": r.choice(CITIES), "colour": r.choice(COLOURS),
                 "food": r.choice(FOODS), "animal": r.choice(ANIMALS)}  # fmt: skip
        first, later = r.choice(tell).format(**known), r.choice(ask)
        # Only the question is varied: what was told must keep its capitals.
        turns = (first, reply.format(**known)), (vary(r, later).format(**known), answer.format(**known))
        return f"told {first} {later}", turns

    return draw(held_out, make)


def recall(r: Random, held_out: bool, num_turns: int, opens: bool = True) -> list[Turn]:
    """The user says something and asks for it in the last turn, with `num_turns` - 2 other turns between.

    Only where these turns open the conversation (`opens`) may the question be for what was said first.
    """
    others = [short_turn(r) for _ in range(num_turns - 2)]
    x = r.random() if opens else r.choice((r.uniform(0, 0.45), r.uniform(0.75, 1)))
    if x < 0.45:
        tell, ask = told(r, held_out)
        return [tell, *others, ask]

    def make() -> tuple[str, Turn]:
        turn = short_turn(r)
        return f"said {turn[0]}", turn

    said = draw(held_out, make)
    if x < 0.75:
        return [said, *others, (vary(r, r.choice(say.SAID_FIRST)), f'You said: "{said[0]}"')]
    if x < 0.9:
        return [*others, said, (vary(r, r.choice(say.SAID_LAST)), f'You said: "{said[0]}"')]
    return [*others, said, (vary(r, r.choice(say.YOU_SAID_LAST)), f'I said: "{said[1]}"')]


def dialogue(r: Random, held_out: bool, num_turns: int) -> list[Turn]:
    return r.choices((recall, chain, follow_up), (6, 2, 2))[0](r, held_out, num_turns)


def small_talk(r: Random, opening: list[Turn], num_parts: int, names: list[str], weights: list[float]) -> list[Turn]:
    """Unrelated things after each other."""
    talk = opening
    for _ in range(num_parts):
        name = r.choices(names, weights)[0]
        if name in ("two_turns", "three_turns"):
            kind = r.choice((chain, follow_up, None))
            num_turns = 2 if name == "two_turns" else 3
            talk += kind(r, False, num_turns) if kind else recall(r, False, num_turns, opens=False)
        else:
            talk += SKILLS[name](r, False)
    return talk


def forgotten(r: Random) -> Turn:
    """The first message asks for something that was never said."""
    if r.random() < 0.5:
        question = r.choice(r.choice(say.TELL_AND_ASK)[2]).format(animal=r.choice(ANIMALS))
        return vary(r, question), "You have not told me that."
    return vary(r, r.choice(say.SAID_FIRST + say.SAID_LAST)), "This is the first thing that you have said."


def unknown_or_hard(r: Random, held_out: bool) -> Turn:
    x = r.random()
    return unknown(r, held_out) if x < 0.85 else without_thinking(r, held_out)


SKILLS: dict[str, Callable[[Random, bool], list[Turn]]] = {
    "greeting": lambda r, held_out: [greeting(r, held_out)],
    "identity": lambda r, held_out: [identity(r, held_out)],
    "addition": lambda r, held_out: [addition(r, held_out)],
    "subtraction": lambda r, held_out: [subtraction(r, held_out)],
    "times_table": lambda r, held_out: [times_table(r, held_out)],
    "counting": lambda r, held_out: [counting(r, held_out)],
    "repeating": lambda r, held_out: [repeating(r, held_out)],
    "facts": lambda r, held_out: [facts(r, held_out)],
    "json": lambda r, held_out: [json_answer(r, held_out)],
    "unknown": lambda r, held_out: [unknown_or_hard(r, held_out)],
    "two_turns": lambda r, held_out: dialogue(r, held_out, 2),
    "three_turns": lambda r, held_out: dialogue(r, held_out, 3),
}
# Tools that a question of the skill might be meant for.
MEANT_FOR: dict[str, frozenset[str]] = {
    "addition": CALCULATIONS, "subtraction": CALCULATIONS, "times_table": CALCULATIONS,
    "json": CALCULATIONS | {"search"}, "facts": frozenset(("search", "date", "translate")),
    "repeating": frozenset(("message", "translate")),
    "unknown": CALCULATIONS | {"search", "population", "translate", "weather"},
}  # fmt: skip


def system_prompt(r: Random) -> str | None:
    return r.choice(SYSTEM_PROMPTS) if r.random() < 0.4 else None


def tool_chat(r: Random, held_out: bool, ends_with_call: bool) -> Chat:
    """Tools are offered and used. The chat ends with a call, or with the sentence that says what came back."""
    wanted = random_tools(r, r.choice((1, 1, 1, 2)))
    made = offers(r, wanted, r.choices((1, 2, 3, 4), (35, 30, 30, 5))[0])
    usable = [one for one in made if any(one.tool is tool for tool in wanted)]
    out = messages_of([], system_prompt(r))
    for _ in range(r.choices((0, 1, 2), (75, 20, 5))[0]):
        x = r.random()
        if x < 0.5:
            out += exchange(r, usable, False)
        elif x < 0.7:
            out += messages_of([greeting(r, False)])
        elif all(one.tool.kind != "search" for one in made):
            out += messages_of([(unanswerable(r, False, [one.tool for one in made]), NO_TOOL)])
    thinks = r.random() < 0.12
    last = exchange(r, usable, held_out, thinks)
    return Chat(out + (last[:2] if ends_with_call else last), [one.schema for one in made], thinks)


def no_tool(r: Random, held_out: bool) -> Chat:
    """Tools are offered, and the question is for none of them."""
    skill = r.choice(("greeting", "identity", "addition", "times_table", "facts", "facts", "json", "repeating",
                      "unknown", "", "", "", "", "", ""))  # fmt: skip
    made = offers(r, [], r.choice((1, 1, 2, 3)), MEANT_FOR.get(skill, frozenset(("search",))))
    if skill:
        turn = SKILLS[skill](r, held_out)[0]
    else:
        turn = unanswerable(r, held_out, [one.tool for one in made]), NO_TOOL
    chat = Chat(messages_of([turn], system_prompt(r)), [one.schema for one in made], r.random() < 0.1)
    if chat.enable_thinking:
        chat.messages[-1]["reasoning_content"] = NO_STEPS
    return chat


def toolless(r: Random, held_out: bool) -> Turn:
    """A question for a tool where none is offered."""
    return unanswerable(r, held_out, [tool for tool in TOOLS if tool.kind in ("light", "timer")]), UNKNOWN_REPLY


def thinking(r: Random, held_out: bool) -> Chat:
    """The user, the system prompt or the request asks to think first."""
    x, system = r.random(), system_prompt(r)
    if r.random() < 0.8:
        question, thought, answer = reckoning(r, held_out)
    else:
        # What asks to repeat something cannot go on to ask for thoughts.
        question, answer = r.choice((greeting, identity, facts, unknown, facts if x < 0.3 else repeating))(r, held_out)
        thought = NO_STEPS
    before = [short_turn(r) for _ in range(r.choices((0, 1, 2), (80, 14, 6))[0])]
    if x < 0.3:
        question = r.choice(say.THINK_USER).format(q=question)
    elif x < 0.45:
        system = r.choice(say.THINK_SYSTEM)
    messages = messages_of([*before, (question, answer)], system)
    messages[-1]["reasoning_content"] = thought
    return Chat(messages, None, x >= 0.45)


# Skills that take more than turns of text.
CHATS: dict[str, Callable[[Random, bool], Chat]] = {
    "tool_call": lambda r, held_out: tool_chat(r, held_out, True),
    "tool_answer": lambda r, held_out: tool_chat(r, held_out, False),
    "no_tool": no_tool,
    "thinking": thinking,
}
# How often a training conversation is about each skill. Arithmetic and copying take the longest to learn.
MIX: dict[str, float] = {
    "greeting": 2, "identity": 3, "addition": 18, "subtraction": 18, "times_table": 2, "counting": 6, "repeating": 12,
    "facts": 10, "json": 10, "unknown": 4, "two_turns": 14, "three_turns": 10, "tool_call": 5, "tool_answer": 22,
    "no_tool": 20, "thinking": 15,
}  # fmt: skip
BARS: dict[str, float] = {skill: 0.95 if skill in ("addition", "subtraction") else 0.90 for skill in (*SKILLS, *CHATS)}


def conversation(r: Random, mix: Mapping[str, float] = MIX) -> Chat:
    """One training conversation of 1 to about 25 turns; ends with an assistant message."""
    name = r.choices(list(mix), list(mix.values()))[0]
    if name in CHATS:
        return CHATS[name](r, False)
    system, x = system_prompt(r), r.random()
    if x < 0.02:
        return Chat(messages_of([statement(r, False) if r.random() < 0.3 else forgotten(r)], system))
    if x < 0.04:
        question, value = json_fields(r, False)
        return Chat(messages_of([(question, json.dumps(value, ensure_ascii=False))], r.choice(JSON_SYSTEM_PROMPTS)))
    if x < 0.06:
        return Chat(messages_of(recall(r, False, r.randint(4, 14)), system))
    if x < 0.065:
        return Chat(messages_of([toolless(r, False)], system))
    opening = SKILLS[name](r, False)
    more = 0 if x < 0.7 else r.randint(1, 3) if x < 0.97 else r.randint(4, 13)
    names = [skill for skill in mix if skill in SKILLS]
    return Chat(messages_of(small_talk(r, opening, more, names, [mix[skill] for skill in names]), system))


def held_out_prompts(skill: str, count: int, seed: int = 0) -> list[tuple[Chat, str]]:
    """`count` different (prompt, the one right answer) pairs that training never draws."""
    r, found = Random(f"{skill} {seed}"), {}
    while len(found) < count:
        if skill in CHATS:
            chat = CHATS[skill](r, True)
        else:
            system = system_prompt(r)
            chat = Chat(messages_of(SKILLS[skill](r, True), system))
        found.setdefault(json.dumps(chat.prompt()), (chat.prompt(), answer_text(chat)))
    return list(found.values())


if __name__ == "__main__":
    for skill in BARS:
        print(f"== {skill}")
        for prompt, answer in held_out_prompts(skill, 4):
            for tool in prompt.tools or ():
                print(f"  {json.dumps(tool)}")
            print(
                "  " + " | ".join(str(m["content"] or m.get("tool_calls")) for m in prompt.messages) + f"  ->  {answer}"
            )
