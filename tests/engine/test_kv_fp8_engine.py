"""A cache of 8 bits in the real engine: transformers' numbers, where its keys and values go through the same codes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vserve.engine.cache.kv_format import KVSettings
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.start.engine import Engine

NUM_OUTPUTS = 12
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4, "max_model_len": 120}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def through_codes(heads: Tensor, scale: float | None, code: torch.dtype) -> Tensor:
    """heads [..., D]; scale None: of each token and head."""
    largest = LARGEST[code]
    scales = heads.abs().amax(-1, keepdim=True) / largest if scale is None else torch.full_like(heads[..., :1], scale)
    return ((heads / scales).clamp(-largest, largest).to(code).float() * scales).to(heads.dtype)


def register(name: str, code: torch.dtype, scales: list[tuple[float, float]] | None) -> str:
    """An attention function of transformers' with codes. scales: of keys and values, by layer."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        of_keys, of_values = (None, None) if scales is None else scales[module.layer_idx]
        key, value = through_codes(key, of_keys, code), through_codes(value, of_values, code)
        return sdpa_attention_forward(module, query, key, value, mask, **given)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def with_scales(folder: Path, into: Path, scales: dict[str, float]) -> Path:
    """The model with scales of the cache, as compressed-tensors writes one whose weights it leaves alone."""
    shutil.copytree(folder, into)
    tensors = load_file(into / "model.safetensors")
    tensors |= {name: torch.tensor([scale]) for name, scale in scales.items()}
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((into / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME,
    }  # fmt: skip
    (into / "config.json").write_text(json.dumps(raw))
    return into


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(5, 290) for _ in range(50)]
    prompts = [stem[:common] + [rng.randrange(5, 290) for _ in range(own)] for common, own in
               ((0, 3), (50, 30), (30, 20), (0, 60), (50, 9), (0, 1))]  # fmt: skip
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True, logprobs=1)
    return [(prompt, sampling) for prompt in prompts]


