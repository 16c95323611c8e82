"""Adapters on the server: named, listed, loaded and unloaded, over a scripted engine."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

import vserve.server.generation.adapters as adapters_module
from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import AdapterLoaded, DropAdapter, LoadAdapter
from vserve.engine.link.plan import ADAPTER_NOT_LOADED, ADAPTER_UNUSABLE
from vserve.engine.options.config import EngineConfig
from vserve.server.app import create_app
from vserve.server.cli.flags import add_flags, read_flags
from vserve.server.client.replicas import Replicas
from vserve.server.errors import ApiError
from vserve.server.generation.adapters import Adapters, Record
from vserve.server.options.config import ServerConfig
from vserve.server.options.reading import read

HI = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": HI, "max_tokens": 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of --lora-dir, with adapters, and a link out of it."""
    for name in ("sql", "sql-2", "broken"):
        (tmp_path / "all" / name).mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "all" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "all" / "loop").symlink_to(tmp_path / "all" / "loop")
    return tmp_path / "all"


Run = Callable[..., None]


@pytest.fixture
def run(engine: Any, text_model: Any, folder: Path) -> Run:
    """run(main, **ServerConfig options): `main` gets a client of a server whose engine serves adapters."""
    engine.config = EngineConfig(model="test", enable_lora=True)

    def go(main: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def inside() -> None:
            app = create_app(engine, ServerConfig(**({"lora_dir": str(folder)} | options)), text_model)
            async with app.router.lifespan_context(app):
                await app.state.server.adapters.load_all(app.state.server.config.modules())
                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                    await main(client)

        asyncio.run(inside())

    return go


async def load(client: httpx.AsyncClient, path: str = "sql", name: str = "sql", **more: Any) -> httpx.Response:
    body = json.dumps({"lora_name": name, "lora_path": path, **more})  # surrogates as escapes
    headers = {"content-type": "application/json"}
    return await client.post("/v1/load_lora_adapter", content=body, headers=headers)


async def unload(client: httpx.AsyncClient, name: str = "sql") -> httpx.Response:
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_the_model_of_a_request_says_which(run: Run, engine: Any, folder: Path) -> None:
    """In every API; each answer has the name; the list of models has parents."""

    async def main(client: httpx.AsyncClient) -> None:
        (id,) = engine.adapters
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Hi", "max_tokens": 20}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 20}),
            ("/v1/chat/completions", CHAT | {"n": 2}),
        ):
            for name, adapter in (("sql", id), ("alias", 0)):
                answer = await client.post(path, json=body | {"model": name})
                assert answer.status_code == 200 and answer.json()["model"] == name
                assert engine.submitted[-1].sampling.adapter == adapter
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "other"})).status_code == 404
        listed = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert listed.keys() == {"test", "alias", "sql"}
        assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("test", str(folder / "sql"))
        assert listed["test"]["parent"] is None
        assert (await client.get("/v1/models/sql")).json() == listed["sql"]
        anthropic = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert [card["id"] for card in anthropic.json()["data"]] == ["test", "alias", "sql"]

    run(main, lora_modules=(f"sql={folder / 'sql'}",))


def test_loading_and_unloading(run: Run, engine: Any, folder: Path) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        answer = await load(client, base_model_name="parent")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert answer.headers["content-type"].startswith("text/plain")
        (first,) = engine.adapters
        assert engine.adapters[first] == str(folder / "sql") and 0 < first < 2**63
        assert (await client.get("/v1/models/sql")).json()["parent"] == "parent"
        refused = [
            (await load(client), 400, "InvalidUserInput", "The adapter `sql` is loaded already: unload it, or set"),
            (await load(client, name="alias"), 400, "InvalidUserInput", "`alias` is the name of the base model"),
            (await load(client, "broken", "b"), 400, "InvalidUserInput", "broken is broken: mend it"),
            (await load(client, name="a\nb"), 400, "InvalidUserInput", "is no name: give printable characters"),
            (await unload(client, "b"), 404, "NotFoundError", "The adapter `b` is not loaded."),
            *[(await load(client, path, "b"), 404, "NotFoundError", "is no folder in that of --lora-dir")
              for path in ("../outside", "link", "/etc", "none", str(folder / ".." / "outside"), "~no-such-user/a",
                           "a\0b", "loop", "loop/a", "x" * 300, "x/" * 2000)],
        ]  # fmt: skip
        for answer, status, kind, words in refused:
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (status, kind) and words in error["message"]
        assert (await load(client, "sql-2", load_inplace=True)).status_code == 200
        (second,) = engine.adapters
        assert second != first and engine.adapters[second] == str(folder / "sql-2")
        answer = await unload(client)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert not engine.adapters
        assert (await client.post("/v1/chat/completions", json=CHAT | {"model": "sql"})).status_code == 404

    run(main)


