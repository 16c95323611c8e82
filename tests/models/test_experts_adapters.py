"""Adapters of a mixture's experts beside others: the logits of the weights that PEFT would merge."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from vserve.engine.adapters.adapter import Adapter
from vserve.engine.adapters.layout import AdapterStore, SlotLayout
from vserve.engine.adapters.peft_files import AdapterError
from vserve.engine.adapters.tables import AdapterTables
from vserve.engine.errors import ConfigError
from vserve.engine.families.layer_spec import MoESpec, RoutingSpec
from vserve.engine.layers.experts import Experts
from vserve.engine.link.plan import NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.quant.weights import Placement

Load = Callable[[Path], Any]
FAMILIES = (
    "qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "gpt_oss",
    "minimax_m2", "mimo_v2_flash", "hy_v3", "laguna",
)  # fmt: skip
IN_ONE = ("granitemoe", "gpt_oss")  # whose experts never were modules of their own
TARGETS = ("experts", "q_proj")
FOUR = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "q_proj")
LIMIT = 2e-4  # of logits near 10, in fp32: B A x is not rounded as (W + B A) x; gpt-oss's alone are 1.1e-4 away
SAMPLING = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def parity(load_module: Load) -> Any:
    return load_module(Path(__file__).with_name("test_model_parity.py"))


@pytest.fixture(scope="module")
def mixtures(load_module: Load) -> Any:
    return load_module(Path(__file__).with_name("test_mixtures.py"))


def transformers_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def sequences(parity: Any) -> list[Tensor]:
    """Three."""
    return [*parity.sequences(), parity.sequences()[0].flip(0)[:7]]


def layout_of(model: Any, rank: int = 16) -> SlotLayout:
    paths = tuple(model.weight_map())
    return SlotLayout(model, rank, [name for name in TARGETS if name == "experts" or any(name in p for p in paths)])


class Served:
    """A model with three slots; each sequence has one of them, or none (-1)."""

    def __init__(self, parity: Any, base: Path) -> None:
        self.parity, self.model = parity, parity.load(base)
        self.layout = layout_of(self.model)
        self.store = AdapterStore(self.layout, torch.float32, pin=False)
        self.tables = AdapterTables(self.store, 3, torch.device("cpu"), max_tokens=256, max_rows=4)

    def load(self, slot: int, folder: Path) -> None:
        self.tables.load(slot, self.store.read(str(folder))[0])

    def run(self, slots: list[int], numbers: list[int] | None = None) -> list[Tensor]:
        """Logits of the sequences with these numbers (None: all)."""
        every = sequences(self.parity)
        chosen = [every[number] for number in (range(len(every)) if numbers is None else numbers)]
        runner = self.parity.PagedRunner(self.model, chosen)
        step = runner.step

        def with_adapters(plan: list[Any]) -> Any:
            work = [item for item in plan if item != "|"]
            counts = [count for _, count in work]
            rows = [
                NewRow(row, 0, np.zeros(count, np.int32).tobytes(), count, 0, SAMPLING, slot=slots[which])
                for row, (which, count) in enumerate(work)
            ]
            made = StepPlan(1, list(range(len(work))), counts, [0] * len(work), [], 0, rows, [[]])
            if self.tables.begin(made):
                self.tables.group(made, sum(counts), 0)
            results = step(plan)
            self.tables.end()
            return results

        runner.step = with_adapters
        prompts = [(index, len(sequence) - 3) for index, sequence in enumerate(chosen)]
        found: list[Tensor] = runner.run([["|", *prompts]])
        return found


def logits_of(parity: Any, oracle: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [oracle(sequence[None]).logits[0] for sequence in sequences(parity)]


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_merged_weights(
    family: str, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """A pair of all experts, one of each expert's product with another rank and the attention's beside, and the base
    in one batch: each as merged, as alone, and the base as without adapters. Not to the bit, as it is on a GPU: sums of
    a CPU's products may depend on the number of rows, and an expert gets others where adapters change the routing."""
    base = tiny_model(family)
    model = transformers_model(base)
    plain = logits_of(parity, model)
    served = Served(parity, base)
    in_one = adapter_files.write_experts_adapter(tmp_path / "all", model)
    served.load(2, in_one)
    wanted = {2: logits_of(parity, adapter_files.merge_experts(model, in_one)), -1: plain}
    if family not in IN_ONE:
        others = re.compile(r"(?!.*\.experts\.|.*q_proj$)").match
        single = adapter_files.write_adapter(tmp_path / "single", base, FOUR, rank=3, lora_alpha=6, skip=others)
        served.load(0, single)
        wanted[0] = logits_of(parity, adapter_files.merged_checkpoint(base, single, tmp_path / "merged"))
    without = served.run([-1, -1, -1])
    for slots in ([2, -1, 0], [0, 2, -1], [-1, 0, 2]):
        slots = [slot if slot in wanted else 2 for slot in slots]
        found = served.run(slots)
        for number, slot in enumerate(slots):
            assert gap(found[number], wanted[slot][number]) < LIMIT, (slot, number)
            assert slot < 0 or gap(found[number], plain[number]) > 1e-2
            alone = served.run([slot], [number])[0]
            assert gap(found[number], alone) < LIMIT / 2
        base_number = slots.index(-1)
        assert gap(found[base_number], without[base_number]) < LIMIT / 10


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_on_experts_in_one_tensor(
    family: str, transposed: bool, parity: Any, mixtures: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Adapters of both kinds, whatever the base's file has."""
    plain = tiny_model(family)
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    save_file(mixtures.stacked(load_file(base / "model.safetensors"), transposed), base / "model.safetensors")
    served, model = Served(parity, base), transformers_model(plain)
    single = adapter_files.write_adapter(tmp_path / "single", plain, FOUR)
    in_one = adapter_files.write_experts_adapter(tmp_path / "all", model)
    served.load(0, single)
    served.load(1, in_one)
    wanted = [
        logits_of(parity, adapter_files.merged_checkpoint(plain, single, tmp_path / "merged")),
        logits_of(parity, adapter_files.merge_experts(model, in_one)),
    ]
    found = served.run([0, 1, 0])
    assert max(gap(found[number], wanted[slot][number]) for number, slot in enumerate([0, 1, 0])) < LIMIT


@pytest.mark.parametrize("names", [("gate_up_proj",), ("down_proj",)])
@pytest.mark.parametrize("old", [False, True])
def test_one_product_alone_and_files_of_older_versions(
    names: tuple[str, ...], old: bool, parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Whose sides are alike, so that the version tells; in a slot whose last adapter changed the other product too."""
    base = tiny_model("qwen3_moe", moe_intermediate_size=32 if "gate_up_proj" in names else 64)
    served, model = Served(parity, base), transformers_model(base)
    served.load(1, adapter_files.write_experts_adapter(tmp_path / "before", model))
    folder = adapter_files.write_experts_adapter(tmp_path / "a", model, names, rank=3, old=old)
    served.load(1, folder)
    wanted = logits_of(parity, adapter_files.merge_experts(model, folder, names, old=old))
    assert max(map(gap, served.run([1, 1, 1]), wanted)) < LIMIT


def test_steps_whose_adapters_leave_experts_alone_are_as_ever(
    parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe")
    served = Served(parity, base)
    served.load(0, adapter_files.write_adapter(tmp_path / "a", base, ["q_proj"]))
    served.load(1, adapter_files.write_experts_adapter(tmp_path / "b", transformers_model(base)))
    tables = served.tables
    experts = next(part for part in served.model.modules() if isinstance(part, Experts))
    assert experts.adapter is not None

    def touched(slot: int) -> bool:
        row = NewRow(0, 0, bytes(8), 2, 0, SAMPLING, slot=slot)
        if tables.begin(plan := StepPlan(1, [0], [2], [0], [], 0, [row], [[]])):
            tables.group(plan, 4, 0)
        lora = experts.adapter.lora  # type: ignore[union-attr]
        assert lora is None or lora.slots.tolist() == [slot, slot, -1, -1], "what pads a step has none"
        tables.end()
        return lora is not None

    assert [touched(slot) for slot in (-1, 0, 1, 2)] == [False, False, True, True]  # 2 is not known yet: a warm-up's


def summand(folder: Path, rank: int, size: int, whole: bool, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Of this rank's experts, whose own weights are 0: what the adapter makes alone."""
    place = Placement(torch.float32, torch.device("cpu"), SingleGroup(rank, size), whole)
    holder = Experts(MoESpec(24, RoutingSpec(4 if whole else 5, 2)), 64, place)
    holder.choose({})
    assert (len(holder.mine), holder.span[1]) == ((4 // size, 24) if whole else (5, 24 // size))
    holder.create()
    for parameter in holder.parameters():
        parameter.zero_()
    holder.finish()
    names = holder.weight_map("model.layers.0.mlp.experts")
    layout = SlotLayout(SimpleNamespace(weight_map=lambda: names), 16, ["experts"])  # type: ignore[arg-type]
    tables = AdapterTables(AdapterStore(layout, torch.float32, pin=False), 2, place.device, max_tokens=8, max_rows=4)
    tables.load(1, layout.pack(Adapter.open(folder), torch.float32, False))
    row = NewRow(0, 0, bytes(4 * len(x)), len(x), 0, SAMPLING, slot=1)
    plan = StepPlan(1, [0], [len(x)], [0], [], 0, [row], [[]])
    assert tables.begin(plan)
    tables.group(plan, len(x), 0)
    here = (ids >= holder.mine.start) & (ids < holder.mine.stop)
    ids, weights = (ids - holder.mine.start).where(here, len(holder.mine)), weights.where(here, 0.0)
    found: Tensor = holder(x, ids, weights)
    return found


def test_experts_without_gates_have_none() -> None:
    """Of which it is said that they can have none here, not that the adapter is of another base."""
    spec = MoESpec(24, RoutingSpec(4, 2), activation="relu2", gated=False)
    holder = Experts(spec, 64, Placement(torch.float32, torch.device("cpu"), SingleGroup(0, 1)))
    names = holder.weight_map("model.layers.0.mixer.experts")
    layout = SlotLayout(SimpleNamespace(weight_map=lambda: names), 16)  # type: ignore[arg-type]
    assert layout.others == set(names) and not layout.holders and not layout.size


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["single", "all"])
def test_shares_of_ranks_are_the_whole(whole: bool, kind: str, tmp_path: Path) -> None:
    """Of experts that ranks divide, for five cannot be dealt out, and of four that are."""
    rng, num_experts = torch.Generator().manual_seed(0), 4 if whole else 5
    prefix, tensors = "base_model.model.model.layers.0.mlp.experts", {}
    if kind == "single":
        for expert in range(num_experts):
            for part, n, k in (("gate", 24, 64), ("up", 24, 64), ("down", 64, 24)):
                tensors[f"{prefix}.{expert}.{part}_proj.lora_A.weight"] = torch.randn(2, k, generator=rng)
                tensors[f"{prefix}.{expert}.{part}_proj.lora_B.weight"] = torch.randn(n, 2, generator=rng)
    else:
        for name, n, k in (("", 64, 24), (".base_layer", 48, 64)):
            tensors[f"{prefix}{name}.lora_A.weight"] = torch.randn(2 * num_experts, k, generator=rng)
            tensors[f"{prefix}{name}.lora_B.weight"] = torch.randn(n, 2 * num_experts, generator=rng)
    parameters = [] if kind == "single" else ["experts.gate_up_proj", "experts.down_proj"]
    config = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": [],
        "target_parameters": parameters,
        "peft_version": "0.19",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    x, ids = (
        torch.randn(5, 64, generator=rng),
        torch.tensor([[0, 3], [1, 2], [3, 1 if whole else 4], [2, 0], [0, 1]], dtype=torch.int32),
    )
    weights = torch.rand(5, 2, generator=rng)
    alone = summand(tmp_path, 0, 1, whole, x, ids, weights)
    assert alone.abs().amax(dim=1).min() > 1
    for size in (2, 4):
        shares = [summand(tmp_path, rank, size, whole, x, ids, weights) for rank in range(size)]
        assert not torch.equal(shares[0], alone)
        torch.testing.assert_close(torch.stack(shares).sum(0), alone, atol=1e-5 * float(alone.abs().max()), rtol=0)


def spoil(folder: Path, ending: str, change: Callable[[Tensor], Tensor]) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if name.endswith(ending))
    save_file(tensors | {name: change(tensors[name]).contiguous()}, file)
    return folder


def test_what_does_not_fit_is_said_in_one_line(
    parity: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    base = tiny_model("qwen3_moe")
    model, ours = transformers_model(base), parity.load(base)
    layout = layout_of(ours)
    write = adapter_files.write_experts_adapter

    def error(folder: Path, layout: SlotLayout = layout) -> str:
        with pytest.raises(AdapterError) as raised:
            layout.check(Adapter.open(folder))  # as a stage does that has other layers
        assert "\n" not in str(raised.value)
        return str(raised.value)

    in_one, single = write(tmp_path / "all", model), adapter_files.write_adapter(tmp_path / "single", base, FOUR)
    for folder, changed in ((in_one, "layers.0.mlp.experts.down_proj"), (single, "layers.0.mlp.experts.0.down_proj")):
        for targets in ((), ("q_proj", "gate_proj", "up_proj", "down_proj")[:1]):
            said = error(folder, SlotLayout(ours, 16, targets))
            assert (
                f"changes model.{changed}, and slots have room for that only where --lora-target-modules has exp"
                in said
            )
            assert said.endswith("add it there, or serve it with --merge-lora")
    assert "has the rank 24, and at most 16 fit: raise --max-lora-rank" in error(write(tmp_path / "r", model, rank=24))
    other = write(tmp_path / "other", transformers_model(tiny_model("qwen3_moe", num_experts=4)))
    assert "has 4 experts of [64, 40] for model.layers.0.mlp.experts.down_proj, and the base 5" in error(other)
    narrow = spoil(single, "experts.1.up_proj.lora_B.weight", lambda b: b[:-1])
    assert "layers.0.mlp.experts.1.up_proj maps 64 to 39, and the model's 64 to 40: it is of another base" in error(
        narrow
    )
    many = adapter_files.write_adapter(tmp_path / "many", tiny_model("qwen3_moe", num_experts=6), FOUR)
    assert "changes model.layers.0.mlp.experts.5.down_proj, which the model does not have: it is of another" in error(
        many
    )
    dense = parity.load(tiny_model("qwen3"))
    assert "the model has no such experts" in error(write(tmp_path / "dense", model), SlotLayout(dense, 16))
    with pytest.raises(ConfigError, match="--lora-target-modules has 'experts': this model has down_proj, "):
        SlotLayout(dense, 16, ["experts"])


def test_slots_have_room_for_experts_only_where_they_are_named(parity: Any, tiny_model: Any) -> None:
    """It is much: a slot of all experts' matrices beside one of the rest."""
    model = parity.load(tiny_model("qwen3_moe"))
    config, sizes = model.config, [SlotLayout(model, 16, names).size for names in ((), ("q_proj",), TARGETS)]
    layers = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)]
    each = sum(
        spec.routing.num_experts * 16 * (3 * config.hidden_size + 3 * spec.inner) for spec in layers
    )  # fmt: skip
    assert sizes[2] - sizes[1] == each and sizes[0] < each
