"""Over HTTP, every family and RoPE type gives transformers' greedy tokens and log-probabilities (fp32, CPU)."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import httpx
import pytest
import torch

TOKENS = 24
TOP = 5
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
ROPE = {
    "default": {},
    "linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "llama3": dict(rope_scaling=LLAMA3),
    "yarn": dict(rope_scaling=YARN),
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)),
}
CASES = {f"{family}-{kind}": (family, rope) for family in FAMILIES for kind, rope in ROPE.items()} | {
    "llama-tied-biased": ("llama", dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    "llama-wide-heads": ("llama", dict(head_dim=32, num_key_value_heads=1)),
    "mistral-window": ("mistral", dict(sliding_window=24)),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1)),
    "qwen3-wide-heads": ("qwen3", dict(head_dim=32)),
    "qwen3-tied": ("qwen3", dict(tie_word_embeddings=True)),
    "gemma3-text-beside-pictures": ("gemma3", {}),
    "qwen3_5-text-beside-pictures": ("qwen3_5", {}),
    "glm4": ("glm4", {}),
    "cohere2": ("cohere2", {}),
    "deepseek_v3": ("deepseek_v3", dict(rope_parameters=dict(YARN, rope_theta=1e4, mscale=1.0, mscale_all_dim=0.8))),
    "gpt_oss": ("gpt_oss", {}),
}


def random_prompts(*lengths: int) -> list[list[int]]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [[rng.randrange(5, 290) for _ in range(length)] for length in lengths]


def mismatches(url: str, folder, prompts: list[list[int]], tolerance: float = 1e-3) -> list[str]:
    """Where the server's answers differ from transformers', in words; empty when they are the same."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    body = dict(model="tiny", prompt=prompts, max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=TOP,
                return_token_ids=True)  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(prompts)
    found = []
    for prompt, choice in zip(prompts, choices, strict=True):
        tokens = choice["token_ids"]
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        expected = logits.log_softmax(-1)
        for i, token in enumerate(tokens):
            best = expected[i].topk(TOP)
            margin = float(best.values[0] - best.values[1])
            if margin > tolerance and token != int(best.indices[0]):
                found.append(f"token {i} is {token}, transformers says {int(best.indices[0])}, margin {margin:.4f}")
            error = abs(choice["logprobs"]["token_logprobs"][i] - float(expected[i, token]))
            if not error < tolerance:
                found.append(f"log-probability of token {i} is off by {error}")
            ours = sorted(choice["logprobs"]["top_logprobs"][i].values(), reverse=True)[:TOP]
            worst = max(abs(a - float(b)) for a, b in zip(ours, best.values, strict=False))
            if not worst < tolerance:
                found.append(f"top log-probabilities of token {i} are off by {worst}")
    return found


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(case, tiny_model, live_server):
    family, overrides = CASES[case]
    folder = tiny_model(family, **overrides)
    # Within the original length: beyond it, transformers' dynamic RoPE depends on the calls before.
    budget = 48 if family != "qwen3_5" else 80  # chunks of which end at multiples of 64
    with live_server(folder, max_num_batched_tokens=budget, max_model_len=256) as url:
        assert mismatches(url, folder, random_prompts(5, 16, 33, 90)) == []


def change_rope_write_kv(monkeypatch, change):
    """Every layer's call goes through `change`, which takes and returns the arguments by name."""
    from vserve.engine.layers import attention

    real = attention.rope_write_kv
    parameters = inspect.signature(real)

    def changed(*arguments, **options):
        bound = parameters.bind(*arguments, **options)
        bound.apply_defaults()
        real(**change(bound.arguments))

    monkeypatch.setattr(attention, "rope_write_kv", changed)


def broken_rope(monkeypatch):
    """At position 0 nothing turns."""
    change_rope_write_kv(monkeypatch, lambda given: given | {"positions": torch.zeros_like(given["positions"])})


def shifted_positions(monkeypatch):
    """One on for every token but the first: RoPE sees only differences, so moving them all would change nothing."""

    def shift(given):
        positions = given["positions"]
        return given | {"positions": positions + (positions > 0).int()}

    change_rope_write_kv(monkeypatch, shift)


def wrong_page(monkeypatch):
    def elsewhere(given):
        slots = given["slots"]
        return given | {"slots": torch.where(slots >= 32, slots - 16, slots)}

    change_rope_write_kv(monkeypatch, elsewhere)


def no_window(monkeypatch):
    from vserve.engine.layers.attention import Attention

    real = Attention.__init__

    def unlimited(self, *arguments, **options):
        real(self, *arguments, **options)
        self.scoring = replace(self.scoring, window=0)

    monkeypatch.setattr(Attention, "__init__", unlimited)


def no_qk_norm(monkeypatch):
    def without(given):
        assert given["q_weight"] is not None and given["k_weight"] is not None
        return given | {"q_weight": None, "k_weight": None}

    change_rope_write_kv(monkeypatch, without)


@pytest.mark.parametrize(
    ("case", "breakage"),
    [
        ("llama-default", broken_rope),
        ("llama-default", shifted_positions),
        ("llama-default", wrong_page),
        ("mistral-window", no_window),
        ("qwen2-window", no_window),
        ("qwen3-default", no_qk_norm),
    ],
)
def test_the_comparison_notices(case, breakage, tiny_model, live_server, monkeypatch):
    """Each of these must make the test above fail."""
    family, overrides = CASES[case]
    folder = tiny_model(family, **overrides)
    breakage(monkeypatch)
    with live_server(folder) as url:
        assert mismatches(url, folder, random_prompts(33, 90))
