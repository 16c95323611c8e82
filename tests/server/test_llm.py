"""The offline API against transformers, on tiny random models."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import vserve
from vserve import LLM, LoRARequest, PoolingParams, SamplingParams, StructuredOutputsParams
from vserve.engine.errors import ConfigError
from vserve.engine.link.messages import RequestOutput
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.server.offline.llm import BACKLOG_STEPS
from vserve.server.offline.sampling_params import RepetitionDetectionParams

PROMPTS = ["hello there, what", [40, 41, 42, 43], {"prompt": "the quick brown fox"}, {"prompt_token_ids": [7] * 33}]


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    folder: Path = tiny_model("qwen3", max_position_embeddings=128)
    return folder


@pytest.fixture(scope="module")
def llm(folder) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", engine_in_process=True, cpu_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(oracle: Any, token_ids: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        output = oracle.generate(torch.tensor([token_ids]), do_sample=False, max_new_tokens=count, pad_token_id=0)
    tokens: list[int] = output[0, len(token_ids) :].tolist()
    return tokens


def test_named_tokens_have_their_log_probabilities(llm: LLM) -> None:
    """The same as they have among the likeliest, in a batch with a request that asks for those."""
    common = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    (free,) = llm.generate([[5, 6]], SamplingParams(**common, logprobs=20), use_tqdm=False)
    known = free.outputs[0].logprobs
    assert known is not None
    ids = list(known[0])[-3:]
    both = [SamplingParams(**common, logprob_token_ids=ids), SamplingParams(**common, logprobs=7)]
    named, other = (answer.outputs[0] for answer in llm.generate([[5, 6]] * 2, both, use_tqdm=False))
    assert named.logprobs is not None and other.logprobs is not None
    assert [set(entries) for entries in named.logprobs] == [{*ids, token} for token in named.token_ids]
    for entries, all_of in zip(named.logprobs, known, strict=True):
        for id, entry in entries.items():
            if id in all_of:
                assert entry.logprob == pytest.approx(all_of[id].logprob, abs=1e-4), id
    assert [entry.rank for id, entry in named.logprobs[0].items() if id != named.token_ids[0]] == [None] * 3
    assert all(len(entries) == 7 for entries in other.logprobs)


def test_priorities_and_options_of_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's keywords: one priority each, where the engine heeds them, and what of a grammar a request may say."""
    params = SamplingParams(temperature=0, max_tokens=1)
    for given, words in ([1], "1 priorities for 2 prompts"), ([0, 1], "without scheduling_policy='priority'"):
        with pytest.raises(ValueError, match=words):
            llm.generate([[5], [6]], params, use_tqdm=False, priority=given)
    client = llm._engine.client
    sent: list[int] = []
    submit = client.submit_choices

    def spied(*values: Any, **keywords: Any) -> Any:
        sent.append(keywords["priority"])
        return submit(*values, **keywords)

    monkeypatch.setattr(client, "submit_choices", spied)
    monkeypatch.setattr(type(llm), "info", msgspec.structs.replace(llm.info, scheduling_policy="priority"))
    llm.generate([[5], [6]], params, use_tqdm=False, priority=[3, -1])
    assert sent == [3, -1]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema, backend="xgrammar", disable_additional_properties=True)
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=80, structured_outputs=form), use_tqdm=False)
    assert list(json.loads(output.outputs[0].text)) == ["a"]


def idle(llm: LLM) -> bool:
    """Whether the engine has nothing left to do: an answer to one more request says so."""
    llm.generate([[1]], SamplingParams(max_tokens=1), use_tqdm=False)
    stats = llm._engine.client.stats
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_greedy_answers_are_those_of_transformers_in_the_order_of_the_prompts(llm, oracle):
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    assert [output.prompt for output in outputs] == ["hello there, what", None, "the quick brown fox", None]
    ids = [tokenizer(PROMPTS[0])["input_ids"], PROMPTS[1], tokenizer("the quick brown fox")["input_ids"], [7] * 33]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert len({output.request_id for output in outputs}) == 4
    for output in outputs:
        (completion,) = output.outputs
        expected = greedy(oracle, output.prompt_token_ids, 24)
        assert completion.token_ids == expected
        ended = expected[-1] == tokenizer.eos_token_id
        assert completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert (completion.finish_reason, completion.stop_reason) == ("stop" if ended else "length", None)
        assert output.finished and completion.finished
        metrics = output.metrics
        assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token <= metrics.last_token
        assert completion.logprobs is None and completion.cumulative_logprob is None


