"""Real servers for the end-to-end tests: a `vserve` process, or the same app and engine on a thread of this process."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

DEMO = Path(__file__).parents[2] / "configs" / "demo"


@dataclass
class ServerProcess:
    """A `vserve` command that was started and said where it listens."""

    process: subprocess.Popen[str]
    url: str
    stderr: list[str] = field(default_factory=list)
    reader: threading.Thread | None = None  # of stderr

    @property
    def model(self) -> str:
        return httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def wait(self, timeout: float = 240) -> int:
        """The exit code, when all that it wrote to stderr has been read."""
        code = self.process.wait(timeout)
        if self.reader is not None:
            self.reader.join(timeout)
        return code

    def children(self) -> dict[int, bytes]:
        """Its processes that live, with what they were started as."""
        found = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return found

    def engine_pids(self) -> list[int]:
        return [pid for pid, command in self.children().items() if b"vserve.engine.start.process" in command]

    def guests(self) -> list[int]:
        """The pids of the API processes beside the first one."""
        return [pid for pid, command in self.children().items() if b"vserve.server.api_process" in command]

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    def health(self, probe: str = "health") -> dict[str, object]:
        """The probe's JSON object; {} where it says 200."""
        response = httpx.get(f"{self.url}/{probe}", timeout=240)
        assert response.status_code in (200, 503)
        return response.json() if response.content else {}


def wait_until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Generous: the machine may be busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


QUIET = {"VSERVE_WARM_GRAMMARS": "false"}  # five seconds of a core for each server that few of them need


def launch(*arguments: str, port: int = 0, env: dict[str, str] | None = None, code: str | None = None) -> ServerProcess:
    """A server that has been started, no more; `url` is known where `port` is. `code`: a program in place
    of the command.
    """
    program = ["-m", "vserve.server.cli.main"] if code is None else ["-c", code]
    command = [sys.executable, *program, *arguments, "--device", "cpu", "--cpu-threads", "1"]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**QUIET, **os.environ, **(env or {})},
    )  # fmt: skip
    server = ServerProcess(process, f"http://127.0.0.1:{port}")
    server.reader = threading.Thread(target=lambda: server.stderr.extend(process.stderr or ()), daemon=True)
    server.reader.start()
    return server


def start(*arguments: str, env: dict[str, str] | None = None) -> ServerProcess:
    return announced(launch(*arguments, env=env))


def announced(server: ServerProcess) -> ServerProcess:
    """Once it can serve."""
    process = server.process
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(r"(https?://\S+)", line):
            server.url = found[1].replace("localhost", "127.0.0.1")
            return server
    raise AssertionError(f"exit code {process.wait()} before it was ready:\n" + "".join(server.stderr))


@contextmanager
def serving(*arguments: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    server = start(*arguments, env=env)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.send_signal(signal.SIGCONT)
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            server.process.kill()
            raise


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """What a newcomer gets who types `vserve`."""
    with serving() as server:
        yield server


# VSERVE_TEST_LONG=1: also with three API processes, where that takes minutes beside what `.ci/run` has anyway.
THREE = [pytest.param(3, marks=pytest.mark.slow)] if os.environ.get("VSERVE_TEST_LONG") else []


@pytest.fixture(scope="session", params=[1, *THREE], ids=["", "three"][: 1 + len(THREE)])
def api_servers(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Options of a server: with one API process, or with three."""
    return () if request.param == 1 else ("--api-server-count", str(request.param))


@pytest.fixture(scope="session")
def guarded_server(api_servers: tuple[str, ...]) -> Iterator[ServerProcess]:
    """The demo model behind tight limits, for the tests that attack it."""
    with serving(
        *api_servers,
        "--header-timeout", "2", "--body-timeout", "2", "--write-timeout", "2", "--timeout-keep-alive", "20",
        "--max-body-size", "1000000", "--served-model-name", "demo",
    ) as server:  # fmt: skip
        yield server


@pytest.fixture(scope="session")
def attacks(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("attacks.py"))


@pytest.fixture(scope="module")
def before(guarded_server: ServerProcess, attacks: Any) -> Any:
    """What must be true of the server that a module attacks; one that attacks another has its own."""
    return attacks.Invariants(guarded_server)


@pytest.fixture
def unharmed(before: Any) -> Iterator[None]:
    yield
    before.check()


@pytest.fixture
def url(guarded_server: ServerProcess) -> str:
    return guarded_server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, no longer than for a module: while it runs, its event loop is in the way of others."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed; .ci/run installs it")
    playwright.expect.set_options(timeout=15_000)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=240_000
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, **context options) → a page, which must not complain in its console: see `page.complaints`."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_one(url: str, **options: Any) -> Any:
        options.setdefault("viewport", {"width": 1280, "height": 860})
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.complaints = complaints
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture(scope="session")
def talk(load_module: Callable[[Path], Any]) -> Any:
    """ask, answered, event_stream and scripted of page_talk.py."""
    pytest.importorskip("playwright.sync_api")
    return load_module(Path(__file__).with_name("page_talk.py"))


@pytest.fixture(scope="session")
def picture() -> Callable[[Any, str], None]:
    """picture(page, name): kept as build/screenshots/name.png."""
    folder = Path(__file__).parents[2] / "build" / "screenshots"

    def take(page: Any, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / f"{name}.png")

    return take


@pytest.fixture
def launch_server() -> Iterator[Callable[..., ServerProcess]]:
    """launch(*arguments); what still runs when the test is over, is killed."""
    launched: list[ServerProcess] = []

    def launch_one(*arguments: str, **options: object) -> ServerProcess:
        launched.append(launch(*arguments, **options))  # type: ignore[arg-type]
        return launched[-1]

    yield launch_one
    for server in launched:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def start_server(launch_server: Callable[..., ServerProcess]) -> Callable[..., ServerProcess]:
    """As launch_server, and waits until it has said where it listens."""
    return lambda *arguments, **options: announced(launch_server(*arguments, **options))


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture(scope="session")
def is_gone() -> Callable[[int], bool]:
    return gone


@pytest.fixture(scope="session")
def serve() -> Callable[..., object]:
    """serve(*arguments) → a context manager around a server process of one's own."""
    return serving


@contextmanager
def live(model: Path, **options: object) -> Iterator[str]:
    """App and engine on a thread of this process, behind a real socket: quick to start, and breakable."""
    import uvicorn

    from vserve.engine.options.config import EngineConfig
    from vserve.server.app import create_app
    from vserve.server.client.engine_client import EngineClient
    from vserve.server.options.config import ServerConfig
    from vserve.server.text.model import load_text_model

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
    ready.wait(120)
    if "port" not in started:
        raise AssertionError(f"the server did not start: {started.get('error')}")
    try:
        yield f"http://127.0.0.1:{started['port']}"
    finally:
        started["server"].should_exit = True  # type: ignore[attr-defined]
        thread.join(60)


@pytest.fixture(scope="session")
def live_server() -> Callable[..., object]:
    """live_server(folder, **EngineConfig options) → a context manager that gives the URL."""
    return live
