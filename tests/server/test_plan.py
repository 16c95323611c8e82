"""`vserve plan`: what it prints and writes, of a model that is config.json alone."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from vserve.engine.options.config import EngineConfig
from vserve.server.cli import main, plan_question
from vserve.server.cli.flags import read_flags

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


def test_a_trace_that_needs_many(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join([json.dumps({"timestamp": 0, "input_length": 2000, "output_length": 2})] * 120))
    words = (folder, "--trace", str(trace), "-tp", "1")
    code, out, _ = run(capsys, *words, "--ttft", "600")
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -dp 9")
    code, out, _ = run(capsys, *words, "--ttft", "10")
    assert code == 1 and "none of these meets what is wanted, and more engines are not computed" in out
    assert "   64  -dp 64 " in out and "-dp 65" not in out


def test_a_trace_whose_queue_grows(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    """It is not met by who gives each token in time, and a trace that shows no queue is told of none."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 125 * i, "input_length": 7000, "output_length": 2} for i in range(240)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--replicas", "2")
    assert code == 0 and "with one of them dead, the load no longer is worked off as it comes: TTFT p95" in out
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--replicas", "3")
    assert code == 0 and "with one of them dead, the load still is worked off as it comes: TTFT p95" in out
    code, out, _ = run(capsys, folder, "--trace", str(trace))
    assert code == 0 and "the load is not worked off as it comes: a queue grows" in out
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--tpot", "200", "-tp", "1")
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -dp 2")
    trace.write_text("\n".join(json.dumps(line | {"timestamp": 0}) for line in lines))
    code, out, _ = run(capsys, folder, "--trace", str(trace), "--replicas", "2")
    assert code == 0 and "with one of them dead, TTFT p95" in out and "worked off" not in out


