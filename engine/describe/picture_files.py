"""What a model's folder says of pictures beside config.json: how they are prepared, and what the tower's tensors are
called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelError, unreadable
from ..families.vision_spec import VisionSpec
from .model_config import ModelConfig

# transformers 5 writes the first, with an object for each modality; older ones the second.
_FILES = ("processor_config.json", "preprocessor_config.json")
_INSIDE = "image_processor"


def read_preprocessor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor; empty where the folder has no file of it. Raises ModelError."""
    for name in _FILES:
        file = folder / name
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):  # the second: a GGUF file is the model
            continue
        except PermissionError:
            raise unreadable(file) from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: {error}: download it again") from None
        inside = found.get(_INSIDE) if isinstance(found, dict) else None
        if name == _FILES[0] and inside is None:  # of older transformers, which has other settings there
            continue
        found = found if inside is None else inside
        if not isinstance(found, dict):
            raise ModelError(f"{file}: it is no JSON object, download it again")
        return found
    return {}


def vision_of_settings(folder: Path, vision: VisionSpec) -> VisionSpec:
    """With what its pixels are normalised by, and the numbers that the tokenizer gives its separators. Raises
    ModelError."""
    settings = read_preprocessor(folder)
    known = special_tokens(folder) if vision.separator_texts else {}
    separators = tuple(
        known.get(text, default) for text, default in zip(vision.separator_texts, vision.separators, strict=True)
    )
    return replace(
        vision,
        separators=separators,
        mean=_colours(settings, "image_mean", vision.mean),
        std=_colours(settings, "image_std", vision.std),
    )


def vision_of_files(folder: Path, vision: VisionSpec) -> VisionSpec | None:
    """The same, with the names that the files have for the tower's tensors; None: they are the text's alone. Raises
    ModelError."""
    from ..files.checkpoint import read_headers  # it imports torch

    vision = vision_of_settings(folder, vision)
    try:
        headers = read_headers(folder)
    except ModelError:
        return vision  # loading will say what is wrong; dummy weights need none
    for names in (vision.names, *vision.other_names):
        named = replace(vision, names=names)
        if any(name.startswith(named.named(f"{vision.root}.")) for name in headers):
            return named
    return None


def special_tokens(folder: Path) -> dict[str, int]:
    """Of the tokenizer's files; empty where there are none that can be read, which is for the tokenizer to say."""
    for name in ("tokenizer_config.json", "tokenizer.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            if isinstance(tokens := found.get("added_tokens_decoder"), dict):
                return {token["content"]: int(number) for number, token in tokens.items()}
            if isinstance(tokens := found.get("added_tokens"), list):
                return {token["content"]: int(token["id"]) for token in tokens}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}


def _colours(settings: Mapping[str, Any], key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    found = settings.get(key)
    if found is None:
        return default
    numbers = found if isinstance(found, list) else []
    if len(numbers) != 3 or not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        raise ModelError(f"the image processor's {key} is {found!r:.60}, three numbers belong there: correct the file")
    red, green, blue = map(float, numbers)
    return red, green, blue


def check_tokens(model: ModelConfig) -> None:
    """Raises ModelError where a token that stands for pictures is none of the vocabulary."""
    vision = model.vision
    if vision is not None and (token := max(vision.image_token, *vision.separators, 0)) >= model.vocab_size:
        raise ModelError(
            f"config.json: a token that stands for pictures is {token}, the vocabulary has {model.vocab_size}: correct "
            "the file, or serve the text alone with --language-model-only"
        )
