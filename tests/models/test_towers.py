"""What looks at pictures: transformers' features, for pictures of every shape, alone and in company (fp32, CPU)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vserve.engine.describe.reading import parse_model_config, read_folder, read_model_config
from vserve.engine.errors import ModelError
from vserve.engine.link.media import MediaItem
from vserve.engine.models.blocks import CausalLM
from vserve.engine.options.config import EngineConfig
from vserve.engine.vision.processor import Pixels
from vserve.engine.vision.processors import read_processor
from vserve.engine.weights.loader import load_model
from vserve.tests.tiny_models import reference

from .test_model_parity import load

Item = tuple[Tensor, MediaItem]
SIZES: dict[str, Any] = {"max_position_embeddings": 64}
KINDS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_vl", "qwen2_vl", "mistral3", "internvl", "llava"]
# Width and height: squares, strips of one patch's height, what is stretched and what is shrunk.
SHAPES = [
    (64, 64), (32, 32), (100, 64), (64, 200), (33, 320), (640, 32), (65, 95), (224, 96), (5, 7), (300, 20), (96, 160),
    (2, 390),
]  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@lru_cache
def loaded(folder: Path) -> CausalLM:
    return load(folder)


@lru_cache
def oracle_model(folder: Path) -> Any:
    return reference(folder, dtype=torch.float32).eval().model


def items_of(folder: Path, pictures: Sequence[Pixels], **overrides: Any) -> list[Item]:
    """As they come out of decoding: numbers and bytes."""
    vision = read_folder(folder).vision
    assert vision is not None
    processor = read_processor(folder, vision, overrides)
    found = []
    for rgb in pictures:
        pixels, grid = processor.pixels(rgb)
        item = processor.item(pixels, grid, rgb.shape[:2], 0)  # type: ignore[arg-type]
        found.append((torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(*item.size, 3), item))
    return found


def normalised(folder: Path, item: Item) -> Tensor:
    """fp32 [F, 3, height, width], as every processor of transformers makes it."""
    vision = read_folder(folder).vision
    assert vision is not None
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    return (item[0].permute(0, 3, 1, 2).float() / 255 - mean) / std


def patches_of_qwen(folder: Path, item: Item) -> Tensor:
    """As Qwen2VLImageProcessor makes them: cut, in the order of tokens, each frame twice."""
    vision = read_folder(folder).vision
    assert vision is not None
    image, (_, rows, columns) = normalised(folder, item)[0], item[1].grid
    m, p = vision.merge, vision.patch
    parts = image.reshape(1, 3, rows // m, m, p, columns // m, m, p).permute(0, 2, 5, 3, 6, 1, 4, 7)
    return parts.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, 3 * 2 * p * p)


@torch.no_grad()
def features_of_transformers(folder: Path, item: Item) -> Tensor:
    model = oracle_model(folder)
    if hasattr(model, "visual"):
        found = model.visual(patches_of_qwen(folder, item), torch.tensor([item[1].grid]))
        return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", [])], dim=1)
    if model.config.model_type in ("internvl", "llava"):
        found = model.get_image_features(normalised(folder, item), return_dict=True).pooler_output
        return torch.cat(list(found))
    sizes = [item[1].size[1:]]
    return model.multi_modal_projector(model.vision_tower(normalised(folder, item), sizes)[0][0], sizes)


def tokens_of(folder: Path, item: MediaItem) -> int:
    """Features that an item needs."""
    vision = read_folder(folder).vision
    assert vision is not None
    found = read_processor(folder, vision).expansion(item.grid)
    assert len(found) == item.length and set(found) <= {vision.image_token, *vision.separators}
    return found.count(vision.image_token)


def encode(model: CausalLM, items: Sequence[Item]) -> list[Tensor]:
    assert model.tower is not None
    with torch.no_grad():
        return model.tower.encode(items)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    assert expected.std() > 0.1, "features that say nothing would hide a mistake"
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_those_of_transformers(tiny_model: Callable[..., Path], kind: str) -> None:
    """Of each picture, alone, and all of them packed."""
    folder = tiny_model(kind, **SIZES)
    model = loaded(folder)
    small = {"min_pixels": 1024} if kind.startswith("qwen") else {}
    items = items_of(folder, [picture(*shape, seed) for seed, shape in enumerate(SHAPES)], **small)
    assert len({item.grid for _, item in items}) >= {"internvl": 4, "llava": 1}.get(kind, 10)
    together = encode(model, items)
    for item, beside in zip(items, together, strict=True):
        expected = features_of_transformers(folder, item)
        assert len(expected) == tokens_of(folder, item[1])
        assert difference(encode(model, [item])[0], expected) < 2e-5
        assert difference(beside, expected) < 2e-5


def test_features_tell_pictures_apart(tiny_model: Callable[..., Path]) -> None:
    """Another pixel, and the same picture on its side."""
    folder = tiny_model("qwen3_vl", **SIZES)
    one = picture(96, 64)
    other = one.copy()
    other[0, 0] ^= 255
    first, second, turned = encode(loaded(folder), items_of(folder, [one, other, one.transpose(1, 0, 2)], min_pixels=1))
    assert (first - second).abs().max() > 1e-3
    assert (first - turned).abs().max() > 1e-1


def test_names_of_older_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("qwen2_5_vl", **SIZES)
    tensors = {name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
               for name, tensor in load_file(source / "model.safetensors").items()}  # fmt: skip
    assert any(name.startswith("visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    items = items_of(tmp_path, [picture(90, 70)])
    assert torch.equal(encode(load(tmp_path), items)[0], encode(loaded(source), items)[0])


def test_files_and_options_of_text_alone(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Leave no tower: it takes no memory."""
    source = tiny_model("qwen3_vl", **SIZES)
    config = read_model_config(source, EngineConfig(str(source), language_model_only=True))
    assert config.vision is None and not list(config.log_lines(text_is_enough=True))
    assert read_folder(source).vision is not None and not list(read_folder(source).log_lines(text_is_enough=False))
    tensors = load_file(source / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(text, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert load(tmp_path).tower is None
    (line,) = read_folder(tmp_path).log_lines(text_is_enough=False)
    assert "its text is served, a request with a picture is refused" in line


def test_a_tower_without_a_tensor_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("qwen3_vl", **SIZES)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.visual.blocks.1.attn.qkv.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"the checkpoint lacks model.visual.blocks.1.attn.qkv.weight"):
        load(tmp_path)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_towers_stay_as_they_are_in_quantised_models(tiny_model: Callable[..., Path], quantization: str) -> None:
    folder = tiny_model("qwen3_vl", **SIZES)
    items = items_of(folder, [picture(64, 96)])
    config = read_folder(folder, quantization=quantization)
    assert config.quantization is not None
    cpu = torch.device("cpu")
    model = load_model(folder, config, dtype=torch.float32, device=cpu, max_model_len=64)
    assert isinstance(model, CausalLM)
    assert torch.equal(encode(model, items)[0], encode(loaded(folder), items)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepstack_visual_indexes": [0, 3]}, r"deepstack_visual_indexes of vision_config is \[0, 3\], blocks from 0"),
        ({"num_heads": 5}, "vectors of vision_config have 32 elements, for 5 heads a multiple of 20"),
        ({"hidden_act": "relu"}, "hidden_act of vision_config is 'relu', supported are gelu_pytorch_tanh"),
        ({"depth": 4097}, "depth of vision_config is 4097, at most 1024 are run"),
        ({"out_hidden_size": 65}, "out_hidden_size of vision_config is 65, hidden_size of the text 64"),
        ({"in_channels": 1}, "in_channels of vision_config is 1, 3 are supported"),
        ({"patch_size": [16, 8]}, r"patch_size is \[16, 8\], a whole number"),
    ],
)
def test_towers_that_are_refused(tiny_model: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    raw = json.loads((tiny_model("qwen3_vl", **SIZES) / "config.json").read_text())
    raw["vision_config"] |= changes
    with pytest.raises(ModelError, match=message):
        parse_model_config(raw)


def test_dummy_weights_are_the_same_again(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2_5_vl", **SIZES)
    items = items_of(folder, [picture(64, 96)])
    first, second = (encode(load(folder, load_format="dummy"), items)[0] for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all() and first.std() > 0
