"""What routers outside are told of the prefix cache: that it is true, and that it has vLLM's shapes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.kv_events_settings import DEFAULTS, of_rank, settings
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule import kv_events
from vserve.engine.schedule.kv_cache import KVCacheManager
from vserve.engine.schedule.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvents,
    Publisher,
    name_of,
)
from vserve.engine.schedule.request import Request

ON = {"enable_kv_cache_events": True}


class View:
    """What a router makes of the events: by group, the blocks that there are, each with its parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], tuple[int | None, tuple[int, ...]]] = {}

    def hear(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[event.group_idx or 0, name]
            else:
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, name in enumerate(event.block_hashes):
                    assert (event.group_idx, name) not in self.blocks, "told of twice"
                    tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                    self.blocks[event.group_idx, name] = parent, tokens
                    parent = name


@pytest.mark.parametrize("windows", [(0,), (0, 12)])
def test_whoever_listens_knows_what_is_there(windows: tuple[int, ...]) -> None:
    """Under random admissions, evictions, steps that fail and contents that are distrusted, after each."""
    generator, view = random.Random(len(windows)), View()
    config = SchedulerConfig(
        max_model_len=1000, max_num_batched_tokens=16, max_num_seqs=8, block_size=4, num_blocks=40, windows=windows
    )
    kv = KVCacheManager(config)
    events = KVEvents(view.hear, 4, windows)
    kv.publish(events)
    running: list[Request] = []
    counts = {"stored": 0, "removed": 0}
    for id in range(600):
        for _ in range(generator.randrange(3)):
            if running:
                kv.free(running.pop(generator.randrange(len(running))))
        salt = generator.choice([None, None, "a", "\ud800"])
        tokens = [generator.randrange(2)] * 8 + [generator.randrange(3) for _ in range(generator.randrange(1, 30))]
        request = Request(id, tokens, SamplingParams(max_tokens=10), cache_salt=salt)
        kv.extend_hashes(request)
        registered: Any = []
        if num_new := kv.admit(request, 16, 0):
            running.append(request)
            kv.register(request, request.num_computed_tokens + num_new, registered)
            request.num_computed_tokens += num_new
            if generator.random() < 0.2:
                kv.revoke(registered)
            elif generator.random() < 0.1:
                kv.distrust(request)
        before = set(view.blocks)
        events.flush()
        expected = {(int.from_bytes(key[32:], "little"), name_of(key)) for key in kv.pool.by_key}
        assert set(view.blocks) == expected
        counts["stored"] += len(expected - before)
        counts["removed"] += len(before - expected)
        for index, key in enumerate(request.block_hashes):
            if (found := view.blocks.get((0, name_of(key)))) is not None:
                parent = name_of(request.block_hashes[index - 1]) if index else None
                assert found == (parent, tuple(tokens[4 * index : 4 * index + 4]))
    assert min(counts.values()) > 200, counts


@pytest.mark.parametrize(("given", "said"), [
    ("[]", "must be a JSON object"),
    ("{", "is no JSON"),
    ({"enable_kv_cache_event": True}, "there is no 'enable_kv_cache_event'; there are enable_kv_cache_events, "),
    ({"enable_kv_cache_events": 1}, "true or false"),
    ({"publisher": "nats"}, "zmq or null"),
    ({"endpoint": "tcp://*"}, "like tcp://*:5557"),
    ({"endpoint": "http://x:1"}, "like tcp://*:5557"),
    ({"endpoint": None}, "like tcp://*:5557"),
    ({"hwm": -1}, "a number, 0 or more"),
    ({"buffer_steps": True}, "a number, 0 or more"),
    ({"topic": 3}, "a text"),
    ({"bind": 1}, "true, false or null"),
])  # fmt: skip
def test_what_cannot_be_is_said(given: Any, said: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(ConfigError, match="--kv-events-config is ") as error:
        EngineConfig("m", kv_events_config=text)
    assert said in str(error.value)


def test_without_pyzmq_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'vserve\[kv-events\]'"):
        EngineConfig("m", kv_events_config=json.dumps(ON))
    for quiet in ({}, {"enable_kv_cache_events": False}, ON | {"publisher": "null"}):
        EngineConfig("m", kv_events_config=json.dumps(quiet))
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="a prefix cache that is off has no events"):
        EngineConfig("m", kv_events_config=json.dumps(ON), enable_prefix_caching=False)


def test_each_of_several_engines_has_ports_of_its_own() -> None:
    text = json.dumps(ON | {"endpoint": "tcp://*:7000", "replay_endpoint": "ipc:///tmp/x"})
    assert of_rank(text, 0) == text and of_rank(None, 3) is None
    found = json.loads(of_rank(text, 2) or "")
    assert (found["endpoint"], found["replay_endpoint"], found["data_parallel_rank"]) == (
        "tcp://*:7002", "ipc:///tmp/x_dp2", 2,
    )  # fmt: skip
    assert json.loads(of_rank(json.dumps(ON), 1) or "")["endpoint"] == "tcp://127.0.0.1:5558"


def stored() -> BlockStored:
    return BlockStored(
        [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", None, group_idx=0, kv_cache_spec_kind="full_attention"
    )


@pytest.mark.parametrize(("form", "expected"), [
    ("map", [{"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
              "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
              "kv_cache_spec_kind": "full_attention"},
             {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0},
             {"type": "AllBlocksCleared"}]),
    ("array", [["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0],
               ["BlockRemoved", [7], "GPU", 0], ["AllBlocksCleared"]]),
])  # fmt: skip
def test_the_shapes_are_vllm_s(form: str, expected: Any) -> None:
    pytest.importorskip("zmq")
    publisher = Publisher(
        DEFAULTS | ON | {"endpoint": "inproc://shapes", "event_format": form, "data_parallel_rank": 3}
    )
    payload = publisher.encode(1.5, [stored(), BlockRemoved([7], "GPU", 0), AllBlocksCleared()])
    publisher.close()
    assert msgspec.msgpack.decode(payload) == [1.5, expected, 3]


def test_a_slow_listener_costs_events_and_never_time() -> None:
    """And hears that it has to start over."""
    pytest.importorskip("zmq")
    publisher = Publisher(DEFAULTS | ON | {"endpoint": "inproc://slow", "max_queue_size": 2})
    sent: list[Any] = []
    publisher._queue.put(None)  # its thread ends
    while publisher._queue.qsize():
        time.sleep(0.001)
    for _ in range(5):
        publisher.publish([stored()])
    while publisher._queue.qsize():
        sent.append(publisher._queue.get()[1])  # type: ignore[index]
    publisher.publish([stored()])
    sent.append(publisher._queue.get()[1])  # type: ignore[index]
    publisher._context.term()
    assert [type(events[0]) for events in sent] == [BlockStored, BlockStored, AllBlocksCleared]


def test_who_asks_for_everything_gets_it(reserve_port: Any) -> None:
    """More messages than ZeroMQ holds for a client by itself, which reads none until all are sent."""
    zmq = pytest.importorskip("zmq")
    replay = f"tcp://127.0.0.1:{reserve_port()}"
    publisher = Publisher(DEFAULTS | ON | {"endpoint": "inproc://all", "replay_endpoint": replay})
    for number in range(10_000):
        publisher._replays.keep(number, bytes(4000))  # type: ignore[union-attr]
    context = zmq.Context()
    late = context.socket(zmq.DEALER)
    try:
        late.connect(replay)
        late.send_multipart((b"", (0).to_bytes(8, "big")))
        assert late.poll(10_000)
        time.sleep(0.3)  # a client that is slow to read
        numbers = []
        while late.poll(5_000):
            _, number, _ = late.recv_multipart()
            if number == END:
                break
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == list(range(10_000)) and number == END
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_who_asks_and_does_not_read_costs_little_and_holds_up_nobody(reserve_port: Any) -> None:
    """300 questions, each for 40 MB: one replay a client, of which a few messages wait."""
    zmq = pytest.importorskip("zmq")
    replay = f"tcp://127.0.0.1:{reserve_port()}"
    publisher = Publisher(DEFAULTS | ON | {"endpoint": "inproc://deaf", "replay_endpoint": replay})
    for number in range(2_000):
        publisher._replays.keep(number, b"%d" % number * 5_000)  # type: ignore[union-attr]
    context = zmq.Context()
    before = resident()
    try:
        deaf = [context.socket(zmq.DEALER) for _ in range(3)]
        for socket in deaf:
            socket.set_hwm(1)
            socket.connect(replay)
            for _ in range(100):
                socket.send_multipart((b"", bytes(8)))
        honest = context.socket(zmq.DEALER)
        honest.connect(replay)
        honest.send_multipart((b"", (1_000).to_bytes(8, "big")))
        numbers = []
        while honest.poll(20_000) and (frames := honest.recv_multipart())[1] != END:
            numbers.append(int.from_bytes(frames[1], "big"))
        assert numbers == list(range(1_000, 2_000))
        assert resident() - before < 120 << 20
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_a_replay_that_nobody_reads_is_given_up(reserve_port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And places for others are free again."""
    zmq = pytest.importorskip("zmq")
    monkeypatch.setattr(kv_events, "PATIENCE", 0.2)
    monkeypatch.setattr(kv_events, "MOST", 2)
    replay = f"tcp://127.0.0.1:{reserve_port()}"
    publisher = Publisher(DEFAULTS | ON | {"endpoint": "inproc://given-up", "replay_endpoint": replay})
    for number in range(1_000):
        publisher._replays.keep(number, bytes(20_000))  # type: ignore[union-attr]
    context = zmq.Context()
    try:
        for _ in range(2):
            deaf = context.socket(zmq.DEALER)
            deaf.set_hwm(1)
            deaf.connect(replay)
            deaf.send_multipart((b"", bytes(8)))
        honest, heard, deadline = context.socket(zmq.DEALER), False, time.monotonic() + 30
        honest.connect(replay)
        while not heard and time.monotonic() < deadline:
            honest.send_multipart((b"", (999).to_bytes(8, "big")))
            heard = honest.poll(300) != 0
        assert heard
    finally:
        context.destroy(linger=0)
        publisher.close()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_strangers_hear_nothing_unless_somebody_wants_it() -> None:
    """What is not named is bound to this host's loopback; what is named means what it means for vLLM."""
    for more, endpoint, binds in [
        ({}, "tcp://127.0.0.1:5557", True), ({"endpoint": "tcp://*:1"}, "tcp://*:1", True),
        ({"endpoint": "tcp://router:1"}, "tcp://router:1", False),
        ({"endpoint": "tcp://10.0.0.1:1", "bind": True}, "tcp://10.0.0.1:1", True),
    ]:  # fmt: skip
        found = settings(json.dumps(ON | more))
        assert found is not None and (found["endpoint"], found["bind"]) == (endpoint, binds)
        text = of_rank(json.dumps(ON | more), 2)
        shifted = settings(text)
        assert shifted is not None and shifted["bind"] is binds


def test_over_zeromq(tiny_model: Any, reserve_port: Any) -> None:
    """An engine, a subscriber, and one who comes late and asks for what it has missed."""
    zmq = pytest.importorskip("zmq")
    from vserve.server.client.engine_client import EngineClient

    ports = reserve_port(), reserve_port()
    given = ON | {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}", "topic": "kv"}
    context, prompt = zmq.Context(), list(range(5, 45))
    subscriber, late = context.socket(zmq.SUB), context.socket(zmq.REQ)
    subscriber.subscribe("kv")
    subscriber.rcvtimeo = late.rcvtimeo = 30_000
    subscriber.connect(f"tcp://127.0.0.1:{ports[0]}")

    async def main() -> None:
        config = EngineConfig(
            str(tiny_model("llama")), device="cpu", cpu_threads=1, engine_in_process=True, max_num_seqs=4,
            kv_events_config=json.dumps(given),
        )  # fmt: skip
        client = EngineClient(config)
        await client.start()
        try:
            deadline = time.monotonic() + 30
            while not subscriber.poll(0):  # until the subscription has arrived
                assert time.monotonic() < deadline
                mailbox = client.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True), cache_salt=str(deadline))
                while (await mailbox.get()).finish_reason is None:
                    pass
                deadline += 1e-3
            late.connect(f"tcp://127.0.0.1:{ports[1]}")
            await asyncio.to_thread(listen)
            with pytest.raises(ConfigError, match="cannot be used"):
                Publisher(settings(json.dumps(given)) or {})
        finally:
            await client.close()

    def listen() -> None:
        event = None
        while event is None:  # who had subscribed before the first step hears of the start first
            topic, _, payload = subscriber.recv_multipart()
            _, events, rank = msgspec.msgpack.decode(payload)
            event = next((event for event in events if event["type"] == "BlockStored"), None)
        assert (topic, event["type"], event["token_ids"], rank) == (b"kv", "BlockStored", prompt[:32], 0)
        assert len(event["block_hashes"]) == 2 and len(event["extra_keys"][0]) == 1 and event["extra_keys"][1] is None
        late.send((0).to_bytes(8, "big"))
        first = late.recv_multipart()
        assert first[0] == bytes(8) and msgspec.msgpack.decode(first[1])[1] == [{"type": "AllBlocksCleared"}]

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        context.destroy(linger=0)
