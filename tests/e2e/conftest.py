"""Real servers for the end-to-end tests: a `vserve` process, or the same app and engine on a thread of this process."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

DEMO = Path(__file__).parents[2] / "configs" / "demo"


@dataclass
class ServerProcess:
    """A `vserve` command that was started and said where it listens."""

    process: subprocess.Popen[str]
    url: str
    stderr: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def wait(self, timeout: float = 30) -> int:
        return self.process.wait(timeout)


def start(*arguments: str) -> ServerProcess:
    command = [sys.executable, "-m", "vserve.server.cli.main", *arguments, "--device", "cpu", "--cpu-threads", "1"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    server = ServerProcess(process, "")
    threading.Thread(target=lambda: server.stderr.extend(process.stderr or ()), daemon=True).start()
    for line in process.stdout:
        if found := re.match(r"(http://\S+)", line):
            server.url = found[1].replace("localhost", "127.0.0.1")
            return server
    raise AssertionError(f"exit code {process.wait()} before it was ready:\n" + "".join(server.stderr))


@contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    server = start(*arguments)
    try:
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """What a newcomer gets who types `vserve`."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def start_server() -> Callable[..., ServerProcess]:
    return start


@pytest.fixture(scope="session")
def serve() -> Callable[..., object]:
    """serve(*arguments) → a context manager around a server process of one's own."""
    return serving


@contextmanager
def live(model: Path, **options: object) -> Iterator[str]:
    """App and engine on a thread of this process, behind a real socket: quick to start, and breakable."""
    import uvicorn

    from vserve.engine.config import EngineConfig
    from vserve.server.app import create_app
    from vserve.server.config import ServerConfig
    from vserve.server.engine_client import EngineClient
    from vserve.server.tokenizer import load_text_model

    started: dict[str, object] = {}
    ready = threading.Event()

    async def main() -> None:
        config = ServerConfig(served_model_name=("tiny",))
        settings = {"device": "cpu", "cpu_threads": 1, "engine_in_process": True} | options
        client = EngineClient(EngineConfig(str(model), **settings))
        try:
            await client.start()
            app = create_app(client, config, load_text_model(str(model), config))
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))
            started["server"] = server
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            started["port"] = server.servers[0].sockets[0].getsockname()[1]
            ready.set()
            await serving
        except BaseException as error:
            started["error"] = error
            raise
        finally:
            ready.set()
            await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    ready.wait(60)
    if "port" not in started:
        raise AssertionError(f"the server did not start: {started.get('error')}")
    try:
        yield f"http://127.0.0.1:{started['port']}"
    finally:
        started["server"].should_exit = True  # type: ignore[attr-defined]
        thread.join(20)


@pytest.fixture(scope="session")
def live_server() -> Callable[..., object]:
    """live_server(folder, **EngineConfig options) → a context manager that gives the URL."""
    return live
