"""The demo model's training text: synthetic conversations over the skills of `skills.py`, of one or more turns.

`python data.py` prints a few of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

import phrases as say
from facts import ANIMALS, CITIES, COLOURS, FOODS, JSON_SYSTEM_PROMPTS, SYSTEM_PROMPTS, TABLES
from skills import (
    Turn,
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

Message = dict[str, str]


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
    "unknown": lambda r, held_out: [unknown(r, held_out)],
    "two_turns": lambda r, held_out: dialogue(r, held_out, 2),
    "three_turns": lambda r, held_out: dialogue(r, held_out, 3),
}
# How often a training conversation is about each skill. Arithmetic and copying take the longest to learn.
MIX: dict[str, float] = {
    "greeting": 2, "identity": 3, "addition": 18, "subtraction": 18, "times_table": 2, "counting": 6, "repeating": 12,
    "facts": 10, "json": 10, "unknown": 4, "two_turns": 14, "three_turns": 10,
}  # fmt: skip
BARS: dict[str, float] = {skill: 0.95 if skill in ("addition", "subtraction") else 0.90 for skill in SKILLS}


def messages(turns: list[Turn], system: str | None) -> list[Message]:
    out = [{"role": "system", "content": system}] if system else []
    for user, assistant in turns:
        out += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return out


def conversation(r: Random, mix: Mapping[str, float] = MIX) -> list[Message]:
    """One training conversation of 1 to about 25 turns; ends with an assistant message."""
    system = r.choice(SYSTEM_PROMPTS) if r.random() < 0.4 else None
    names, weights = list(mix), list(mix.values())
    x = r.random()
    if x < 0.02:
        return messages([statement(r, False) if r.random() < 0.3 else forgotten(r)], system)
    if x < 0.04:
        question, value = json_fields(r, False)
        return messages([(question, json.dumps(value, ensure_ascii=False))], r.choice(JSON_SYSTEM_PROMPTS))
    if x < 0.06:
        return messages(recall(r, False, r.randint(4, 14)), system)
    opening = SKILLS[r.choices(names, weights)[0]](r, False)
    more = 0 if x < 0.7 else r.randint(1, 3) if x < 0.97 else r.randint(4, 13)
    return messages(small_talk(r, opening, more, names, weights), system)


def held_out_prompts(skill: str, count: int, seed: int = 0) -> list[tuple[list[Message], str]]:
    """`count` different (messages up to the user's last, the one right answer) pairs that training never draws."""
    r, found = Random(f"{skill} {seed}"), {}
    while len(found) < count:
        system = r.choice(SYSTEM_PROMPTS) if r.random() < 0.4 else None
        whole = messages(SKILLS[skill](r, True), system)
        found.setdefault(json.dumps(whole[:-1]), (whole[:-1], whole[-1]["content"]))
    return list(found.values())


if __name__ == "__main__":
    for skill in SKILLS:
        print(f"== {skill}")
        for prompt, answer in held_out_prompts(skill, 4):
            print("  " + " | ".join(message["content"] for message in prompt) + "  ->  " + answer)
