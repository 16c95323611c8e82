"""Tiny models written to GGUF and read back: configuration and tensors are those of the folder they were made from."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vserve.engine.describe.reading import parse_model_config, read_folder
from vserve.engine.errors import ModelError
from vserve.engine.files.gguf_checkpoint import GGUFCheckpoint
from vserve.engine.files.gguf_config import eos_token_ids, read_config, read_generation_config
from vserve.engine.files.gguf_families import FAMILIES as architectures
from vserve.engine.files.gguf_file import Strings, read_gguf
from vserve.engine.quant.fp4 import decode_experts
from vserve.engine.quant.scheme import make_scheme, read_quantization
from vserve.engine.weights.loader import load_model

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "cohere",
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "minimax_m2", "glm4_moe",
)  # fmt: skip
ALWAYS_TIED = ("gemma", "gemma2", "cohere")  # to llama.cpp
# What no key of the file says is what the largest models of a family have, or all.
SAID = {
    "gemma2": {"query_pre_attn_scalar": 16, "layer_types": None},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    "qwen2_moe": {"norm_topk_prob": False}, "qwen3_moe": {"norm_topk_prob": True},
}  # fmt: skip
K_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole blocks


def described(content: dict[str, Any]) -> Any:
    return parse_model_config({key: value for key, value in content.items() if key != "quantization_config"})


def mixed(name: str) -> str:
    """As Q4_K_M has it: several formats in one model, and within one layer."""
    return "Q6_K" if "attn_v" in name or name in ("output.weight", "token_embd.weight") else "Q4_K"


@pytest.mark.parametrize(
    ("family", "tied"),
    [(family, tied) for family in FAMILIES for tied in (False, True) if tied or family not in ALWAYS_TIED],
)
def test_the_same_configuration(gguf_models: Any, tiny_model: Any, tmp_path: Path, family: str, tied: bool) -> None:
    folder = tiny_model(family, tie_word_embeddings=tied, **SAID.get(family, {}))
    checkpoint = GGUFCheckpoint(gguf_models.write_gguf(folder, tmp_path / "m.gguf"))
    ours, theirs = described(checkpoint.config), described(json.loads((folder / "config.json").read_text()))
    assert ours.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-6)  # fp32 in the file
    assert ours.eos_token_ids == (2, 0)  # the second by its name
    if family == "mistral":  # the file has no other word for it
        theirs = dataclasses.replace(theirs, architecture="LlamaForCausalLM")
    assert [layer.mlp for layer in ours.layers] == [layer.mlp for layer in theirs.layers]
    assert [layer.attention for layer in ours.layers] == [layer.attention for layer in theirs.layers]
    assert dataclasses.replace(ours, norm_eps=theirs.norm_eps, eos_token_ids=theirs.eos_token_ids) == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tensors(gguf_models: Any, tiny_model: Any, tmp_path: Path, family: str) -> None:
    biased = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    tied = {"tie_word_embeddings": family in ALWAYS_TIED}
    folder = tiny_model(family, **{"num_hidden_layers": 3, **tied, **biased, **SAID.get(family, {})})
    checkpoint = GGUFCheckpoint(gguf_models.write_gguf(folder, tmp_path / "m.gguf"))
    originals, headers = gguf_models.one_each(load_file(folder / "model.safetensors")), checkpoint.headers
    assert headers.keys() == originals.keys()
    for name, original in originals.items():
        header = headers[name]
        assert (header.dtype, header.shape, header.num_bytes) == ("F32", tuple(original.shape), original.nbytes)
        raised = "gemma" in family and original.dim() == 1  # by 1, and back
        torch.testing.assert_close(checkpoint.read(name), original, rtol=0, atol=1e-6 if raised else 0)
    assert make_scheme(read_quantization(checkpoint.file.path, checkpoint.config), None) is None
    assert "quantization_config" not in checkpoint.config


def test_the_text_half_of_qwen3_vl(
    gguf_models: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gguf_models.ARCHITECTURES, "qwen3", "qwen3vl")
    monkeypatch.setitem(gguf_models.ARCHITECTURES, "qwen3_moe", "qwen3vlmoe")
    for family in ("qwen3", "qwen3_moe"):
        folder = tiny_model(family, **SAID.get(family, {}))
        path = tmp_path / f"{family}.gguf"
        checkpoint = GGUFCheckpoint(
            gguf_models.write_gguf(folder, path, keys={"rope.dimension_sections": [3, 3, 2, 0]})
        )
        ours, theirs = described(checkpoint.config), described(json.loads((folder / "config.json").read_text()))
        assert ours.layers == theirs.layers
        assert checkpoint.headers.keys() == gguf_models.one_each(load_file(folder / "model.safetensors")).keys()


def test_layers_that_draft_are_left_out_of_a_glm(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("glm4_moe", num_hidden_layers=3)
    checkpoint = GGUFCheckpoint(gguf_models.write_gguf(folder, tmp_path / "m.gguf", keys={"nextn_predict_layers": 1}))
    assert len(described(checkpoint.config).layers) == 2
    layers = {name.split(".")[2] for name in checkpoint.headers if ".layers." in name}
    assert layers == {"0", "1"}


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_floats_keep_their_type(gguf_models: Any, tiny_model: Any, tmp_path: Path, kind: str) -> None:
    folder = tiny_model("llama")
    checkpoint = GGUFCheckpoint(gguf_models.write_gguf(folder, tmp_path / "m.gguf", lambda name: kind))
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert described(checkpoint.config).dtype == dtype
    for name, original in load_file(folder / "model.safetensors").items():
        expected = original.to(dtype) if original.dim() == 2 else original
        assert torch.equal(checkpoint.read(name), expected), name


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "Q8_0"), ("llama", "Q4_0"), ("qwen2", "Q5_1"), ("qwen3", "Q4_1"), ("llama", "MXFP4"), ("llama", mixed)],
)
def test_quantised_tensors(gguf_models: Any, tiny_model: Any, tmp_path: Path, family: str, kind: Any) -> None:
    """As decoded by the package, rows put back by hand."""
    folder = tiny_model(family, **(K_BLOCKS if kind is mixed else {}))
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", kind if kind is mixed else lambda name: kind)
    checkpoint, originals = GGUFCheckpoint(path), load_file(folder / "model.safetensors")
    headers = checkpoint.headers
    scheme = make_scheme(read_quantization(checkpoint.file.path, checkpoint.config), "gguf")
    assert scheme is not None
    assert checkpoint.config["quantization_config"] == {
        "quant_method": "gguf_file", "type": "Q4_K" if kind is mixed else kind,
    }  # fmt: skip
    seen = set()
    for seed, (name, original) in enumerate(originals.items()):
        form = scheme.format(name.removesuffix(".weight"), {"weight": (headers[name].dtype, headers[name].shape)})
        if original.dim() == 1:
            assert form is None and torch.equal(checkpoint.read(name), original)
            continue
        assert form is not None
        seen.add(headers[name].dtype)
        rows, columns = original.shape
        (stored,) = form.expected(rows, columns).values()
        packed = checkpoint.read(name)
        assert (headers[name].dtype,) == stored.dtypes and headers[name].shape == stored.shape == tuple(packed.shape)
        assert headers[name].num_bytes == packed.nbytes
        source, heads = original, {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0) if family == "llama" else 0
        if heads:
            source = gguf_models.permuted(original, heads)
        raw = gguf_models.quantized(source, headers[name].dtype, seed)
        wanted = torch.from_numpy(quants.dequantize(raw, GGMLQuantizationType[headers[name].dtype]))
        if heads:  # [heads, 16 / 2, 2, K] back to [heads, 2, 16 / 2, K]
            wanted = wanted.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        assert torch.equal(form.decode({"weight": packed}, rows, columns).dequantize(), wanted), name
        if kind is not mixed:  # quantised from the original: near it, row by row
            error = (wanted - original).norm() / original.norm()
            assert error < (0.01 if kind == "Q8_0" else 0.2)
    assert seen == ({"Q4_K", "Q6_K"} if kind is mixed else {kind})


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ2_XS"])
def test_scales_that_are_no_numbers(gguf_models: Any, tiny_model: Any, tmp_path: Path, kind: str) -> None:
    """Within the blocks, which begin with an fp16 each."""
    folder = tiny_model("llama", **K_BLOCKS)
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", lambda name: kind if "ffn" in name else "Q8_0")
    tensor = GGUFCheckpoint(path).tensors["model.layers.1.mlp.up_proj.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.start)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(ModelError) as caught:
        config = read_folder(path)
        load_model(path, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    if kind == "IQ2_XS":
        assert str(caught.value) == (
            f"{path}: tensor blk.1.ffn_up.weight holds a scale that is no finite number: download it again"
        )
    else:
        assert str(caught.value) == (
            "model.layers.1.mlp.up_proj: weight makes scales of which one is nan at [0, 0], they have to be finite: "
            "download the checkpoint again"
        )


@pytest.mark.parametrize("family", ["phi3", "gemma3_text"])
def test_ropes_of_their_own(gguf_models: Any, tiny_model: Any, tmp_path: Path, family: str) -> None:
    factors = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [2.0 + i for i in range(6)]}
    phi = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    ropes = {
        "phi3": {**phi, "partial_rotary_factor": 0.75},
        "gemma3_text": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    }  # fmt: skip
    own = {"original_max_position_embeddings": 64} if family == "phi3" else {}
    folder = tiny_model(family, rope_parameters=ropes[family], **own, **SAID.get(family, {}))
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5e3}
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", keys=keys if family != "phi3" else {})
    ours = described(GGUFCheckpoint(path).config)
    theirs = described(json.loads((folder / "config.json").read_text()))
    assert [layer.attention for layer in ours.layers] == [layer.attention for layer in theirs.layers]
    assert len({layer.attention.rope for layer in ours.layers}) == (1 if family == "phi3" else 2)


@pytest.mark.parametrize("kind", ["Q8_0", mixed])
def test_experts_are_slices_of_one_tensor(gguf_models: Any, tiny_model: Any, tmp_path: Path, kind: Any) -> None:
    shape = {**K_BLOCKS, "moe_intermediate_size": 256} if kind is mixed else {"moe_intermediate_size": 64}
    folder = tiny_model("qwen3_moe", norm_topk_prob=True, **shape)
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", kind if kind is mixed else lambda name: kind)
    checkpoint, originals = GGUFCheckpoint(path), load_file(folder / "model.safetensors")
    assert checkpoint.headers.keys() == originals.keys()
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for expert in range(5):
        for part in ("gate", "up", "down"):
            stored = raw[f"blk.1.ffn_{part}_exps.weight"]
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            assert checkpoint.headers[name].dtype == ("Q4_K" if kind is mixed else kind)
            assert torch.equal(checkpoint.read(name), torch.from_numpy(stored.data[expert].copy()))


def test_blocks_of_gpt_oss(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    """As published: experts in MXFP4, the rest in another format; the numbers are those of its own folder's blocks."""
    folder = tiny_model("gpt_oss", intermediate_size=96, head_dim=16)
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", lambda name: "MXFP4" if "exps" in name else "Q8_0")
    checkpoint = GGUFCheckpoint(path)
    originals = gguf_models.one_each(load_file(folder / "model.safetensors"))
    scheme = make_scheme(read_quantization(checkpoint.file.path, checkpoint.config), "gguf")
    assert scheme is not None and checkpoint.headers.keys() == originals.keys()
    for name, original in originals.items():
        header = checkpoint.headers[name]
        stored = {"weight": (header.dtype, header.shape)} if name.endswith(".weight") else {}
        form = scheme.format(name.removesuffix(".weight"), stored)
        if original.dim() < 2 or "router" in name:
            assert form is None and torch.equal(checkpoint.read(name), original)
            continue
        assert form is not None and form.name == ("GGUF MXFP4" if "experts" in name else "GGUF Q8_0")
        numbers = form.decode({"weight": checkpoint.read(name)}, *original.shape).dequantize()
        if "experts" not in name:
            assert (numbers - original).norm() < 0.01 * original.norm()
            continue
        # as its folder has the same codes: two neighbours a byte, exponents apart
        blocks = checkpoint.read(name).view(original.shape[0], -1, 17)
        codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1)
        pairs = (codes[..., ::2] | codes[..., 1::2] << 4)[None]
        (theirs,) = decode_experts(pairs, blocks[None, ..., 0])
        assert torch.equal(numbers, theirs.dequantize()) and numbers.abs().max() > 0


