"""The planner: its step model against what was measured on an H200, its clock, and what it says of a load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.config import ConfigError, EngineConfig
from vserve.engine.model_config import parse_model_config
from vserve.engine.planning import FRONT, Setup, Wanted, fit, knee, replay, set_up, steady
from vserve.engine.simulation import Answer, Ask, Simulation
from vserve.engine.step_model import CARDS
from vserve.server.cli import main

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def setup() -> Setup:
    return set_up(0, parse_model_config(LLAMA_8B), EngineConfig("m"), CARDS["h200"])


def closed(setup: Setup, asks: list[Ask], concurrency: int) -> tuple[list[Answer], float]:
    """→ (answers, seconds in all) of a load of which so many run at once."""
    answers = Simulation(setup.scheduler, setup.model.seconds).run(asks, concurrency)
    return answers, max(answer.last for answer in answers)


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


class TestAgainstMeasurements:
    """Rows of tests/gpu/RESULTS.md. Throughput within 10 %, times to first token within 25 %."""

    def test_one_stream(self, setup: Setup) -> None:
        (answer,), _ = closed(setup, [Ask(0, 128, 256)], 1)
        assert answer.tpot * 1e3 == pytest.approx(4.19, rel=0.02)
        assert (answer.ttft + FRONT) * 1e3 == pytest.approx(8.6, rel=0.05)
        (answer,), _ = closed(setup, [Ask(0, 8000, 64)], 1)
        assert (answer.ttft + FRONT) * 1e3 == pytest.approx(194.8, rel=0.1)

    @pytest.mark.parametrize(
        ("count", "at_once", "size", "of", "measured"),
        [
            (512, 512, (1024, 128), "total", 38_535),
            (768, 256, (128, 256), "output", 20_821),
            (256, 64, (1024, 128), "total", 33_765),
            (512, 64, (2048, 64, 1920), "total", 213_464),
        ],
    )
    def test_throughput(
        self, setup: Setup, count: int, at_once: int, size: tuple[int, ...], of: str, measured: float
    ) -> None:
        answers, seconds = closed(setup, [Ask(0, *size)] * count, at_once)
        tokens = count * (size[1] if of == "output" else size[0] + size[1])
        assert tokens / seconds == pytest.approx(measured, rel=0.1)
        if (count, at_once) == (256, 64):
            assert (middle([answer.ttft for answer in answers]) + FRONT) * 1e3 == pytest.approx(78, rel=0.25)

    def test_poisson(self, setup: Setup) -> None:
        found = steady(setup, 8.0, 1024, 128, seconds=50)
        assert found.ttft(0.5) * 1e3 == pytest.approx(29.7, rel=0.25)
        assert found.ttft(0.99) * 1e3 == pytest.approx(61.9, rel=0.25)
        assert found.tpot(0.5) * 1e3 == pytest.approx(5.3, rel=0.1)


def test_every_request_is_answered_whole_and_in_time(setup: Setup) -> None:
    source = random.Random(3)
    asks = [Ask(source.uniform(0, 2), source.randrange(1, 3000), source.randrange(1, 60)) for _ in range(120)]
    for replicas in (1, 3):
        simulation = Simulation(setup.scheduler, setup.model.seconds, replicas)
        answers = simulation.run(asks)
        assert sorted(map(id, (answer.ask for answer in answers))) == sorted(map(id, asks))
        assert len({answer.engine for answer in answers}) == replicas
        for answer in answers:
            assert answer.ask.arrival == answer.sent < answer.first <= answer.last
            assert (answer.first == answer.last) == (answer.ask.num_output == 1)


def test_more_load_takes_longer_and_more_cards_less(setup: Setup) -> None:
    alone, busy = steady(setup, 2, 512, 32), steady(setup, 60, 512, 32)
    shared = steady(setup, 60, 512, 32, replicas=4)
    assert alone.ttft(0.95) < shared.ttft(0.95) < busy.ttft(0.95)
    assert busy.output_rate == pytest.approx(60 * 32, rel=0.1)


def test_the_knee_is_where_it_is_just_met(setup: Setup) -> None:
    wanted = Wanted(ttft=0.2, tpot=0.02)
    found = knee(setup, wanted, 1024, 32)
    assert found is not None and wanted.met(found)
    assert not wanted.met(steady(setup, 1.1 * found.rate, 1024, 32))
    assert knee(setup, Wanted(tpot=0.001), 1024, 32) is None, "not even one alone"


def test_a_mixture_reads_the_experts_that_its_tokens_choose() -> None:
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "torch_dtype": "bfloat16",
    }  # fmt: skip
    model = set_up(0, parse_model_config(raw), EngineConfig("m", max_model_len=8192), CARDS["h200"]).model
    shape = model.shape
    assert shape.num_experts * shape.expert_bytes / 2 == pytest.approx(29.0e9, rel=0.01)
    read = shape.weight_bytes + 8 * shape.expert_bytes + shape.head_bytes
    assert read == pytest.approx(6.1e9, rel=0.05), "of one token"
    assert model.product_seconds(256, 256) > 8 * model.product_seconds(1, 1)


def test_a_cache_of_8_bits_holds_twice_as_much_and_is_read_faster(setup: Setup) -> None:
    """With a scale for each token and head, 32 numbers of 32 bits beside 2,048 codes a layer: 3 % less than that."""
    model = parse_model_config(LLAMA_8B)
    codes = set_up(0, model, EngineConfig("m", kv_cache_dtype="fp8"), CARDS["h200"])
    scaled = set_up(0, model, EngineConfig("m", kv_cache_dtype="fp8", calculate_kv_scales=True), CARDS["h200"])
    assert codes.cache_tokens == pytest.approx(2 * setup.cache_tokens, rel=1e-3)
    assert scaled.cache_tokens == pytest.approx(codes.cache_tokens * 2048 / (2048 + 64), rel=1e-3)
    times = [closed(one, [Ask(0, 6000, 64)] * 64, 64)[1] for one in (setup, codes)]
    assert times[1] < 0.99 * times[0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model does not fit one l4: of 20\.2.*take a larger card"):
        set_up(0, parse_model_config(LLAMA_8B | {"num_hidden_layers": 64}), EngineConfig("m"), CARDS["l4"])


def test_too_long_requests_are_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"8000 \+ 400 tokens: at most 8192 fit"):
        replay(setup, [Ask(0, 8000, 400)])


def test_steps_of_a_server_correct_the_card(setup: Setup) -> None:
    """A card a fifth slower, of steps of all sizes with some noise: its products are found, and the error is said."""
    source, steps = random.Random(1), []
    for _ in range(400):
        decodes = source.randrange(0, 200)
        tokens = decodes + source.choice([0, 100, 900])
        if tokens == 0:
            continue
        context = 1100
        known = 1.2 * setup.model.product_seconds(tokens, decodes or 1)
        known += 1.22 * decodes * context * setup.model.shape.kv_bytes / setup.card.bandwidth
        known += 1.75 * (tokens - decodes) * context / 2 * setup.model.shape.pair_flops / setup.card.products
        known += 1e-3 + 1.1e-6 * tokens + 1e-6 * (decodes or 1)
        seconds = known * source.uniform(0.98, 1.02)
        steps.append({
            "num_tokens": tokens, "num_decodes": decodes, "num_requests": decodes or 1, "device_seconds": seconds,
        })  # fmt: skip
    costs, error, count = fit(setup.model, steps, 1100)
    assert costs.products == pytest.approx(1.2 * setup.model.costs.products, rel=0.05)
    assert costs.step == pytest.approx(1e-3, rel=0.2)
    assert error < 0.02 and count == (len(steps) + 1) // 2
    with pytest.raises(ConfigError, match="10 steps are too few"):
        fit(setup.model, steps[:10], 1100)


def drafting(**asked: Any) -> Setup:
    asked = {"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "synthetic", **asked}
    config = EngineConfig("m", speculative_config=json.dumps(asked))
    return set_up(0, parse_model_config(LLAMA_8B), config, CARDS["h200"])


def test_drafts_that_hold_save_steps(setup: Setup) -> None:
    """As many as is assumed, of one and of few; where many run there are none, and nothing is saved."""
    (plain,) = replay(setup, [Ask(0, 128, 400)]).answers
    for length in (1.0, 2.5, 5.0):
        (answer,) = replay(drafting(synthetic_acceptance_length=length), [Ask(0, 128, 400)]).answers
        assert plain.tpot / answer.tpot == pytest.approx(length, rel=0.06), "a step of five tokens takes about as long"
        assert answer.ttft == plain.ttft
    (answer,) = replay(drafting(synthetic_acceptance_rates=[0.9, 0.5, 0.1, 0]), [Ask(0, 128, 2000)]).answers
    assert plain.tpot / answer.tpot == pytest.approx(2.5, rel=0.06)
    gains = []
    for count in (4, 30, 100):
        load = [Ask(0, 128, 200)] * count
        without, with_ = (replay(one, load) for one in (setup, drafting(synthetic_acceptance_length=3.0)))
        assert len(with_.answers) == count and sum(tokens for _, tokens in with_.ends) == 200 * count
        gains.append(without.tpot(0.5) / with_.tpot(0.5))
    assert gains[0] > 2.5 > gains[1] > 1.3 and gains[2] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "ngram"}, 'how many drafts hold follows from the texts: assume it, with "rejection_sample_method"'),
        ({"method": "mtp"}, "what a model that drafts takes of a step has not been measured, and is not planned"),
        (
            {"model": "m", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2},
            "a model that drafts",
        ),
    ],
)
def test_drafts_of_which_no_plan_can_know(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        set_up(0, parse_model_config(LLAMA_8B), EngineConfig("m", speculative_config=json.dumps(asked)), CARDS["h200"])
    assert message in str(refused.value) and str(refused.value).startswith("--speculative-config: ")


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        return str(tmp_path)

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        code = main.main(["plan", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def test_how_many_cards(self, capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
        file = tmp_path / "out.json"
        words = ("--rate", "60", "--in", "1024", "--out", "32", "--ttft", "200", "--tpot", "20", "--output", str(file))
        code, out, _ = self.run(capsys, folder, *words)
        assert code == 0 and "one card holds" in out and f"vserve {folder} -dp 2" in out
        assert "with one of them dead, the load no longer meets it" in out
        rows = json.loads(file.read_text())["rows"]
        assert [row["met"] for row in rows if "met" in row][-1] is True

    def test_with_drafts(self, capsys: pytest.CaptureFixture[str], folder: str) -> None:
        assumed = {"method": "ngram", "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}
        words = ("--rate", "2", "--out", "32", "--tpot", "3", "--speculative-config")
        code, out, _ = self.run(capsys, folder, *words, json.dumps(assumed))
        assert code == 0 and "drafts: up to 7 of every request in a step, of which 2 are assumed to hold" in out
        assert out.rstrip().endswith(f"vserve {folder} --spec-method ngram")
        code, _, err = self.run(capsys, folder, *words, '{"method": "ngram"}')
        assert code == 1 and "how many drafts hold" in err and len(err.splitlines()) == 1

    def test_a_trace(self, capsys: pytest.CaptureFixture[str], folder: str, tmp_path: Path) -> None:
        trace = tmp_path / "trace.jsonl"
        lines = [{"timestamp": 10 * i, "input_length": 300, "output_length": 5} for i in range(50)]
        trace.write_text("\n".join(map(json.dumps, lines)))
        code, out, _ = self.run(capsys, folder, "--trace", str(trace))
        assert code == 0 and len(out.splitlines()) == 4
        trace.write_text('{"timestamp": 1}\n')
        code, _, err = self.run(capsys, folder, "--trace", str(trace))
        assert code == 1 and "line 1: 'input_length' is missing; a line is {" in err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--rate", "1", "--gpu", "tpu"), "--gpu tpu: there are numbers of h200, h100,"),
            ((), "say what is asked: --rate"),
            (("--rate", "1", "--fit", "http://127.0.0.1:9"), "--fit http://127.0.0.1:9: "),
        ],
    )
    def test_wrong_options(
        self, capsys: pytest.CaptureFixture[str], folder: str, words: tuple[str, ...], message: str
    ) -> None:
        code, _, err = self.run(capsys, folder, *words)
        assert code in (1, 2) and message in err and len(err.splitlines()) == 1
