"""Loading: transformers is the oracle for tokens and templates; broken folders say what to do."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vserve.engine.errors import ConfigError
from vserve.server.errors import ApiError
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model

MESSAGES = [{"role": "user", "content": "Hello, how are you?"}]


def test_same_as_transformers(text_model: TextModel, model_folder: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(str(model_folder))
    for text in ("Hello world!", "", "<|im_start|>x<|im_end|>", "é 你"):
        for special in (True, False):
            assert text_model.tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special)
    rendered = text_model.tokenizer.render(MESSAGES, {"add_generation_prompt": True})
    expected = oracle.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert text_model.tokenizer.encode(rendered, False) == expected


def test_defaults_are_logged_once(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = load_text_model(str(model_folder), ServerConfig())
    assert model.defaults == {"temperature": 0.7, "top_k": 20}
    assert [r.message for r in caplog.records if "generation_config" in r.message] == [
        "generation_config.json sets the defaults of sampling: temperature 0.7, top_k 20"
    ]
    assert model.names == (str(model_folder),)


def test_eos_tokens(model_folder: Path, tmp_path: Path) -> None:
    assert load_text_model(str(model_folder), ServerConfig()).eos_token_ids == (2, 0)  # tokenizer's, then the list
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").unlink()
    assert load_text_model(str(folder), ServerConfig()).eos_token_ids == (2, 1)  # config.json stands in


def test_chat_template_file(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}|{{ add_generation_prompt }}")
    model = load_text_model(str(model_folder), ServerConfig(chat_template=str(file)))
    rendered = model.tokenizer.render(MESSAGES, {"add_generation_prompt": True})
    assert rendered == "Hello, how are you?|True"
    text = load_text_model(str(model_folder), ServerConfig(chat_template="{{ messages[0].role }}"))
    assert text.tokenizer.render(MESSAGES, {}) == "user"
    for path in (str(tmp_path / "none"), str(tmp_path), "x" * 5000):
        with pytest.raises(ConfigError, match="is no file"):
            ServerConfig(chat_template=path)
    with pytest.raises(ConfigError, match=r"--chat-template: .* at line 2"):
        load_text_model(str(model_folder), ServerConfig(chat_template="a\n{% for %}"))


@pytest.mark.parametrize(
    "template, message",
    [
        ("ok\n{{ ''.__class__.__mro__ }}", "at line 2: access to attribute '__class__'"),
        ("\n\n{{ raise_exception('roles must alternate') }}", "at line 3: roles must alternate."),
        ("{{ 1 // 0 }}", "at line 1"),
        ("{{ messages[7].content.x }}", "at line 1"),
    ],
)
def test_failing_templates(model_folder: Path, tmp_path: Path, template: str, message: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(template)
    model = load_text_model(str(model_folder), ServerConfig(chat_template=str(file)))
    with pytest.raises(ApiError) as error:
        model.tokenizer.render(MESSAGES, {})
    assert error.value.status == 400 and message in error.value.message


def test_a_broken_template_of_the_model(model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Completions need none: the server starts, and says it."""
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("\n\n{% for %}")
    model = load_text_model(str(folder), ServerConfig())
    assert "at line 3" in caplog.text and "--chat-template" in caplog.text
    with pytest.raises(ApiError, match="at line 3"):
        model.tokenizer.render(MESSAGES, {})


@pytest.mark.parametrize("tool_use", ["{{ messages[0].content }}{{ tools }}", "{% for %}"])
def test_templates_are_asked_before_the_first_chat(model_folder: Path, tmp_path: Path, tool_use: str) -> None:
    """Also the one of chats without tools, where those with tools have another."""
    folder = shutil.copytree(model_folder, tmp_path / "m")
    default = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "chat_template.jinja").write_text(default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    tokenizer = load_text_model(str(folder), ServerConfig()).tokenizer
    assert tokenizer.template().can is not None and "tool_use" in tokenizer._templates


def test_no_template(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = load_text_model(str(folder), ServerConfig())
    with pytest.raises(ApiError, match="This model has no chat template"):
        model.tokenizer.render(MESSAGES, {})


def test_generation_config(model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(**options: str) -> TextModel:
        return load_text_model(str(model_folder), ServerConfig(**options))

    assert load(generation_config="vserve").defaults == {}
    assert load(generation_config="vserve").eos_token_ids == (2, 0)  # what ends an answer is no matter of taste
    model = load(override_generation_config='{"temperature": 0.1, "max_new_tokens": 9}')
    assert model.defaults == {"temperature": 0.1, "top_k": 20} and model.max_new_tokens == 9
    assert model.default_sources == {
        "temperature": "flag", "top_k": "generation_config.json", "max_new_tokens": "flag",
    }  # fmt: skip
    other = tmp_path / "generation_config.json"
    other.write_text(json.dumps({"top_p": 0.5, "min_p": 7, "top_k": None, "eos_token_id": 1, "max_new_tokens": 30}))
    for path in (other, tmp_path):
        model = load(generation_config=str(path))
        assert model.defaults == {"top_p": 0.5} and model.max_new_tokens == 30 and model.eos_token_ids == (2, 1)
    assert "min_p 7, which must be at least 0 and at most 1: ignored" in caplog.text
    with pytest.raises(ConfigError, match=r"--generation-config .* is no file"):
        load(generation_config=str(tmp_path / "none"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"temprature": 1}', "'temprature': it may set temperature"),
        ('{"temperature": 3}', "temperature 3, which must be at least 0 and at most 2"),
        ('{"temperature": NaN}', "temperature nan"),
        ('{"top_k": Infinity}', "top_k inf"),
        ('{"top_k": 1.5}', "is no integer"),
        ('{"top_p": true}', "is no number"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(override_generation_config=override)
    assert message in str(error.value)


def test_broken_folders(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json .* is no JSON"):
        load_text_model(str(folder), ServerConfig())
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        load_text_model(str(folder), ServerConfig())
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer of .* --tokenizer"):
        load_text_model(str(folder), ServerConfig())
    # --tokenizer helps, and the model's own files still set the defaults
    (folder / "generation_config.json").unlink()
    assert load_text_model(str(folder), ServerConfig(tokenizer=str(model_folder))).defaults == {}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"port": 70000}, "--port is 70000"),
        ({"root_path": "x"}, "--root-path"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix"),
        ({"metrics_prefix": "1a"}, "--metrics-prefix"),
        ({"sse_ping_interval": -1}, "--sse-ping-interval"),
        ({"served_model_name": ("",)}, "--served-model-name"),
        ({"log_level": "loud"}, "--log-level"),
    ],
)
def test_server_config(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)
