"""The planner: its clock, what fits, how models are divided, and what it says of a load."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ConfigError
from vserve.engine.link.plan import StepPlan
from vserve.engine.options.config import EngineConfig
from vserve.engine.planning.card import CARDS
from vserve.engine.planning.load import MOST_ENGINES, Result, Wanted, divisions, fewest, fitting, knee, replay, steady
from vserve.engine.planning.setup import Setup, set_up
from vserve.engine.planning.simulation import Answer, Ask, Simulation
from vserve.engine.planning.step_model import fit
from vserve.engine.schedule import planner

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
    answers = Simulation(setup.scheduler, setup.stages).run(asks, concurrency)
    return answers, max(answer.last for answer in answers)


def test_every_request_is_answered_whole_and_in_time(setup: Setup) -> None:
    source = random.Random(3)
    asks = [Ask(source.uniform(0, 2), source.randrange(1, 3000), source.randrange(1, 60)) for _ in range(120)]
    for replicas in (1, 3):
        simulation = Simulation(setup.scheduler, setup.stages, replicas)
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
    model = set_up(0, parse_model_config(raw), EngineConfig("m", max_model_len=8192), CARDS["h200"]).stages[0]
    shape = model.shape
    assert shape.num_experts * shape.expert == pytest.approx(29.0e9, rel=0.01)
    read = 2 * (shape.dense + 8 * shape.expert + shape.head)
    assert read == pytest.approx(6.1e9, rel=0.05), "of one token"
    assert model.product_seconds(256, 256) > 5 * model.product_seconds(1, 1)


def test_a_cache_of_8_bits_holds_twice_as_much_and_is_read_faster(setup: Setup) -> None:
    """With a scale for each token and head, 32 numbers of 32 bits beside 2,048 codes a layer: 3 % less than that."""
    model = parse_model_config(LLAMA_8B)
    codes = set_up(0, model, EngineConfig("m", kv_cache_dtype="fp8"), CARDS["h200"])
    scaled = set_up(0, model, EngineConfig("m", kv_cache_dtype="fp8", calculate_kv_scales=True), CARDS["h200"])
    assert codes.cache_tokens == pytest.approx(2 * setup.cache_tokens, rel=1e-3)
    assert scaled.cache_tokens == pytest.approx(codes.cache_tokens * 2048 / (2048 + 64), rel=1e-3)
    times = [closed(one, [Ask(0, 6000, 64)] * 64, 64)[1] for one in (setup, codes)]
    assert times[1] < 0.99 * times[0]


def test_recurrent_states_take_memory_and_time() -> None:
    """Of Qwen 3.5 27B 154 MB a request, the table of states' sizes as others have it; beside it few keys and values."""
    raw = {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48, "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192,
    }  # fmt: skip
    made = set_up(0, parse_model_config(raw), EngineConfig("m"), CARDS["h200"])
    states = made.scheduler.plan.states
    assert states.slot_bytes == pytest.approx(153.9e6, rel=0.1)  # with rings
    assert made.scheduler.max_num_seqs == states.running == (made.cache + states.num_bytes) // 3 // states.slot_bytes
    assert made.cache_tokens * 64 * 1024 == pytest.approx(made.cache, rel=0.02) and states.running > 50
    alone, many = (closed(made, [Ask(0, 128, 64)] * count, count)[1] for count in (1, 64))
    assert 0.0104 < alone / 64 < 0.02, "weights in bf16 take 10.8 ms"
    assert many / 64 > 0.015, "64 states of 2 · 154 MB are read and written in 4.1 ms more"
    asked = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    asked = json.dumps({**asked, "synthetic_acceptance_length": 2.5})
    drafting = set_up(
        0, parse_model_config(raw), EngineConfig("m", speculative_config=asked, load_format="dummy"), CARDS["h200"]
    )
    rings = 8 * 2 * (2 * 16 * 128 + 48 * 128 + 2 * 48) * 48  # bytes of eight more positions
    assert drafting.scheduler.plan.states.slot_bytes == states.slot_bytes + rings
    (plain,), (drafted,) = (replay(one, [Ask(0, 128, 400)]).answers for one in (made, drafting))
    assert plain.tpot / drafted.tpot == pytest.approx(2.5, rel=0.06)


