"""gpt-oss as it is published: experts in MXFP4, all of a layer in one tensor, everything else in bf16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ModelError
from vserve.engine.quant.experts import QuantizedExperts
from vserve.engine.start.described import describe

Parity = Any  # test_model_parity.py
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(scope="session")
def parity(load_module: Callable[[Path], Any]) -> Parity:
    return load_module(Path(__file__).with_name("test_model_parity.py"))


def mxfp4(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[E, N, K] → codes uint8 [E, N, K / 32, 16], exponents uint8 [E, N, K / 32], and the numbers that they mean."""
    parts = matrices.unflatten(-1, (-1, 32))
    power = torch.log2(parts.abs().amax(-1) / 6).ceil()
    codes = (parts[..., None] / torch.exp2(power)[..., None, None] - E2M1).abs().argmin(-1)
    numbers = E2M1[codes] * torch.exp2(power)[..., None]
    low, high = codes[..., ::2], codes[..., 1::2]
    return (low | high << 4).to(torch.uint8), (power + 127).to(torch.uint8), numbers.flatten(-2)


@pytest.fixture(scope="module")
def published(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tiny_model("gpt_oss"), tmp_path_factory.mktemp("published"))


def publish(source: Path, folder: Path) -> Path:
    """→ the folder, with "quantized", and with "twin": the numbers that its codes mean."""
    plain = load_file(source / "model.safetensors")
    stored, twin = dict(plain), dict(plain)
    for name, weight in plain.items():
        if name.endswith((".gate_up_proj", ".down_proj")):  # transposed: [E, K, N]
            codes, exponents, numbers = mxfp4(weight.transpose(1, 2))
            del stored[name]
            stored |= {f"{name}_blocks": codes.contiguous(), f"{name}_scales": exponents.contiguous()}
            twin[name] = numbers.transpose(1, 2).contiguous()
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for where, tensors, changes in (("quantized", stored, {"quantization_config": config}), ("twin", twin, {})):
        target = Path(shutil.copytree(source, folder / where))
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        raw = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(raw | changes))
    return folder


def test_experts_in_mxfp4_are_their_numbers(parity: Parity, published: Path) -> None:
    model = parity.load(published / "quantized")
    assert all(isinstance(layer.mlp.experts.method, QuantizedExperts) for layer in model.layers)
    found = parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED)
    assert parity.difference(found, parity.oracle(published / "twin")) < 2e-4
    assert describe(model)["method"] == "mxfp4"


def test_experts_in_bfloat16_are_near(parity: Parity, published: Path) -> None:
    model = parity.load(published / "quantized", dtype=torch.bfloat16)
    found = torch.cat(parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED))
    expected = torch.cat(parity.oracle(published / "twin"))
    error = (found - expected).square().mean(1).sqrt() / expected.std()
    assert error.median() < 0.1  # near ties of the router go the other way in some positions


def test_dummy_experts_are_mxfp4_too(parity: Parity, published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published / "quantized", tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    model = parity.load(folder, load_format="dummy")
    assert all(isinstance(layer.mlp.experts.method, QuantizedExperts) for layer in model.layers)


def test_blocks_that_do_not_fit_are_refused(parity: Parity, published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published / "quantized", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"down_proj_scales has shape \[5, 63, 3\] in model.safetensors, config"):
        parity.load(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"the checkpoint lacks {name}"):
        parity.load(folder)


def test_exponents_that_mean_no_number_are_refused(parity: Parity, published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published / "quantized", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 7, 1] = 255
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = r"layers\.1\.mlp\.experts: down_proj_scales makes scales of which one is nan at \[7, 1\], they have to be"
    with pytest.raises(ModelError, match=said):
        parity.load(folder)


def test_blocks_that_no_config_describes_are_refused(parity: Parity, published: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(published / "quantized", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"MXFP4 blocks, and config\.json has no quantization_config that says so"):
        parity.load(folder)


def test_sinks_are_fp32_and_the_heads_own(parity: Parity, published: Path) -> None:
    config = read_folder(published / "twin")
    model = parity.load(published / "twin", dtype=torch.bfloat16)
    tensors = load_file(published / "twin" / "model.safetensors")
    assert len({layer.attention.window for layer in config.layers}) == 2
    parity.PagedRunner(model, parity.sequences())  # binds a cache
    for index, layer in enumerate(model.attention_layers()):
        sinks = layer.scoring.sinks
        assert sinks is not None and sinks.dtype is torch.float32
        assert torch.equal(sinks, tensors[f"model.layers.{index}.self_attn.sinks"])
