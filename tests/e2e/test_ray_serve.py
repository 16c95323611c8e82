"""The Ray Serve application on a cluster of two pretended nodes: from one replica to three and back under load."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

serve = pytest.importorskip("ray.serve")

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "configs" / "demo"
PROMPTS = ["What is 12 + 30?", "The capital of France is", "Once upon a time", "Seven times eight is"]


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"model": str(DEMO), "served_model_name": "demo", "device": "cpu", "cpu_threads": 1, "warm_grammars": False,
            "min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2, "upscale_delay_s": 0.5,
            "downscale_delay_s": 3, "look_back_period_s": 1}  # fmt: skip


@pytest.fixture(scope="module")
def url(options: dict[str, Any], reserve_port: Callable[[], int]) -> Iterator[str]:
    import ray
    from ray.cluster_utils import Cluster

    port = reserve_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # what others on this machine take is no business of its
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for side in ("HANDLE", "REPLICA"):
            patch.setenv(f"RAY_SERVE_{side}_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)
            ray.init(cluster.address, include_dashboard=False, log_to_driver=False)
            from vserve.server import ray_serve

            serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
            serve.run(ray_serve.build(options))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def replicas() -> int:
    deployment = serve.status().applications["default"].deployments["model"]
    return int(deployment.replica_states.get("RUNNING", 0))


async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
    options: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 60, "temperature": 0,
                               "extra_body": {"ignore_eos": True}}  # fmt: skip
    if not stream:
        answer = await client.completions.create(**options)
        assert answer.choices[0].finish_reason == "length"
        return answer.choices[0].text
    text, reason = "", None
    async for chunk in await client.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason or reason
    assert reason == "length"
    return text


@pytest.mark.skipif(not os.environ.get("VSERVE_TEST_LONG"), reason="a minute: VSERVE_TEST_LONG=1 runs it")
def test_from_one_to_three_and_back(url: str) -> None:
    async def main() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        assert [model.id async for model in client.models.list()] == ["demo"]
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(model="demo", prompt="x", max_tokens=-1)
        expected = {prompt: await ask(client, prompt, stream=False) for prompt in PROMPTS}
        assert len(set(expected.values())) == len(PROMPTS) and replicas() == 1
        most, answered, busy = 1, 0, True

        async def load(index: int) -> None:
            nonlocal answered
            while busy:
                prompt = PROMPTS[(index + answered) % len(PROMPTS)]
                assert await ask(client, prompt, stream=index % 2 == 0) == expected[prompt]
                answered += 1

        async def watch(condition: Any, seconds: float) -> None:
            nonlocal most
            deadline = time.monotonic() + seconds
            while not condition(count := await asyncio.to_thread(replicas)):
                most = max(most, count)
                assert time.monotonic() < deadline, f"{count} replicas"
                await asyncio.sleep(0.2)
            most = max(most, count)

        clients = [asyncio.create_task(load(index)) for index in range(12)]
        await watch(lambda count: count == 3, 180)
        begun = answered
        while answered < begun + 24:
            await asyncio.sleep(0.1)
        busy = False
        await asyncio.gather(*clients)  # raises what any of them has met
        clients, busy = [asyncio.create_task(load(0))], True
        await watch(lambda count: count == 1, 120)
        busy = False
        await asyncio.gather(*clients)
        assert most == 3 and answered >= 36

    asyncio.run(main())


@pytest.mark.skipif(not os.environ.get("VSERVE_TEST_LONG"), reason="a minute: VSERVE_TEST_LONG=1 runs it")
def test_a_session_stays_with_its_replica(url: str, options: dict[str, Any]) -> None:
    """Until that replica is gone. What tells two apart is a request that one of them has refused."""
    from vserve.server import ray_serve

    serve.run(ray_serve.build(options | {"min_replicas": 2, "max_replicas": 2}))
    deadline = time.monotonic() + 180
    while replicas() != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            async def completes(session: str, prompt: str, max_tokens: int = 8, status: int = 200) -> None:
                body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
                answer = await http.post("/v1/completions", json=body, headers={"x-session-id": session})
                assert answer.status_code == status, answer.text

            async def replica_of(session: str) -> tuple[float, float]:
                """Requests that it has refused, and answered."""
                page = (await http.get("/metrics", headers={"x-session-id": session})).text
                counts = re.findall(r'^http_requests_total\{handler="/v1/completions",.*"(\d)xx"\} (\S+)$', page, re.M)
                found = {status: float(count) for status, count in counts}
                return found.get("4", 0.0), found.get("2", 0.0)

            sessions = [f"chat-{index}" for index in range(8)]
            for session in sessions:  # prompts that have nothing in common
                await completes(session, f"{session} and so on " * 40)
            await completes(sessions[0], "x", -1, 400)
            homes = {session: (await replica_of(session))[0] for session in sessions}
            assert set(homes.values()) == {0.0, 1.0}, "both have some"
            for turn in range(4):
                others = (completes(f"other-{turn}-{index}", f"{turn} {index} " * 99) for index in range(4))
                asking = (completes(session, f"{turn} {session} says {PROMPTS[turn]}") for session in sessions)
                await asyncio.gather(*asking, *others)
                assert {session: (await replica_of(session))[0] for session in sessions} == homes
            before = {homes[session]: (await replica_of(session))[1] for session in sessions}
            for _ in range(4):
                await asyncio.gather(*(completes(session, PROMPTS[0]) for session in sessions))
            after = {homes[session]: (await replica_of(session))[1] for session in sessions}
            asked = Counter(homes[session] for session in sessions for _ in range(4))
            assert {home: after[home] - before[home] for home in before} == asked

            serve.run(ray_serve.build(options | {"min_replicas": 1, "max_replicas": 1}))
            deadline = time.monotonic() + 120
            while await asyncio.to_thread(replicas) != 1:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            for session in sessions:  # who has lost its replica is answered by the one that is left
                await completes(session, f"{session} goes on")
            assert len({await replica_of(session) for session in sessions}) == 1

    asyncio.run(main())