def test_ends_of_gpt_oss(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    """A message's end is no answer's where answers have an end of their own; of Phi it is."""

    def ends(*texts: str) -> list[int]:
        path = gguf_models.write_gguf(tiny_model("gpt_oss"), tmp_path / "m.gguf")
        metadata = dict(read_gguf(path).metadata)
        tokens = list(metadata["tokenizer.ggml.tokens"])
        kinds = list(metadata["tokenizer.ggml.token_type"])
        for index, text in enumerate(texts):
            tokens[10 + index], kinds[10 + index] = text, 3
        data = [text.encode() for text in tokens]
        table = b"".join(struct.pack("<Q", len(one)) + one for one in data)
        metadata |= {"tokenizer.ggml.tokens": Strings(len(data), table), "tokenizer.ggml.token_type": tuple(kinds)}
        return [token for token in eos_token_ids(metadata) if token >= 10]

    assert ends("<|end|>", "<|return|>", "<|call|>") == [11, 12]
    assert ends("<|end|>", "<|assistant|>") == [10]


def test_code_books_are_dequantised_and_said(
    gguf_models: Any, tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama", **K_BLOCKS)
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", lambda name: "IQ2_XS" if "ffn" in name else "Q4_K")
    checkpoint = GGUFCheckpoint(path)
    name = "model.layers.1.mlp.up_proj.weight"
    header = checkpoint.headers[name]
    assert (header.dtype, header.shape, header.num_bytes) == ("F32", (512, 256), 4 * 512 * 256)
    assert "6 of the tensors have a type that no kernel reads (IQ2_XS)" in caplog.text
    raw = tmp_path.joinpath("m.gguf").read_bytes()
    tensor = checkpoint.tensors[name]
    packed = np.frombuffer(raw[tensor.start : tensor.start + tensor.num_bytes], np.uint8).reshape(512, -1)
    assert torch.equal(checkpoint.read(name), torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.IQ2_XS)))


