"""Memory that does not suffice at the start: refused before loading where that is known, and else said in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.engine.describe.divide import more_cards
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import read_folder
from vserve.engine.errors import ConfigError
from vserve.engine.options import cgroup
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning import host_memory, weight_size
from vserve.engine.planning.host_memory import is_out_of_memory, killed
from vserve.engine.planning.machine import Machine
from vserve.engine.planning.weight_size import check_weights
from vserve.engine.quant.online import OnlineScheme
from vserve.engine.quant.scheme import make_scheme
from vserve.engine.start import rank
from vserve.engine.start.engine import Engine
from vserve.engine.weights import loader
from vserve.engine.weights.loader import count_parameters

GIB = 1 << 30


def card(total: float, free: float) -> Machine:
    return Machine(torch.device("cuda"), "H100", int(total * GIB), 8, int(free * GIB))


def eight(tiny_model: Any) -> ModelConfig:
    config: ModelConfig = dataclasses.replace(read_folder(tiny_model("llama")), dtype=torch.bfloat16)
    return config


@pytest.mark.parametrize(
    ("machine", "parameters", "words"),
    [
        (card(80, 79), 40e9, ["the weights take 74.51 GiB (40,000,000,000 parameters in bfloat16)",
                              "free of 80.00 GiB, of which vserve may use 72.00 GiB (--gpu-memory-utilization 0.9)",
                              "raise --gpu-memory-utilization to 0.97, or set --tensor-parallel-size 2 (37.25 GiB a ca",
                              "or add -q fp8 (38.", "add -q int4 (21.", "or set --pipeline-parallel-size 2 (about 37"]),
        (card(80, 79), 70e9, ["130.39 GiB", ": set --tensor-parallel-size 2 (65.19 GiB a card), or add -q fp8 (67.",
                              "add -q int4 (37."]),
        (card(80, 79), 400e9, ["745.06 GiB", ": serve a smaller model, or take a larger card"]),
        (card(80, 30), 16e9, ["29.80 GiB", "30.00 GiB free of 80.00 GiB", ": set --tensor-parallel-size 2 (14.90"]),
    ],
    ids=["a larger share would do", "too large", "far too large", "others use the card"],
)  # fmt: skip
def test_a_card_refuses_weights_that_do_not_fit(
    tiny_model: Any, machine: Machine, parameters: float, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        asked = EngineConfig("m", enable_lora=True)  # stages hold adapters as well
        check_weights(asked, eight(tiny_model), machine, torch.bfloat16, int(parameters), 0)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("drafts", "stages"), [('{"method": "ngram"}', True), ('{"model": "m", "num_speculative_tokens": 2}', False)]
)
def test_stages_are_advised_to_all_but_those_beside_whom_a_model_drafts(
    tiny_model: Any, drafts: str, stages: bool
) -> None:
    config, model = EngineConfig("m", speculative_config=drafts), eight(tiny_model)
    with pytest.raises(ConfigError) as refused:
        check_weights(config, model, card(80, 79), torch.bfloat16, 40 * 10**9, 0)
    assert ("set --pipeline-parallel-size 2" in str(refused.value)) is stages
    undivided = dataclasses.replace(config, tensor_parallel_size=8)
    assert (more_cards(model, undivided, 40 << 30, 1 << 30).option == "pipeline_parallel_size") is stages


def test_a_card_takes_what_fits(tiny_model: Any) -> None:
    model = eight(tiny_model)
    assert check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, 38 * 10**9, 0) == 76 * 10**9


def test_who_drafts_has_weights_too(tiny_model: Any) -> None:
    """Of a card that would hold the model alone."""
    model, drafts = eight(tiny_model), 4 * GIB
    take = 70 * GIB // 2
    assert check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, take, 0) == 70 * GIB
    assert check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, take, 0, GIB) == 71 * GIB
    with pytest.raises(ConfigError) as refused:
        check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, take, 0, drafts)
    line = str(refused.value)
    assert "the weights take 74.00 GiB" in line and "in bfloat16, and 4.00 GiB of who drafts)" in line
    assert "or leave --speculative-config out, or set --tensor-parallel-size 2" in line and "-q fp8 (3" in line
    with pytest.raises(ConfigError) as refused:
        check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, take * 2, 0, drafts)
    assert "leave --speculative-config out" not in str(refused.value), "it would not do"


@pytest.mark.parametrize(
    ("room", "remedies", "not_"),
    [
        (20, ["add --dtype bfloat16 (14.90 GiB)", "add -q int8 (7.", "add -q int4 (4."], []),
        (10, ["add -q int8 (7.", "add -q int4"], ["--dtype"]),
        (5, ["add -q int4 (4."], ["--dtype", "int8"]),
        (1, [], ["--dtype", "-q"]),
    ],
)
def test_the_cpu_names_only_what_would_do(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, room: int, remedies: list[str], not_: list[str]
) -> None:
    monkeypatch.setattr(weight_size, "available_bytes", lambda: room * GIB)
    monkeypatch.setattr(weight_size, "machine_bytes", lambda: 32 * GIB)
    machine = Machine(torch.device("cpu"), "cpu", 0, 1)
    model = dataclasses.replace(eight(tiny_model), vocab_size=1000)
    with pytest.raises(ConfigError, match=r"the weights take 29\.80 GiB") as refused:
        check_weights(EngineConfig("m"), model, machine, torch.float32, 8 * 10**9, 16 * 10**9)
    line = str(refused.value)
    assert f"the machine has {room}.00 GiB free of 32.00 GiB" in line and "\n" not in line
    assert all(word in line for word in [*remedies, "serve a smaller model, or take more memory"]), line
    assert not any(word in line for word in not_), line
    quantized = dataclasses.replace(model, quantization=OnlineScheme("int4"))
    if "add -q int4 (4." in remedies:  # and the remedy does
        assert check_weights(EngineConfig("m"), quantized, machine, torch.float32, 8 * 10**9, 16 * 10**9) <= room * GIB


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_are_refused_before_any_is_made(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    monkeypatch.setattr(weight_size, "available_bytes", lambda: 1 << 16)
    monkeypatch.setattr(loader, "_load", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(loader, "fill_with_noise", lambda *_: pytest.fail("weights were made"))
    config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, load_format=load_format)
    with pytest.raises(ConfigError, match=r"the weights take .* MiB .* serve a smaller model"):
        Engine(config, lambda _: None)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_size_is_what_is_taken(tiny_model: Any, quantization: str | None) -> None:
    folder = tiny_model("llama", hidden_size=256, intermediate_size=512)
    config = EngineConfig(str(folder), device="cpu", cpu_threads=1, quantization=quantization)
    made = Engine(config, lambda _: None)
    taken = rank.weight_bytes(made.rank.runner.model)
    assert taken * 0.85 < made.rank._weights < taken * 1.15
    if quantization is None:
        assert made.rank._weights == 4 * count_parameters(read_folder(folder)) == taken


def test_experts_keep_their_codes_on_a_card(tiny_model: Any) -> None:
    folder = tiny_model("mixtral")
    model, parameters = read_folder(folder, quantization="experts_int8"), 10**9
    size = weight_size.weight_size(model, parameters, torch.bfloat16, 0, on_card=True)
    experts = 3 * 64 * sum(spec.mlp.routing.num_experts * spec.mlp.inner for spec in model.layers)
    assert model.hidden_size == 64 and size == pytest.approx(1.03 * experts + 2 * (parameters - experts), abs=2)


@pytest.mark.parametrize(
    ("quantization", "numbers"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, True),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}, False),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "static_groups": True}, False),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True, "meta": {"static_groups": True}}, False),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True, "meta": {"static_groups": False}}, True),
        ("group", True),
        ("weight", False),
        (None, False),
    ],
)
def test_experts_with_an_order_of_columns_are_numbers_on_a_card(
    tiny_model: Any, quantization: dict[str, Any] | str | None, numbers: bool
) -> None:
    """Of two ranks, half of them on each; a CPU multiplies by their codes."""
    if not isinstance(quantization, dict):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": quantization}
        quantization = {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }  # fmt: skip
    plain = read_folder(tiny_model("mixtral"))
    model = dataclasses.replace(plain, quantization=make_scheme(quantization, None))
    every = count_parameters(plain)
    experts = 3 * 64 * sum(spec.mlp.routing.num_experts * spec.mlp.inner for spec in plain.layers)
    outside = 2 * plain.vocab_size * 64
    for ranks in (1, 2):
        parameters, stored = every // ranks, int(0.6 * every) // ranks
        kept = parameters - (experts / ranks if numbers else 0) - outside
        wanted = 0.6 * kept + 2 * (parameters - kept)
        for on_card in (True, False):
            size = weight_size.weight_size(model, parameters, torch.bfloat16, stored, on_card)
            codes = 0.6 * (parameters - outside) + 2 * outside
            assert size == pytest.approx(wanted if on_card else codes, rel=1e-4)
    if numbers:
        with pytest.raises(
            ConfigError, match=r"take a checkpoint without desc_act \(actorder group\): with it, on a GPU"
        ):
            check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, 70 * 10**9, 40 * 10**9)
        with pytest.raises(ConfigError, match=r"^((?!desc_act).)*$"):  # whose codes would not fit either
            check_weights(EngineConfig("m"), model, card(80, 79), torch.bfloat16, 70 * 10**9, 90 * 10**9)


@pytest.mark.parametrize(
    ("desc_act", "dynamic", "layers"),
    [
        (False, {r".*\.layers\.1\..*": {"desc_act": True}}, 1),
        (False, {r"+:.*\.experts\.2\.": {"desc_act": True}}, 2),  # one of a layer's experts: all become numbers
        (False, {r".*self_attn.*": {"desc_act": True}}, 0),
        (False, {r".*\.layers\.1\..*": {"desc_act": True, "group_size": -1}}, 0),
        (True, {r".*\.layers\.0\..*": {"desc_act": False}}, 1),
        (True, {r"-:.*\.layers\.0\..*": {}}, 1),
    ],
)
def test_an_order_of_some_modules_alone(tiny_model: Any, desc_act: bool, dynamic: dict[str, Any], layers: int) -> None:
    """GPTQModel's `dynamic` may say it."""
    plain = read_folder(tiny_model("mixtral"))
    written = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": desc_act, "dynamic": dynamic}
    model = dataclasses.replace(plain, quantization=make_scheme(written, None))
    parameters = count_parameters(plain)
    stored = int(0.6 * parameters)
    each = 3 * 64 * plain.layers[0].mlp.routing.num_experts * plain.layers[0].mlp.inner
    codes = weight_size.weight_size(model, parameters, torch.bfloat16, stored, on_card=False)
    size = weight_size.weight_size(model, parameters, torch.bfloat16, stored, on_card=True)
    assert len(plain.layers) == 2 and size - codes == pytest.approx(1.4 * each * layers, rel=1e-3)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.fixture(autouse=True)
