"""The line of a request: what it costs whoever answers it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link import logs
from vserve.server.observe.request_log import Finished, RequestLog
from vserve.server.options.config import ServerConfig


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_line_costs_the_event_loop_few_calls(new_client: Any, form: str, tmp_path: Path) -> None:
    """Counted, for time is what a busy machine makes of it: 120 calls where the line is made before the next answer."""
    client = new_client()
    log = RequestLog(client.app.state.server.config)
    logger = logging.getLogger("vserve.request")
    with open(tmp_path / "log", "w") as file:
        writer = logs.LineWriter(file.fileno())
        writer.setFormatter(logs.JsonFormatter("api") if form == "json" else logs.TextFormatter())
        seen: list[Any] = []
        handler = logging.Handler()
        handler.emit = seen.append  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            assert client.complete(max_tokens=3).status_code == 200
        finally:
            logger.removeHandler(handler)
        (request,) = [record.args[0]._request for record in seen]
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(writer)
        num_calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        try:
            log.finished(request)  # the first one fills caches
            writer.wait(30)
            sys.setprofile(count)
            log.finished(request)
            sys.setprofile(None)
            writer.wait(30)
        finally:
            sys.setprofile(None)
            logger.removeHandler(writer)
            logger.propagate = propagate
    first, second = (tmp_path / "log").read_text().splitlines()
    assert "/v1/completions" in first and "/v1/completions" in second
    assert num_calls <= 85


@pytest.mark.parametrize(("client", "begins"), [("10.0.0.1", "10.0.0.1 GET"), ("", "unix GET")])
def test_a_line_begins_with_who_asked(client: str, begins: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vserve.request")
    RequestLog(ServerConfig()).finished(
        Finished("id", client, "GET", "/v1/models", "/v1/models", 200, 0.0, 0.5, {}, None)
    )
    assert caplog.messages == [f"{begins} /v1/models 200 in 0.500 s, id"]
