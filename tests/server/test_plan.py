"""`vserve plan`: what it prints and writes, of a model that is config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from vserve.server.cli import main

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEP = LLAMA_8B | {"num_hidden_layers": 64}  # 28 GiB: more than an L4 has


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main.main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_how_many_cards(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ("--rate", "60", "--in", "1024", "--out", "32", "--ttft", "200", "--tpot", "20", "--output", str(file))
    code, out, _ = run(capsys, folder, *words)
    assert code == 0 and "one card holds" in out and f"vserve {folder} -dp 2" in out
    assert "on h200 (measured: off by 10 % at most on three models' loads): weights 15.0 GiB" in out
    assert "with one of them dead, the load no longer meets it" in out
    rows = json.loads(file.read_text())["rows"]
    assert [row["met"] for row in rows if "met" in row][-1] is True


def test_with_drafts(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    assumed = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
    words = ("--rate", "2", "--out", "32", "--tpot", "3", "--speculative-config")
    code, out, _ = run(capsys, folder, *words, json.dumps(assumed))
    assert code == 0 and "drafts: up to 7 of every request in a step, of which 2 are assumed to hold" in out
    assert out.rstrip().endswith(f"vserve {folder} --spec-method ngram")
    code, _, err = run(capsys, folder, *words, '{"method": "ngram"}')
    assert code == 1 and "how many drafts hold" in err and len(err.splitlines()) == 1


def test_a_trace(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 10 * i, "input_length": 300, "output_length": 5} for i in range(50)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(capsys, folder, "--trace", str(trace))
    assert code == 0 and len(out.splitlines()) == 4
    trace.write_text('{"timestamp": 1}\n')
    code, _, err = run(capsys, folder, "--trace", str(trace))
    assert code == 1 and "line 1: 'input_length' is missing; a line is {" in err


def test_how_many_cards_a_trace_needs(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    """A burst of prompts: as many as it takes that the last of them is answered in time."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([json.dumps({"timestamp": 0, "input_length": 2000, "output_length": 2})] * 40))
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--ttft", "600")
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -dp 3")
    assert "with one of them dead, the load no longer meets it" in out
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--ttft", "600", "--replicas", "2", "-tp", "1")
    assert code == 1 and "none of these meets what is wanted" in out


def test_a_model_that_one_card_does_not_hold(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """It is divided over the fewest that do, and one that is named as it was said."""
    (Path(folder) / "config.json").write_text(json.dumps(DEEP))
    words = (folder, "--gpu", "l4", "--rate", "0.2", "--in", "64", "--out", "4")
    code, out, _ = run(capsys, *words)
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -tp 2")
    assert "on 2 × l4 (from its data sheet: expect 20 % either way), -tp 2: weights 14." in out
    assert "what cards tell each other is computed of data sheets, and was not measured: PCIe 4 x16, 32 GB/s" in out
    assert "nobody is served until that has started again" in out
    code, out, _ = run(capsys, *words, "-pp", "3")
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -pp 3")
    code, _, err = run(capsys, *words, "-tp", "1")
    assert (
        code == 1 and "does not fit one l4: of 20.24 GiB" in err and "take a larger card, more cards (-tp, -pp)" in err
    )


def test_one_answer_that_is_to_come_faster(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    """Than one card can give it: replicas do not help. The picture shows what was asked."""
    file = tmp_path / "plan.svg"
    words = ("--rate", "1", "--in", "1024", "--out", "16", "--tpot", "3.6", "--output", str(file))
    code, out, _ = run(capsys, folder, *words)
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -tp 2")
    assert "one engine of 2 cards (-tp 2) holds" in out and "one card holds" not in out
    texts = [found.text for found in ElementTree.parse(file).iter() if found.text]
    assert f"{folder} on h200" in texts and "time an output token, ms" in texts and "2 (-tp 2)" in texts
    code, out, _ = run(capsys, folder, *words[:6], "--tpot", "1")
    assert code == 1 and "no rate meets this, not even one request at a time" in out


def info(ranks: int, stages: int = 1, vocab_size: int = 128256) -> dict[str, Any]:
    """What a server tells of steps that took 5 ms, and 20 µs a token."""
    sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    steps = [
        {"num_tokens": n, "num_decodes": n, "num_requests": n, "device_seconds": 5e-3 + 20e-6 * n}
        for n in range(1, 201)
    ]
    settings = {name: {"value": value, "source": "flag"} for name, value in sizes.items()}
    return {"settings": settings, "model": {"vocab_size": vocab_size}, "steps": steps}


def test_steps_of_a_server(capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They correct the card for all ways to divide the model, by the way that the server has."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(
        httpx, "get", lambda url, timeout: httpx.Response(200, json=told, request=httpx.Request("GET", url))
    )
    words = (folder, "--rate", "1", "--in", "64", "--out", "16", "--replicas", "1", "--fit", "http://there")
    tpots = []
    for ranks in (1, 2):
        told |= info(ranks)
        code, out, _ = run(capsys, *words, "--output", str(Path(folder) / "plan.json"))
        assert code == 0 and "fitted on 100 steps: products ×" in out
        tpots.append(json.loads((Path(folder) / "plan.json").read_text())["rows"][0]["tpot_p50_ms"])
    assert tpots[0] == pytest.approx(5, rel=0.15) and tpots[1] > 1.3 * tpots[0], "two such cards took as long"
    for answer, message in (
        (info(1, stages=2), "it has --pipeline-parallel-size 2, and what it tells of a step is not of one stage"),
        (
            info(1, vocab_size=7),
            "it serves a model with a vocabulary of 7, and LlamaForCausalLM here has one of 128256",
        ),
        ({"steps": []}, "its /server_info lacks 'settings'"),
    ):
        told.clear()
        told |= answer
        code, _, err = run(capsys, *words)
        assert code == 1 and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "1", "--gpu", "tpu"), "--gpu tpu: there are numbers of h200, h100,"),
        ((), "say what is asked: --rate"),
        (("--rate", "1", "-tp", "3"), "32 attention heads over 8 of keys and values cannot be divided over 3 ranks: "
            "take one of 1, 2, 4, 8, 16, 32"),
        (("--rate", "1", "-pp", "33"), "--pipeline-parallel-size 33: the model has 32 layers"),
        (("--rate", "1", "--fit", "http://127.0.0.1:9"), "--fit http://127.0.0.1:9: "),
    ],
)  # fmt: skip
def test_wrong_options(capsys: pytest.CaptureFixture[str], folder: str, words: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, folder, *words)
    assert code in (1, 2) and message in err and len(err.splitlines()) == 1


def test_so_many_engines_without_a_target(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    words = (folder, "--rate", "10", "--in", "256", "--out", "8", "--replicas", "2")
    code, out, _ = run(capsys, *words)
    assert code == 0 and "with one of them dead, the load still is worked off as it comes" in out
    assert "vserve " not in out, "nothing was searched, so nothing is advised"
