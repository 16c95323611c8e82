"""Steps with a grammar: masks made between the forward pass and the sampling, with one and with two steps in flight."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import Future

import numpy as np
import pytest

import vserve.engine.start.arrivals as arrivals_module
import vserve.engine.start.loop as loop_module
from vserve.engine.link.messages import AbortRequests, AddGrammar, SetVocabulary
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step.mask import make_mask
from vserve.engine.step.runner import ModelRunner
from vserve.server.client.engine_client import EngineClient

END = 2


class Pattern:
    """Output i is one of the tokens that i allows; after `length` of them comes the end. Breaks where the key says."""

    def __init__(self, key: str) -> None:
        length, self.broken, at = key.split(":")
        self.length, self.at = int(length), int(at or 0)
        self.tokens: list[int] = []
        self.ready = True

    @property
    def terminated(self) -> bool:
        return self.tokens[-1:] == [END]

    def allowed(self) -> set[int]:
        place = len(self.tokens)
        return {END} if place == self.length else {10 + place, 70 + place, 295 - place}

    def breaks(self, place: str) -> bool:
        return self.broken == place and len(self.tokens) == self.at

    def binds(self, ahead: int) -> bool:
        return True

    def fill(self, row: np.ndarray) -> None:
        if self.breaks("fill"):
            raise RuntimeError("no mask")
        bits = np.zeros(len(row) * 32, dtype=np.uint8)
        bits[list(self.allowed())] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if self.breaks("accept"):
            raise RuntimeError("no step")
        if self.breaks("refuse") or token_id not in self.allowed():
            return False
        self.tokens.append(token_id)
        return True

    def when_ready(self, call) -> None:
        call()


class Patterns:
    def set_vocabulary(self, message: SetVocabulary) -> None: ...

    def add(self, message: AddGrammar) -> None:
        raise ValueError(f"cannot read {message.key}")

    def drop(self, keys: list[str]) -> None: ...

    def matcher(self, key: str) -> Pattern:
        if key.count(":") != 2:
            raise KeyError(key)
        return Pattern(key)


@pytest.fixture(params=[1, 2, 3])
def depth(request, monkeypatch, overlap) -> int:
    """Steps in flight; several are launched as on a GPU: on the loop's thread, the next before the last is read."""
    monkeypatch.setattr(arrivals_module, "Grammars", Patterns)
    if request.param > 1:
        overlap(request.param)
    return request.param


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [[rng.randrange(5, 290) for _ in range(length)] for length in (3, 17, 40, 90)]


@pytest.fixture(scope="module")
def plain(engine, prompts) -> list[list[int]]:
    (answers,), _ = engine.run([(prompt, free()) for prompt in prompts])
    return [answer.tokens for answer in answers]


def free(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, **options})


def pattern(length: int, broken: str = "", at: int = 0, **options) -> SamplingParams:
    return free(grammar=f"{length}:{broken}:{at}", **options)


def follows(tokens: list[int], length: int) -> bool:
    expected = Pattern(f"{length}::")
    return all(expected.accept(token) for token in tokens)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 16}, {"num_gpu_blocks_override": 9, "max_model_len": 144}],
    ids=["roomy", "in chunks", "preempted"],
)
def test_outputs_follow_their_grammars(engine, prompts, plain, depth, options):
    batch = [(prompt, free()) for prompt in prompts]
    batch += [(prompt, pattern(8)) for prompt in prompts]
    batch += [(prompts[2], pattern(length, temperature=1.5, seed=length)) for length in (0, 1, 1, 5, 30)]
    batch += [(prompts[0], pattern(9, max_tokens=1)), (prompts[1], pattern(9, prompt_logprobs=1, logprobs=1))]
    (answers, again), stats = engine.run(batch, batch, **options)
    assert [a.tokens for a in answers] == [a.tokens for a in again]
    assert [a.tokens for a in answers[:4]] == plain
    for (_, sampling), answer in zip(batch[4:], answers[4:], strict=True):
        length = int(sampling.grammar.split(":")[0])
        assert follows(answer.tokens, length), answer.tokens
        complete = length < sampling.max_tokens
        # The end counts even where ignore_eos is set.
        assert answer.finish_reason == ("stop" if complete else "length") and answer.stop_reason is None
        assert len(answer.tokens) == min(length + 1, sampling.max_tokens)
        assert (answer.tokens[-1] == END) == complete
    assert len(answers[-1].prompt_logprobs) == len(prompts[1]) - 1
    assert len({tuple(a.tokens) for a in answers[4:8]}) > 1
    assert ("num_gpu_blocks_override" in options) == (stats.num_preemptions > 0)


