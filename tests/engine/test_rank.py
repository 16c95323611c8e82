"""What a rank does to start, and what it reports of itself when it is ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.describe.model_config import ModelConfig
from vserve.engine.describe.reading import read_folder
from vserve.engine.families.layer_spec import KVSpec
from vserve.engine.options.config import EngineConfig
from vserve.engine.parallel.group import ALONE
from vserve.engine.planning.memory import MemoryPlan
from vserve.engine.quant.codes import Codes
from vserve.engine.quant.experts import PackedExperts
from vserve.engine.quant.matrix import PackedMatrix
from vserve.engine.quant.weights import Placement
from vserve.engine.ranks import agreement
from vserve.engine.start import rank, warm_steps
from vserve.engine.start.engine import Engine
from vserve.engine.step.runner import ModelRunner
from vserve.kernels.linear import linear_hopper
from vserve.kernels.linear.quant_many import many_tile, rows_of_tiles


@pytest.mark.parametrize(
    "options, fitted",
    [
        ({}, ()),
        ({"num_gpu_blocks_override": 4}, ("max_model_len",)),
        ({"max_num_batched_tokens": 8}, ("max_num_seqs",)),
        ({"max_num_batched_tokens": 8, "num_gpu_blocks_override": 4}, ("max_model_len", "max_num_seqs")),
        ({"num_gpu_blocks_override": 4, "max_model_len": 64}, ()),
    ],
    ids=str,
)
def test_names_the_options_that_were_fitted(tiny_model: Any, options: dict[str, int], fitted: tuple[str, ...]) -> None:
    config = EngineConfig(str(tiny_model("llama")), device="cpu", cpu_threads=1, **options)  # type: ignore[arg-type]
    assert Engine(config, lambda progress: None).info.fitted == fitted


class Met(Exception):
    """Ranks have met."""


@pytest.mark.parametrize("disabled", [False, True])
def test_sums_of_our_own_only_where_they_are_wanted(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    """--disable-custom-all-reduce keeps them off."""
    told: list[bool] = []

    def meet(seat: Any, device: Any, symmetric: bool, *rest: Any) -> Any:
        told.append(symmetric)
        raise Met

    monkeypatch.setattr(rank, "meet", meet)
    config = EngineConfig(
        str(tiny_model("llama")), device="cpu", cpu_threads=1, disable_custom_all_reduce=disabled
    )  # fmt: skip
    with pytest.raises(Met):
        Engine(config, lambda progress: None)
    assert told == [not disabled]


class Card:
    """A runner that only tells what is asked of it, and in which order."""

    layout = SimpleNamespace(windows=(0,))
    device = SimpleNamespace(type="cuda")
    model = SimpleNamespace(config=SimpleNamespace(layers=()), modules=lambda: ())
    model_drafter = latent_prompts = seeing = None

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> Any:
            self._calls.append((name, *arguments))
            if name == "dummy_step":
                return SimpleNamespace(device_seconds=0.01)
            return SimpleNamespace(shapes=lambda: ["shape"]) if name == "plan_graphs" else None

        return called


@pytest.mark.parametrize("eager", [False, True])
def test_the_order_of_start_up_on_a_card(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(rank, "_choose_device", lambda *_: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(rank, "accumulate_in_fp32", lambda: calls.append("accumulate_in_fp32"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (calls.append("mem_get_info"), 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(rank, "has_kernels", lambda device: True)
    monkeypatch.setattr(linear_hopper, "num_processors", lambda device: 132)

    def load(path: object, config: ModelConfig, **options: Any) -> Any:
        calls.append("load_model")
        return SimpleNamespace(config=config)

    monkeypatch.setattr(rank, "load_model", load)
    monkeypatch.setattr(rank, "describe", lambda model: {})
    monkeypatch.setattr(rank, "describe_experts", lambda model: {})
    monkeypatch.setattr(rank, "ModelRunner", lambda model, **options: calls.append("runner") or Card(calls))
    layout = KVLayout.of([KVSpec(1, 8, 8)], 16, 32)
    plan = MemoryPlan(80, 72, 16, 2, 1, 3, 50, 3, 32, layout, ("context cut",))
    monkeypatch.setattr(rank, "plan_memory", lambda *given: calls.append(("plan_memory", *given[1:])) or plan)
    config = EngineConfig(str(tiny_model("llama")), dtype="float16", enforce_eager=eager)
    made = Engine(config, lambda progress: calls.append(progress.phase), lambda: calls.append("before_memory"))
    half, worst = torch.float16, rank.WORST_SAMPLING
    graphs = [] if eager else [next(call for call in calls if call[0] == "capture_graphs")]
    assert calls == [
        "device", "accumulate_in_fp32", "mem_get_info", "config", "download", "config", "weights", "load_model",
        "compilation", "before_memory", "memory", "runner",
        *([] if eager else [("plan_graphs", 512, 1024, (2048, 4224))]),
        ("plan_memory", config, half, 8192, () if eager else ["shape"], made.rank.world), ("make_rows", 32),
        ("bind_cache", 3, half),
        "warm-up", *(("dummy_step", *step) for step in warm_steps.warm_up_steps(1024, 8192)),
        *([] if eager else ["graphs", *graphs, ("dummy_step", 1024, 8192, worst)]), ("count_compilations",),
    ]  # fmt: skip
    assert made.rank.num_threads is None and made.settings.depth == 2 and made.info.fitted == ("max_model_len",)


def test_a_mixture_warms_the_tiles_of_its_experts_up(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(config=read_folder(tiny_model("mixtral")), modules=lambda: [])
    tokens = warm_steps.expert_steps(model)
    assert tokens and tokens == sorted(set(tokens))
    packed = PackedExperts(4, 4, Placement(torch.bfloat16, torch.device("cpu")), 0.0, lambda: None)
    packed._codes["down"] = SimpleNamespace(kind="e4m3")
    model.modules = lambda: [packed]
    sizes = {"e4m3": [7777]}
    monkeypatch.setattr(warm_steps, "tokens_of_codes", lambda top_k, experts, kinds: sizes.get(*kinds, []))
    assert warm_steps.expert_steps(model) == [*tokens, 7777]
    met = {step[1] for step in warm_steps.warm_up_steps(1024, 8192, tokens)}
    assert {count for count in tokens if count <= 8192} <= met
    met = {step[1] for step in warm_steps.adapter_steps(1024, 8192, tokens)}
    assert {count for count in tokens if count <= 8192} <= met


@pytest.mark.parametrize("max_num_seqs", [1, 64, 256, 1024])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_codes_warm_their_tiles_up(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, bits: int) -> None:
    """Whatever number of tokens a prompt has, and however few requests there may be."""
    codes = Codes(torch.zeros(64, 128, dtype=torch.int8), torch.ones(64, 1), 128, bits)
    matrices = [PackedMatrix(codes, torch.bfloat16) for _ in range(3)]
    for part, rows in zip(matrices, (4096, 8192, 30000), strict=True):
        part.matrix, part.few_rows = part.matrix._replace(rows=rows), 1023  # as on a card
    card = Card(calls := [])
    monkeypatch.setattr(Card, "adapters", None, raising=False)
    monkeypatch.setattr(card, "model", SimpleNamespace(config=card.model.config, modules=lambda: matrices))
    settings = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192, draft_depths=())
    rank.warm_up(card, settings, ALONE)  # type: ignore[arg-type]
    for part in matrices:
        met = {many_tile(call[2], part.matrix.rows, bits) for call in calls}
        assert {many_tile(m, part.matrix.rows, bits) for m in range(1, 1024)} <= met
    for part in matrices:
        part.few_rows = 48  # FP8 multiplies by FP8 from there on
    assert warm_steps.tile_steps(card.model) == []


@pytest.mark.parametrize(
    ("mine", "other", "found"),
    [([65, 129], [], [65, 129]), ([], [65, 129], [65, 129]), ([300, 65], [65], [65, 300]), ([], [], [])],
)
def test_stages_warm_up_with_the_same_steps(mine: list[int], other: list[int], found: list[int]) -> None:
    """Also where one of them has codes and the other has none: a step's hidden states go from each to the next."""
    answers = [[len(other)], other + [-1] * (len(mine) - len(other))]

    def all_gather(x: torch.Tensor, dim: int) -> torch.Tensor:
        answer = torch.tensor(answers.pop(0), dtype=x.dtype)
        assert len(answer) == len(x), "ranks that tell different amounts wait for ever"
        return torch.cat((x, answer), dim)

    group = SimpleNamespace(size=2, all_gather=all_gather)
    assert agreement.union(group, torch.device("cpu"), mine) == found  # type: ignore[arg-type]


