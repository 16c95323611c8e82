"""config.json as the options change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import check_described, read_model_config
from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.settings import choose_max_model_len

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 7e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip


def model_of(folder: Path, content: dict[str, Any], **options: Any) -> ModelConfig:
    values = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, "dtype": "float32"} | content
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder, EngineConfig(str(folder), **options))


def windows_of(model: ModelConfig) -> list[int]:
    return [layer.attention.window for layer in model.layers]


@pytest.mark.parametrize(
    "before",
    [
        {"rope_theta": 7e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
        {"rope_parameters": LLAMA3},
    ],
    ids=["old", "new", "stretched"],
)
def test_rotary_embeddings(tmp_path: Path, before: dict[str, Any]) -> None:
    def rope(**options: Any) -> Any:
        return model_of(tmp_path, before, **options).layers[0].attention.rope

    kind = "llama3" if before == {"rope_parameters": LLAMA3} else "default"
    assert (rope().type, rope().theta) == (kind, 7e5)
    for options in ({"rope_theta": 1e6}, {"hf_overrides": '{"rope_theta": 1e6}'},
                    {"hf_overrides": '{"rope_parameters": {"rope_theta": 1e6}}'}):  # fmt: skip
        assert (rope(**options).type, rope(**options).theta) == (kind, 1e6)
    for options in ({"rope_scaling": json.dumps(YARN)}, {"hf_overrides": json.dumps({"rope_scaling": YARN})},
                    {"hf_overrides": json.dumps({"rope_parameters": YARN})}):  # fmt: skip
        found = rope(**options)
        assert (found.type, found.theta, found.factor, found.low_freq_factor) == ("yarn", 7e5, 4.0, 1.0)
        assert model_of(tmp_path, before, **options).max_model_len == 2048
    both = rope(rope_scaling=json.dumps(YARN), hf_overrides='{"rope_scaling": {"rope_type": "linear", "factor": 2}}')
    assert both.type == "yarn", "the narrower option counts"
    assert rope(hf_overrides='{"rope_scaling": null}').type == "default"


def test_any_value(tmp_path: Path) -> None:
    model = model_of(tmp_path, {"num_hidden_layers": 4}, hf_overrides='{"num_hidden_layers": 2, "vocab_size": 9}')
    assert (len(model.layers), model.vocab_size) == (2, 9)
    with pytest.raises(
        ModelError, match=r"^with hidden_act overridden, config\.json: hidden_act is 'tanh', supported is"
    ):
        model_of(tmp_path, {}, hf_overrides='{"hidden_act": "tanh"}')


def test_what_only_some_families_read(tmp_path: Path) -> None:
    windows = '{"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2}'
    assert windows_of(model_of(tmp_path, {"architectures": ["Qwen3ForCausalLM"]}, hf_overrides=windows)) == [0, 8]


def test_another_config(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    model_of(other, {"vocab_size": 77})
    assert model_of(tmp_path, {"vocab_size": 5}, hf_config_path=str(other)).vocab_size == 77
    changed = model_of(tmp_path, {}, hf_config_path=str(other), hf_overrides='{"vocab_size": 6}')
    assert changed.vocab_size == 6


def test_a_context_without_windows_is_as_long_as_the_window(tmp_path: Path) -> None:
    windows = {"architectures": ["MistralForCausalLM"], "sliding_window": 64, "num_hidden_layers": 3}
    assert windows_of(model_of(tmp_path, windows)) == [64, 64, 64]
    model = model_of(tmp_path, windows, disable_sliding_window=True)
    assert windows_of(model) == [0, 0, 0] and model.max_model_len == 64
    with pytest.raises(
        ConfigError, match=r"65 is beyond the 64 tokens that the model's window .* set it to 64 or less"
    ):
        choose_max_model_len(EngineConfig("m", max_model_len=65, disable_sliding_window=True), model)
    assert model_of(tmp_path, {}, disable_sliding_window=True).max_model_len == 512, "it has no window"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": "{"}, "--hf-overrides is '{': it is no JSON"),
        ({"hf_overrides": "[1]"}, "--hf-overrides is '[1]': it must be a JSON object"),
        ({"hf_config_path": "/nowhere/at/all"}, "--hf-config-path is '/nowhere/at/all': model '/nowhere/at/all' does"),
        ({"rope_theta": 0.0}, "--rope-theta is 0.0: it must be above 0"),
        ({"rope_scaling": '{"factor": 2}'}, 'its "rope_type" is missing, as in \''),
        ({"max_model_len": 0}, "--max-model-len is 0: it must be at least 1; auto or -1 take what fits"),
        ({"max_model_len": -2}, "--max-model-len is -2: it must be at least 1; auto or -1 take what fits"),
        (
            {"max_num_partial_prefills": 1, "max_long_partial_prefills": 2},
            "--max-long-partial-prefills is 2: it must be at most --max-num-partial-prefills (1)",
        ),
        ({"max_num_partial_prefills": 0}, "--max-num-partial-prefills is 0: it must be at least 1"),
        (
            {"long_prefill_token_threshold": 65, "max_model_len": 64},
            "--long-prefill-token-threshold is 65: it must be at most --max-model-len (64)",
        ),
        (
            {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
            "--long-prefill-token-threshold needs chunked prefill: leave out one of it and --no-enable-chunked-prefill",
        ),
        ({"max_logprobs": -2}, "--max-logprobs is -2: it must be at least -1"),
    ],
)
def test_values_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig("m", **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_key_that_nothing_reads_is_refused_before_torch(tiny_model: Any) -> None:
    folder = tiny_model("llama")
    config = EngineConfig(str(folder), hf_overrides='{"rope_teta": 1}')
    for read in (check_described, read_model_config):
        with pytest.raises(ConfigError, match=r"--hf-overrides is '.*': nothing reads 'rope_teta'; it may set [a-z]"):
            read(folder, config)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_rotation_of_a_text_beside_pictures(tmp_path: Path, key: str) -> None:
    """Whatever the nested object says of it, under either name, gives way."""
    text = {key: {"rope_type": "default", "mrope_section": [16, 24, 24]}, "max_position_embeddings": 512}
    before = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "text_config": text}

    def rope(**options: Any) -> Any:
        return model_of(tmp_path, before, **options).layers[0].attention.rope

    assert rope().type == "default"
    found = rope(rope_scaling=json.dumps(YARN), rope_theta=5e6)
    assert (found.type, found.factor, found.theta) == ("yarn", 4.0, 5e6)


def test_another_type_of_rotation_keeps_the_part_that_is_rotated(tmp_path: Path) -> None:
    before = {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    for options in ({}, {"rope_scaling": json.dumps(YARN)}):
        assert {layer.attention.rotary_dim for layer in model_of(tmp_path, before, **options).layers} == {64}
