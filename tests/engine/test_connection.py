"""Framing over a real socket pair."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
import uvloop

from vserve.engine.link.connection import LENGTH, Connection
from vserve.engine.link.media import MediaItem
from vserve.engine.link.messages import (
    AbortRequests,
    AddRequest,
    EngineStart,
    EngineStats,
    Failure,
    FromEngine,
    Heartbeat,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    pack_tokens,
)
from vserve.engine.link.sampling_params import SamplingParams


def test_messages_arrive_whole_and_in_order_whatever_the_frames():
    async def run():
        left, right = socket.socketpair()
        received = []
        lost = asyncio.get_running_loop().create_future()
        ours = await Connection.open(left, FromEngine, received.append, lambda _: None)
        theirs = await Connection.open(right, ToEngine, received.append, lost.set_result)
        prompts = [pack_tokens(range(i * 1000)) for i in range(50)]
        sent = [AddRequest(i, prompts[i], SamplingParams(max_tokens=i + 1, seed=i)) for i in range(50)]
        for i, message in enumerate(sent):
            ours.send(message)
            if i % 7 == 0:
                await asyncio.sleep(0)
        ours.send(AbortRequests([1, 2]))
        while len(received) < 51:
            await asyncio.sleep(0.001)
        assert received[:50] == sent
        assert received[50] == AbortRequests([1, 2])
        ours.close()
        await asyncio.wait_for(lost, 60)
        theirs.close()

    asyncio.run(run())


def test_pictures_are_copied_once():
    """Into their message: each further copy of tens of megabytes would hold all streams up."""
    pixels = bytes(8 << 20)
    items = (MediaItem(b"k" * 32, 0, 4, (1, 4, 4), (1, 64, 64), (64, 64), pixels),)
    sent = AddRequest(1, pack_tokens(range(4)), SamplingParams(max_tokens=1), media=items)

    async def run() -> int:
        left, right = socket.socketpair()
        received: list[Any] = []
        ours = await Connection.open(left, FromEngine, received.append, lambda _: None)
        theirs = await Connection.open(right, ToEngine, received.append, lambda _: None)
        tracemalloc.start()
        ours.send(AbortRequests([1]))
        ours.send(sent)
        ours.send(AbortRequests([2]))
        ours._flush()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        while len(received) < 3:
            await asyncio.sleep(0.001)
        assert received == [AbortRequests([1]), sent, AbortRequests([2])]
        ours.close()
        theirs.close()
        return most

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) < 2 * len(pixels)  # the encoder asks for half as much again as it needs


def test_a_message_that_cannot_be_sent_is_refused_alone():
    async def run():
        left, right = socket.socketpair()
        arrived = asyncio.get_running_loop().create_future()
        ours = await Connection.open(left, FromEngine, print, lambda _: None)
        theirs = await Connection.open(right, ToEngine, arrived.set_result, lambda _: None)
        with pytest.raises(OverflowError):
            ours.send(AddRequest(1, b"1234", SamplingParams(max_tokens=1, seed=1 << 70)))
        with pytest.raises(UnicodeEncodeError):
            ours.send(AddRequest(2, b"1234", SamplingParams(max_tokens=1), cache_salt="\ud800"))
        ours.send(AbortRequests([3]))
        assert await asyncio.wait_for(arrived, 60) == AbortRequests([3])
        ours.close()
        theirs.close()

    asyncio.run(run())


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_a_frame_may_arrive_in_any_pieces(cut):
    async def run():
        received = []
        connection = Connection(FromEngine, received.append, lambda _: None)
        messages = [StepOutputs([RequestOutput(1, [2, 3], "stop", 3)], EngineStats(num_running=1))] * 3
        frame = msgspec.msgpack.encode(messages)
        stream = (LENGTH.pack(len(frame)) + frame) * 4
        for start in range(0, len(stream), cut):
            connection.data_received(stream[start : start + cut])
        assert received == messages * 4

    asyncio.run(run())


LAST_WORDS = """
import sys
from vserve.engine.start import process

async def fail(*arguments):
    raise RuntimeError("x" * 3_000_000)

process.run_engine = fail
process.LAST_WORDS = 60
sys.argv = ["process", "--fd", sys.argv[1], "--parent", sys.argv[2]]
process.main()
"""


def test_the_last_words_of_an_engine_arrive_however_late_they_are_read():
    """More than a socket holds, and a reader who begins when the engine has said all: the exit waits for it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [sys.executable, "-c", LAST_WORDS, str(theirs.fileno()), str(os.getpid())]
        engine = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        theirs.close()
        frame = msgspec.msgpack.encode([EngineStart({"model": "none"})])
        ours.sendall(LENGTH.pack(len(frame)) + frame)
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(1.5)
        messages = []
        while len(head := ours.recv(LENGTH.size, socket.MSG_WAITALL)) == LENGTH.size:
            frame = ours.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
            messages += msgspec.msgpack.decode(frame, type=list[FromEngine])
        ours.close()  # it has read all
        assert engine.wait(60) == 1
    assert isinstance(messages[-1], Failure) and messages[-1].message == "RuntimeError: " + "x" * 3_000_000


def test_an_engine_ends_though_nobody_reads_its_last_words() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = LAST_WORDS.replace("LAST_WORDS = 60", "LAST_WORDS = 0.5")
        engine = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        frame = msgspec.msgpack.encode([EngineStart({"model": "none"})])
        ours.sendall(LENGTH.pack(len(frame)) + frame)
        assert engine.wait(60) == 1


def test_who_is_writing_reads_the_last_words_all_the_same() -> None:
    """The first write to a socket that is closed would end the connection, with whatever has not been read."""
    ours, theirs = socket.socketpair()

    async def engine() -> None:
        connection = await Connection.open(theirs, ToEngine, lambda message: None, lambda error: None)
        connection.send(Failure("why"))
        await connection.finish(60)
        connection.send(Heartbeat())  # as its timers do

    async def client() -> None:
        heard: list[Any] = []
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        connection = await Connection.open(ours, FromEngine, heard.append, lost.set_result)
        ending.start()
        time.sleep(0.5)  # it has something else to do, while the engine ends
        for _ in range(3):
            connection.send_now(msgspec.msgpack.encode(Shutdown()))
        assert await lost is None and heard == [Failure("why")]

    ending = threading.Thread(target=lambda: uvloop.run(engine()))
    uvloop.run(asyncio.wait_for(client(), 60))
    ending.join(60)
    assert not ending.is_alive()


STUCK = """
import asyncio, sys, time
from vserve.engine.start import process
from vserve.engine.ranks.peers import RankLost

async def fail(*arguments):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 100)  # as in a collective that nobody else enters
    raise RankLost("rank 1 is gone")

process.run_engine = fail
sys.argv = ["process", "--fd", sys.argv[1], "--parent", sys.argv[2]]
process.main()
"""


def test_an_engine_that_is_lost_ends_whatever_its_threads_wait_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [sys.executable, "-c", STUCK, str(theirs.fileno()), str(os.getpid())]
        engine = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL)
        theirs.close()
        frame = msgspec.msgpack.encode([EngineStart({"model": "none"})])
        ours.sendall(LENGTH.pack(len(frame)) + frame)
        try:
            assert b"rank 1 is gone" in ours.makefile("rb").read()
            ours.shutdown(socket.SHUT_RDWR)  # it has read all
            assert engine.wait(10) == 1
        finally:
            engine.kill()
            engine.wait()
