"""Every native family on a GPU, in the head sizes that it is served with: graphs, mixed steps, prompts in company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.sampling_params import SamplingParams

from ..tiny_models import GLM_ROPE, PICTURES, THREE_AXES, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WINDOW = 64
SIZES: dict[str, Any] = dict(
    hidden_size=512, intermediate_size=768, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
    max_position_embeddings=2048, initializer_range=0.1,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    num_key_value_heads=8, head_dim=64, q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=256)
GROWING: dict[str, Any] = dict(  # queries, from position 64 on
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=1e6,
        factor=32.0,
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=1.0,
        beta_fast=32.0,
        beta_slow=1.0,
        llama_4_scaling_beta=0.1,
    )
)
HYBRID: dict[str, Any] = dict(
    head_dim=256, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=128, linear_value_head_dim=128
)
MAMBA: dict[str, Any] = dict(mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128)
YARN = dict(
    rope_type="yarn", rope_theta=150000.0, factor=32.0, truncate=False, original_max_position_embeddings=64,
    beta_fast=32.0, beta_slow=1.0,
)  # fmt: skip
# What a family's own models have that the sizes of all do not say.
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "phi3": {}, "glm": {}, "glm4": {}, "granite": {},
    "cohere": {}, "olmo2": {}, "smollm3": {}, "seed_oss": {}, "mixtral": {},
    "olmoe": dict(head_dim=64),  # its norm is as wide as the model
    "gemma": dict(head_dim=256),
    "gemma2": dict(head_dim=256, sliding_window=WINDOW),
    "gemma3_text": dict(head_dim=256, sliding_window=WINDOW),
    # Its heads of layers without a window, and vectors of tokens, as long as published.
    "gemma4_text": dict(head_dim=256, global_head_dim=512, sliding_window=WINDOW, hidden_size_per_layer_input=256)
    | EXPERTS,
    "minimax_m2": {},
    "mimo_v2_flash": dict(head_dim=192, v_head_dim=128, sliding_window=WINDOW) | EXPERTS,
    "hy_v3": EXPERTS,
    "laguna": dict(sliding_window=WINDOW, num_attention_heads_per_layer=[8, 12, 8]) | EXPERTS,
    "llama4_text": dict(attention_chunk_size=WINDOW, floor_scale=WINDOW, intermediate_size_mlp=1024),
    "cohere2": dict(sliding_window=WINDOW),
    "olmo3": dict(sliding_window=WINDOW),
    "exaone4": dict(sliding_window=WINDOW),
    "gpt_oss": dict(head_dim=64, sliding_window=WINDOW, rope_parameters=YARN),
    "minicpm3": LATENT,
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe_lite": LATENT | EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS,
    "granitemoe": {},
    "granitemoeshared": {},
    # Delta nets of heads of 128, attention of 256 of which a quarter is rotated.
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | EXPERTS,
    "qwen3_next": HYBRID | EXPERTS,
    # Heads of Mamba-2 of 64, of Falcon-H1 of 128 x 256, and of Nemotron Nano 2 of 80.
    "granitemoehybrid": MAMBA | EXPERTS,
    "bamba": MAMBA,
    "falcon_h1": dict(mamba_n_heads=8, mamba_d_head=128, mamba_d_state=256, mamba_d_ssm=1024),
    "nemotron_h": dict(mamba_num_heads=16, mamba_head_dim=80, ssm_state_size=128) | EXPERTS,
    "lfm2": {},
    "lfm2_moe": EXPERTS,
    "ministral3": GROWING,
    "mistral4": LATENT | EXPERTS | GROWING | dict(head_dim=128, kv_lora_rank=256, qk_nope_head_dim=64),
    "internlm3": {},
    **{kind: {} for kind in PICTURES},
    "mistral3": GROWING,
    "qwen3_vl_moe": EXPERTS,
    # Their heads are as wide as the model divided by how many there are.
    "qwen2_vl": dict(num_attention_heads=4, rope_parameters=THREE_AXES | {"mrope_section": [16, 24, 24]}),
    "qwen2_5_vl": dict(num_attention_heads=4, rope_parameters=THREE_AXES | {"mrope_section": [16, 24, 24]}),
    "glm4v": dict(num_attention_heads=4, rope_parameters=GLM_ROPE | {"mrope_section": [8, 12, 12]}),
    "glm4v_moe": EXPERTS | dict(rope_parameters=GLM_ROPE | {"mrope_section": [8, 12, 12]}),
    "kimi_k25": LATENT | EXPERTS,
}  # fmt: skip
SCALED = (
    "deepseek_v3",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2",
    "llama4_text",
    "mimo_v2_flash",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
)  # in float32 too, where nothing may differ


@contextmanager
def oracle(folder: Path, dtype: torch.dtype) -> Iterator[Any]:
    yield reference(folder, dtype=dtype, attn_implementation="eager").cuda().eval()


def logits_of(folder: Path, dtype: torch.dtype, texts: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """Of each (prompt, answer), the rows [len(answer), vocab] that the answer was chosen from, float32."""
    found = []
    with oracle(folder, dtype) as model, torch.inference_mode():
        for prompt, answer in texts:
            rows = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1]
            found.append(rows.float())
    return found


def cases() -> list[Any]:
    return [(family, "bfloat16") for family in OWN] + [(family, "float32") for family in SCALED]


@pytest.mark.parametrize(("family", "dtype"), cases())
def test_answers_in_company_are_as_likely_as_those_of_transformers(
    tiny_model: Any, generate: Any, family: str, dtype: str
) -> None:
    """How far below the most likely token of float32 the chosen ones are, in the mean: transformers in the same dtype
    chooses as well, or hardly better."""
    folder = tiny_model(family, **SIZES | OWN[family])
    generator = torch.Generator().manual_seed(5)
    stem = torch.randint(5, 290, (150,), generator=generator).tolist()
    prompts = [
        stem[: 150 * (i % 2)] + torch.randint(5, 290, (3 + 31 * (i % 11),), generator=generator).tolist()
        for i in range(40)
    ]
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    answers, stats = generate(
        folder, [(prompt, sampling) for prompt in prompts], dtype=dtype, max_model_len=1024, max_num_seqs=32,
        max_num_batched_tokens=512,
    )  # fmt: skip
    assert stats.num_graph_misses == 0
    texts = []
    for prompt, outputs in zip(prompts, answers, strict=True):
        assert outputs[-1].finish_reason == "length", outputs[-1].error
        texts.append((prompt, [token for output in outputs for token in output.token_ids]))
    exact = logits_of(folder, torch.float32, texts)
    rough = logits_of(folder, getattr(torch, dtype), texts)

    def gap(chosen: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [rows.amax(-1) - rows.gather(1, ids[:, None])[:, 0] for rows, ids in zip(exact, chosen, strict=True)]
        )

    ours = gap([torch.tensor(answer, device="cuda") for _, answer in texts])
    theirs = gap([rows.argmax(-1) for rows in rough])
    scale = torch.cat(exact).std().item()
    print(
        f"{family} {dtype}: below the most likely by {ours.mean():.5f} (at most {ours.max():.4f}), transformers by "
        f"{theirs.mean():.5f} ({theirs.max():.4f}); logits have a deviation of {scale:.2f}"
    )
    assert ours.mean() <= 1.5 * theirs.mean() + 0.001 * scale
