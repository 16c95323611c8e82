"""Windows beside full layers on a GPU: two steps in flight, CUDA graphs, and blocks that change hands under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WINDOW = 128
# Heads of 128: in 16 bit, prompts of the full layers go to the Hopper kernel, those of the others do not.
MODEL = dict(
    vocab_size=32000, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, intermediate_size=2048, max_position_embeddings=4096, use_sliding_window=True, sliding_window=WINDOW,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, tie_word_embeddings=False,
    initializer_range=0.05, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("windows")
    with torch.device("cuda"):
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.01), ("bfloat16", 0.5)])
def test_the_tokens_of_transformers(
    checkpoint: Path, generate: Any, dtype: str, tolerance: float, caching: bool
) -> None:
    """Prompts of up to ten windows, more of them than the cache holds; some share half of theirs."""
    from transformers import Qwen3ForCausalLM

    generator = torch.Generator().manual_seed(5)
    stem = torch.randint(3, 32000, (700,), generator=generator).tolist()
    prompts = [
        stem[: 700 * (i % 2)] + torch.randint(3, 32000, (40 + 47 * (i % 13),), generator=generator).tolist()
        for i in range(24)
    ]
    sampling = SamplingParams(max_tokens=320, temperature=0.0, ignore_eos=True)
    answers, stats = generate(
        checkpoint, [(prompt, sampling) for prompt in prompts], dtype=dtype, max_model_len=3000,
        num_gpu_blocks_override=450, max_num_batched_tokens=512, enable_prefix_caching=caching,
    )  # fmt: skip
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
    assert (stats.prefix_hits > 0) == caching
    oracle = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    worst = 0.0
    for prompt, outputs in zip(prompts, answers, strict=True):
        assert outputs[-1].finish_reason == "length", outputs[-1].error
        tokens = [token for output in outputs for token in output.token_ids]
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        worst = max(worst, (logits.amax(-1) - chosen).max().item())
    print(f"{dtype}: what was chosen is at most {worst:.4f} below the most likely, {stats.num_preemptions} preemptions")
    assert worst < tolerance
