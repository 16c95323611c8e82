"""A server process with the demo model, for clients that people use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

# Neither asks the network for anything at import, nor reports to anybody.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """What clients are given."""
    options = ["--device", "cpu", "--cpu-threads", "1", "--host", "127.0.0.1", "--port", "0", "--no-access-log"]
    command = [sys.executable, "-m", "vserve.server.cli.main", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            urls = (found[1] for line in process.stdout if (found := re.match(r"(http://\S+)", line)))
            url = next(urls, None)
            assert url is not None, "".join(log)
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield url.replace("localhost", "127.0.0.1") + "/v1"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
