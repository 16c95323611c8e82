"""Fixtures for the whole tree."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Tiny tensors gain nothing from threads, and several test runs may share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_models() -> Any:
    """The module tests/tiny_models.py: with --import-mode=importlib, tests cannot import a file beside them by name."""
    name = "vserve_tiny_models"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("tiny_models.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tiny_models: Any) -> TinyModel:
    """tiny_model("qwen3", num_hidden_layers=3) → folder of a random checkpoint with a tokenizer.

    Written once a session for the same arguments: copy the folder before changing it.
    """
    folders: dict[str, Path] = {}

    def make(family: str = "qwen3", **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in folders:
            folders[key] = tiny_models.tiny_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return folders[key]

    return make