@pytest.mark.slow
def test_so_many_engines_that_do_not_keep_up(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    """Though they give each token in time: those of the next division are looked at."""
    words = (folder, "--rate", "1000", "--in", "64", "--out", "8", "--replicas", "1")
    code, out, _ = run(capsys, *words, "--tpot", "100")
    assert code == 0 and [line.split()[1] for line in out.splitlines() if " met " in line] == ["-", "-tp"]
    assert "not met" in out and "on 2 × h200" in out
    code, out, _ = run(capsys, *words, "--tpot", "100", "-tp", "1")
    assert code == 1 and "none of these meets what is wanted" in out
    code, out, _ = run(capsys, *words)
    assert code == 0 and "the load is not worked off as it comes: a queue grows" in out


@pytest.mark.slow
def test_more_engines_than_are_computed(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A division that needs them is left out; where each does, it is said."""
    monkeypatch.setattr(plan_question, "MOST_ENGINES", 1)
    words = (folder, "--in", "8000", "--out", "2", "--rate")
    code, out, _ = run(capsys, *words, "14")
    assert code == 0 and out.rstrip().endswith(f"vserve {folder} -tp 4")
    assert "the load needs some 2 of them: at most 1 are computed" in out and "    1  -  " not in out
    code, _, err = run(capsys, *words, "100", "-tp", "1")
    assert code == 1 and "--rate 100 needs some 14 engines: at most 1 are computed; ask for a smaller rate" in err
    assert "or for engines of more cards (-tp, -pp)" in err


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
        ({"steps": []}, "its /server_info lacks 'settings'; name a vserve server of this version"),
        (info(1) | {"steps": [{"num_tokens": 1}]}, "its /server_info lacks 'num_decodes'; name"),
        (
            info(1) | {"model": None},
            "its /server_info is none of vserve's ('NoneType' object is not subscriptable); name",
        ),
        (
            info(1) | {"model": {"vocab_size": "many"}},
            "its /server_info is none of vserve's (invalid literal for int()",
        ),
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
        (("--rate", "1", "--replicas", "65"), "--replicas 65: at most 64 engines are computed, as many as a server may "
            "have; ask for fewer, or for engines of more cards"),
        (("--rate", "1", "--output", "/no/such/x.json"), "--output /no/such/x.json: there is no folder /no/such; "
            "make it"),
        (("--rate", "1", "--output", "plan.png"), "--output plan.png: what is computed is written as a picture, .svg, "
            "or as JSON, .json"),
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


def engine_of(command: str) -> EngineConfig:
    """What the server's own command line makes of it."""
    first, *words = shlex.split(command)
    assert first == "vserve"
    parser = main.command_parser("serve", main.load("serve"))
    return read_flags(parser.parse_args(words))[0]


def test_the_command_has_what_was_given(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag or variable; what a file says is left to it, but for how many engines there are."""
    moved = Path(folder) / "my model"
    moved.mkdir()
    (Path(folder) / "config.json").rename(moved / "config.json")
    load = ("--rate", "1", "--in", "64", "--out", "4")
    assumed = {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2,
    }  # fmt: skip
    words = (
        "-q", "fp8", "--max-model-len", "4K", "--kv-cache-dtype", "fp8", "--gpu-memory-utilization", "0.85",
        "--max-num-seqs", "100", "--max-num-batched-tokens", "4096", "--no-enable-chunked-prefill", "-pp", "2",
        "--pipeline-layer-partition", "20,12", "--speculative-config", json.dumps(assumed),
    )  # fmt: skip
    monkeypatch.setenv("VSERVE_BLOCK_SIZE", "32")
    code, out, _ = run(capsys, str(moved), *load, *words)
    monkeypatch.delenv("VSERVE_BLOCK_SIZE")
    assert code == 0
    engine = engine_of(out.splitlines()[-1])
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2})
    assert engine == EngineConfig(
        str(moved), quantization="fp8", max_model_len=4096, kv_cache_dtype="fp8", gpu_memory_utilization=0.85,
        max_num_seqs=100, max_num_batched_tokens=4096, enable_chunked_prefill=False, pipeline_parallel_size=2,
        pipeline_layer_partition="20,12", speculative_config=drafts, block_size=32,
    )  # fmt: skip

    file = Path(folder) / "options.yaml"
    file.write_text("max-num-seqs: 50\ndata-parallel-size: 4\nspeculative-config: " + json.dumps(json.dumps(assumed)))
    code, out, _ = run(capsys, str(moved), *load, "--config", str(file), "--max-model-len", "auto", "-tp", "2")
    assert code == 0 and "-dp 1" in out and f"--config {file}" in out and "--max-num-seqs" not in out
    assert engine_of(out.splitlines()[-1]) == EngineConfig(
        str(moved), max_num_seqs=50, tensor_parallel_size=2, data_parallel_size=1, speculative_config=drafts
    )


def test_a_picture_of_a_trace_names_the_cards(capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
    """Though it answers more requests a second on more of them; that of a knee names the rates."""
    trace, file = tmp_path / "trace.jsonl", tmp_path / "plan.svg"
    trace.write_text("\n".join([json.dumps({"timestamp": 0, "input_length": 2000, "output_length": 2})] * 40))
    output = ("--output", str(file))
    assert run(capsys, folder, "--trace", str(trace), "--ttft", "600", "-tp", "1", *output)[0] == 0
    texts = [found.text for found in ElementTree.parse(file).iter() if found.text]
    assert "2 (-dp 2)" in texts and "3 (-dp 3)" in texts and not any(text.endswith("/s") for text in texts)
    assert run(capsys, folder, "--in", "8000", "--out", "2", "--ttft", "3000", *output)[0] == 0
    texts = [found.text for found in ElementTree.parse(file).iter() if found.text]
    assert sum(text.endswith("/s") for text in texts) == 2 * len(plan_question.SHARES)


def test_a_file_that_may_not_be_written(
    capsys: pytest.CaptureFixture[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is refused before anything is computed, with the code of a wrong option; one that fails then is said too."""
    words = (folder, "--rate", "1", "--in", "64", "--out", "4", "--output")
    (Path(folder) / "x.json").mkdir()
    code, out, err = run(capsys, *words, f"{folder}/x.json")
    assert (code, out) == (2, "") and err == f"vserve: --output {folder}/x.json is a folder: name a file in it\n"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        code, out, err = run(capsys, *words, f"{folder}/y.json")
    assert (code, out) == (2, "") and f"--output {folder}/y.json may not be written: name a file" in err

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run(capsys, *words, f"{folder}/y.json")
    assert code == 1 and "y.json cannot be written (No space left on device): name another file" in err
