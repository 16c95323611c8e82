"""Rotations that follow the longest context are those of the context that is served, not of the one that was asked for:
memory may have cut it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.link.sampling_params import SamplingParams

LONGEST, BLOCKS, SERVED = 256, 4, 64
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
            "original_max_position_embeddings": SERVED, "partial_rotary_factor": 1.0}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def checkpoint(folder: Path, made: Path, rope: dict[str, Any]) -> Path:
    shutil.copytree(made, folder)
    config = json.loads((folder / "config.json").read_text())
    own = 32 if rope is DYNAMIC else LONGEST
    config |= {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": own}
    if rope is LONGROPE:
        config |= {"original_max_position_embeddings": SERVED, "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("code", ["vserve", "transformers"])
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_context_that_memory_cuts(
    engine: Any, tiny_model: Any, tmp_path: Path, rope: dict[str, Any], code: str
) -> None:
    made = checkpoint(tmp_path / "model", tiny_model("phi3" if rope is LONGROPE else "llama"), rope)
    served = type(engine)(made)
    asked = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3, prompt_logprobs=0, ignore_eos=True)
    batch = [([7, 200, 31, 8, 150] * 9, asked), ([90, 17, 16] * 7, asked)]
    options: dict[str, Any] = {"model_impl": code, "block_size": 16, "max_num_seqs": 2}
    (expected,), _ = served.run(batch, max_model_len=SERVED, **options)
    (cut,), _ = served.run(batch, num_gpu_blocks_override=BLOCKS, **options)
    for ours, theirs in zip(cut, expected, strict=True):
        assert ours.tokens == theirs.tokens
        found, wanted = (
            [entry.logprob for entry in each.logprobs + each.prompt_logprobs[1:]] for each in (ours, theirs)
        )
        assert found == pytest.approx(wanted, abs=1e-5)
