"""Whole steps and each of their layers: in a CUDA graph as launched one by one, bit for bit, and as near to fp32.

Tiny models whose layers differ, together all pairs of head size, group, window, soft cap and sinks (the first test
counts them); from 1 to 400 decodes beside prompts of 1 to 5000 tokens, and without. What runs where:

- The models with layers that go to `attend_beside` run all mixes, the others every pair of a number of decodes and a
  prompt's length, with one prompt or with several in turn.
- Each mix is launched as it is and in its graph's padded shape, replayed several times, and stepped by the runner; a
  mix that no graph is large enough for is launched with decodes beside prompts where the graph would be.
- Of each mix the pairs are compared with fp32.
- Without a GPU two models run a few mixes, in fp32. There the faults are planted that these tests are to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vserve.engine.layers import attention
from vserve.kernels.attention.attention import decode_attention, prefill_attention

HERE = Path(__file__).parent
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Layer(NamedTuple):
    """group: query heads a KV head, of which there are two; window, cap: 0 = none."""

    size: int
    group: int
    window: int = 0
    cap: float = 0.0
    sinks: bool = False

    @property
    def beside(self) -> bool:
        return self.size == 128 and self.group in (1, 2, 4, 8) and not (self.window or self.cap or self.sinks)


SIZES, GROUPS = (64, 96, 128, 256), (1, 2, 4, 7, 8)
# Qwen 2 has biases, Qwen 3 norms of queries and keys. The last layer computes the last tokens of requests alone.
SHAPES: dict[str, tuple[str, tuple[Layer, ...]]] = {
    "beside": ("MistralForCausalLM", (Layer(128, 4), Layer(128, 8), Layer(128, 1), Layer(128, 2))),
    "beside-and-64": ("Qwen3ForCausalLM", (Layer(128, 8), Layer(64, 8, window=128, sinks=True), Layer(128, 4))),
    "beside-and-128": ("Qwen2ForCausalLM", (Layer(128, 4), Layer(128, 7, 300, 20.0, True), Layer(64, 4, cap=30.0))),
    "64": ("Qwen3ForCausalLM", (Layer(64, 1, sinks=True), Layer(64, 2, window=33), Layer(64, 7))),
    "96": ("MistralForCausalLM", (Layer(96, 1), Layer(96, 2, cap=20.0, sinks=True), Layer(96, 4, window=512))),
    "96-and-256": ("Qwen3ForCausalLM", (Layer(96, 7, window=64, sinks=True), Layer(256, 8), Layer(96, 8, cap=15.0))),
    "256": ("Qwen2ForCausalLM", (Layer(256, 1, window=200, cap=30.0), Layer(256, 2), Layer(256, 4, sinks=True))),
    "256-of-7": ("MistralForCausalLM", (Layer(256, 7, cap=20.0), Layer(64, 4, window=100))),
}

DECODES = (1, 7, 17, 28, 33, 63, 100, 127, 130, 255, 400)
PROMPTS = (1, 60, 300, 900, 2000, 5000)
# The same number of tokens in several prompts, one of them of a single token. Twice 2000, for the largest graphs.
SEVERAL = {
    1: (1, 1, 1), 60: (31, 1, 28), 300: (97, 1, 140, 62), 900: (1, 500, 33, 366), 2000: (1999, 1, 1200, 17, 783),
    5000: (3000, 1, 1200, 799),
}  # fmt: skip
LIMITS = {900: 1024, 2000: 2048, 4000: 4096}  # by tokens of prompts: to which the scheduler cuts such a step


def prompts_of(decodes: int, length: int, several: bool) -> tuple[int, ...]:
    """The longest prompt is cut so that the step fits its limit."""
    prompts = list(SEVERAL[length]) if several else [length]
    over = decodes + sum(prompts) - LIMITS.get(sum(prompts), 1 << 30)
    prompts[prompts.index(max(prompts))] -= max(over, 0)
    return tuple(prompts)


def all_mixes() -> list[tuple[int, tuple[int, ...], bool]]:
    """(decodes, prompts, whether it is one of the pairs)."""
    mixes = [
        (decodes, prompts_of(decodes, length, several), (i + j + several) % 2 == 0)
        for (i, decodes), (j, length), several in product(enumerate(DECODES), enumerate(PROMPTS), (False, True))
    ]
    # The graph of a few decodes beside a whole chunk; and steps of decodes only.
    return [*mixes, (7, (1024,), True), *((decodes, (), True) for decodes in DECODES)]


@pytest.fixture(scope="module")
def steps(load_module: Callable[[Path], Any]) -> Callable[..., Any]:
    """steps(shape, dtype, device, **options) → the tiny model of this name, ready to run mixes."""
    models, errors, runs = (load_module(HERE / f"step_{name}.py") for name in ("models", "errors", "runs"))

    def make(shape: str, dtype: torch.dtype, device: str, **options: Any) -> Any:
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        made = runs.Steps(models, errors, *SHAPES[shape], dtype, where, **options)
        made.Mix = runs.Mix
        return made

    return make


def check_all(steps: Any, mixes: list[tuple[int, tuple[int, ...], bool]]) -> list[str]:
    steps.capture([steps.Mix(decodes, prompts) for decodes, prompts, _ in mixes])
    for number, (decodes, prompts, is_pair) in enumerate(mixes):
        mix = steps.Mix(decodes, prompts)
        assert sum(prompts) >= 5000 or steps.graph_shape(mix), f"there is no graph for {mix}"
        steps.check(mix, number, against_oracle=is_pair)
        if len(steps.failures) > 100:  # enough to see what it is
            break
    return steps.failures + steps.against_fp32.verdict()


def report(failures: list[str]) -> str:
    return "\n".join([f"{len(failures)} failures", *failures[:25]])


def test_the_shapes_cover_all_pairs() -> None:
    layers = [layer for _, shape in SHAPES.values() for layer in shape]
    assert len(SHAPES) <= 8
    properties = [(layer.size, layer.group, layer.window > 0, layer.cap > 0, layer.sinks) for layer in layers]
    values = [SIZES, GROUPS, *[(False, True)] * 3]
    for a, b in combinations(range(len(values)), 2):
        missing = set(product(values[a], values[b])) - {(layer[a], layer[b]) for layer in properties}
        assert not missing, f"no layer has {missing}"
    assert all(layer.beside for layer in SHAPES["beside"][1])
    beside = [[layer.beside for layer in shape] for _, shape in SHAPES.values()]
    assert sum(any(shape) and not all(shape) for shape in beside) >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow  # one after another they take minutes; `make test-gpu` runs them side by side
@needs_gpu[0]
@needs_gpu[1]
@torch.inference_mode()
def test_graph_and_eager_agree(shape: str, dtype: torch.dtype, steps: Callable[..., Any]) -> None:
    made = steps(shape, dtype, "cuda")
    whole = any(layer.beside for layer in SHAPES[shape][1])
    mixes = [mix for mix in all_mixes() if whole or mix[2]]
    failures = check_all(made, mixes)
    assert not failures, report(failures)


FEW_MIXES = [(33, (40, 1, 20), True), (40, (3,), True), (1, (5,), True), (17, (), True)]


def few(steps: Callable[..., Any], shape: str, dtype: torch.dtype = torch.float32) -> list[str]:
    return check_all(steps(shape, dtype, "cpu", num_blocks=160, history=80, contexts=90), FEW_MIXES)


def beside(decode: Callable[..., Any]) -> Callable[..., None]:
    """A twin of attend_beside whose decodes are the last to write."""

    def attend(query, cache, decodes, prompts, scoring, *, workspace, work, out, prompt_cache=None):
        count = len(decodes.rows)
        prefill_attention(query, prompt_cache or cache, prompts, scoring, out=out)
        decode(query[:count], cache, decodes, scoring, out=out[:count])

    return attend


def decode_with_zeros(query, cache, batch, scoring, *, out):
    """As it once was: padding rows, behind whose queries the prompts' begin, are written."""
    decode_attention(query, cache, batch, scoring, out=out)
    out[batch.seq_lens == 0] = 0.0


