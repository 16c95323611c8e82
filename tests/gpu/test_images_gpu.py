"""Pictures on a GPU: towers against the CPU's, and models against transformers, in company with text in graphs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.media import MediaItem
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.models.blocks import CausalLM
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient

from ..models.test_model_parity import load
from ..picture_prompts import Prompt, log_probabilities, picture, prompt_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# As published: heads of 128, of 256 beside delta nets of 128.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_vl": dict(
        hidden_size=512, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        num_hidden_layers=5, initializer_range=0.1, max_position_embeddings=4096,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20], mrope_interleaved=True),
    ),
    "qwen3_5": dict(
        hidden_size=512, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=128, linear_value_head_dim=128,
        initializer_range=0.1, max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="default", rope_theta=1e7, mrope_section=[11, 11, 10], mrope_interleaved=True,
            partial_rotary_factor=0.25,
        ),
    ),
}  # fmt: skip
TOLERANCE = {"float32": 0.02, "bfloat16": 0.6}  # of what was chosen, below the most likely, in log-probabilities
FEATURES = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the largest one
SHAPES = [(64, 64), (32, 320), (300, 20), (640, 480), (1024, 1024)]


# Heads of 72, as those of most towers.
TOWER = dict(hidden_size=288, num_heads=4, intermediate_size=432, num_position_embeddings=2304, initializer_range=0.05)


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tiny_model: Any) -> Path:
    made: Path = tiny_model(request.param, vision=TOWER, **MODELS[request.param])
    return made


def features(model: CausalLM, items: list[MediaItem], device: str) -> list[torch.Tensor]:
    assert model.tower is not None
    given = [
        (torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3).to(device), item)
        for item in items
    ]
    with torch.inference_mode():
        return [found.float().cpu() for found in model.tower.encode(given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_those_of_the_cpu(folder: Path, dtype: torch.dtype) -> None:
    """Alone and packed."""
    items = [picture(str(folder), *shape, seed) for seed, shape in enumerate(SHAPES)]
    expected = features(load(folder), items, "cpu")
    model = load(folder, dtype=dtype, device=torch.device("cuda"))
    together = features(model, items, "cuda")
    for item, wanted, found in zip(items, expected, together, strict=True):
        (alone,) = features(model, [item], "cuda")
        for one in (alone, found):
            assert (one - wanted).abs().max() < FEATURES[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_answers_are_those_of_transformers(folder: Path, generate: Any, dtype: str) -> None:
    """Pictures of up to 1,024 tokens in chunks, beside text that decodes in graphs, found again, and preempted."""
    one = picture(str(folder), 1024, 1024, 7)
    prompts: list[Prompt] = [
        *(prompt_of(str(folder), 40 + 30 * i) for i in range(8)),
        *(prompt_of(str(folder), 5 + i, (320 + 64 * i, 256), 20) for i in range(6)),
        prompt_of(str(folder), 70, one, 30), prompt_of(str(folder), 70, one, 50), prompt_of(str(folder), one, one, 9),
    ]  # fmt: skip
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    answers, stats = generate(
        folder, [(ids, sampling, media) for ids, media in prompts] * 2, dtype=dtype, max_model_len=3000,
        num_gpu_blocks_override=400, max_num_batched_tokens=512, max_num_seqs=16,
    )  # fmt: skip
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.encoder_hits > 0
    assert stats.num_graph_misses == 0 and stats.num_late_compilations == 0
    worst = 0.0
    for (ids, media), outputs in zip(prompts * 2, answers, strict=True):
        assert outputs[-1].finish_reason == "length", outputs[-1].error
        tokens = [token for output in outputs for token in output.token_ids]
        wanted = log_probabilities(str(folder), ids + tokens, media, "cuda")[len(ids) - 1 : -1]
        worst = max(worst, (wanted.amax(-1) - wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max().item())
    print(f"{dtype}: what was chosen is at most {worst:.4f} below the most likely")
    assert worst < TOLERANCE[dtype]


def test_the_memory_plan_knows_of_pictures(folder: Path) -> None:
    """The largest picture that the model takes fits beside all else, as planned; what is kept of it is in the table."""

    async def plan() -> tuple[dict[str, int], str | None]:
        client = EngineClient(
            EngineConfig(
                str(folder), engine_in_process=True, gpu_memory_utilization=0.3, max_model_len=4096,
                mm_processor_kwargs='{"max_pixels": 4194304}',
            )
        )  # fmt: skip
        try:
            await client.start()
            ids, media = prompt_of(str(folder), 9, picture(str(folder), 1900, 1900, 1), 9)
            output = await client.submit(ids, SamplingParams(max_tokens=1, temperature=0.0), media=media).get()
            return client.info.memory, output.error
        finally:
            await client.close()

    memory, error = asyncio.run(plan())
    assert error is None
    assert memory["encoder_cache"] > 0 and memory["activations"] > 0
