"""Who computes a model: --model-impl and --trust-remote-code, and what is refused of transformers' and others' code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import import_utils

from vserve.engine.describe.model_config import Foreign, _decoders, choose
from vserve.engine.describe.reading import check_model, parse_model_config, read_folder, read_model_config
from vserve.engine.describe.torchvision import hide_broken_torchvision
from vserve.engine.errors import ModelError
from vserve.engine.families.registry import FAMILIES
from vserve.engine.options.config import EngineConfig
from vserve.engine.weights.loader import load_model

# A folder's own code: Llama under another name, whose attention goes through the interface or does not.
CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

open({marker!r}, "a").write("ran\\n")


class HomemadeAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        {attention}


class HomemadeModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = HomemadeAttention(config, index)
        self.post_init()


class HomemadeForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = HomemadeModel(config)
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * config_scale(self.config)
        return output


def config_scale(config):
    return config.logits_times
"""
DISPATCHED = "return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)"
ITS_OWN = "return self.o_proj(self.v_proj(hidden_states).repeat(1, 1, 2)), None"


def homemade(source: Path, folder: Path, attention: str = DISPATCHED) -> Path:
    shutil.copytree(source, folder)
    code = CODE.format(marker=str(folder / "ran"), attention=attention)
    (folder / "modeling_homemade.py").write_text(code)
    file = folder / "config.json"
    changes = {
        "architectures": ["HomemadeForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_homemade.HomemadeForCausalLM"},
        "logits_times": 0.25,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


@pytest.fixture(scope="module")
def parity(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("test_model_parity.py"))


def named(*architectures: str, **values: Any) -> dict[str, Any]:
    return {"architectures": list(architectures), **values}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_auto_takes_a_family_of_our_own(family: Any) -> None:
    for implementation in ("auto", "vserve", "vllm"):
        assert choose(named(family.architecture), implementation) is family
    if not family.foreign:
        with pytest.raises(ModelError, match=r"--model-impl transformers: .* keeps recurrent states, .*leave it out"):
            choose(named(family.architecture), "transformers")
        return
    if family.architecture in _decoders().values():  # not the text half of others
        found = choose(named(family.architecture), "transformers")
        assert isinstance(found, Foreign) and found.architecture == family.architecture


@pytest.mark.parametrize(
    ("raw", "architecture"),
    [
        (
            named("PhiMoEForCausalLM", model_type="phimoe", auto_map={"AutoModelForCausalLM": "m.Phi"}),
            "PhimoeForCausalLM",
        ),
        (named("InternLM3ForCausalLM", model_type="internlm3", auto_map={"AutoModelForCausalLM": "m.I"}), "InternLM3"),
        (named("MyOwnForCausalLM", model_type="qwen3"), "Qwen3ForCausalLM"),
        (named("MyOwnLMHeadModel", model_type="starcoder2"), "Starcoder2ForCausalLM"),
        (named("XverseForCausalLM", model_type="xverse"), "LlamaForCausalLM"),
        ({"model_type": "kimi_k2"}, "DeepseekV3ForCausalLM"),
        ({"model_type": "qwen2_5_vl"}, "Qwen2_5_VLForConditionalGeneration"),
    ],
)
def test_another_class_is_served_as_its_model_type_says(raw: dict[str, Any], architecture: str) -> None:
    assert choose(raw).architecture.startswith(architecture)


@pytest.mark.parametrize(
    "raw",
    [
        named("MyForCausalLM", model_type="qwen3", auto_map={"AutoModelForCausalLM": "m.My"}),  # code of its own
        named("MyRewardModelling", model_type="qwen3"),
        named("MambaForCausalLM", model_type="llama"),
        named("MyForCausalLM", model_type="mine"),
    ],
)
def test_another_class_is_no_guess(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        choose(raw)


def test_a_start_names_the_class_that_it_takes_for_another() -> None:
    (line,) = parse_model_config(named("MyForCausalLM", model_type="qwen3")).log_lines(text_is_enough=False)
    assert line == "MyForCausalLM is no class known here: it is computed as Qwen3ForCausalLM, by its model_type"
    assert not list(parse_model_config(named("Qwen3ForCausalLM", model_type="qwen3")).log_lines(text_is_enough=False))


@pytest.mark.parametrize("dtype", [{"dtype": "auto"}, {"torch_dtype": "auto"}, {"text_config": {"dtype": "float16"}}])
def test_a_dtype_that_is_left_to_the_weights_or_to_the_text(dtype: dict[str, Any]) -> None:
    found = parse_model_config(named("LlavaForConditionalGeneration", **dtype)).dtype
    assert found is (torch.float16 if "text_config" in dtype else torch.float32)


def test_auto_takes_transformers_where_there_is_none() -> None:
    found = choose(named("Starcoder2ForCausalLM", model_type="starcoder2"))
    assert isinstance(found, Foreign) and found.architecture == "Starcoder2ForCausalLM" and found.code is None
    assert choose({"model_type": "starcoder2"}).architecture == "Starcoder2ForCausalLM"
    assert choose(named("Starcoder2Model")).architecture == "Starcoder2ForCausalLM", "an embedding model's"
    with pytest.raises(ModelError, match="architecture Starcoder2ForCausalLM is not supported: serve one of Llama"):
        choose(named("Starcoder2ForCausalLM"), "vserve")


@pytest.mark.parametrize("implementation", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (named("NoSuchForCausalLM"), "architecture NoSuchForCausalLM is not supported: "),
        (named("JambaForCausalLM"), "JambaForCausalLM is not served: its layers keep a recurrent state"),
        (named("FalconForCausalLM"), "FalconForCausalLM is not served: its attention is computed in its own way"),
        (named("BloomForCausalLM"), "BloomForCausalLM is not served: .*ALiBi"),
        (named("DebertaForMaskedLM"), "DebertaForMaskedLM is not served: it is an encoder"),
        (named("T5ForConditionalGeneration"), "T5ForConditionalGeneration is not served: it has an enc"),
        (named("MllamaForConditionalGeneration"), "MllamaForConditionalGeneration is not served: it needs"),
        (
            named("HomeForCausalLM", auto_map={"AutoModelForCausalLM": "m.Home"}),
            "HomeForCausalLM is code .*add --trust",
        ),
    ],
)
def test_refused_by_name(raw: dict[str, Any], words: str, implementation: str) -> None:
    with pytest.raises(ModelError, match=words):
        choose(raw, implementation)


def test_names_are_looked_up_without_torch_or_transformers() -> None:
    code = """
import sys, time
started = time.monotonic()
from vserve.engine.describe.model_config import choose
from vserve.engine.files.model_file import ModelError
assert choose({"architectures": ["GPTNeoXForCausalLM"]}).architecture == "GPTNeoXForCausalLM"
try:
    choose({"architectures": ["NoSuchForCausalLM"]})
except ModelError:
    print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("model_type", "overrides", "words"),
    [
        ("diffllama", {}, "DiffLlamaForCausalLM is not served: .*self_attn attends twice in one forward"),
        ("doge", {}, "DogeForCausalLM is not served: it makes a mask of its own"),
        ("llama4_text", {"attn_temperature_tuning": True}, "is not served: it counts the tokens of a batch by itself"),
        ("gpt_neox", {"hidden_act": "no_such_act"}, "transformers cannot build GPTNeoXForCausalLM .*no_such_act"),
        ("starcoder2", {"max_position_embeddings": 0}, "max_position_embeddings is 0, a whole number above 0"),
    ],
)
def test_refused_by_a_probe(foreign_models: Any, model_type: str, overrides: dict[str, Any], words: str) -> None:
    raw = foreign_models.foreign_config(model_type).to_dict() | overrides
    raw["architectures"] = None  # by its type
    with pytest.raises(ModelError, match=words) as caught:
        parse_model_config(raw, "transformers")
    assert "\n" not in str(caught.value)


def test_a_folders_own_code_runs_only_where_it_is_trusted(
    tiny_model: Callable[..., Path], parity: Any, tmp_path: Path
) -> None:
    folder = homemade(tiny_model("llama"), tmp_path / "homemade")
    for implementation in ("auto", "transformers"):
        with pytest.raises(ModelError, match=r"HomemadeForCausalLM is code of the model's own .*--trust-remote-code"):
            check_model(folder, implementation=implementation)
    assert not (folder / "ran").exists()
    check_model(folder, trusted=True)
    assert not (folder / "ran").exists(), "to look at config.json runs nothing"
    config = read_model_config(folder, EngineConfig(str(folder), trust_remote_code=True))
    assert (folder / "ran").exists() and config.foreign.code == folder
    model = load_model(folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    found = parity.PagedRunner(model, parity.sequences()).run(parity.CHUNKED)
    expected = [0.25 * logits for logits in parity.oracle(tiny_model("llama"))]
    assert parity.difference(found, expected) < 2e-4


def test_a_family_of_our_own_needs_no_code(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = homemade(tiny_model("llama"), tmp_path / "homemade")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    for trusted in (False, True):
        assert read_folder(folder, trusted=trusted).foreign is None
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (ITS_OWN, "its attention does not go through transformers' attention interface"),
        ("raise OSError('disk\\nfull')", "a forward without numbers ends with OSError: disk full"),
        ("1 / 0", "a forward without numbers ends with ZeroDivisionError"),
        ("if hidden_states.sum() > 0: pass", "it looks at the numbers it computes"),
    ],
)
def test_code_that_cannot_be_served_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, attention: str, words: str
) -> None:
    folder = homemade(tiny_model("llama"), tmp_path / "homemade", attention)
    with pytest.raises(ModelError, match=f"HomemadeForCausalLM is not served: .*{words}"):
        read_folder(folder, trusted=True)


def test_code_that_does_not_load_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = homemade(tiny_model("llama"), tmp_path / "homemade")
    (folder / "modeling_homemade.py").write_text("import no_such_module_of_anybody\n")
    with pytest.raises(ModelError, match=r"cannot load the code of HomemadeForCausalLM.*no_such_module_of_anybody"):
        read_folder(folder, trusted=True)


def test_a_torchvision_of_another_torch_is_not_there_for_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__").with_suffix(".py").write_text(
        "from . import part\nraise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    assert import_utils._is_package_available("torchvision")[0]
    try:
        hide_broken_torchvision()
        assert not import_utils._is_package_available("torchvision")[0] and "torchvision.part" not in sys.modules
    finally:
        sys.modules.pop("torchvision", None)
    assert "torchvision cannot be imported (RuntimeError: operator torchvision::nms does not" in caplog.text
