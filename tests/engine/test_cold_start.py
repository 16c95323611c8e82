"""What a cold start does ahead of time: files into the page cache, kernels compiled by helper processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
import torch

import vserve.engine.start.engine as engine_module
from vserve.engine.cache.kv_format import NUMBERS
from vserve.engine.describe import model_source
from vserve.engine.describe.reading import read_model_config
from vserve.engine.errors import ModelError
from vserve.engine.files import prefetch
from vserve.engine.files.prefetch import Prefetch
from vserve.engine.options.config import EngineConfig
from vserve.engine.options.speculation import read_speculation
from vserve.engine.planning.machine import Machine
from vserve.engine.speculation.loading import Draft
from vserve.engine.start import precompile, rank, warm_steps
from vserve.engine.start.precompile import Precompile
from vserve.engine.start.process import run_engine
from vserve.engine.step.compilations import dummy_plan
from vserve.engine.step.runner import ModelRunner
from vserve.engine.weights import loader
from vserve.kernels.attention.attention_prefill import prefill_tile


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(prefetch, "PIECE", 1 << 16)
    for i in range(3):
        (tmp_path / f"model-{i}.safetensors").write_bytes(bytes(300_000))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_every_piece_is_read(checkpoint, monkeypatch):
    monkeypatch.setattr(prefetch, "WARM_SPEED", float("inf"))
    reader = Prefetch.start(str(checkpoint))
    assert reader is not None
    wait_until(lambda: reader.bytes_read == 900_000)


def test_files_in_memory_are_left_alone(checkpoint, monkeypatch):
    monkeypatch.setattr(prefetch, "WARM_SPEED", 0.0)
    reader = Prefetch.start(str(checkpoint))
    assert reader is not None
    wait_until(lambda: reader.stopped)
    time.sleep(0.1)
    assert reader.bytes_read < 900_000


def test_nothing_to_read(tmp_path):
    assert Prefetch.start(str(tmp_path)) is None
    assert Prefetch.start("some/model-of-the-hub") is None


def helpers(*codes: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", code]) for code in codes]


def test_marker_only_when_all_have_compiled(tmp_path):
    marker = tmp_path / "marker"
    Precompile(helpers("pass", "raise SystemExit(3)"), marker).wait()
    assert not marker.exists()
    Precompile(helpers("pass", "pass"), marker).wait()
    assert marker.exists()


def test_a_helper_that_hangs_is_killed(tmp_path):
    hanging = helpers("import time; time.sleep(600)")
    Precompile(hanging, tmp_path / "marker").wait(seconds=0.2)
    assert hanging[0].returncode == -9
    assert not (tmp_path / "marker").exists()


def test_an_engine_that_cannot_start_leaves_nothing_behind(checkpoint, tmp_path, monkeypatch):
    ahead = Precompile(helpers("import time; time.sleep(600)"), tmp_path / "marker")
    reader = Prefetch([])
    monkeypatch.setattr(Precompile, "start", lambda config: ahead)
    monkeypatch.setattr(Prefetch, "start", lambda model: reader)

    def broken(*_):
        raise ModelError("no weights")

    monkeypatch.setattr(engine_module, "Engine", broken)
    try:
        with pytest.raises(ModelError, match="no weights"):
            asyncio.run(run_engine(EngineConfig(str(checkpoint)), print, print))
        assert reader.stopped
        assert ahead._processes[0].returncode == -9
    finally:
        ahead.kill()


def test_no_helpers_where_no_process_can_be_started(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precompile.os.path, "exists", lambda path: True)
    monkeypatch.setattr(precompile, "num_helpers", lambda *_: 5)
    started = []

    def start(*_, **__):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.extend(helper := helpers_before("import time; time.sleep(600)"))
        return helper[0]

    popen = subprocess.Popen

    def helpers_before(code):
        return [popen([sys.executable, "-c", code])]

    monkeypatch.setattr(precompile.subprocess, "Popen", start)
    try:
        assert Precompile.start(EngineConfig(str(checkpoint))) is None
        assert [process.returncode for process in started] == [-9, -9]
    finally:
        for process in started:
            process.kill()


def test_no_helpers_without_a_gpu(checkpoint):
    assert Precompile.start(EngineConfig(str(checkpoint), device="cpu")) is None


def test_no_helpers_where_all_is_compiled(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(precompile.os.path, "exists", lambda path: True)
    monkeypatch.setattr(precompile, "num_helpers", lambda *_: 5)
    started: list[list[str]] = []
    monkeypatch.setattr(precompile.subprocess, "Popen", lambda command, **_: started.append(command))
    config = EngineConfig(str(checkpoint))
    assert Precompile.start(config) is not None and len(started) == 5
    marker = tmp_path / "cache" / f"vserve-{precompile.fingerprint(config)}"
    marker.parent.mkdir()
    marker.touch()
    assert Precompile.start(config) is None


def test_first_steps_meet_the_slowest_kernels_one_by_one():
    """Prefill attention beside decodes, sampling, prefill attention: a helper begins with one at most."""
    steps = warm_steps.warm_up_steps(1024, 8192)
    assert all(num_seqs <= tokens <= 8192 for num_seqs, tokens, _ in steps)
    assert all(step not in steps[:i] for i, step in enumerate(steps)), "nothing is warmed up twice"
    beside, sampled, alone, *others = steps[:8]
    assert alone[0] == 1 < alone[1] and beside[1] == beside[0] + 1 and sampled[0] == sampled[1]
    assert [step[2].temperature > 0 for step in (beside, sampled, alone)] == [False, True, False]
    assert all(num_seqs == tokens and not sampling.temperature for num_seqs, tokens, sampling in others)
    assert warm_steps.warm_up_steps(1, 16)[1][:2] == (1, 16), "fewer rows than the steps are made for"


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("dtype", "head_size"), [(torch.bfloat16, 64), (torch.bfloat16, 256), (torch.float32, 128)])
@pytest.mark.parametrize("limits", [(1024, 8192), (256, 2048), (1024, 4096)])
def test_few_and_many_prompts_are_met_with_every_tile(limits, dtype, head_size, group):
    """Triton's kernel of prompts is another for more than 16 of them, and for each tile, which the longest chooses."""
    met, most = set(), 0
    for num_seqs, num_tokens, sampling in warm_steps.warm_up_steps(*limits):
        plan = dummy_plan(
            num_seqs, num_tokens, sampling, 0, False, max_num_seqs=limits[0], max_model_len=8192, num_groups=1,
            generates=True,
        )  # fmt: skip
        assert sum(plan.num_tokens) == num_tokens
        if prompts := [length for length in plan.num_tokens if length > 1]:
            met.add((prefill_tile(dtype, head_size, max(prompts) * group), len(prompts) > 16))
            most = max(most, max(prompts))
    reached = {prefill_tile(dtype, head_size, length * group) for length in range(2, most + 1)}
    assert met == {(tile, many) for tile in reached for many in (False, True)}


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(64, 500, 8), (8, 500, 4), (64, 10, 3), (2, 500, 1), (64, 1, 0)]
)
def test_helpers_need_cores_and_memory(cores, gigabytes, expected, monkeypatch):
    monkeypatch.setattr(precompile, "num_cores", lambda: cores)
    sizes = {"SC_AVPHYS_PAGES": gigabytes << 18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(precompile.os, "sysconf", sizes.__getitem__)
    assert precompile.num_helpers() == expected


def card_for(helpers: int) -> int:
    """Bytes, beside a tiny model."""
    return helpers * precompile.HELPER_BYTES + precompile.ENGINE_BYTES + (1 << 30)


@pytest.mark.parametrize(
    ("options", "gigabytes", "helpers"),
    [
        ({}, 150, 0),
        ({}, 192, 4),
        ({"quantization": "fp8"}, 141, 6),
        ({"tensor_parallel_size": 2}, 80, 0),
        ({"tensor_parallel_size": 2}, 141, 7),
        ({"tensor_parallel_size": 4}, 80, 5),
        ({"pipeline_parallel_size": 2}, 141, 5),
        ({"pipeline_parallel_size": 2, "pipeline_layer_partition": "20,60"}, 141, 2),
    ],
)
def test_helpers_leave_the_weights_their_memory(options, gigabytes, helpers, tmp_path):
    """Of a model of 70 billion parameters: with eight helpers beside half of its weights an H100 ran out of memory."""
    shape = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
    described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 80, **shape}
    (tmp_path / "config.json").write_text(json.dumps(described | {"vocab_size": 128256, "tie_word_embeddings": False}))
    config = EngineConfig(str(tmp_path), load_format="dummy", **options)
    model = read_model_config(tmp_path, config)
    card = gigabytes * 10**9
    assert precompile.helpers_beside(config, torch.bfloat16, model, NUMBERS, None, card) == helpers


