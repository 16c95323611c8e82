"""What config.json says of the towers that look at pictures, with transformers' defaults for what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from .layer_spec import Names
from .raw_config import RawConfig, number
from .vision_spec import BlockSpec, ProjectorSpec, TowerActivation, VisionSpec

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
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_channels": 3, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
_INTERN = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "attention_bias": False, "use_qk_norm": False, "hidden_act": "gelu", "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6, "image_size": 448, "patch_size": 14, "num_channels": 3, "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}  # fmt: skip
_INTERNVL = {
    "image_token_id": 151667, "downsample_ratio": 0.5, "vision_feature_layer": -1, "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True, "vision_feature_select_strategy": "default",
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "image_size": 336, "patch_size": 14,
    "num_channels": 3,
}  # fmt: skip
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_GEMMA3 = {
    "mm_tokens_per_image": 256, "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144
}  # fmt: skip
_MOST_LINES = 31  # ends of lines that are one token of Gemma's
_LLAVA = {
    "image_token_index": 32000, "multimodal_projector_bias": True, "projector_hidden_act": "gelu",
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
# What OpenAI's CLIP was trained with.
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# In files of transformers today, and of most before.
_INSIDE = (("vision_tower.", "model.vision_tower."), ("multi_modal_projector", "model.multi_modal_projector"))
_CLIP_LIKE: dict[str, Any] = {
    "mean": _CLIP_MEAN, "std": _CLIP_STD, "root": "vision_tower", "names": _INSIDE, "other_names": ((),)
}  # fmt: skip
# The same where the tower was a model within the tower before transformers 5.
_DEEPER: tuple[Names, ...] = (
    (("vision_tower.", "model.vision_tower.vision_model."), _INSIDE[1]),
    (("vision_tower.", "vision_tower.vision_model."),),
    _INSIDE,
    (),
)
_VISUAL, _OTHER_VISUAL = (("visual.", "model.visual."),), ((),)


def qwen3_vl_vision(raw: RawConfig) -> VisionSpec:
    """Full attention over each picture, positions of a table and by rotation, features for the first layers, too."""
    return replace(
        _qwen3(raw, _QWEN3_VL, _QWEN_TOKENS),
        mrope=_sections(raw, (24, 20, 20)), interleaved=True,
    )  # fmt: skip


def qwen3_5_vision(raw: RawConfig) -> VisionSpec:
    """Qwen3-VL's without features for layers."""
    return replace(
        _qwen3(raw, _QWEN3, {"image_token_id": 248056, "video_token_id": 248057}),
        deepstack=(), mrope=_sections(raw, (11, 11, 10)), interleaved=True,
    )  # fmt: skip


def qwen2_5_vl_vision(raw: RawConfig) -> VisionSpec:
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


def qwen2_vl_vision(raw: RawConfig) -> VisionSpec:
    """Full attention over each picture, positions by rotation alone."""
    seen = _seen(raw, _QWEN2_VL)
    hidden = seen.count("embed_dim")
    inner = int(hidden * seen.number("mlp_ratio"))
    blocks = _blocks(seen, hidden, "num_heads", _depth(seen, "depth"), inner)
    return replace(_qwen(raw, seen, _QWEN_TOKENS, "hidden_size"), blocks=blocks)


