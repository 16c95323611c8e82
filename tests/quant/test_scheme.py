"""What a folder and --quantization say makes a scheme: each name is read, quantised at load, or refused in a line."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ModelError
from vserve.engine.quant.methods import ALIASES, AT_LOAD, FITS, NOT_AT_LOAD, READ, REFUSED
from vserve.engine.quant.online import KINDS, OnlineScheme
from vserve.engine.quant.scheme import make_scheme, read_quantization

# What --quantization has been given over the years: of vLLM, and what people pass.
NAMES = [
    "aqlm", "awq", "deepspeedfp", "tpu_int8", "fp8", "ptpc_fp8", "fbgemm_fp8", "modelopt", "nvfp4", "marlin",
    "gguf", "gptq_marlin_24", "gptq_marlin", "awq_marlin", "gptq", "compressed-tensors", "bitsandbytes", "qqq",
    "hqq", "experts_int8", "neuron_quant", "ipex", "quark", "moe_wna16", "squeezellm", "deepgemm_fp8",
    "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "bitblas", "gptq_bitblas", "torchao", "auto-round",
    "inc", "rtn", "mxfp4", "mxfp8", "petit_nvfp4", "auto_awq", "auto_gptq", "cpu_awq", "fp_quant", "humming",
    "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token",
    "int8", "int4", "exl2", "exl3", "eetq", "vptq", "spqr", "higgs", "quip", "bitnet", "quanto", "marlin_24",
    "w8a8_int8", "w8a8_fp8", "paroquant", "AWQ", "GPTQ", "FP8", "Compressed_Tensors",
]  # fmt: skip
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "auto_round": {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
        "packing_format": "auto_round:auto_gptq",
    },
    "hqq": {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
    },
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed_tensors": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"NVFP4A16": ["Linear"]},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "mxfp8": {"quant_method": "mxfp8"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "quark": {
        "quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
    },
    "gguf_file": {"quant_method": "gguf_file", "type": "Q4_K"},
}  # fmt: skip
# What each checkpoint may be called.
RIGHT: dict[str, str] = {
    "awq": "awq AWQ auto_awq awq_marlin cpu_awq marlin moe_wna16 inc auto-round",
    "gptq": "gptq GPTQ auto_gptq gptq_marlin marlin moe_wna16 inc auto-round",
    "auto_round": "auto-round inc gptq GPTQ awq AWQ",
    "hqq": "hqq",
    "bitsandbytes": "bitsandbytes",
    "compressed_tensors": "compressed-tensors Compressed_Tensors nvfp4 petit_nvfp4",
    "fp8": "fp8 FP8 deepgemm_fp8",
    "fbgemm_fp8": "fbgemm_fp8",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "modelopt": "modelopt modelopt_fp4 nvfp4 petit_nvfp4",
    "quark": "quark",
    "gguf_file": "gguf",
}
AT_LOAD_BY_NAME = {
    "experts_int8": "int8",
    "fp8": "fp8", "FP8": "fp8", "ptpc_fp8": "fp8", "fp8_per_channel": "fp8", "fp8_per_tensor": "fp8",
    "fp8_per_block": "fp8_blocks", "int8": "int8", "int8_per_channel_weight_only": "int8", "int4": "int4",
    "bitsandbytes": "nf4",
}  # fmt: skip


def refusal(config: dict[str, Any] | None, asked: str | None) -> str:
    """The line, which ends in what to do."""
    with pytest.raises(ModelError) as error:
        make_scheme(config, asked)
    line = str(error.value)
    assert "\n" not in line and len(line) < 400
    assert any(word in line for word in ("leave", "Serve the unquantized", "use a checkpoint", "nearest is --quant")), (
        line
    )
    return line


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_a_checkpoint_that_is_not_quantised(name: str) -> None:
    if name in AT_LOAD_BY_NAME:
        scheme = make_scheme(None, name)
        assert isinstance(scheme, OnlineScheme) and scheme.method == AT_LOAD_BY_NAME[name]
        return
    line = refusal(None, name)
    assert f"--quantization {name}" in line
    assert "unknown" not in line and repr(name) not in line


@pytest.mark.parametrize("method", READ)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_every_checkpoint(name: str, method: str) -> None:
    config = CHECKPOINTS[method]
    if name in RIGHT[method].split():
        scheme = make_scheme(config, name)
        assert scheme is not None and scheme.method == config["quant_method"].removesuffix("_file")
        return
    line = refusal(config, name)
    assert line.startswith(f"the checkpoint is {READ[method][2]}")
    assert line.endswith(f": leave --quantization {name} out")


@pytest.mark.parametrize("method", READ)
@pytest.mark.parametrize("asked", [None, "", "none", "None", "auto"])
def test_nothing_asked(method: str, asked: str | None) -> None:
    scheme = make_scheme(CHECKPOINTS[method], asked)
    assert scheme is not None and scheme.method == CHECKPOINTS[method]["quant_method"].removesuffix("_file")
    assert make_scheme(None, asked) is None and make_scheme({}, asked) is None


@pytest.mark.parametrize("method", READ)
def test_schemes_and_formats_go_to_other_processes(method: str) -> None:
    scheme = make_scheme(CHECKPOINTS[method], None)
    assert scheme is not None
    again = pickle.loads(pickle.dumps(scheme))
    for path in ("model.layers.0.mlp.up_proj", "lm_head"):
        formats = (
            scheme.format(path, None),
            again.format(path, None),
            pickle.loads(pickle.dumps(scheme.format(path, None))),
        )
        assert len({None if format is None else format.name for format in formats}) == 1


def test_a_mismatch_names_the_checkpoint() -> None:
    assert refusal(CHECKPOINTS["awq"], "gptq") == "the checkpoint is AWQ, 4 bit: leave --quantization gptq out"
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert refusal(modelopt, "modelopt_fp4") == "the checkpoint is ModelOpt, FP8: leave --quantization modelopt_fp4 out"
    bnb = CHECKPOINTS["bitsandbytes"]
    assert refusal(bnb, "fp8") == "the checkpoint is bitsandbytes, 4 bit: leave --quantization fp8 out"
    line = refusal({**CHECKPOINTS["compressed_tensors"], "config_groups": {}}, "mxfp4")
    assert line == "the checkpoint is compressed-tensors, nvfp4-pack-quantized: leave --quantization mxfp4 out"
    assert make_scheme(modelopt, "modelopt_fp8") is not None
    preset = {"quant_method": "compressed-tensors", "config_groups": {"FP8_DYNAMIC": ["Linear"]}}
    line = refusal(preset, "awq")
    assert line == "the checkpoint is compressed-tensors, FP8_DYNAMIC: leave --quantization awq out"
    groups = {"quant_method": "compressed-tensors", "config_groups": {"MXFP4A16": ["Linear"]}}
    assert make_scheme(groups, "mxfp4") is not None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_checkpoints_that_are_not_read(name: str) -> None:
    for spelled in (name, name.upper(), name.replace("_", "-")):
        line = refusal({"quant_method": spelled, "bits": 4}, None)
        label, nearest = REFUSED[name]
        assert line.startswith(
            f"the checkpoint is quantized with {label}, which vserve does not read; nearest: {nearest}."
        )
        assert line.endswith("Serve the unquantized model with --quantization fp8")
        assert refusal({"quant_method": spelled, "bits": 4}, name) == line


@pytest.mark.parametrize("name", sorted(NOT_AT_LOAD))
def test_the_nearest_that_is_done_at_load(name: str) -> None:
    line = refusal(None, name)
    assert line.endswith(f"does not quantize so at load: the nearest is --quantization {NOT_AT_LOAD[name]}")


def test_names_that_nobody_knows() -> None:
    line = refusal({"quant_method": "zip9000"}, None)
    assert line == (
        "the checkpoint is quantized with 'zip9000', which vserve does not read; nearest: GPTQ, AWQ, compressed-"
        "tensors or FP8. Serve the unquantized model with --quantization fp8"
    )
    line = refusal(None, "zip9000")
    assert line.startswith("--quantization zip9000 is not served: use a checkpoint of GPTQ, AWQ, compressed-tensors")


def test_every_method_of_transformers_is_known() -> None:
    quantization_config = pytest.importorskip("transformers.utils.quantization_config")
    known = READ.keys() | ALIASES.keys() | REFUSED.keys()
    for method in quantization_config.QuantizationMethod:
        assert method.value.lower().replace("-", "_") in known, method


def test_the_tables_hold_together() -> None:
    assert set(ALIASES.values()) <= READ.keys()
    assert not READ.keys() & REFUSED.keys() and not ALIASES.keys() & REFUSED.keys()
    assert {method for fits in FITS.values() for method, _ in fits} <= READ.keys()
    assert {kind for kind, _ in AT_LOAD.values()} == KINDS.keys()
    assert set(NOT_AT_LOAD.values()) <= AT_LOAD.keys()
    assert not NOT_AT_LOAD.keys() & AT_LOAD.keys()
    assert all(name == name.lower().replace("-", "_") for name in (*READ, *FITS, *AT_LOAD, *NOT_AT_LOAD, *REFUSED))
    assert RIGHT.keys() == CHECKPOINTS.keys() == READ.keys()


def test_something_else_than_asked_for_is_said() -> None:
    for name, (kind, note) in AT_LOAD.items():
        scheme = make_scheme(None, name)
        assert isinstance(scheme, OnlineScheme)
        assert scheme.note == note and scheme.method == kind
    assert "finer" in (AT_LOAD["fp8_per_tensor"][1] or "") and AT_LOAD["fp8"][1] is None


def test_where_the_configuration_is_found(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4}
    assert read_quantization(tmp_path, {}) is None
    assert read_quantization(tmp_path, {"quantization_config": None}) is None
    assert read_quantization(tmp_path, {"quantization_config": awq}) == awq
    assert read_quantization(tmp_path, {"text_config": {"quantization_config": awq}}) == awq
    old = read_quantization(tmp_path, {"compression_config": {"format": "dense"}})
    assert old == {"format": "dense", "quant_method": "compressed-tensors"}
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    for name, content, method in (
        ("hf_quant_config.json", modelopt, "modelopt"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_quantization(tmp_path, {}) == {**content, "quant_method": method}
    assert read_quantization(tmp_path, {"quantization_config": awq}) == awq
    told = read_quantization(tmp_path, {"quantization_config": {"quant_method": "modelopt"}})
    assert told is not None
    scheme = make_scheme(told, "modelopt")
    assert scheme is not None and scheme.format("model.layers.0.mlp.up_proj", None) is not None
    assert scheme.format("lm_head", None) is None


@pytest.mark.parametrize(
    "config, method",
    [
        ({"quant_algo": "NVFP4"}, "modelopt"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"w_bit": 4, "q_group_size": 128}, "awq"),
        ({"bits": 4, "group_size": 128, "desc_act": True}, "gptq"),
        ({"bits": 4, "group_size": 64}, "mlx"),
    ],
)
def test_a_configuration_without_its_method(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    assert read_quantization(tmp_path, {"quantization_config": config}) == {**config, "quant_method": method}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for wrong, message in (("nf4", "is 'nf4', an object belongs there"), ({"x": 1}, "has no quant_method"), ([], "is")):
        with pytest.raises(ModelError, match=message):
            read_quantization(tmp_path, {"quantization_config": wrong})
    file = tmp_path / "quantize_config.json"
    for text, message in (("{", "cannot read .*download it again"), ("[]", "holds a list where an object belongs")):
        file.write_text(text)
        with pytest.raises(ModelError, match=message):
            read_quantization(tmp_path, {})
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelError, match="download it again"):
        read_quantization(tmp_path, {})


PROGRAM = """
import json, sys
from pathlib import Path
from vserve.engine.files.model_file import ModelError
from vserve.engine.quant.scheme import make_scheme, read_quantization
configs, names = json.loads(sys.stdin.read())
made = refused = 0
for config in [None, *configs]:
    for name in names:
        try:
            found = None if config is None else read_quantization(Path("."), {"quantization_config": config})
            scheme = make_scheme(found, name)
            if scheme is not None:
                made += 1
                stored = {"weight": ("F8_E4M3", (128, 128)), "weight_scale": ("F32", ())}
                plain = {"weight": ("BF16", (8, 8))}
                for path, headers in (("model.layers.0.mlp.up_proj", stored), ("lm_head", plain)):
                    scheme.format(path, None)
                    scheme.format(path, headers)
        except ModelError:
            refused += 1
print(made, refused, "torch" in sys.modules)
"""


def test_refusals_come_before_torch() -> None:
    """Of every checkpoint with every name, what is stored how by the headers included. A GGUF file's tensors are looked
    at before: its scheme finds nothing more to refuse."""
    configs = [CHECKPOINTS[method] for method in READ if method != "gguf_file"] + [
        {"quant_method": name} for name in REFUSED
    ]
    told = json.dumps([configs, [None, *NAMES]])
    result = subprocess.run([sys.executable, "-c", PROGRAM], input=told, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    made, refused, torch = result.stdout.split()
    assert torch == "False"
    assert int(made) > 20 and int(refused) > 1000
