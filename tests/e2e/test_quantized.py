"""Over HTTP, a quantised checkpoint answers as transformers does with the numbers that its codes mean (fp32, CPU)."""

from __future__ import annotations

import httpx
import pytest

from ..quant.checkpoints import KINDS, write
from .test_parity_http import mismatches, random_prompts

# torch's int4 product rounds activations and scales to bf16; the others compute in fp32.
TOLERANCES = dict.fromkeys(KINDS, 1e-3) | dict.fromkeys(("awq", "gptq", "packed"), 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_its_numbers(kind, tiny_model, live_server, tmp_path):
    folder = write(tiny_model("qwen2"), tmp_path, kind)
    with live_server(folder / "quantized", max_num_batched_tokens=48, max_model_len=256) as url:
        prompts = random_prompts(5, 16, 33)
        assert mismatches(url, folder / "twin", prompts, TOLERANCES[kind]) == []
        others = mismatches(url, tiny_model("qwen2"), prompts, TOLERANCES[kind])
        assert len(others) > (0 if TOLERANCES[kind] == 0.5 else 20), "it is not told from the model before"
        info = httpx.get(f"{url}/server_info").json()["quantization"]
        assert info["quantized"] == 14 and info["unquantized"] == 1 and info["formats"].endswith(" × 14")
