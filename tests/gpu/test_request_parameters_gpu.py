"""Request parameters on a real GPU: two steps in flight, CUDA graphs, Triton kernels (float32, two small layers)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vserve.engine.start.arrivals as arrivals_module
from vserve.engine.link.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

VOCAB, END = 32000, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=128, intermediate_size=2048, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def answer(generate, checkpoint):
    """answer(requests, **options) → (tokens, prompt log-probabilities, last output) of each request, and statistics."""

    def run(requests, **options):
        answers, stats = generate(
            checkpoint, requests, max_model_len=2048, dtype="float32", max_mixed_tokens=256, max_num_seqs=64, **options
        )
        results = []
        for outputs in answers:
            tokens = [token for output in outputs for token in output.token_ids]
            results.append((tokens, outputs[0].prompt_logprobs, outputs[-1]))
        return results, stats

    return run


def prompts(*lengths):
    return [torch.randint(3, VOCAB, (n,)).tolist() for n in lengths]


def params(**options):
    return SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **options})


@pytest.mark.parametrize("eager", [False, True])
def test_prompt_logprobs_equal_transformers(checkpoint, answer, eager):
    from transformers import LlamaForCausalLM

    scored = prompts(1, 2, 17, 300, 1500)
    batch = [(p, params(prompt_logprobs=3)) for p in scored] + [(p, params()) for p in prompts(5, 700, 40)]
    answers, stats = answer(batch, enforce_eager=eager)
    assert stats.num_late_compilations == 0
    oracle = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda().eval()
    for prompt, (_, entries, _) in zip(scored, answers, strict=False):
        with torch.inference_mode():
            expected = oracle(torch.tensor([prompt], device="cuda")).logits[0].log_softmax(-1).cpu()
        assert len(entries) == len(prompt) - 1
        for place, entry in enumerate(entries):
            row = expected[place]
            assert entry.logprob == pytest.approx(float(row[prompt[place + 1]]), abs=1e-3)
            assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    assert all(entries is None for _, entries, _ in answers[len(scored) :])


def test_limits_hold_and_compile_nothing(answer):
    allowed = tuple(range(1000, 1004))
    hot = params(temperature=1.0, seed=1, allowed_token_ids=allowed)
    words = ((1000, 1001), (1003,), (1002, 1000, 1002))
    limited = params(temperature=1.0, seed=1, allowed_token_ids=allowed, bad_words=words)
    plain = [(p, params()) for p in prompts(9, 30, 200)]
    batch = [*plain, *((p, hot) for p in prompts(5, 80)), *((p, limited) for p in prompts(5, 80, 33, 7, 1000))]
    answers, stats = answer(batch)
    assert stats.num_late_compilations == 0
    for tokens, _, _ in answers[3:]:
        assert len(tokens) == 40 and set(tokens) <= set(allowed)
    for tokens, _, _ in answers[5:]:
        for word in words:
            assert not any(tuple(tokens[i : i + len(word)]) == word for i in range(40))
    alone, _ = answer(plain)
    assert [tokens for tokens, _, _ in alone] == [tokens for tokens, _, _ in answers[:3]]


class Digits:
    """Output i is 100 + i or 200 + i; the end comes after as many as the key says."""

    ready = True

    def __init__(self, key: str) -> None:
        self.length, self.count, self.terminated = int(key), 0, False

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[[END] if self.count == self.length else [100 + self.count, 200 + self.count]] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        self.terminated = self.count == self.length and token_id == END
        allowed = self.terminated or (self.count < self.length and token_id in (100 + self.count, 200 + self.count))
        self.count += 1
        return allowed


class Grammars:
    def matcher(self, key: str) -> Digits:
        return Digits(key)


def test_grammars_with_two_steps_in_flight(answer, monkeypatch):
    monkeypatch.setattr(arrivals_module, "Grammars", Grammars)
    plain = [(p, params()) for p in prompts(9, 30)]
    lengths = (0, 1, 7, 20, 39, 60)
    batch = [
        *plain,
        *((p, params(grammar=str(n))) for n, p in zip(lengths, prompts(4, 9, 700, 33, 5, 60), strict=True)),
    ]
    answers, stats = answer(batch)
    assert stats.num_late_compilations == 0
    for length, (tokens, _, last) in zip(lengths, answers[2:], strict=True):
        assert last.finish_reason == ("stop" if length < 40 else "length"), last
        assert len(tokens) == min(length + 1, 40)
        assert all(token in (100 + i, 200 + i) for i, token in enumerate(tokens[:length]))
    alone, _ = answer(plain)
    assert [tokens for tokens, _, _ in alone] == [tokens for tokens, _, _ in answers[:2]]