def _forget_tracebacks() -> Iterator[None]:
    """They hold the frames that they were raised through, and with them whole engines."""
    yield
    for error in ERRORS:
        error.__traceback__ = None


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["load_model", "plan_memory", "warm_up"])
def test_whatever_runs_out_of_memory_ends_in_one_line(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, place: str
) -> None:
    def fail(*_: object, **options: Any) -> None:
        if admit := options.get("admit"):
            admit(1000, 4000)
        raise error

    monkeypatch.setattr(rank, place, fail)
    monkeypatch.setattr(rank, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(rank, "machine_bytes", lambda: 16 * GIB)
    config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="out of memory while") as raised:
        Engine(config, lambda _: None)
    line = str(raised.value)
    assert "the machine has 3.00 GiB free of 16.00 GiB, the weights take" in line and "\n" not in line
    told = line.split("what helps, in this order: ")[1].split(", ")
    later = ["lower --max-model-len (now 512)", "lower --max-num-seqs (now 16)",
             "lower --kv-cache-memory-bytes (now 1048576)"]  # fmt: skip
    expected = ["add -q int4 (to a checkpoint in 16 bit)", "serve a smaller model"]
    assert told == (expected if place == "load_model" else later + expected)
    assert ("2.00 GiB were asked for" in line) == (error is ERRORS[0])


