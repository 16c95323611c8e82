"""A generator and an encoder behind one address; encoders alone, through LLM: transformers' numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from vserve import LLM, PoolingParams
from vserve.engine.errors import ConfigError
from vserve.engine.options.config import EngineConfig
from vserve.server.cli.machine import Torch
from vserve.server.cli.main import main
from vserve.server.cli.model_finding import model_finding
from vserve.server.options.config import ServerConfig

TOLERANCE = 1e-5
TEXTS = ["the quick fox", "what is the answer to this question", "a", "there are seven of them " * 3]
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def models(load_module: Any) -> Any:
    return load_module(Path(__file__).parents[1] / "encoder_models.py")


@pytest.fixture(scope="module")
def encoder(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With sentence-transformers' files: the mean of a text with a prompt before it, of 24 tokens at most."""
    folder = models.encoder_checkpoint(tmp_path_factory.mktemp("encoder") / "tiny-bert", "bert")
    prompts = {"query": "what is ", "document": ""}
    found: Path = models.as_sentence_transformer(folder, "mean", prompts=prompts, max_seq_length=24)
    return found


@pytest.fixture(scope="module")
def ranker(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForSequenceClassification as Classifier

    folder: Path = models.encoder_checkpoint(
        tmp_path_factory.mktemp("ranker"), "bert", auto=Classifier, id2label={0: "relevant"}
    )
    return folder


@pytest.fixture(scope="module")
def both(serve: Any, encoder: Path) -> Iterator[httpx.Client]:
    with (
        serve("--embedding-model", str(encoder), "--served-model-name", "demo") as server,
        httpx.Client(base_url=server.url, timeout=240) as http,
    ):
        assert len(server.engine_pids()) == 2
        yield http


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def vectors_of(folder: Path, texts: list[str]) -> torch.Tensor:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return normalize(torch.stack(states), dim=-1)


def scores_of(folder: Path, query: str, documents: list[str]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        pairs = [tokenizer(query, document, return_tensors="pt") for document in documents]
        assert all(pair["token_type_ids"].any() for pair in pairs)
        return [torch.sigmoid(model(**pair).logits).item() for pair in pairs]


@pytest.mark.slow
def test_chat_and_embeddings_from_one_address(both: httpx.Client, encoder: Path) -> None:
    wanted = vectors_of(encoder, TEXTS)
    for model in ({}, {"model": "tiny-bert"}, {"model": str(encoder)}):
        answer = post(both, "/v1/embeddings", input=TEXTS, **model)
        assert answer["model"] == model.get("model", "tiny-bert")
        found = torch.tensor([one["embedding"] for one in answer["data"]])
        assert (found - wanted).abs().max() < TOLERANCE
    assert post(both, "/v1/chat/completions", **CHAT)["model"] == "demo"
    asked = vectors_of(encoder, ["what is the answer"])
    answer = post(both, "/v1/embeddings", input="the answer", prompt_name="query")
    assert (torch.tensor(answer["data"][0]["embedding"]) - asked[0]).abs().max() < TOLERANCE
    answer = post(both, "/v2/embed", texts=["the answer"], input_type="search_query", embedding_types=["float"])
    assert (torch.tensor(answer["embeddings"]["float"][0]) - asked[0]).abs().max() < TOLERANCE


def test_the_first_model_still_embeds_by_its_name(both: httpx.Client, encoder: Path) -> None:
    answer = post(both, "/v1/embeddings", input="Hello!", model="demo")
    assert answer["model"] == "demo" and len(answer["data"][0]["embedding"]) != 64


def test_rankings_go_to_the_second(both: httpx.Client, encoder: Path) -> None:
    query, *documents = vectors_of(encoder, ["the answer", *TEXTS])
    answer = post(both, "/v1/rerank", query="the answer", documents=TEXTS)
    wanted = sorted(((float(query @ one), i) for i, one in enumerate(documents)), reverse=True)
    assert answer["model"] == "tiny-bert" and [one["index"] for one in answer["results"]] == [i for _, i in wanted]
    found = [one["relevance_score"] for one in answer["results"]]
    assert found == pytest.approx([score for score, _ in wanted], abs=TOLERANCE)


def test_both_are_listed_and_counted(both: httpx.Client, encoder: Path) -> None:
    cards = {card["id"]: card for card in both.get("/v1/models").json()["data"]}
    assert cards["demo"]["tasks"] == ["generate", "embed"] and cards["tiny-bert"]["tasks"] == ["embed"]
    assert cards["tiny-bert"]["max_model_len"] == 64
    assert both.get("/v1/models/tiny-bert").json()["id"] == "tiny-bert"
    assert both.get("/server_info").json()["embedding_model"]["names"] == ["tiny-bert", str(encoder)]
    post(both, "/v1/embeddings", input=TEXTS)
    page = both.get("/metrics").text
    assert page.count("# TYPE vllm:engine_healthy gauge") == 1
    for name in ("demo", "tiny-bert"):
        assert f'vllm:engine_healthy{{engine="0",model_name="{name}"}} 1.0' in page


def test_a_text_is_not_asked_of_an_encoder(both: httpx.Client) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hello"})):
        message = post(both, path, 400, model="tiny-bert", **body)["error"]["message"]
        assert message.startswith("This model does not generate text: it makes embeddings")
        assert "reads texts both ways and writes none" in message
    message = post(both, "/v1/embeddings", 404, model="other", input="a")["error"]["message"]
    assert "has `demo`, `tiny-bert`" in message
    assert post(both, "/tokenize", model="tiny-bert", prompt="a")["tokens"][0] == 2  # [CLS]


def test_texts_are_as_long_as_the_folder_says(both: httpx.Client, encoder: Path) -> None:
    """Cut, they keep the special tokens around them, as transformers cuts them."""
    from transformers import AutoModel, AutoTokenizer

    long = " ".join(TEXTS[1:2] * 6)
    message = post(both, "/v1/embeddings", 400, input=long)["error"]["message"]
    assert "24" in message
    answer = post(both, "/v1/embeddings", input=long, truncate_prompt_tokens=24, truncation_side="right")
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    cut = tokenizer(long, truncation=True, max_length=24, return_tensors="pt")
    with torch.inference_mode():
        wanted = normalize(model(**cut).last_hidden_state[0].mean(0), dim=-1)
    assert (torch.tensor(answer["data"][0]["embedding"]) - wanted).abs().max() < TOLERANCE


def test_a_cross_encoder(ranker: Path) -> None:
    """Types of tokens are the tokenizer's; a document that is too long is cut, and its pair keeps its ends."""
    with LLM(str(ranker), device="cpu", cpu_threads=1, engine_in_process=True) as llm:
        found = [output.outputs.score for output in llm.score("what is the answer", TEXTS)]
        assert found == pytest.approx(scores_of(ranker, "what is the answer", TEXTS), abs=TOLERANCE)
        (one,) = llm.score("the dog", " ".join(TEXTS * 3), truncate_prompt_tokens=32)
        assert len(one.prompt_token_ids) <= 32 and one.prompt_token_ids[0] == 2 and one.prompt_token_ids[-1] == 3
        with pytest.raises(ValueError, match="does not generate text: it classifies texts"):
            llm.generate("Hello")


def test_without_files_of_sentence_transformers(models: Any, tmp_path: Path) -> None:
    """The mean, as sentence-transformers has it, of length 1; --pooling chooses another."""
    folder = models.encoder_checkpoint(tmp_path, "modernbert")
    with LLM(str(folder), device="cpu", cpu_threads=1, engine_in_process=True) as llm:
        found = np.array([output.outputs.embedding for output in llm.embed(TEXTS)])
        assert np.abs(found - vectors_of(folder, TEXTS).numpy()).max() < TOLERANCE
        cut = np.array(
            [output.outputs.embedding for output in llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=8))]
        )
        assert np.abs(cut - normalize(torch.tensor(found)[:, :8], dim=-1).numpy()).max() < TOLERANCE


