"""Architectures that are refused by name, each with what it lacks here."""

from __future__ import annotations

import pytest

from vserve.engine.errors import ModelError
from vserve.engine.families.refused import reason_of, refusal
from vserve.engine.families.registry import FAMILIES, find_family


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Qwen4ExpForCausalLM", "recurrent state"),
        ("JambaForCausalLM", "recurrent state"),
        ("Mamba2ForCausalLM", "recurrent state"),
        ("FalconMambaForCausalLM", "recurrent state"),
        ("RwkvForCausalLM", "recurrent state"),
        ("Zamba2ForCausalLM", "recurrent state"),
        ("MiniMaxForCausalLM", "recurrent state"),
        ("FalconForCausalLM", "in its own way"),
        ("GPTJForCausalLM", "in its own way"),
        ("BloomForCausalLM", "ALiBi"),
        ("MptForCausalLM", "ALiBi"),
        ("BaichuanForCausalLM", "ALiBi"),
        ("DeepseekV32ForCausalLM", "chooses which keys"),
        ("LLaDAModelLM", "diffusion"),
        ("AlbertForMaskedLM", "an encoder"),
        ("DistilBertModel", "an encoder"),
        ("T5ForConditionalGeneration", "an encoder and a decoder"),
        ("Qwen2AudioForConditionalGeneration", "inputs beside text"),
        ("MistralLarge4ForConditionalGeneration", "chooses which keys"),
        ("LlamaForQuestionAnswering", "marks answers"),
    ],
)
def test_refused_with_its_reason(architecture: str, reason: str) -> None:
    with pytest.raises(
        ModelError, match=rf"architecture {architecture} is not served: .*{reason}.*; use another model"
    ):
        find_family({"architectures": [architecture]})


@pytest.mark.parametrize(
    "architecture",
    [*(family.architecture for family in FAMILIES), "GraniteForCausalLM", "GPTNeoXForCausalLM", "MiniMaxM2ForCausalLM",
     "Ernie4_5ForCausalLM", "ModernBertDecoderForCausalLM", "DeepseekV3ForCausalLM", "Falcon3ForCausalLM"],
)  # fmt: skip
def test_not_refused(architecture: str) -> None:
    assert reason_of(architecture) == "" and refusal([architecture]) is None