def test_split_files(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("qwen2")
    first = gguf_models.write_gguf(folder, tmp_path / "m.gguf", shards=3)
    assert first.name == "m-00001-of-00003.gguf"
    checkpoint = GGUFCheckpoint(first)
    for name, original in load_file(folder / "model.safetensors").items():
        assert torch.equal(checkpoint.read(name), original), name
    assert {header.file.name for header in checkpoint.headers.values()} == {
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    }
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is part 2 of 3: pass the first one, .*-00001-of-"):
        GGUFCheckpoint(tmp_path / "m-00002-of-00003.gguf")
    whole, key = first.read_bytes(), b"split.tensors.count"
    count = whole.index(key) + len(key) + 4  # behind its type
    first.write_bytes(whole[:count] + bytes([whole[count] + 1]) + whole[count + 1 :])
    with pytest.raises(ModelError, match=r"promises 28 tensors, its 3 parts have 27: download all of them again"):
        GGUFCheckpoint(first)
    first.write_bytes(whole)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf is one of 3 parts, but its name does not end in -00001-of-"):
        GGUFCheckpoint(tmp_path / "other.gguf")
    (tmp_path / "other.gguf").rename(first)
    (tmp_path / "m-00003-of-00003.gguf").write_bytes((tmp_path / "m-00002-of-00003.gguf").read_bytes())
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf says it is part 1, its name 2 .*download it again"):
        GGUFCheckpoint(first)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"lacks m-00003-of-00003\.gguf, part 3 of 3: download it too"):
        GGUFCheckpoint(first)


