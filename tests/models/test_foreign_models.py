"""Models that transformers' code computes on vserve's cache: the same logits as transformers, packed and in chunks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import read_folder, without_windows
from vserve.engine.errors import ModelError
from vserve.engine.foreign import build as foreign_build
from vserve.engine.foreign.model import TransformersModel
from vserve.engine.foreign.modules import Norm, Part, Product
from vserve.engine.layers.embedding import Embedding
from vserve.engine.layers.experts import Experts
from vserve.engine.layers.linear import Linear
from vserve.engine.quant.method import Quantized
from vserve.engine.start.described import describe
from vserve.engine.weights.loader import count_parameters, load_model

QUICK = (
    "starcoder2", "gpt_neox", "gemma2", "gpt_oss", "granite", "phimoe", "qwen3_moe", "deepseek_v3", "cohere2", "opt",
    "glm4_moe", "llama4_text",
)  # fmt: skip
SLOW = (
    "afmoe", "apertus", "arcee", "cohere", "cwm", "deepseek_v2", "dots1", "ernie4_5", "exaone4", "exaone_moe",
    "flex_olmo", "gemma", "gemma3_text", "gemma4_text", "glm", "glm4", "gpt2", "gpt_bigcode", "granitemoe", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3", "jais2", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax_m2", "ministral3", "mixtral", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon",
    "phi", "phi3", "qwen2_moe", "seed_oss", "smollm3", "solar_open", "stablelm",
)  # fmt: skip
ALL = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
ONE_STEP = ["|", (0, 5), (1, 4)]


@pytest.fixture(scope="module")
def parity(load_module: Callable[[Path], Any]) -> Any:
    """The machinery of the native models' test."""
    return load_module(Path(__file__).with_name("test_model_parity.py"))


def load(folder: Path, change: Callable[[ModelConfig], ModelConfig] = lambda c: c, **options: Any) -> TransformersModel:
    length, exact = options.pop("max_model_len", None), options.pop("exact", False)
    options.setdefault("implementation", "transformers")
    config = change(read_folder(folder, **options))
    model = load_model(
        folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=length or config.max_model_len,
        exact=exact,
    )  # fmt: skip
    assert isinstance(model, TransformersModel)
    return model


def assert_equal(parity: Any, model: TransformersModel, folder: Path, which: slice = slice(None)) -> None:
    expected = parity.oracle(folder)
    found = parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED)
    largest = max(float(logits.abs().max()) for logits in expected)
    assert parity.difference(found[which], expected[which]) < 2e-5 * largest


def test_every_architecture_is_in_one_list(foreign_models: Any) -> None:
    assert sorted((*QUICK, *SLOW)) == sorted(foreign_models.ARCHITECTURES)


