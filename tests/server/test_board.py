"""Numbers that several API processes see, and the limits that go by them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.server.client import board as board_module
from vserve.server.client.board import FINISHED_TOKENS, MOST_KEYS, REQUESTS, TOKENS, Board
from vserve.server.errors import ApiError
from vserve.server.generation import admission, quota
from vserve.server.generation.admission import Admission
from vserve.server.generation.quota import Quota
from vserve.server.http.body_limit import BodyLimit, HeldBody
from vserve.server.http.keys import load_keys
from vserve.server.observe.shares import Family, Sample, summed
from vserve.server.options.config import ServerConfig


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    first = Board(None, 3, 0)
    made = [first, *(Board(os.dup(first.descriptor), 3, seat) for seat in (1, 2))]
    yield made
    for board in made:
        os.close(board.descriptor)


def test_each_writes_its_own_and_reads_the_others(boards: list[Board]) -> None:
    for number, board in enumerate(boards, 1):
        board.set(REQUESTS, number)
        board.set(TOKENS, 1 << (40 + number))
        board.set_load(63, 10 * number, number)
    assert [board.others(REQUESTS) for board in boards] == [5, 4, 3]
    assert boards[0].others(TOKENS) == (1 << 42) + (1 << 43)
    assert [board.other_load(63) for board in boards] == [(50, 5), (40, 4), (30, 3)]
    assert boards[0].other_load(0) == (0, 0)
    boards[1].add(FINISHED_TOKENS, 7)
    boards[0].clear(1)
    assert boards[0].others(REQUESTS) == 3 and boards[0].other_load(63) == (30, 3)
    assert boards[2].all(FINISHED_TOKENS) == 7, "what it had finished is no less true"


def test_a_key_has_one_place_and_one_share(boards: list[Board]) -> None:
    digests = [bytes([number]) * 32 for number in range(5)]
    places = [
        [board.place(digest) for digest in digests[::step]] for board, step in zip(boards, (1, -1, 1), strict=True)
    ]
    assert places == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]
    quotas = [Quota(6, 0, board, digests[2]) for board in boards]
    others = Quota(6, 0, boards[0], digests[3])
    let_in = 0
    for turn in range(30):
        quota = quotas[turn % 3]
        try:
            quota.check(0, lambda reason: None)
        except ApiError as error:
            assert error.status == 429
        else:
            quota.begin(0)
            let_in += 1
    assert let_in == 6
    others.check(0, lambda reason: None)


def test_a_limit_that_is_read_later_holds_over_all_processes(
    boards: list[Board], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was open before there was one."""
    path = tmp_path / "keys"
    path.write_text("ada\nbob\n")
    config = ServerConfig(api_key_file=str(path))
    before = [load_keys(config, "api_key", board) for board in boards]
    charges = [key.quota.begin(0, 2) for keys in before[:2] if (key := keys.find(b"ada")) is not None]
    assert len(charges) == 2
    path.write_text("ada max-open-requests=5\nbob\n")
    after = [keys.renewed(load_keys(config, "api_key", board)) for keys, board in zip(before, boards, strict=True)]
    for keys in after:
        key = keys.find(b"ada")
        assert key is not None and key.quota.open.number == 4
        key.quota.check_open(1, "n", lambda over: 1.0, lambda reason: None)
        with pytest.raises(ApiError):
            key.quota.check_open(2, "n", lambda over: 1.0, lambda reason: None)
    for charge in charges:
        charge.finish()
    assert boards[2].open(0) == 0
    monkeypatch.setattr(Board, "place", lambda self, digest: None)
    with pytest.raises(ConfigError, match="no room for more than 65536 keys since the server's start"):
        load_keys(config, "api_key", boards[0])


def test_as_many_keys_as_there_may_be_find_their_places(boards: list[Board], slowness: float) -> None:
    """A file of keys is read at the start: each of them must not be compared with all."""
    digests = [number.to_bytes(32, "big") for number in range(MOST_KEYS)]
    started = time.process_time()
    for board in boards:
        assert [board.place(digest) for digest in digests] == list(range(MOST_KEYS))
    assert time.process_time() - started < 10 * slowness
    assert boards[1].place(b"one too many".ljust(32)) is None


