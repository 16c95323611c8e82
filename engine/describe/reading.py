"""A model as its config.json and the options describe it, with transformers' defaults for what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..families.encoders import EncoderFamily, find_encoder, layers_of
from ..families.family import MAX_LAYERS, Family
from ..families.head_spec import read_head
from ..families.layer_spec import AttentionSpec, DraftingSpec, LayerSpec, MoESpec
from ..families.raw_config import RawConfig, architectures, dtype_name, flag, model_type
from ..families.registry import find_family, is_known
from ..families.vision_spec import VisionSpec
from ..files.model_file import read_config
from ..options.config import EngineConfig
from ..options.config_checks import ANY, Purpose
from ..options.model_path import find_model, is_gguf
from ..quant.scheme import make_scheme, read_quantization
from .divide import check_divides, check_stages, refuse_encoder
from .divide import refuse as refuse_stages
from .download import from_hub
from .model_config import Foreign, ModelConfig, choose
from .overrides import overridden, overrides
from .picture_files import check_tokens, vision_of_files, vision_of_settings
from .torchvision import hide_broken_torchvision

if TYPE_CHECKING:
    from ..quant.format import Scheme

_DTYPES = ("bfloat16", "float16", "float32", "float64")


def read_model_config(folder: Path, config: EngineConfig) -> ModelConfig:
    """Of the model in `folder`. Raises ModelError as `read_folder`, and for what the options make of it."""
    from .model_source import resolve_config_path  # it imports torch

    changes = overrides(config)
    source = folder if config.hf_config_path is None else resolve_config_path(config)
    with _naming(changes):
        model = read_folder(
            folder, source, changes, config.quantization, config.model_impl, config.trust_remote_code, config.purpose
        )
    if config.language_model_only or config.purpose.runner == "pooling":
        model = replace(model, vision=None)
    check_tokens(model)
    return without_windows(model) if config.disable_sliding_window else model


def check_described(folder: Path, config: EngineConfig) -> None:
    """Raises ModelError as `read_model_config`, within milliseconds; what --hf-config-path names is left to that, and
    ConfigError as `overrides`."""
    changes = overrides(config)
    if config.hf_config_path is None:
        with _naming(changes):
            check_model(
                folder, changes, config.quantization, config.model_impl, config.trust_remote_code, config.purpose,
                config.tensor_parallel_size, config.enable_expert_parallel, config.pipeline_parallel_size,
                config.stage_layers,
            )  # fmt: skip


def check_before_download(config: EngineConfig) -> None:
    """A model of the hub that cannot be served is refused by its config.json, before its weights come. Raises
    ConfigError, ModelError."""
    if find_model(config.model) is not None or ":" in config.model:
        return
    folder = from_hub(config.model, config.revision, ["*.json"], config.download_dir)
    if (folder / "config.json").exists():
        check_described(folder, config)


@contextmanager
def _naming(changes: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise (ModelError(f"with {', '.join(changes)} overridden, {error}") if changes else error) from None


def without_windows(model: ModelConfig) -> ModelConfig:
    """Every layer sees all of a context that is no longer than the smallest window: what it would have seen anyway."""
    windows = (layer.attention.window for layer in model.layers if layer.attention is not None)
    smallest = min((window for window in windows if window), default=0)
    layers = tuple(
        layer if layer.attention is None else replace(layer, mixer=replace(layer.attention, window=0))
        for layer in model.layers
    )
    return replace(model, layers=layers, longest=min((n for n in (smallest, model.longest) if n), default=0))


def read_folder(
    folder: Path,
    source: Path | None = None,
    changes: Mapping[str, Any] = {},
    quantization: str | None = None,
    implementation: str = "auto",
    trusted: bool = False,
    purpose: Purpose = ANY,
) -> ModelConfig:
    """Read config.json of `source` (default: `folder`, where the weights are), and put `changes` into it.

    `quantization`, `implementation`, `trusted`: what --quantization, --model-impl and --trust-remote-code say;
    `purpose`: what --runner and --convert say.

    Raises ModelError if it is missing, broken, or describes a model we cannot run.
    """
    from ..files.checkpoint import stored_dtype  # it imports torch

    raw = overridden(read_config(Path(source or folder)), changes)
    described = parse_model_config(raw, implementation, Path(source or folder), trusted, purpose)
    config = replace(
        described,
        quantization=_scheme(Path(folder), raw, quantization),
        vision=None if described.vision is None else vision_of_files(Path(folder), described.vision),
    )
    if config.foreign is None:
        config = replace(config, head=read_head(Path(folder), raw, config.hidden_size, purpose))
    elif purpose.classifies:
        raise ModelError(
            f"--convert {purpose.convert}: {config.architecture} is computed by transformers' code, of which only "
            "text and embeddings are served: leave it out"
        )
    if dtype_name(raw) is None:
        config = replace(config, dtype=stored_dtype(Path(folder)) or config.dtype)
    return config


def check_model(
    folder: Path,
    changes: Mapping[str, Any] = {},
    quantization: str | None = None,
    implementation: str = "auto",
    trusted: bool = False,
    purpose: Purpose = ANY,
    size: int = 1,
    whole_experts: bool = False,
    stages: int = 1,
    stage_layers: Sequence[int] = (),
) -> None:
    """Raises ModelError as read_folder does, and where `size` ranks or `stages` cannot share the model,
    within milliseconds. What only transformers' code can tell of a model that it computes is left to that."""
    raw = overridden(read_config(folder), changes)
    _dtype_name(raw)
    kind = choose(raw, implementation, folder, trusted)
    if isinstance(kind, Foreign):
        refuse_stages(f"{kind.architecture} is computed by transformers' code, which is not cut into stages", stages)
    elif isinstance(kind, EncoderFamily):
        refuse_encoder(str(raw.get("model_type")), size)
        refuse_stages(f"an encoder as {raw.get('model_type')} is not cut into stages", stages)
        read_head(folder, raw, _parse_encoder(raw, None, kind, purpose).hidden_size, purpose)
    else:
        described = _parse(raw, None, kind, purpose)
        check_stages(described, stages, stage_layers)
        check_divides(described, size, whole_experts)
        read_head(folder, raw, described.hidden_size, purpose)
    _scheme(folder, raw, quantization)