def test_unloading_waits_for_those_who_use_it(run: Run, engine: Any) -> None:
    """Also an adapter that another has taken the place of: who has begun with it ends with it."""
    engine.delay = 0.1

    async def main(client: httpx.AsyncClient) -> None:
        await load(client)
        (first,) = engine.adapters

        async def chat() -> httpx.Response:
            return await client.post("/v1/chat/completions", json=CHAT | {"model": "sql"})

        running = asyncio.create_task(chat())
        while not engine.submitted:
            await asyncio.sleep(0)
        assert (await load(client, "sql-2", load_inplace=True)).status_code == 200
        assert len(engine.adapters) == 2 and not running.done()
        later = asyncio.create_task(chat())
        while len(engine.submitted) < 2:
            await asyncio.sleep(0)
        assert [one.sampling.adapter for one in engine.submitted] == list(engine.adapters)
        leaving = asyncio.create_task(unload(client))
        while "sql" in (await client.get("/v1/models")).text:
            await asyncio.sleep(0)
        assert not leaving.done() and (await chat()).status_code == 404
        assert (await running).status_code == 200 and first not in engine.adapters
        assert (await later).status_code == 200 and (await leaving).status_code == 200
        assert not engine.adapters

    run(main)


def test_who_may_load(run: Run, engine: Any, folder: Path) -> None:
    """Administrators, from --lora-dir, where adapters are on; the path is theirs to see."""

    async def locked(client: httpx.AsyncClient) -> None:
        user, admin = {"authorization": "Bearer u"}, {"authorization": "Bearer a"}
        for headers, status in ((user, 403), ({}, 401), (admin, 200)):
            client.headers = httpx.Headers(headers)
            assert (await load(client)).status_code == status
        assert (await client.get("/v1/models/sql")).json()["root"] == str(folder / "sql")
        client.headers = httpx.Headers(user)
        assert (await client.get("/v1/models/sql")).json()["root"] == "sql"

    async def without_folder(client: httpx.AsyncClient) -> None:
        answer = await load(client)
        assert answer.status_code == 400 and "--lora-dir says from where" in answer.text

    async def off(client: httpx.AsyncClient) -> None:
        for answer in (await load(client), await unload(client)):
            assert answer.status_code == 400 and "start the server with --enable-lora" in answer.text

    run(locked, api_key=("u",), admin_api_key=("a",))
    run(without_folder, lora_dir=None)
    engine.config = EngineConfig(model="test")
    run(off)


@pytest.mark.parametrize("cause", [ADAPTER_NOT_LOADED, ADAPTER_UNUSABLE])
@pytest.mark.parametrize("streams", [False, True])
def test_an_adapter_that_cannot_be_used_is_named(
    run: Run, engine: Any, folder: Path, cause: str, streams: bool
) -> None:
    """By what clients call it, never by its folder."""
    engine.script = lambda request: []
    engine.fail_with = cause

    async def main(client: httpx.AsyncClient) -> None:
        await load(client)
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "sql", "stream": streams})
        assert answer.status_code == 503 and answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["message"].startswith("The adapter `sql` cannot be used now: its files are not what was loaded")
        assert (error["code"], error["param"]) == ("adapter_unavailable", "model")
        assert str(folder) not in answer.text

    run(main)


def test_the_metric_says_which_run_and_wait(run: Run, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        may_go_on = asyncio.Semaphore(0)
        monkeypatch.setattr(engine, "_pace", lambda mailbox: may_go_on.acquire())

        async def seen(labels: str) -> None:
            page = ""
            async with asyncio.timeout(60):
                while f"vllm:lora_requests_info{{{labels}}}" not in page:
                    page = (await client.get("/metrics")).text
                    await asyncio.sleep(0)

        await load(client)
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"model": "sql"}))
        await seen('max_lora="4",running_lora_adapters="",waiting_lora_adapters="sql"')
        may_go_on.release()  # the first output
        await seen('max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""')
        for _ in range(20):
            may_go_on.release()
        assert (await asking).status_code == 200

    run(main)