def test_a_lock_that_cannot_be_had_is_not_a_full_board(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts all the same, and each process counts for itself."""

    def held(descriptor: int, operation: int) -> None:
        raise BlockingIOError

    with monkeypatch.context() as patched:
        patched.setattr(board_module.fcntl, "lockf", held)
        patched.setattr(board_module, "LOCK_TRIES", 2)
        keys = [Quota(2, 0, each, b"k" * 32, 5) for each in boards[:2]]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "counts for itself" in caplog.text
    assert [[lets_in(key) for _ in range(3)] for key in keys] == [[True, True, False]] * 2
    assert [key.open.number for key in keys] == [2, 2]
    assert boards[0].place(b"k" * 32) == 0, "once the lock can be had"


def lets_in(key: Quota) -> bool:
    try:
        key.check(0, lambda reason: None)
    except ApiError:
        return False
    key.begin(0)
    return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(quota, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize("looks", [False, True])
def test_a_key_within_its_limit_is_let_in_by_whoever_was_idle(
    boards: list[Board], clock: SimpleNamespace, looks: bool
) -> None:
    """Half of what it may use, all at one process; then another process is asked."""
    busy, idle = (Quota(60, 0, board, b"k" * 32) for board in boards[:2])
    for _ in range(150):
        clock.now += 2
        assert lets_in(busy)
        if looks:
            for board in boards:
                board.look(clock.now)
    assert lets_in(idle)


def test_what_flowed_over_before_a_burst_is_nobodys(boards: list[Board], clock: SimpleNamespace) -> None:
    keys = [Quota(60, 0, board, b"k" * 32) for board in boards]
    for _ in range(600):  # nobody asks
        clock.now += 1
        for board in boards:
            board.look(clock.now)
    assert sum(lets_in(keys[0]) for _ in range(100)) == 60
    assert not lets_in(keys[1])
    clock.now += 1
    assert lets_in(keys[2]) and not lets_in(keys[1])


def admissions(boards: list[Board], config: ServerConfig) -> list[Admission]:
    class Client:
        class info:
            max_num_seqs, num_kv_tokens, max_model_len = 2, 1000, 100

        class stats:
            num_waiting = 0

        config = EngineConfig("m")

    return [Admission(Client(), config, lambda reason: None, lambda reason: None, board) for board in boards]  # type: ignore[arg-type]


@pytest.mark.parametrize("rests", [0, 300])
def test_the_queue_moves_as_fast_as_all_of_them_make_it(
    boards: list[Board], monkeypatch: pytest.MonkeyPatch, rests: int
) -> None:
    """Three requests a second, one at each process; then so many seconds without any."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: clock.now))
    each = admissions(boards, ServerConfig(max_num_queued_reqs=12))
    tickets = [[queue.admit(1, 1, 0.0) for _ in range(3)] for queue in each]
    for turn in range(240):
        clock.now += 1 / 3
        tickets[turn % 3].pop(0).release()
        tickets[turn % 3].append(each[turn % 3].admit(1, 1, 0.0))
        if turn % 3 == 2:
            for board in boards:
                board.look(clock.now)
    if rests:
        for ticket in [ticket for of_one in tickets for ticket in of_one]:
            ticket.release()
        for _ in range(rests):
            clock.now += 1
            for board in boards:
                board.look(clock.now)
        tickets = [[queue.admit(1, 1, 0.0) for _ in range(3)] for queue in each]
    for queue in each:
        with pytest.raises(ApiError) as refused:
            queue.admit(14, 1, 0.0)  # of which nine have no room until others are gone
        assert 2.4 < float(refused.value.headers["retry-after-ms"]) / 1000 < 3.6, refused.value.headers
        assert 2.4 < queue.retry_after() < 3.6  # for the nine that are open


def test_bodies_that_arrive_have_one_room(boards: list[Board]) -> None:
    """256 MiB, for all processes together; what is read is free again."""
    refused: list[str] = []
    limits = [BodyLimit(None, lambda: 1 << 20, refused.append, board) for board in boards]  # type: ignore[arg-type]
    held = [HeldBody(limit) for limit in limits]

    def asks(limit: BodyLimit) -> int:
        """The status for a body of a megabyte."""
        statuses = [200]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()

        async def receive() -> Any:
            return {"type": "http.request", "body": b" " * (1 << 20), "more_body": False}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])

        limit.app = app
        asyncio.run(limit({"type": "http", "path": "/", "headers": []}, receive, send))
        return statuses[-1]

    for body in held:
        body.grow(80 << 20)
    assert [asks(limit) for limit in limits] == [200] * 3
    held[0].grow(16 << 20)
    assert [asks(limit) for limit in limits] == [429] * 3 and refused == ["bodies"] * 3
    held[1].release()
    assert [asks(limit) for limit in limits] == [200] * 3


