"""Over HTTP, models that transformers' code computes on vserve's cache: its greedy tokens and log-probabilities."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest

CODE = """
from transformers import LlamaForCausalLM

class HomemadeForCausalLM(LlamaForCausalLM):
    pass
"""


@pytest.fixture(scope="module")
def parity(load_module):
    return load_module(Path(__file__).with_name("test_parity_http.py"))


@pytest.mark.parametrize(
    "model_type",
    ["starcoder2", "gpt_neox", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "gpt2", "dots1"))],
)
def test_answers_are_those_of_transformers(model_type, foreign_model, live_server, parity) -> None:
    folder = foreign_model(model_type)
    options = dict(max_num_batched_tokens=48, max_model_len=256, model_impl="transformers")
    with live_server(folder, **options) as url:
        assert parity.mismatches(url, folder, parity.random_prompts(5, 16, 33, 90)) == []
        assert httpx.get(f"{url}/server_info").json()["settings"]["model_impl"]["value"] == "transformers"
        body = dict(model="tiny", input="hello there")
        (vector,) = httpx.post(f"{url}/v1/embeddings", json=body).json()["data"]
        assert len(vector["embedding"]) == 64


def test_a_folders_own_code_is_served(tiny_model, tmp_path, live_server, parity) -> None:
    folder = tmp_path / "homemade"
    shutil.copytree(tiny_model("llama"), folder)
    (folder / "modeling_homemade.py").write_text(CODE)
    file = folder / "config.json"
    code = {"AutoModelForCausalLM": "modeling_homemade.HomemadeForCausalLM"}
    changes = {"architectures": ["HomemadeForCausalLM"], "auto_map": code}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with live_server(folder, trust_remote_code=True) as url:
        assert parity.mismatches(url, tiny_model("llama"), parity.random_prompts(5, 33)) == []
