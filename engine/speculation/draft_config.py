"""What a checkpoint that drafts is: a head of EAGLE, or a model of its own; read of its config.json and its headers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..describe.model_config import ModelConfig
from ..describe.reading import parse_model_config
from ..errors import ModelError
from ..families.layer_spec import AttentionSpec, MLPSpec
from ..families.raw_config import RawConfig, architectures
from ..files.model_file import read_config
from ..quant.format import TensorInfo
from ..quant.scheme import make_scheme, read_quantization

_SPECULATORS = "transformer_layer_config"  # what the library of that name calls the config of the layer
_REFUSED = {"medusa": "heads of Medusa", "mlp_speculator": "MLP speculators", "mlp": "MLP speculators"}


@dataclass(frozen=True)
class HeadConfig:
    """A head of EAGLE: one decoder layer that reads a token's embedding and what the target thinks of the one before.

    EAGLE-1 (arXiv 2401.15077) projects both to one width, then has a layer without the norm before attention, and
    the target's own output matrix. EAGLE-3 (arXiv 2503.01840) projects residual streams of several layers of the
    target, has attention read both side by side, and an output matrix for the tokens that are frequent.
    """

    config: ModelConfig
    is_third: bool  # EAGLE-3
    taps: tuple[int, ...]  # layers of the target, counted from 0, whose incoming residual streams are read
    target_size: int  # width of those
    prefix: str  # what the checkpoint's names begin with
    layer: str  # and what it calls the layer
    draft_vocab: int  # rows of the output matrix; 0: it has none, the target's is used
    has_embedding: bool
    has_bias: bool  # of the projection
    normed_residual: bool  # EAGLE-3: what attention adds to has been normed


def infer_method(folder: Path, raw: dict[str, Any], headers: dict[str, TensorInfo]) -> str:
    """One of settings.MODELS, but for "mtp". Raises ModelError for what else drafts."""
    kind = str(raw.get("speculators_model_type") or raw.get("model_type") or "")
    if kind in _REFUSED:
        raise ModelError(
            f"{folder} has {_REFUSED[kind]} (model_type {kind}), which are not served: use an EAGLE-3 head"
        )
    if any(name.endswith("hidden_norm.weight") for name in headers):
        return "eagle3"
    return "eagle" if {"fc.weight", "model.fc.weight"} & headers.keys() else "draft_model"


def read_head(
    folder: Path, headers: dict[str, TensorInfo], method: str, target: ModelConfig, quantization: str | None
) -> HeadConfig:
    """Raises ModelError where the head is not of this target."""
    raw = read_config(folder)
    raw = {**raw, **_object(raw, _SPECULATORS), "num_hidden_layers": 1, "architectures": [_family(raw)]}
    raw.setdefault("vocab_size", target.vocab_size)
    config = parse_model_config({key: value for key, value in raw.items() if key != _SPECULATORS})
    config = replace(config, quantization=make_scheme(read_quantization(folder, raw), quantization))
    (layer,) = config.layers
    if not isinstance(layer.attention, AttentionSpec) or not isinstance(layer.mlp, MLPSpec) or layer.norms != "pre":
        raise ModelError(f"{folder}: heads of EAGLE are served with a layer like Llama's, not {config.architecture}'s")
    prefix = "model." if any(name.startswith("model.") for name in headers) else ""
    is_third = method == "eagle3"
    taps = _taps(raw, target) if is_third else ()
    said = RawConfig(raw, {"target_hidden_size": target.hidden_size, "draft_vocab_size": config.vocab_size})
    target_size = said.count("target_hidden_size")
    if target_size != target.hidden_size:
        raise ModelError(
            f"{folder}: config.json says target_hidden_size {target_size}, the model's hidden_size is "
            f"{target.hidden_size}: use the head that was trained for this model"
        )
    output = headers.get("lm_head.weight") if is_third else None
    if output is None and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{folder}: config.json says hidden_size {config.hidden_size}, the model has {target.hidden_size}, and the "
            "head has no output matrix (lm_head.weight) of its own: use the head that was trained for this model"
        )
    has_embedding = f"{prefix}embed_tokens.weight" in headers
    if not has_embedding and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{folder}: config.json says hidden_size {config.hidden_size}, the model has {target.hidden_size}, and the "
            "head has no embed_tokens.weight of its own: use the head that was trained for this model"
        )
    if has_embedding and config.vocab_size != target.vocab_size:
        raise ModelError(_other_vocabulary(folder, config.vocab_size, target.vocab_size))
    draft_vocab = 0
    if output is not None:
        draft_vocab = said.count("draft_vocab_size")
        if draft_vocab != target.vocab_size and "d2t" not in headers:
            raise ModelError(
                f"{folder}: its lm_head.weight is of {draft_vocab} tokens, the model's vocabulary has "
                f"{target.vocab_size}, and there is no d2t that says which they are: use the head of this model"
            )
    return HeadConfig(
        config=config,
        is_third=is_third,
        taps=taps,
        target_size=target_size,
        prefix=prefix,
        layer="midlayer" if any(name.startswith(f"{prefix}midlayer.") for name in headers) else "layers.0",
        draft_vocab=draft_vocab,
        has_embedding=has_embedding,
        has_bias=f"{prefix}fc.bias" in headers,
        normed_residual=bool(raw.get("norm_before_residual", _SPECULATORS in read_config(folder))),
    )


def check_draft_model(folder: Path, draft: ModelConfig, target: ModelConfig) -> None:
    """Raises ModelError where a model does not draft for this target."""
    if draft.vocab_size != target.vocab_size:
        raise ModelError(_other_vocabulary(folder, draft.vocab_size, target.vocab_size))
    if draft.has_state:
        raise ModelError(
            f"{folder}: {draft.architecture} keeps recurrent states, and so does nobody who drafts: use a smaller "
            'model with attention alone, or {"method": "mtp"} where the model has a layer that drafts'
        )
    if draft.foreign is not None or not draft.causal or not draft.generates:
        raise ModelError(f"{folder}: {draft.architecture} does not draft: use a model such as Llama or Qwen 3")


def _other_vocabulary(folder: Path, found: int, wanted: int) -> str:
    return (
        f"{folder}: config.json says vocab_size {found}, the model has {wanted}: who drafts must have the same tokens, "
        "use a smaller model of the same family"
    )


def _taps(raw: dict[str, Any], target: ModelConfig) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    named = next((RawConfig(values, {key: None}).optional_list(key) for values in (raw, _object(raw, "eagle_config"))
                  if values.get(key)), None)  # fmt: skip
    count = len(target.layers)
    if any(layer.residual_scale != 1.0 for layer in target.layers):
        raise ModelError(f"{target.architecture} scales what it adds to its residual streams: use another method")
    taps = tuple(named) if named else (2, count // 2, count - 3)
    if any(type(layer) is not int or not 0 <= layer < count for layer in taps):
        said = key if named else "the layers that heads of EAGLE-3 read"
        raise ModelError(f"{said} are {list(taps)}, the model has layers 0 to {count - 1}: use another head")
    return taps


def _object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """An object of config.json, empty where there is none. Raises ModelError."""
    found = raw.get(key)
    if not isinstance(found, dict | None):
        raise ModelError(f"config.json: {key} is {found!r:.60}, an object belongs there: correct the file")
    return found or {}


def _family(raw: dict[str, Any]) -> str:
    """The architecture of the head's layer."""
    name = (architectures(raw) or [""])[0]
    plain = re.sub("(?i)eagle3?(speculator|draftmodel)?", "", name)
    return plain if plain.endswith("ForCausalLM") and plain != "ForCausalLM" else "LlamaForCausalLM"
