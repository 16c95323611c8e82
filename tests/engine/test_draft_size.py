"""What who drafts will take, from headers, beside what it takes once it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.speculation import read_speculation
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.planning import weight_size
from vserve.engine.planning.memory import weight_bytes
from vserve.engine.planning.weight_size import draft_bytes
from vserve.engine.speculation.loading import find_draft, load_drafter
from vserve.engine.start.engine import Engine
from vserve.engine.weights.loader import load_model

NAMES = ("eagle3", "eagle", "mtp", "model", "codes")


@pytest.fixture(scope="module")
def pairs(load_module: Any, tiny_model: Any, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name → (the target, what --speculative-config says)."""
    made, folder = load_module(Path(__file__).parents[1] / "draft_models.py"), tmp_path_factory.mktemp("size")
    target = tiny_model("llama", num_hidden_layers=6)
    deep = made.with_drafting_layer(
        tiny_models.tiny_checkpoint(folder / "deep", "deepseek_v3", num_hidden_layers=4), own=True
    )
    model = tiny_model("qwen3", num_hidden_layers=3)
    asked: dict[str, dict[str, Any]] = {
        "eagle3": {"model": str(made.eagle3(folder / "eagle3", draft_vocab=90))},
        "eagle": {"model": str(made.eagle(folder / "eagle", bias=True))},
        "mtp": {"method": "mtp"}, "model": {"model": str(model)},
        "codes": {"model": str(model), "quantization": "int8"},
    }  # fmt: skip
    return {name: (deep if name == "mtp" else target, asked[name]) for name in NAMES}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_known_from_headers(pairs: Any, name: str, ranks: int) -> None:
    folder, asked = pairs[name]
    config = read_folder(folder)
    for whole in (False, True) if ranks > 1 else (False,):
        settings = read_speculation(json.dumps({**asked, **({"draft_tensor_parallel_size": 1} if whole else {})}))
        assert settings is not None
        draft = find_draft(settings, folder, config, None, ranks)
        told = draft_bytes(draft, config, torch.float32, ranks, False, on_card=False)
        model = load_model(
            folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
            group=SingleGroup(0, ranks),
        )  # fmt: skip
        taken = weight_bytes(model, load_drafter(draft, model, 64)) - weight_bytes(model)
        assert 0.9 * taken < told <= (1.1 if name == "codes" else 1.01) * taken, f"{told} told, {taken} taken"


def test_a_drafter_that_does_not_fit_is_refused_before_weights_are_read(
    pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = pairs["model"]
    sizes: list[int] = []
    check = weight_size.weight_size

    def weighed(*arguments: Any, **options: Any) -> int:
        sizes.append(check(*arguments, **options))
        return sizes[-1]

    monkeypatch.setattr(weight_size, "weight_size", weighed)
    config = EngineConfig(str(folder), device="cpu", cpu_threads=1, max_model_len=64)
    Engine(config, lambda _: None)
    monkeypatch.setattr(weight_size, "available_bytes", lambda: sizes[0] + 1000)
    with pytest.raises(ConfigError, match=r"of who drafts\), and the machine has .*: leave --speculative-config out"):
        Engine(
            EngineConfig(
                str(folder), device="cpu", cpu_threads=1, max_model_len=64, speculative_config=json.dumps(asked)
            ),
            lambda phase: phase.done and pytest.fail("weights were read"),
        )