@pytest.mark.parametrize("model_type", ALL)
def test_logits_equal_transformers(
    foreign_model: Callable[..., Path], parity: Any, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = foreign_model(model_type)
    model = load(folder)
    assert_equal(parity, model, folder)
    monkeypatch.setattr(
        foreign_build, "experts", lambda x, *_: torch.zeros_like(x)
    )  # the kernels' twin looks at numbers
    with NoSync():
        parity_step(parity, model)


@pytest.mark.parametrize("model_type", ["starcoder2", "qwen3_moe", "gpt_oss", "opt"])
def test_parameters_are_counted_before_they_are_there(foreign_model: Callable[..., Path], model_type: str) -> None:
    model = load(foreign_model(model_type))
    assert count_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


class NoSync(TorchDispatchMode):
    """The host never waits for numbers: on a GPU the whole forward goes into a graph."""

    WAITING = ("_local_scalar_dense", "item", "nonzero", "unique", "_unique2", "masked_select", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def parity_step(parity: Any, model: TransformersModel) -> list[tuple[int, int, Tensor]]:
    """Without a cache, as memory is profiled: attention, whose twin on the CPU does look at numbers, is left out."""
    runner = parity.PagedRunner(model, parity.sequences())
    for layer in model.attention_layers():
        layer.bind(None)
    runner.step(ONE_STEP)
    found: list[tuple[int, int, Tensor]] = runner.step(ONE_STEP, last_only=True)
    return found


def test_the_watch_notices_a_wait() -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoSync():
        bool(torch.ones(1).sum())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_families_of_our_own_give_the_same(
    tiny_model: Callable[..., Path], parity: Any, family: str, overrides: dict[str, Any]
) -> None:
    folder = tiny_model(family, **overrides)
    native, model = parity.load(folder), load(folder)
    ours, theirs = (parity.PagedRunner(m, parity.sequences()).run(parity.CHUNKED) for m in (native, model))
    assert parity.difference(ours, theirs) < 2e-4
    assert [s.window for s in model.kv_specs()] == [s.window for s in native.kv_specs()]
    assert count_parameters(model.config) == count_parameters(native.config)


def test_products_share_their_input_and_give_the_same(foreign_model: Callable[..., Path], parity: Any) -> None:
    folder = foreign_model("granite")
    shared = load(folder)
    parts = [module for module in shared.modules() if isinstance(module, Part)]
    assert len(parts) == 2 * 5 and len({id(part.linear) for part in parts}) == 2 * 2
    assert sum(isinstance(module, Product) for module in shared.modules()) == 2 * 2
    assert sum(isinstance(module, Norm) for module in shared.modules()) == 2 * 2 + 1
    calls = []
    for linear in {part.linear for part in parts}:
        linear.register_forward_hook(lambda *_: calls.append(1))
    runs = parity.PagedRunner(shared, parity.sequences())
    runs.step(ONE_STEP)
    assert len(calls) == 4, "one product a group"
    assert all(part.shared._output is None for part in parts), "and its result is let go"

    def apart(config: ModelConfig) -> ModelConfig:
        layout = replace(config.foreign.layout, siblings=(), norms={})
        return replace(config, foreign=replace(config.foreign, layout=layout))

    alone = load(folder, apart)
    assert not any(isinstance(module, (Part, Norm)) for module in alone.modules())
    assert_equal(parity, alone, folder)


@pytest.mark.parametrize(
    ("model_type", "ours"), [("qwen3_moe", True), ("deepseek_v3", True), ("glm4_moe", True), ("gpt_oss", False)]
)
def test_whose_experts(
    foreign_model: Callable[..., Path], parity: Any, model_type: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = load(foreign_model(model_type)), []
    monkeypatch.setattr(foreign_build, "experts", lambda x, *_: calls.append(len(x)) or torch.zeros_like(x))
    parity.PagedRunner(model, parity.sequences()).step(ONE_STEP)
    assert bool(calls) == ours


def test_embeddings_in_place_of_ids_and_wanted_tokens(foreign_model: Callable[..., Path], parity: Any) -> None:
    folder = foreign_model("gpt_neox")
    model = load(folder)
    (table,) = (module for module in model.modules() if isinstance(module, Embedding))
    model.embedding = table
    results = parity.PagedRunner(model, parity.sequences()).step(parity.WHOLE[0], embeddings=True, last_only=True)
    for which, position, logits in results:
        assert parity.difference([logits], [parity.oracle(folder)[which][position : position + 1]]) < 2e-4


@pytest.mark.parametrize(
    ("model_type", "rope", "length"),
    [
        ("phi3", {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
                  "original_max_position_embeddings": 32, "factor": 2.0, "partial_rotary_factor": 1.0}, 64),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8,
                  "original_max_position_embeddings": 60, "factor": 2.0, "partial_rotary_factor": 1.0}, 60),
        ("stablelm", {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 1.0}, 64),
    ],
    ids=["long", "short", "dynamic"],
)  # fmt: skip
def test_frequencies_are_those_of_the_longest_context(
    foreign_model: Callable[..., Path], parity: Any, tmp_path: Path, model_type: str, rope: Any, length: int
) -> None:
    """transformers takes those of the longest position of the batch: its first sequence here, which is beyond 32."""
    folder = tmp_path / "model"
    shutil.copytree(foreign_model(model_type), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": {"rope_theta": 10000.0, **rope}, "max_position_embeddings": 64}
    if rope["rope_type"] == "longrope":
        config |= {"original_max_position_embeddings": rope["original_max_position_embeddings"], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, max_model_len=length)
    assert_equal(parity, model, folder, slice(0, 1))


def test_a_window_that_is_a_mask_limits_the_context(foreign_model: Callable[..., Path]) -> None:
    """Of an attention that it does not know, transformers makes no mask."""

    def read(model_type: str) -> ModelConfig:
        return read_folder(foreign_model(model_type), implementation="transformers")

    assert read("phimoe").max_position_embeddings == 512 and read("phimoe").max_model_len == 64
    assert read("llama4_text").max_model_len == 64
    assert without_windows(read("phimoe")).max_model_len == 64, "there is nothing that could be switched off"
    told = read("starcoder2")  # here attention is told
    assert told.max_model_len == 512 and without_windows(told).max_model_len == 8
    model = load(foreign_model("starcoder2"), without_windows)
    assert [spec.window for spec in model.kv_specs()] == [0, 0]


def test_corrections_of_the_routing_are_fp32_in_every_model(foreign_model: Callable[..., Path]) -> None:
    folder = foreign_model("dots1")
    config = read_folder(folder, implementation="transformers")
    model = load_model(folder, config, dtype=torch.bfloat16, device=torch.device("cpu"), max_model_len=64)
    assert isinstance(model, TransformersModel) and len(model.experts) == 1
    found = [tensor for name, tensor in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert found and all(tensor.dtype is torch.float32 for tensor in found)


def test_dummy_weights(foreign_model: Callable[..., Path], parity: Any) -> None:
    """Of experts, sinks and biases too; a seed gives the same again."""
    results = []
    for seed in (1, 1, 2):
        config = read_folder(foreign_model("gpt_oss"), implementation="transformers")
        model = load_model(
            foreign_model("gpt_oss"), config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64,
            load_format="dummy", seed=seed,
        )  # fmt: skip
        ((_, _, logits), *_) = parity.PagedRunner(model, parity.sequences()).step(ONE_STEP)
        results.append(logits)
    assert results[0].isfinite().all() and torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_quantized_checkpoints(foreign_model: Callable[..., Path], parity: Any) -> None:
    """Codes of a checkpoint are read by the same schemes as for our own families; here they are made at load."""
    folder = foreign_model("starcoder2")
    model = load(folder, quantization="int8")
    said = describe(model)
    assert said["quantized"] == 2 * 6 and said["unquantized"] == 1
    found = parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED)
    expected = parity.oracle(folder)
    error = torch.cat(found) - torch.cat(expected)
    assert 1e-4 < error.square().mean().sqrt() / torch.cat(expected).std() < 0.05


@pytest.mark.parametrize("kind", ["packed", "fp8_blocks"])
def test_codes_of_a_checkpoint(
    tiny_model: Callable[..., Path], load_module: Callable[[Path], Any], tmp_path: Path, kind: str
) -> None:
    checkpoints = load_module(Path(__file__).parents[1] / "quant" / "checkpoints.py")
    folder = checkpoints.write(tiny_model("llama"), tmp_path, kind)
    model, twin = load(folder / "quantized"), load(folder / "twin")
    layers, plain = dict(model.named_modules()), dict(twin.named_modules())
    compared = 0
    for name, layer in layers.items():
        if isinstance(layer, Linear) and isinstance(layer.method, Quantized):
            x = torch.eye(layer.shape.in_features)
            assert (layer(x) - plain[name](x)).norm() <= 5e-3 * plain[name](x).norm(), name
            compared += 1
    assert compared == 2 * 4


def test_quantized_experts_without_their_configuration_are_refused(
    foreign_model: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(foreign_model("qwen3_moe"), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts.0.gate_proj" in name)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(
        ModelError, match=r"gate_proj.weight is quantized \(stored as F8_E4M3\), and config.json has no"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "kind"), [("qwen3_moe", "nvfp4"), ("dots1", "fp8_blocks"), ("mixtral", "packed")]
)
def test_quantised_experts_mean_what_their_codes_do(
    foreign_model: Callable[..., Path],
    load_module: Callable[[Path], Any],
    parity: Any,
    tmp_path: Path,
    model_type: str,
    kind: str,
) -> None:
    """One each in the checkpoint, under names of two families; beside shared ones."""
    checkpoints = load_module(Path(__file__).parents[1] / "quant" / "checkpoints.py")
    wide = {"moe_intermediate_size": 64, "intermediate_size": 96}
    folder = checkpoints.write(foreign_model(model_type, **wide), tmp_path, kind)
    model, twin = load(folder / "quantized", exact=True), load(folder / "twin", exact=True)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts and all(module.quantised for module in experts)
    assert not any(isinstance(module, Experts) for module in twin.modules())
    found, wanted = (parity.PagedRunner(one, parity.sequences()).run(parity.WHOLE) for one in (model, twin))
    assert parity.difference(found, wanted) < 2e-3 * max(float(row.abs().max()) for row in wanted)


def test_quantised_experts_that_no_kernel_computes_are_refused(foreign_model: Callable[..., Path]) -> None:
    config = read_folder(foreign_model("gpt_oss"), implementation="transformers")
    assert config.foreign is not None
    coded = replace(config, foreign=replace(config.foreign, coded_experts=True))
    with pytest.raises(ModelError, match="GptOssForCausalLM is quantised, and its experts are no plain SwiGLU"):
        count_parameters(coded)


def test_a_checkpoint_without_its_prefix_or_head(
    foreign_model: Callable[..., Path], parity: Any, tmp_path: Path
) -> None:
    """As embedding models are saved, and GPT-2 always was."""
    from safetensors.torch import load_file, save_file

    for model_type, prefix in (("gpt2", "transformer."), ("starcoder2", "model.")):
        folder = tmp_path / model_type
        shutil.copytree(foreign_model(model_type, tie_word_embeddings=True), folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({n.removeprefix(prefix): t for n, t in tensors.items()}, folder / "model.safetensors")
        assert_equal(parity, load(folder), foreign_model(model_type, tie_word_embeddings=True))


def test_what_is_wrong_with_a_checkpoint_is_said(foreign_model: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(foreign_model("starcoder2"), folder)
    tensors = load_file(folder / "model.safetensors")
    removed = tensors.pop("model.layers.1.mlp.c_fc.bias")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.c_fc\.bias"):
        load(folder)
    tensors["model.layers.1.mlp.c_fc.bias"] = removed
    tensors["model.layers.1.mlp.other.weight"] = removed.clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has model\.layers\.1\.mlp\.other\.weight, which Starcoder2"):
        load(folder)
