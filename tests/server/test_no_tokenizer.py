"""--skip-tokenizer-init: prompts are token ids, answers are token ids, and text is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.server.offline.prompt_like import tokenised
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model


@pytest.fixture
def model(model_folder: Path, tmp_path: Path) -> TextModel:
    """There is no file of a tokenizer at all."""
    config = json.loads((model_folder / "config.json").read_text()) if (model_folder / "config.json").exists() else {}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama", "eos_token_id": 2}))
    return load_text_model(str(tmp_path), ServerConfig(skip_tokenizer_init=True, served_model_name=("test",)))


@pytest.fixture
def client(new_client: Any, model: TextModel, engine: Any) -> Any:
    engine.script = lambda request: [[5], [6, 7], [2]]
    return new_client(model=model)


def test_token_ids_go_in_and_come_out(client: Any, engine: Any, model: TextModel) -> None:
    assert model.eos_token_ids == (2,)
    answer = client.post("/v1/completions", {"prompt": [3, 4], "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [5, 6, 7, 2], "stop")
    assert choice["prompt_token_ids"] == [3, 4] and list(engine.submitted[-1].token_ids) == [3, 4]
    stream = client.post("/v1/completions", {"prompt": [3, 4], "max_tokens": 9, "stream": True}).text
    events = [json.loads(event[6:]) for event in stream.split("\n\n")[:-2]]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []]
    assert ids == [5, 6, 7, 2] and not any(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "Hello"}, "prompt"),
        ("/v1/completions", {"prompt": ["Hello", "you"]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "messages"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, None),
        ("/v1/responses", {"input": "Hi"}, None),
        ("/v1/embeddings", {"input": "Hi"}, "prompt"),
        ("/tokenize", {"prompt": "Hello"}, "prompt"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
        ("/v1/completions", {"prompt": [3], "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": [3], "bad_words": ["x"]}, "bad_words"),
        ("/v1/completions", {"prompt": [3], "guided_regex": "a+"}, "guided_regex"),
    ],
)
def test_text_is_refused(client: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = client.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "this server has n" in error["message"].lower() and "tokenizer" in error["message"]
    assert param is None or error["param"] == param


def test_what_a_tokenizer_is_cannot_be_asked(client: Any) -> None:
    assert client.request("GET", "/tokenizer_info").status_code == 400
    assert client.request("GET", "/v1/models").status_code == 200


def test_offline_prompts(model: TextModel) -> None:
    assert tokenised([[3, 4]], model.tokenizer) == [(None, [3, 4])]
    with pytest.raises(ValueError, match=r"\(skip_tokenizer_init\)"):
        tokenised("Hello", model.tokenizer)


def test_options_of_a_tokenizer_contradict_it() -> None:
    for name, value in {"tokenizer": ".", "chat_template": "{{ messages }}"}.items():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no meaning with --skip-tokenizer-init"):
            ServerConfig(skip_tokenizer_init=True, **{name: value})
