"""What mixtures of experts have beside their layers' parity: how files store experts, and what configs get wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vserve.engine.describe.reading import parse_model_config
from vserve.engine.errors import ModelError
from vserve.engine.models.mlp import with_stored_experts

Parity = Any  # test_model_parity.py


@pytest.fixture(scope="session")
def parity(load_module: Callable[[Path], Any]) -> Parity:
    return load_module(Path(__file__).with_name("test_model_parity.py"))


def stacked(tensors: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
    """The same checkpoint with all experts of a layer in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}
    for prefix in prefixes:
        names = ("w1", "w3", "w2") if "block_sparse_moe" in prefix else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{e}.{name}.weight"] for e in range(5)]) for name in names
        )
        both = torch.cat((gate, up), dim=1)
        for name, matrix in (("gate_up_proj", both), ("down_proj", down)):
            found[f"{prefix}.experts.{name}"] = (matrix.transpose(1, 2) if transposed else matrix).contiguous()
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor(
    parity: Parity, tiny_model: Callable[..., Path], tmp_path: Path, family: str, transposed: bool
) -> None:
    folder = Path(shutil.copytree(tiny_model(family), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    assert any(".experts.4." in name for name in tensors)
    save_file(stacked(tensors, transposed), folder / "model.safetensors", {"format": "pt"})
    found = parity.PagedRunner(parity.load(folder), parity.sequences()).run(parity.CHUNKED)
    assert parity.difference(found, parity.oracle(tiny_model(family))) < 2e-4


def test_experts_whose_two_layouts_have_one_shape_are_stored_as_the_family_says() -> None:
    """Granite 3's smaller mixture: hidden 1024, and twice 512 gates."""
    raw = {"model_type": "granitemoe", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 9}  # fmt: skip
    config = parse_model_config(raw)
    (layer,) = with_stored_experts(config, {"model.layers.0.block_sparse_moe.input_linear.weight": (8, 64, 64)}).layers
    assert layer == config.layers[0] and layer.mlp.stored == "stacked"  # type: ignore[union-attr]


def test_both_names_of_the_number_of_experts(tiny_model: Callable[..., Path]) -> None:
    raw = json.loads((tiny_model("qwen3_moe") / "config.json").read_text())
    number = raw.pop("num_experts", None) or raw.pop("num_local_experts")
    raw.pop("num_local_experts", None)
    for key in ("num_experts", "num_local_experts"):
        spec = parse_model_config({**raw, key: number}).layers[0].mlp
        assert spec.routing.num_experts == number == 5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, there are 8 experts (num_local_experts): correct the"),
        ({"num_local_experts": 5000}, "5000 experts (num_local_experts) of which a token goes to 2: at most 4096 and"),
        ({"num_local_experts": 0}, "num_local_experts is 0, a whole number above 0 belongs there"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is silu"),
    ],
)
def test_configs_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_model_config({"model_type": "mixtral"} | keys)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_expert_that_is_missing_is_named(parity: Parity, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight"):
        parity.load(folder)


def test_a_row_has_the_same_result_in_every_company(parity: Parity, tiny_model: Callable[..., Path]) -> None:
    """Only experts that were chosen are touched, and added in one order: with one row, and with many."""
    experts = parity.load(tiny_model("qwen3_moe")).layers[0].mlp.experts
    x = torch.randn(7, 64)
    ids = torch.tensor([[4, 0, 2], [2, 4, 0], [1, 3, 0], [1, 0, 3], [0, 1, 2], [4, 3, 2], [0, 4, 2]], dtype=torch.int32)
    weights = torch.rand(7, 3)
    together = experts(x, ids, weights)
    for row in range(7):
        alone = experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        torch.testing.assert_close(alone[0], together[row])
    assert torch.equal(experts(x, ids, weights), together)
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 64)
