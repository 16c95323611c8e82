"""Drafts beside recurrent states in the real engine: the tokens that come without (fp32, CPU).

Of drafts that did not hold, keys, values and what a state's ring has of them become NaN: nothing may read them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import vserve.engine.cache.batch as batch_module
import vserve.engine.start.arrivals as arrivals_module
from vserve.engine.errors import ConfigError
from vserve.engine.grammar.guide import Guide
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.schedule.scheduler import Scheduler
from vserve.engine.start.rank import Rank
from vserve.engine.step.runner import ModelRunner

from . import test_model_drafts as model_drafts
from .test_adapters import running, tokens_of
from .test_model_drafts import draft_models, draw, mtp, proposed, requests, same  # noqa: F401
from .test_speculation import Grammars, Told, config, poison, told  # noqa: F401
from .test_speculation import same as same_answers
from .test_states import LENGTH, drawn, greedy


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch, told: type[Told]) -> Counter[str]:  # noqa: F811
    """Counts what poison counts, and the inputs of wrong drafts that became NaN in rings."""
    seen = poison(monkeypatch)
    runners: list[ModelRunner] = []
    bind, verify = ModelRunner.bind_states, batch_module.verify_drafts

    def bind_states(self: ModelRunner, num_slots: int) -> None:
        bind(self, num_slots)
        runners[:] = [self]

    def verify_drafts(history, num_computed, num_proposed, rows, *others) -> None:
        before = {row: int(num_computed[row]) for row in rows.tolist()}
        verify(history, num_computed, num_proposed, rows, *others)
        (runner,), num_drafts = runners, others[-1]
        assert runner.builder.states is not None and runner.tables.state_slot is not None
        for row, count in before.items():
            slot = int(runner.tables.state_slot[row])
            for place in range(int(num_computed[row]), count + 1 + num_drafts) if num_computed[row] != count else ():
                for ring in runner.builder.states.tensors[::2]:
                    ring[slot, place % ring.shape[1]] = float("nan")
                seen["rings"] += 1

    monkeypatch.setattr(ModelRunner, "bind_states", bind_states)
    monkeypatch.setattr(batch_module, "verify_drafts", verify_drafts)
    return seen


def tell(batch: list[tuple[list[int], SamplingParams]], answers: list[Any], share: float) -> None:
    Told.sequences = [prompt + answer.tokens for (prompt, _), answer in zip(batch, answers, strict=True)]
    Told.share = share


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # which have a layer that drafts, beside delta nets
OTHERS = [slow(family) for family in FAMILIES[1:]]


@pytest.mark.parametrize(
    ("family", "count"),
    [(FAMILIES[0], 3), (FAMILIES[0], 7), *(slow(FAMILIES[0], n) for n in (1, 2, 4, 5, 6)),
     *(slow(family, 3) for family in FAMILIES[1:])],
)  # fmt: skip
def test_any_number_of_drafts_gives_the_same_tokens(tiny_model, engine, spoilt, family: str, count: int) -> None:
    """In company, in chunks beside prompts, and with n-grams of the texts themselves."""
    served = type(engine)(tiny_model(family))
    batch = [(prompt, greedy(logprobs=1)) for prompt in drawn(3, 64, 90, 65, 130, 1)]
    options = {"max_model_len": 192, "max_num_seqs": 6, "enable_prefix_caching": False}
    (plain,), _ = served.run(batch, **options)
    tell(batch, plain, 0.7)
    (answers,), stats = served.run(
        batch, speculative_config=config(count), max_num_batched_tokens=64 + 6 * (1 + count), **options
    )
    for answer, wanted in zip(answers, plain, strict=True):
        assert answer.error is None and answer.tokens == wanted.tokens
        expected = [found.logprob for found in wanted.logprobs]
        assert [found.logprob for found in answer.logprobs] == pytest.approx(expected, abs=2e-4)
    assert stats.num_drafts > 20 and sum(stats.num_accepted_tokens) > 20
    assert spoilt["rings"] == spoilt["poisoned"] > 20


def test_ngrams_find_drafts(tiny_model, engine) -> None:
    served = type(engine)(tiny_model("qwen3_5_text"))
    (stem,) = drawn(30)
    batch = [(stem * 3, greedy(allowed_token_ids=(5, 6))), ([9, 8, 7] * 25, greedy(allowed_token_ids=(5, 6, 7)))]
    options = {"max_model_len": 192, "enable_prefix_caching": False}
    (plain,), _ = served.run(batch, **options)
    (answers,), stats = served.run(batch, speculative_config=config(3, prompt_lookup_max=1), **options)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain] and stats.num_drafts > 5


@pytest.mark.parametrize("share", [slow(1.0), 0.6])
def test_a_chat_finds_what_was_decoded_with_drafts(tiny_model, engine, spoilt, overlap, share: float) -> None:
    """Snapshots at the ends of prompts and at 256, which the device may pass in one of several steps in flight."""
    served = type(engine)(tiny_model("qwen3_5_text"))
    prompts, options = drawn(200, 190, 60), {"max_model_len": 512, "max_num_seqs": 4}
    long = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    batch = [(prompt, long) for prompt in prompts]
    (first,), _ = served.run(batch, enable_prefix_caching=False, **options)
    turns = [(prompt + answer.tokens + [5, 6], greedy()) for prompt, answer in zip(prompts, first, strict=True)]
    (second,), _ = served.run(turns, enable_prefix_caching=False, **options)
    tell(batch + turns, first + second, share)
    overlap(2)
    (warm, again), stats = served.run(batch, turns, speculative_config=config(3), **options)
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in first]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in second]
    assert [answer.num_cached_tokens for answer in again] == [256, 256, 0]
    assert stats.num_state_restores == 2 and stats.num_drafts > 20 and spoilt["rings"] > 20 * (share < 1)


def test_preempted_and_out_of_slots_they_are_what_they_are_alone(tiny_model, engine, spoilt, overlap) -> None:
    rng = random.Random(7)
    served = type(engine)(tiny_model("qwen3_5_text"))
    prompts = drawn(*(rng.randint(3, 120) for _ in range(10)))
    batch = [
        (prompt, greedy() if index % 2 else
         SamplingParams(max_tokens=LENGTH, temperature=0.8, seed=index, ignore_eos=True))
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    alone, _ = served.run(*([request] for request in batch), enable_prefix_caching=False, max_model_len=192)
    plain = [wave[0] for wave in alone]
    tell(batch, plain, 0.7)
    overlap(2)
    longest = sorted(batch, key=lambda request: -len(request[0]))[:2]
    (answers, *again), stats = served.run(
        batch, longest, longest, speculative_config=config(3), max_model_len=192, max_num_seqs=8, block_size=8,
        num_gpu_blocks_override=40, max_num_batched_tokens=128,
    )  # fmt: skip
    expected = [answer.tokens for answer in plain]
    assert [answer.tokens for answer in answers] == expected
    for wave in again:
        assert [answer.tokens for answer in wave] == [expected[batch.index(request)] for request in longest]
    assert stats.num_preemptions > 0 and stats.num_state_restores > 0 and stats.num_drafts > 20
    assert stats.num_state_slots_used == 0 and spoilt["rings"] > 20


@pytest.mark.parametrize("depth", [slow(1), 2])
def test_masks_that_are_late_take_drafts_back(
    tiny_model, engine, spoilt, monkeypatch: pytest.MonkeyPatch, overlap, depth: int
) -> None:
    monkeypatch.setattr(arrivals_module, "Grammars", Grammars)
    served, options = type(engine)(tiny_model("qwen3_5_text")), {"max_num_seqs": 12, "max_model_len": 192}
    free = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    prompts, names = drawn(3, 70, 40, 130), (None, "nine", "budget")
    batch = [(prompt, SamplingParams(**free, grammar=name)) for name in names for prompt in prompts]
    (plain,), _ = served.run(batch, enable_prefix_caching=False, **options)
    tell(batch, plain, 0.8)
    luck, taken_back = random.Random(3), 0
    fill, postpone = Guide.fill, Scheduler.postpone

    def late(self: Guide) -> None:
        if luck.random() < 0.2:
            time.sleep(0.02)
        fill(self)

    def counted(self: Scheduler, requests: Any) -> None:
        nonlocal taken_back
        step, requests = self.in_flight[-1], list(requests)
        taken_back += sum(step.sampled.index(request) < step.num_drafting for request in requests)
        postpone(self, requests)

    monkeypatch.setattr(Guide, "fill", late)
    monkeypatch.setattr(Scheduler, "postpone", counted)
    monkeypatch.setattr("vserve.engine.start.loop.Patience.left", lambda self: 0.002)
    if depth > 1:
        overlap(depth)
    (answers, again), stats = served.run(
        batch, batch, speculative_config=config(3), max_num_batched_tokens=128, **options
    )
    same_answers(answers, plain)
    same_answers(again, plain)
    assert taken_back > 0 and stats.num_drafts > 20 and stats.num_state_restores > 0


def test_who_is_aborted_changes_nobody(tiny_model, engine, spoilt, overlap) -> None:
    """Slots of those who leave, amid drafts, go to others."""
    folder = tiny_model("qwen3_5_text")
    options = {"max_model_len": 192, "max_num_seqs": 4}
    batch = [(prompt, greedy()) for prompt in drawn(70, 3, 130, 20, 66, 90)]
    alone, _ = type(engine)(folder).run(*([request] for request in batch), enable_prefix_caching=False, **options)
    plain = [wave[0] for wave in alone]
    tell(batch, plain, 0.7)
    overlap(2)

    async def run() -> list[list[int]]:
        async with running(folder, speculative_config=config(3), max_num_batched_tokens=128, **options) as client:
            found = []
            for turn in range(6):
                leaving = [client.submit(*batch[(turn + n) % 6]) for n in (1, 2, 3)]
                staying = asyncio.ensure_future(tokens_of(client, *batch[turn]))
                for count, mailbox in enumerate(leaving):
                    for _ in range(count):
                        await mailbox.get()
                    client.abort([mailbox])
                found.append(await staying)
            assert client.stats.num_drafts > 10
            return found

    assert asyncio.run(run()) == [answer.tokens for answer in plain]
    assert spoilt["rings"] > 10


def test_steps_have_room_for_drafts_and_a_prompt(tiny_model) -> None:
    def made(**options: Any) -> Rank:
        named = {"max_num_seqs": 4, "max_model_len": 256, "kv_cache_memory_bytes": 2_000_000} | options
        folder = str(tiny_model("qwen3_5_text"))
        return Rank(EngineConfig(folder, device="cpu", cpu_threads=1, **named), lambda _: None)

    plain, drafting = made(), made(speculative_config=config(3), max_num_batched_tokens=64 + 12)
    assert drafting.settings.draft_depths == ((3, 3),), "76 tokens are 64 of a prompt and 12 of drafts"
    more = (16 - 8) * (2 * 2 * 8 + 6 * 16 + 12) * 4  # 3 + 2 · (1 + 3) positions, rounded up
    assert drafting.settings.plan.states.slot_bytes == plain.settings.plan.states.slot_bytes + 2 * more
    assert "snapshots" in drafting.settings.plan.table()
    with pytest.raises(ConfigError, match=r"a step of 67 tokens has no room for drafts beside 64 of a prompt; raise"):
        made(speculative_config=json.dumps({"method": "ngram"}), max_num_batched_tokens=67)


@pytest.mark.parametrize("kind", ["model", slow("eagle3")])
def test_a_small_model_or_a_head_drafts_beside_states(
    tiny_model,
    engine,
    draft_models,  # noqa: F811
    tmp_path: Path,
    overlap,
    kind: str,
) -> None:
    served, options = type(engine)(tiny_model("qwen3_5_text")), {"max_num_seqs": 8, "max_model_len": 192}
    drafter = tiny_model("qwen3", num_hidden_layers=1) if kind == "model" else draft_models.eagle3(tmp_path)
    (expected,), _ = served.run(requests(), **options)
    overlap(2)
    (answers, again), stats = served.run(
        requests(), requests(), speculative_config=model_drafts.config(drafter, 3), max_num_batched_tokens=96, **options
    )
    same(answers, expected)
    same(again, expected)
    assert stats.num_drafts > 40 and stats.num_state_restores > 0


def test_a_model_with_states_does_not_draft(tiny_model) -> None:
    asked = {"device": "cpu", "speculative_config": model_drafts.config(tiny_model("qwen3_5_text"), 2)}
    for target in ("llama", "qwen3_5_text"):
        with pytest.raises(ConfigError, match=r'Qwen3_5ForCausalLM keeps recurrent .* \{"method": "mtp"\} where'):
            Rank(EngineConfig(str(tiny_model(target)), cpu_threads=1, **asked), lambda _: None)


@pytest.fixture(params=[FAMILIES[0], *OTHERS])
def with_layer(request, tiny_models, draft_models, engine, tmp_path: Path) -> tuple[Any, Any]:  # noqa: F811
    """An engine of a model with a layer that drafts, and plain code of that."""
    folder = tiny_models.tiny_checkpoint(tmp_path / "model", request.param)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    draft_models.with_mtp(folder)
    return type(engine)(folder), draft_models.PlainMTP(load_file(folder / "model.safetensors"), whole)


def test_its_layer_drafts_what_plain_code_drafts(with_layer, proposed) -> None:  # noqa: F811
    served, oracle = with_layer
    batch, options = requests(), {"max_num_seqs": 8, "max_model_len": 192}
    (expected,), _ = served.run(batch, **options)
    (answers, again), stats = served.run(batch, batch, speculative_config=mtp(3), max_num_batched_tokens=96, **options)
    same(answers, expected)
    same(again, expected)
    histories = [prompt + answer.tokens for (prompt, _), answer in zip(batch, answers, strict=True)]
    checked = 0
    with torch.no_grad():
        for history, sampling, drafts in proposed[:60]:
            if any(known[: len(history)] == history for known in histories):
                assert drafts == oracle.drafts(history, 3, draw(sampling)), f"behind {len(history)} tokens"
                checked += 1
    assert checked > 40 and stats.num_drafts > 40 and stats.num_state_restores > 0


@pytest.mark.slow
def test_names_and_experts_of_its_layer_are_told_by_the_file(
    tiny_models,
    draft_models,  # noqa: F811
    engine,
    proposed,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Names may be those beside pictures, and the layer's experts stored in another way than the model's."""
    folder = tiny_models.tiny_checkpoint(tmp_path / "model", "qwen3_5_moe_text")
    draft_models.with_mtp(folder)
    options = {"speculative_config": mtp(3), "max_num_seqs": 8, "max_model_len": 192}
    (answers,), _ = type(engine)(folder).run(requests(), **options)
    expected = {tuple(history): drafts for history, _, drafts in proposed}
    tensors = load_file(folder / "model.safetensors")
    begin, count = "mtp.layers.0.mlp.experts.", 5
    gate, up, down = (
        torch.stack([tensors.pop(f"{begin}{index}.{name}_proj.weight") for index in range(count)])
        for name in ("gate", "up", "down")
    )
    tensors |= {f"{begin}gate_up_proj": torch.cat((gate, up), dim=1), f"{begin}down_proj": down}
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    proposed.clear()
    (again,), _ = type(engine)(folder).run(requests(), **options)
    same(again, answers)
    alike = [expected[key] == drafts for history, _, drafts in proposed if (key := tuple(history)) in expected]
    assert len(alike) > 40 and all(alike)


@pytest.mark.slow
def test_two_ranks_draft_as_one(with_layer, proposed) -> None:  # noqa: F811
    served, _ = with_layer
    options = {"max_num_seqs": 8, "max_model_len": 192, "tensor_parallel_size": 2}
    (expected,), _ = served.run(requests(), max_num_seqs=8, max_model_len=192)
    (answers, again), stats = served.run(
        requests(), requests(), speculative_config=mtp(3), max_num_batched_tokens=96, **options
    )
    same(answers, expected)
    same(again, expected)
    assert stats.num_drafts > 40 and stats.num_state_restores > 0