def test_one_prompt_alone_is_a_list_of_one(llm):
    params = SamplingParams(temperature=0, max_tokens=3)
    for prompt in ("hello", [5, 6], {"prompt": "hello"}, {"prompt_token_ids": [5, 6]}):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 3
    assert llm.generate([], params, use_tqdm=False) == []


def test_many_more_prompts_than_rows(llm, oracle):
    prompts = [[10 + i % 40, 60 + i // 40, 3 + i % 7] for i in range(80)]  # the CPU runs 16 at a time
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for i in (0, 17, 79):
        assert outputs[i].outputs[0].token_ids == greedy(oracle, prompts[i], 4)
    assert idle(llm)


def test_n_answers(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate(PROMPTS[:2], params, use_tqdm=False) for _ in range(2))
    for output, other in zip(first, again, strict=True):
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        tokens = [completion.token_ids for completion in output.outputs]
        assert len({tuple(t) for t in tokens}) == 3 and all(len(t) == 12 for t in tokens)
        assert tokens == [completion.token_ids for completion in other.outputs]


def test_greedy_answers_are_equal_and_seeds_may_be_negative(llm):
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=3, temperature=0, max_tokens=12), use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 1
    seeds = (-(2**63), -1, 1, -1)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True) for seed in seeds]
    least, minus, plus, again = (
        output.outputs[0].token_ids for output in llm.generate([PROMPTS[0]] * 4, params, use_tqdm=False)
    )
    assert minus == again and len({tuple(tokens) for tokens in (least, minus, plus)}) == 3


def test_stop_strings_and_tokens(llm):
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate([PROMPTS[1]], plain, use_tqdm=False)
    text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            ignore_eos=True,
            stop=["never in it", stop],
            include_stop_str_in_output=include,
        )
        (stopped,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        completion = stopped.outputs[0]
        assert completion.text == text[: text.index(stop) + (len(stop) if include else 0)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == tokens[: len(completion.token_ids)] and len(completion.token_ids) < 40
    assert idle(llm)  # the engine, which does not know the string, was told
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[5]])
    (stopped,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
    completion = stopped.outputs[0]
    assert completion.token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[5])


def test_each_prompt_has_its_own_params(llm):
    params = [SamplingParams(temperature=0, max_tokens=i, ignore_eos=True) for i in (3, 1, 5)]
    outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 5]
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        llm.generate(PROMPTS[:2], params)


def test_the_context_ends_an_answer(llm):
    for limit in (None, 1000):
        (output,) = llm.generate([[9] * 120], SamplingParams(max_tokens=limit, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_logprobs_are_those_of_transformers(llm, oracle):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(["hello there"], params, use_tqdm=False)
    completion = output.outputs[0]
    with torch.inference_mode():
        logits = oracle(torch.tensor([output.prompt_token_ids + completion.token_ids])).logits[0]
    expected = logits[len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert completion.logprobs is not None
    for token, entries, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        values, ids = row.topk(3)
        assert list(entries) == ids.tolist() and entries[token].rank == 1
        assert [entry.logprob for entry in entries.values()] == pytest.approx(values.tolist(), abs=1e-3)
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
        assert entries[token].decoded_token == llm.get_tokenizer().decode([token])
    sampled = [entries[token].logprob for token, entries in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(sampled))


def test_prompt_logprobs_are_those_of_transformers(llm, oracle):
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=2, prompt_logprobs=2)
    for output in llm.generate([[7] * 9 + [8, 9], [5], "hello there"], params, use_tqdm=False):
        with torch.inference_mode():
            rows = oracle(torch.tensor([output.prompt_token_ids])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for token, entries, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], rows, strict=False):
            assert entries is not None and set(entries) == {token, *row.topk(2).indices.tolist()}
            assert entries[token].logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert entries[token].rank == (row > row[token]).sum().item() + 1


def test_what_may_be_sampled(llm):
    free = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (plain,) = llm.generate([[40, 41]], free, use_tqdm=False)
    tokens = plain.outputs[0].token_ids
    word = llm.get_tokenizer().decode(tokens[3])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=(word,))
    (output,) = llm.generate([[40, 41]], params, use_tqdm=False)
    assert output.outputs[0].token_ids[:3] == tokens[:3] and tokens[3] not in output.outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=[50, 51],
                            repetition_detection=RepetitionDetectionParams(4, 1, 3))  # fmt: skip
    (output,) = llm.generate([[40, 41]], params, use_tqdm=False)
    assert set(output.outputs[0].token_ids) <= {50, 51}
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "repetition")
    assert idle(llm)


