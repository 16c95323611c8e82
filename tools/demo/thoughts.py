"""Thinking: sums column by column and products part by part, between <think> and </think>, when asked to."""

from __future__ import annotations

from random import Random

import phrases as say
from chat import Turn
from skills import arithmetic_question, calculate, draw, is_held_out, operands, vary

NO_STEPS = "This needs no steps."
_COLUMNS = ("Ones", "Tens", "Hundreds")


def sum_steps(a: int, b: int) -> list[str]:
    """a + b, both in 0..999, the way it is done on paper."""
    steps, carry, columns = [], 0, max(len(str(a)), len(str(b)))
    for column in range(columns):
        digits = [a // 10**column % 10, b // 10**column % 10] + [1] * carry
        total, carry = sum(digits), int(sum(digits) > 9)
        carried = ", carry 1" if carry and column < columns - 1 else ""
        steps.append(f"{_COLUMNS[column]}: {' + '.join(map(str, digits))} = {total}{carried}")
    return [*steps, f"{a} + {b} = {a + b}"]


def product_steps(a: int, b: int) -> list[str]:
    """a * b, both in 0..99: the tens and ones of b, each times the tens and ones of a."""
    if a <= 10 and b <= 10:
        return [f"{a} * {b} = {a * b}"]
    if a <= 10:
        return [f"{a} * {b} = {b} * {a}", *product_steps(b, a)]
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return [_part(a, b)]
    return [
        f"{a} * {b} = {a} * {tens} + {a} * {ones}",
        _part(a, tens),
        _part(a, ones),
        f"{a * tens} + {a * ones} = {a * b}",
    ]


def _part(a: int, b: int) -> str:
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {tens} * {b} + {ones} * {b} = {tens * b} + {ones * b} = {a * b}"


def product_held_out(a: int, b: int) -> bool:
    """Products up to 10 * 10 are the table that everyone learns by heart: never held out."""
    return max(a, b) > 10 and is_held_out(f"{min(a, b)} * {max(a, b)}")


def factors(r: Random, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = r.randrange(2, 100), r.randrange(2, 100)
        if r.random() < 0.15:
            b = r.randrange(2, 10)
        a, b = (a, b) if r.random() < 0.8 else (b, a)
        if product_held_out(a, b) == held_out:
            return a, b


def summands(r: Random, held_out: bool) -> tuple[int, int]:
    """Mostly of two digits."""
    while True:
        a, b = operands(r, "+", held_out)
        if min(a, b) >= 0 and (max(a, b) < 100 or r.random() < 0.15):
            return a, b


def reckoning(r: Random, held_out: bool) -> tuple[str, str, str]:
    """(question, thought, answer) about a sum, a product or, in one step, a difference."""
    x = r.random()
    if x < 0.4:
        a, b = summands(r, held_out)
        return arithmetic_question(r, "+", a, b), "\n".join(sum_steps(a, b)), str(a + b)
    if x < 0.9:
        a, b = factors(r, held_out)
        question = vary(r, r.choice(say.TIMES)).format(a=a, b=b)
        return question, "\n".join(product_steps(a, b)), str(a * b)
    a, b = operands(r, "-", held_out)
    value = str(calculate("-", a, b))
    return arithmetic_question(r, "-", a, b), f"{a} - {b} = {value}", value


def without_thinking(r: Random, held_out: bool) -> Turn:
    """A product of two numbers of two digits, nothing said about steps."""

    def make() -> tuple[str, Turn]:
        a, b, i = r.randrange(11, 100), r.randrange(11, 100), r.randrange(len(say.TIMES))
        return f"hard {a} {b} {i}", (vary(r, say.TIMES[i]).format(a=a, b=b), say.TOO_HARD)

    return draw(held_out, make)
