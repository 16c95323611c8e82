"""The Ray Serve application on a cluster of two pretended nodes: from one replica to three and back under load."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

serve = pytest.importorskip("ray.serve")

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "configs" / "demo"
PROMPTS = ["What is 12 + 30?", "The capital of France is", "Once upon a time", "Seven times eight is"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import ray
    from ray.cluster_utils import Cluster

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
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
            options = {"model": str(DEMO), "served_model_name": "demo", "device": "cpu",
                       "cpu_threads": 1, "warm_grammars": False,
                       "min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 2, "upscale_delay_s": 0.5,
                       "downscale_delay_s": 3, "look_back_period_s": 1}  # fmt: skip
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