@pytest.mark.slow
def test_structured_outputs(llm):
    one_of = StructuredOutputsParams(choice=["yes", "no"])
    params = [
        SamplingParams(n=2, temperature=1, seed=1, structured_outputs=one_of, ignore_eos=True),
        SamplingParams(temperature=0, structured_outputs={"regex": "[ab]{3}"}),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    ]
    answers = llm.generate([[40, 41]] * 3, params, use_tqdm=False)
    assert {completion.text for completion in answers[0].outputs} <= {"yes", "no"}
    assert re.fullmatch("[ab]{3}", answers[1].outputs[0].text)
    assert [completion.finish_reason for answer in answers for completion in answer.outputs] == ["stop"] * 3 + [
        "length"
    ]
    with pytest.raises(ValueError, match=r"prompt 1: Invalid 'structured_outputs'"):
        llm.generate([[1], [2]], [params[0], SamplingParams(structured_outputs={"regex": "(a"})], use_tqdm=False)
    assert idle(llm)


def test_token_ids_without_text(llm):
    params = [SamplingParams(temperature=0, max_tokens=6, detokenize=detokenize) for detokenize in (True, False)]
    with_text, without = llm.generate([PROMPTS[1]] * 2, params, use_tqdm=False)
    assert without.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert with_text.outputs[0].text and without.outputs[0].text == ""


def test_a_second_look_hits_the_prefix_cache(llm):
    prompt = torch.randint(3, 300, (50,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=4)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_chat_is_generate_on_the_rendered_template(llm):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    flat = [messages[0], {"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=8)
    text = llm.get_tokenizer().apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
    (expected,) = llm.generate(text, params, use_tqdm=False)
    (one,) = llm.chat(messages, params, use_tqdm=False)
    several = llm.chat([flat, messages], params, use_tqdm=False)
    for output in (one, *several):
        assert (output.prompt, output.prompt_token_ids) == (text, expected.prompt_token_ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    (templated,) = llm.chat(flat, params, use_tqdm=False, chat_template="{{ messages[1].content }}!")
    assert templated.prompt == "hi!"
    (plain,) = llm.chat(flat, params, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == text.removesuffix("<|im_start|>assistant\n")
    for bad in ([], [{"role": "nobody", "content": "x"}], [{"content": "x"}]):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(bad, params)


def test_default_params_come_from_the_model(folder, tmp_path, llm):
    assert llm.get_default_sampling_params() == SamplingParams()
    (output,) = llm.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1: 'prompt' gives no tokens."),
        ("", "prompt 1: 'prompt' gives no tokens."),
        ([1, 300], "prompt 1: 'prompt' has the token id 300; the vocabulary ends at 299."),
        ([-1], "prompt 1: 'prompt' has the token id -1"),
        ([3] * 128, "prompt 1: This model's maximum context length is 128 tokens."),
        ([1.5], "prompt 1 is neither a string nor a list of token ids."),
        (7, "prompt 1 is neither a string nor a list of token ids."),
        ({"prompt_token_ids": "abc"}, "prompt 1 is neither"),
        ({}, "prompt 1 is neither"),
        ({"prompt": "a", "multi_modal_data": {"audio": 1}}, "prompt 1: 'multi_modal_data' has 'audio'"),
    ],
)
def test_prompts_that_cannot_be(llm, prompt, message):
    with pytest.raises(ValueError) as error:
        llm.generate(["hello", prompt], SamplingParams(max_tokens=2))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "'temperature' must be at least 0"),
        ({"top_p": 0}, "'top_p' must be above 0"),
        ({"top_k": 1.5}, "'top_k' must be an integer"),
        ({"n": 0}, "'n' must be at least 1"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"stop": ["a", ""]}, "'stop' must not contain an empty string"),
        ({"stop": "a", "detokenize": False}, "'stop' needs 'detokenize'"),
        ({"bad_words": [""]}, "'bad_words' must not contain an empty string"),
        ({"prompt_logprobs": -2}, "'prompt_logprobs' must be at least -1"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "'structured_outputs' must have exactly one of"),
        ({"structured_outputs": StructuredOutputsParams()}, "'structured_outputs' must have exactly one of"),
        (
            {"structured_outputs": {"json": {}, "backend": "x"}},
            "'structured_outputs.backend' is 'x'; choose one of auto",
        ),
        ({"repetition_detection": {"max_pattern_size": 3}}, "'repetition_detection.min_count' must be at least 2"),
        ({"thinking_token_budget": 5}, "'thinking_token_budget' is not supported"),
        ({"logit_bias": {"x": 1.0}}, "'logit_bias' has the key 'x'"),
    ],
)
def test_params_that_cannot_be(values, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**values)
    assert str(error.value).startswith(f"SamplingParams: {message}")