@torch.inference_mode()
def their_logprobs(folder: Path, attention: str, requests: Any, answers: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    found = []
    for (prompt, _), answer in zip(requests, answers, strict=True):
        assert answer.finish_reason == "length", answer.error
        logits = model(torch.tensor([prompt + answer.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0])
    return torch.cat(found)


def check(folder: Path, attention: str, requests: Any, answers: Any) -> None:
    """Each token has the probability that transformers gives it with these codes, and about that without any."""
    ours = torch.tensor([step.logprob for answer in answers for step in answer.logprobs])
    coded = (ours - their_logprobs(folder, attention, requests, answers)).abs()
    plain = (ours - their_logprobs(folder, "sdpa", requests, answers)).abs()
    assert coded.mean() < 2e-4, "where a sum differs in its last bit, a code may be its neighbour: more would be wrong"
    assert 10 * coded.mean() < plain.mean() < 0.3, "codes change numbers, and not by much"


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], torch.dtype, bool]] = {
    "one for all": ("llama", {}, {"kv_cache_dtype": "fp8"}, torch.float8_e4m3fn, False),
    "five bits of exponent": ("qwen3", {}, {"kv_cache_dtype": "fp8_e5m2"}, torch.float8_e5m2, False),
    "asked for": (
        "llama", {}, {"kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True}, torch.float8_e4m3fn, True,
    ),
    "drafts": (
        "llama", {}, {
            "kv_cache_dtype": "fp8", "calculate_kv_scales": True,
            "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}',
        },
        torch.float8_e4m3fn, True,
    ),
    "keys with a bias": ("qwen2", {}, {"kv_cache_dtype": "fp8"}, torch.float8_e4m3fn, True),
    "windows": (
        "qwen3",
        {
            "use_sliding_window": True, "sliding_window": 20, "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"kv_cache_dtype": "fp8_per_token_head"}, torch.float8_e4m3fn, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_transformers_numbers_through_the_same_codes(case: str, engine: Any, tiny_model: Any, requests: Any) -> None:
    """In chunks, with prefix hits, and in a cache so small that requests are preempted."""
    family, changes, options, code, by_token = CASES[case]
    folder = tiny_model(family, **changes)
    attention = register(f"codes of {case}", code, None if by_token else [(1.0, 1.0)] * 8)
    (first, again), stats = type(engine)(str(folder)).run(
        requests, requests, num_gpu_blocks_override=70 if "windows" not in case else 180, **options, **OPTIONS
    )
    check(folder, attention, requests, first)
    check(folder, attention, requests, again)
    assert stats.prefix_hits > 0


@pytest.mark.parametrize(
    "names", ["{}.k_scale {}.v_scale", "{}.kv_scale", "{}.k_proj.output_scale {}.v_proj.output_scale"]
)
def test_scales_of_the_checkpoint(names: str, engine: Any, tiny_model: Any, requests: Any, tmp_path: Path) -> None:
    """Under any of their names, and without being asked for."""
    folder, scales, by_layer = tiny_model("llama"), {}, []
    for layer in range(len(read_folder(folder).layers)):
        given = [0.05 + 0.01 * layer, 0.06 + 0.02 * layer][: len(names.split())]
        paths = [name.format(f"model.layers.{layer}.self_attn") for name in names.split()]
        scales |= dict(zip(paths, given, strict=True))
        by_layer.append((given[0], given[-1]))
    scaled = with_scales(folder, tmp_path / "scaled", scales)
    attention = register(f"scales {names}", torch.float8_e4m3fn, by_layer)
    (answers,), _ = type(engine)(str(scaled)).run(requests, num_gpu_blocks_override=200, **OPTIONS)
    check(folder, attention, requests, answers)


def test_what_cannot_be_is_refused(tiny_model: Any, tmp_path: Path) -> None:
    def settings(family: str, asked: str) -> KVSettings:
        model = read_folder(tiny_model(family))
        return KVSettings.of(EngineConfig("m", kv_cache_dtype=asked), model, "bfloat16")

    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: the model has latent attention.*leave"):
        settings("deepseek_v3", "fp8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype float16: the model computes in bfloat16.*choose bfloat16"):
        settings("llama", "float16")
    assert settings("llama", "bfloat16") == settings("llama", "auto") == KVSettings("bfloat16", False)
    assert settings("llama", "fp8_per_token_head") == KVSettings("fp8_e4m3", True)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        name = "model.layers.0.self_attn.k_scale"
        folder = with_scales(tiny_model("llama"), tmp_path / f"wrong{scale}", {name: scale})
        with pytest.raises(ConfigError, match=f"{name} is {scale}: a scale of the cache is a number above 0"):
            Engine(EngineConfig(str(folder), device="cpu"), lambda progress: None)


def test_a_cache_of_codes_has_twice_the_blocks(tiny_model: Any) -> None:
    """Of as many bytes; and what is said of it says so. Keys of cached prefixes differ with what they stand for."""
    found = {}
    for asked in ("auto", "fp8", "fp8_per_token_head"):
        config = EngineConfig(
            str(tiny_model("llama")), device="cpu", dtype="bfloat16", kv_cache_dtype=asked, prefix_cache_seed="a",
            kv_cache_memory_bytes=1 << 20, max_num_seqs=2, max_model_len=64,
        )  # fmt: skip
        made = Engine(config, lambda progress: None)
        found[asked] = made.info, made.settings
        layers = made.rank.model.attention_layers()
        tensors = [t for layer in layers for t in (layer.cache.keys, layer.cache.values)]
        if asked == "fp8_per_token_head":
            tensors += [t for layer in layers for t in (layer.cache.key_scales, layer.cache.value_scales)]
        assert sum(t.numel() * t.element_size() for t in tensors) == made.info.memory["kv_cache"]
    plain, codes, scaled = (found[asked][0] for asked in found)
    assert (
        codes.num_blocks + 1 == 2 * (plain.num_blocks + 1) and plain.num_blocks < scaled.num_blocks < codes.num_blocks
    )
    assert [info.settings["kv_cache_dtype"] for info in (plain, codes, scaled)] == ["bfloat16", "fp8_e4m3", "fp8_e4m3"]
    assert [info.kv_cache["scales"] for info in (plain, codes, scaled)] == [
        "none", "a layer or head", "a token and head",
    ]  # fmt: skip
    assert codes.kv_cache["block_bytes"] * 2 == plain.kv_cache["block_bytes"]
    assert len({scheduler.prefix_cache_seed for _, scheduler in found.values()}) == 3
