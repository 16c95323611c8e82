"""Drafts on a GPU: in graphs of every depth, beside prompts, two steps in flight; what a copy gains."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import vserve.engine.step.runner as runner_module
from vserve.engine.cache.rows import RowTables
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.speculation import Speculation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NOTICING = Path(__file__).parents[1] / "noticing"
MODEL = dict(
    vocab_size=4096, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    intermediate_size=1024, max_position_embeddings=4096, tie_word_embeddings=False, initializer_range=0.1,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("drafted")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    return folder


class Told:
    """Drafts what comes next, as it was told, but for one token in five. On the device: it is in the graphs."""

    sequences: ClassVar[list[list[int]]] = []

    def __init__(self, settings: Speculation) -> None:
        self.count = settings.num_drafts
        longest = max(map(len, self.sequences)) + self.count
        padded = [tokens + [7] * (longest - len(tokens)) for tokens in self.sequences]
        self.truth = torch.tensor(padded, dtype=torch.int32, device="cuda")

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        row, sampled, history = rows.long(), sample_index >= 0, tables.history
        begun = history.computed(row[:, None], torch.arange(5, device="cuda"))  # no two prompts begin so
        which = (begun[:, None] == self.truth[None, :, :5]).all(2).int().argmax(1)
        place = tables.num_computed[row].long()[:, None] + 1 + torch.arange(self.count, device="cuda")
        drafts = self.truth[which].gather(1, place.clamp(max=self.truth.shape[1] - 1))
        drafts = torch.where((place * 7919 + which[:, None] * 31) % 5 > 0, drafts, (drafts + 1) % 4096)
        before = history.recent[row[:, None], place % history.ring]
        history.recent[row[:, None], place % history.ring] = torch.where(sampled[:, None], drafts, before)
        found = torch.where(sampled, self.count, 0).int()
        tables.num_proposed[row] = torch.where(sampled, found, tables.num_proposed[row])
        return found


def tokens_of(answers: list[Any]) -> list[list[int]]:
    assert all(outputs[-1].error is None for outputs in answers), [outputs[-1].error for outputs in answers]
    return [[token for output in outputs for token in output.token_ids] for outputs in answers]


@pytest.mark.parametrize("num_streams", [1, 6, 20, 60])
def test_tokens_with_drafts_are_those_without_in_float32(
    checkpoint: Path, generate: Any, monkeypatch: pytest.MonkeyPatch, num_streams: int
) -> None:
    """Depths 7, 3 and 1 by the number of streams; fewer as they end."""
    random = Random(num_streams)
    batch = []
    for i in range(num_streams):
        prompt = [random.randrange(3, 4096) for _ in range(random.choice([5, 40, 300, 900]))]
        way = [{"temperature": 0.0}, {"seed": i}, {"seed": i, "top_p": 0.8, "repetition_penalty": 1.2}][i % 3]
        batch.append((prompt, SamplingParams(**{"max_tokens": 40 + i, "ignore_eos": True, "min_tokens": i, **way})))
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 64, "max_mixed_tokens": 512}
    answers, _ = generate(checkpoint, batch, **options)
    expected = tokens_of(answers)
    monkeypatch.setattr(runner_module, "NgramDrafter", Told)
    monkeypatch.setattr(Told, "sequences", [prompt + out for (prompt, _), out in zip(batch, expected, strict=True)])
    config = json.dumps({"method": "ngram"})
    answers, stats = generate(checkpoint, batch, speculative_config=config, **options)
    assert tokens_of(answers) == expected
    assert stats.num_graph_misses == 0 and stats.num_late_compilations == 0
    assert stats.num_drafts > 0 and stats.num_free_blocks == stats.num_blocks
    held = sum(stats.num_accepted_tokens) / stats.num_drafts
    assert held > (1.5 if num_streams < 8 else 0.5)
    print(f"{num_streams} streams: {1 + held:.2f} tokens a row and step with drafts")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, load_module: Any) -> dict[str, Path]:
    """Of a target of six layers: a head of EAGLE-3, one of EAGLE, a smaller model, and the target itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("drafters")
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    sizes = made.Sizes(hidden=512, inner=1024, heads=8, kv_heads=2, dim=64, vocab=4096, scale=0.4)
    torch.manual_seed(4)
    for name, layers in (("target", 6), ("model", 1)):
        LlamaForCausalLM(LlamaConfig(**MODEL | {"num_hidden_layers": layers})).save_pretrained(folder / name)
    made.eagle3(folder / "eagle3", draft_vocab=2000, sizes=sizes)
    made.eagle(folder / "eagle", sizes=sizes)
    return {name: folder / name for name in ("target", "model", "eagle3", "eagle")}


@pytest.mark.parametrize("num_streams", [1, 6, 20, 60])
@pytest.mark.parametrize("name", ["eagle3", "eagle", "model", "target"])
def test_tokens_with_drafts_of_models_are_those_without_in_float32(
    drafters: dict[str, Path], generate: Any, name: str, num_streams: int
) -> None:
    """In graphs, with prompts that come in chunks beside. A target that drafts for itself is right nearly always."""
    random = Random(num_streams)
    batch = []
    for i in range(num_streams):
        prompt = [random.randrange(3, 4096) for _ in range(random.choice([5, 40, 300, 900]))]
        way = [{"temperature": 0.0}, {"seed": i}, {"seed": i, "top_p": 0.8}][i % 3]
        batch.append((prompt, SamplingParams(**{"max_tokens": 40 + i, "ignore_eos": True, **way})))
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 64, "max_mixed_tokens": 512}
    answers, _ = generate(drafters["target"], batch, **options)
    expected = tokens_of(answers)
    config = json.dumps({"model": str(drafters[name]), "num_speculative_tokens": 4})
    answers, stats = generate(drafters["target"], batch, speculative_config=config, **options)
    assert tokens_of(answers) == expected
    assert stats.num_graph_misses == 0 and stats.num_late_compilations == 0
    assert stats.num_drafts > 0 and stats.num_free_blocks == stats.num_blocks
    held = sum(stats.num_accepted_tokens) / stats.num_draft_tokens
    assert held > 0.85 or name != "target"
    print(f"{name}, {num_streams} streams: {100 * held:.1f} % of drafts held")


def test_drafts_of_a_copy_hold(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noticing model copies passages: at one stream, at least five tokens a step."""
    monkeypatch.syspath_prepend(str(NOTICING))
    sys.modules.pop("tasks", None)
    import tasks

    questions = [tasks.copy(Random(seed), 200) for seed in range(6)]
    config = json.dumps({"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4})
    sampling = SamplingParams(max_tokens=220, temperature=0.0, eos_token_ids=(tasks.END,))
    right, steps, tokens = 0, 0, 0
    for question in questions:
        answers, stats = generate(
            NOTICING / "model", [(question.prompt, sampling)], speculative_config=config, max_model_len=2560
        )
        (answer,) = tokens_of(answers)
        right += answer == question.answer
        steps, tokens = steps + stats.num_steps, tokens + len(answer)
    print(f"{tokens / steps:.2f} tokens a step, {right} of {len(questions)} copies right")
    assert right >= len(questions) - 1 and tokens / steps >= 5