def test_states_without_tiles_are_refused_on_a_card() -> None:
    odd = parse_model_config({"model_type": "qwen3_5_text", "linear_value_head_dim": 96})
    with pytest.raises(ConfigError, match=r"recurrent states of 128 x 96 a head, .* add --device cpu"):
        set_up(0, odd, EngineConfig("m"), CARDS["h200"])


def test_what_does_not_fit_is_refused() -> None:
    deep = parse_model_config(LLAMA_8B | {"num_hidden_layers": 64, "hidden_size": 8192})
    with pytest.raises(ConfigError, match=r"does not fit one l4: of 20\.24 GiB each, weights take"):
        set_up(0, deep, EngineConfig("m"), CARDS["l4"])
    with pytest.raises(ConfigError, match=r"does not fit 2 cards of l4 \(--tensor-parallel-size 2\): of 20\.24 GiB"):
        set_up(0, deep, EngineConfig("m", tensor_parallel_size=2), CARDS["l4"])
    words = r"--max-model-len 8192 does not fit one l4, whose cache holds (\d+) tokens: set it to \1 or less"
    with pytest.raises(ConfigError, match=words):
        narrow = EngineConfig("m", max_model_len=8192, kv_cache_memory_bytes=600_000_000)
        set_up(0, parse_model_config(LLAMA_8B), narrow, CARDS["l4"])


def test_too_long_requests_are_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=r"8000 \+ 400 tokens: at most 8192 fit"):
        replay(setup, [Ask(0, 8000, 400)])


def test_steps_of_a_server_correct_the_card(setup: Setup) -> None:
    """A card a fifth slower, of steps of all sizes with some noise: its products are found, and the error is said."""
    source, steps, model, context = random.Random(1), [], setup.stages[0], 1100
    for _ in range(400):
        decodes = source.randrange(0, 200)
        tokens = decodes + source.choice([0, 100, 900])
        if tokens == 0:
            continue
        known = 1.2 * model.product_seconds(tokens, decodes or 1) + model.moving_seconds(tokens)
        known += model.attention_seconds(decodes * context, (tokens - decodes) * context / 2)
        known += 1e-3 + 1e-6 * (decodes or 1)
        seconds = known * source.uniform(0.98, 1.02)
        steps.append({
            "num_tokens": tokens, "num_decodes": decodes, "num_requests": decodes or 1, "device_seconds": seconds,
        })  # fmt: skip
    costs, error, count = fit(model, steps, 1100)
    assert costs.products == pytest.approx(1.2 * model.costs.products, rel=0.05)
    assert costs.layer == pytest.approx(1.2 * model.costs.layer, rel=0.05)
    assert costs.step == pytest.approx(1e-3, rel=0.2)
    assert error < 0.02 and count == (len(steps) + 1) // 2
    with pytest.raises(ConfigError, match="10 steps are too few"):
        fit(model, steps[:10], 1100)


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


class Second:
    """A stage that takes a second for whatever it computes, and a tenth to hand it over."""

    def seconds(self, plan: StepPlan, shared: int = 0) -> float:
        return 1.0

    def handing_seconds(self, tokens: int) -> float:
        return 0.1