def test_the_queue_is_one(boards: list[Board]) -> None:
    each = admissions(boards, ServerConfig(max_num_queued_reqs=2))
    tickets = [each[turn % 3].admit(1, 10, 0.0) for turn in range(4)]
    for queue in each:
        with pytest.raises(ApiError, match="queue is full: 2 requests wait"):
            queue.admit(1, 10, 0.0)
    tickets[0].release()
    with pytest.raises(ApiError):
        each[1].admit(2, 10, 0.0)
    each[1].admit(1, 10, 0.0)
    with pytest.raises(ApiError):
        each[2].admit(1, 10, 0.0)


def test_tenants_are_the_same_in_all_processes(boards: list[Board]) -> None:
    each = admissions(boards, ServerConfig(max_num_queued_reqs=12))
    first = each[0].admit(14, 10, 0.0, tenant=1)
    assert [queue.tenants.held(1) for queue in each] == [(14, 10)] * 3
    for queue in each:
        with pytest.raises(ApiError, match="this key or address has 14 requests open"):
            queue.admit(1, 10, 0.0, tenant=1)
    each[1].admit(1, 10, 0.0, tenant=2)
    assert [queue.tenants.number_with(2) for queue in each] == [2] * 3
    assert [queue.tenants.number_with(3) for queue in each] == [3] * 3
    first.release()
    each[2].admit(1, 10, 0.0, tenant=1)
    boards[0].clear(1)  # its process has died
    assert [queue.tenants.held(2) for queue in each] == [(0, 0), (1, 10), (0, 0)]


def test_what_a_key_has_open_is_counted_over_all_processes(boards: list[Board]) -> None:
    quotas = [Quota(0, 0, board, b"k" * 32, 5) for board in boards]
    other = Quota(0, 0, boards[1], b"o" * 32, 5)
    refused: list[str] = []

    def asks(quota: Quota, num_requests: int) -> int:
        try:
            quota.check_open(num_requests, "n", lambda count: 1.5 * count, refused.append)
        except ApiError as error:
            if error.status == 429:
                assert error.code == "key_open_requests" and error.headers["retry-after"] == "3"
                assert "has 4 requests open" in error.message and "--max-open-requests allows 5" in error.message
            return error.status
        return 200

    charges = [quotas[0].begin(0, 3), quotas[1].begin(0)]
    assert [asks(quota, 3) for quota in quotas] == [429] * 3 and refused == ["key_open_requests"] * 3
    assert [asks(quota, 1) for quota in quotas] == [200] * 3 and asks(other, 5) == 200
    assert asks(quotas[2], 6) == 400, "at no time"
    charges[0].finish()
    charges[0].finish()
    assert [asks(quota, 4) for quota in quotas] == [200] * 3


def test_what_is_counted_adds_up() -> None:
    def page(**values: float) -> list[Family]:
        return [
            Family(
                "n", "help", "counter", [Sample("n_total", {"reason": name}, value) for name, value in values.items()]
            )
        ]

    (family,) = summed([page(a=1, b=2), [], page(b=5, c=1)])
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {"a": 1, "b": 7, "c": 1}


def test_a_process_that_is_started_again_has_no_fresh_share(boards: list[Board], clock: SimpleNamespace) -> None:
    """Nor does anybody who reads the keys later; a limit that was changed begins anew."""
    digest = b"k" * 32
    first, second = (Quota(60, 600, board, digest) for board in boards[:2])
    assert all(lets_in(second) for _ in range(50))
    for board in boards:
        board.look(clock.now)
    second.begin(580)
    boards[0].clear(1)  # it is killed a moment later, with what it has used since the look
    clock.now += 5
    again = Quota(60, 600, boards[1], digest)
    late = Quota(60, 600, boards[2], digest)
    for key in (again, late, first):
        key.check(65, lambda reason: None)  # 600 - 580 + 50
        with pytest.raises(ApiError, match="tokens a minute"):
            key.check(75, lambda reason: None)
    assert sum(lets_in(again) for _ in range(100)) == 60 - 51 + 5
    assert not lets_in(late) and not lets_in(first)
    assert lets_in(Quota(120, 600, boards[1], digest))


def test_who_comes_late_finds_a_bucket_that_has_flown_over_full_at_most(
    boards: list[Board], clock: SimpleNamespace
) -> None:
    first = Quota(60, 0, boards[0], b"k" * 32)
    assert all(lets_in(first) for _ in range(30))
    for _ in range(600):
        clock.now += 1
        boards[0].look(clock.now)
    late = Quota(60, 0, boards[1], b"k" * 32)
    assert sum(lets_in(late) for _ in range(100)) == 60
    boards[0].look(clock.now)
    again = Quota(60, 0, boards[1], b"k" * 32)
    assert not lets_in(again) and not lets_in(first)
