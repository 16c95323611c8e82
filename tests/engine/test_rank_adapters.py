"""Adapters on one engine of two ranks, each with its share: the tokens of merged weights, in float32."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.config import EngineConfig
from vserve.engine.messages import AdapterLoaded, LoadAdapter
from vserve.engine.request import SamplingParams
from vserve.server.client.engine_client import EngineClient

from .conftest import collect

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(5, 290) for _ in range(length)] for length in (3, 21, 40)]
NUM_TOKENS = 6
# Every kind of product: columns, rows, the embedding that every rank has whole, the head of which each has a part.
NAMES = {
    "all": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj embed_tokens lm_head", "rows": "o_proj down_proj",
    "columns": "q_proj v_proj up_proj",
}  # fmt: skip


def greedy(adapter: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, adapter=adapter)


class Engine:
    """One, on an event loop for all tests of this file."""

    def __init__(self, runner: asyncio.Runner, client: EngineClient, base: Path, folders: dict[str, Path]) -> None:
        self.client, self.base, self.folders = client, base, folders
        self._runner = runner
        self._next = 1

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 120))

    async def load(self, folder: Path) -> tuple[int, AdapterLoaded]:
        id, self._next = self._next, self._next + 1
        return id, await self.client.load_adapter(LoadAdapter(id, str(folder)))

    async def tokens(self, prompt: list[int], adapter: int) -> list[int]:
        answer = await collect(self.client, prompt, greedy(adapter))
        assert answer.error is None, answer.error
        return answer.tokens


@pytest.fixture(scope="module")
def engine(tiny_model: Any, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root, base = tmp_path_factory.mktemp("adapters"), tiny_model("llama")
    folders = {
        name: adapter_files.write_adapter(root / name, base, names.split(), seed=seed)
        for seed, (name, names) in enumerate(NAMES.items())
    }
    config = EngineConfig(
        str(base), device="cpu", engine_in_process=True, cpu_threads=2, tensor_parallel_size=2, max_model_len=96,
        max_num_batched_tokens=24, max_num_seqs=8, block_size=4, enable_lora=True, max_loras=1, max_cpu_loras=1,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        made = Engine(runner, EngineClient(config), base, folders)
        made.run(made.client.start())
        try:
            yield made
        finally:
            made.run(made.client.close())


@pytest.fixture(scope="module")
def wanted(engine: Engine, adapter_files: Any) -> dict[str, list[list[int]]]:
    models = {name: adapter_files.merged(engine.base, engine.folders.get(name)) for name in ("", *NAMES)}
    found = {name: [adapter_files.greedy(m, p, NUM_TOKENS) for p in PROMPTS] for name, m in models.items()}
    assert len({str(tokens) for tokens in found.values()}) == len(found), "adapters must differ"
    return found


def test_the_tokens_of_merged_weights(engine: Engine, wanted: dict[str, list[list[int]]]) -> None:
    """More adapters than slots, and than ranks keep on the host: each is read again when its turn comes."""

    async def main() -> None:
        ids = {"": 0}
        for name, folder in engine.folders.items():
            ids[name], answer = await engine.load(folder)
            assert answer.error is None and answer.rank == 4
        cases = [(name, index) for index in range(len(PROMPTS)) for name in ids]
        random.Random(0).shuffle(cases)
        found = await asyncio.gather(*(engine.tokens(PROMPTS[index], ids[name]) for name, index in cases))
        assert found == [wanted[name][index] for name, index in cases]
        for id in ids.values():
            if id:
                engine.client.drop_adapter(id)

    engine.run(main())


def test_a_folder_that_is_gone_ends_its_own_requests(
    engine: Engine, wanted: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Also where a rank would have to read it anew: the others go on, and so does the engine."""

    async def main() -> None:
        shutil.copytree(engine.folders["rows"], tmp_path / "rows")
        rows, _ = await engine.load(tmp_path / "rows")
        assert await engine.tokens(PROMPTS[0], rows) == wanted["rows"][0]
        columns, _ = await engine.load(engine.folders["columns"])
        assert await engine.tokens(PROMPTS[0], columns) == wanted["columns"][0]  # has taken the slot, and the room
        shutil.rmtree(tmp_path / "rows")
        answer = await collect(engine.client, PROMPTS[0], greedy(rows))
        assert answer.error is not None and "its adapter cannot be used" in answer.error
        assert await engine.tokens(PROMPTS[1], columns) == wanted["columns"][1]
        _, refused = await engine.load(tmp_path / "rows")
        assert refused.error is not None and "is no folder" in refused.error
        assert await engine.tokens(PROMPTS[1], 0) == wanted[""][1]

    engine.run(main())