class TestStages:
    @pytest.fixture
    def halves(self) -> Setup:
        config = EngineConfig("m", max_model_len=8192, pipeline_parallel_size=2)
        return set_up(0, parse_model_config(LLAMA_8B), config, CARDS["h200"])

    def test_a_token_passes_all_of_them_before_the_next(self, halves: Setup) -> None:
        simulation = Simulation(halves.scheduler, [Second(), Second(), Second()])
        (answer,) = simulation.run([Ask(5.0, 8, 4)])
        assert answer.first == pytest.approx(5 + 3.2) and answer.tpot == pytest.approx(3.2)

    def test_they_compute_as_many_plans_at_once(self, halves: Setup) -> None:
        """Two who decode are in two plans: each gets a token every 2.1 seconds, as one alone does."""
        answers = Simulation(halves.scheduler, [Second(), Second()]).run([Ask(0, 8, 10), Ask(0.5, 8, 10)])
        assert [answer.tpot for answer in answers] == [pytest.approx(2.1, rel=0.15)] * 2

    def test_many_streams_keep_both_busy(self, setup: Setup, halves: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """One stream is not faster than on one card; many are by about as much as there are cards, but where one plan
        takes all who decode."""
        load = [Ask(0, 256, 64)] * 256
        seconds = {one: closed(one, load, 128)[1] for one in (setup, halves)}
        assert 1.4 < seconds[setup] / seconds[halves] < 2.1
        assert closed(halves, [Ask(0, 128, 64)], 1)[1] > closed(setup, [Ask(0, 128, 64)], 1)[1]
        monkeypatch.setattr(planner, "whose_turn", lambda decodes, *_: decodes)
        assert closed(halves, load, 128)[1] > 1.3 * seconds[halves]


class TestDivisions:
    def test_those_that_the_model_can_be_divided_by(self) -> None:
        """The fewest cards first, then the fewest stages; no more than one host has."""
        model = parse_model_config(LLAMA_8B | {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128})
        found = [(c.tensor_parallel_size, c.pipeline_parallel_size) for c in divisions(model, EngineConfig("m"))]
        assert found[:6] == [(1, 1), (2, 1), (1, 2), (1, 3), (4, 1), (2, 2)]
        assert len(found) == 8 + 4 + 2 and max(ranks * stages for ranks, stages in found) == 8

    def test_those_that_fit_with_no_more_stages_than_that_takes(self) -> None:
        """30 GiB of weights over cards of 22."""
        model = parse_model_config(LLAMA_8B | {"num_hidden_layers": 64})
        config = EngineConfig("m", max_model_len=4096)
        found = fitting(divisions(model, config), lambda config: set_up(0, model, config, CARDS["l4"]))
        assert [setup.options for setup in found] == [" -tp 2", " -pp 2", " -tp 4", " -tp 8"]
        with pytest.raises(ConfigError, match="does not fit 8 cards of l4"):
            huge = parse_model_config(LLAMA_8B | {"hidden_size": 16384, "intermediate_size": 262144})
            fitting(divisions(huge, config), lambda config: set_up(0, huge, config, CARDS["l4"]))

    def test_the_fewest_cards_of_the_least_divided_engines(self, setup: Setup) -> None:
        """Against all of them, where an engine of so many cards holds so much."""
        source = random.Random(7)
        for _ in range(300):
            sizes = sorted(source.sample(range(1, 9), 3))
            holds = {size: source.choice([0, 1, 2]) * source.uniform(0.3, 1.2) * size for size in sizes}
            rate = source.uniform(0.5, 12)
            setups: Any = [Engines(size) for size in sizes]
            fine = [(size * count, size) for size in sizes for count in range(1, 200) if holds[size] * count >= rate]

            def ask(engines: Any, count: int, rate: float = rate, holds: dict[int, float] = holds) -> Result:
                late = Answer(Ask(0, 1, 1), 0, *[0.0 if holds[engines.cards] * count >= rate else 9.0] * 2)
                return Result(0.0, [late], 0)

            def guess(engines: Any, rate: float = rate, holds: dict[int, float] = holds) -> int:
                held = holds[engines.cards]
                return max(1, int(rate / held * source.uniform(0.6, 1.4))) if held else 0

            best, asked = fewest(setups, Wanted(ttft=1.0), ask, guess)
            assert (best and (best.cards, best.setup.cards)) == min(fine, default=None)
            assert len({(fleet.setup.cards, fleet.replicas) for fleet in asked}) == len(asked), "nothing is asked twice"

    def test_from_a_poor_guess_to_as_many_as_may_be(self) -> None:
        """Few are asked, none above the limit, and who is likely to need more than that makes room for the next."""
        setups: Any = [Engines(1), Engines(2)]

        def search(needed: dict[int, int], guesses: dict[int, int]) -> tuple[Any, list[tuple[int, int]]]:
            def ask(engines: Any, count: int) -> Result:
                late = Answer(Ask(0, 1, 1), 0, *[0.0 if count >= needed[engines.cards] else 9.0] * 2)
                return Result(0.0, [late], 0)

            best, asked = fewest(setups, Wanted(ttft=1.0), ask, lambda engines: guesses[engines.cards])
            return best and (best.setup.cards, best.replicas), [(f.setup.cards, f.replicas) for f in asked]

        for needed in range(1, MOST_ENGINES + 1):
            for guess in (1, 5, MOST_ENGINES):
                best, asked = search({1: needed, 2: 99}, {1: guess, 2: 1})
                assert best == (1, needed) and len(asked) <= 14 and asked == sorted(asked)
        best, asked = search({1: 99, 2: 99}, {1: 1, 2: 60})
        assert best is None and {count for _, count in asked} == {1, 2, 4, 8, 16, 32, 64, 60, 61, 63}
        best, asked = search({1: 99, 2: 40}, {1: MOST_ENGINES + 1, 2: 33})
        assert best == (2, 40) and {cards for cards, _ in asked} == {2}


def answers(*times: tuple[float, float, float]) -> Result:
    """Of a trace whose requests were sent, had their first token and ended then."""
    return Result(0.0, [Answer(Ask(sent, 8, 8), sent, first, last) for sent, first, last in times], 0)


class TestQueueOfATrace:
    def test_as_a_trace_shows_it(self) -> None:
        even = [i / 10 for i in range(1000)]
        assert answers(*((t, t + 0.2, t + 2) for t in even)).keeps_up is True
        assert answers(*((t, t + 0.3 * t, t + 0.3 * t + 2) for t in even)).keeps_up is False
        assert answers(*((t, t + 0.1 * t, t + 0.1 * t + 2) for t in even)).keeps_up is True, "to 15 %, as of a rate"
        assert answers(*((t, t + 0.2, t + 2 + 0.2 * t) for t in even)).keeps_up is False, "its tokens are what waits"

        assert answers(*((t, t + 0.3 * t, t + 0.3 * t + 20) for t in even)).keeps_up is False, "they wait to begin"

    def test_a_burst_that_is_worked_off(self) -> None:
        even = [i / 10 for i in range(1000)]
        burst = [(40.0, 41.0 + i / 20, 42.0 + i / 20) for i in range(400)]
        calm = [(t, t + 0.2, t + 2) for t in even]
        assert answers(*sorted(calm + burst)).keeps_up is True
        late = [(100.0, 101.0 + i / 40, 102.0 + i / 40) for i in range(400)]
        assert answers(*sorted(calm + late)).keeps_up is True, "as long as it takes no large part of the time"

    def test_what_does_not_show_it(self) -> None:
        """All at once, little time, and answers that take as long as the trace."""
        assert answers(*((0.0, 1.0 + i, 2.0 + i) for i in range(100))).keeps_up is None
        assert answers(*((i / 10, i / 2, 1 + i / 2) for i in range(100))).keeps_up is None
        assert answers(*((i / 10, i / 10 + 1, 10 + 3 * i / 10) for i in range(300))).keeps_up is None
        calm, burst = [(i, i + 1, i + 2) for i in range(100)], [(100, 101 + i / 20, 102 + i / 20) for i in range(900)]
        assert answers(*calm, *burst).keeps_up is None, "nothing comes after it"
        assert Wanted(ttft=9.0).held(answers((0.0, 1.0, 2.0))), "what was met counts as met"

    def test_of_the_clock(self, setup: Setup) -> None:
        """Prompts that take an engine a sixth of a second: six a second, not eight."""
        load = [Ask(i / 8, 7000, 2) for i in range(240)]
        assert [replay(setup, load, replicas).keeps_up for replicas in (1, 2)] == [False, True]
        assert replay(setup, [Ask(0, 7000, 2)] * 240).keeps_up is None
        wanted = Wanted(tpot=9.0)
        assert wanted.met(replay(setup, load)) and not wanted.held(replay(setup, load))


class Engines:
    """A setup of which only the number of cards counts."""

    def __init__(self, cards: int) -> None:
        self.cards = cards
