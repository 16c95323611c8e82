"""Models that read both ways, on a GPU: the CPU's vectors, packed beside others, and nothing compiled late."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vserve.engine.layers.packed import Packed
from vserve.engine.link.sampling_params import ALL, CLS, LAST, MEAN, Pooling, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

KINDS = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "nomic_bert", "gte", "modernbert", "eurobert",
    "gemma3_text",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(load_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    models = load_module(Path(__file__).parents[1] / "encoder_models.py")

    def make(kind: str, **options: Any) -> Path:
        folder: Path = models.encoder_checkpoint(tmp_path_factory.mktemp(kind), kind, **options)
        return folder

    return make


def requests(head: bool = False) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    prompts = [[2, *(rng.randrange(5, 200) for _ in range(rng.choice((0, 1, 7, 20, 20, 61)))), 3] for _ in range(200)]
    ways = (LAST,) if head else (MEAN, CLS, LAST, ALL)
    return [
        (prompt, SamplingParams(max_tokens=1, pooling=Pooling(way, normalize=False, head=head, second=head * 3)))
        for prompt in prompts for way in ways
    ]  # fmt: skip


def run(generate: Any, folder: Path, device: str, head: bool = False, **options: Any) -> list[np.ndarray]:
    answers, stats = generate(folder, requests(head), device=device, **options)
    assert stats.num_late_compilations == 0
    return [np.frombuffer(outputs[-1].embedding, "<f4") for outputs in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_the_vectors_of_the_cpu(kind: str, generate: Any, checkpoint: Any) -> None:
    """In fp32 by torch's own attention, in bf16 by flash attention over texts of different lengths, with weights of a
    size at which bf16 rounds by no more than a few percent; steps of a few texts and of all."""
    folder = checkpoint(kind, std=0.1)
    expected = run(generate, folder, "cpu")
    for dtype, tolerance, options in (
        ("float32", 2e-4, {}), ("bfloat16", 0.05, {}), ("float16", 0.01, {"max_num_batched_tokens": 256}),
    ):  # fmt: skip
        found = run(generate, folder, "cuda", dtype=dtype, **options)
        for ours, wanted in zip(found, expected, strict=True):
            assert np.linalg.norm(ours - wanted) < tolerance * np.linalg.norm(wanted), (kind, dtype, len(wanted))


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "eurobert"])
def test_the_classes_of_the_cpu(kind: str, generate: Any, checkpoint: Any) -> None:
    from transformers import AutoModelForSequenceClassification as Classifier

    folder = checkpoint(kind, auto=Classifier, std=0.1, id2label={0: "no", 1: "maybe", 2: "yes"})
    expected = run(generate, folder, "cpu", head=True)
    found = run(generate, folder, "cuda", head=True, dtype="bfloat16")
    scale = max(float(np.abs(wanted).max()) for wanted in expected)
    assert max(float(np.abs(ours - wanted).max()) for ours, wanted in zip(found, expected, strict=True)) < 0.06 * scale


@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("window", [0, 1, 33, 500])
def test_packed_attention(window: int, kv_heads: int) -> None:
    """Flash attention of torch against a call of scaled_dot_product_attention for each text."""
    torch.manual_seed(0)
    lengths = [1, 2, 2, 64, 65, 127, 300]
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (16, kv_heads, kv_heads)
    )
    found = Packed(lengths, starts).attend(query, key, value, 0.125, window)
    wanted = Packed(lengths, starts).attend(query.float(), key.float(), value.float(), 0.125, window)
    assert (found - wanted).abs().max() < 0.02