def _scheme(folder: Path, raw: Mapping[str, Any], asked: str | None) -> Scheme | None:
    found = read_quantization(folder, raw)
    if found is None and is_gguf(folder) and (asked or "").lower() == "gguf":
        asked = None  # a file of plain numbers
    return make_scheme(found, asked)


def parse_model_config(
    raw: dict[str, Any], implementation: str = "auto", folder: Path | None = None, trusted: bool = False,
    purpose: Purpose = ANY,
) -> ModelConfig:  # fmt: skip
    """The content of a config.json → ModelConfig. Raises ModelError for what we cannot run, naming key and value."""
    import torch

    dtype, kind = getattr(torch, _dtype_name(raw)), choose(raw, implementation, folder, trusted)
    if isinstance(kind, EncoderFamily):
        return _parse_encoder(raw, dtype, kind, purpose)
    if isinstance(kind, Foreign):
        hide_broken_torchvision()
        from ..foreign.config import read  # it imports transformers

        return read(kind, dtype)
    return _parse(raw, dtype, kind, purpose)


def read_vision(raw: dict[str, Any], config: EngineConfig, folder: Path) -> VisionSpec | None:
    """What looks at the pictures of a model, by its settings alone, and without torch; None: nothing does. Raises
    ModelError."""
    if config.language_model_only or config.purpose.runner == "pooling":
        return None
    family = choose(raw, config.model_impl, folder, config.trust_remote_code)
    if not isinstance(family, Family):
        return None
    vision = _vision(family, RawConfig(_flat(raw, family), family.defaults))
    return None if vision is None else vision_of_settings(folder, vision)


def _vision(family: Family, raw: RawConfig) -> VisionSpec | None:
    """None: nothing looks at pictures, or config.json does not say what does."""
    if family.vision is None or raw.values.get("vision_config") is None:
        return None
    return family.vision(raw)


def _flat(raw: dict[str, Any], family: Family) -> dict[str, Any]:
    """With what a model beside other towers says of its text in an object of its own. Raises ModelError."""
    inner = raw.get(family.nested) or {}
    if not isinstance(inner, dict):
        raise ModelError(f"config.json: {family.nested} is {inner!r:.60}, an object belongs there: correct the file")
    # Options change the outer object: what it says counts.
    return {**inner, **{key: value for key, value in raw.items() if value is not None or key not in inner}}


