"""Row 44: what is wrong with a model's folder is one clear line, found without running anything that lies in it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def shard(folder: Path) -> None:
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    names = {"model.norm.weight": first, "lm_head.weight": second}
    (folder / "model.safetensors").rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def overwrite(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(40)
        file.write(b"\0garbage\xff" * 10)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size * 2 // 3)


def regex(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "tokenizer.json"
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        pretokenizers = [split, json.loads(file.read_text())["pre_tokenizer"]]
        edit(file, pre_tokenizer={"type": "Sequence", "pretokenizers": pretokenizers})

    return change


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "mark")))


def code(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'mark')!r}, 'w')\nclass Evil: pass\n")
    classes = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}
    edit(folder / "config.json", architectures=["Evil"], auto_map=classes)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(shard, ["model-00002-of-00002.safetensors", "download the missing files"], id="missing-shard"),
        pytest.param(overwrite, ["model.safetensors", "corrupt"], id="garbage"),
        pytest.param(truncate, ["model.safetensors"], id="truncated"),
        pytest.param(lambda f: (f / "model.safetensors").write_bytes(b""), ["model.safetensors"], id="empty"),
        pytest.param(lambda f: edit(f / "config.json", intermediate_size=128), ["shape", "config.json"], id="shapes"),
        pytest.param(lambda f: edit(f / "config.json", hidden_size=2**40), ["config.json"], id="huge-hidden"),
        pytest.param(lambda f: edit(f / "config.json", num_hidden_layers=10**9), ["config.json"], id="huge-layers"),
        pytest.param(lambda f: edit(f / "config.json", vocab_size=-1), ["vocab_size"], id="negative"),
        pytest.param(pickled, ["pytorch_model.bin", "could run code", "safetensors"], id="pickle"),
        pytest.param(code, ["Evil", "--trust-remote-code"], id="code"),
        pytest.param(
            lambda f: (f / "tokenizer.json").write_text('{"version": '),
            ["cannot load the tokenizer", "--tokenizer"],
            id="tokenizer",
        ),
        pytest.param(regex("(a+)+b"), ["tokenizer", "40 characters like 'a'", "--tokenizer"], id="exponential"),
        pytest.param(regex(r"\s+\s+$"), ["tokenizer", "takes", "--tokenizer"], id="cubic"),
    ],
)
def test_row_44_a_broken_checkpoint_is_one_line(tmp_path, tiny_model, change, words):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    change(folder)
    done = subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", str(folder), "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("vserve: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last, last
    assert not (folder / "mark").exists()
