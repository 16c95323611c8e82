"""What the worker reports of itself when it is ready."""

from __future__ import annotations

from typing import Any

import pytest

from vserve.engine.config import EngineConfig
from vserve.engine.worker import Worker


@pytest.mark.parametrize(
    "options, fitted",
    [
        ({}, ()),
        ({"num_gpu_blocks_override": 4}, ("max_model_len",)),
        ({"max_num_batched_tokens": 8}, ("max_num_seqs",)),
        ({"max_num_batched_tokens": 8, "num_gpu_blocks_override": 4}, ("max_model_len", "max_num_seqs")),
        ({"num_gpu_blocks_override": 4, "max_model_len": 64}, ()),
    ],
    ids=str,
)
def test_names_the_options_that_were_fitted(tiny_model: Any, options: dict[str, int], fitted: tuple[str, ...]) -> None:
    config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, **options)  # type: ignore[arg-type]
    assert Worker(config, lambda progress: None).info.fitted == fitted