@pytest.mark.parametrize(
    "kind, name, message",
    [
        (SamplingParams, "tempratur", "SamplingParams has no field 'tempratur'; did you mean temperature?"),
        (SamplingParams, "xyz", "SamplingParams has no field 'xyz'"),
        (PoolingParams, "normalise", "PoolingParams has no field 'normalise'; did you mean normalize?"),
        (StructuredOutputsParams, "choices", "StructuredOutputsParams has no field 'choices'; did you mean choice?"),
    ],
)
def test_a_misspelt_keyword_names_the_nearest(kind: Any, name: str, message: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 1})
    assert str(error.value) == message
    params = kind()
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_params_that_this_model_cannot_do(llm):
    for params, message in (
        (SamplingParams(logprobs=21), "'logprobs' is 21"),
        (SamplingParams(prompt_logprobs=21), "'prompt_logprobs' is 21"),
        (SamplingParams(prompt_logprobs=-1), "'prompt_logprobs' is"),
        (SamplingParams(allowed_token_ids=[300]), "'allowed_token_ids' has the token id 300"),
        (SamplingParams(stop_token_ids=[300]), "'stop_token_ids' has the token id 300"),
        (SamplingParams(min_tokens=9, max_tokens=3), "'min_tokens' is 9"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate("hello", params)


def test_logit_bias_and_none_for_defaults(llm):
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={77: 100}, top_p=None, stop=(), ignore_eos=None)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert output.outputs[0].token_ids == [77] * 3


def test_a_request_that_fails_does_not_end_the_others(llm, monkeypatch):
    client = llm._engine.client
    submit = client.submit_choices

    def failing(n: int, token_ids: list[int], *rest: Any, **options: Any) -> Any:
        (mailbox,) = submit(n, token_ids, *rest, **options)
        if list(token_ids) == [13]:
            client.abort([mailbox])
            mailbox.put(RequestOutput(mailbox.id, [], "error", error="NaN in the logits"))
        return [mailbox]

    monkeypatch.setattr(client, "submit_choices", failing)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([[12], [13], [14]], params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].stop_reason == "NaN in the logits" and outputs[1].finished


def test_progress_is_shown_and_an_exception_aborts_what_is_open(llm):
    seen: list[int] = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            self.total = total

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *exception: object) -> None: ...

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert "tok/s" in text

        def update(self, count: int) -> None:
            seen.append(count)
            if self.total == 3:
                raise RuntimeError("no more")

    params = SamplingParams(temperature=0, max_tokens=2)
    llm.generate(PROMPTS, params, use_tqdm=Bar)
    assert seen == [1] * 4
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    with pytest.raises(RuntimeError, match="no more"):
        llm.generate([[3], [4], [5]], [params, long, long], use_tqdm=Bar)
    assert idle(llm)


def test_keywords_are_read_as_flags_are(folder, tmp_path):
    (tmp_path / "defaults.json").write_text('{"temperature": 0.25, "top_k": 7}')
    with LLM(
        str(folder), device="CPU", engine_in_process=True, cpu_threads="1", dtype="float", max_model_len="0.1k",
        swap_space=4, pipeline_parallel_size=1, max_num_seqs=None, quantization=None, disable_log_stats=True,
        generation_config=str(tmp_path / "defaults.json"), override_generation_config={"top_k": 3},
    ) as llm:  # fmt: skip
        assert (llm.info.dtype, llm.info.max_model_len) == ("float32", 100)
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.25, 3)
    with pytest.raises(ValueError, match=r"^generation_config '/no/where' is no file"):
        LLM(str(folder), device="cpu", engine_in_process=True, generation_config="/no/where")


def test_refusals_name_keywords(llm):
    with pytest.raises(ValueError, match="Another runner or convert at the start"):
        llm.classify("a")