def test_modules_are_named_as_vllm_names_them() -> None:
    config = ServerConfig(lora_modules=(
        "a=/a", '{"name": "b", "path": "/b", "base_model_name": "p"}', '[{"name": "c", "path": "o/c"}]',
    ))  # fmt: skip
    assert [(m.name, m.path, m.base) for m in config.modules()] == [
        ("a", "/a", None), ("b", "/b", "p"), ("c", "o/c", None),
    ]  # fmt: skip
    module = {"name": "b", "path": "/b"}
    assert read("lora_modules", [module]) == read("lora_modules", json.dumps(module)) == (json.dumps(module),)
    assert read("lora_modules", "a=/a b=/b") == ("a=/a", "b=/b")
    for words, said in (
        (("a",), "give name=path, or"), (("=/a",), "give name=path"), (("{",), "which is no JSON"),
        (('{"name": "a"}',), "give name=path"), (('{"name": "a", "path": "/a", "x": 1}',), "has 'x' in"),
        (("a=/a", "a=/b"), "has the name 'a' twice"), (("[1]",), "give name=path"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="--lora-modules") as caught:
            ServerConfig(lora_modules=words)
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="--lora-dir is '/none': it is no folder"):
        ServerConfig(lora_dir="/none")


def test_no_adapter_takes_the_name_of_something_else(engine: Any) -> None:
    """Not by way of another process either, whatever that says; who renews its own adapter says so."""
    known: list[Any] = []
    engine.know_adapter = known.append
    adapters = Adapters(engine, ("test", "alias", "beside"), enabled=True)
    adapters.join([])
    mine = Record("mine", "/a", 7, None, 8)
    adapters.take(mine)
    for name in ("test", "alias", "beside", "a\nb"):
        with pytest.raises(ApiError, match=r"name"):
            adapters.take(Record(name, "/etc", 8, None, 8))
    for before in (None, 6):
        with pytest.raises(ApiError, match="`mine` is the name of another adapter"):
            adapters.take(Record("mine", "/etc", 8, None, 8, "", before))
    assert [one.id for one in adapters] == [7] and [message.id for message in known] == [7]
    adapters.take(mine)  # told twice
    adapters.take(Record("mine", "/b", 9, None, 8, "", 7))
    assert [one.id for one in adapters] == [9]


def test_others_hear_whose_name_an_adapter_takes_over(engine: Any, folder: Path) -> None:
    """Also of one that is unloaded, of whose end they may hear later; and when it does not go on."""
    told: list[tuple[int, int | None]] = []
    fails = False

    async def tell(path: str, content: Any = None, timeout: float = 5.0) -> None:
        if path == "/own/adapters":
            told.append((content["id"], content["before"]))
            if fails and len(told) == 4:
                raise OSError("no")

    async def main() -> None:
        nonlocal fails
        adapters = Adapters(engine, ("test",), enabled=True, folder=str(folder), tell=tell)
        await adapters.load("sql", "sql")
        await adapters.load("sql", "sql", in_place=True)
        await adapters.unload("sql")
        await adapters.load("sql", "sql")
        fails = True
        with pytest.raises(ApiError):
            await adapters.load("sql", "sql", in_place=True)

    asyncio.run(main())
    ids = [id for id, _ in told]
    assert [before for _, before in told] == [None, ids[0], ids[1], ids[2], ids[3]] and ids[4] == ids[2]


def test_a_broken_one_ends_the_start(run: Run, folder: Path) -> None:
    async def main(client: httpx.AsyncClient) -> None: ...

    with pytest.raises(ConfigError, match=r"--lora-modules b=.*/broken is broken: mend it"):
        run(main, lora_modules=(f"b={folder / 'broken'}",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lora-modules", "a=/a"], "--lora-modules names adapters, which --enable-lora serves"),
        (["--enable-lora", "--merge-lora", "/a"], "choose one"),
        (["--enable-lora", "--lora-modules", "a=/no/where"], "--lora-modules a=/no/where: there is no such folder"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], said: str) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, ServerConfig)
    with pytest.raises(ConfigError, match=said):
        read_flags(parser.parse_args(["/m", *words]))


