"""What scripts for vLLM use beside LLM(...).generate: queues, counters, engine arguments, engines step by step."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import vserve
from vserve import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from vserve.engine.errors import ConfigError
from vserve.sampling_params import RequestOutputKind

HERE: dict[str, Any] = {"device": "cpu", "engine_in_process": True, "cpu_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tiny_model: Any) -> Path:
    folder: Path = tiny_model("qwen3", max_position_embeddings=128)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(str(folder), disable_log_stats=False, log_stats_interval=1, **HERE)) as llm:
        yield llm


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    (output,) = llm.generate([IDS], params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_what_is_enqueued_is_answered_in_its_order(llm: LLM) -> None:
    first = llm.enqueue([IDS, [9, 10]], GREEDY)
    second = llm.enqueue("the", GREEDY)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == first + second and len({*first, *second}) == 3
    assert outputs[0].outputs[0].token_ids == tokens(llm) and all(output.finished for output in outputs)
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(ValueError, match="prompt 0"):
        llm.enqueue([[-1]], GREEDY)


def test_a_chat_as_prompts(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (prompt,) = llm.preprocess_chat(messages)
    (chatted,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (generated,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert prompt["prompt_token_ids"] == chatted.prompt_token_ids == generated.prompt_token_ids
    assert prompt["prompt"] == chatted.prompt


def test_the_prefix_cache_is_forgotten(llm: LLM) -> None:
    long = list(range(5, 105))

    def cached() -> int | None:
        (output,) = llm.generate([long], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        return output.num_cached_tokens

    cached()
    assert cached()
    assert llm.reset_prefix_cache() is True
    assert cached() == 0
    assert cached()


def test_counters(llm: LLM) -> None:
    def read() -> dict[str, Any]:
        return {metric.name: metric for metric in llm.get_metrics()}

    before = read()
    tokens(llm)
    after = read()
    name = "vllm:generation_tokens"
    assert type(after[name]).__name__ == "Counter" and after[name].value == before[name].value + 12
    assert type(after["vllm:num_requests_running"]).__name__ == "Gauge"
    histogram = after["vllm:time_to_first_token_seconds"]
    assert histogram.count == before[histogram.name].count + 1 and histogram.buckets["+Inf"] == histogram.count
    assert histogram.sum > 0 and histogram.labels["engine"] == "0"


@pytest.mark.parametrize("name", ["collective_rpc", "sleep", "set_tokenizer", "beam_search", "start_profile"])
def test_what_is_not_there_says_what_to_do(llm: LLM, name: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=rf"^LLM has no {name}: \w"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^LLM has no nonsense$"):
        _ = llm.nonsense


def test_options_are_flags_of_a_program(folder: Path) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--verbose", action="store_true")
    words = [
        "--model",
        str(folder),
        "--max-model-len",
        "1k",
        "--no-enable-prefix-caching",
        "--limit-mm-per-prompt",
        "image=2",
        "--device",
        "cpu",
        "--verbose",
    ]
    arguments = EngineArgs.from_cli_args(parser.parse_args(words))
    assert arguments.options == {
        "model": str(folder), "max_model_len": "1k", "enable_prefix_caching": False, "device": "cpu",
        "limit_mm_per_prompt": "image=2",
    }  # fmt: skip
    assert arguments.max_model_len == "1k" and arguments.dtype is None
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        EngineArgs(str(folder), max_model_length=5)
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineArgs(str(folder), max_model_len=-7)
    assert vserve.AsyncLLMEngine is AsyncLLM and vserve.AsyncEngineArgs is EngineArgs


def test_answers_grow(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    whole = tokens(llm)

    async def main() -> None:
        grown = [output async for output in engine.generate({"prompt_token_ids": IDS}, GREEDY, "a")]
        seen = [output.outputs[0].token_ids for output in grown]
        assert seen[-1] == whole and len(seen) > 2 and all(b[: len(a)] == a for a, b in pairwise(seen))
        assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
        pieces, texts = [], ""
        delta = SamplingParams(temperature=0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate({"prompt_token_ids": IDS}, delta):
            pieces += output.outputs[0].token_ids
            texts += output.outputs[0].text
        assert pieces == whole and texts == grown[-1].outputs[0].text
        final = SamplingParams(temperature=0, max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)
        assert len([output async for output in engine.generate({"prompt_token_ids": IDS}, final)]) == 1
        twins = [[o async for o in engine.generate({"prompt_token_ids": IDS}, GREEDY)] for _ in range(2)]
        assert [twin[-1].outputs[0].token_ids for twin in twins] == [whole, whole]

    asyncio.run(main())


def test_who_leaves_and_who_aborts(llm: LLM) -> None:
    engine = AsyncLLM(llm)
    endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def main() -> None:
        async for _ in engine.generate({"prompt_token_ids": IDS}, endless, "left"):
            break
        seen = 0
        async for _ in engine.generate({"prompt_token_ids": IDS}, endless, "aborted"):
            seen += 1
            await engine.abort("aborted")
        assert seen < 100
        with pytest.raises(ValueError, match="prompt 0"):
            await anext(engine.generate({"prompt_token_ids": [-1]}, GREEDY))
        for _ in range(2000):
            if not engine._stops and not llm._engine.client.num_open:  # type: ignore[attr-defined]
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it goes on")

    asyncio.run(main())


def test_step_by_step(llm: LLM) -> None:
    engine = LLMEngine(llm)
    engine.add_request("a", {"prompt_token_ids": IDS}, GREEDY)
    engine.add_request("b", "the", GREEDY)
    engine.add_request("c", "the", SamplingParams(max_tokens=100, ignore_eos=True))
    with pytest.raises(ValueError, match="'a', which is being answered"):
        engine.add_request("a", "the", GREEDY)
    engine.abort_request("c")
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    assert finished.keys() == {"a", "b"} and finished["a"] == tokens(llm)
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0


def test_one_that_fails_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However early: its id is free again, and the steps of the others go on."""
    engine, start = LLMEngine(llm), llm._engine.start

    async def fail(*_: Any) -> None:
        raise ValueError("no grammar")

    def has_ended(work: Any) -> Any:
        future = start(work)
        future.exception(timeout=10)
        return future

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(llm, "_prepared", fail)
            patch.setattr(llm._engine, "start", has_ended)
            engine.add_request("a", "the", GREEDY)
        engine.add_request("b", "the", GREEDY)
        outcomes: list[str] = []
        while engine.has_unfinished_requests():
            try:
                outcomes += [output.request_id for output in engine.step() if output.finished]
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes == ["no grammar", "b"]


def test_the_stats_line(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vserve.stats"):
        for _ in range(500):
            tokens(llm, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            if caplog.records:
                break
    assert "Avg generation throughput" in caplog.text


def test_a_limit_of_the_model_is_the_default(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = tmp_path / "mine.json"
    chosen.write_text('{"max_new_tokens": 21, "temperature": 0.5}')
    options: dict[str, Any] = {"generation_config": str(chosen), "override_generation_config": '{"top_k": 1}'}
    with caplog.at_level(logging.INFO), LLM(str(folder), **options, **HERE) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(max_tokens=21, temperature=0.5, top_k=1)
        (output,) = llm.generate([IDS], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 21 or output.outputs[0].finish_reason == "stop"
        many = SamplingParams(max_tokens=60, ignore_eos=True)
        assert len(tokens(llm, many)) == 21
    told = [record.getMessage() for record in caplog.records if "defaults of sampling" in record.getMessage()]
    assert told == [
        f"{chosen} sets the defaults of sampling: temperature 0.5, max_new_tokens 21",
        "--override-generation-config sets the defaults of sampling: top_k 1",
    ]
