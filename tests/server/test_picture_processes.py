"""The real decoding processes: what they decode, and that each dies alone."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vserve.engine.vision.processors import encode
from vserve.engine.vision.qwen_processor import QwenProcessor
from vserve.server.media.decode import item_of
from vserve.server.media.processes import DecodeProcesses, DecoderError

from .seeing import file_of

PROCESSOR = QwenProcessor(7, 16, 2, 1024, 1 << 20)


@pytest.fixture(scope="module")
def processes() -> Iterator[DecodeProcesses]:
    """One for the module: its template loads torch, which takes seconds."""
    found = DecodeProcesses(encode(PROCESSOR))
    found.start()
    yield found
    found.close()


def children(processes: DecodeProcesses) -> list[int]:
    template = processes._template
    assert template is not None
    text = Path(f"/proc/{template.pid}/task/{template.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_a_picture_is_what_it_is_in_this_process(processes: DecodeProcesses) -> None:
    for file, detail in ((file_of(300, 200, "blue", "JPEG"), "auto"), (file_of(1000, 900, form="WEBP"), "low")):
        here = item_of(file, PROCESSOR, detail)
        assert processes.decode(file, is_base64=False, detail=detail) == here
        assert processes.decode(base64.b64encode(file), is_base64=True, detail=detail) == here
    assert len(children(processes)) == 1  # one thing after another
    with pytest.raises(ValueError, match="its 5 bytes are no PNG"):
        processes.decode(b"hello", is_base64=False, detail="auto")
    with pytest.raises(ValueError, match="one side may be at most 200 times the other"):
        processes.decode(file_of(1, 5000), is_base64=False, detail="auto")


def test_a_process_that_dies_with_a_picture_is_replaced(processes: DecodeProcesses) -> None:
    """One that died when it had nothing to do is no doing of the next picture."""
    processes.decode(file_of(), is_base64=False, detail="auto")
    before = processes.num_restarts
    (pid,) = children(processes)
    os.kill(pid, signal.SIGKILL)
    while children(processes):
        time.sleep(0.005)
    assert processes.decode(file_of(), is_base64=False, detail="auto").length == 2
    (pid,) = children(processes)
    os.kill(pid, signal.SIGSTOP)  # so that it dies at work
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(processes.decode, file_of(), is_base64=False, detail="auto")
        while not processes._busy:
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DecoderError, match="ended its process"):
            work.result(60)
    assert processes.decode(file_of(), is_base64=False, detail="auto").length == 2
    assert processes.num_restarts == before + 2


def test_a_template_that_dies_is_started_again(processes: DecodeProcesses) -> None:
    assert processes._template is not None
    processes._template.kill()
    processes._template.wait()
    for idle in processes._idle:
        idle.close()
    processes._idle.clear()
    assert processes.decode(file_of(), is_base64=False, detail="auto").length == 2


def test_it_has_limits(processes: DecodeProcesses) -> None:
    processes.decode(file_of(), is_base64=False, detail="auto")
    limits = Path(f"/proc/{children(processes)[0]}/limits").read_text()
    for name in ("Max address space", "Max cpu time"):
        line = next(line for line in limits.splitlines() if line.startswith(name))
        assert line.removeprefix(name).split()[0] != "unlimited"
