"""The grammar service with a real compiler process: what it compiles, refuses, keeps, forgets and survives."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vserve.engine.grammar.grammar import Grammars
from vserve.engine.grammar.grammar_libraries import load as load_libraries
from vserve.engine.link.messages import AddGrammar, DropGrammars, SetVocabulary
from vserve.server.errors import ApiError
from vserve.server.grammar import service as service_module
from vserve.server.grammar.process import CompilerProcess
from vserve.server.grammar.queue import NUM_CHILDREN
from vserve.server.grammar.service import Constraint, GrammarService
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import load_text_model

DEMO = Path(__file__).parents[2] / "configs" / "demo"


class Engine:
    """Takes in what a real one would be told."""

    def __init__(self, vocab_size: int) -> None:
        self.epoch = 1
        self.info = type("Info", (), {"vocab_size": vocab_size})()
        self.messages: list[Any] = []
        self.grammars = Grammars()

    def send(self, message: Any) -> None:
        self.messages.append(message)
        if isinstance(message, SetVocabulary):
            self.grammars.set_vocabulary(message)
        elif isinstance(message, AddGrammar):
            self.grammars.add(message)
        elif isinstance(message, DropGrammars):
            self.grammars.drop(message.keys)

    def restart(self) -> None:
        self.epoch += 1
        self.grammars = Grammars()

    def sent(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class House:
    """One event loop, engine and service, so that the process with the libraries is started once."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.model = load_text_model(str(DEMO), ServerConfig())
        self.size = self.model.tokenizer.core.get_vocab_size() + 70  # as models do that pad their vocabulary
        self.engine = Engine(self.size)
        self.service = GrammarService(self.engine, self.model, timeout=20)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 120))

    def acquire(self, kind: str, text: Any, **options: Any) -> str:
        return self.run(self.service.acquire(constraint(kind, text, **options)))

    def refusal(self, kind: str, text: Any, **options: Any) -> str:
        with pytest.raises(ApiError) as caught:
            self.run(self.service.acquire(constraint(kind, text, **options), "structured_outputs.test"))
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs.test")
        return caught.value.message

    def follows(self, key: str, text: str) -> bool:
        """Whether the whole text, and then its end, follows the grammar, as the engine sees it."""
        matcher = self.engine.grammars.matcher(key)
        row = np.empty(-(-self.size // 32), dtype=np.int32)
        stop = self.model.eos_token_ids[0]
        for token in [*self.model.tokenizer.encode(text, False), stop]:
            matcher.fill(row)
            allowed = bool(row[token // 32] >> (token % 32) & 1)
            assert allowed == matcher.accept(token)
            if not allowed:
                return False
        return matcher.terminated


def constraint(kind: str, text: Any, **options: Any) -> Constraint:
    return Constraint(kind, text if isinstance(text, str) else json.dumps(text), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def house() -> Any:
    house = House()
    yield house
    house.run(house.service.close())
    house.runner.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    "kind, text, good, bad",
    [
        ("json", PERSON, ['{"name": "Ada", "age": 36}', '{ "name" :\n"Ada"}'], ['{"age": 3}', "[]", ""]),
        ("json", {"type": "string", "maxLength": 2}, ['"ab"'], ['"abc"', "ab"]),
        ("json", {"type": "array", "items": {"$ref": "#"}}, ["[]", "[[], [[]]]"], ["[1]", "[", "{}"]),
        ("json_object", "", ['{"a": [1, {"b": null}]}', "{}"], ["[]", "3", '{"a": }']),
        ("regex", r"\d{3}-[a-c]+", ["123-abc"], ["12-a", "123-", "123-d"]),
        ("choice", ["yes", "no", 'a "quoted" \\ é\n'], ["yes", 'a "quoted" \\ é\n'], ["maybe", "ye", ""]),
        ("grammar", 'root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["aab", "ba"]),
        ("grammar", 'start: "a" start "b" |', ["", "ab", "aaabbb"], ["aab", "ba"]),
        (
            "structural_tag",
            {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]},
            ["free text", "see <f>12</f> there"],
            ["see <f>x</f>"],
        ),
        (
            "structural_tag",
            {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {"type": "json_schema",
             "json_schema": PERSON}, "end": "</a>"}},
            ['<a>{"name": "Ada"}</a>'],
            ["<a></a>", '<a>{"name": 1}</a>'],
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_what_the_engine_allows(
    house: House, kind: str, text: Any, good: list[str], bad: list[str]
) -> None:
    key = house.acquire(kind, text)
    assert all(house.follows(key, one) for one in good)
    assert not any(house.follows(key, one) for one in bad)
    house.service.release(key)


@pytest.mark.parametrize("switch", ["disable_any_whitespace", "disable_additional_properties"])
@pytest.mark.slow
def test_what_the_server_wants_of_all(house: House, switch: str) -> None:
    """--structured-outputs-config, whatever a request says."""
    config = ServerConfig(structured_outputs_config=json.dumps({switch: True}))
    service = GrammarService(house.engine, load_text_model(str(DEMO), config), timeout=20)
    schema = {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"required": ["a"]}]}
    try:
        key = house.run(service.acquire(constraint("json", schema)))
        assert house.follows(key, '{"a": 1}')
        assert house.follows(key, '{ "a": 1}') == (switch != "disable_any_whitespace")
        assert house.follows(key, '{"a": 1, "b": 2}') == (switch != "disable_additional_properties")
    finally:
        house.run(service.close())
        house.engine.restart()  # its grammars went when this service brought its vocabulary


def test_options(house: House) -> None:
    compact = house.acquire("json", PERSON, any_whitespace=False)
    assert house.follows(compact, '{"name": "Ada", "age": 1}') and not house.follows(compact, '{ "name": "Ada"}')
    spaced = house.acquire("json", PERSON, whitespace_pattern=r"\s?")
    assert house.follows(spaced, '{ "name":"Ada"}') and not house.follows(spaced, '{  "name":"Ada"}')
    assert "whitespace pattern" in house.refusal("json", PERSON, whitespace_pattern="x")
    extra = '{"name": "Ada", "x": 1}'
    assert not house.follows(house.acquire("json", PERSON), extra)
    assert house.follows(house.acquire("json", PERSON | {"additionalProperties": True}), extra)
    two = {"allOf": [{"type": "object", "properties": {"name": {"type": "string"}}}, {"required": ["name"]}]}
    assert house.follows(house.acquire("json", two), extra)
    assert not house.follows(house.acquire("json", two, additional_properties=False), extra)


DEEP: Any = {"type": "integer"}
for _ in range(400):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("json", {"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ("json", {"not": {}}, "'not' is not supported"),
        ("json", {"type": "string", "format": "regex"}, "'format' 'regex' is not supported"),
        ("json", {"$ref": "http://127.0.0.1:9/schema.json"}, "leads outside"),
        ("json", {"$ref": "#/$defs/none"}, "leads nowhere"),
        ("json", {"type": "strin"}, "must be of"),
        ("json", {"type": "array", "items": [{}]}, "prefixItems"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "not supported"),
        ("json", {"type": "string", "pattern": "("}, "not a regular expression"),
        ("json", {"minimum": 3, "maximum": 2, "type": "integer"}, "greater than"),
        ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing satisfies it"),
        ("json", DEEP, "nested"),
        ("json", {"enum": [2**60]}, "2^53"),
        ("regex", "a(", "not a regular expression"),
        ("regex", "(?<!a)b", "not supported"),
        ("regex", "(a{1,1000}){1,1000}{1,1000}" + "a?" * 200_000, "regular expression"),
        ("grammar", "root ::= nothing", "not defined"),
        ("grammar", "root ::= root", "no token can follow"),
        ("grammar", "start: start", "nothing satisfies it"),
        ("grammar", "x" * 600_000, "at most 524288"),
        ("structural_tag", {"type": "structural_tag"}, "structural tag"),
        (
            "structural_tag",
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"type": "string", "minLength": 2}},
            },
            "'minLength' is not supported in the schema of a structural tag",
        ),
    ],
)
def test_bad_ones_are_refused_with_the_reason(house: House, kind: str, text: Any, words: str) -> None:
    message = house.refusal(kind, text)
    assert words in message and "\n" not in message and len(message) < 400
    assert "/project/" not in message and ".rs" not in message


def test_equal_requests_compile_once_and_later_ones_not_at_all(house: House) -> None:
    service = house.service
    asked = constraint("json", {"type": "object", "properties": {"once": {"type": "null"}}})

    async def together() -> list[str]:
        return await asyncio.gather(*(service.acquire(asked) for _ in range(20)))

    misses, hits, added = service.num_misses, service.num_hits, len(house.engine.sent(AddGrammar))
    keys = house.run(together())
    assert len(set(keys)) == 1
    assert (service.num_misses - misses, service.num_hits - hits) == (1, 19)
    assert house.acquire("json", asked.text) == keys[0]
    assert service.num_misses - misses == 1
    assert len(house.engine.sent(AddGrammar)) - added == 1, "the engine was told once"


def test_a_refusal_is_kept_for_a_while(house: House) -> None:
    bad = {"type": "object", "dependentRequired": {}}
    house.refusal("json", bad)
    misses, count = house.service.num_misses, house.service.num_failures
    house.refusal("json", bad)
    assert (house.service.num_misses, house.service.num_failures) == (misses, count)
    (entry,) = [e for e in house.service._entries.values() if "dependentRequired" in e.constraint.text]
    assert entry.users == 0
    entry.expires = time.monotonic()
    house.refusal("json", bad)
    assert house.service.num_misses == misses + 1


def test_the_engine_hears_everything_again_after_a_restart(house: House) -> None:
    key = house.acquire("regex", "again[0-9]")
    house.engine.restart()
    del house.engine.messages[:]
    assert house.acquire("regex", "again[0-9]") == key
    assert [type(message) for message in house.engine.messages] == [SetVocabulary, AddGrammar]
    assert house.follows(key, "again7") and not house.follows(key, "again")


def test_special_and_unused_tokens_are_never_allowed(house: House) -> None:
    core = house.model.tokenizer.core
    special = [i for i, token in core.get_added_tokens_decoder().items() if token.special]
    stops = set(house.model.eos_token_ids)
    assert special
    for kind, text in (("regex", "(.|\n)*"), ("grammar", r"root ::= [^]*"), ("grammar", "start: /(.|\n)*/ <[2]>*")):
        matcher = house.engine.grammars.matcher(house.acquire(kind, text))
        row = np.full(-(-house.size // 32), -1, dtype=np.int32)
        matcher.fill(row)
        allowed = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        assert len(allowed) > 100 and stops <= allowed
        assert not (allowed - stops) & set(special) and max(allowed) < core.get_vocab_size()


@pytest.fixture
def small(house: House) -> Any:
    """Services of one's own, on the house's loop."""
    services: list[GrammarService] = []

    def make(**options: Any) -> GrammarService:
        services.append(GrammarService(Engine(house.size), house.model, **options))
        return services[-1]

    yield make
    for service in services:
        house.run(service.close())


@pytest.mark.slow
def test_what_open_requests_hold_is_bounded(house: House, small: Callable[..., GrammarService]) -> None:
    """It cannot be forgotten, so another one is refused, before it is compiled; one in use has room for more users."""
    service = small(timeout=60, max_entries=1, max_used_entries=2)

    async def main() -> None:
        one, _ = [await service.acquire(constraint("regex", text)) for text in ("one", "two")]
        with pytest.raises(ApiError) as caught:
            await service.acquire(constraint("regex", "three"), "tools")
        assert (caught.value.status, caught.value.param) == (503, "tools")
        assert "2 different grammars" in caught.value.message and "at most 2" in caught.value.message
        assert service.num_misses == 2, "it was not even compiled"
        assert await service.acquire(constraint("regex", "one")) == one
        service.release(one)
        service.release(one)
        three = await service.acquire(constraint("regex", "three"))
        service.release(three)

    house.run(main())
    size = next(iter(service._entries.values())).size
    narrow = small(timeout=60, max_used_bytes=2 * size)

    async def fill() -> None:
        keys = [await narrow.acquire(constraint("regex", "two"))]
        with pytest.raises(ApiError) as caught:  # how large it is shows when it is compiled
            await narrow.acquire(constraint("regex", "x" * 2 * size))
        assert caught.value.status == 503 and "bytes" in caught.value.message
        narrow.release(keys[0])
        assert all(entry.users == 0 for entry in narrow._entries.values())

    house.run(fill())


def test_the_least_recently_used_one_that_nobody_holds_is_forgotten(
    house: House, small: Callable[..., GrammarService]
) -> None:
    service = small(timeout=60, max_entries=2)

    async def main() -> None:
        one, two = [await service.acquire(constraint("regex", text)) for text in ("one", "two")]
        service.release(two)
        three = await service.acquire(constraint("regex", "three"))
        assert service._client.sent(DropGrammars)[0].keys == [two], "one is older, but in use"
        service.release(one)
        service.release(three)
        await service.acquire(constraint("regex", "four"))
        assert [message.keys for message in service._client.sent(DropGrammars)] == [[two], [one]]
        await service.acquire(constraint("regex", "three"))
        assert service.num_hits == 1

    house.run(main())


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_who_waits_behind_hostile_ones_still_gets_an_answer(
    house: House, small: Callable[..., GrammarService], settles_within: Any
) -> None:
    """More grammars that never finish than children may run; then one that is good."""

    async def main(service: GrammarService) -> float:
        hostile = [
            asyncio.create_task(service.acquire(constraint("grammar", bomb(seed)), "structured_outputs.grammar"))
            for seed in range(5)
        ]
        await asyncio.sleep(0)
        longest, stop = 0.0, asyncio.Event()

        async def heart() -> None:
            nonlocal longest
            while not stop.is_set():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        beating = asyncio.create_task(heart())
        key = await service.acquire(constraint("json", PERSON))
        assert key
        for result in await asyncio.gather(*hostile, return_exceptions=True):
            assert isinstance(result, ApiError) and result.status == 400, result
            assert "too long" in result.message or "too much memory" in result.message
        stop.set()
        await beating
        return longest

    assert settles_within(2, lambda: house.run(main(small(timeout=6)))), "the event loop stood still"


def bomb(seed: int, size: int = 12_000) -> str:
    """EBNF that takes xgrammar minutes: of 100 KB, or less."""
    return "root ::= " + " ".join(f'("{seed}{i}")?' for i in range(size))


@pytest.mark.slow
def test_a_killed_compiler_is_replaced_and_nobody_notices(house: House, small: Callable[..., GrammarService]) -> None:
    service = small(timeout=60)

    async def main() -> None:
        waiting = [asyncio.create_task(service.acquire(constraint("regex", f"x{i}"))) for i in range(4)]
        await until(lambda: service._compiler.pid is not None)
        os.kill(service._compiler.pid, signal.SIGKILL)  # type: ignore[arg-type]
        assert len(set(await asyncio.gather(*waiting))) == 4
        assert service._compiler.num_restarts == 1
        for death in (2, 3):
            os.kill(service._compiler.pid, signal.SIGKILL)  # type: ignore[arg-type]
            assert await service.acquire(constraint("regex", f"y{death}"))

    house.run(main())


@pytest.mark.slow
def test_closing_leaves_no_process(house: House) -> None:
    service = GrammarService(Engine(house.size), house.model, timeout=60)

    async def main() -> list[int]:
        await service.acquire(constraint("regex", "here"))
        pids = [service._compiler.pid]
        hostile = asyncio.create_task(service.acquire(constraint("grammar", bomb(9))))

        def children() -> list[int]:
            return [int(pid) for pid in Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()]

        await until(children)
        pids += children()
        await service.close()
        with pytest.raises((ApiError, asyncio.CancelledError)):
            await hostile
        await until(lambda: not any(is_alive(pid) for pid in pids))
        return pids

    assert len(house.run(main())) == 2


def is_alive(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_compiler_has_one_thread(house: House) -> None:
    """It forks; torch would start some where there are GPUs."""
    house.acquire("json_object", "")
    process = Path(f"/proc/{house.service._compiler.pid}")
    assert len(os.listdir(process / "task")) == 1
    assert "libtorch" not in (process / "maps").read_text()


def test_nobody_waits_for_what_nobody_waits_for(house: House, small: Callable[..., GrammarService]) -> None:
    """Clients ask for what takes minutes, and leave: those that wait to be compiled are forgotten, those that are being
    compiled end once somebody else needs their place."""
    service = small(timeout=600)

    async def main() -> None:
        await service.acquire(constraint("regex", "first"))
        asked = [asyncio.create_task(service.acquire(constraint("grammar", bomb(seed)))) for seed in range(6)]
        asked += [asyncio.create_task(service.acquire(constraint("grammar", bomb(7, 1_000)))) for _ in range(2)]
        await until(lambda: len(children_of(service)) == NUM_CHILDREN)
        assert service._compiler.num_waiting == 5, "one long, one short: as children may have"
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
        assert service._compiler.num_waiting == 0
        assert len(children_of(service)) == NUM_CHILDREN, "nobody needs their places"
        again = asyncio.create_task(service.acquire(constraint("grammar", bomb(0))))  # and has it compiled on
        await asyncio.sleep(0)
        assert await asyncio.wait_for(service.acquire(constraint("json", PERSON)), 60)
        left = {entry.constraint.text for entry in service._entries.values()}
        assert left == {"first", bomb(0), json.dumps(PERSON)}, "one had to go, not that which somebody wants"
        again.cancel()
        await asyncio.wait([again])

    house.run(main())


def children_of(service: GrammarService) -> list[int]:
    pid = service._compiler.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_took_all_of_its_time_is_refused_at_once_for_minutes(
    house: House, small: Callable[..., GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small(timeout=0.5)

    async def refused() -> str:
        with pytest.raises(ApiError) as caught:
            await service.acquire(constraint("grammar", bomb(3)))
        assert caught.value.status == 400
        return caught.value.message

    async def main() -> None:
        message = await refused()
        (entry,) = service._entries.values()
        assert entry.expires - time.monotonic() > 60
        compiled = service._compiler._next_id
        assert await refused() == message
        assert service._compiler._next_id == compiled, "it was not tried again"

    house.run(main())


def test_whoever_has_the_most_that_waits_gives_way(
    house: House, small: Callable[..., GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = small(timeout=60)
    monkeypatch.setattr(CompilerProcess, "_begin", lambda self: None)  # nothing is ever compiled
    monkeypatch.setattr(service_module, "MAX_WAITING", 4)

    def ask(owner: str, text: str) -> asyncio.Task[str]:
        return asyncio.create_task(service.acquire(constraint("regex", text), "tools", owner))

    async def main() -> None:
        greedy = [ask("greedy", f"g{i}") for i in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await ask("greedy", "g4")
        assert (caught.value.status, caught.value.param) == (503, "tools") and "at most 4" in caught.value.message
        modest = [ask("modest", f"m{i}") for i in range(2)]
        await asyncio.sleep(0.01)
        assert [task.done() for task in greedy] == [False, False, True, True], "the newest ones"
        assert not any(task.done() for task in modest)
        with pytest.raises(ApiError):
            await ask("modest", "m2")  # has as many
        for task in (*greedy, *modest):
            task.cancel()
        for result in await asyncio.gather(*greedy, *modest, return_exceptions=True):
            assert isinstance(result, ApiError | asyncio.CancelledError)
        assert service._compiler.num_waiting == 0 and not service._entries

    house.run(main())


def test_it_ends_in_order_while_it_compiles_what_nobody_waits_for(
    house: House, small: Callable[..., GrammarService]
) -> None:
    """As a server does that is told to end while its compiler warms up."""
    compiler = small(timeout=60)._compiler

    async def main() -> None:
        job = compiler.submit(constraint("grammar", bomb(9)), "somebody")
        while not job.is_running:
            await asyncio.sleep(0.01)
        job.result.cancel()
        await compiler.close()
        assert job.result.cancelled()

    house.run(main())


class Wide:
    """A tokenizer with any number of words behind those of another one."""

    def __init__(self, tokenizer: Any) -> None:
        self.special = tokenizer.special
        self._tokenizer = tokenizer
        self._size = tokenizer.core.get_vocab_size()

    def token_bytes(self, token_id: int) -> bytes:
        known = self._tokenizer._token_bytes(token_id % self._size)
        return known if token_id < self._size else b"w%x" % token_id


def test_reading_the_vocabulary_and_telling_the_engine_keep_no_thread_waiting(
    house: House, small: Callable[..., GrammarService], longest_gap: Any, settles_within: Any
) -> None:
    """Everything from the model's tokens to the first grammar, in the process that serves and in the engine's, which
    are one here: 150,000 tokens."""
    model, size = dataclasses.replace(house.model, tokenizer=Wide(house.model.tokenizer)), 150_000

    async def first_grammar() -> None:
        service = GrammarService(Engine(size), model, timeout=60)
        try:
            key = await service.acquire(constraint("json", PERSON))
            ready = asyncio.Event()
            loop = asyncio.get_running_loop()
            service._client.grammars.matcher(key).when_ready(lambda: loop.call_soon_threadsafe(ready.set))
            await ready.wait()
        finally:
            await service.close()

    load_libraries()  # as an engine does before it is ready
    assert settles_within(0.15, lambda: longest_gap(lambda: house.run(first_grammar())))
