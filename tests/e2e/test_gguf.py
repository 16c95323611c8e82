"""`vserve model.gguf`: over HTTP it answers as transformers does with the numbers of its blocks (fp32, CPU)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from .test_parity_http import mismatches, random_prompts

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # K-quants have blocks of 256


def twin(folder: Path, path: Path, target: Path, gguf_models) -> Path:
    """The model's folder with the numbers that gguf makes of the file's blocks."""
    shutil.copytree(folder, target)
    heads = json.loads((folder / "config.json").read_text())
    family = gguf_models.ARCHITECTURES.get(heads["model_type"], heads["model_type"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, heads["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    numbers = {}
    originals = load_file(folder / "model.safetensors")
    for name, plain in gguf_models.one_each(originals).items():
        name = name.replace(".sinks", ".sinks.weight")
        base, _, suffix = name.rpartition(".")
        stacked, _, part = base.partition(".experts.")
        expert, _, part = part.partition(".")
        tensor = stored[f"{names.get_name(f'{stacked}.experts.{part}' if part else base)}.{suffix}"]
        data = tensor.data[int(expert)] if part else tensor.data
        values = torch.from_numpy(gguf.quants.dequantize(data, tensor.tensor_type).copy()).reshape(plain.shape)
        if family.startswith("gemma") and base.endswith("norm"):
            values -= 1
        which = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(base.rpartition(".")[2])
        if which is not None and family in gguf_models.PERMUTED:
            rows = len(values) // heads[which]
            values = values.view(heads[which], rows // 2, 2, -1).transpose(1, 2).reshape(plain.shape)
        numbers[name] = values.float().contiguous()
    save_file(originals | as_stored(numbers, originals), target / "model.safetensors", {"format": "pt"})
    return target


def as_stored(numbers: dict[str, torch.Tensor], originals: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of the folder; of gpt-oss all experts in one tensor, [E, K, N], gate and up in turn."""
    found = {}
    for name in originals:
        path, _, part = name.partition(".mlp.experts.")
        if name in numbers or not part:
            found[name] = numbers[name.replace(".sinks", ".sinks.weight")]
            continue
        kind, parts = "bias" if part.endswith("_bias") else "weight", part.removesuffix("_bias")
        parts = ["gate_proj", "up_proj"] if parts == "gate_up_proj" else [parts]
        rows = [
            torch.stack([numbers[f"{path}.mlp.experts.{expert}.{one}.{kind}"] for one in parts], dim=1).flatten(0, 1)
            for expert in range(originals[name].shape[0])
        ]
        found[name] = torch.stack([each.t() if kind == "weight" else each for each in rows]).contiguous()
    return found


def mixed(name: str) -> str:
    """As Q4_K_M: types differ within the fused q, k and v, and between layers."""
    return (
        "Q6_K" if name.removesuffix(".weight") in ("token_embd", "output", "blk.0.attn_v", "blk.1.ffn_down") else "Q4_K"
    )


@pytest.mark.parametrize(
    ("family", "kind", "tolerance"),
    [("llama", "Q8_0", 1e-3), ("qwen3", "Q5_1", 1e-3), ("llama", "Q6_K", 1e-3), ("llama", "mixed", 0.3)],
)
def test_answers_are_those_of_its_blocks(
    family, kind, tolerance, tiny_model, live_server, gguf_models, tmp_path, monkeypatch
):
    real = gguf_models.random_blocks  # the package cannot quantise to K-quants: random ones, of the usual size
    monkeypatch.setattr(
        gguf_models, "random_blocks", lambda *shape, seed, sizes: real(*shape, seed=seed, sizes=(1e-4,))
    )
    folder = tiny_model(family, **WIDE)
    types = mixed if kind == "mixed" else lambda name: kind
    path = gguf_models.write_gguf(folder, tmp_path / "tiny.gguf", types)
    numbers = twin(folder, path, tmp_path / "twin", gguf_models)
    with live_server(path, max_num_batched_tokens=48, max_model_len=256) as url:
        assert mismatches(url, numbers, random_prompts(5, 16, 33), tolerance) == []
        answer = httpx.get(f"{url}/server_info").json()
        assert answer["quantization"]["method"] == "gguf"
        formats = "GGUF Q4_K × 12, GGUF Q6_K × 3" if kind == "mixed" else f"GGUF {kind} × 15"
        assert answer["quantization"]["formats"] == formats
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 8}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()["usage"]["prompt_tokens"] > 8
        prompt = {"prompt": "hello there, the answer"}
        inside = httpx.post(f"{url}/tokenize", json=prompt).json()["tokens"]
    with live_server(numbers, max_model_len=256) as url:
        assert httpx.post(f"{url}/tokenize", json=prompt).json()["tokens"] == inside


def test_gpt_oss(tiny_model, live_server, gguf_models, tmp_path):
    """Experts in MXFP4, as it is published; the window ends within the prompts."""
    folder = tiny_model("gpt_oss", **{**WIDE, "initializer_range": 0.1})
    kinds = lambda name: "MXFP4" if "exps" in name else "Q8_0"  # noqa: E731
    path = gguf_models.write_gguf(folder, tmp_path / "tiny.gguf", kinds)
    numbers = twin(folder, path, tmp_path / "twin", gguf_models)
    with live_server(path, max_num_batched_tokens=48, max_model_len=256) as url:
        assert mismatches(url, numbers, random_prompts(5, 16, 33), 1e-3) == []
        formats = httpx.get(f"{url}/server_info").json()["quantization"]["formats"]
        assert formats == "GGUF MXFP4 × 45, GGUF Q8_0 × 13"


OTHERS = {
    "gemma3_text": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 64},
    "phi3": {}, "olmo2": {}, "granite": {}, "mixtral": {}, "cohere": {"tie_word_embeddings": True},
    "qwen2_moe": {"norm_topk_prob": False, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 64},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_other_families(family, tiny_model, live_server, gguf_models, tmp_path):
    folder = tiny_model(family, **{**WIDE, **OTHERS[family]})
    path = gguf_models.write_gguf(folder, tmp_path / "tiny.gguf", lambda name: "Q8_0")
    numbers = twin(folder, path, tmp_path / "twin", gguf_models)
    with live_server(path, max_num_batched_tokens=48, max_model_len=256) as url:
        assert mismatches(url, numbers, random_prompts(5, 16, 33), 1e-3) == []
