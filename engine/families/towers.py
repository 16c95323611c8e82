"""What config.json says of the towers that look at pictures, with transformers' defaults for what it leaves out."""

from __future__ import annotations

import math
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
_QWEN2_5_VL = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_QWEN2_VL = {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
# What OpenAI's CLIP was trained with.
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# In files of transformers today, and of most before.
_VISUAL, _OTHER_VISUAL = (("visual.", "model.visual."),), ((),)


def qwen3_vl_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Full attention over each picture, positions of a table and by rotation, features for the first layers, too."""
    return replace(
        _qwen3(raw, _QWEN3_VL, _QWEN_TOKENS),
        mrope=_sections(raw, (24, 20, 20)), interleaved=True,
    )  # fmt: skip


def qwen3_5_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Qwen3-VL's without features for layers."""
    return replace(
        _qwen3(raw, _QWEN3, {"image_token_id": 248056, "video_token_id": 248057}),
        deepstack=(), mrope=_sections(raw, (11, 11, 10)), interleaved=True,
    )  # fmt: skip


def qwen2_5_vl_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Attention in windows but in a few blocks, positions by rotation alone."""
    seen = _seen(raw, _QWEN2_5_VL)
    depth, spec = _depth(seen, "depth"), _qwen(raw, seen, _QWEN_TOKENS, "out_hidden_size")
    unit, window = spec.patch * spec.merge, seen.count("window_size")
    if window < unit:
        raise ModelError(
            f"config.json: window_size of vision_config is {window}, less than the {unit} pixels of a token: correct it"
        )
    return replace(
        spec,
        blocks=_blocks(seen, seen.count("hidden_size"), "num_heads", depth, gated=True, norm="rms"),
        window=window // unit,
        full=_indices(seen, "fullatt_block_indexes", depth),
    )


def qwen2_vl_vision(raw: Mapping[str, Any]) -> VisionSpec:
    """Full attention over each picture, positions by rotation alone."""
    seen = _seen(raw, _QWEN2_VL)
    hidden = seen.count("embed_dim")
    inner = int(hidden * seen.number("mlp_ratio"))
    blocks = _blocks(seen, hidden, "num_heads", _depth(seen, "depth"), inner)
    return replace(_qwen(raw, seen, _QWEN_TOKENS, "hidden_size"), blocks=blocks)


def _qwen(raw: Mapping[str, Any], seen: RawConfig, tokens: Mapping[str, int], out: str) -> VisionSpec:
    """Of Qwen2-VL and 2.5-VL, but for the blocks. out: the key of what features are long."""
    outer = RawConfig(raw, tokens)
    return VisionSpec(
        "qwen2",
        BlockSpec(0, 0, 0, 1),
        out=_same_width(raw, seen.count(out)),
        patch=_side(seen, "patch_size"),
        merge=seen.count("spatial_merge_size"),
        image_token=outer.size("image_token_id"),
        video_token=outer.size("video_token_id"),
        frames=_side(seen, "temporal_patch_size"),
        mrope=_sections(raw, (16, 24, 24)),
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
        names=_VISUAL,
        other_names=_OTHER_VISUAL,
    )


def _qwen3(raw: Mapping[str, Any], defaults: Mapping[str, Any], tokens: Mapping[str, int]) -> VisionSpec:
    seen = _seen(raw, defaults)
    depth = _depth(seen, "depth")
    return replace(
        _qwen(raw, seen, tokens, "out_hidden_size"),
        kind="qwen3",
        blocks=_blocks(seen, seen.count("hidden_size"), "num_heads", depth),
        table=math.isqrt(seen.count("num_position_embeddings")),
        deepstack=_indices(seen, "deepstack_visual_indexes", depth),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def _indices(seen: RawConfig, key: str, depth: int) -> tuple[int, ...]:
    """Blocks, in order."""
    found = seen.optional_list(key) or []
    if any(type(index) is not int or not 0 <= index < depth for index in found) or len(set(found)) < len(found):
        raise ModelError(
            f"config.json: {key} of vision_config is {found!r:.60}, blocks from 0 to {depth - 1} belong there: correct "
            "the file"
        )
    return tuple(found)


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


def _blocks(
    seen: RawConfig, hidden: int, heads_key: str, depth: int, inner: int | None = None, **changes: Any
) -> BlockSpec:
    heads = seen.count(heads_key)
    if hidden % heads or (hidden // heads) % 4:
        raise ModelError(
            f"config.json: vectors of vision_config have {hidden} elements, for {heads} heads a multiple of "
            f"{4 * heads} is needed: correct the file"
        )
    name = seen.get("hidden_act") or ""
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act of vision_config is {name!r:.60}, supported are {', '.join(_ACTIVATIONS)}: use "
            "another model"
        )
    inner = seen.count("intermediate_size") if inner is None else inner
    return BlockSpec(depth, hidden, inner, heads, _ACTIVATIONS[name], **changes)


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