def test_helpers_leave_memory_to_who_drafts(tiny_model, tmp_path):
    """A model of 8 GB, of which each helper makes up two layers."""
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 16, **shape}
    (tmp_path / "config.json").write_text(json.dumps(described | {"vocab_size": 32000, "tie_word_embeddings": False}))
    config, speculation = EngineConfig(str(tmp_path)), read_speculation('{"model": "x", "method": "draft_model"}')
    model = read_model_config(tmp_path, config)
    draft = Draft(tmp_path, speculation, model, {})
    found = [
        precompile.helpers_beside(config, torch.bfloat16, model, NUMBERS, one, 40 * 10**9) for one in (None, draft)
    ]
    assert found[0] > found[1] > 0


def test_shares_make_up_the_warm_up_of_a_model_with_few_layers(tiny_model, monkeypatch):
    """On the CPU here: which steps, of what model, and that they run."""
    machine = Machine(torch.device("cpu"), "card", card_for(3), 1)
    asked, run = [], []
    monkeypatch.setattr(rank, "open_machine", lambda config: asked.append(config.device) or machine)
    dummy_step = ModelRunner.dummy_step

    def step(runner, *arguments):
        assert len(runner.model.config.layers) == 2 and runner.max_model_len == 64
        run.append(arguments)
        return dummy_step(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "dummy_step", step)
    folder = tiny_model("llama", num_hidden_layers=3)
    config = EngineConfig(str(folder), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    for index in range(4):  # for the fourth, the card has no memory
        precompile.run_share(config, 3, index)
    steps = warm_steps.warm_up_steps(4, 32)
    shares = [steps[index::3] for index in range(3)]
    for share in shares:
        met, run = run[: len(share)], run[len(share) :]
        assert met[0] == share[0] and sorted(map(repr, met)) == sorted(map(repr, share))
        kinds = [(seqs < tokens, kind.temperature > 0) for seqs, tokens, kind in met[1:]]
        assert len(set(kinds)) > 2 and kinds == sorted(kinds), "what others compile first comes late"
    assert not run and asked == ["cuda"] * 4


def test_shares_meet_adapters(tiny_model, monkeypatch):
    """Each of their steps once, with slots for as many as are served."""
    machine, run = Machine(torch.device("cpu"), "card", card_for(2), 1), []
    monkeypatch.setattr(rank, "open_machine", lambda config: machine)
    dummy_step = ModelRunner.dummy_step

    def step(runner, *arguments, adapted=False):
        if adapted:
            assert runner.adapters.num_slots == 3 and runner.adapters.layout.max_rank == 8
            run.append(arguments)
        return dummy_step(runner, *arguments, adapted=adapted)

    monkeypatch.setattr(ModelRunner, "dummy_step", step)
    config = EngineConfig(
        str(tiny_model("llama", num_hidden_layers=3)), max_model_len=64, max_num_seqs=17, max_num_batched_tokens=70,
        enable_lora=True, max_loras=3, max_lora_rank=8, dtype="float32",
    )  # fmt: skip
    for index in range(2):
        precompile.run_share(config, 2, index)
    steps = warm_steps.adapter_steps(17, 70)
    assert steps[0] == (1, 64) and len(steps) > 4 and sorted(step[:2] for step in run) == sorted(steps)
    assert run[0][:2] == steps[1], "the last helper has the first of them"
    shares = [precompile.adapted_share(steps, 5, index) for index in range(5)]
    assert shares[:2] == [[], []] and shares[4][0] == steps[0] and sorted(chain(*shares)) == sorted(steps)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mtp", "model", "ngram"])
def test_shares_meet_who_drafts_and_every_step_with_drafts(
    tiny_model, tiny_models, load_module, tmp_path, monkeypatch, name
):
    """Of a model with few layers, without reading weights, on two ranks of which there is but one."""
    made = load_module(Path(__file__).parents[1] / "draft_models.py")
    target = tiny_model("llama", num_hidden_layers=6)
    if name == "mtp":
        target = tiny_models.tiny_checkpoint(tmp_path / "model", "deepseek_v3", num_hidden_layers=4)
        made.with_drafting_layer(target, own=True)
    models = {
        "eagle3": lambda: made.eagle3(tmp_path / "head", draft_vocab=90),
        "eagle": lambda: made.eagle(tmp_path / "head"),
        "model": lambda: tiny_model("qwen3", num_hidden_layers=3),
    }
    asked = {"model": str(models[name]())} if name in models else {"method": name}
    asked["num_speculative_tokens_per_batch_size"] = [[1, 2, 3], [3, 4, 1]]
    machine = Machine(torch.device("cpu"), "card", card_for(2), 1)
    monkeypatch.setattr(rank, "open_machine", lambda config: machine)
    monkeypatch.setattr(loader, "_load", lambda *_: pytest.fail("weights were loaded"))
    dummy_step, run, layers = ModelRunner.dummy_step, [], []

    def step(runner, *arguments):
        run.append(arguments)
        layers.append(len(runner.layers) - len(runner.model.attention_layers()))
        return dummy_step(runner, *arguments)

    monkeypatch.setattr(ModelRunner, "dummy_step", step)
    config = EngineConfig(
        str(target), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, tensor_parallel_size=2,
        speculative_config=json.dumps(asked),
    )  # fmt: skip
    for index in range(2):
        precompile.run_share(config, 2, index)
    drafting = warm_steps.draft_steps(((2, 3), (4, 1)), 4)
    assert len(drafting) > 6 and [found for found in run if len(found) == 4] == [*drafting[0::2], *drafting[1::2]]
    assert set(layers) == {{"ngram": 0, "model": 2}.get(name, 1)}


def test_helpers_download_nobody_who_drafts(tiny_model, monkeypatch):
    """The engine does, once."""
    machine, run = Machine(torch.device("cpu"), "card", card_for(1), 1), []
    monkeypatch.setattr(rank, "open_machine", lambda config: machine)
    monkeypatch.setattr(model_source, "from_hub", lambda *_: pytest.fail("asked the hub"))
    monkeypatch.setattr(ModelRunner, "dummy_step", lambda runner, *step: run.append(runner.model_drafter))
    config = EngineConfig(
        str(tiny_model("llama")), max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32,
        speculative_config='{"model": "nobody/drafts", "method": "draft_model"}',
    )  # fmt: skip
    precompile.run_share(config, 1, 0)
    assert len(run) > 10 and set(run) == {None}


def test_fingerprint_follows_who_drafts(checkpoint, tmp_path):
    (drafter := tmp_path / "drafter").mkdir()
    (drafter / "config.json").write_text("{}")
    config = EngineConfig(str(checkpoint), speculative_config=json.dumps({"model": str(drafter)}))
    first = precompile.fingerprint(config)
    (drafter / "config.json").write_text('{"hidden_size": 64}')
    assert precompile.fingerprint(config) != first


def test_fingerprint_follows_what_decides_on_kernels(checkpoint):
    config = EngineConfig(str(checkpoint))
    first = precompile.fingerprint(config)
    assert precompile.fingerprint(dataclasses.replace(config, seed=7)) == first
    assert precompile.fingerprint(dataclasses.replace(config, backlog_steps=1)) == first, "the offline LLM's"
    assert precompile.fingerprint(dataclasses.replace(config, block_size=32)) != first
    (checkpoint / "config.json").write_text('{"hidden_size": 64}')
    assert precompile.fingerprint(config) != first


def test_fingerprint_follows_tiles_kernels_and_engine(checkpoint, tmp_path, monkeypatch):
    tiles, kernel, step = (
        tmp_path / name for name in ("configs/tiles/card.json", "kernels/linear/linear.py", "engine/step/runner.py")
    )
    for source in (tiles, kernel, step):
        source.parent.mkdir(parents=True)
        source.write_text("{}")
    monkeypatch.setattr(precompile, "__file__", str(tmp_path / "engine" / "start" / "precompile.py"))
    seen = {precompile.fingerprint(EngineConfig(str(checkpoint)))}
    for source in (tiles, kernel, step):
        source.write_text('{"decode": []}')
        seen.add(precompile.fingerprint(EngineConfig(str(checkpoint))))
    assert len(seen) == 4
