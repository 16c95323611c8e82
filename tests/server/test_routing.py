"""Which engine a prompt goes to: the policy alone, against bursts and caches that are too small."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import Any

import pytest

from vserve.engine.link.messages import AddGrammar, AddRequest, SetVocabulary, pack_tokens
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.client.engine_client import EngineClient
from vserve.server.client.mailbox import EngineDeadError, Mailbox
from vserve.server.client.replicas import Replicas
from vserve.server.client.routing import BLOCK, PATIENCE, Load, Route, Router, prefix_keys

IDLE = Load(0, 0)


def prompt(seed: int, blocks: int) -> bytes:
    return bytes(pack_tokens(random.Random(seed).choices(range(1000), k=BLOCK * blocks)))


def test_keys_stand_for_all_that_comes_before_them() -> None:
    one, other = prompt(1, 4), prompt(2, 4)
    keys = prefix_keys(one, None)
    assert len(keys) == 4 and prefix_keys(one[:-4], None) == keys[:3]
    mixed = prefix_keys(other[: 4 * BLOCK] + one[4 * BLOCK :], None)
    assert not set(mixed) & set(keys), "the same block behind another one is another block"
    assert not set(prefix_keys(one, "salt")) & set(keys)
    assert prefix_keys(b"", None) == []


def test_who_has_the_prefix_gets_the_prompt_until_others_are_much_freer() -> None:
    router = Router(3, 100 * BLOCK)
    keys = prefix_keys(prompt(0, 8), None)
    first, cached = router.choose(keys, 8 * BLOCK, [IDLE] * 3)
    assert cached == 0
    for _ in range(5):
        assert router.choose(keys, 8 * BLOCK, [IDLE] * 3) == (first, 8 * BLOCK - 1), "a token is computed at least"
    busy: list[Load | None] = [IDLE] * 3
    busy[first] = Load(7 * BLOCK, 0)
    assert router.choose(keys, 8 * BLOCK, busy)[0] == first
    busy[first] = Load(9 * BLOCK, 0)
    assert router.choose(keys, 8 * BLOCK, busy)[0] != first


def test_prompts_that_wait_for_one_step_do_not_outweigh_those_that_run_for_many() -> None:
    """Where many are open, a few always wait: the next one goes to whoever has fewer open; where few are, to whoever
    has no prompts that wait."""
    router = Router(2, 100 * BLOCK)
    assert router.choose([], 128, [Load(10 * 128, 200), Load(0, 201)])[0] == 0
    assert router.choose([], 128, [Load(200 * 32 + 10 * 128, 200), Load(0, 215)])[0] == 1
    assert router.choose([], 128, [Load(200 * 32 + 10 * 128, 200), Load(0, 225)])[0] == 0
    assert router.choose([], 128, [Load(10 * 128, 2), Load(0, 3)])[0] == 1
    assert router.choose([], 128, [Load(1280, 200), Load(0, 200)])[0] == 1, "as many: where less waits"


def test_engines_that_end_answers_in_groups_keep_as_many() -> None:
    """256 answers each, of which groups end at once, while prompts that came before wait elsewhere: whoever lost a
    group gets it back. With prompts that wait counted in full, the others had got most of it."""
    generator, router = random.Random(3), Router(2, 100 * BLOCK)
    counts, waiting = [256, 256], [0, 0]
    for _ in range(500):
        engine, group = generator.randrange(2), generator.randrange(1, 12)
        waiting[engine] = 0  # its step has taken them in
        counts[engine] -= group
        for _ in range(group):
            loads = [Load(tokens, count) for tokens, count in zip(waiting, counts, strict=True)]
            chosen = router.choose([], 128, loads)[0]
            counts[chosen] += 1
            waiting[chosen] += 128
        assert max(counts) - min(counts) <= 1


def test_whoever_is_down_gets_nothing_and_has_forgotten_everything() -> None:
    router = Router(2, 100 * BLOCK)
    keys = prefix_keys(prompt(0, 8), None)
    first, _ = router.choose(keys, 8 * BLOCK, [IDLE, IDLE], "me")
    loads: list[Load | None] = [IDLE, IDLE]
    loads[first] = None
    assert router.choose(keys, 8 * BLOCK, loads, "me")[0] == 1 - first
    router.forget(1 - first)
    assert router.hits(keys)[1 - first] == 0


def test_a_session_stays_where_it_was() -> None:
    router = Router(4, 100 * BLOCK)
    first, _ = router.choose([], 10, [IDLE] * 4, "me")
    for seed in range(50):
        loads = [Load(PATIENCE * (index == first), 0) for index in range(4)]
        assert router.choose(prefix_keys(prompt(seed, 2), None), 2 * BLOCK, loads, "me")[0] == first


def test_a_session_leaves_an_engine_that_has_too_much_to_do() -> None:
    """And stays where it went; the prompts of one request stay together."""
    router = Router(3, 100 * BLOCK)
    first, _ = router.choose([], 10, [IDLE] * 3, "me")
    busy = [Load((PATIENCE + 1) * (index == first), 0) for index in range(3)]
    second, _ = router.choose([], 10, busy, "me")
    assert second != first
    assert router.choose([], 10, [IDLE] * 3, "me")[0] == second
    together = Router(3, 100 * BLOCK)
    first, _ = together.choose([], 10, [IDLE] * 3, "one request", together=True)
    busy = [Load(100 * PATIENCE * (index == first), 0) for index in range(3)]
    assert together.choose([], 10, busy, "one request", together=True)[0] == first


def test_a_session_does_not_wait_for_what_passes_either() -> None:
    """Beside many requests, too, PATIENCE tokens more are the most."""
    for tokens, stays in ((PATIENCE, True), (PATIENCE + 1, False)):
        router = Router(2, 100 * BLOCK)
        first, _ = router.choose([], 10, [IDLE] * 2, "me")
        busy = [Load(tokens * (index == first), 512) for index in range(2)]
        assert (router.choose([], 10, busy, "me")[0] == first) == stays


def test_a_prefix_that_is_there_counts_for_a_session() -> None:
    """What it would have to compute again elsewhere it can as well wait for."""
    router, text = Router(2, 1 << 20), prompt(1, 100)
    keys = prefix_keys(text, None)
    first, _ = router.choose(keys, 100 * BLOCK, [IDLE] * 2, "me")
    busy = [Load((PATIENCE + 100 * BLOCK) * (index == first), 0) for index in range(2)]
    assert router.choose(keys, 100 * BLOCK, busy, "me")[0] == first
    busy = [Load((PATIENCE + 101 * BLOCK) * (index == first), 0) for index in range(2)]
    assert router.choose(keys, 100 * BLOCK, busy, "me")[0] != first


@pytest.mark.parametrize("num_engines", [2, 3, 8])
def test_bursts_are_spread(num_engines: int) -> None:
    """Each is counted at once: 200 prompts that nobody has seen, of any lengths, in one moment."""
    generator = random.Random(num_engines)
    router, waiting, counts = Router(num_engines, 1 << 20), [0] * num_engines, [0] * num_engines
    for seed in range(200):
        length = generator.choice([1, 2, 30, 60])
        loads = [Load(tokens, count) for tokens, count in zip(waiting, counts, strict=True)]
        chosen, cached = router.choose(prefix_keys(prompt(seed, length), None), length * BLOCK, loads)
        waiting[chosen] += length * BLOCK - cached
        counts[chosen] += 1
    assert max(waiting) - min(waiting) <= 2 * 60 * BLOCK
    assert max(waiting) <= 1.25 * sum(waiting) / num_engines


class Cache:
    """What an engine does, slowly: the least recently used blocks are forgotten, the tail of a prompt first."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.known = blocks, OrderedDict[int, None]()

    def compute(self, keys: list[int]) -> int:
        hits = 0
        while hits < len(keys) and keys[hits] in self.known:
            hits += 1
        for key in reversed(keys):
            self.known[key] = None
            self.known.move_to_end(key)
        while len(self.known) > self.blocks:
            self.known.popitem(last=False)
        return hits


