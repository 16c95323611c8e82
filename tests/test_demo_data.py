"""The demo model's generator and its weights: right answers, prompts that are held out, a template that round-trips."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import jsonschema
import numpy as np
import pytest

from vserve.server.text.template import ChatTemplate

ROOT = Path(__file__).parents[1]
DEMO, SCRIPTS = ROOT / "configs" / "demo", ROOT / "tools" / "demo"
MODULES = ("chat", "facts", "phrases", "skills", "thoughts", "tools", "calls", "data", "tokenizer", "shards")


@pytest.fixture(scope="module")
def demo() -> Iterator[dict[str, ModuleType]]:
    """The scripts' modules, imported as the scripts do: as siblings. Their plain names do not stay behind."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


@pytest.fixture(scope="module")
def conversations(demo: dict[str, ModuleType]) -> list[Any]:
    r = Random(11)
    return [demo["data"].conversation(r) for _ in range(20_000)]


@pytest.fixture(scope="module")
def answers(demo: dict[str, ModuleType], conversations: list[Any]) -> list[str]:
    """How each of them ends."""
    return [demo["chat"].answer_text(chat) for chat in conversations]


def turns_of(chat: Any) -> list[tuple[str, str]]:
    """What the user says with what the assistant answers at once, which is nothing where it calls a tool."""
    return [(a["content"], b["content"]) for a, b in pairwise(chat.messages) if a["role"] == "user"]


SUM = re.compile(
    r"(?:what is|what's|calculate|compute|how much is)? ?(-?\d+) ?(\+|-|plus|minus) ?(-?\d+)( =)?[?.! ]*$", re.I
)


def parse_sum(text: str) -> tuple[int, int] | None:
    """(first number, signed second) of the plainest phrasings, read without the generator's help."""
    match = SUM.match(text)
    if not match:
        return None
    return int(match[1]), int(match[3]) if match[2] in ("+", "plus") else -int(match[3])


def test_conversations_alternate_and_end_with_the_assistant(conversations: list[Any]) -> None:
    for chat in conversations:
        assert re.fullmatch("s?(ua(t+a)?)+", "".join(message["role"][0] for message in chat.messages))
        for message in chat.messages:
            assert message["content"] == message["content"].lstrip()
            assert bool(message["content"]) != ("tool_calls" in message)


def test_arithmetic_is_right_by_another_way_of_reading_it(conversations: list[Any]) -> None:
    checked = 0
    for conversation in conversations:
        for user, answer in turns_of(conversation):
            found = parse_sum(user)
            if found and re.fullmatch(r"-?\d+", answer):
                assert sum(found) == int(answer), user
                checked += 1
    assert checked > 2000


def test_a_sum_that_is_held_out_is_nowhere_in_training(demo: dict[str, ModuleType], conversations: list[Any]) -> None:
    held_out = set()
    for skill in ("addition", "subtraction"):
        for prompt, answer in demo["data"].held_out_prompts(skill, 2000):
            found = parse_sum(prompt.messages[-1]["content"])
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
    asked = {plain(prompt.messages[-1]["content"]) for prompt, _ in data.held_out_prompts(skill, 200)}
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


def test_recall_quotes_what_was_really_said(demo: dict[str, ModuleType], conversations: list[Any]) -> None:
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


def test_calls_fit_the_schema_and_hold_what_was_asked(conversations: list[Any]) -> None:
    checked, offered, twice = 0, set(), 0
    for chat in conversations[:10_000]:
        schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in chat.tools or ()}
        offered.add(len(schemas))
        for user, call in pairwise(chat.messages):
            calls = call.get("tool_calls", ())
            for function in (one["function"] for one in calls):
                jsonschema.Draft202012Validator(schemas[function["name"]]).validate(function["arguments"])
                assert function["arguments"].keys() <= schemas[function["name"]].get("properties", {}).keys()
                for value in function["arguments"].values():
                    text = str(value).lower() if isinstance(value, bool) else str(value)
                    assert text.lower() in user["content"].lower()
                checked += 1
            twice += len(calls) == 2
    assert checked > 1000 and offered >= {0, 1, 2, 3} and twice > 100


def test_answers_to_tools_say_what_the_tool_returned(conversations: list[Any]) -> None:
    checked = 0
    for chat in conversations:
        for i, message in enumerate(chat.messages):
            if message["role"] == "assistant" and chat.messages[i - 1]["role"] == "tool":
                start = max(j for j in range(i) if chat.messages[j]["role"] == "user")
                known = " ".join(str(earlier["content"]) for earlier in chat.messages[start:i])
                for number in re.findall(r"\d+", message["content"]):
                    assert number in known
                for earlier in chat.messages[start:i]:
                    if earlier["role"] == "tool" and earlier["content"].isdigit():
                        assert earlier["content"] in message["content"]
                checked += 1
    assert checked > 2000


def test_thoughts_reckon_right(conversations: list[Any]) -> None:
    """Each line is a chain of equal terms, and the last one ends with the answer."""
    checked = 0
    for chat in conversations:
        message = chat.messages[-1]
        thought = message.get("reasoning_content", "")
        if not re.search(r"\d = ", thought):
            continue
        columns = ""
        for line in thought.splitlines():
            terms = [eval(term) for term in re.sub(r"^\w+: |, carry 1$", "", line).split(" = ")]
            assert len(set(terms)) == 1, line
            if line.startswith(("Ones", "Tens", "Hundreds")):
                columns = str(terms[0])[-1 if "carry" in line else 0 :] + columns
        assert str(terms[0]) == message["content"] and columns in ("", message["content"])
        checked += 1
    assert checked > 500