def test_a_model_that_drafts(folder, llm):
    """Named as ever; /server_info would show what it was found to be."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(["hello there", "one"], params)]
    options = {"device": "cpu", "engine_in_process": True, "cpu_threads": 1}
    with LLM(str(folder), speculative_model=str(folder), num_speculative_tokens=2, **options) as drafted:
        found = json.loads(drafted.info.settings["speculative_config"])
        assert (found["method"], found["model"]) == ("draft_model", str(folder))
        answers = drafted.generate(["hello there", "one"], params)
    assert [output.outputs[0].token_ids for output in answers] == expected
    with pytest.raises(ConfigError, match=r"no layers for multi-token prediction.*: use another method"):
        LLM(str(folder), speculative_config={"method": "mtp"}, **options)


def test_options_that_do_not_exist(folder):
    with pytest.raises(TypeError, match="no option 'max_model_length'; did you mean max_model_len"):
        LLM(str(folder), max_model_length=3)
    with pytest.raises(ValueError, match="no model is named"):
        LLM("")


def test_long_queues_are_read_in_large_steps_unless_told_otherwise(folder, llm):
    assert llm.info.settings["backlog_steps"] == BACKLOG_STEPS < SchedulerConfig.backlog_steps
    with LLM(str(folder), device="cpu", engine_in_process=True, cpu_threads=1, backlog_steps=7) as told:
        assert told.info.settings["backlog_steps"] == 7
    with pytest.raises(ValueError, match=r"^backlog_steps is 0: it must be at least 1"):
        LLM(str(folder), backlog_steps=0)


def test_the_engine_is_a_process_that_ends_with_its_llm(folder, oracle):
    llm = LLM(str(folder), device="cpu", cpu_threads=1, max_model_len=64)
    assert llm.info.max_model_len == 64
    process = llm._engine.client._engine
    assert process is not None and process.poll() is None
    (output,) = llm.generate("hello there", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(oracle, output.prompt_token_ids, 8)
    del llm
    gc.collect()
    assert process.poll() is not None


def test_a_closed_llm_says_so(folder):
    with LLM(str(folder), device="cpu", engine_in_process=True, cpu_threads=1) as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")


def test_an_engine_that_cannot_start_says_why(folder):
    """It refuses what it was configured with, which is another matter than its death."""
    for in_process in (True, False):
        with pytest.raises(ConfigError, match=r"^max_model_len 4096 is beyond"):
            LLM(str(folder), device="cpu", engine_in_process=in_process, max_model_len=4096, cpu_threads=1)


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_server_starts_its_engine_before_it_imports_fastapi():
    """The engine's imports take longest of all: they should not wait for those of the API."""
    run_python("""
        import sys, vserve.server.service
        late = {"fastapi", "pydantic", "numpy", "torch", "transformers"}
        assert not late & set(sys.modules), late & set(sys.modules)
    """)


def test_importing_vserve_is_light():
    out = run_python("""
        import sys, vserve
        heavy = {"torch", "transformers", "fastapi", "pydantic", "numpy", "msgspec", "asyncio"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        from vserve import SamplingParams
        assert not {"torch", "transformers"} & set(sys.modules)
        try:
            vserve.nothing
        except AttributeError as error:
            print(error)
    """)
    assert out.strip() == "module 'vserve' has no attribute 'nothing'"