@pytest.mark.slow
def test_dimensions_that_it_does_not_have_end_the_start(encoder: Path) -> None:
    command = [sys.executable, "-m", "vserve.server.cli.main", "--embedding-model", str(encoder), "--device", "cpu",
               "--port", "0", "--pooler-config.dimensions", "4000"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "--pooler-config has dimensions 4000: this model's embeddings have" in done.stderr.splitlines()[-1]


def test_refusals(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--embedding-model-name names a second model"):
        ServerConfig(embedding_model_name="a")
    with pytest.raises(ConfigError, match="no request could tell them apart"):
        ServerConfig(embedding_model="a", served_model_name=("a",))
    broken = shutil.copytree(encoder, tmp_path / "broken")
    file = broken / "config.json"
    file.write_text(file.read_text().replace('"gelu"', '"swish2"'))
    assert main(["serve", "--embedding-model", str(broken)]) == 1
    assert "hidden_act is 'swish2', supported are gelu" in capsys.readouterr().err
    assert main(["serve", str(encoder), "--runner", "generate"]) == 1
    assert "BertModel reads texts both ways, it generates none" in capsys.readouterr().err
    finding = model_finding(EngineConfig(str(encoder)), Torch("2.13"), on_card=False)
    assert "it reads texts whole, without a cache, and generates none" in finding.text
    assert main(["plan", str(encoder), "--rate", "1"]) == 1
    assert "BertModel generates no text: only loads of generation are planned" in capsys.readouterr().err