@pytest.mark.parametrize("skill", ["tool_call", "tool_answer", "no_tool", "thinking"])
@pytest.mark.slow
def test_held_out_questions_of_chats_are_nowhere_in_training(
    demo: dict[str, ModuleType], conversations: list[Any], answers: list[str], skill: str
) -> None:
    """The wording is drawn freely, so what is compared of a thought is the sum or product that it is about."""

    def last(chat: Any, answer: str) -> str:
        if skill == "thinking":
            return answer.partition("</think>")[0].splitlines()[-1]
        said = [message["content"] for message in chat.messages if message["role"] == "user"]
        return demo["skills"].plain(said[-1])

    held_out = {last(prompt, answer) for prompt, answer in demo["data"].held_out_prompts(skill, 300)}
    held_out = {text for text in held_out if re.search(r"\w{3}|\d{2}", text) and len(text) > 8}
    trained = set()
    for chat, text in zip(conversations, answers, strict=True):
        if bool(chat.tools) == (skill != "thinking") and ("<think>" in text or chat.tools):
            trained.add(last(chat, text))
    assert len(held_out) > 100 and len(trained) > 1000
    assert len(held_out & trained) <= 0.02 * len(held_out), held_out & trained


def test_the_server_renders_what_was_trained(demo: dict[str, ModuleType], conversations: list[Any]) -> None:
    template, render = ChatTemplate((DEMO / "chat_template.jinja").read_text()), demo["chat"].render
    for chat in conversations[:1000]:
        options = {"tools": chat.tools, "enable_thinking": chat.enable_thinking}
        assert template.render(chat.messages, options) == render(chat)
    plain = [{"role": "user", "content": "Hi"}]
    asked = [template.render(plain, {"reasoning_effort": effort}) for effort in (None, "none", "low")]
    assert asked[0] == asked[1] == "<|im_start|>user\nHi<|im_end|>\n"
    assert asked[2] == render(demo["chat"].Chat(plain, None, True)) != asked[0]


def test_thoughts_are_forgotten_when_the_user_goes_on(demo: dict[str, ModuleType]) -> None:
    Chat, render = demo["chat"].Chat, demo["chat"].render
    thought = {"role": "assistant", "content": "5", "reasoning_content": "2 + 3 = 5"}
    before = [{"role": "user", "content": "2 + 3"}, thought]
    assert "<think>\n2 + 3 = 5\n</think>\n\n5<|im_end|>" in render(Chat(before))
    after = Chat([*before, {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}])
    assert "<think>" not in render(after)
    assert demo["chat"].num_untrained(after) == 1


def test_tokenizer_round_trips_and_keeps_digits_apart(
    demo: dict[str, ModuleType], conversations: list[Any], tmp_path: Path
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
    for mark in module.MARKS:
        assert loaded.convert_ids_to_tokens(loaded(mark)["input_ids"]) == [mark]
        assert loaded.decode(loaded(mark)["input_ids"], skip_special_tokens=True) == mark
    for chat in conversations[:300]:
        text, options = demo["chat"].render(chat), {"enable_thinking": chat.enable_thinking, "tokenize": False}
        assert loaded.apply_chat_template(chat.messages, chat.tools, **options) == text
        assert loaded.decode(loaded(text)["input_ids"]) == text
        asked = loaded.apply_chat_template(chat.messages[:-1], chat.tools, add_generation_prompt=True, **options)
        answer = demo["chat"].answer_text(chat) + "<|im_end|>\n"
        # The answer's tokens do not depend on whether the prompt was tokenised with it: serving equals training.
        assert loaded(asked)["input_ids"] + loaded(answer)["input_ids"] == loaded(text)["input_ids"]


def test_loss_is_taken_on_the_assistants_words_only(demo: dict[str, ModuleType], conversations: list[Any]) -> None:
    module, shards = demo["tokenizer"], demo["shards"]
    made = module.train_tokenizer(600, num_conversations=3000)
    chosen = conversations[:500]
    rows = shards.encode_rows(made, chosen)
    seen = []
    for width, tokens in rows.items():
        assert tokens.shape[1] == width
        for row in tokens:
            ids = row[(row & shards.TARGET_BIT) != 0] & ~np.uint16(shards.TARGET_BIT)
            seen.append(made.decode(ids.tolist(), skip_special_tokens=False))
    wanted, forgotten = set(), 0
    for chat in chosen:
        said = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", demo["chat"].render(chat), re.DOTALL)
        if "<think>" in said[-1]:  # what came before was not thought about, or it is no longer to be seen
            skipped = len(said) - sum("<think>" in text for text in said)
            said, forgotten = said[skipped:], forgotten + bool(skipped)
        wanted.add("".join(said))
    dropped = len(chosen) - len(seen)
    assert dropped < 10 and len(set(seen) - wanted) == 0 and forgotten > 5


@pytest.mark.slow
def test_the_weights_keep_their_bars() -> None:
    """Fewer prompts than `evaluation.json` reports on; greedy answers to fixed prompts do not change by themselves."""
    skills = ["addition", "facts", "json", "tool_call", "tool_answer", "no_tool", "thinking"]
    command = [
        sys.executable,
        str(SCRIPTS / "evaluate.py"),
        "--device",
        "cpu",
        "--prompts",
        "16",
        "--show",
        "3",
        "--skills",
    ]
    done = subprocess.run([*command, *skills], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" %\n") == len(skills)


def test_the_measurement_that_is_shipped_keeps_every_bar(demo: dict[str, ModuleType]) -> None:
    scores = json.loads((DEMO / "evaluation.json").read_text())
    assert scores.keys() == demo["data"].BARS.keys()
    assert all(scores[skill] >= bar for skill, bar in demo["data"].BARS.items())
