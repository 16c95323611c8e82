"""Starts with what people bring from vLLM, and what each option did."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vserve.server.offline.llm import LLM
from vserve.server.offline.sampling_params import SamplingParams

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PROMPT = [7, 40, 41, 90, 200, 13, 77, 150]


@contextmanager
def started(model: Path | str, **options: Any) -> Iterator[LLM]:
    with LLM(str(model), engine_in_process=True, max_num_seqs=2, cpu_threads=1, **options) as llm:
        yield llm


def greedy(llm: LLM, num_tokens: int = 12) -> list[int]:
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        use_tqdm=False,
    )  # fmt: skip
    return list(output.outputs[0].token_ids)


def expected(folder: Path, num_tokens: int = 12, **changes: Any) -> list[int]:
    """What transformers says."""
    config = AutoConfig.from_pretrained(folder, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return [int(token) for token in ids[0, len(PROMPT) :]]


def test_rotary_embeddings_by_their_own_options(tiny_model: Any) -> None:
    folder = tiny_model("llama")
    with started(folder, rope_theta=1e6, rope_scaling=json.dumps(YARN)) as llm:
        assert llm.info.max_model_len == 2048
        tokens = greedy(llm)
    assert tokens == expected(folder, rope_parameters={**YARN, "rope_theta": 1e6}) != expected(folder)


def test_another_config_with_overrides(tiny_model: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "generation_config.json").unlink()  # it has the last word on end tokens
    content = json.loads((folder / "config.json").read_text())
    content["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(content))
    overrides = {"rope_parameters": YARN, "eos_token_id": [5, 6]}
    with started(folder, hf_config_path=str(tmp_path), hf_overrides=overrides, max_model_len=-1) as llm:
        assert llm.info.max_model_len == 2048 and {5, 6} < set(llm.model.eos_token_ids)
        assert greedy(llm) == expected(folder, rope_parameters={**YARN, "rope_theta": 1e6})


def hub_cache(root: Path, name: str, **revisions: Path) -> Path:
    """A cache as the hub's library keeps it: by revision, the folder that it holds."""
    repo = root / f"models--{name.replace('/', '--')}"
    for number, (revision, folder) in enumerate(revisions.items()):
        commit = f"{number:040x}"
        shutil.copytree(folder, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    return root


def test_a_cache_of_the_hub_and_a_revision_of_its_tokenizer(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    other = shutil.copytree(tiny_model("llama"), tmp_path / "other")
    (other / "chat_template.jinja").write_text("other: {{ messages[0].content }}")
    for file in other.glob("*.safetensors"):
        file.unlink()
    cache = hub_cache(tmp_path / "cache", "some/model", main=tiny_model("llama"), other=other)
    with started("some/model", download_dir=str(cache), tokenizer_revision="other") as llm:
        assert llm.model.tokenizer.render([{"role": "user", "content": "hi"}], {}) == "other: hi"
        assert greedy(llm) == expected(tiny_model("llama"))


@pytest.mark.parametrize(("load_format", "without_text"), [("auto", False), ("pt", True), ("npcache", False)])
def test_pickled_weights(tiny_model: Any, tmp_path: Path, load_format: str, without_text: bool) -> None:
    folder = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with started(folder, load_format=load_format, skip_tokenizer_init=without_text) as llm:
        assert greedy(llm) == expected(tiny_model("qwen2"))
        if without_text:
            with pytest.raises(ValueError, match=r"has no tokenizer \(skip_tokenizer_init\)"):
                llm.generate("text", use_tqdm=False)


def test_prompts_that_share_steps(tiny_model: Any) -> None:
    with started(tiny_model("llama"), max_num_partial_prefills=2, max_long_partial_prefills=1) as llm:
        told = llm.info.settings
        assert (told["max_num_partial_prefills"], told["max_long_partial_prefills"]) == (2, 1)
        assert told["long_prefill_token_threshold"] == 512 // 25, "as nothing says what is long"
        assert greedy(llm) == expected(tiny_model("llama"))


def sentencepiece_file(words: list[str]) -> bytes:
    """A unigram model: <unk>, <s>, </s>, the bytes, then these words."""

    def piece(text: str, score: float, kind: int) -> bytes:
        told = b"\x0a" + bytes([len(text.encode())]) + text.encode() + struct.pack("<Bf", 0x15, score)
        return b"\x0a" + bytes([len(told) + 2]) + told + bytes([0x18, kind])

    pieces = [piece("<unk>", 0.0, 2), piece("<s>", 0.0, 3), piece("</s>", 0.0, 3)]
    pieces += [piece(f"<0x{i:02X}>", 0.0, 6) for i in range(256)] + [piece(word, -1.0, 1) for word in words]
    return b"".join(pieces) + b"\x12\x05\x18\x01\x98\x02\x01"  # of type unigram, with bytes for what is no word


def test_prompts_in_pieces_and_the_file_of_sentencepiece(tiny_model: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(["▁the", "▁cat", *(f"▁{i}" for i in range(39))]))
    with started(folder, tokenizer_mode="slow", long_prefill_token_threshold=3) as llm:
        assert llm.model.tokenizer.encode("the cat", False) == [259, 260]
        assert greedy(llm) == expected(tiny_model("llama"))
        steps = llm._engine.begin(llm._engine.client.last_steps(100))()
        assert [step.num_tokens for step in steps if step.num_requests][:4] == [3, 3, 2, 1], "8 tokens of the prompt"


def test_a_pooler(tiny_model: Any) -> None:
    config = {"pooling_type": "MEAN", "normalize": False}
    with started(tiny_model("qwen3"), override_pooler_config=config) as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPT}, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        states = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), states.mean(0), atol=1e-3, rtol=1e-3)


def test_no_windows_and_every_logprob(tiny_model: Any) -> None:
    folder = tiny_model("mistral", sliding_window=64)
    with started(folder, disable_sliding_window=True, max_model_len="auto", max_logprobs=-1) as llm:
        assert llm.info.max_model_len == 64 and llm.info.max_logprobs == llm.info.vocab_size == 300
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=300)
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        (position,) = output.outputs[0].logprobs
        assert len(position) == 300
        total = sum(float(torch.tensor(one.logprob).exp()) for one in position.values())
        assert abs(total - 1) < 1e-3


def test_the_knobs_of_old_notes(tiny_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    notes = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "enforce_eager": True}
    with started(tiny_model("llama"), use_v2_block_manager=True, tokenizer_pool_size=4, **notes) as llm:
        assert {name: llm.info.settings[name] for name in notes} == notes
        assert llm.info.settings["max_mixed_tokens"] == 0, "steps with decodes have the same limit"
        assert greedy(llm) == expected(tiny_model("llama"))
    assert "a step computes at most 16 tokens, beside decodes as well (--max-num-batched-tokens)" in caplog.text
