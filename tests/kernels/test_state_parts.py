"""What stands around a recurrence: convolutions alone, norms with gates, copies of slots."""

from __future__ import annotations

import pytest
import torch

from vserve.kernels.state import gated_norm, short_conv, slots

from .states import WIDTH, Layer, Piece

PATHS = ["torch", "triton"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("biased", [False, True])
def test_convolution_alone(path: str, activation: str | None, biased: bool, device: str, rng: torch.Generator) -> None:
    """As a layer has it whose only state is the ring: convolve, then write."""
    layer = Layer(rng, device)
    bias = torch.randn(layer.channels, generator=rng).to(device) if biased else None
    one, other = layer.sequence(60, 3), layer.sequence(60, 4)

    def convolve(raw: torch.Tensor, gates: torch.Tensor, *others: object) -> torch.Tensor:
        step = others[5]
        out = getattr(short_conv, f"short_conv_{path}")(raw, layer.weight, layer.ring, step, bias, activation)
        getattr(short_conv, f"write_ring_{path}")(raw, gates, layer.ring, step, WIDTH)
        return out[:, : layer.heads * layer.value_dim].unflatten(1, (layer.heads, layer.value_dim))

    layer.run(convolve, [], [Piece(one, 2, True), Piece(other, 30)], tokens=40)
    layer.run(convolve, [one], [Piece(other, 13)], padding=(1, 1))
    layer.run(convolve, [one, other], [])
    for sequence in (one, other):
        raw = sequence.raw[: sequence.computed].double()
        full = torch.cat((raw.new_zeros(WIDTH - 1, raw.shape[1]), raw))
        wide = sum(full[tap : tap + len(raw)] * layer.weight[:, tap].double() for tap in range(WIDTH))
        wide = wide if bias is None else wide + bias
        wide = wide * torch.sigmoid(wide) if activation else wide
        found = torch.cat(sequence.outputs).flatten(1).double()
        torch.testing.assert_close(found, wide[:, : found.shape[1]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_norm(path: str, gate: str, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    o = torch.randn(5, 6, 16, generator=rng).to(dtype).to(device)
    z = torch.randn(5, 100, generator=rng).to(dtype).to(device)[:, 2:98]
    weight = torch.randn(16, generator=rng).to(dtype).to(device)
    wide = o.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    factor = torch.sigmoid(z.double()) * (z.double() if gate == "silu" else 1)
    expected = normed.flatten(1) * factor
    found = getattr(gated_norm, f"gated_rms_norm_{path}")(o, z, weight, 1e-6, gate)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=eps)


def test_unknown_gate() -> None:
    with pytest.raises(ValueError, match="'tanh'"):
        gated_norm.gated_rms_norm(torch.zeros(1, 1, 4), torch.zeros(1, 4), torch.zeros(4), 1e-6, "tanh")


@pytest.mark.parametrize("path", PATHS)
def test_copies(path: str, device: str, rng: torch.Generator) -> None:
    tensors = [torch.randn(9, *shape, generator=rng).to(device) for shape in ((3, 5), (2, 4, 4))]
    tensors.append(torch.randn(9, 20001, generator=rng).half().to(device))
    before = [tensor.clone() for tensor in tensors]
    src, dst = torch.tensor([3, 8, 0, 3], dtype=torch.int32), torch.tensor([1, 4, 0, 7], dtype=torch.int32)
    getattr(slots, f"copy_slots_{path}")(tensors, src.to(device), dst.to(device))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[0, 3, 2, 3, 8, 5, 6, 3, 8]])