def test_two_caches_are_worth_nearly_one_of_their_size() -> None:
    """Twice the prefixes that one cache holds, in bursts: at least 0.95 of the hits of one cache of the summed size,
    and far more than in turns."""
    blocks_each, prefixes, generator = 800, 190, random.Random(7)  # 8 blocks a prefix: 1,520 of 1,600
    keys_of = [prefix_keys(prompt(seed, 8), None) for seed in range(prefixes)]
    router, caches, turns = Router(2, blocks_each * BLOCK), [Cache(800), Cache(800)], [Cache(800), Cache(800)]
    one = Cache(2 * blocks_each)
    hits = {"routed": 0, "one": 0, "turns": 0}
    for burst in range(300):
        waiting, counts = [0, 0], [0, 0]
        for place in range(16):
            keys = keys_of[generator.randrange(prefixes)]
            loads = [Load(tokens, count) for tokens, count in zip(waiting, counts, strict=True)]
            chosen, cached = router.choose(keys, 8 * BLOCK + 20, loads)
            waiting[chosen] += 8 * BLOCK + 20 - cached
            counts[chosen] += 1
            found = caches[chosen].compute(keys), one.compute(keys), turns[place % 2].compute(keys)
            if burst >= 100:
                for name, blocks in zip(("routed", "one", "turns"), found, strict=True):
                    hits[name] += blocks
    assert hits["routed"] >= 0.95 * hits["one"], hits
    assert hits["routed"] >= 1.2 * hits["turns"], hits