def _parse(raw: dict[str, Any], dtype: Any, family: Family, purpose: Purpose) -> ModelConfig:
    raw = _flat(raw, family)
    values = RawConfig(raw, family.defaults)
    hidden_size = values.count("hidden_size")
    head = read_head(None, raw, hidden_size, purpose)
    eos, names = _tokens(values.get("eos_token_id")), architectures(raw)
    layers, causal = family.layers(values), _is_causal(raw, family)
    if not causal:
        _check_both_ways(raw, layers, purpose)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        norm_eps=values.number(family.norm_eps),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        max_position_embeddings=values.count("max_position_embeddings"),
        dtype=dtype,
        eos_token_ids=eos,
        frame=family.frame(values),
        names=family.names,
        other_names=family.other_names,
        ignored=(*family.ignored, *(drafting := _drafting_layers(family, values))),
        drafting=family.drafting or (DraftingSpec(f"model.layers.{len(layers)}.") if drafting else None),
        head=head,
        generates=head is None and purpose.runner != "pooling" and causal,
        causal=causal,
        pictures=bool(family.nested),
        vision=_vision(family, values),
        given_class=names[0] if names and not any(map(is_known, names)) else "",
    )


def _parse_encoder(raw: dict[str, Any], dtype: Any, family: EncoderFamily, purpose: Purpose) -> ModelConfig:
    _refuse_generation(raw, purpose)
    values = family.described(raw)
    spec, hidden_size = family.read(values, family.prefix), values.count("hidden_size")
    return ModelConfig(
        architecture=(architectures(raw) or [family.name])[0],
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        layers=layers_of(spec),
        norm_eps=values.number(family.norm_eps),
        tie_word_embeddings=False,
        max_position_embeddings=values.count("max_position_embeddings"),
        longest=family.longest(values),
        dtype=dtype,
        eos_token_ids=(),
        head=read_head(None, raw, hidden_size, purpose),
        generates=False,
        causal=False,
        encoder=spec,
    )


def reads_both_ways(raw: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json attends to whole texts. Within milliseconds."""
    try:
        if find_encoder(raw) is not None:
            return True
        return not _is_causal(raw, find_family(raw))
    except ModelError:
        return False


def _is_causal(raw: Mapping[str, Any], family: Family) -> bool:
    causal = flag(raw, "is_causal")
    if raw.get("use_bidirectional_attention") == "vision":  # within pictures, which are not read
        return family.causal
    if flag(raw, "use_bidirectional_attention") or causal is False:
        return False
    return family.causal or causal is True


def _check_both_ways(raw: Mapping[str, Any], layers: tuple[LayerSpec, ...], purpose: Purpose) -> None:
    """Raises ModelError for layers that cannot be computed so."""
    _refuse_generation(raw, purpose)
    windows = raw.get("use_bidirectional_attention") is not True  # else it is known how far they reach back and on
    for layer in layers:
        attention = layer.attention
        plain = isinstance(attention, AttentionSpec) and not (
            attention.soft_cap or attention.sinks or (attention.window and windows)
        )
        if not plain or isinstance(layer.mlp, MoESpec):
            raise ModelError(
                "config.json: attention goes both ways (is_causal, use_bidirectional_attention), which is computed "
                "for plain layers only, without windows, caps, sinks and experts: use another model"
            )


def _refuse_generation(raw: Mapping[str, Any], purpose: Purpose) -> None:
    if purpose.runner == "generate":
        name = (architectures(raw) or [model_type(raw)])[0]
        raise ModelError(f"--runner generate: {name} reads texts both ways, it generates none: leave it out")


def _drafting_layers(family: Family, raw: RawConfig) -> list[str]:
    """What the names of layers begin with that draft further tokens, and are none of the model's own."""
    count = (raw.optional_count(family.drafts) if raw.get(family.drafts) else 0) if family.drafts else 0
    first, found = raw.count("num_hidden_layers"), []
    for names in (family.names, *family.other_names):
        begin = "model.layers."
        for ours, theirs in names:
            begin = begin.replace(ours, theirs)
        found += [f"{begin}{first + index}." for index in range(min(count or 0, MAX_LAYERS))]
    return list(dict.fromkeys(found))


def _tokens(value: Any) -> tuple[int, ...]:
    """Of eos_token_id: one, several or none. Raises ModelError."""
    found = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(type(token) is int for token in found):
        raise ModelError(
            f"config.json: eos_token_id is {value!r:.60}, a token's number or a list of some belongs there: "
            "correct the file"
        )
    return tuple(found)


def _dtype_name(raw: dict[str, Any]) -> str:
    name = dtype_name(raw) or "float32"
    if name not in _DTYPES:
        raise ModelError(f"config.json: dtype is {name!r}, supported are {', '.join(_DTYPES)}: correct the file")
    return name
