"""What kernels of few rows do on their way in a mixture (attention's product adds to the residual stream, the router
norms what it reads), in layers of real shapes: as near to the same with kernels of their own as two roundings are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LAYERS, SEEDS = 3, 5


def make_runner(folder: Path, quantization: str | None) -> ModelRunner:
    device = torch.device("cuda", torch.cuda.current_device())
    config = read_folder(folder, quantization=quantization)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "load_format": "dummy", "max_model_len": 256}
    runner = ModelRunner(
        load_model(folder, config, **options), max_num_seqs=16, max_model_len=256, block_size=16, device=device
    )
    runner.bind_cache(64, torch.bfloat16)
    return runner


def hidden_of(runner: ModelRunner, rows: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What a step of so many decodes makes before the logits."""
    found: list[Tensor] = []
    forward = runner.model.forward

    def kept(*given: Any, **named: Any) -> Tensor:
        found.append(forward(*given, **named).clone())
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", kept)
        runner.dummy_step(rows, rows, GREEDY)
    (hidden,) = found
    return hidden.float()


def switched(runner: ModelRunner, on: bool, were: dict[Any, dict[str, int]]) -> int:
    """Of all modules that have it; how many."""
    for module in runner.model.modules():
        for name in ("add_up_to", "norm_rows"):
            if (rows := vars(module).get(name)) is not None:
                rows = were.setdefault(module, {}).setdefault(name, rows)
                setattr(module, name, rows if on else 0)
    return sum(any(rows.values()) for rows in were.values())


@pytest.mark.parametrize(
    ("shape", "quantization", "counts"),
    [
        ("qwen3-30b-a3b", None, (1, 7)),
        ("qwen3-30b-a3b", "fp8", (1, 8)),
    ],
)
def test_whole_layers(
    shape: str, quantization: str | None, counts: tuple[int, ...], model_folder: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    runner = make_runner(model_folder.write_model(tmp_path / shape, shape, LAYERS), quantization)
    model, were = runner.model, {}
    assert switched(runner, True, were) >= 2 * LAYERS
    for rows in counts:
        near = []
        for seed in range(SEEDS):
            generator = torch.Generator(model.place.device).manual_seed(seed)
            model.embedding.weight[:1].normal_(0.0, 1.0, generator=generator)
            for layer in model.layers:  # gains that differ, or a missing one would not be seen
                for norm in (layer.mixer_norm, layer.mlp_norm):
                    norm.weight.uniform_(0.3, 1.7, generator=generator)
            switched(runner, True, were)
            found = hidden_of(runner, rows, monkeypatch)
            assert torch.equal(hidden_of(runner, rows, monkeypatch), found), "the same bits every time"
            assert torch.equal(found, found[:1].expand_as(found)), "rows are alike, and so are their results"
            switched(runner, False, were)
            apart = hidden_of(runner, rows, monkeypatch)
            near.append(float((found - apart).norm() / apart.norm()))
        near.sort()
        print(f"{shape} {quantization} {rows} rows: {near}")
        # Where two experts are as good as each other, one rounding chooses: seldom.
        assert near[SEEDS // 2] < 0.02 and near[-2] < 0.1, near
