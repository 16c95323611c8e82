"""What the demo model learns to do in one turn: a function a skill, drawing a question and its one right answer.

Every skill draws from one of two disjoint sets: a sample's key (its operands, its text, its phrasing and fact, ...) is
hashed, one key in sixteen is held out, and training never draws those, neither in a chat of one turn nor later in one.
"""

from __future__ import annotations

import json
import string
import zlib
from collections.abc import Callable
from random import Random
from typing import TypeVar

import phrases as say
from chat import Turn
from facts import (
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    NAMES,
    TABLES,
    THINGS,
    UNKNOWN_QUESTIONS,
    UNKNOWN_TOPICS,
    WORDS,
    Table,
)

T = TypeVar("T")

UNKNOWN_REPLY = (
    "I am only a small demo model and I do not know that. I can add and subtract, count, repeat text, "
    "answer simple facts and reply in JSON."
)
TOO_LARGE_REPLY = "That is too large for me. I can only add and subtract numbers of up to three digits."


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % 16 == 0


def draw(held_out: bool, make: Callable[[], tuple[str, T]]) -> T:
    """The first of `make()`'s (key, value) whose key lies in the wanted set."""
    while True:
        key, value = make()
        if is_held_out(key) == held_out:
            return value


def plain(text: str) -> str:
    """Letters and digits alone: what is left of a question when capitals and punctuation do not count."""
    return " ".join("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def vary(r: Random, text: str) -> str:
    """The same question as people type it: without capitals or full stop, with a please, in a hurry."""
    x = r.random()
    if x < 0.5:
        return text
    if x < 0.65:
        return text.lower()
    if x < 0.78:
        return text.rstrip("?.")
    if x < 0.88:
        return text.lower().rstrip("?.")
    if x < 0.92:
        return r.choice(("Hi, ", "Hey, ", "OK, ", "So, ", "Now, ", "hello, ", "Please: ")) + text[0].lower() + text[1:]
    if x < 0.96:
        return text.rstrip("?.") + r.choice((", please.", " please", ", please", ", please?", " thanks"))
    return text.rstrip("?.") + r.choice(("!", "??", " ?", "...", "?!", ".", "?"))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def arithmetic_key(op: str, a: int, b: int) -> str:
    """The same for a + b, b + a and a - -b: what is held out is held out in every spelling."""
    b = b if op == "+" else -b
    return f"{min(a, b)} + {max(a, b)}"


def arithmetic_held_out(op: str, a: int, b: int) -> bool:
    """Two numbers below 20 are the table that everyone learns by heart: never held out."""
    return max(abs(a), abs(b)) >= 20 and is_held_out(arithmetic_key(op, a, b))


def calculate(op: str, a: int, b: int) -> int:
    return a + b if op == "+" else a - b


def operand(r: Random) -> int:
    x = r.random()
    value = r.randrange(10) if x < 0.12 else r.randrange(100) if x < 0.4 else r.randrange(1000)
    return -value if r.random() < 0.03 else value


def operands(r: Random, op: str, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = operand(r), operand(r)
        if arithmetic_held_out(op, a, b) == held_out:
            return a, b


def arithmetic_question(r: Random, op: str, a: int, b: int) -> str:
    sentences = say.ADD if op == "+" else say.SUBTRACT
    words = r.choice(sentences)
    if "{things}" in words and (min(a, b) < 0 or (op == "-" and b > a)):  # nobody has less than nothing
        words = sentences[0]
    question = vary(r, words)
    if "{things}" in words:
        return question.format(a=a, b=b, name=r.choice(NAMES), things=r.choice(THINGS))
    return question.format(a=a, b=b)


def arithmetic(r: Random, op: str, held_out: bool) -> Turn:
    a, b = operands(r, op, held_out)
    return arithmetic_question(r, op, a, b), str(calculate(op, a, b))


def addition(r: Random, held_out: bool) -> Turn:
    return arithmetic(r, "+", held_out)


def subtraction(r: Random, held_out: bool) -> Turn:
    return arithmetic(r, "-", held_out)


def times_table(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        a, b, i = r.randrange(11), r.randrange(11), r.randrange(len(say.TIMES))
        return f"*{a}:{b}:{i}", (vary(r, say.TIMES[i]).format(a=a, b=b), str(a * b))

    return draw(held_out, make)


# -- counting and repeating --------------------------------------------------------------------------------------------


def count_range(r: Random) -> tuple[int, int, int]:
    """(first, last, step) within 0..999; `last` is what the user names and need not be reached exactly."""
    step = 1 if r.random() < 0.6 else r.choice((2, 2, 3, 4, 5, 5, 6, 10, 10, 20, 25, 50, 100))
    length = r.randint(2, 25) if r.random() < 0.92 else r.randint(26, 100)
    length = max(2, min(length, 990 // step))
    x, room = r.random(), 999 - step * length
    low = 1 if x < 0.3 else 0 if x < 0.35 else step if x < 0.45 else r.randint(0, min(100, room) if x < 0.75 else room)
    high = low + step * (length - 1)
    if step > 1 and r.random() < 0.25:
        high += r.randrange(step)
    return (low, high, step) if r.random() < 0.65 else (high, low, -step)


def counted(first: int, last: int, step: int) -> list[int]:
    return list(range(first, last + (1 if step > 0 else -1), step))


def counting(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        first, last, step = count_range(r)
        words = r.choice(say.COUNT_BY if abs(step) > 1 else say.COUNT_UP if step > 0 else say.COUNT_DOWN)
        if (first, step) == (1, 1) and r.random() < 0.3:
            words = r.choice(("Count to {b}.", "Count up to {b}.", "Can you count to {b}?"))
        down = " down" if step < 0 and r.random() < 0.6 else ""
        question = vary(r, words).format(a=first, b=last, s=abs(step), down=down)
        return f"count {first} {last} {step}", (question, ", ".join(map(str, counted(first, last, step))))

    return draw(held_out, make)


def pseudo_word(r: Random) -> str:
    ends = ("a", "e", "i", "o", "u", "ai", "ar", "en", "ol", "un")
    return "".join(r.choice("bcdfghjklmnprstvwz") + r.choice(ends) for _ in range(r.randint(1, 4)))


def random_name(r: Random) -> str:
    return r.choice(NAMES) if r.random() < 0.7 else pseudo_word(r).capitalize()


def sentence(r: Random) -> str:
    who = r.choice(("The ", "A ", "My ", "Your ", "This ")) + r.choice(ANIMALS + THINGS)
    who = random_name(r) if r.random() < 0.4 else who
    verb = r.choice(("likes", "sees", "wants", "has", "finds", "eats", "buys", "sold", "lost", "found", "took", "drew"))
    which, kind, what = r.choice(("the", "a", "some", "two", "my")), r.choice(WORDS), r.choice(THINGS + ANIMALS + FOODS)
    where = r.choice(("", "", " today", " at home", " in " + r.choice(CITIES), " with " + r.choice(NAMES)))
    return f"{who} {verb} {which} {kind} {what}{where}"


def random_text(r: Random) -> str:
    """Something to repeat: words, sentences, letters, digits, symbols; no white space at either end."""
    x = r.random()
    if x < 0.15:
        return sentence(r) + r.choice(("", ".", "!", "?"))
    if x < 0.55:
        source = WORDS if r.random() < 0.7 else NAMES + CITIES + COLOURS + FOODS
        length = r.choice((1, 1, 2, 2, 3, 4, 5, 6, 8, r.randint(8, 30)))
        words = [r.choice(source) if r.random() < 0.85 else pseudo_word(r) for _ in range(length)]
        y, text = r.random(), " ".join(words)
        return text if y < 0.6 else text.capitalize() if y < 0.8 else text.upper() if y < 0.9 else ", ".join(words)
    if x < 0.7:
        lower = string.ascii_lowercase
        letters = r.choice((lower, lower, string.ascii_uppercase, string.ascii_letters))
        return r.choice(("", "", "", " ", "-")).join(r.choices(letters, k=r.randint(2, 12)))
    if x < 0.8:
        return r.choice(("", "", " ", ", ")).join(r.choices(string.digits, k=r.randint(1, 10)))
    if x < 0.88:
        return pseudo_word(r)
    if x < 0.94:
        return "".join(r.choices(string.ascii_letters + string.digits + "+-*/=_.,:;!?#$%&@()[]<>", k=r.randint(3, 14)))
    pool = "äöüßéèêñçøåæœłžšğıαβγδλπбвгдежя日本語中文字你好한국어😀👍🎉❤→€£°½" + string.ascii_lowercase
    return " ".join("".join(r.choices(pool, k=r.randint(1, 5))) for _ in range(r.randint(1, 3)))


def repeating(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        text = random_text(r)
        if r.random() < 0.12 and len(text) < 20:
            times = r.randint(2, 5)
            return "repeat " + text, (r.choice(say.REPEAT_TIMES).format(t=text, n=times), " ".join([text] * times))
        return "repeat " + text, (r.choice(say.REPEAT).format(t=text), text)

    return draw(held_out, make)


# -- talk and facts ----------------------------------------------------------------------------------------------------


def greeting(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        openers, answer = r.choices((say.GREETINGS, say.HOW_ARE_YOU, say.THANKS, say.FAREWELLS), (5, 2, 2, 2))[0]
        text = vary(r, r.choice(openers) + r.choice(say.GREETING_TAILS) + r.choice((".", "!", "", "?")))
        return "greet " + plain(text), (text, answer)

    return draw(held_out, make)


def identity(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        questions, answer = r.choice(say.IDENTITY)
        text = vary(r, r.choice(say.LEAD_INS) + r.choice(questions))
        return "identity " + plain(text), (text, answer)

    return draw(held_out, make)


def unknown(r: Random, held_out: bool) -> Turn:
    def make() -> tuple[str, Turn]:
        if r.random() < 0.15:
            numbers = [r.randrange(1000, 10 ** r.randint(4, 6)), r.randrange(10 ** r.randint(1, 6))]
            r.shuffle(numbers)
            words = r.choice((say.ADD, say.SUBTRACT))[r.randrange(8)]
            return f"large {numbers}", (vary(r, words).format(a=numbers[0], b=numbers[1]), TOO_LARGE_REPLY)
        text = vary(r, r.choice(UNKNOWN_QUESTIONS).format(t=r.choice(UNKNOWN_TOPICS)))
        return "unknown " + plain(text), (text, UNKNOWN_REPLY)

    return draw(held_out, make)


def fill(template: str, x: str, y: str) -> str:
    part, _, whole = x.partition("|")
    text = template.format(x=x, y=y, p=part, w=whole)
    return text[0].upper() + text[1:]


def fact(r: Random, held_out: bool, table: Table | None = None) -> tuple[str, str, dict[str, object]]:
    """(question, answer, answer as JSON). All facts are in training; held-out pairs of phrasing and fact are not."""

    def make() -> tuple[str, tuple[str, str, dict[str, object]]]:
        kind = table or r.choices(TABLES, TABLE_WEIGHTS)[0]
        (x, y), i = r.choice(kind.rows), r.randrange(len(kind.questions))
        value = x if kind.name == "country" else y
        found: dict[str, object] = {kind.json_key: int(value) if value.isdigit() else value}
        return f"fact {kind.name} {x} {i}", (fill(kind.questions[i], x, y), fill(kind.answer, x, y), found)

    return draw(held_out, make)


TABLE_WEIGHTS = [len(table.rows) + 10 for table in TABLES]


def facts(r: Random, held_out: bool) -> Turn:
    question, answer, _ = fact(r, held_out)
    return vary(r, question), answer


# -- JSON --------------------------------------------------------------------------------------------------------------


def json_fields(r: Random, held_out: bool) -> tuple[str, dict[str, object]]:
    """A question or a statement, and the JSON object that it asks for or tells."""
    x = r.random()
    if x < 0.3:
        op = r.choice("+-")
        a, b = operands(r, op, held_out)
        words = (say.ADD if op == "+" else say.SUBTRACT)[r.randrange(8)]
        return words.format(a=a, b=b), {"answer": calculate(op, a, b)}
    if x < 0.62:
        question, _, found = fact(r, held_out)
        return question, found

    def make() -> tuple[str, tuple[str, dict[str, object]]]:
        if x < 0.72:
            first = r.randrange(100)
            last = first + r.randint(1, 10)
            question = r.choice(say.COUNT_UP).format(a=first, b=last)
            return f"count {first} {last} 1", (question, {"numbers": list(range(first, last + 1))})
        sentences, keys = r.choice(say.EXTRACT)
        known: dict[str, object] = {
            "name": random_name(r), "age": r.randint(2, 99), "city": r.choice(CITIES), "count": r.randint(2, 99),
            "item": r.choice(THINGS), "colour": r.choice(COLOURS), "animal": r.choice(ANIMALS),
        }  # fmt: skip
        value = {key: known[key] for key in keys}
        return f"json {value}", (r.choice(sentences).format(**known), value)

    return draw(held_out, make)


def json_answer(r: Random, held_out: bool) -> Turn:
    question, value = json_fields(r, held_out)
    text = r.choice(say.JSON_WRAPS).format(q=question)
    return text.rstrip(".?") if r.random() < 0.15 else text, json.dumps(value, ensure_ascii=False)
