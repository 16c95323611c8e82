"""Adapters on a GPU: two steps in flight, CUDA graphs of both kinds, slots that change hands under them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.start import rank
from vserve.engine.step.runner import ModelRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MODEL = dict(
    vocab_size=32000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    head_dim=128, intermediate_size=2048, max_position_embeddings=4096, tie_word_embeddings=False,
    initializer_range=0.05, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NUM_ADAPTERS, NUM_REQUESTS, NUM_TOKENS = 12, 400, 24
FAR = 0.6  # of logits, below the most likely: as far as bfloat16 leads in dense models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("adapted")
    with torch.device("cuda"):
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(checkpoint: Path, adapter_files: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of ranks from 4 to 32, some with the embedding and the head."""
    root, more = tmp_path_factory.mktemp("adapters"), ("embed_tokens", "lm_head")
    return [
        adapter_files.write_adapter(
            root / str(i), checkpoint, (*adapter_files.SEVEN, *(more if i % 3 == 0 else ())), rank=4 << i % 4, seed=i
        )
        for i in range(NUM_ADAPTERS)
    ]


def answers(
    generate: Any, checkpoint: Path, asked: list[tuple[list[int], int]], folders: list[Path], **options: Any
) -> list[list[int]]:
    """Of (prompt, number of the adapter, or -1), all at once."""
    requests = [
        (prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, adapter=adapter + 1))
        for prompt, adapter in asked
    ]
    found, stats = generate(checkpoint, requests, folders, max_model_len=1024, **options)
    assert all(outputs[-1].finish_reason == "length" for outputs in found), "a request failed"
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_late_compilations == 0, "a kernel of adapters was not warmed up"
    assert stats.num_graph_misses == 0, "a small step was launched kernel by kernel"
    return [[token for output in outputs for token in output.token_ids] for outputs in found]


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 300, (NUM_REQUESTS,), generator=generator).tolist()
    prompts = [torch.randint(3, 32000, (length,), generator=generator).tolist() for length in lengths]
    return [(prompt, index % (NUM_ADAPTERS + 1) - 1) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.02), ("bfloat16", 0.6)])
