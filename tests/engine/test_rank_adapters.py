"""Adapters on one engine of several ranks, each with its share: the tokens of merged weights, in float32."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link.messages import AdapterLoaded, LoadAdapter
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
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


# Family, its keys of config.json, options of the engine. Whole experts are dealt out, and have no adapters. Of stages,
# the first looks tokens up, the last has the head, which may be the same matrix; there are slots for a mixed batch.
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "max_loras": 2, "max_cpu_loras": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ours": ("llama", {}, {"tensor_parallel_size": 2}),
    "stages": ("llama", {"num_hidden_layers": 3}, STAGES),
    "tied stages": (
        "llama", {"tie_word_embeddings": True},
        {"tensor_parallel_size": 2, "speculative_config": '{"method": "ngram", "prompt_lookup_max": 1}', **STAGES},
    ),
    "experts": (
        "qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "transformers": ("llama", {}, {"tensor_parallel_size": 2, "model_impl": "transformers"}),
}  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("tied stages", "experts", "transformers")]


@pytest.fixture(scope="module", params=["ours", "stages", *SLOW])
def engine(
    request: pytest.FixtureRequest, tiny_model: Any, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    family, keys, options = MODELS[request.param]
    root, base = tmp_path_factory.mktemp("adapters"), tiny_model(family, **keys)
    folders = {
        name: adapter_files.write_adapter(
            root / name, base, names.split(), seed=seed, skip=lambda m: ".experts." in m, target_modules=[]
        )
        for seed, (name, names) in enumerate(NAMES.items())
    }
    config = EngineConfig(
        str(base), device="cpu", engine_in_process=True, cpu_threads=2, max_model_len=96, max_num_batched_tokens=24,
        max_num_seqs=8, block_size=4, enable_lora=True, **{"max_loras": 1, "max_cpu_loras": 1, **options},
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


@pytest.mark.slow
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
        for _ in range(engine.client.config.max_loras):
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


DIVIDED: dict[str, tuple[int, dict[str, Any]]] = {  # number of experts, options
    "slices": (5, {"tensor_parallel_size": 2}),
    "whole": (8, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "stages": (5, {"pipeline_parallel_size": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DIVIDED)
def test_experts_adapters_over_ranks(how: str, tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    """Each rank has its share of an expert's matrices, or those of its experts, or of its layers."""
    num_experts, options = DIVIDED[how]
    base = tiny_model("qwen3_moe", num_experts=num_experts, num_experts_per_tok=2)
    plain, oracle = adapter_files.merged(base, None), adapter_files.merged(base, None)
    folder = adapter_files.write_experts_adapter(tmp_path / "a", plain)
    oracles = [plain, adapter_files.merge_experts(oracle, folder)]
    config = EngineConfig(
        str(base), device="cpu", cpu_threads=2, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=8,
        block_size=4, enable_lora=True, max_loras=1, lora_target_modules=("experts",), **options,
    )  # fmt: skip
    with asyncio.Runner() as runner:
        engine = Engine(runner, EngineClient(config), base, {})
        engine.run(engine.client.start())

        async def main() -> None:
            id, answer = await engine.load(folder)
            assert answer.error is None
            cases = [(adapter, prompt) for prompt in PROMPTS for adapter in (0, 1)]
            found = await asyncio.gather(*(engine.tokens(prompt, id * adapter) for adapter, prompt in cases))
            assert found == [adapter_files.greedy(oracles[adapter], prompt, NUM_TOKENS) for adapter, prompt in cases]

        try:
            engine.run(main())
        finally:
            engine.run(engine.client.close())


def test_experts_adapters_are_refused_by_all(
    engine: Engine, wanted: dict[str, list[list[int]]], adapter_files: Any, tmp_path: Path
) -> None:
    if "moe" not in engine.base.name:
        pytest.skip("it has no experts")
    folder = adapter_files.write_adapter(tmp_path / "experts", engine.base, ["up_proj"], target_modules=[])

    async def main() -> None:
        _, refused = await engine.load(folder)
        assert refused.error is not None and "experts.0.up_proj" in refused.error and "--merge-lora" in refused.error
        assert await engine.tokens(PROMPTS[1], 0) == wanted[""][1]

    engine.run(main())


def test_an_adapter_of_another_base_is_refused_in_the_same_words(
    engine: Engine, adapter_files: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Whichever rank has the layer that it does not fit."""
    wide = tiny_model("llama", intermediate_size=80, num_hidden_layers=len_of(engine.base))

    async def refused(layer: int) -> str:
        folder = adapter_files.write_adapter(
            tmp_path / str(layer), wide, ["up_proj"], skip=lambda m: f".{layer}." not in m, target_modules=[]
        )
        error = (await engine.load(folder))[1].error
        assert error is not None
        return error

    async def main() -> None:
        for layer in range(len_of(engine.base) if "moe" not in engine.base.name else 0):
            error = await refused(layer)
            assert f"model.layers.{layer}.mlp.up_proj maps 64 to 80, and the model's 64 to " in error
            assert not error.startswith("rank "), "rank 0 judges for all"

    engine.run(main())


def len_of(base: Path) -> int:
    found: int = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    return found
