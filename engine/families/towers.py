"""What config.json says of the towers that look at pictures, with transformers' defaults for what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .raw_config import RawConfig
from .vision_spec import BlockSpec, TowerActivation, VisionSpec

MOST_BLOCKS = 1024
_ACTIVATIONS: dict[str, TowerActivation] = {
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "quick_gelu": "quick_gelu",
    "silu": "silu",
}  # fmt: skip
_QWEN3 = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": None,
}  # fmt: skip
_QWEN3_VL = {**_QWEN3, "deepstack_visual_indexes": [8, 16, 24]}
# In files of transformers today, and of most before.
_VISUAL, _OTHER_VISUAL = (("visual.", "model.visual."),), ((),)


def qwen3_vl_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Full attention over each picture, positions of a table and by rotation, features for the first layers, too."""
    return replace(
        _qwen3(raw, _QWEN3_VL, {"image_token_id": 151655, "video_token_id": 151656}),
        mrope=_sections(raw, (24, 20, 20)), interleaved=True,
    )  # fmt: skip


def qwen3_5_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Qwen3-VL's without features for layers."""
    return replace(
        _qwen3(raw, _QWEN3, {"image_token_id": 248056, "video_token_id": 248057}),
        deepstack=(), mrope=_sections(raw, (11, 11, 10)), interleaved=True,
    )  # fmt: skip


def _qwen3(raw: Mapping[str, Any], defaults: Mapping[str, Any], tokens: Mapping[str, int]) -> VisionSpec:
    seen, outer = _seen(raw, defaults), RawConfig(raw, tokens)
    depth = _depth(seen, "depth")
    sides = seen.count("num_position_embeddings")
    deepstack = seen.optional_list("deepstack_visual_indexes") or []
    if any(type(index) is not int or not 0 <= index < depth for index in deepstack):
        raise ModelError(
            f"config.json: deepstack_visual_indexes is {deepstack!r:.60}, blocks from 0 to {depth - 1} belong there: "
            "correct the file"
        )
    return VisionSpec(
        "qwen",
        _blocks(seen, depth, seen.count("num_heads")),
        out=_same_width(raw, seen.count("out_hidden_size")),
        patch=_side(seen, "patch_size"),
        merge=seen.count("spatial_merge_size"),
        image_token=outer.size("image_token_id"),
        video_token=outer.size("video_token_id"),
        frames=_side(seen, "temporal_patch_size"),
        table=int(sides**0.5),
        deepstack=tuple(deepstack),
        names=_VISUAL,
        other_names=_OTHER_VISUAL,
    )


def _seen(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> RawConfig:
    """The object that describes the tower. Raises ModelError for what is none, and for other pictures than of red,
    green and blue."""
    values = raw.get("vision_config") or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: vision_config is {values!r:.60}, an object belongs there: correct the file")
    seen = RawConfig(values, defaults)
    if "in_channels" in defaults and (channels := seen.count("in_channels")) != 3:
        raise ModelError(f"config.json: in_channels of vision_config is {channels}, 3 are supported: use another model")
    return seen


def _blocks(seen: RawConfig, depth: int, heads: int, **changes: Any) -> BlockSpec:
    hidden = seen.count("hidden_size")
    if hidden % heads or (hidden // heads) % 4:
        raise ModelError(
            f"config.json: hidden_size of vision_config is {hidden}, for {heads} heads a multiple of {4 * heads} is "
            "needed: correct the file"
        )
    name = seen.get("hidden_act") or ""
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act of vision_config is {name!r}, supported are {', '.join(_ACTIVATIONS)}: use "
            "another model"
        )
    return BlockSpec(depth, hidden, seen.count("intermediate_size"), heads, _ACTIVATIONS[name], **changes)


def _depth(seen: RawConfig, key: str) -> int:
    depth = seen.count(key)
    if depth > MOST_BLOCKS:  # before anything is made of each
        raise ModelError(f"config.json: {key} of vision_config is {depth}, at most {MOST_BLOCKS} are run: correct it")
    return depth


def _side(seen: RawConfig, key: str) -> int:
    """A number that some files write once for each dimension."""
    value = seen.get(key)
    if isinstance(value, list | tuple) and len(set(map(str, value))) == 1:
        value = value[0]
    return RawConfig({key: value}, seen.defaults).count(key)


def _same_width(raw: Mapping[str, Any], out: int) -> int:
    """Raises ModelError where features are not as long as the vectors of the text."""
    if out != raw.get("hidden_size", out):
        raise ModelError(
            f"config.json: out_hidden_size of vision_config is {out}, hidden_size of the text {raw['hidden_size']!r}: "
            "they are one and the same, correct the file"
        )
    return out


def _sections(raw: Mapping[str, Any], default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rotated pairs of the text by time, row and column."""
    values = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    found = values.get("mrope_section") if isinstance(values, Mapping) else None
    if found is None:
        return default
    if not isinstance(found, list | tuple) or len(found) != 3 or any(type(one) is not int or one < 0 for one in found):
        raise ModelError(
            f"config.json: mrope_section is {found!r:.60}, three whole numbers belong there: correct the file"
        )
    time, rows, columns = found
    return time, rows, columns
