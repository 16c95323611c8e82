"""Models from quantised checkpoints: what they multiply by, and what is said where a file is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ModelError
from vserve.engine.layers.linear import Linear
from vserve.engine.models.blocks import CausalLM
from vserve.engine.options.config import EngineConfig
from vserve.engine.quant.matrix import Int4Matrix
from vserve.engine.quant.method import Quantized
from vserve.engine.start.described import describe, log_line
from vserve.engine.start.rank import Rank
from vserve.engine.weights.loader import load_model

from .checkpoints import KINDS, write

Q = "model.layers.0.self_attn.q_proj"


def load(folder: Path, asked: str | None = None, **changes: Any) -> CausalLM:
    values: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    config = read_folder(folder, quantization=asked)
    return load_model(folder, config, **(values | changes))


def matrices(model: CausalLM) -> dict[str, torch.Tensor]:
    """Of each Linear, what it makes of the unit vectors: its matrix, transposed."""
    found = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    return {name: layer(torch.eye(layer.shape.in_features)) for name, layer in found.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_multiplies_by_what_its_codes_mean(
    kind: str, family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write(tiny_model(family), tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    expected = matrices(twin)
    quantised = {name for name, layer in model.named_modules() if isinstance(getattr(layer, "method", None), Quantized)}
    assert len(quantised) == 2 * 4
    fast = any(isinstance(module, Int4Matrix) for module in model.modules())
    assert fast == (kind in ("awq", "gptq", "packed"))
    for name, found in matrices(model).items():
        # one summand each: torch's int4 product rounds scale and result to bf16, the others round in fp32
        assert (found - expected[name]).norm() <= (5e-3 if fast else 1e-6) * expected[name].norm(), name
    said = describe(model)
    assert (
        said["quantized"] == 2 * 7 and said["unquantized"] == 1 and said["method"] == model.config.quantization.method
    )
    assert isinstance(said["bytes"], int) and said["bytes"] < sum(w.numel() for n, w in expected.items()) * 2.5
    assert log_line(said).startswith(f"quantization {said['method']}: ")


@pytest.mark.parametrize(
    ("dtype", "fast"), [("float32", False), ("float16", False), ("auto", True), ("bfloat16", True)]
)
def test_a_dtype_that_is_named_is_kept_to(
    dtype: str, fast: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """On the CPU the fast product of 4 bits computes in bfloat16: where float32 was named, everything is in that."""
    folder = write(tiny_model("llama"), tmp_path, "gptq")
    options: dict[str, Any] = {"device": "cpu", "cpu_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 16}
    model = Rank(EngineConfig(str(folder / "quantized"), dtype=dtype, **options), lambda _: None).model
    assert isinstance(model, CausalLM)
    assert any(isinstance(module, Int4Matrix) for module in model.modules()) == fast
    if dtype == "float32":
        expected = matrices(load(folder / "twin"))
        for name, found in matrices(model).items():
            assert (found - expected[name]).norm() <= 1e-6 * expected[name].norm(), name


@pytest.mark.parametrize("kind", ["fp8_blocks", "awq", "nf4"])
def test_latent_attention_takes_its_expansion_apart_however_it_is_stored(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Blocks of 128 x 128 end within heads, and within what queries and keys have in one product."""
    sizes = {"hidden_size": 160, "kv_lora_rank": 160, "q_lora_rank": 96, "qk_nope_head_dim": 64, "v_head_dim": 32}
    sizes |= {"moe_intermediate_size": 160}
    folder = write(tiny_model("deepseek_v3", **sizes), tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    expected = matrices(twin)
    for name, found in matrices(model).items():
        assert (found - expected[name]).norm() <= (5e-3 if kind == "awq" else 1e-6) * expected[name].norm(), name
    for ours, theirs in zip(model.layers, twin.layers, strict=True):
        for part in ("keys", "values"):
            numbers = getattr(theirs.mixer.expansion, part)
            torch.testing.assert_close(getattr(ours.mixer.expansion, part), numbers, rtol=1e-6, atol=1e-6)
    x, last = torch.randn(9, 160), (model.layers[1].mlp, twin.layers[1].mlp)  # experts, of 160 x 160
    found, wanted = (mlp(x, None) for mlp in last)
    assert (found - wanted).norm() <= (2e-2 if kind == "awq" else 1e-5) * wanted.norm()
    assert describe(model)["unquantized"] == 1


@pytest.mark.parametrize(("asked", "error"), [("int8", 0.01), ("fp8", 0.05), ("int4", 0.13), ("bitsandbytes", 0.13)])
def test_quantised_on_the_way_in(asked: str, error: float, tiny_model: Callable[..., Path]) -> None:
    model, plain = load(tiny_model("qwen3"), asked), load(tiny_model("qwen3"))
    expected = matrices(plain)
    for name, found in matrices(model).items():
        difference = (found - expected[name]).norm() / expected[name].norm()
        assert difference == 0 if name == "lm_head" else 0 < difference < error, (name, difference)
    assert describe(model)["quantized"] == 2 * 7


def test_dummy_weights_of_a_quantised_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for kind in KINDS:
        folder = write(tiny_model("llama"), tmp_path / kind, kind) / "quantized"
        (folder / "model.safetensors").unlink()
        model = load(folder, load_format="dummy")
        assert describe(model)["quantized"] == 2 * 7, kind
        for name, found in matrices(model).items():
            assert 0.01 < found.std() < 0.04, (kind, name)


def test_what_other_libraries_leave_in_a_checkpoint(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Scales of the cache, and biases of zeros; others are none of the model's."""
    folder = write(tiny_model("llama"), tmp_path, "gptq") / "quantized"
    file, attention = folder / "model.safetensors", "model.layers.0.self_attn"
    tensors = load_file(file)
    scales = {
        f"{attention}.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "k_proj.output_scale", "kv_scale")
    }
    save_file(tensors | scales | {f"{Q}.bias": torch.zeros(64)}, file, {"format": "pt"})
    load(folder)
    save_file(tensors | {f"{Q}.bias": torch.ones(64)}, file, {"format": "pt"})
    assert refusal(folder).startswith(f"the checkpoint has {Q}.bias, which LlamaForCausalLM has no place for")
    save_file(tensors | {f"{attention}.scale": torch.ones(1)}, file, {"format": "pt"})
    assert refusal(folder).startswith(f"the checkpoint has {attention}.scale, which")


@pytest.mark.parametrize("kind", ["fp8", "int8", "fp8_blocks", "awq", "nf4"])
def test_a_model_does_not_change_with_its_file(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tiny_model("llama"), tmp_path, kind) / "quantized"
    model = load(folder)
    before = matrices(model)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:  # in place, as a mapping would see it
        start = 8 + int.from_bytes(stream.read(8), "little")
        stream.seek(start)
        stream.write(bytes(file.stat().st_size - start))
    for name, after in matrices(model).items():
        assert torch.equal(after, before[name]), name


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed"])
def test_groups_that_end_within_a_row(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """64 columns have as many groups of 33 as of 32, and so the shapes of scales do not tell them apart."""
    folder = write(tiny_model("llama"), tmp_path, kind) / "quantized"
    file, text = folder / "model.safetensors", (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 33'))
    if kind == "gptq":
        assert "g_idx has groups of 32 to 32 columns, each needs 33: " in refusal(folder)
        tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("g_idx")}
        save_file(tensors, file, {"format": "pt"})
    where, _, said = refusal(folder).partition(": ")
    columns = 128 if where.endswith("down_proj") else 64
    assert said == (
        f"groups of 33 columns do not divide a matrix with {columns} of them: correct group_size in "
        "quantization_config, or download the checkpoint again"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_that_claims_more_than_the_files_have(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody dequantised the weights and kept config.json: a plain model, whose size may surprise."""
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": KINDS[kind][1]}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == (
        f"config.json says that the checkpoint is quantized ({KINDS[kind][1]['quant_method']}), and its files hold "
        "plain numbers alone: it is served as they are; to quantize it at load, take quantization_config out and pass "
        "--quantization"
    )
    assert log_line(describe(model)).endswith(": of no matrix, 15 are as they are")
    plain = matrices(load(tiny_model("llama")))
    assert all(torch.equal(found, plain[name]) for name, found in matrices(model).items())


def test_a_cache_alone_may_be_quantised(
    tiny_model: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    claim = {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": claim}
    (folder / "config.json").write_text(json.dumps(config))
    load(folder)
    assert not caplog.records


@pytest.mark.parametrize("asked", [None, "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_that_no_configuration_explains(
    kind: str, asked: str | None, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = write(tiny_model("llama"), tmp_path, kind) / "quantized"
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    said = refusal(folder, asked)
    suffix, by = {
        "awq": ("qweight", "by GPTQ or AWQ"), "gptq": ("qweight", "by GPTQ or AWQ"),
        "packed": ("weight_packed", "by compressed-tensors"), "nvfp4": ("weight_packed", "by compressed-tensors"),
        "nf4": ("weight.absmax", "by bitsandbytes"), "int8": ("weight", "stored as I8"),
    }.get(kind, ("weight", "stored as F8_E4M3"))  # fmt: skip
    name, _, rest = said.partition(" is quantized ")
    assert name.endswith(f"_proj.{suffix}")
    assert rest == (
        f"({by}), and config.json has no quantization_config that says what it means: take the config.json that came "
        "with these weights"
    )


SCALES = {"awq": "scales", "gptq": "scales", "fp8_blocks": "weight_scale_inv", "nf4": "weight.absmax"}


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_no_numbers(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Behind a code an NaN may be any number: some products would make one of it that nobody notices."""
    folder = write(tiny_model("llama"), tmp_path, kind) / "quantized"
    file, suffix = folder / "model.safetensors", SCALES.get(kind, "weight_scale")
    for said in ("nan", "inf", "-inf")[: 1 if kind == "nvfp4" else 3]:  # e4m3 has no infinity
        tensors = load_file(file)
        scales = tensors[f"{Q}.{suffix}"]
        scales.view(-1)[-1:] = torch.tensor(float(said)).to(scales.dtype)
        (tmp_path / "broken").mkdir(exist_ok=True)
        save_file(tensors, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
        (tmp_path / "broken" / "config.json").write_text((folder / "config.json").read_text())
        at = [size - 1 for size in scales.shape]
        assert refusal(tmp_path / "broken") == (
            f"{Q}: {suffix} holds {said} at {at}, finite numbers belong there: download the checkpoint again"
        )


@pytest.mark.parametrize("asked", ["fp8", "int8", "int4", "bitsandbytes"])
def test_numbers_that_are_none_are_not_quantised_on_the_way_in(
    asked: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    for wrong in ("nan", "inf"):
        tensors[f"{Q}.weight"][3, 5] = float(wrong)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert refusal(folder, asked).startswith(f"{Q}: weight holds {wrong} at [3, 5], finite numbers belong there: ")


def test_values_that_mean_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """They are refused by name, where they would else be numbers."""
    folder = write(tiny_model("llama"), tmp_path / "int8", "int8") / "quantized"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    assert "_proj: weight holds codes from -127 to 127, with num_bits 4 they go from -8 to 7: " in refusal(folder)
    folder = write(tiny_model("llama"), tmp_path / "nf4", "nf4") / "quantized"
    file, state = folder / "model.safetensors", f"{Q}.weight.quant_state.bitsandbytes__nf4"
    tensors = load_file(file)
    for wrong, words in ((torch.tensor(list(b"[1, 2]"), dtype=torch.uint8), "holds a list where an object belongs"),
                         (torch.tensor(7, dtype=torch.uint8), "has shape [], a list belongs there")):  # fmt: skip
        save_file(tensors | {state: wrong}, file, {"format": "pt"})
        assert words in refusal(folder)


def refusal(folder: Path, asked: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder, asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_broken_checkpoints(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """One line each, that names the tensor, what was found and what was expected."""
    folder = write(tiny_model("llama"), tmp_path, "awq") / "quantized"
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)

    def change(**changed: Any) -> None:
        kept = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
        save_file(kept, file, {"format": "pt"})

    change(**{f"{Q}.scales": None})
    assert refusal(folder) == (
        f"the checkpoint lacks {Q}.scales, and has lm_head.weight, model.embed_tokens.weight, "
        "model.layers.0.input_layernorm.weight, …: the weights are incomplete or do not fit config.json, download both "
        "again"
    )
    change(**{f"{Q}.scales": tensors[f"{Q}.scales"].int()})
    assert refusal(folder) == (
        f"{Q}.scales is stored as I32 in model.safetensors, expected F16 or BF16 or F32: the weights do not fit "
        "config.json, download both again"
    )
    change(**{f"{Q}.g_idx2": torch.zeros(3)})
    assert f"the checkpoint has {Q}.g_idx2, which LlamaForCausalLM has no place for" in refusal(folder)
    change()
    config["quantization_config"]["group_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder) == (
        f"{Q}.qzeros has shape [2, 8] in model.safetensors, config.json makes it [4, 8]: the weights and the config "
        "are not of one model, download both again"
    )
    assert refusal(folder, "gptq") == "the checkpoint is AWQ, 4 bit: leave --quantization gptq out"
