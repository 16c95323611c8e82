"""When an API process beside the first one counts as ready."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vserve.engine.options.config import EngineConfig
from vserve.server.client.board import SERVES, Board
from vserve.server.client.meeting import FIRST, Meeting
from vserve.server.colleagues import ColleagueError
from vserve.server.generation.adapters import Record
from vserve.server.options.config import ServerConfig
from vserve.server.team import Team

RECORD = Record("mine", "/adapters/mine", 7, None, 8)


@pytest.mark.parametrize("answers", [True, False])
def test_who_lacks_adapters_does_not_serve_yet(tmp_path: Path, answers: bool) -> None:
    board = Board(None, 2, FIRST)
    guest = Board(os.dup(board.descriptor), 2, 1)
    meeting = Meeting(str(tmp_path), 1, 1, guest, "secret")
    causes: list[str] = []
    joined: list[list[Record]] = []

    async def main() -> None:
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def ask_first(path: str) -> bytes:
            assert path == "/own/adapters"
            asked.set()
            await may_answer.wait()
            if not answers:
                raise ColleagueError("it does not answer")
            return msgspec.msgpack.encode([RECORD])

        server = SimpleNamespace(
            colleagues=SimpleNamespace(ask_first=ask_first), adapters=SimpleNamespace(join=joined.append)
        )
        app: Any = SimpleNamespace(state=SimpleNamespace(server=server))
        engine = EngineConfig("m", enable_lora=True)
        front: Any = None
        with socket.socket() as unused:
            team = Team(meeting, front, lambda: engine, ServerConfig(), {}, unused, causes.append)
            meet = asyncio.create_task(team.meet(app))
            await asyncio.wait_for(asked.wait(), 10)
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(meeting.api_path(1))  # it can be told what changes meanwhile
            assert not board.get(1, SERVES)
            may_answer.set()
            await asyncio.wait_for(meet, 10)
            await team.close()

    asyncio.run(main())
    if answers:
        assert joined == [[RECORD]] and board.get(1, SERVES) == 1 and not causes
    else:
        assert causes == ["it does not answer"] and not joined and not board.get(1, SERVES)
    for each in (board, guest):
        os.close(each.descriptor)