ROPE: list[dict[str, Any]] = [
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 6.0, "original_max_position_embeddings": 3000},
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rope", ROPE)
def test_rope_freqs_become_llama3s_parameters(
    gguf_models: Any, tiny_model: Any, tmp_path: Path, rope: dict[str, Any], head_dim: int
) -> None:
    """The frequencies of transformers, for what was recovered from the divisors, are those it started from."""
    folder = tiny_model("llama", head_dim=head_dim)

    def frequencies(parameters: dict[str, Any]) -> torch.Tensor:
        config = AutoConfig.for_model(
            "llama", head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=parameters
        )
        return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]

    wanted = frequencies({"rope_type": "llama3", "rope_theta": 500_000.0, **rope})
    plain = 1 / 500_000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    path = gguf_models.write_gguf(
        folder, tmp_path / "m.gguf", keys={"rope.freq_base": 500_000.0}, rope_freqs=(plain / wanted).tolist()
    )
    found = GGUFCheckpoint(path).config["rope_parameters"]
    assert (found["rope_type"], found["factor"]) == ("llama3", rope["factor"])
    torch.testing.assert_close(frequencies(found), wanted, rtol=1e-4, atol=0)
    if rope["original_max_position_embeddings"] == 8192:
        assert found == {"rope_type": "llama3", "rope_theta": 500_000.0, **rope}
    assert described(GGUFCheckpoint(path).config).layers[0].attention.rope.type == "llama3"


