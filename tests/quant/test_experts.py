"""Mixtures from quantised checkpoints: their experts against the numbers that the codes mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ModelError
from vserve.engine.models.blocks import CausalLM
from vserve.engine.planning.weight_size import weight_size
from vserve.engine.quant.experts import PackedExperts, QuantizedExperts
from vserve.engine.start.described import describe, describe_experts, experts_log_line
from vserve.engine.weights.loader import load_model
from vserve.kernels.experts.moe_lora import ExpertLora, ExpertPairs

from .checkpoints import KINDS, write

SIZES: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_experts": 4,
    "shared_expert_intermediate_size": 64,
}


def load(folder: Path, asked: str | None = None, **changes: Any) -> CausalLM:
    values: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    return load_model(folder, read_folder(folder, quantization=asked), **(values | changes))


def mixed(model: CausalLM) -> torch.Tensor:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    result = model.layers[0].mlp(x, None)
    for row in (0, 5):  # the way of one row alone
        torch.testing.assert_close(model.layers[0].mlp(x[row : row + 1], None)[0], result[row], atol=2e-3, rtol=2e-2)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_experts_multiply_by_what_their_codes_mean(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    found, wanted = mixed(model), mixed(twin)
    fast = kind in ("awq", "gptq", "packed")  # torch's int4 product rounds to bf16
    assert (found - wanted).norm() <= (2e-2 if fast else 1e-5) * wanted.norm()
    said = describe(model)
    assert said["quantized"] == 4 + 3 * 4 + 3 and said["unquantized"] == 2  # the head, and the gate of what is shared
    assert sum(w.numel() for w in twin.layers[0].mlp.experts.parameters()) == 3 * 4 * 64 * 64
    kept = sum(w.numel() * w.element_size() for w in model.layers[0].mlp.experts.parameters())
    assert kept < 3 * 4 * 64 * 64 * 2


def lora_of(model: CausalLM) -> ExpertLora:
    """Two adapters, of rank 16, for the nine tokens of `mixed`, some of which have none."""
    rng = torch.Generator().manual_seed(3)

    def pairs(parts: int, n: int, k: int) -> ExpertPairs:
        a = torch.randn(2, 4, parts * 16, k, generator=rng) / k**0.5
        b = torch.randn(2, 4, parts * n, 16, generator=rng) / 4
        return ExpertPairs(a, b, torch.ones(2, dtype=torch.int32))

    slots = torch.tensor([0, 1, -1, 1, 0, -1, 1, 0, 0], dtype=torch.int32)
    dtype = model.place.dtype
    both = (ExpertPairs(p.a.to(dtype), p.b.to(dtype), p.used) for p in (pairs(2, 64, 64), pairs(1, 64, 64)))
    return ExpertLora(*both, slots)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["awq", "int8", "fp8"])
def test_adapters_on_experts_of_codes(
    kind: str, packed: bool, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on numbers, whichever way codes are kept."""
    if packed:
        monkeypatch.setattr("vserve.engine.layers.experts.CODES_ON", ())
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, kind)
    changes = {"dtype": torch.float16} if packed else {}
    model, twin = load(folder / "quantized", **changes), load(folder / "twin")
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    found, without = (torch.zeros(0),) * 2
    for one in (model, twin):
        layer = one.layers[0].mlp
        without = layer(x.to(one.place.dtype), None)
        layer.experts.adapter = SimpleNamespace(lora=lora_of(one))
        if one is model:
            found, plain = layer(x.to(one.place.dtype), None), without
    wanted = twin.layers[0].mlp(x, None)
    assert isinstance(model.layers[0].mlp.experts.method, PackedExperts if packed else QuantizedExperts)
    assert (found - wanted).norm() <= 2e-2 * wanted.norm() < (wanted - without).norm()
    assert torch.equal(found[[2, 5]], plain[[2, 5]])


