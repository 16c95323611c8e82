"""The demo model's generator: right answers, prompts that are really held out, and a template that round-trips."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest

DEMO = Path(__file__).parents[1] / "configs" / "demo"
MODULES = ("data", "facts", "phrases", "skills", "tokenizer", "shards")


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules, imported as the scripts do: as siblings. Their plain names do not stay behind."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(DEMO))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(DEMO))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture(scope="module")
def conversations(demo: dict[str, ModuleType]) -> list[list[dict[str, str]]]:
    r = Random(11)
    return [demo["data"].conversation(r) for _ in range(20_000)]


def turns_of(conversation: list[dict[str, str]]) -> list[tuple[str, str]]:
    talk = [message["content"] for message in conversation if message["role"] != "system"]
    return list(zip(talk[::2], talk[1::2], strict=True))


SUM = re.compile(
    r"(?:what is|what's|calculate|compute|how much is)? ?(-?\d+) ?(\+|-|plus|minus) ?(-?\d+)( =)?[?.! ]*$", re.I
)


def parse_sum(text: str) -> tuple[int, int] | None:
    """(first number, signed second) of the plainest phrasings, read without the generator's help."""
    match = SUM.match(text)
    if not match:
        return None
    return int(match[1]), int(match[3]) if match[2] in ("+", "plus") else -int(match[3])


def test_conversations_alternate_and_end_with_the_assistant(conversations: list[list[dict[str, str]]]) -> None:
    for conversation in conversations:
        roles = [message["role"] for message in conversation]
        roles = roles[1:] if roles[0] == "system" else roles
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] == message["content"].lstrip() for message in conversation)
        assert all(message["content"] for message in conversation)


def test_arithmetic_is_right_by_another_way_of_reading_it(conversations: list[list[dict[str, str]]]) -> None:
    checked = 0
    for conversation in conversations:
        for user, answer in turns_of(conversation):
            found = parse_sum(user)
            if found and re.fullmatch(r"-?\d+", answer):
                assert sum(found) == int(answer), user
                checked += 1
    assert checked > 2000


def test_a_sum_that_is_held_out_is_nowhere_in_training(
    demo: dict[str, ModuleType], conversations: list[list[dict[str, str]]]
) -> None:
    held_out = set()
    for skill in ("addition", "subtraction"):
        for prompt, answer in demo["data"].held_out_prompts(skill, 2000):
            found = parse_sum(prompt[-1]["content"])
            if found:
                assert sum(found) == int(answer)
                held_out.add(found)
    assert len(held_out) > 800
    for conversation in conversations:
        for user, _ in turns_of(conversation):
            found = parse_sum(user)
            assert found is None or found not in held_out, user
            assert found is None or found[1] < 0 or found[::-1] not in held_out, user  # nor the other way round


@pytest.mark.parametrize(
    "skill", ["greeting", "repeating", "facts", "times_table", "identity", "counting", "json", "unknown"]
)
def test_held_out_questions_are_disjoint_from_those_of_training(demo: dict[str, ModuleType], skill: str) -> None:
    """Capitals, punctuation and system prompts vary freely, so questions are compared without them."""

    def plain(text: str) -> str:
        return re.sub(r"[^\w\s+*-]", "", text).casefold().strip()

    data, r = demo["data"], Random(3)
    trained = {plain(data.SKILLS[skill](r, False)[-1][0]) for _ in range(20_000)}
    asked = {plain(prompt[-1]["content"]) for prompt, _ in data.held_out_prompts(skill, 200)}
    asked = {text for text in asked if len(text) > 5}  # two symbols to repeat may lose all that tells them apart
    assert len(asked) > 25
    common = asked & trained
    assert len(common) <= 0.02 * len(asked), common


def test_counting_is_right(demo: dict[str, ModuleType]) -> None:
    r = Random(4)
    for _ in range(2000):
        first, last, step = demo["skills"].count_range(r)
        numbers = demo["skills"].counted(first, last, step)
        assert numbers[0] == first and 2 <= len(numbers) <= 100
        assert all(b - a == step for a, b in pairwise(numbers))
        assert 0 <= abs(last - numbers[-1]) < abs(step) and all(0 <= n <= 999 for n in numbers)
        assert (last - numbers[-1]) * step >= 0