def _qwen(raw: RawConfig, seen: RawConfig, tokens: Mapping[str, int], out: str) -> VisionSpec:
    """Of Qwen2-VL and 2.5-VL, but for the blocks. out: the key of what features are long."""
    outer = RawConfig(raw.values, tokens)
    return VisionSpec(
        "qwen2",
        BlockSpec(0, 0, 0, 1),
        out=_width(raw, seen, out),
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


def _qwen3(raw: RawConfig, defaults: Mapping[str, Any], tokens: Mapping[str, int]) -> VisionSpec:
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


def pixtral_vision(raw: RawConfig) -> VisionSpec | None:
    """Of Mistral 3 and Pixtral: pictures of any shape, whose rows are apart by tokens of their own. None: another
    tower."""
    return _pixtral(raw, {"image_token_index": 10, "spatial_merge_size": 2, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "vision_feature_layer": -1}, _PIXTRAL | {"patch_size": 14, "image_size": 1540},
        raw.number("rms_norm_eps"))  # fmt: skip


def llava_vision(raw: RawConfig) -> VisionSpec | None:
    """Of LLaVA with Pixtral's tower, or CLIP's: the middle of a picture. None: another."""
    kind = _seen(raw, _CLIP).get("model_type")
    if kind == "pixtral":
        return _pixtral(raw, {"spatial_merge_size": 1, **_LLAVA}, _PIXTRAL, 0.0)
    seen, outer = _seen(raw, _CLIP), RawConfig(raw.values, _LLAVA)
    depth, last = _depth(seen, "num_hidden_layers"), outer.get("vision_feature_layer")
    usual = type(last) is int and last < 0 and outer.get("vision_feature_select_strategy") == "default"
    if kind != "clip_vision_model" or not usual or depth + last < 0:
        return None
    return replace(
        _squares(raw, seen, outer, depth + 1 + last),
        kind="clip",
        image_token=outer.size("image_token_index"),
        names=_DEEPER[0],
        other_names=_DEEPER[1:],
    )


def internvl_vision(raw: RawConfig) -> VisionSpec | None:
    """Squares, of which a picture has as many as its shape asks for. None: another tower."""
    seen = _seen(raw, _INTERN)
    outer = RawConfig(raw.values, _INTERNVL)
    usual = seen.get("use_mean_pooling") and seen.get("use_absolute_position_embeddings")
    wanted = outer.get("vision_feature_layer") == -1 and outer.get("vision_feature_select_strategy") == "default"
    if not (usual and wanted) or seen.get("use_qk_norm") or seen.get("norm_type") != "layer_norm":
        return None
    return replace(
        _squares(raw, seen, outer, _depth(seen, "num_hidden_layers"), layer_scale=True,
                 qkv_bias=bool(seen.get("attention_bias"))),
        kind="intern",
        merge=round(1 / outer.number("downsample_ratio")),
        image_token=outer.size("image_token_id"),
        separators=(151665, 151666),
        separator_texts=("<img>", "</img>"),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )  # fmt: skip


def gemma3_vision(raw: RawConfig) -> VisionSpec | None:
    """A square, of which a token is the mean of some patches, and whose tokens see one another. None: another tower."""
    seen, outer = _seen(raw, _SIGLIP), RawConfig(raw.values, _GEMMA3)
    if seen.get("model_type") != "siglip_vision_model":
        return None
    size, patch = _side(seen, "image_size"), _side(seen, "patch_size")
    tokens = outer.count("mm_tokens_per_image")
    merge, rest = divmod(size // patch, math.isqrt(tokens))
    if rest or not merge:
        raise ModelError(
            f"config.json: mm_tokens_per_image is {tokens}, which does not divide a square of {size // patch} patches "
            "a side: correct the file"
        )
    return VisionSpec(
        "gemma",
        _blocks(seen, seen.count("hidden_size"), "num_attention_heads", _depth(seen, "num_hidden_layers"),
                eps=seen.number("layer_norm_eps"), theta=0.0),
        out=raw.count("hidden_size"),
        patch=patch,
        merge=merge,
        image_token=outer.size("image_token_index"),
        image_size=size,
        bidirectional="all",
        separators=(outer.size("boi_token_index"), outer.size("eoi_token_index"), *range(107, 107 + _MOST_LINES)),
        separator_texts=("<start_of_image>", "<end_of_image>", *("\n" * count for count in range(1, 1 + _MOST_LINES))),
        root="vision_tower",
        names=_DEEPER[0],
        other_names=_DEEPER[1:],
    )  # fmt: skip


def _squares(raw: RawConfig, seen: RawConfig, outer: RawConfig, depth: int, **changes: Any) -> VisionSpec:
    """Of CLIP's kind, but for its tokens. depth: blocks whose results are looked at."""
    projector = ProjectorSpec(
        _activation(outer.get("projector_hidden_act"), "projector_hidden_act"),
        bool(outer.get("multimodal_projector_bias")),
    )
    return VisionSpec(
        "clip",
        _blocks(seen, seen.count("hidden_size"), "num_attention_heads", depth, eps=seen.number("layer_norm_eps"),
                theta=0.0, **changes),
        out=raw.count("hidden_size"),
        patch=_side(seen, "patch_size"),
        merge=1,
        image_token=0,
        image_size=_side(seen, "image_size"),
        projector=projector,
        **_CLIP_LIKE,
    )  # fmt: skip


def _pixtral(
    raw: RawConfig, beside: Mapping[str, Any], defaults: Mapping[str, Any], norm_eps: float
) -> VisionSpec | None:
    """beside: defaults of keys beside vision_config."""
    seen, outer = _seen(raw, defaults), RawConfig(raw.values, beside)
    depth, last = _depth(seen, "num_hidden_layers"), outer.get("vision_feature_layer")
    if seen.get("model_type") != "pixtral" or last != -1:
        return None
    name = outer.get("projector_hidden_act")
    return VisionSpec(
        "pixtral",
        _blocks(seen, seen.count("hidden_size"), "num_attention_heads", depth, gated=True, norm="rms", eps=1e-5,
                bias=False, qkv_bias=False, theta=_theta(seen)),
        out=raw.count("hidden_size"),
        patch=_side(seen, "patch_size"),
        merge=outer.count("spatial_merge_size"),
        image_token=outer.size("image_token_index"),
        image_size=_side(seen, "image_size"),
        projector=ProjectorSpec(
            _activation(name, "projector_hidden_act"), bool(outer.get("multimodal_projector_bias")), norm_eps
        ),
        separators=(12, 13),
        separator_texts=("[IMG_BREAK]", "[IMG_END]"),
        **_CLIP_LIKE,
    )  # fmt: skip


def _theta(seen: RawConfig) -> float:
    values = seen.values.get("rope_parameters") or seen.values
    return number(values, "rope_theta", 10_000.0) if isinstance(values, Mapping) else 10_000.0


def _seen(raw: RawConfig, defaults: Mapping[str, Any]) -> RawConfig:
    """The object that describes the tower. Raises ModelError for what is none, and for other pictures than of red,
    green and blue."""
    values = raw.values.get("vision_config") or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"config.json: vision_config is {values!r:.60}, an object belongs there: correct the file")
    seen = RawConfig(values, defaults)
    for key in defaults.keys() & {"in_channels", "num_channels"}:
        if (channels := seen.count(key)) != 3:
            raise ModelError(f"config.json: {key} of vision_config is {channels}, 3 are supported: use another model")
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
    inner = seen.count("intermediate_size") if inner is None else inner
    activation = _activation(seen.get("hidden_act"), "hidden_act of vision_config")
    return BlockSpec(depth, hidden, inner, heads, activation, **changes)


def _activation(name: Any, key: str) -> TowerActivation:
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: {key} is {name!r:.60}, supported are {', '.join(_ACTIVATIONS)}: use another model"
        )
    return _ACTIVATIONS[name]


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


def _width(raw: RawConfig, seen: RawConfig, key: str) -> int:
    """Of the text's vectors. Raises ModelError where features are said to be of another."""
    hidden = raw.count("hidden_size")
    if key in seen.values and seen.count(key) != hidden:
        raise ModelError(
            f"config.json: {key} of vision_config is {seen.count(key)}, hidden_size of the text {hidden}: they are one "
            "and the same, correct the file"
        )
    return hidden


def _sections(raw: RawConfig, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Rotated pairs of the text by time, row and column."""
    values = raw.values.get("rope_scaling") or raw.values.get("rope_parameters") or {}
    found = values.get("mrope_section") if isinstance(values, Mapping) else None
    if found is None:
        return default
    if not isinstance(found, list | tuple) or len(found) != 3 or any(type(one) is not int or one < 0 for one in found):
        raise ModelError(
            f"config.json: mrope_section is {found!r:.60}, three whole numbers belong there: correct the file"
        )
    time, rows, columns = found
    return time, rows, columns