def test_fp8_products_leave_steps_with_adapters_to_others(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vserve.engine.layers.experts.CODES_ON", ())
    model = load(write(tiny_model("qwen2_moe", **SIZES), tmp_path, "fp8") / "quantized", dtype=torch.float16)
    layer, calls = model.layers[0].mlp, list[str]()
    for name in ("experts_fp8", "experts_codes"):
        record = lambda x, *_, name=name, **more: calls.append(name) or x  # noqa: E731
        monkeypatch.setattr(f"vserve.engine.quant.experts.{name}", record)
    monkeypatch.setattr("vserve.engine.quant.experts.fp8_expert_tile", lambda *_: 1)
    layer.experts.method.fp8 = True
    layer(torch.ones(9, 64, dtype=torch.float16), None)
    layer.experts.adapter = SimpleNamespace(lora=lora_of(model))
    layer(torch.ones(9, 64, dtype=torch.float16), None)
    assert calls == ["experts_fp8", "experts_codes"]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vserve.engine.layers.experts.CODES_ON", ())


@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_a_gpu_keep_their_codes(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path, as_on_a_gpu: None
) -> None:
    """Here the kernels' twins multiply by them. Of those whose columns have an order of their own, numbers are kept."""
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, kind)
    model, twin = load(folder / "quantized", dtype=torch.bfloat16), load(folder / "twin")
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, ids, weights = twin.layers[0].mlp.router(x.float())
    experts, wanted = model.layers[0].mlp.experts, twin.layers[0].mlp.experts
    found, numbers = experts(x, ids, weights).float(), wanted(x.float(), ids, weights)
    assert (found - numbers).norm() <= (0.06 if getattr(experts.method, "fp8", False) else 1e-2) * numbers.norm()
    if kind == "gptq":
        assert "16-bit products, dequantised × 8" in str(describe(model)["products"])
        return
    assert experts.method.plain is None and "codes: experts' kernels" in str(describe(model)["products"])
    kept = sum(w.numel() * w.element_size() for w in experts.parameters())
    assert kept < 3 * 4 * 64 * 128 * 1.5  # half of 16 bits, of rows and columns filled up to whole blocks


@pytest.mark.parametrize("kind", ["gptq", "packed", "awq"])
def test_the_size_is_what_is_held(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path, as_on_a_gpu: None
) -> None:
    """Known before they are loaded: 16 bits an element of experts whose columns have an order of their own, else the
    file's codes."""
    sizes = {**SIZES, "moe_intermediate_size": 512, "hidden_size": 256, "num_experts": 8, "num_hidden_layers": 2}
    folder = write(tiny_model("qwen2_moe", **sizes), tmp_path, kind) / "quantized"
    config, found = read_folder(folder), []

    def admit(parameters: int, stored: int) -> None:
        found.append(weight_size(config, parameters, torch.bfloat16, stored, on_card=True))

    model = load(folder, dtype=torch.bfloat16, admit=admit)
    experts = sum(w.numel() * w.element_size() for layer in model.layers for w in layer.mlp.experts.parameters())
    every = sum(w.numel() * w.element_size() for w in model.parameters())
    numbers = 2 * 2 * 8 * 3 * 512 * 256
    assert experts == numbers if kind == "gptq" else experts < 0.4 * numbers
    assert every * 0.8 < found[0] < every * 1.25


def test_the_start_names_what_experts_run_with(
    tiny_model: Callable[..., Path], tmp_path: Path, as_on_a_gpu: None
) -> None:
    plain = tiny_model("qwen2_moe", **SIZES)
    found = describe_experts(load(plain))
    assert found["products"] == "products of float32 × 1 layers" and found["on_this_rank"] == "4"
    model = load(write(plain, tmp_path, "fp8_blocks") / "quantized", dtype=torch.bfloat16)
    assert experts_log_line(describe_experts(model)) == (
        f"experts: 1 layers of 4, of which a token has {found['experts_per_token']}; on this rank 4; "
        "e4m3 codes: experts' kernels, FP8 products for many rows × 1 layers"
    )
    assert describe_experts(load(tiny_model("llama"))) == {}