def test_a_lone_prompt_fits_a_context_where_latents_are_expanded() -> None:
    """Or their kernels would be met by requests only, where a step has more tokens than a context."""
    runner = SimpleNamespace(model=Card.model, model_drafter=None, latent_prompts=object(), max_model_len=4096)
    assert warm_steps.prompt_steps(runner, 8192) == [4096]  # type: ignore[arg-type]
    runner.latent_prompts = None
    assert warm_steps.prompt_steps(runner, 8192) == []  # type: ignore[arg-type]


def test_who_drafts_has_tiles_of_its_own() -> None:
    part = PackedMatrix(Codes(torch.zeros(64, 128, dtype=torch.int8), torch.ones(64, 1), 128, 4), torch.bfloat16)
    part.matrix, part.few_rows = part.matrix._replace(rows=4096), 1023  # as on a card
    drafter = SimpleNamespace(network=SimpleNamespace(modules=lambda: [part]))
    runner = SimpleNamespace(model=Card.model, model_drafter=drafter, latent_prompts=None)
    assert warm_steps.prompt_steps(runner, 8192) == sorted(rows_of_tiles(4096, "int4"))  # type: ignore[arg-type]


def test_a_step_that_is_made_up_has_requests_for_all_its_tokens(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or kernels for many tokens would be met by requests only, where contexts are short."""
    config = EngineConfig(
        str(tiny_model("llama")), device="cpu", cpu_threads=1, max_model_len=16, max_num_seqs=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    runner = Engine(config, lambda progress: None).rank.runner
    assert isinstance(runner, ModelRunner)
    execute, plans = runner.execute, []
    monkeypatch.setattr(runner, "execute", lambda plan: (plans.append(plan), execute(plan)))
    for asked, rows, tokens in (((1, 40), 3, 40), ((1, 90), 4, 64), ((2, 8), 2, 8), ((1, 16), 1, 16)):
        runner.dummy_step(*asked, warm_steps.GREEDY)
        assert (len(plans[-1].rows), plans[-1].total_tokens) == (rows, tokens)