@pytest.mark.slow
def test_a_script_that_closes_nothing_leaves_nothing_behind(folder):
    out = run_python(f"""
        from vserve import LLM, SamplingParams
        if __name__ == "__main__":
            llm = LLM({str(folder)!r}, device="cpu", cpu_threads=1)
            llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)
            print(llm._engine.client._engine.pid)
    """)
    import os
    import time

    end = time.monotonic() + 60
    while True:  # it leaves when it sees the socket close
        try:
            os.kill(int(out), 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < end, "the engine process is still there"
        time.sleep(0.05)


def test_what_scripts_for_vllm_hand_over(folder, llm, monkeypatch):
    """None and neutral values; older names mean what they meant."""
    import vserve.sampling_params
    from vserve import TextPrompt, TokensPrompt
    from vserve.sampling_params import GuidedDecodingParams

    assert vserve.sampling_params.SamplingParams is SamplingParams
    neutral = SamplingParams(
        temperature=0, max_tokens=4, best_of=1, use_beam_search=False, length_penalty=1.0, early_stopping=False,
        truncate_prompt_tokens=None, guided_decoding=None, logits_processors=None,
    )  # fmt: skip
    ids = [5, 6, 7, 8]
    (plain,) = llm.generate([ids], neutral, use_tqdm=False, lora_request=None)
    for given in ({"prompt_token_ids": [ids]}, {"prompts": [TokensPrompt(prompt_token_ids=ids)]}):
        (output,) = llm.generate(sampling_params=neutral, use_tqdm=False, **given)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids and output.prompt_token_ids == ids
    (output,) = llm.generate(TextPrompt(prompt="the"), neutral, use_tqdm=False)
    assert output.prompt == "the"
    last = dataclasses.replace(neutral, truncate_prompt_tokens=2)
    (cut,) = llm.generate([ids], last, use_tqdm=False)
    (short,) = llm.generate([ids[2:]], neutral, use_tqdm=False)
    assert cut.prompt_token_ids == [7, 8] and cut.outputs[0].token_ids == short.outputs[0].token_ids
    choice = GuidedDecodingParams(choice=["fox", "dog"])
    (chosen,) = llm.generate("the", SamplingParams(guided_decoding=choice), use_tqdm=False)
    assert chosen.outputs[0].text in ("fox", "dog")
    with pytest.raises(ValueError, match="'guided_decoding' and 'structured_outputs' are one"):
        SamplingParams(guided_decoding=choice, structured_outputs=choice)
    for wrong, words in (({"best_of": 3}, "best_of"), ({"use_beam_search": True}, "use_beam_search"),
                         ({"length_penalty": 2.0}, "length_penalty"),
                         ({"logits_processors": [print]}, "'logits_processors' is not supported")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            SamplingParams(**wrong)
    with pytest.raises(ValueError, match=r"^prompts is 5: give text, token ids"):
        llm.generate(5)
    with pytest.raises(ValueError, match=r"^give prompts, as text or token ids$"):
        llm.generate()
    with pytest.raises(ValueError, match="lora_request is <object object"):
        llm.generate("the", lora_request=object())
    monkeypatch.setenv("HF_TOKEN", "of another")
    with LLM(str(folder), device="cpu", engine_in_process=True, cpu_threads=1, hf_token="abc") as other:
        assert os.environ["HF_TOKEN"] == "abc"
        assert repr(other) == f"LLM({str(folder)!r}, float32 on cpu, context {other.info.max_model_len} tokens)"
    assert repr(other) == f"LLM({str(folder)!r}, closed)"


def test_a_line_shows_how_far_loading_is(folder, monkeypatch, capsys):
    def load(**options):
        LLM(str(folder), device="cpu", engine_in_process=True, cpu_threads=1, **options).close()
        return capsys.readouterr().err

    assert "vserve: " not in load(), "no terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = load()
    assert "vserve: weights" in shown and ": :" not in shown
    assert "vserve: " not in load(use_tqdm_on_load=False)


def test_types_are_published():
    assert (Path(vserve.__file__).parent / "py.typed").is_file()


def test_adapters(folder, oracle, adapter_files, tmp_path):
    """One for all prompts, or one each; another path under a known name is another adapter."""
    paths = [adapter_files.write_adapter(tmp_path / name, folder, seed=seed) for seed, name in enumerate("ab")]
    prompts = [[5, 6, 7, 8, 9], [100, 7, 5, 30]]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    models = {None: oracle} | {path: adapter_files.merged(folder, path) for path in paths}
    first, second = (LoRARequest("mine", 1, str(path)) for path in paths)
    options = {"device": "cpu", "engine_in_process": True, "cpu_threads": 1, "enable_lora": True, "max_loras": 1}
    with LLM(str(folder), **options) as llm:
        for given, expected in (
            (first, paths[:1] * 2), ([None, first], [None, paths[0]]), ([second, None], [paths[1], None]),
            (None, [None, None]),
        ):  # fmt: skip
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=given)
            for prompt, output, path in zip(prompts, outputs, expected, strict=True):
                assert output.outputs[0].token_ids == adapter_files.greedy(models[path], prompt, 4)
                assert (output.lora_request is None) == (path is None)
        with pytest.raises(ValueError, match="1 lora_requests for 2 prompts: give one for all, or one each"):
            llm.generate(prompts, sampling, lora_request=[first])
        with pytest.raises(ValueError, match="lora_request 'none': /none is no folder"):
            llm.generate(prompts, sampling, use_tqdm=False, lora_request=LoRARequest("none", 2, "/none"))
    for wrong in ({"lora_int_id": 0}, {"lora_path": ""}):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(**({"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"} | wrong))


def test_an_adapter_without_the_option(llm):
    with pytest.raises(ValueError, match="Adapters are off"):
        llm.generate([[5, 6]], use_tqdm=False, lora_request=LoRARequest("a", 1, "/a"))


def test_a_notebook_offers_the_api_by_tab() -> None:
    offered = {name for name in dir(vserve) if not name.startswith("_")}
    assert offered == set(vserve.__all__) - {"__version__"} and "LLM" in offered
