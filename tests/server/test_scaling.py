"""More engines and fewer, while others serve: the order of things, with engines that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from vserve.engine.link.messages import AbortRequests, AddRequest, EngineInfo, EngineStats, RequestOutput, StepOutputs
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.app import create_app
from vserve.server.client import replicas as module
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError
from vserve.server.client.replicas import Replicas
from vserve.server.client.routing import Route
from vserve.server.client.scaling import ScalingError, scale
from vserve.server.options.config import ServerConfig

SAMPLING = SamplingParams(max_tokens=4)


class Engine(EngineClient):
    """One without a process: what it is sent lies in `sent`, what it says the test makes it say."""

    cannot_start = ""
    device = "cpu"

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self.cannot_start:
            raise EngineDeadError(self.cannot_start)
        self.sent: list[Any] = []
        self._send = self.sent.append
        self.info = EngineInfo(
            max_model_len=128, vocab_size=320, max_num_seqs=8, max_num_batched_tokens=512, block_size=16,
            num_blocks=100, num_kv_tokens=1600, enable_prefix_caching=True, scheduling_policy="fcfs", max_logprobs=20,
            dtype="float32", device=self.device,
        )  # fmt: skip
        self.ready, self.epoch, self.closed = True, 1, False

    async def close(self) -> None:
        self.ready, self.closed = False, True

    def say(self, id: int, finish_reason: str | None = None) -> None:
        self._receive(StepOutputs([RequestOutput(id, [7], finish_reason)], EngineStats()))

    def asked(self) -> list[int]:
        return [message.id for message in self.sent if isinstance(message, AddRequest)]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(module, "EngineClient", Engine)

    async def make(size: int) -> Any:
        made = Replicas(EngineConfig("m", data_parallel_size=size, device="cpu"), restarts=3)
        await made.start()
        return made

    return make


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def submit(replicas: Any, engine: int | None = None, prompt: int = 1) -> Any:
    (mailbox,) = replicas.submit_choices(1, [prompt] * 20, SAMPLING, route=Route(engine=engine))
    return mailbox


def test_new_engines_get_requests_once_all_of_them_serve(fleet: Any) -> None:
    async def test() -> None:
        replicas = await fleet(1)
        growing = asyncio.create_task(scale(replicas, 3, 0))
        await asyncio.sleep(0)
        assert len(replicas.engines) == 3 and replicas.ready
        for prompt in range(6):
            submit(replicas, prompt=prompt)
        with pytest.raises(EngineDeadError, match="being added or removed"):
            submit(replicas, 2)
        with pytest.raises(ScalingError, match="already"):
            await scale(replicas, 2, 0)
        await growing
        assert len(replicas.engines[0].asked()) == 6
        for prompt in range(6):
            submit(replicas, prompt=10 + prompt)
        assert [bool(engine.asked()) for engine in replicas.engines] == [True] * 3
        assert replicas.config.data_parallel_size == 3 and replicas.info.max_num_seqs == 24

    run(test())


@pytest.mark.parametrize(("attribute", "value", "said"), [
    ("cannot_start", "no memory left", "no memory left"), ("device", "cuda", "engine 0 runs on cpu, but engine 1 on"),
])  # fmt: skip
def test_who_cannot_be_added_leaves_everything_as_it_was(
    fleet: Any, monkeypatch: pytest.MonkeyPatch, attribute: str, value: str, said: str
) -> None:
    async def test() -> None:
        replicas = await fleet(1)
        monkeypatch.setattr(Engine, attribute, value)
        with pytest.raises(ScalingError, match=said):
            await scale(replicas, 3, 0)
        assert len(replicas.engines) == 1 and replicas.config.data_parallel_size == 1 and not replicas.leaving
        submit(replicas)

    run(test())


def test_whatever_goes_wrong_a_growth_is_undone(fleet: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def start(engine: Any) -> None:
        raise RuntimeError("nobody thought of this")

    async def test() -> None:
        replicas = await fleet(1)
        monkeypatch.setattr(Engine, "start", start)
        with pytest.raises(ScalingError, match="nobody thought of this"):
            await scale(replicas, 3, 0)
        assert len(replicas.engines) == 1 and replicas.config.data_parallel_size == 1 and not replicas.leaving
        assert "did not start" in caplog.text
        submit(replicas)

    run(test())


def test_a_growth_that_is_given_up_is_undone(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(engine: Any) -> None:
        await asyncio.sleep(60)

    async def test() -> None:
        replicas = await fleet(1)
        monkeypatch.setattr(Engine, "start", start)
        growing = asyncio.create_task(scale(replicas, 3, 0))
        await asyncio.sleep(0.01)
        growing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await growing
        assert len(replicas.engines) == 1 and not replicas.leaving
        submit(replicas)

    run(test())


def test_more_cards_than_there_are(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        replicas = await fleet(1)
        replicas.config = EngineConfig("m", device="cuda")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        with pytest.raises(ScalingError, match="names 2 cards"):
            await scale(replicas, 3, 0)
        assert len(replicas.engines) == 1 and replicas.config.data_parallel_size == 1

    run(test())


def test_who_leaves_finishes_what_it_has(fleet: Any) -> None:
    async def test() -> None:
        replicas = await fleet(3)
        gone = replicas.engines[2]
        mailbox = submit(replicas, 2)
        gone.say(mailbox.id)
        shrinking = asyncio.create_task(scale(replicas, 1, 60))
        await asyncio.sleep(0.1)
        assert not shrinking.done()
        for prompt in range(6):
            submit(replicas, prompt=prompt)
        assert len(replicas.engines[0].asked()) == 6, "neither of those that leave gets anything"
        gone.say(mailbox.id, "stop")
        await shrinking
        assert mailbox.take().token_ids == [7, 7] and mailbox.finished
        assert replicas.engines == [replicas.engines[0]] and gone.closed
        submit(replicas)

    run(test())


def test_when_the_time_is_over_what_has_not_begun_goes_elsewhere_and_the_rest_ends(fleet: Any) -> None:
    async def test() -> None:
        replicas = await fleet(2)
        stays, gone = replicas.engines
        begun, unheard, session = submit(replicas, 1), submit(replicas, 1), Route(session="me")
        gone.say(begun.id)
        replicas._dispatch.router._sessions[hash("me")] = 1
        old = unheard.id
        await scale(replicas, 1, 0)
        assert begun.take().token_ids == [7]
        with pytest.raises(EngineDeadError, match="engine 1 was removed"):
            begun.take()
        gone.say(old, "stop")  # said before it had read that it is not wanted any more
        assert unheard.take() is None, "an answer comes from one engine"
        assert stays.asked() == [unheard.id] and any(
            isinstance(message, AbortRequests) and message.ids == [old] for message in gone.sent
        )
        stays.say(unheard.id, "stop")
        assert unheard.take().finish_reason == "stop"
        replicas.submit_choices(1, [1] * 20, SAMPLING, route=session)
        assert len(stays.asked()) == 2, "a session finds another place"
        with pytest.raises(EngineDeadError, match="engine 1"):
            submit(replicas, 1)

    run(test())


def test_nobody_is_removed_where_nobody_would_serve(fleet: Any) -> None:
    async def test() -> None:
        replicas = await fleet(2)
        replicas.engines[0].ready = False
        with pytest.raises(ScalingError, match="none of the engines that would stay"):
            await scale(replicas, 1, 0)
        assert len(replicas.engines) == 2 and not replicas.leaving

    run(test())


def test_over_http(fleet: Any, text_model: Any) -> None:
    async def test() -> None:
        replicas = await fleet(2)
        config = ServerConfig(api_key=("user",), admin_api_key=("admin",))
        transport = httpx.ASGITransport(create_app(replicas, config, text_model))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def post(path: str, body: Any, key: str = "admin") -> httpx.Response:
                return await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

            async def engines() -> set[str]:
                page = (await http.get("/metrics", headers={"authorization": "Bearer user"})).text
                lines = [line for line in page.splitlines() if line.startswith("vllm:engine_healthy{")]
                return {line.partition('engine="')[2].partition('"')[0] for line in lines}

            for path in ("/scale_data_parallel", "/scale_elastic_ep"):
                assert (await post(path, {}, "user")).status_code == 403
            answer = await post("/scale_data_parallel", {"data_parallel_size": 3})
            assert answer.json() == {"message": "Scaled to 3 data parallel engines", "data_parallel_size": 3}
            assert await engines() == {"0", "1", "2"}
            answer = await post("/scale_elastic_ep", {"new_data_parallel_size": 1, "drain_timeout": 0})
            assert answer.status_code == 200 and await engines() == {"0"}
            info = (await http.get("/server_info", headers={"authorization": "Bearer admin"})).json()
            assert info["settings"]["data_parallel_size"]["value"] == 1
            for body in ({"data_parallel_size": 0}, {"data_parallel_size": 65}, {"drain_timeout": 1}, {"size": 2}):
                assert (await post("/scale_data_parallel", body)).status_code == 400
            async with replicas.scaling:
                assert (await post("/scale_data_parallel", {"data_parallel_size": 2})).status_code == 409
            Engine.cannot_start = "no memory left"
            try:
                answer = await post("/scale_data_parallel", {"data_parallel_size": 2})
            finally:
                Engine.cannot_start = ""
            assert answer.status_code == 500 and "no memory left" in answer.json()["error"]["message"]

    run(test())