def test_repeated_text_stands_in_the_question(demo: dict[str, ModuleType]) -> None:
    r = Random(5)
    for _ in range(2000):
        ((question, answer),) = demo["data"].SKILLS["repeating"](r, False)
        times = re.search(r" (\d) times\.$", question)
        if times and len(answer) % int(times[1]) == int(times[1]) - 1 and answer not in question:
            piece = answer[: (len(answer) + 1) // int(times[1]) - 1]
            assert answer == " ".join([piece] * int(times[1]))
            answer = piece
        assert answer in question


def test_json_answers_parse_and_say_what_the_question_holds(demo: dict[str, ModuleType]) -> None:
    r, data = Random(6), demo["data"]
    facts = {str(y) for table in demo["facts"].TABLES for row in table.rows for y in row}
    for _ in range(2000):
        ((question, answer),) = data.SKILLS["json"](r, False)
        for key, value in json.loads(answer).items():
            if key == "numbers":
                assert value == list(range(value[0], value[-1] + 1))
            elif key != "answer":
                assert str(value) in question or str(value) in facts


def test_facts_have_one_answer_and_every_fact_is_in_training(demo: dict[str, ModuleType]) -> None:
    tables, is_held_out = demo["facts"].TABLES, demo["skills"].is_held_out
    assert sum(len(table.rows) for table in tables) > 100
    for table in tables:
        assert len({x for x, _ in table.rows}) == len(table.rows)
        for x, _ in table.rows:
            kept = [not is_held_out(f"fact {table.name} {x} {i}") for i in range(len(table.questions))]
            assert sum(kept) >= 3


def test_recall_quotes_what_was_really_said(
    demo: dict[str, ModuleType], conversations: list[list[dict[str, str]]]
) -> None:
    firsts, checked = {text.rstrip("?.").lower() for text in demo["phrases"].SAID_FIRST}, 0
    for conversation in conversations:
        turns = turns_of(conversation)
        for number, (user, answer) in enumerate(turns):
            if number and user.rstrip("?.!").lower() in firsts:
                assert answer == f'You said: "{turns[0][0]}"'
                checked += 1
            elif answer.startswith('You said: "'):
                assert any(answer == f'You said: "{earlier}"' for earlier, _ in turns[:number])
    assert checked > 100


def test_held_out_prompts_are_reproducible_and_distinct(demo: dict[str, ModuleType]) -> None:
    for skill in demo["data"].SKILLS:
        prompts = demo["data"].held_out_prompts(skill, 200)
        assert prompts == demo["data"].held_out_prompts(skill, 200)
        assert len({json.dumps(prompt) for prompt, _ in prompts}) == 200


def test_tokenizer_round_trips_and_keeps_digits_apart(
    demo: dict[str, ModuleType], conversations: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    module = demo["tokenizer"]
    made = module.train_tokenizer(600, num_conversations=3000)
    module.save_tokenizer(made, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|im_end|>", module.IM_END_ID)
    assert made.token_to_id("<|endoftext|>") == module.END_OF_TEXT_ID
    assert [made.id_to_token(i) for i in made.encode("12 + 305").ids][-3:] == ["3", "0", "5"]
    assert not [token for token in made.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]
    for conversation in conversations[:300]:
        text = module.render(conversation)
        assert loaded.apply_chat_template(conversation, tokenize=False) == text
        assert loaded.decode(loaded(text)["input_ids"]) == text
        asked = loaded.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True)
        answer = conversation[-1]["content"] + "<|im_end|>\n"
        # The answer's tokens do not depend on whether the prompt was tokenised with it: serving equals training.
        assert loaded(asked)["input_ids"] + loaded(answer)["input_ids"] == loaded(text)["input_ids"]


def test_loss_is_taken_on_the_assistants_words_only(
    demo: dict[str, ModuleType], conversations: list[list[dict[str, str]]]
) -> None:
    module, shards = demo["tokenizer"], demo["shards"]
    made = module.train_tokenizer(600, num_conversations=3000)
    chosen = conversations[:500]
    rows = shards.encode_rows(made, [module.render(conversation) for conversation in chosen])
    seen = []
    for width, tokens in rows.items():
        assert tokens.shape[1] == width
        for row in tokens:
            ids = row[(row & shards.TARGET_BIT) != 0] & ~np.uint16(shards.TARGET_BIT)
            seen.append(made.decode(ids.tolist(), skip_special_tokens=False))
    wanted = ["".join(f"{answer}<|im_end|>" for _, answer in turns_of(conversation)) for conversation in chosen]
    dropped = len(chosen) - len(seen)
    assert dropped < 10 and len(set(seen) - set(wanted)) == 0