def use_beside(monkeypatch: pytest.MonkeyPatch, twin: Callable[..., None]) -> None:
    def supports(query, cache, scoring, out):
        return query.shape[2] == 128 and not scoring.window and not scoring.soft_cap and scoring.sinks is None

    monkeypatch.setattr(attention, "supports", supports)
    monkeypatch.setattr(attention, "attend_beside", twin)


@pytest.mark.parametrize(("shape", "dtype"), [("beside", torch.float32), ("beside-and-64", torch.bfloat16)], ids=str)
@torch.inference_mode()
@pytest.mark.slow
def test_padded_and_bare_agree(
    shape: str, dtype: torch.dtype, steps: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_beside(monkeypatch, beside(decode_attention))
    failures = few(steps, shape, dtype)
    assert not failures, report(failures)


@torch.inference_mode()
def test_zeros_of_padding_rows_are_noticed(steps: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    use_beside(monkeypatch, beside(decode_with_zeros))
    failures = few(steps, "beside-and-64")
    assert len(failures) >= 2 and all(failure[:2] in ("33", "40") for failure in failures), report(failures)
    assert "layer 1 keys" in failures[0] and "prompt 0 token 0" in failures[0], report(failures)


@torch.inference_mode()
def test_a_lost_key_is_noticed(steps: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In all ways of running a step, so that only fp32 can tell; in bfloat16, where errors are largest."""

    def forgets(query, cache, batch, scoring, **options):
        shorter = torch.where(batch.seq_lens > 1, batch.seq_lens - 1, batch.seq_lens)
        return decode_attention(query, cache, replace(batch, seq_lens=shorter), scoring, **options)

    monkeypatch.setattr(attention, "decode_attention", forgets)
    failures = few(steps, "beside-and-64", torch.bfloat16)
    assert failures and all("decodes: errors" in failure for failure in failures), report(failures)
    assert "33 decodes" in failures[0] and "layer 1 decodes" in failures[0], report(failures)


@torch.inference_mode()
def test_a_cell_of_another_request_is_noticed(steps: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def strays(query, key, value, positions, cos_sin, key_cache, value_cache, slots, *others):
        write(query, key, value, positions, cos_sin, key_cache, value_cache, slots, *others)
        value_cache[5, 3] = 0.0

    write = attention.rope_write_kv
    monkeypatch.setattr(attention, "rope_write_kv", strays)
    failures = few(steps, "64")
    strayed = [failure for failure in failures if "values: 1 cells of others were written" in failure]
    assert len(strayed) == 3 * len(FEW_MIXES), report(failures)  # once a layer
