"""A tiny model that is kept is the one that would be made."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MADE = runpy.run_path(str(Path(__file__).with_name("made.py")))


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Path]:
    """ask(*key) → a new folder with its file `number`: how many were made when it was."""
    source = tmp_path / "factory.py"
    source.write_text("1")
    count, asked = [0], [0]

    def make(folder: Path) -> None:
        count[0] += 1
        (folder / "number").write_text(str(count[0]))

    def ask(*key: object, make: Callable[[Path], object] = make) -> Path:
        asked[0] += 1
        (folder := tmp_path / f"asked{asked[0]}").mkdir()
        MADE["_maker"].cache_clear()  # as another process has it
        return Path(MADE["folder_of"](folder, make, [source], *key, kept=tmp_path / "kept"))

    return ask


def number(folder: Path) -> int:
    return int((folder / "number").read_text())


def test_the_same_is_made_once_and_everybody_has_a_copy(ask: Callable[..., Path]) -> None:
    first = ask("llama", {"layers": 2})
    (first / "number").write_text("changed by a test")
    second = ask("llama", {"layers": 2})
    assert number(second) == 1 and second != first


def test_another_key_another_factory_and_another_library_make_another(
    ask: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [number(ask(*key)) for key in (("llama", 2), ("llama", 3), ("qwen3", 2), ("llama", 2))] == [1, 2, 3, 1]
    (tmp_path / "factory.py").write_text("2")
    assert number(ask("llama", 2)) == 4
    monkeypatch.setitem(MADE["_maker"].__wrapped__.__globals__, "version", lambda name: "9")
    assert number(ask("llama", 2)) == 5


def test_what_has_no_name_is_made_each_time(ask: Callable[..., Path]) -> None:
    assert [number(ask(object())) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("error", [ValueError, OSError])
def test_what_failed_is_not_kept(ask: Callable[..., Path], error: type[Exception]) -> None:
    def fail(folder: Path) -> None:
        (folder / "number").write_text("half of it")
        raise error

    with pytest.raises(error):
        ask("llama", make=fail)
    assert number(ask("llama")) == 1


def test_here_a_kept_model_is_the_factorys(tiny_model: Any, tiny_models: Any, tmp_path: Path) -> None:
    made = tiny_models.tiny_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    kept = tiny_model("qwen3", num_hidden_layers=1)
    assert {file.name for file in made.iterdir()} == {file.name for file in kept.iterdir()}
    for file in made.iterdir():
        assert file.read_bytes() == (kept / file.name).read_bytes(), file.name