def test_other_rope_freqs_are_refused(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    freqs = [1.0, 3.0, 2.0, 5.0, 1.0, 1.0, 1.0, 4.0]
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "m.gguf", rope_freqs=freqs)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight \(8 values up to 5\) is not made by Llama 3's formula"):
        _ = GGUFCheckpoint(path).config
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "1.gguf", rope_freqs=[1.0] * 8)
    assert GGUFCheckpoint(path).config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


def test_rope_scaling(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    def rope(name: str, **keys: Any) -> Any:
        keys = {f"rope.scaling.{key}": value for key, value in keys.items()}
        path = gguf_models.write_gguf(tiny_model("qwen2"), tmp_path / f"{name}.gguf", keys=keys)
        return GGUFCheckpoint(path).config["rope_parameters"]

    assert rope("linear", type="linear", factor=2.0) == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    yarn = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    }  # fmt: skip
    assert rope("yarn", type="yarn", factor=4.0, original_context_length=256) == yarn
    factor = {"attention_factor": 0.5 * (0.1 * math.log(4) + 1), "beta_fast": 16.0}
    more = {"attn_factor": 0.5, "yarn_beta_fast": 16.0}
    assert rope("beta", type="yarn", factor=4.0, original_context_length=256, **more) == yarn | factor
    with pytest.raises(ModelError, match=r"qwen2\.rope\.scaling\.type is 'longrope', read are none, linear and yarn"):
        rope("longrope", type="longrope")


def test_windows(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    def windows(family: str, window: int) -> list[int]:
        keys = {"attention.sliding_window": window}
        folder = tiny_model(family, tie_word_embeddings=True)
        path = gguf_models.write_gguf(folder, tmp_path / f"{family}{window}.gguf", keys=keys)
        return [layer.attention.window for layer in described(GGUFCheckpoint(path).config).layers]

    assert windows("mistral", 128) == [128, 128]
    assert windows("mistral", 512) == windows("qwen2", 512) == [0, 0]  # no shorter than any context
    assert windows("gemma2", 128) == [128, 0] and windows("gemma3_text", 128) == [128] * 3
    with pytest.raises(ModelError, match=r"qwen2\.attention\.sliding_window is 128, windows are read of llama, gemma"):
        windows("qwen2", 128)


def test_sampling_defaults(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    add = gguf_models.add_tokenizer

    def add_both(writer: Any, *rest: Any) -> None:
        add(writer, *rest)
        writer.add_float32("general.sampling.temp", 0.6)
        writer.add_int32("general.sampling.top_k", 20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "add_tokenizer", add_both)
        path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / "m.gguf")
    assert GGUFCheckpoint(path).generation_config == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"embedding_length": None}, r"lacks the key llama\.embedding_length: download it again, or convert"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count is 0, a whole number above 0 belongs there"),
        ({"attention.head_count_kv": [2, 1]}, r"llama\.attention\.head_count_kv is \(2, 1\), .* one for all layers"),
        ({"block_count": "two"}, r"llama\.block_count is 'two', a number from 0 on belongs there"),
        ({"embedding_length": 128}, r"output\.weight has shape \[300, 64\], the file's keys make it \[300, 128\]"),
        ({"attention.head_count_kv": 4}, r"attn_k\.weight has shape \[32, 64\], the file's keys make it \[64, 64\]"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8, heads have 16 dimensions; .*: use another"),
        ({"attention.value_length": 32}, r"llama\.attention\.value_length is 32, heads have 16 dimensions"),
        ({"expert_count": 8}, r"lacks the key llama\.expert_used_count: download it again"),
    ],
)
def test_keys_at_fault(gguf_models: Any, tiny_model: Any, tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "m.gguf", keys=keys)
    with pytest.raises(ModelError, match=words) as error:
        _ = GGUFCheckpoint(path).headers
    assert str(path) in str(error.value) and "\n" not in str(error.value)


ODD: list[Any] = [
    "x", "", -1, 0, 3, 2**40, 1.5, math.nan, math.inf, True, False, (), (1, 2), (1.0,), ((1,),), Strings(0, b""),
    Strings(1, b"\1" + bytes(7) + b"a"),
]  # fmt: skip


