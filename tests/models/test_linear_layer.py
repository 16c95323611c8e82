"""Linear: fused parts, shares of tensor parallelism, methods and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vserve.engine.layers.embedding import Embedding, LMHead
from vserve.engine.layers.linear import Linear
from vserve.engine.parallel.group import SingleGroup
from vserve.engine.quant.unquantized import Products, Unquantized
from vserve.engine.quant.weights import Placement
from vserve.kernels.norm.activation import silu_mul

CPU = Placement(torch.float32, torch.device("cpu"))
HEADS = {"q": 8 * 4, "k": 2 * 4, "v": 2 * 4}


def whole(parts: dict[str, int], in_features: int, bias: bool) -> dict[tuple[str, str], Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {(part, "weight"): torch.randn(rows, in_features, generator=generator) for part, rows in parts.items()}
    if bias:
        tensors |= {(part, "bias"): torch.randn(rows, generator=generator) for part, rows in parts.items()}
    return tensors


def filled(tensors: dict[tuple[str, str], Tensor], *args: Any, **kwargs: Any) -> Linear:
    layer = Linear(*args, **kwargs)
    layer.choose({})
    layer.create()
    for part in layer.shape.parts:
        of_part = {kind: tensor for (owner, kind), tensor in tensors.items() if owner == part}
        assert {kind: stored.shape for kind, stored in layer.expected(part).items()} == {
            kind: tuple(tensor.shape) for kind, tensor in of_part.items()
        }
        layer.load(part, of_part)
    layer.finish()
    return layer


def test_parts_are_fused_in_order() -> None:
    tensors = whole(HEADS, 16, bias=True)
    layer = filled(tensors, 16, HEADS, place=CPU, rule="column", unit=4, bias=True)
    x = torch.randn(3, 16)
    for part, y in zip(HEADS, layer(x).split(list(HEADS.values()), dim=1), strict=True):
        torch.testing.assert_close(y, functional.linear(x, tensors[part, "weight"], tensors[part, "bias"]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_a_column_layer_hold_whole_heads(size: int) -> None:
    """Two key heads over four ranks: neighbours hold the same one, as the query heads of a rank need."""
    tensors = whole(HEADS, 16, bias=True)
    x = torch.randn(3, 16)
    full = {part: functional.linear(x, tensors[part, "weight"], tensors[part, "bias"]) for part in HEADS}
    for rank in range(size):
        place = replace(CPU, group=SingleGroup(rank, size))
        layer = filled(tensors, 16, HEADS, place=place, rule="column", unit=4, bias=True)
        q, k, v = layer(x).split([rows for _, rows in layer.shape.spans.values()], dim=1)
        torch.testing.assert_close(q, full["q"].chunk(size, dim=1)[rank])
        kv_heads = max(2 // size, 1)
        first = rank * 2 // size
        for part, found in (("k", k), ("v", v)):
            torch.testing.assert_close(found, full[part].view(3, 2, 4)[:, first : first + kv_heads].flatten(1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_a_row_layer_sum_to_the_whole(size: int) -> None:
    tensors = whole({"out": 6}, 32, bias=True)
    x = torch.randn(3, 32)
    total = torch.zeros(3, 6)
    for rank in range(size):
        place = replace(CPU, group=SingleGroup(rank, size))
        layer = filled(tensors, 32, {"out": 6}, place=place, rule="row", unit=4, bias=True)
        total += layer(x.narrow(1, *layer.shape.input_span))
    torch.testing.assert_close(total, functional.linear(x, tensors["out", "weight"], tensors["out", "bias"]))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="8 parts cannot be divided over 3 ranks: choose a divisor of 8"):
        Linear(16, HEADS, place=replace(CPU, group=SingleGroup(0, 3)), rule="column", unit=4)


class Adds:
    """An adapter of steps that are active."""

    active = True

    def __init__(self, delta: Callable[[Tensor], Tensor]) -> None:
        self._delta = delta

    def added(
        self, x: Tensor, multiply: Callable[[], Tensor], late: bool = False, gated: bool = False
    ) -> Tensor:  # fmt: skip
        y = multiply().add_(self._delta(x))
        return silu_mul(y) if gated else y

    def share(self, x: Tensor) -> None:
        return None


def test_adapter_sees_input_and_output() -> None:
    tensors = whole({"out": 6}, 8, bias=False)
    layer = filled(tensors, 8, {"out": 6}, place=CPU)
    x = torch.randn(2, 8)
    plain = layer(x)
    layer.adapter = Adds(lambda given: given[:, :6])
    torch.testing.assert_close(layer(x), plain + x[:, :6])


def test_another_method_replaces_the_product() -> None:
    class Doubled(Unquantized):
        def multiply(self, x: Tensor, residual: Tensor | None = None, late: bool = False) -> Tensor:
            return 2 * super().multiply(x, residual)

    tensors = whole({"out": 6}, 8, bias=False)
    x = torch.randn(2, 8)
    layer = filled(tensors, 8, {"out": 6}, place=CPU)
    weight = layer.method.weight
    layer.method = Doubled(layer.shape)
    layer.method.weight, layer.method.bias = weight, None
    torch.testing.assert_close(layer(x), 2 * functional.linear(x, tensors["out", "weight"]))


@pytest.mark.parametrize("size", [1, 2])
def test_tied_output_shares_the_embedding_memory(size: int) -> None:
    for rank in range(size):
        place = Placement(torch.bfloat16, torch.device("cpu"), SingleGroup(rank, size))
        embedding = Embedding(10, 4, place)
        head = LMHead(10, 4, place, tied=embedding)
        for holder in (embedding, head):
            holder.choose({})
            holder.create()
        embedding.load("", {"weight": torch.randn(10, 4)})
        assert head.expected("out") == {}
        head.finish()
        assert head.method.weight.untyped_storage().data_ptr() == embedding.weight.untyped_storage().data_ptr()
        x = torch.randn(2, 4, dtype=torch.bfloat16)
        logits = head(x)
        assert logits.dtype is torch.float32 and logits.shape == (2, 10)
        mine = logits.chunk(size, dim=1)[rank]
        torch.testing.assert_close(mine, functional.linear(x, embedding.weight.chunk(size)[rank]).float())


@pytest.mark.parametrize("adapted", [False, True])
def test_gated_parts(adapted: bool) -> None:
    """With an adapter, the activation comes after what it changes."""
    parts = {"gate": 6, "up": 6}
    tensors = whole(parts, 16, bias=True)
    layer = filled(tensors, 16, parts, place=CPU, rule="column", bias=True)
    x = torch.randn(3, 16)
    if adapted:
        layer.adapter = Adds(lambda given: torch.ones(1))
    gate, up = (functional.linear(x, tensors[part, "weight"], tensors[part, "bias"]) + adapted for part in parts)
    torch.testing.assert_close(layer.silu_mul(x), functional.silu(gate) * up)


def test_a_gated_product_takes_the_adapters_share_where_it_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is such a pass for so many rows, and the adapter has a share for it; else the adapter adds."""
    x, given, asked = torch.randn(3, 16), object(), []

    class Shares(Adds):
        def share(self, x: Tensor) -> Any:
            asked.append(len(x))
            return given if len(asked) == 1 else None

    layer = filled(whole({"gate": 6, "up": 6}, 16, bias=False), 16, {"gate": 6, "up": 6}, place=CPU, rule="column")
    layer.adapter = Shares(lambda given: torch.ones(1))
    apart = layer.silu_mul(x)
    assert not asked, "no pass, no share"
    joined = torch.zeros(3, 6)
    monkeypatch.setattr(Products, "joins", lambda self, rows: rows == 3)
    monkeypatch.setattr(Products, "silu_mul", lambda self, x, weight, share=None: joined if share is given else None)
    assert layer.silu_mul(x) is joined
    torch.testing.assert_close(layer.silu_mul(x), apart)
    assert asked == [3, 3]


def test_products_of_few_and_of_many_rows_add_to_the_residual() -> None:
    """Of others, or where an adapter has to see a product of many, the caller adds."""
    layer = filled(whole({"out": 6}, 8, bias=False), 8, {"out": 6}, place=CPU)
    x, before = torch.randn(3, 8), torch.randn(3, 6)

    def added() -> bool:
        residual = before.clone()
        y = layer.add_to(residual, x)
        if y is None:
            torch.testing.assert_close(residual, before + layer(x))
            return True
        assert torch.equal(residual, before) and torch.equal(y, layer(x))
        return False

    assert not added(), "never on the CPU"
    layer.method.add_rows = 3
    assert added()
    layer.adapter = Adds(lambda given: torch.ones(1))
    assert not added()
    layer.adapter.active = False
    assert added()
    layer.adapter, layer.method.add_rows = None, 4
    assert not added()
    layer.method.add_up_to = 3
    assert not added(), "nobody gains by it"
    layer.adds_few_rows = True
    assert added()
    layer.adapter = Adds(lambda given: torch.ones(1))
    assert added(), "rows without adapter have the same bits whatever the step"
    layer.method.add_up_to = 2
    assert not added()