def test_some_experts_that_are_plain_make_all_numbers(
    tiny_model: Callable[..., Path], tmp_path: Path, as_on_a_gpu: None
) -> None:
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, "fp8")
    file = folder / "quantized" / "model.safetensors"
    tensors, twin = load_file(file), load_file(folder / "twin" / "model.safetensors")
    path = "model.layers.0.mlp.experts.2.up_proj"
    del tensors[f"{path}.weight_scale"]
    save_file(tensors | {f"{path}.weight": twin[f"{path}.weight"]}, file, {"format": "pt"})
    model = load(folder / "quantized", dtype=torch.bfloat16)
    method, wanted = model.layers[0].mlp.experts.method, load(folder / "twin").layers[0].mlp.experts.method
    for name in ("gate_up", "down"):
        torch.testing.assert_close(getattr(method.plain, name).float(), getattr(wanted, name), atol=1e-6, rtol=1 / 128)
    assert "16-bit products, dequantised × 8" in str(describe(model)["products"])


@pytest.mark.parametrize("kind", ["awq", "fp8_blocks", "nvfp4"])
def test_where_there_is_no_product_with_codes_numbers_are_kept(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with activations in fp32, and the start says so."""
    monkeypatch.setattr("vserve.engine.layers.experts.CODES_ON", ())
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    experts, wanted = model.layers[0].mlp.experts, twin.layers[0].mlp.experts
    for name in ("gate_up", "down"):
        found = getattr(experts.method.plain, name)
        torch.testing.assert_close(found, getattr(wanted.method, name), atol=1e-6, rtol=1e-6)
    assert "16-bit products, dequantised × 8" in str(describe(model)["products"])


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("asked", "error"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2), ("bitsandbytes", 0.2)])
def test_experts_are_quantised_on_the_way_in(
    asked: str, error: float, stacked: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also those of one tensor; the router never is."""
    folder = tiny_model("granitemoe", num_hidden_layers=1) if stacked else tiny_model("qwen2_moe", **SIZES)
    model, plain = load(folder, asked), load(folder)
    found, wanted = mixed(model), mixed(plain)
    assert 0 < (found - wanted).norm() / wanted.norm() < error
    assert torch.equal(model.layers[0].mlp.router.weight, plain.layers[0].mlp.router.weight)
    experts = plain.layers[0].mlp.experts.num_experts
    assert describe(model)["quantized"] == 4 + 3 * experts + (0 if stacked else 3)


def test_some_experts_may_be_plain(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path, "fp8")
    file = folder / "quantized" / "model.safetensors"
    tensors, twin = load_file(file), load_file(folder / "twin" / "model.safetensors")
    for path in ("model.layers.0.mlp.experts.2.up_proj", "model.layers.0.mlp.experts.0.down_proj"):
        del tensors[f"{path}.weight_scale"]
        tensors[f"{path}.weight"] = twin[f"{path}.weight"]
    save_file(tensors, file, {"format": "pt"})
    model = load(folder / "quantized")
    torch.testing.assert_close(mixed(model), mixed(load(folder / "twin")), atol=1e-4, rtol=1e-4)
    assert describe(model)["unquantized"] == 4


def test_dummy_experts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for kind in ("awq", "fp8_blocks", "nvfp4"):
        folder = write(tiny_model("qwen2_moe", **SIZES), tmp_path / kind, kind) / "quantized"
        (folder / "model.safetensors").unlink()
        result = mixed(load(folder, load_format="dummy"))
        assert result.isfinite().all() and result.std() > 0


def test_experts_int8_leaves_the_others_as_they_are(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("qwen2_moe", **SIZES), "experts_int8")
    said = describe(model)
    assert said["quantized"] == 3 * 4 and said["unquantized"] == 4 + 3 + 2
    with pytest.raises(ModelError, match="the model has no experts: use --quantization int8"):
        load(tiny_model("llama"), "experts_int8")