@pytest.mark.parametrize("rope", ["none", "linear", "yarn", "llama3"])
def test_a_key_of_any_kind_is_read_or_refused(gguf_models: Any, tiny_model: Any, tmp_path: Path, rope: str) -> None:
    freqs = [1.0] * 8 if rope == "llama3" else None
    file = read_gguf(gguf_models.write_gguf(tiny_model("llama"), tmp_path / "m.gguf", rope_freqs=freqs))
    keys = {
        **file.metadata, "general.type": "model", "general.sampling.temp": 1.0, "llama.attention.causal": True,
        "llama.attention.sliding_window": 9999, "llama.expert_count": 0, "tokenizer.ggml.eot_token_id": 1,
        "llama.rope.scale_linear": 1.0, "llama.rope.scaling.type": "none" if rope == "llama3" else rope,
        "llama.rope.scaling.factor": 1.0 if rope == "llama3" else 2.0, "llama.rope.scaling.attn_factor": 1.0,
        "llama.rope.scaling.original_context_length": 100, "llama.rope.scaling.yarn_beta_fast": 30.0,
    }  # fmt: skip
    described(read_config(dataclasses.replace(file, metadata=keys)))
    refused = 0
    for key in keys:
        for value in ODD:
            changed = dataclasses.replace(file, metadata=keys | {key: value})
            try:
                described(read_config(changed))
                assert all(type(v) in (int, float) for v in read_generation_config(changed).values())
            except ModelError as error:
                assert "\n" not in str(error) and len(str(error)) < 300 + len(str(file.path))
                refused += 1
    assert refused > 100


def rewritten(path: Path, old: bytes, new: bytes) -> GGUFCheckpoint:
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    changed = path.with_name("changed.gguf")
    changed.write_bytes(data.replace(old, new))
    return GGUFCheckpoint(changed)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"llama", b"jamba", r"has the architecture 'jamba', served are llama, qwen2, qwen3, .*: use another model"),
        (b"general.arch", b"general.orch", r"lacks the key general\.architecture: download it again"),
        (
            b"blk.1.ffn_up.w",
            b"blk.1.ffn_ub.w",
            r"has the tensor blk\.1\.ffn_ub\.weight, for which LlamaForCausalLM has",
        ),
        (b"token_embd.w", b"token_embt.w", r"lacks the tensor token_embd\.weight: download it again"),
    ],
)
def test_names_at_fault(gguf_models: Any, tiny_model: Any, tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=words) as error:
        _ = rewritten(path, old, new).headers
    assert "changed.gguf" in str(error.value) and "\n" not in str(error.value)


def test_types_at_fault(gguf_models: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I32 is as long as F32, and no weight's; code books are in a package that may be missing."""
    path = gguf_models.write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    entry = b"blk.1.ffn_up.weight" + struct.pack("<IQQ", 2, 64, 96)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight has type I32, which is not served: get the model in"):
        _ = rewritten(path, entry + struct.pack("<I", 0), entry + struct.pack("<I", 26)).tensors
    kind = lambda name: "IQ3_S" if name == "blk.0.ffn_up.weight" else "Q4_K"  # noqa: E731
    path = gguf_models.write_gguf(tiny_model("llama", **K_BLOCKS), tmp_path / "books.gguf", kind)
    assert len(GGUFCheckpoint(path).tensors) == 21
    monkeypatch.setattr("vserve.engine.files.gguf_checkpoint.find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"blk\.0\.ffn_up\.weight has type IQ3_S, .* gguf decodes: pip install gguf, or"
    ):
        _ = GGUFCheckpoint(path).tensors


def test_a_file_that_shrank_meanwhile(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / "m.gguf")
    checkpoint = GGUFCheckpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    last = max(checkpoint.tensors, key=lambda name: checkpoint.tensors[name].start)
    with pytest.raises(ModelError, match=r"m\.gguf is truncated: tensor .* has 0 of \d+ bytes: download it again"):
        checkpoint.read(last)


def test_the_page_lists_what_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "running" / "quantization.md").read_text()
    listed = re.search(r"of the architectures (.*?): configuration", page, re.DOTALL)
    assert listed is not None
    words = re.split(r",\s+|\s+and\s+", re.sub(r"\s+\([^)]*\)", "", listed[1]))
    assert {word.strip() for word in words} == set(architectures)


def test_looked_at_without_torch(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / "m.gguf", lambda name: "Q8_0")
    look = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from vserve.engine.files.gguf_checkpoint import GGUFCheckpoint
checkpoint = GGUFCheckpoint(Path(sys.argv[1]))
print(checkpoint.config["architectures"], len(checkpoint.tensors))
"""
    done = subprocess.run([sys.executable, "-c", look, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['Qwen3ForCausalLM'] 25\n", done.stderr
