"""Kernels that begin before those ahead of them have ended (kernels/launch/pdl.py) compute what they would one by one:
bit for bit, replayed in graphs, while another stream keeps the card busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.engine.cache.batch import Shape
from vserve.engine.describe.reading import read_folder
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights.loader import load_model
from vserve.kernels.launch import pdl

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
LAYERS, TURNS = 3, 200
ROWS = (1, 8, 16)


def capture(runner: ModelRunner) -> None:
    """Graphs of decodes, once their kernels are compiled."""
    runner.graphs = None
    graphs = runner.plan_graphs(max(ROWS), 0, ())
    for shape in graphs.shapes():
        runner.dummy_step(shape.rows, shape.rows, GREEDY)
    runner.capture_graphs(graphs)


def hidden_of(runner: ModelRunner, rows: int) -> Tensor:
    """What a replayed step of so many decodes makes before the logits."""
    runner.dummy_step(rows, rows, GREEDY)
    assert runner.graphs is not None
    return runner.graphs._graphs[Shape(rows, 0, rows, 0)].hidden[:rows].clone()


@pytest.mark.parametrize(
    ("shape", "quantization"),
    [("llama-8b", None), ("llama-8b", "int4"), ("llama-8b", "fp8"), ("qwen3-30b-a3b", None), ("qwen3-30b-a3b", "fp8")],
)
def test_launches_that_overlap_change_no_bit(
    shape: str, quantization: str | None, model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, device = model_folder.write_model(tmp_path / shape, shape, LAYERS), torch.device("cuda", 0)
    config = read_folder(folder, quantization=quantization)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "load_format": "dummy", "max_model_len": 256}
    runner = ModelRunner(
        load_model(folder, config, **options), max_num_seqs=16, max_model_len=256, block_size=16, device=device
    )
    runner.bind_cache(64, torch.bfloat16)
    assert pdl.pdl_available(device)
    with monkeypatch.context() as patch:  # of launches alone: which kernels there are is chosen as ever
        patch.setattr(pdl, "pdl_available", lambda device: False)
        capture(runner)
        expected = {rows: hidden_of(runner, rows) for rows in ROWS}
    assert all(hidden.isfinite().all() and hidden.std() > 0 for hidden in expected.values())
    capture(runner)
    busy, other = torch.cuda.Stream(), torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    for turn in range(TURNS):
        busy.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(busy):
            for _ in range(turn % 5):
                other @ other
        for rows in ROWS:
            assert torch.equal(hidden_of(runner, rows), expected[rows]), f"{rows} rows, turn {turn}"
    torch.cuda.synchronize()
