"""Fixtures for the whole tree."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import random
import socket
import ssl
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import torch

TinyModel = Callable[..., Path]

# The same inputs each time, so that a change is judged by what it changes. TEST_SEED=$RANDOM tries new ones.
FRESH = "TEST_SEED" in os.environ
SEED = os.environ.setdefault("TEST_SEED", "0")
ALL_EXAMPLES = os.environ.get("TEST_EXAMPLES") == "all"  # as `make test-all` has it
hypothesis.settings.register_profile(
    "vserve", derandomize=not FRESH, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=500 if ALL_EXAMPLES else 60,
)  # fmt: skip  # neither judges by the clock, which a busy machine stretches
hypothesis.settings.load_profile("vserve")


def pytest_configure(config: pytest.Config) -> None:
    _load(Path(__file__).with_name("retries.py")).register(config, SEED, _slowness)


def _load(file: Path) -> Any:
    name = f"vserve_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_zygote = _load(Path(__file__).with_name("zygote.py"))
ZYGOTE = _zygote.Zygote()
_zygote.fork_through(ZYGOTE)
FORKED = ("clients", "e2e", "engine", "server")  # folders whose tests start what it forks


def pytest_sessionfinish() -> None:
    ZYGOTE.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture draws a seed of its own, or starts a process."""
    ZYGOTE.resting = item.path.parent.name not in FORKED or item.get_closest_marker("true_start") is not None
    random.seed(f"{SEED} {item.nodeid}")
    torch.manual_seed(zlib.crc32(f"{SEED} {item.nodeid}".encode()))


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Tiny tensors gain nothing from threads, and several test runs may share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _pace() -> None:
    """How fast the machine is meanwhile, for budgets.py: a processor's time, which tests beside this one leave as it is
    but for what they share."""
    if (file := os.environ.get("TEST_PACE")) is None:
        return
    with open(file, "a", encoding="utf-8") as stream:
        stream.write(f"{_bit_of_work():.5f}\n")


def _bit_of_work() -> float:
    """Seconds of it."""
    begun, total = time.process_time(), 0
    for number in range(200_000):
        total += number
    return time.process_time() - begun


def _slowness() -> float:
    """How many times as long as the machine of the budgets this one takes just now."""
    return min(_bit_of_work() for _ in range(5)) / float(_load(Path(__file__).with_name("budgets.py")).PACE)