@pytest.mark.parametrize("broken", ["fill", "accept", "refuse"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_grammar_that_breaks_ends_its_request_alone(engine, prompts, plain, depth, broken, at):
    batch = [(prompts[1], free()), (prompts[1], pattern(8, broken, at)), (prompts[1], pattern(8))]
    (answers,), _ = engine.run(batch)
    assert answers[0].tokens == plain[1] and answers[2].finish_reason == "stop"
    assert answers[1].finish_reason == "error" and answers[1].tokens == answers[2].tokens[:at]
    assert "grammar of this request" in answers[1].error


def test_grammars_that_are_unknown_or_could_not_be_read(engine, prompts, plain, depth, monkeypatch):
    batch = [(prompts[0], free()), (prompts[0], free(grammar="nobody")), (prompts[0], free(grammar="broken"))]
    real = EngineClient.submit
    told = []

    def submit(self, *args, **options):
        if not told:
            told.append(True)
            self._send(AddGrammar("broken", "xgrammar", b""))
        return real(self, *args, **options)

    monkeypatch.setattr(EngineClient, "submit", submit)
    (answers,), _ = engine.run(batch)
    assert answers[0].tokens == plain[0]
    assert [a.finish_reason for a in answers] == ["length", "error", "error"]
    assert answers[1].error == "the grammar of this request cannot be used: the engine was not told of it"
    assert "cannot read broken" in answers[2].error


@pytest.fixture
def loaded(monkeypatch) -> Future[None]:
    """Until it has a result, no grammar is ready."""
    future: Future[None] = Future()

    class Slow(Pattern):
        def __init__(self, key: str) -> None:
            super().__init__(key)
            self.ready = future.done()

        def when_ready(self, call) -> None:
            future.add_done_callback(lambda _: call())

    monkeypatch.setattr(Patterns, "matcher", lambda self, key: Slow(key))
    return future


def test_nobody_waits_for_the_loading_of_anothers_grammar(engine, prompts, plain, depth, loaded, monkeypatch):
    order = []
    real = loop_module.EngineLoop._emit

    def emit(self, outputs, step_tokens):
        order.extend(output.id for output in outputs if output.finish_reason)
        real(self, outputs, step_tokens)
        if order and not loaded.done():  # the one that needs no grammar is served
            loaded.set_result(None)

    monkeypatch.setattr(loop_module.EngineLoop, "_emit", emit)
    (answers,), _ = engine.run([(prompts[0], pattern(4)), (prompts[1], free())])
    assert order == [2, 1]
    assert answers[1].tokens == plain[1] and answers[0].finish_reason == "stop"


def test_a_request_is_aborted_in_the_moment_its_grammar_is_loaded(engine, prompts, plain, depth, loaded, monkeypatch):
    said = []
    real = loop_module.EngineLoop._emit

    def emit(self, outputs, step_tokens):
        said.extend((output.id, len(output.token_ids), output.finish_reason) for output in outputs)
        real(self, outputs, step_tokens)

    monkeypatch.setattr(loop_module.EngineLoop, "_emit", emit)
    submit = EngineClient.submit

    def submitted(self, prompt, sampling, **options):
        mailbox = submit(self, prompt, sampling, **options)
        if sampling.grammar is None:  # the other one waits for its grammar by now
            loop = asyncio.get_running_loop()
            loop.call_soon(loaded.set_result, None)
            loop.call_soon(self._send, AbortRequests([mailbox.id - 1]))
        return mailbox

    monkeypatch.setattr(EngineClient, "submit", submitted)
    (answers,), _ = engine.run([(prompts[0], pattern(4)), (prompts[1], free())])
    assert answers[0].finish_reason == "abort" and answers[1].tokens == plain[1]
    assert [entry for entry in said if entry[0] == 1] == [(1, 0, "abort")]


@pytest.mark.parametrize("place", ["execute", "sample"])
def test_a_step_that_raises_ends_its_requests_and_no_others(engine, prompts, plain, depth, monkeypatch, place):
    real = getattr(ModelRunner, place)
    calls = []

    def failing(self, *args):
        constrained = place == "sample" and args and args[0] is not None
        calls.append(constrained or (place == "execute" and args[0].step > 0))
        result = real(self, *args)
        if calls[-1] and calls.count(True) == 6:
            raise MemoryError("injected")
        return result

    batch = [(prompts[0], pattern(12)), (prompts[1], pattern(12))]
    monkeypatch.setattr(ModelRunner, place, failing)
    (first, second), _ = engine.run(batch, [(prompts[1], free()), (prompts[0], pattern(3))])
    assert [a.finish_reason for a in first] == ["error", "error"] and "injected" in first[0].error
    assert second[0].tokens == plain[1] and second[1].finish_reason == "stop"


def test_the_mask_is_made_while_the_forward_runs(engine, prompts, depth, monkeypatch):
    events = []

    def noted(name, function):
        def wrapper(*args):
            events.append(name)
            return function(*args)

        return wrapper

    for owner, name in ((ModelRunner, "execute"), (ModelRunner, "sample"), (loop_module.Scheduler, "update")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    monkeypatch.setattr(loop_module, "make_mask", noted("mask", make_mask))
    engine.run([(prompts[0], pattern(6))])
    start = max(i for i, name in enumerate(events) if name == "mask") - 3  # the last step
    if depth == 1:
        assert events[start + 2 : start + 7] == ["update", "mask", "execute", "sample", "update"]
    else:
        assert events[start : start + 5] == ["sample", "execute", "update", "mask", "sample"]


def test_steps_without_a_grammar_never_come_near_one(engine, prompts, plain, depth, monkeypatch):
    def never(*_):
        raise AssertionError("a mask for nobody")

    monkeypatch.setattr(loop_module, "make_mask", never)
    (answers,), _ = engine.run([(prompt, free()) for prompt in prompts])
    assert [a.tokens for a in answers] == plain


def test_rows_whose_masks_are_late_sit_out_and_lose_nothing(engine, prompts, plain, depth, monkeypatch):
    """Some masks take longer than a step waits: their rows decode once more, and every answer is what it always is."""
    batch = [(prompt, free()) for prompt in prompts]
    batch += [(prompt, pattern(8)) for prompt in prompts]
    batch += [
        (prompts[1], pattern(9, prompt_logprobs=1, logprobs=1)),
        (prompts[2], pattern(6, temperature=1.0, seed=3)),
    ]
    (expected,), _ = engine.run(batch)
    postponed = []
    fill = Pattern.fill

    def late(self, row):
        if len(self.tokens) in (0, 3, 4, 7):
            time.sleep(0.02)
        fill(self, row)

    def postpone(self, requests):
        postponed.extend(requests)
        real(self, requests)

    real = loop_module.Scheduler.postpone
    monkeypatch.setattr(Pattern, "fill", late)
    monkeypatch.setattr(loop_module.Scheduler, "postpone", postpone)
    monkeypatch.setattr(loop_module.Patience, "left", lambda self: 0.002)
    (answers,), stats = engine.run(batch, block_size=4, num_gpu_blocks_override=150, max_model_len=200)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.finish_reason for answer in answers] == [answer.finish_reason for answer in expected]
    assert answers[8].logprobs and len(answers[8].prompt_logprobs) == len(prompts[1]) - 1
    assert postponed and stats.num_invariant_violations == 0
