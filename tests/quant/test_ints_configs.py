"""What quantization_config says of the integer formats, what it may not say, and what the files decide."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from vserve.engine.errors import ModelError
from vserve.engine.quant.bitsandbytes import BitsAndBytesScheme, Int8Rows, Table4
from vserve.engine.quant.gptq import AutoRoundScheme, Awq, AwqScheme, Gptq, GptqScheme
from vserve.engine.quant.hqq import Hqq, HqqScheme

UP = "model.layers.0.mlp.up_proj"
QKV = "model.layers.3.self_attn.q_proj"
PACKED = {"qweight": ("I32", (64, 256))}
PLAIN = {"weight": ("BF16", (256, 512))}
GPTQ = {"bits": 4, "group_size": 128, "sym": True}
LAYOUT = "the checkpoint is stored in {}'s own layout: export it again as gptq, awq or compressed-tensors"
HQQ = {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}
WRONG = "quantization_config: "


@pytest.mark.parametrize(
    ("scheme", "config", "message"),
    [
        (GptqScheme, {**GPTQ, "checkpoint_format": "marlin"}, LAYOUT.format("Marlin")),
        (GptqScheme, {**GPTQ, "is_marlin_format": True}, LAYOUT.format("Marlin")),
        (GptqScheme, {**GPTQ, "checkpoint_format": "gptq_marlin_24"}, LAYOUT.format("Marlin 2:4")),
        (GptqScheme, {**GPTQ, "checkpoint_format": "bitblas"}, LAYOUT.format("BitBLAS")),
        (GptqScheme, {**GPTQ, "format": "gptq_p"}, LAYOUT.format("GPTQ-P")),
        (GptqScheme, {**GPTQ, "format": "exl3"}, LAYOUT.format("ExLlamaV3")),
        (
            GptqScheme, {**GPTQ, "checkpoint_format": "other"},
            WRONG + "checkpoint_format is 'other', read are gptq and gptq_v2: export the checkpoint again as gptq, awq "
            "or compressed-tensors",
        ),
        (
            GptqScheme, {**GPTQ, "bits": 5},
            WRONG + "bits is 5, read are 2, 3, 4 and 8: use another checkpoint, or the unquantized model",
        ),
        (
            GptqScheme, {"group_size": 128},
            WRONG + "bits is missing, read are 2, 3, 4 and 8: use another checkpoint, or the unquantized model",
        ),
        (
            GptqScheme, {**GPTQ, "group_size": 0},
            WRONG + "group_size is 0, read are -1 and whole numbers from 1 on: correct config.json",
        ),
        (GptqScheme, {**GPTQ, "sym": "yes"}, WRONG + "sym is 'yes', read are true and false: correct config.json"),
        (
            GptqScheme, {**GPTQ, "dynamic": {"+:(": {"bits": 8}}},
            WRONG + "dynamic has '(', which is no regular expression (missing ), unterminated subpattern at position 0)"
            ": correct config.json",
        ),
        (
            GptqScheme, {**GPTQ, "dynamic": ["x"]},
            WRONG + "dynamic is ['x'], an object of objects belongs there: correct config.json",
        ),
        (
            GptqScheme, {**GPTQ, "dynamic": {".*up": {"bits": 7}}},
            WRONG + "bits is 7, read are 2, 3, 4 and 8: use another checkpoint, or the unquantized model",
        ),
        (
            GptqScheme, {**GPTQ, "modules_in_block_to_quantize": "mlp"},
            WRONG + "modules_in_block_to_quantize is 'mlp', a list of modules' names belongs there: "
            "correct config.json",
        ),
        (AwqScheme, {"bits": 4, "version": "gemv"}, LAYOUT.format("AWQ gemv")),
        (AwqScheme, {"bits": 4, "version": "gemv_fast"}, LAYOUT.format("AWQ gemv_fast")),
        (AwqScheme, {"bits": 4, "version": "marlin"}, LAYOUT.format("Marlin")),
        (AwqScheme, {"bits": 4, "version": "llm-awq"}, LAYOUT.format("llm-awq")),
        (AwqScheme, {"bits": 4, "backend": "llm-awq", "version": "gemm"}, LAYOUT.format("llm-awq")),
        (
            AwqScheme, {"w_bit": 3},
            WRONG + "bits is 3, read is 4: use another checkpoint, or the unquantized model",
        ),
        (
            AutoRoundScheme, {**GPTQ, "packing_format": "auto_round:fp8"},
            WRONG + "packing_format is 'auto_round:fp8', read are auto_round:auto_gptq, auto_round:gptq, auto_gptq, "
            "gptq, auto_round, auto_round:auto_awq, auto_round:awq, auto_awq and awq: export the checkpoint again as "
            "gptq, awq or compressed-tensors",
        ),
        (
            AutoRoundScheme, {**GPTQ, "extra_config": {UP: {"bits": 9}}},
            WRONG + "bits is 9, read are 2, 3, 4, 5, 6, 7 and 8: use another checkpoint, or the unquantized model",
        ),
        (
            HqqScheme, {"quant_config": {"weight_quant_params": {"nbits": 4, "axis": 0}}},
            WRONG + "axis is 0, read is 1: use another checkpoint, or the unquantized model",
        ),
        (
            HqqScheme, {"quant_config": {"weight_quant_params": {"nbits": 7, "axis": 1}}},
            WRONG + "nbits is 7, read are 8, 6, 5, 4, 3, 2 and 1: use another checkpoint, or the unquantized model",
        ),
        (
            HqqScheme, {},
            WRONG + "quant_config is {}, an object with weight_quant_params belongs there: correct config.json",
        ),
        (
            BitsAndBytesScheme, {},
            WRONG + "load_in_4bit is False and load_in_8bit is False, one of them has to be true: correct config.json",
        ),
        (
            BitsAndBytesScheme, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf2"},
            WRONG + "bnb_4bit_quant_type is 'nf2', read are nf4 and fp4: use another checkpoint, or the unquantized "
            "model",
        ),
    ],
)  # fmt: skip
def test_refused(scheme: type, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        scheme(config)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("scheme", "config", "found"),
    [
        (GptqScheme, GPTQ, Gptq(4, 128, True)),
        (GptqScheme, {**GPTQ, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"}, Gptq(4, None, False, 2)),
        (GptqScheme, {**GPTQ, "format": "gptq_v2"}, Gptq(4, 128, True, 2)),
        (GptqScheme, {**GPTQ, "meta": {"quantizer": ["gptqmodel:1.4.2"]}}, Gptq(4, 128, True, borrows=True)),
        (AwqScheme, {"bits": 4, "group_size": 64, "zero_point": True, "version": "GEMM"}, Awq(64)),
        (AwqScheme, {"w_bit": 4, "q_group_size": 128, "zero_point": False}, Awq(128, symmetric=True)),
        (AutoRoundScheme, GPTQ, Gptq(4, 128, True)),
        (AutoRoundScheme, {**GPTQ, "sym": False, "packing_format": "auto_round:auto_awq"}, Awq(128)),
        (AutoRoundScheme, {**GPTQ, "packing_format": "auto_awq"}, Awq(128, symmetric=True)),
        (AutoRoundScheme, {**GPTQ, "packing_format": "auto_gptq"}, Gptq(4, 128, True)),
        (AutoRoundScheme, {**GPTQ, "sym": False, "packing_format": "auto_round"}, Gptq(4, 128, False, 2)),
        (HqqScheme, {"quant_config": HQQ}, Hqq(4, 64)),
        (BitsAndBytesScheme, {"load_in_8bit": True}, Int8Rows()),
        (BitsAndBytesScheme, {"_load_in_4bit": True}, Table4("fp4")),
        (
            BitsAndBytesScheme,
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            Table4("nf4", nested=True),
        ),
    ],
)  # fmt: skip
def test_without_files_the_configuration_decides(scheme: type, config: dict[str, Any], found: object) -> None:
    read = scheme(config)
    assert read.format(UP, None) == found
    assert read.format("lm_head", None) is None
    assert read.format("model.embed_tokens", None) is None


@pytest.mark.parametrize("scheme", [GptqScheme, AwqScheme, AutoRoundScheme])
def test_the_files_decide_what_is_quantised(scheme: type) -> None:
    read = scheme({**GPTQ, "modules_to_not_convert": ["up_proj"], "lm_head": False})
    assert read.format(UP, None) is None
    assert read.format(UP, PACKED) is not None
    assert read.format("lm_head", PACKED) is not None
    assert read.format(QKV, PLAIN) is None
    assert read.format(QKV, {}) is None
    assert read.format(QKV, {"scales": ("F16", (4, 256))}) is not None  # the loader shall say what is missing
    assert read.method in ("gptq", "awq", "auto-round")


def test_marlins_tensors_are_known_by_their_names() -> None:
    with pytest.raises(ModelError) as error:
        GptqScheme(GPTQ).format(UP, {"B": ("I32", (32, 512)), "s": ("F16", (4, 256))})
    assert str(error.value) == LAYOUT.format("Marlin")


def test_gptqs_overrides_are_tried_in_their_order_from_the_start() -> None:
    config = {
        **GPTQ,
        "lm_head": True,
        "dynamic": {
            r"-:.*\.3\.self_attn\.q_proj": {},
            r"+:.*self_attn": {"bits": 8, "group_size": 32},
            r".*mlp\.(?:up|gate)": {"sym": False},
            r"mlp\.down_proj": {"bits": 2},  # no path begins so
        },
    }
    read = GptqScheme(config)
    assert read.format(QKV, None) is None
    assert read.format("model.layers.2.self_attn.q_proj", None) == Gptq(8, 32, True)
    assert read.format("model.layers.2.self_attn.q_proj", PACKED) == Gptq(8, 32, True)
    assert read.format(UP, None) == Gptq(4, 128, False)
    assert read.format("model.layers.2.mlp.down_proj", None) == Gptq(4, 128, True)
    assert read.format("lm_head", None) == Gptq(4, 128, True)
    # left out by the configuration and there nonetheless: as all others
    assert read.format(QKV, PACKED) == Gptq(4, 128, True)


def test_gptq_may_name_what_it_quantised() -> None:
    read = GptqScheme({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert read.format(UP, None) is not None and read.format(QKV, None) is not None
    assert read.format("model.layers.0.mlp.down_proj", None) is None


def test_autorounds_layers_have_bits_of_their_own() -> None:
    config = {
        **GPTQ,
        "block_name_to_quantize": "model.layers, model.others",
        "extra_config": {UP: {"bits": 8, "sym": False}, QKV: {"bits": 16}, ".*o_proj.*": {"bits": 2}},
    }
    read = AutoRoundScheme(config)
    assert read.format(UP, None) == read.format(UP, PACKED) == Gptq(8, 128, False)
    assert read.format(QKV, None) is None
    assert read.format("model.layers.1.self_attn.o_proj", None) == Gptq(2, 128, True)
    assert read.format("model.layers.1.mlp.up_proj", None) == Gptq(4, 128, True)
    assert read.format("visual.layers.1.mlp.up_proj", None) is None
    assert AutoRoundScheme({**GPTQ, "extra_config": {"lm_head": {"bits": 8}}}).format("lm_head", None) == Gptq(
        8, 128, True
    )


def test_hqqs_layers_have_bits_of_their_own() -> None:
    other = {"weight_quant_params": {"nbits": 3, "group_size": None, "axis": 1}}
    read = HqqScheme({"quant_config": {"self_attn.q_proj": other, "mlp.up_proj": HQQ}, "skip_modules": []})
    assert read.format(QKV, None) == Hqq(3, None)
    assert read.format(UP, None) == Hqq(4, 64)
    assert read.format("model.layers.0.mlp.down_proj", None) is None
    assert HqqScheme({"quant_config": HQQ, "skip_modules": ["up_proj"]}).format(UP, None) is None


def test_hqqs_bits_and_groups_are_those_of_the_files() -> None:
    read = HqqScheme({"quant_config": HQQ})
    scale = ("F16", (40, 1))
    for bits, (dtype, rows) in {8: ("U8", 40), 4: ("U8", 20), 3: ("I32", 4), 2: ("U8", 10), 1: ("U8", 5)}.items():
        assert read.format("lm_head", {"W_q": (dtype, (rows, 32)), "scale": scale, "zero": scale}) == Hqq(bits, 32)
    assert read.format(UP, PLAIN) is None
    with pytest.raises(ModelError) as error:
        read.format(UP, {"W_q": ("U8", (32, 40)), "scale": ("F16", (1, 40)), "zero": ("F16", (1, 40))})
    assert str(error.value) == (
        f"{UP}.W_q is U8 [32, 40] and its scale [1, 40]; HQQ's bits along the input that are read are 8, 4, 3, 2 "
        "and 1: quantize the model again with axis=1, without quant_scale, quant_zero and view_as_float"
    )


def test_bitsandbytes_blocks_are_those_of_the_files() -> None:
    read = BitsAndBytesScheme({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    state = {"weight.quant_state.bitsandbytes__fp4": ("U8", (80,))}
    stored = {"weight": ("U8", (4096, 1)), "weight.absmax": ("U8", (64,)), **state}
    assert read.format("lm_head", stored) == Table4("fp4", 128, nested=True, state=80)
    assert read.format(UP, PLAIN) is None
    assert read.format(UP, {"weight": ("I8", (8, 8))}) == Int8Rows()  # the loader shall say that SCB is missing
    assert read.format(UP, state) == Table4("fp4", state=80)  # and here the weight
    with pytest.raises(ModelError) as error:
        read.format(UP, {**stored, "weight.absmax": ("F32", (63,))})
    assert str(error.value) == (
        f"{UP}.weight is U8 [4096, 1] and its absmax [63], which are no blocks of 32 to 4096: download the "
        "checkpoint again"
    )


@pytest.mark.parametrize(
    ("names", "skipped"),
    [
        (["lm_head"], False),
        (["mlp"], False),
        (["up_proj"], True),
        (["model.layers.0"], True),
        ([r"model\..*\.mlp"], True),
    ],
)
def test_what_bitsandbytes_leaves_out(names: list[str], skipped: bool) -> None:
    read = BitsAndBytesScheme({"load_in_8bit": True, "llm_int8_skip_modules": names})
    assert (read.format(UP, None) is None) is skipped
    assert read.format("model.layers.01.mlp.down_proj", None) is not None or names == [r"model\..*\.mlp"]


def test_refusing_needs_no_torch() -> None:
    code = (
        "import sys; from vserve.engine.quant import bitsandbytes, compressed_tensors, gptq, hqq\n"
        "config = dict(bits=4, group_size=128, load_in_4bit=True, quant_config={'weight_quant_params': {'axis': 1}})\n"
        "for scheme in (gptq.GptqScheme, gptq.AwqScheme, gptq.AutoRoundScheme, hqq.HqqScheme, "
        "bitsandbytes.BitsAndBytesScheme):\n"
        "    found = scheme(config)\n"
        "    assert found.format('model.layers.0.mlp.up_proj', None).expected(64, 128)\n"
        "assert compressed_tensors.PackedInts(4).expected(64, 128)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_table_that_is_not_known() -> None:
    with pytest.raises(ModelError) as error:
        BitsAndBytesScheme({"load_in_4bit": True}).format(UP, {"weight.quant_state.bitsandbytes__af4": ("U8", (80,))})
    assert str(error.value) == (
        f"{UP}.weight.quant_state.bitsandbytes__af4: read are nf4 and fp4, use another checkpoint"
    )
