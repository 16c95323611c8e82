"""What is wrong with a model's folder is said before torch is imported, and without waiting for the weights."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.server.options.config import ServerConfig
from vserve.server.service import Service

# As main() does, but torch cannot be imported: where it is, the import alone takes seconds.
SERVE = """
import sys
sys.modules["torch"] = None
from vserve.server.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: edit(f, architectures=["NoSuchModel"]), "architecture NoSuchModel is not supported"),
        (lambda f: edit(f, architectures=["JambaForCausalLM"]), "JambaForCausalLM is not served: .*recurrent state"),
        (
            lambda f: edit(f, architectures=["My"], auto_map={"AutoModelForCausalLM": "my.My"}),
            "My is code of the model's own folder, .*add --trust-remote-code",
        ),
        (lambda f: edit(f, quantization_config={"quant_method": "aqlm"}), "quantized with .*AQLM"),
        (lambda f: edit(f, dtype="int8"), "dtype is 'int8'"),
        (
            lambda f: edit(f, architectures=["LlamaForSequenceClassification"], id2label={"1": "a"}),
            "id2label has the keys 1: they count from 0 on",
        ),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
    ],
    ids=["architecture", "recurrent", "code", "quantized", "dtype", "labels", "missing"],
)
def test_a_model_that_cannot_be_served_is_refused_before_torch(tmp_path, tiny_model, change, words) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    change(folder)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder), "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("vserve: ") and re.search(words, line), line


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["LlamaForCausalLM"], "there is no tokenizer.json in"),
        (["NoSuchModel"], "NoSuchModel is not supported"),
    ],
    ids=["tokenizer", "both"],
)
def test_a_missing_tokenizer_does_not_wait_for_the_engine(tmp_path, tiny_model, architectures, words) -> None:
    """Nor for what the engine downloads. What is wrong with config.json comes first: it may break both."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    edit(folder, architectures=architectures)
    (folder / "tokenizer.json").unlink()  # what only configures it may be there
    service = Service(EngineConfig(str(folder)), ServerConfig(ui=False), {}, None, lambda progress: None)  # type: ignore[arg-type]

    async def main() -> None:
        service.client.start = asyncio.Event().wait  # type: ignore[assignment]
        await asyncio.wait_for(service._load(), 30)

    with pytest.raises(ConfigError, match=re.escape(words)):
        asyncio.run(main())
