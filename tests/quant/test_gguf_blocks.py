"""Each block format against gguf.dequantize, bit by bit, on random blocks that have every code and every scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from vserve.engine.errors import ModelError
from vserve.engine.quant.ggml_types import BLOCKS, BY_NAME, CODE_BOOKS, REMOVED, TYPES, GGUFScheme
from vserve.engine.quant.gguf_blocks import FORMATS, dequantized

ROWS, BLOCKS_A_ROW = 64, 24


@pytest.fixture(scope="session")
def random_blocks(gguf_models: Any) -> Callable[..., np.ndarray]:
    """(name, seed) → [ROWS, bytes of a row]; scales are tiny and large ones too."""

    def make(name: str, seed: int = 0) -> np.ndarray:
        columns = BLOCKS_A_ROW * BY_NAME[name].elements
        return gguf_models.random_blocks(name, ROWS, columns, seed, (1e-6, 1e-3, 1.0, 100.0))

    return make


def same_bits(one: torch.Tensor, other: np.ndarray) -> bool:
    return np.array_equal(one.cpu().numpy().view(np.uint32), np.ascontiguousarray(other).view(np.uint32))


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BLOCKS)
def test_decoded_as_gguf_does(random_blocks: Any, name: str, device: str) -> None:
    raw = random_blocks(name)
    columns = BLOCKS_A_ROW * BY_NAME[name].elements
    codes = FORMATS[name].decode({"weight": torch.from_numpy(raw).to(device)}, ROWS, columns)
    wanted = quants.dequantize(raw, GGMLQuantizationType[name])
    assert np.isfinite(wanted).all() or name == "MXFP4"  # whose largest scales overflow
    assert codes.shape == (ROWS, columns)
    assert len(codes.codes.unique()) == 2 ** FORMATS[name].bits  # each of them was tried
    assert codes.codes.is_contiguous() and codes.scales.is_contiguous()
    # -0 and 0 differ in one bit that no product shows: the sum with 0 makes them one
    assert same_bits(codes.dequantize() + 0.0, wanted + np.float32(0))


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_cut_before_as_after(random_blocks: Any, name: str) -> None:
    raw = torch.from_numpy(random_blocks(name, seed=1))
    columns = BLOCKS_A_ROW * BY_NAME[name].elements
    whole = FORMATS[name].decode({"weight": raw}, ROWS, columns).dequantize()
    part = FORMATS[name].decode({"weight": raw[8:24]}, 16, columns).dequantize()
    assert torch.equal(part, whole[8:24])


@pytest.mark.parametrize("name", BLOCKS)
def test_dummies_look_like_weights(name: str) -> None:
    codes = FORMATS[name].dummy(64, 1024, torch.Generator().manual_seed(0))
    decoded = FORMATS[name].decode(
        {"weight": torch.zeros(64, BY_NAME[name].row_bytes(1024), dtype=torch.uint8)}, 64, 1024
    )
    for field in ("codes", "scales", "minima", "table"):
        one, other = getattr(codes, field), getattr(decoded, field)
        assert (one is None) == (other is None), field
        assert one is None or (one.shape, one.dtype) == (other.shape, other.dtype), field
    values = codes.dequantize()
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    if name not in ("IQ4_NL", "IQ4_XS"):  # whose table is askew
        assert abs(values.mean().item()) < 0.005
    again = FORMATS[name].dummy(64, 1024, torch.Generator().manual_seed(0))
    assert torch.equal(codes.codes, again.codes)


@pytest.mark.parametrize("name", CODE_BOOKS)
def test_code_books_are_dequantised(random_blocks: Any, name: str) -> None:
    raw = random_blocks(name)
    wanted = quants.dequantize(raw, GGMLQuantizationType[name])
    values = dequantized(torch.from_numpy(raw), BY_NAME[name])
    assert values.shape == (ROWS, BLOCKS_A_ROW * BY_NAME[name].elements)
    assert np.array_equal(values.numpy(), wanted, equal_nan=True)


def test_types_are_those_of_gguf() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for kind, (elements, size) in GGML_QUANT_SIZES.items():
        ours = TYPES[kind.value]
        assert (ours.name, ours.elements, ours.bytes) == (kind.name, elements, size)
    assert not REMOVED.keys() & TYPES.keys()


def test_the_tensor_says_its_format() -> None:
    scheme = GGUFScheme({"type": "Q4_K"})
    form = scheme.format("model.layers.0.mlp.up_proj", {"weight": ("Q6_K", (64, 210))})
    assert form is not None and form.name == "GGUF Q6_K"
    assert scheme.format("model.layers.0.mlp.up_proj", {"weight": ("BF16", (64, 256))}) is None
    assert (dummy := scheme.format("model.layers.0.mlp.up_proj", None)) is not None and dummy.name == "GGUF Q4_K"
    with pytest.raises(ModelError, match=r"^lm_head\.weight has type I8, which is not served: get the model in one of"):
        scheme.format("lm_head", {"weight": ("I8", (64, 256))})


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"64 x 96 cannot be stored as Q4_K, whose blocks have 256 columns: get "):
        FORMATS["Q4_K"].expected(64, 96)
    with pytest.raises(ModelError, match=r"torch\.uint8 \[64, 17\], expected are torch\.uint8 \[64, 18\]: .* again"):
        FORMATS["Q4_0"].decode({"weight": torch.zeros(64, 17, dtype=torch.uint8)}, 64, 32)