def test_an_engine_that_is_back_before_the_others_have_loaded_is_told(engine: Any) -> None:
    """And all are told what is unloaded; one that fails to load it leaves it nowhere."""
    told: list[list[Any]] = [[], []]

    def serve(index: int) -> None:
        replicas.engines[index].ready, replicas.engines[index]._send = True, told[index].append

    async def begin() -> asyncio.Task[AdapterLoaded]:
        task = asyncio.create_task(replicas.load_adapter(message))
        while not all(engine._loading for engine in replicas.engines):
            await asyncio.sleep(0)
        return task

    async def main() -> None:
        for index in (0, 1):
            serve(index)
            replicas.engines[index]._started = asyncio.get_running_loop().create_future()
            replicas.engines[index]._started.set_result(None)
        first, second = replicas.engines
        loading = await begin()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first, "_may_restart", lambda: False)
            first._down("killed")
        serve(0)
        first._receive(info)  # another engine, which is ready
        second._receive(AdapterLoaded(5, 8, "base", version="v"))
        assert (await loading).error is None
        assert told == [[message, message], [message]]
        first._receive(info)  # and another, which has to find the same
        assert told[0].pop() == LoadAdapter(5, "/a", "a", "v")
        replicas.drop_adapter(5)
        assert [messages[-1] for messages in told] == [DropAdapter(5)] * 2
        loading = await begin()
        first._receive(AdapterLoaded(5, error="no room"))
        second._receive(AdapterLoaded(5, 8, "base"))
        assert (await loading).error == "no room"
        assert [messages[-1] for messages in told] == [DropAdapter(5)] * 2
        assert not first.adapters and not second.adapters
        loading = await begin()
        first._receive(AdapterLoaded(5, 8, "base", version="v"))
        second._receive(AdapterLoaded(5, 8, "base", version="w"))
        assert "the engines have read different versions of /a: give all hosts" in ((await loading).error or "")
        assert not first.adapters and not second.adapters

    info = engine.info
    message = LoadAdapter(5, "/a", "a")
    replicas = Replicas(EngineConfig(model="m", device="cpu", data_parallel_size=2, enable_lora=True))
    asyncio.run(asyncio.wait_for(main(), 20))


class Engines:
    """As far as Adapters know them."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    async def load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        self.loaded.append(message.id)
        return AdapterLoaded(message.id, 8, "base", version="v")

    def know_adapter(self, message: LoadAdapter) -> None:
        assert message.version == "v", "an engine that it starts again has to find the same"
        self.loaded.append(message.id)

    def drop_adapter(self, id: int) -> None:
        self.loaded.remove(id)


class Pair:
    """The adapters of two API processes, of which the first tells the second; each with its way to the engine."""

    def __init__(self) -> None:
        self.deaf, self.delay = False, 0.0
        self.engines = Engines(), Engines()
        self.second = Adapters(self.engines[1], ("base",), enabled=True)  # type: ignore[arg-type]
        self.first = Adapters(self.engines[0], ("base",), enabled=True, tell=self.tell)  # type: ignore[arg-type]

    async def tell(self, path: str, content: Any = None, timeout: float = 5.0) -> None:
        if self.deaf:
            raise OSError("API process 1 did not answer")
        if path == "/own/adapters":
            await asyncio.sleep(self.delay)
            self.second.take(Record(**content))
        else:
            assert path == "/own/adapters/retire"
            await self.second.retire(content["id"])


def test_another_process_uses_what_the_first_unloads_to_its_end() -> None:
    async def main() -> None:
        pair = Pair()
        first, second = pair.first, pair.second
        adapter = await first.ensure("sql", "/a")
        told = second.find("sql")
        assert told is not None and (told.id, told.path, told.rank) == (adapter.id, "/a", 8)
        release = told.use()
        unloading = asyncio.create_task(first.unload("sql"))
        await asyncio.sleep(0.01)
        assert first.find("sql") is None and second.find("sql") is None and not unloading.done()
        assert pair.engines[0].loaded == pair.engines[1].loaded == [adapter.id]
        release()
        await unloading
        assert not pair.engines[0].loaded and not pair.engines[1].loaded

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_process_that_does_not_hear_of_it_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "RETIRING", 1)

    async def main() -> None:
        pair = Pair()
        await pair.first.ensure("sql", "/a")
        pair.deaf = True
        with pytest.raises(ApiError, match="did not answer"):
            await pair.first.ensure("sql", "/b")
        found = pair.first.find("sql")
        assert found is not None and found.path == "/a"
        await asyncio.sleep(0.01)
        assert pair.engines[0].loaded == [found.id]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_unload_waits_for_the_load_that_it_crosses() -> None:
    """Or another process would hear of the end first, and keep for ever what the engine has not."""

    async def main() -> None:
        pair = Pair()
        pair.second.join([])
        pair.delay = 0.05
        loading = asyncio.create_task(pair.first.ensure("sql", "/a"))
        while pair.first.find("sql") is None:
            await asyncio.sleep(0)
        await pair.first.unload("sql")
        await loading
        assert pair.first.find("sql") is None and pair.second.find("sql") is None

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_process_that_joins_hears_of_changes_meanwhile() -> None:
    async def main() -> None:
        pair = Pair()
        records = [Record(name, f"/{name}", id, None, 8, "v") for id, name in enumerate(("a", "b", "c"), 1)]
        newer = Record("a", "/newer", 9, None, 8, "v")
        await pair.second.retire(2)
        pair.second.take(newer)
        pair.second.join(records)
        assert {one.name: one.id for one in pair.second} == {"a": 9, "c": 3}

    asyncio.run(main())