@pytest.fixture(scope="session")
def examples() -> Callable[[int], int]:
    """examples(12) → how many of so many random cases are tried: by day a third."""
    return lambda count: count if ALL_EXAMPLES else -(-count // 3)


@pytest.fixture
def slowness() -> float:
    """How many times as long as the machine that limits in seconds are of this one takes just now, or took when it was
    slowest in this run, for it may be so again in a second; at least once."""
    paces = [_slowness()]
    if (file := os.environ.get("TEST_PACE")) is not None and Path(file).exists():
        reference: float = _load(Path(__file__).with_name("budgets.py")).PACE
        paces += (float(seconds) / reference for seconds in Path(file).read_text(encoding="utf-8").split())
    return max(1.0, *paces)


@pytest.fixture
def costs_at_most() -> Callable[[float, Callable[[], float], Callable[[], float]], bool]:
    """costs_at_most(6.5, large, small): whether the seconds of large() are at most 6.5 times those of small(). Prints
    both.

    The best of each, in turns, three of them at least, until it is so: what else the machine does only ever adds, and
    may last for longer than a few of them; a cost that is too high is so every time.
    """

    def does(times: float, large: Callable[[], float], small: Callable[[], float]) -> bool:
        best = [float("inf"), float("inf")]
        for turn in range(12):
            best = [min(best[0], large()), min(best[1], small())]
            if turn >= 2 and best[0] <= times * best[1]:
                break
        print(f"{best[0]:.5f} s are {best[0] / best[1]:.2f} times {best[1]:.5f} s: {times:.2f} are allowed")
        return best[0] <= times * best[1]

    return does


@pytest.fixture
def settles_within() -> Callable[[float, Callable[[], float]], bool]:
    """settles_within(0.02, measure): whether measure() is below that, more often than not: once, or else twice in three
    or three times in five. A machine stands still for once; what takes too long by itself does so each time."""

    def does(limit: float, measure: Callable[[], float]) -> bool:
        below = 0
        for turn in range(1, 6):
            value = measure()
            below += value < limit
            if 2 * below > turn:
                return True
            print(f"{value:.5f}, {limit:.5f} is the limit")
            if turn - below > 2:
                break
        return False

    return does


@pytest.fixture
def longest_gap() -> Callable[[Callable[[], object]], float]:
    """longest_gap(work) → seconds: the longest time for which a thread that wakes up each millisecond was kept from it
    while work() ran on this one."""

    def measure(work: Callable[[], object]) -> float:
        over, gaps = threading.Event(), [0.0]

        def tick() -> None:
            before = time.perf_counter()
            while not over.is_set():
                time.sleep(1e-3)
                now = time.perf_counter()
                gaps.append(now - before)
                before = now

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            work()
        finally:
            over.set()
            thread.join()
        return max(gaps)

    return measure


@pytest.fixture
def awake() -> Iterator[Callable[[], float]]:
    """awake() → seconds since some moment, in which this machine did not stand still: of a longer gap only a twentieth
    of a second counts."""
    over, ticks = threading.Event(), 0

    def count() -> None:
        nonlocal ticks
        while not over.wait(0.05):
            ticks += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    yield lambda: 0.05 * ticks
    over.set()
    thread.join()


@pytest.fixture(scope="session", autouse=True)
def _patient_and_cheap_clients() -> Iterator[None]:
    """httpx gives up after five seconds, in which a server that shares its cores may not have had its turn; and for
    every `httpx.get` it reads all certificates of the machine, which takes longer than most answers."""
    default = inspect.signature(httpx.Client).parameters["timeout"].default
    for name in ("connect", "read", "write", "pool"):
        setattr(default, name, 60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def reserve_port() -> Iterator[Callable[[], int]]:
    """reserve_port() → a port of this machine, for a server that has to be told one.

    A socket is bound to it and does not listen: the kernel gives the port to nobody who asks for any, and servers,
    which set SO_REUSEADDR, can listen on it. To all addresses: bound to one, the kernel gave the same port of another
    one away (ranks and hosts of other tests ask for those), and a server on all of them ended with "already in use".
    """
    with ExitStack() as held:

        def reserve() -> int:
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

        yield reserve


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], Any]:
    """The module in a file of tests/: with --import-mode=importlib, tests cannot import a file beside them by name."""
    return _load


@pytest.fixture(scope="session")
def zygote() -> Any:
    return ZYGOTE


@pytest.fixture(scope="session")
def tiny_models(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("tiny_models.py"))


@pytest.fixture(scope="session")
def gguf_models(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("gguf_models.py"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """tiny_model("qwen3", num_hidden_layers=3) → folder of a random checkpoint with a tokenizer.

    One folder a session for the same arguments, whose contents are kept on disk: copy it before changing it.
    """
    folders: dict[str, Path] = {}
    made, factory = _load(Path(__file__).with_name("made.py")), Path(__file__).with_name("tiny_models.py")

    def make(family: str = "qwen3", **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in folders:

            def write(folder: Path) -> Path:
                # Imports transformers, for some seconds.
                return Path(_load(factory).tiny_checkpoint(folder, family, **overrides))

            empty = tmp_path_factory.mktemp(family)
            folders[key] = made.folder_of(empty, write, [factory], family, sorted(overrides.items()))
        return folders[key]

    return make


@pytest.fixture(scope="session")
def adapter_files(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("adapters.py"))


@pytest.fixture(scope="session")
def foreign_models(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("foreign_models.py"))


@pytest.fixture(scope="session")
def foreign_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """foreign_model("starcoder2", tie_word_embeddings=True) → folder of a random model that transformers computes."""
    made = _load(Path(__file__).with_name("made.py"))
    factories = [Path(__file__).with_name(name) for name in ("foreign_models.py", "tiny_models.py")]

    @functools.cache
    def make(model_type: str, **overrides: Any) -> Path:
        def write(folder: Path) -> Path:
            foreign_models, tiny_models = map(_load, factories)
            return Path(foreign_models.foreign_checkpoint(tiny_models, folder, model_type, **overrides))

        empty = tmp_path_factory.mktemp(model_type)
        return made.folder_of(empty, write, factories, model_type, sorted(overrides.items()))

    return make
