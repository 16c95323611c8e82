"""Adapters beside drafts, on packed codes, on mixtures: the tokens, or the share of a product, of merged weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vserve.engine.adapters.adapter import Adapter
from vserve.engine.adapters.layout import AdapterStore, SlotLayout
from vserve.engine.adapters.tables import AdapterTables
from vserve.engine.describe.reading import read_folder
from vserve.engine.layers.embedding import LMHead
from vserve.engine.layers.linear import Linear
from vserve.engine.link.messages import LoadAdapter
from vserve.engine.link.plan import NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.step import runner, sampled
from vserve.engine.weights.loader import load_model
from vserve.server.client.engine_client import EngineClient

from ..quant.checkpoints import KINDS, write
from ..tiny_models import FAMILIES
from .conftest import collect
from .test_speculation import Told, config

PROMPTS = [[7, 8, 9] * 5, [*range(20, 31), 20, 21], [5, 6]]
# Modules as families call them, fused or not, of latent attention too.
NAMES = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
)  # fmt: skip


def greedy(num_tokens: int, adapter: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, adapter=adapter)


def engine(folder: Path, **options: Any) -> EngineClient:
    options = {"max_num_batched_tokens": 32} | options
    return EngineClient(EngineConfig(
        str(folder), device="cpu", engine_in_process=True, cpu_threads=1, enable_lora=True, max_model_len=96,
        max_num_seqs=8, block_size=4, **options,
    ))  # fmt: skip


async def answers(client: EngineClient, num_tokens: int, adapters: list[int]) -> list[list[list[int]]]:
    """Of each adapter, behind each prompt; all at once."""
    cases = [(prompt, greedy(num_tokens, id)) for id in adapters for prompt in PROMPTS]
    found = await asyncio.gather(*(collect(client, *case) for case in cases))
    assert not [answer.error for answer in found if answer.error]
    tokens = [answer.tokens for answer in found]
    return [tokens[place : place + len(PROMPTS)] for place in range(0, len(tokens), len(PROMPTS))]


def test_drafts_are_verified_under_the_adapter_of_their_row(
    tiny_model: Any, adapter_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two adapters, one of which changes logits too, and of none in one step, each with drafts of its own."""
    base, num_tokens = tiny_model("llama"), 24
    write_adapter = adapter_files.write_adapter
    folders = [write_adapter(tmp_path / "a", base, seed=1), write_adapter(tmp_path / "b", base, ["v_proj", "lm_head"])]
    models = [adapter_files.merged(base, folder) for folder in (None, *folders)]
    wanted = [[adapter_files.greedy(model, prompt, num_tokens) for prompt in PROMPTS] for model in models]
    assert len({str(tokens) for tokens in wanted}) == 3
    told = [prompt + tokens for answers in wanted for prompt, tokens in zip(PROMPTS, answers, strict=True)]
    monkeypatch.setattr(runner, "NgramDrafter", Told)
    monkeypatch.setattr(Told, "sequences", told)
    monkeypatch.setattr(Told, "share", 0.8)

    async def main() -> None:
        client = engine(base, max_loras=2, speculative_config=config(3))
        await client.start()
        try:
            for id, folder in enumerate(folders, 1):
                assert (await client.load_adapter(LoadAdapter(id, str(folder)))).error is None
            assert await answers(client, num_tokens, [0, 1, 2]) == wanted
            for id in (1, 2):  # alone: what holds is its own
                before = sum(client.stats.num_accepted_tokens)
                assert await answers(client, num_tokens, [id]) == [wanted[id]]
                assert sum(client.stats.num_accepted_tokens) - before > len(PROMPTS) * num_tokens // 3
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["model", "eagle"])
def test_a_model_drafts_without_their_adapters(
    tiny_model: Any, adapter_files: Any, load_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The base's drafter, for rows of all: a draft model, which is always right of the base, and a head that uses the
    target's own output matrix, which an adapter changes."""
    base, num_tokens = tiny_model("llama"), 16
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    drafter = made.eagle(tmp_path / "head") if name == "eagle" else base
    write_adapter = adapter_files.write_adapter
    folders = [write_adapter(tmp_path / "a", base, seed=1), write_adapter(tmp_path / "b", base, ["v_proj", "lm_head"])]
    models = [adapter_files.merged(base, folder) for folder in (None, *folders)]
    wanted = [[adapter_files.greedy(model, prompt, num_tokens) for prompt in PROMPTS] for model in models]
    adapted: list[bool] = []
    runners: list[Any] = []
    make_rows, propose = runner.ModelRunner.make_rows, sampled.SampledTokens.propose

    def remember(self: Any, max_model_len: int) -> None:
        runners[:] = [self]
        make_rows(self, max_model_len)

    def proposed(self: Any, *arguments: Any) -> Tensor:
        model = runners[0].model
        adapted.append(model.lm_head.adapter.active or model.embedding.adapter.active)
        return propose(self, *arguments)

    monkeypatch.setattr(runner.ModelRunner, "make_rows", remember)
    monkeypatch.setattr(sampled.SampledTokens, "propose", proposed)

    async def main() -> None:
        client = engine(base, max_loras=2, speculative_config=config(3, method=None, model=str(drafter)))
        await client.start()
        try:
            for id, folder in enumerate(folders, 1):
                assert (await client.load_adapter(LoadAdapter(id, str(folder)))).error is None
            assert await answers(client, num_tokens, [0, 1, 2]) == wanted
            assert await answers(client, num_tokens, [2, 1]) == [wanted[2], wanted[1]], "of cached prefixes"
            assert client.stats.num_drafts > 20
            before = sum(client.stats.num_accepted_tokens)
            assert await answers(client, num_tokens, [0]) == wanted[:1]
            held = sum(client.stats.num_accepted_tokens) - before
            assert held > len(PROMPTS) * num_tokens // 2 or name == "eagle"
        finally:
            await client.close()

    asyncio.run(main())
    assert len(adapted) > 20 and not any(adapted)


def products(folder: Path, adapter: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each product of the model: what it makes of five tokens without the adapter, and with it."""
    model = load_model(folder, read_folder(folder), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    layout = SlotLayout(model, 16)
    tables = AdapterTables(AdapterStore(layout, torch.float32, pin=False), 2, torch.device("cpu"), 8, 4)
    tables.load(1, layout.pack(Adapter.open(adapter), torch.float32, False))
    tokens = np.zeros(5, np.int32).tobytes()
    row = NewRow(0, 0, tokens, 5, 0, greedy(1), slot=1)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is Linear}
    assert layers and not any(isinstance(layer, LMHead) for layer in layers.values())
    for name, layer in layers.items():
        x = torch.randn(5, layer.shape.in_features, generator=torch.Generator().manual_seed(len(found)))
        tables.end()
        without = layer(x).clone()
        assert tables.begin(StepPlan(1, [0], [5], [0], [0], 0, [row], [[]]))
        tables.use(5)
        tables.group(StepPlan(1, [0], [5], [0], [0], 0, [row], [[]]), 5, 1)
        found[name] = without, layer(x)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_on_packed_codes(kind: str, tiny_model: Callable[..., Path], adapter_files: Any, tmp_path: Path) -> None:
    """What an adapter adds to a product of codes is what it adds to that of the numbers which they mean."""
    base = tiny_model("llama")
    folder = write(base, tmp_path, kind)
    adapter = adapter_files.write_adapter(tmp_path / "adapter", base)
    twin = products(folder / "twin", adapter)
    for name, (without, with_) in products(folder / "quantized", adapter).items():
        expected = twin[name][1] - twin[name][0]
        assert expected.norm() > 0.1 * twin[name][0].norm(), name
        torch.testing.assert_close(with_ - without, expected, rtol=1e-4, atol=1e-4, msg=name)


def test_experts_adapters_are_refused_by_name(tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    """Where slots have no room for them. Those of attention beside them are served; the server goes on."""
    base = tiny_model("qwen3_moe")
    write_adapter = adapter_files.write_adapter
    attention = write_adapter(tmp_path / "a", base, NAMES[:4])
    experts = write_adapter(tmp_path / "b", base, ["q_proj", "up_proj"], target_modules=[])
    model = adapter_files.merged(base, attention)
    of_all = adapter_files.write_experts_adapter(tmp_path / "c", model)
    wanted = [adapter_files.greedy(model, prompt, 4) for prompt in PROMPTS]

    async def main() -> None:
        client = engine(base)
        await client.start()
        try:
            refused = (await client.load_adapter(LoadAdapter(1, str(experts)))).error or ""
            assert "changes model.layers.0.mlp.experts.0.up_proj" in refused and "--merge-lora" in refused
            assert "\n" not in refused
            refused = (await client.load_adapter(LoadAdapter(1, str(of_all)))).error or ""
            assert "changes model.layers.0.mlp.experts.down_proj, and slots have room for that only where" in refused
            assert "--lora-target-modules has experts" in refused and "--merge-lora" in refused
            assert (await client.load_adapter(LoadAdapter(2, str(attention)))).error is None
            assert await answers(client, 4, [2]) == [wanted]
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    base = tiny_model(family)
    # transformers' modules have other names than the files that it writes of them.
    shared = {"hy_v3": ".shared_mlp.", "laguna": ".shared_expert."}.get(family, ".experts.")
    folder = adapter_files.write_adapter(
        tmp_path / "a", base, NAMES, skip=lambda module: ".experts." in module or shared in module, target_modules=[]
    )
    models = [adapter_files.merged(base, path) for path in (None, folder)]
    wanted = [[adapter_files.greedy(model, prompt, 3) for prompt in PROMPTS] for model in models]
    assert wanted[0] != wanted[1]

    async def main() -> None:
        states = {"max_num_batched_tokens": 96} if read_folder(base).has_state else {}  # room for a chunk
        client = engine(base, max_loras=1, **states)
        await client.start()
        try:
            answer = await client.load_adapter(LoadAdapter(9, str(folder)))
            assert answer.error is None, answer.error
            assert await answers(client, 3, [0, 9]) == wanted
        finally:
            await client.close()

    asyncio.run(main())