def test_routing_costs_little(slowness: float, settles_within: Any) -> None:
    """Of a prompt of 8k tokens, with four engines that all know it: 0.3 ms are allowed, on a machine at rest."""
    router, text = Router(4, 1 << 20), prompt(0, 128)
    for index in range(4):
        router._remember(prefix_keys(text, None), index)

    def measure() -> float:
        time.sleep(0.1)  # 50 in a row take no longer than a machine may stand still
        times = []
        for _ in range(50):
            started = time.perf_counter()
            router.choose(prefix_keys(text, None), len(text) // 4, [IDLE] * 4)
            times.append(time.perf_counter() - started)
        return min(times)

    assert settles_within(3e-4 * slowness, measure)


class Engine:
    """Of EngineClient, what Replicas looks at."""

    def __init__(self) -> None:
        self.ready, self.epoch, self.stalled, self.down, self.dead = True, 1, None, None, None
        self.waiting_tokens = self.num_open = 0
        self.sent: list[Any] = []
        self.adopted: list[Mailbox] = []
        self.send = self.sent.append
        self.adopt = self.adopted.append

    def restart(self) -> None:
        self.ready, self.epoch = True, self.epoch + 1


@pytest.fixture
def replicas() -> Replicas:
    made = Replicas(EngineConfig("m", data_parallel_size=2, device="cpu"))
    made.engines[:] = [Engine(), Engine()]  # type: ignore[list-item]
    made._dispatch.router = Router(2, 1000 * BLOCK)
    return made


def test_an_epoch_never_comes_back(replicas: Replicas) -> None:
    """One engine's restart and the other's death must not cancel out: who is new would be told nothing."""
    first, second = replicas.engines
    seen = [replicas.epoch]
    second.ready = False
    assert replicas.epoch == seen[-1]
    second.restart()  # type: ignore[attr-defined]
    seen.append(replicas.epoch)
    first.ready = False
    seen.append(replicas.epoch)
    first.restart()  # type: ignore[attr-defined]
    seen.append(replicas.epoch)
    assert seen[1] == seen[2] and len(set(seen)) == 3


def test_grammars_go_to_each_engine_once_and_rescued_requests_to_who_knows_theirs(replicas: Replicas) -> None:
    first, second = replicas.engines
    words, grammar = SetVocabulary(b"", b"a", (0,)), AddGrammar("k", "llguidance", b"")
    second.ready = False
    replicas.send(words)
    replicas.send(grammar)
    second.restart()  # type: ignore[attr-defined]
    sampling = SamplingParams(max_tokens=1, grammar="k")
    mailbox = Mailbox(1, 0.0, AddRequest(1, prompt(0, 1), sampling))
    first.ready = False
    assert replicas._dispatch.rescuer(0)([mailbox]) == [mailbox], "nobody else knows its grammar"
    first.ready = True
    for message in (words, grammar):
        replicas.send(message)
        replicas.send(message)
    assert first.sent == second.sent == [words, grammar]  # type: ignore[attr-defined]
    first.ready = False
    assert replicas._dispatch.rescuer(0)([mailbox]) == []
    assert second.adopted == [mailbox]  # type: ignore[attr-defined]


def test_a_named_engine_is_the_only_one(replicas: Replicas) -> None:
    first, second = replicas.engines
    first.stalled = second.stalled = 30.0
    assert {replicas._dispatch.choose(prompt(seed, 1), None, Route(engine=1))[0] for seed in range(20)} == {1}
    second.ready = False
    with pytest.raises(EngineDeadError, match="engine 1, which was asked for, is down"):
        replicas._dispatch.choose(prompt(0, 1), None, Route(engine=1))


def test_a_request_is_rescued_once_and_an_expired_one_stays_expired() -> None:
    """Or one that takes its engine down would take down all of them, one after the other."""
    engine = EngineClient(EngineConfig("m"))
    sent: list[Any] = []
    engine.ready, engine._send = True, sent.append
    mailbox = Mailbox(7, 0.0, AddRequest(5, prompt(0, 1), SamplingParams(max_tokens=1, seed=3), n=4))
    mailbox.expired = True
    engine.adopt(mailbox)
    request, expiry = sent
    assert (request.n, request.sampling.seed, expiry.ids, expiry.unless_begun) == (1, 5, [mailbox.id], True)
    assert engine.waiting_tokens == BLOCK
    offered: list[Mailbox] = []
    engine.rescue = lambda mailboxes: offered.extend(mailboxes) or mailboxes  # type: ignore[func-returns-value]
    engine.requests.hand_over(engine.rescue)
    engine.fail_all(EngineDeadError("gone"))
    assert offered == [] and engine.waiting_tokens == 0