def test_on_a_card_the_share_and_the_graphs_are_named(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "open_machine", lambda *_: card(80, 79))
    model = SimpleNamespace(config=SimpleNamespace(causal=True))
    monkeypatch.setattr(rank, "load_model", lambda *_, **options: options["admit"](10**9, 0) or model)
    monkeypatch.setattr(rank, "describe", lambda model: {})
    monkeypatch.setattr(rank, "describe_experts", lambda model: {})
    monkeypatch.setattr(
        rank, "ModelRunner", lambda model, **options: SimpleNamespace(device=torch.device("cuda"), seeing=None)
    )
    monkeypatch.setattr(rank, "take_memory", lambda *_: (_ for _ in ()).throw(ERRORS[0]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB // 2, 80 * GIB))
    monkeypatch.setattr("vserve.engine.planning.settings.even_rows", lambda device, rows: rows)
    with pytest.raises(ConfigError, match=r"H100 has 0\.50 GiB free of 80\.00 GiB, the wei") as raised:
        Engine(EngineConfig(str(tiny_model("llama")), dtype="bfloat16"), lambda _: None)
    assert str(raised.value).endswith(
        "in this order: lower --max-model-len (now 512), lower --max-num-seqs (now 1024), lower "
        "--gpu-memory-utilization (now 0.9), add --enforce-eager, serve a smaller model"
    )


def test_other_errors_are_left_as_they_are() -> None:
    for error in (RuntimeError("an illegal memory access"), ValueError("out of memory"), OSError(2, "no such file")):
        assert not is_out_of_memory(error)


def test_an_engine_that_was_killed_while_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 128 << 20)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 16 * GIB)
    line = killed("weights", 3 * GIB, 14 * GIB, EngineConfig("m", device="cpu"))
    assert "killed by signal 9 while loading the weights (3.00 GiB of 14.00 GiB done)" in line
    assert "has 0.12 GiB free of 16.00 GiB" in line and line.endswith(
        "give it (or the container) more memory, add -q int4 (to a checkpoint in 16 bit), serve a smaller model"
    )
    later = killed("memory", 0, 0, EngineConfig("m", device="cpu", max_model_len=999, quantization="int8"))
    assert "lower --max-model-len (now 999), lower --max-num-seqs, serve" in later
    for device in ("cuda", "auto"):  # the machine's memory ran out, not a card's
        many = killed("weights", 0, 0, EngineConfig("m", device=device, data_parallel_size=4))
        assert many.endswith("more memory, lower --data-parallel-size (now 4), serve a smaller model")


def test_files_in_memory_give_way_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    tmp_path /= "sys/fs/cgroup"
    tmp_path.mkdir(parents=True)
    before = host_memory.machine_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.machine_bytes() == before
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{90 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {10 << 20}\nfile {80 << 20}\nshmem {5 << 20}\n")
    assert host_memory.machine_bytes() == 100 << 20
    assert host_memory.available_bytes() == (100 - 90 + 80 - 5) << 20
