"""`LLM(distributed_executor_backend="external_launcher")`: programs that torchrun starts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vserve import LLM, SamplingParams
from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import AddRequest, EngineStats, RequestOutput, StepOutputs
from vserve.engine.link.sampling_params import SamplingParams as EngineSampling
from vserve.engine.options.config import EngineConfig
from vserve.engine.ranks.messages import Asked
from vserve.server.client.launched import LaunchedEngine
from vserve.server.offline import torchrun
from vserve.server.offline.torchrun import launched

HEAD = """
import json, os, signal, sys
from vserve import LLM, SamplingParams
folder, rank = sys.argv[1], int(os.environ["RANK"])
options = dict(device="cpu", max_model_len=96, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
PROMPTS = ["hello there", [4, 5, 6], "the quick brown fox"]
"""
ASK = """
def ask(llm):
    greedy, drawn = SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1, max_tokens=8)
    seeded = SamplingParams(seed=3, temperature=1.0, max_tokens=9, logprobs=1)
    found = [output.outputs[0] for output in llm.generate(PROMPTS, [greedy, seeded, drawn], use_tqdm=False)]
    vector = llm.embed("hello", use_tqdm=False)[0].outputs.embedding
    choice = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"choice": ["yes", "no"]})
    answer = llm.generate("well?", choice, use_tqdm=False)[0].outputs[0].text
    return [one.token_ids for one in found], found[1].cumulative_logprob, vector, answer
"""
TWICE = """
found = []
for _ in range(2):
    with LLM(folder, **options) as llm:
        found.append(ask(llm))
with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
    json.dump(found, file)