def test_the_tokens_of_merged_weights(
    checkpoint: Path, folders: list[Path], asked: list[tuple[list[int], int]], adapter_files: Any, generate: Any,
    dtype: str, tolerance: float,
) -> None:  # fmt: skip
    """400 streams over 12 adapters in 5 slots, and over none: each token is what transformers finds most likely, or
    nearly."""
    found = answers(generate, checkpoint, asked, folders, dtype=dtype, enable_lora=True, max_loras=5, max_lora_rank=32)
    worst = 0.0
    for number in range(-1, NUM_ADAPTERS):
        folder = None if number < 0 else folders[number]
        rank = 4 << number % 4
        oracle = adapter_files.merged(checkpoint, folder, lambda module, rank=rank: 8 / rank).cuda().eval()
        for (prompt, adapter), tokens in zip(asked, found, strict=True):
            if adapter != number:
                continue
            with torch.inference_mode():
                logits = oracle(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
            worst = max(worst, (logits.amax(-1) - chosen).max().item())
    print(f"{dtype}: what was chosen is at most {worst:.4f} below the most likely")
    assert worst < tolerance


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "fp8")])
def test_experts_in_slots(
    tmp_path: Path, asked: list[tuple[list[int], int]], adapter_files: Any, generate: Any, dtype: str,
    quantization: str | None,
) -> None:  # fmt: skip
    """Adapters of experts, some with a pair of all, some of each, beside one without and the base: 240 streams over 3
    slots, every kernel warmed up, every small step a graph. In float32 each token is what merged weights find most
    likely, or nearly. In bfloat16 near ties of the router choose other experts, which may change much: tokens may be
    about as often far from the oracle's as those of the oracle in bfloat16 are. On FP8, whose numbers nobody else has
    here, a second run, whose steps are others, answers nearly all alike."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = MODEL | {"moe_intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
    base = tmp_path / "base"
    with torch.device("cuda"):
        torch.manual_seed(4)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(base)

    def model() -> Any:
        return Qwen3MoeForCausalLM.from_pretrained(base, dtype=torch.float32)

    names = ("q_proj", "o_proj")
    folders = [adapter_files.write_adapter(tmp_path / str(i), base, names, rank=8, seed=i) for i in range(1)]
    folders += [adapter_files.write_experts_adapter(tmp_path / f"e{rank}", model(), rank=rank) for rank in (4, 16, 32)]
    chosen = [(prompt, index % (len(folders) + 1) - 1) for index, (prompt, _) in enumerate(asked[:240])]
    options: dict[str, Any] = {
        "dtype": dtype, "enable_lora": True, "max_loras": 3, "max_lora_rank": 32,
        "lora_target_modules": ("experts", *names), "quantization": quantization,
    }  # fmt: skip
    found = answers(generate, base, chosen, folders, **options)
    if quantization is not None:
        again = answers(generate, base, chosen, folders, **options)
        others = sum(one != other for one, other in zip(found, again, strict=True))
        print(f"{others} of {len(found)} answers differ in a second run")
        assert others <= len(found) // 10
        return
    gaps: dict[tuple[int, str], list[torch.Tensor]] = {}
    for number in range(-1, len(folders)):
        oracle = model()
        if number == 0:
            oracle = adapter_files.merged(base, folders[0], lambda module: 1.0)
        elif number > 0:
            oracle = adapter_files.merge_experts(oracle, folders[number])
        oracle = oracle.cuda().eval()
        in_bfloat16 = copy.deepcopy(oracle).bfloat16()
        for (prompt, adapter), tokens in zip(chosen, found, strict=True):
            if adapter != number:
                continue
            with torch.inference_mode():
                whole = torch.tensor([prompt + tokens], device="cuda")
                logits, rounded = (each(whole).logits[0, len(prompt) - 1 : -1] for each in (oracle, in_bfloat16))
            for who, picked in (("ours", torch.tensor(tokens, device="cuda")), ("theirs", rounded.argmax(-1))):
                gaps.setdefault((number, who), []).append(logits.amax(-1) - logits.gather(1, picked[:, None])[:, 0])
    below = {key: torch.cat(each) for key, each in gaps.items()}
    far = {key: float((each > FAR).float().mean()) for key, each in below.items()}
    for (number, who), each in below.items():
        share = 100 * far[number, who]
        print(f"{dtype}, adapter {number}, {who}: at most {each.max():.4f} below, {share:.2f} % by more than {FAR}")
    if dtype == "float32":
        assert max(float(each.max()) for (_, who), each in below.items() if who == "ours") < 0.02
    assert all(share <= 2 * far[number, "theirs"] + 0.005 for (number, _), share in far.items()), far


def test_graphs_take_what_was_planned(
    checkpoint: Path, folders: list[Path], asked: list[tuple[list[int], int]], generate: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of steps with adapters and of others, which share one pool."""
    planned, taken, plan, capture = [], [], rank.plan_memory, ModelRunner.capture_graphs

    def planning(*given: Any) -> Any:
        found = plan(*given)
        planned.append(found.graphs)
        return found

    def capturing(runner: ModelRunner, graphs: Any) -> None:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        capture(runner, graphs)
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)

    monkeypatch.setattr(rank, "plan_memory", planning)
    monkeypatch.setattr(ModelRunner, "capture_graphs", capturing)
    answers(generate, checkpoint, asked[:20], folders, enable_lora=True, max_lora_rank=32, dtype="bfloat16")
    print(f"graphs have {taken[0] >> 20} MiB beside their nodes, {planned[0] >> 20} MiB were planned with these")
    assert 0 < taken[0] <= planned[0]


def test_steps_without_adapters_are_as_without_the_option(
    checkpoint: Path, folders: list[Path], asked: list[tuple[list[int], int]], generate: Any
) -> None:
    """The same tokens in bfloat16, whether adapters could be served or not: what is launched is the same."""
    plain = [(prompt, -1) for prompt, _ in asked[:64]]
    options: dict[str, Any] = {"dtype": "bfloat16", "seed": 1}
    with_option = answers(generate, checkpoint, plain, folders[:2], enable_lora=True, max_lora_rank=32, **options)
    assert with_option == answers(generate, checkpoint, plain, [], **options)
