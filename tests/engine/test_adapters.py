"""Adapters in the real engine: the same tokens as with merged weights, alone and in company."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import AdapterLoaded, LoadAdapter
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient, EngineDeadError

NUM_TOKENS = 6
RNG = random.Random(3)
PROMPTS = [[RNG.randrange(5, 290) for _ in range(length)] for length in (3, 21, 40, 9)]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "engine_in_process": True, "cpu_threads": 1, "enable_lora": True, "max_model_len": 96,
    "max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4,
}  # fmt: skip


def greedy_params(adapter: int = 0, num_tokens: int = NUM_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, adapter=adapter, **more)


@asynccontextmanager
async def running(folder: Path, **options: Any) -> Any:
    client = EngineClient(EngineConfig(str(folder), **(OPTIONS | options)))
    await client.start()
    try:
        yield client
        assert client.stats.num_free_blocks == client.stats.num_blocks or not client.stats.num_blocks
        assert client.stats.num_invariant_violations == 0
    finally:
        await client.close()


async def load(client: EngineClient, id: int, folder: Path) -> AdapterLoaded:
    answer = await client.load_adapter(LoadAdapter(id, str(folder)))
    assert answer.error is None, answer.error
    return answer


async def tokens_of(client: EngineClient, prompt: list[int], sampling: SamplingParams, **more: Any) -> list[int]:
    mailbox, tokens = client.submit(prompt, sampling, **more), []
    while True:
        output = await mailbox.get()
        tokens += output.token_ids
        if output.finish_reason is not None:
            assert output.finish_reason == "length", output.error
            return tokens


async def error_of(client: EngineClient, sampling: SamplingParams) -> str:
    output = await client.submit(PROMPTS[0], sampling).get()
    assert output.finish_reason == "error" and output.error is not None
    return output.error


def pattern_rank(module: str) -> int:
    return 7 if module.endswith("layers.1.mlp.up_proj") else 2 if module.endswith("q_proj") else 4


# Of each form: last names of modules, keys of the configuration, and what scales B A.
FORMS: dict[str, tuple[str, dict[str, Any], Callable[[str], float]]] = {
    "plain": ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", {}, lambda m: 2.0),
    "rslora": ("q_proj v_proj", {"use_rslora": True}, lambda m: 8 / math.sqrt(4)),
    "patterns": ("q_proj up_proj", {
        "rank": pattern_rank, "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
     }, lambda m: (3 if m.endswith("0.self_attn.q_proj") else 8) / pattern_rank(m)),
    "regular expression": ("k_proj down_proj", {"target_modules": r".*\.(self_attn\.k_proj|mlp\.down_proj)"},
                           lambda m: 2.0),
    "all-linear": ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", {"target_modules": "all-linear"},
                   lambda m: 2.0),
    "one layer": ("o_proj", {"layers_to_transform": [1], "skip": lambda m: "layers.0" in m}, lambda m: 2.0),
    "excluded": ("o_proj", {"exclude_modules": r".*\.0\..*", "skip": lambda m: "layers.0" in m}, lambda m: 2.0),
    "embedding and head": ("embed_tokens lm_head gate_proj", {}, lambda m: 2.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tiny_model: Any) -> Path:
    folder: Path = tiny_model("llama")
    return folder


@pytest.fixture(scope="module")
def folders(base: Path, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapter_files.write_adapter(root / name, base, names.split(), seed=index, **config)
        for index, (name, (names, config, _)) in enumerate(FORMS.items())
    }


@pytest.fixture(scope="module")
def wanted(base: Path, folders: dict[str, Path], adapter_files: Any) -> dict[str, list[list[int]]]:
    """Of each form, and of the base alone, what transformers says behind each prompt."""
    models: Iterator[tuple[str, Any]] = (
        (name, adapter_files.merged(base, folders.get(name), FORMS[name][2] if name else lambda m: 0.0))
        for name in ("", *FORMS)
    )
    return {name: [adapter_files.greedy(model, p, NUM_TOKENS) for p in PROMPTS] for name, model in models}


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def test_every_form_gives_the_tokens_of_merged_weights(
    base: Path, folders: dict[str, Path], wanted: dict[str, list[list[int]]]
) -> None:
    """All in one engine with fewer slots than adapters: alone, and then all at once with the base among them, in
    prompts of several chunks. Both are what transformers says."""

    async def main() -> None:
        async with running(base, max_loras=3, max_cpu_loras=4) as client:
            ids = {"": 0} | {name: 1000 + index for index, name in enumerate(folders)}
            for name, folder in folders.items():
                answer = await load(client, ids[name], folder)
                assert answer.rank == (7 if name == "patterns" else 4) and answer.base == "base"
            for name, id in ids.items():
                assert await tokens_of(client, PROMPTS[1], greedy_params(id)) == wanted[name][1], name
            pairs = [(name, index) for index in range(len(PROMPTS)) for name in ids]
            random.Random(0).shuffle(pairs)
            found = await asyncio.gather(*(tokens_of(client, PROMPTS[i], greedy_params(ids[n])) for n, i in pairs))
            assert found == [wanted[name][index] for name, index in pairs]

    assert len({tuple(map(tuple, tokens)) for tokens in wanted.values()}) == len(wanted), "adapters must differ"
    run(main)


def test_loads_share_no_cached_prefix(base: Path, folders: dict[str, Path], wanted: dict[str, list[list[int]]]) -> None:
    """Adapter, base and another load of the same folder compute the same prompt anew, each finds its own blocks; what
    is dropped is refused, and its slot serves another."""
    prompt, plain = PROMPTS[2], folders["plain"]

    async def main() -> None:
        async with running(base, max_loras=1) as client:

            async def cached(adapter: int) -> int:
                before = client.stats.prefix_hits
                tokens = await tokens_of(client, prompt, greedy_params(adapter))
                assert tokens == wanted["plain" if adapter else ""][2]
                return client.stats.prefix_hits - before

            await load(client, 1, plain)
            assert [await cached(0), await cached(1)] == [0, 0]
            assert await cached(0) > 30 and await cached(1) > 30
            await load(client, 2, plain)
            assert await cached(2) == 0
            client.drop_adapter(1)
            assert await error_of(client, greedy_params(1)) == "its adapter is not loaded"
            assert await cached(2) > 30
            assert await error_of(client, greedy_params(5)) == "its adapter is not loaded"

    run(main)


def test_loading_and_unloading_under_load(
    base: Path, folders: dict[str, Path], wanted: dict[str, list[list[int]]]
) -> None:
    """Every answer is checked while adapters come and go, more of them than slots and than the host keeps."""
    rng, names = random.Random(1), list(FORMS)

    async def main() -> None:
        async with running(base, max_loras=2, max_cpu_loras=2) as client:
            num_done = 0

            async def one_load(worker: int) -> None:
                nonlocal num_done
                for turn in range(4):
                    name, id = rng.choice(names), 1000 * worker + turn + 1
                    await load(client, id, folders[name])
                    chosen = [rng.randrange(len(PROMPTS)) for _ in range(3)]
                    found = await asyncio.gather(*(tokens_of(client, PROMPTS[i], greedy_params(id)) for i in chosen))
                    assert found == [wanted[name][i] for i in chosen], name
                    client.drop_adapter(id)
                    num_done += 1

            async def base_load() -> None:
                while num_done < 12:
                    index = rng.randrange(len(PROMPTS))
                    assert await tokens_of(client, PROMPTS[index], greedy_params()) == wanted[""][index]

            await asyncio.gather(base_load(), *(one_load(worker) for worker in range(1, 4)))

    run(main)


def break_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))


def drop_tensor(folder: Path, ending: str) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(ending)}, file)


def enlarge(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    save_file({name: tensor * 1e38 if "lora_B" in name else tensor for name, tensor in tensors.items()}, file)
    break_config(folder, lora_alpha=999_999)


def more_tokens(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    name = "base_model.model.lm_head"
    more = {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(301, 4)}
    save_file(load_file(file) | more | {f"{name}.base_layer.weight": torch.ones(301, 64)}, file)


def pickle_it(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


# What is done to a folder that is fine, and what is said of it.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "is no folder: pass a folder that PEFT's save_pretrained"),
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "cannot read"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors: download"),
    "more tokens": (more_tokens, "was trained beside a lm_head of shape [301, 64], and the model's is [300, 64]"),
    "pickle": (pickle_it, "has adapter_model.bin, a pickle, which could run code and is not read"),
    "truncated": (lambda f: os.truncate(f / "adapter_model.safetensors", 5000), "is truncated"),
    "half of a pair": (lambda f: drop_tensor(f, "layers.1.self_attn.v_proj.lora_B.weight"),
                       "lacks model.layers.1.self_attn.v_proj.lora_B"),
    "a module without": (lambda f: [drop_tensor(f, f"layers.0.mlp.up_proj.lora_{x}.weight") for x in "AB"],
                         "lacks the matrices of model.layers.0.mlp.up_proj, which its target_modules name"),
    "another rank": (lambda f: break_config(f, r=8), "has the rank 4, and its configuration says 8"),
    "no rank": (lambda f: break_config(f, r=0), "r is 0: it must be an integer above 0"),
    "no expression": (lambda f: break_config(f, target_modules="(q_proj"), "which is no regular expression"),
    "beyond its type": (enlarge, "times its scale reaches inf, and torch.float32 ends at 3.4e+38"),
    "not LoRA": (lambda f: break_config(f, peft_type="IA3"), "peft_type is IA3: only LORA is served"),
    "DoRA without vectors": (lambda f: break_config(f, use_dora=True), "use_dora is True, and"),
    "PiSSA": (lambda f: break_config(f, init_lora_weights="pissa_niter_4"), "alters the base model too"),
    "biases": (lambda f: break_config(f, bias="all"), "trained biases cannot be served"),
    "aLoRA": (lambda f: break_config(f, alora_invocation_tokens=[1]), "an activated adapter"),
    "parameters": (lambda f: break_config(f, target_parameters=["x"]), "only gate_up_proj and down_proj of experts"),
    "fused experts": (lambda f: break_config(f, target_parameters=["experts.down_proj"]), "lacks the matrices of"),
}  # fmt: skip


def test_broken_adapters_are_refused_in_one_line(
    base: Path, tiny_model: Any, adapter_files: Any, tmp_path: Path, wanted: dict[str, list[list[int]]]
) -> None:
    """Each says what is wrong and what to do, and the engine goes on."""
    cases: list[tuple[Path, str]] = []
    write = adapter_files.write_adapter
    for name, (spoil, words) in BROKEN.items():
        folder = write(tmp_path / name, base)
        spoil(folder)
        cases.append((folder, words))
    wide, deep = tiny_model("llama", intermediate_size=80), tiny_model("llama", num_hidden_layers=3)
    cases += [
        (write(tmp_path / "a", wide), "maps 80 to 64, and the model's 96 to 64: it is of another base"),
        (write(tmp_path / "b", deep), "which the model does not have: it is of another base"),
        (write(tmp_path / "c", base, use_dora=True), "serve it with --merge-lora"),
        (write(tmp_path / "d", base, whole=["lm_head"]), "has lm_head.weight whole (modules_to_save)"),
        (write(tmp_path / "f", base, modules_to_save=["lm_head", "score"]), "lacks lm_head, which its modules_to_save"),
        (tmp_path / ("x" * 300), "is no path ("),
        (Path("~no-such-user/a"), "is no path ("),
        (write(tmp_path / "e", base, rank=20), "has the rank 20, and at most 16 fit: raise --max-lora-rank"),
    ]

    async def main() -> None:
        async with running(base) as client:
            for id, (folder, words) in enumerate(cases, 1):
                answer = await client.load_adapter(LoadAdapter(id, str(folder)))
                assert answer.error is not None and words in answer.error and "\n" not in answer.error, folder.name
                assert await error_of(client, greedy_params(id)) == "its adapter is not loaded"
            assert await tokens_of(client, PROMPTS[0], greedy_params()) == wanted[""][0]

    run(main)


MERGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("q_proj v_proj down_proj", {}, {}),
    "DoRA": ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", {"use_dora": True}, {}),
    "whole": ("q_proj", {"whole": ["lm_head", "norm"], "modules_to_save": ["lm_head", "norm"]}, {}),
    "tied, embedding": ("embed_tokens o_proj", {}, {"tie_word_embeddings": True}),
    "tied, head whole": ("o_proj", {"whole": ["embed_tokens"]}, {"tie_word_embeddings": True}),
    "experts": ("q_proj gate_proj down_proj", {}, {"family": "qwen3_moe"}),
}


@pytest.mark.parametrize("form", MERGES)
def test_one_adapter_merged_is_the_model_that_peft_would_merge(
    form: str, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    names, config, changes = MERGES[form]
    base = tiny_model(**({"family": "llama"} | changes))
    folder = adapter_files.write_adapter(tmp_path / "adapter", base, names.split(), **config)
    oracle = adapter_files.merged_checkpoint(base, folder, tmp_path / "merged")

    async def main() -> None:
        async with running(base, enable_lora=False, merge_lora=str(folder)) as client:
            for prompt in PROMPTS[:2]:
                found = await tokens_of(client, prompt, greedy_params())
                assert found == adapter_files.greedy(oracle, prompt, NUM_TOKENS)
                assert found != adapter_files.greedy(plain, prompt, NUM_TOKENS)
            assert "adapters are off" in ((await client.load_adapter(LoadAdapter(1, str(folder)))).error or "")

    plain = adapter_files.merged(base, None)
    run(main)


def test_what_cannot_be_merged_is_said_in_one_line(
    tiny_model: Any, base: Path, adapter_files: Any, tmp_path: Path
) -> None:
    write = adapter_files.write_adapter
    deep = write(tmp_path / "deep", tiny_model("llama", num_hidden_layers=3))
    wide = write(tmp_path / "wide", tiny_model("llama", intermediate_size=80))
    for folder, words in ((deep, "does not have as numbers: it is of another base"), (wide, "it is of another base")):

        async def main(folder: Path = folder) -> None:
            async with running(base, enable_lora=False, merge_lora=str(folder)):
                pass

        with pytest.raises(EngineDeadError, match=words):
            run(main)
    for wrong, words in (
        ({"merge_lora": "/a", "enable_lora": True}, "choose one"),
        ({"merge_lora": "/a", "qlora_adapter_name_or_path": "/b"}, "are one option"),
        ({"merge_lora": "/a", "load_format": "dummy"}, "nothing to merge into"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "it must be at least --max-loras"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig("m", **wrong)
    slots = [EngineConfig("m", enable_lora=True, max_cpu_loras=kept).adapter_slots for kept in (None, 2, 9)]
    assert slots == [4, 2, 4]  # those that nobody names follow what the host keeps
    assert EngineConfig("m", qlora_adapter_name_or_path="/b").merge_lora == "/b"


# Families whose modules are unlike llama's, with names of modules beside the usual ones.
FAMILIES = {
    "phi3": "qkv_proj o_proj gate_up_proj down_proj embed_tokens", "qwen2": "q_proj v_proj lm_head",
    "gemma3_text": "q_proj o_proj up_proj embed_tokens", "cohere": "q_proj k_proj gate_proj",
    "deepseek_v3": "q_a_proj q_b_proj kv_a_proj_with_mqa o_proj gate_proj down_proj",
    "gemma4_text": "q_proj k_proj o_proj up_proj per_layer_input_gate embed_tokens", "laguna": "q_proj g_proj o_proj",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    """Fused products, rows in another order, a scaled embedding, tied heads, latent attention, shared experts."""
    base = tiny_model(family)
    names = FAMILIES[family].split()
    folder = adapter_files.write_adapter(
        tmp_path / "a", base, names, skip=lambda m: ".experts." in m, target_modules=[]
    )
    oracle, plain = adapter_files.merged(base, folder), adapter_files.merged(base, None)

    async def main() -> None:
        async with running(base, max_loras=1) as client:
            await load(client, 9, folder)
            pairs = [(adapter, prompt) for adapter in (9, 0) for prompt in PROMPTS[:3]]
            found = await asyncio.gather(*(tokens_of(client, p, greedy_params(a, 3)) for a, p in pairs))
            assert found == [adapter_files.greedy(oracle if a else plain, p, 3) for a, p in pairs]

    run(main)


def test_experts_beside_others(tiny_model: Any, adapter_files: Any, tmp_path: Path) -> None:
    """Adapters with and without experts, of different ranks, and the base, in fewer slots than there are adapters."""
    base = tiny_model("qwen3_moe")
    single = ("gate_proj", "up_proj", "down_proj", "v_proj")
    write, merged = adapter_files.write_adapter, adapter_files.merged_checkpoint
    in_one = adapter_files.write_experts_adapter(tmp_path / "0", AutoModelForCausalLM.from_pretrained(base))
    folders = [
        in_one,
        write(tmp_path / "1", base, single, rank=7, lora_alpha=14),
        write(tmp_path / "2", base, ["v_proj"]),
    ]
    oracles = [
        adapter_files.merged(base, None),
        adapter_files.merge_experts(adapter_files.merged(base, None), in_one),
        *(merged(base, folder, tmp_path / f"m{folder.name}") for folder in folders[1:]),
    ]
    wanted = [[adapter_files.greedy(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS] for oracle in oracles]
    assert len({str(tokens) for tokens in wanted}) == 4, "adapters must differ"

    async def main() -> None:
        async with running(base, max_loras=2, max_cpu_loras=2) as client:
            refused = await client.load_adapter(LoadAdapter(9, str(in_one)))
            assert "where --lora-target-modules has experts" in (refused.error or "")
        async with running(base, max_loras=2, max_cpu_loras=2, lora_target_modules=("v_proj", "experts")) as client:
            for id in (1, 2, 3):
                await load(client, id, folders[id - 1])
            cases = [(adapter, index) for index in range(len(PROMPTS)) for adapter in range(4)]
            random.Random(0).shuffle(cases)
            found = await asyncio.gather(*(tokens_of(client, PROMPTS[i], greedy_params(a)) for a, i in cases))
            assert found == [wanted[adapter][index] for adapter, index in cases]
            client.drop_adapter(1)
            assert await error_of(client, greedy_params(1)) == "its adapter is not loaded"
            await load(client, 4, in_one)
            assert await tokens_of(client, PROMPTS[1], greedy_params(4)) == wanted[1][1]

    run(main)


def test_on_a_quantized_base(base: Path, folders: dict[str, Path]) -> None:
    """What is stored as codes stays so; an adapter is added to its product."""

    async def main() -> None:
        async with running(base, quantization="int8", lora_target_modules=("q_proj", "v_proj")) as client:
            await load(client, 3, folders["rslora"])
            refused = await client.load_adapter(LoadAdapter(4, str(folders["plain"])))
            assert "--lora-target-modules has q_proj, v_proj only: add it there" in (refused.error or "")
            with_, without = [await tokens_of(client, PROMPTS[2], greedy_params(a)) for a in (3, 0)]
            assert with_ != without
            again = await asyncio.gather(*(tokens_of(client, PROMPTS[2], greedy_params(a)) for a in (0, 3, 0)))
            assert again == [without, with_, without]

    run(main)