"""
DIES = """
llm = LLM(folder, **options)
llm.generate("hello", use_tqdm=False)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    llm.generate("hello", SamplingParams(max_tokens=90), use_tqdm=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
else:
    print(llm.generate("hello", use_tqdm=False)[0].outputs[0].stop_reason)
"""


def program(tmp_path: Path, *parts: str) -> str:
    (tmp_path / "program.py").write_text(textwrap.dedent("".join((HEAD, *parts))))
    return str(tmp_path / "program.py")


@pytest.mark.slow
def test_every_process_gets_all_answers(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Those of one engine that has the whole model; also what nobody has seeded is the same in both."""
    folder = str(tiny_model("qwen3"))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         program(tmp_path, ASK, TWICE), folder, str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    scope: dict[str, Any] = {
        "PROMPTS": ["hello there", [4, 5, 6], "the quick brown fox"],
        "SamplingParams": SamplingParams,
    }
    exec(ASK, scope)
    with LLM(folder, device="cpu", max_model_len=96, engine_in_process=True, cpu_threads=1) as llm:
        tokens, logprob, vector, answer = scope["ask"](llm)
    for found in first:
        assert found[0][:2] == tokens[:2] and found[3] == answer
        assert found[1] == pytest.approx(logprob, abs=1e-4) and found[2] == pytest.approx(vector, abs=1e-5)


@pytest.mark.slow
def test_who_is_left_is_told(tiny_model: Callable[..., Path], tmp_path: Path, reserve_port: Callable[[], int]) -> None:
    """Without torchrun, which would end it."""
    port = reserve_port()
    script, both = program(tmp_path, DIES), []
    for rank in (0, 1):
        told = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        both.append(
            subprocess.Popen(
                [sys.executable, script, str(tiny_model("qwen3"))],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {name: str(value) for name, value in told.items()},
            )
        )
    assert both[0].wait(120) == -signal.SIGKILL
    said, _ = both[1].communicate(timeout=60)
    assert "the first process of torchrun's or its engine has ended: its last words say why" in said, said


class Heard(list[Any]):
    """What a LaunchedEngine passes on, of words that come by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.engine = LaunchedEngine(self.append, self.lost.append)

    async def word(self, message: Any) -> None:
        self.engine._hear(msgspec.msgpack.encode(message))
        await asyncio.sleep(0)

    async def ask(self, request: AddRequest) -> None:
        self.engine.send(request)
        await asyncio.sleep(0)


def request(id: int, n: int = 1, prompt: bytes = b"abcd") -> AddRequest:
    return AddRequest(id, prompt, EngineSampling(max_tokens=3), 0, None, 0.5 * id, n)


def output(*ids: int) -> StepOutputs:
    return StepOutputs([RequestOutput(id, [7]) for id in ids], EngineStats(), [])


def test_words_about_requests_to_come_wait_for_these() -> None:
    async def main() -> None:
        heard = Heard()
        for message in (Asked.of(request(1, 2)), output(1), output(2)):
            await heard.word(message)
        assert heard == []
        await heard.ask(request(1, 2))
        assert heard == [output(1), output(2)]
        await heard.ask(request(3))
        for message in (output(2), Asked.of(request(3)), output(2, 4), output(3)):
            await heard.word(message)
        assert heard[2:] == [output(2)], "the third is about a request to come, and the order stays"
        await heard.ask(request(4))
        assert heard[3:] == [output(2, 4), output(3)] and not heard.lost

    asyncio.run(main())


def test_the_end_comes_last() -> None:
    """The first process may have closed its engine before this one has asked."""

    async def main() -> None:
        heard = Heard()
        for message in (Asked.of(request(1)), output(1)):
            await heard.word(message)
        heard.engine._end_with("it is over")
        assert heard == heard.lost == []
        await heard.ask(request(1))
        assert heard == [output(1)] and heard.lost == ["it is over"]

    asyncio.run(main())


def test_another_request_is_no_answer_to_this_one() -> None:
    async def main() -> None:
        heard = Heard()
        await heard.ask(request(1))
        await heard.word(Asked.of(request(1, prompt=b"efgh")))
        (cause,) = heard.lost
        assert cause.startswith(
            "request 1 is another one in the first process of torchrun's: all processes must ask for"
        )

    asyncio.run(main())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    from torch import distributed as dist

    monkeypatch.setattr(torchrun, "_store", dist.HashStore())
    monkeypatch.setattr(torchrun, "_calls", iter([0] * 99))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def tell(rank: int, size: int, local_size: int | None = None) -> None:
        local_size = local_size or size
        values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return tell


def test_neighbours_share_an_engine(told: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig("m", tensor_parallel_size=2, distributed_executor_backend="external_launcher", cpu_threads=1)
    found, cards = [], []
    for rank in range(4):
        told(rank, 4)
        one, environment = launched(config)
        found.append(one)
        cards.append(environment["CUDA_VISIBLE_DEVICES"])
    assert cards == ["0", "1", "2", "3"] and [one.node_rank for one in found] == [0, 1, 0, 1]
    assert all(one.nnodes == 2 and one.ranks_per_node == 1 and one.master_addr == "127.0.0.1" for one in found)
    meetings = [(one.master_port, one.cluster_secret) for one in found]
    assert meetings[0] == meetings[1] and meetings[2] == meetings[3] and meetings[0] != meetings[2]
    told(1, 4)
    for seen, card in (("5,6,7,8", "6"), ("3", "3"), ("GPU-a,GPU-b", "GPU-b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        assert launched(config)[1]["CUDA_VISIBLE_DEVICES"] == card


def test_one_rank_each(told: Callable[..., None]) -> None:
    told(1, 2)
    config, environment = launched(EngineConfig("m", distributed_executor_backend="external_launcher"))
    assert config.nnodes == 1 and config.distributed_executor_backend is None
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}


def test_what_cannot_be(told: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**options: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            LLM("m", distributed_executor_backend="external_launcher", **options)
        return str(refused.value)

    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun sets RANK and WORLD_SIZE, and 'RANK' is missing or no number: start this program with" in said()
    told(0, 3)
    assert said(tensor_parallel_size=2) == (
        "torchrun has started 3 processes, and tensor_parallel_size 2 wants 2 for each engine: start a multiple of "
        "that (--nproc-per-node)"
    )
    assert said(data_parallel_size=2).startswith(
        "data_parallel_size does not go with distributed_executor_backend='ext"
    )
    assert said(enable_lora=True).endswith(": merge the adapter (merge_lora)")
    told(2, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert said(tensor_parallel_size=2).startswith("LOCAL_RANK is 2, and CUDA_VISIBLE_DEVICES has 2 cards: name more")
