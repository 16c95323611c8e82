"""How keys and values are kept: as numbers of the activations' type, or as codes of 8 bits with scales; no torch.

Whose scales: what the checkpoint has was found by calibration. Where it has none, 1.0 is right for keys that a norm
bounds, and usual for others; but a bias may put keys beyond what codes can say (Qwen 2.5: everything is lost), and
then each token and head gets a scale of its own as it is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError
from ..families.layer_spec import AttentionSpec, KVSpec, LatentAttentionSpec
from ..options.config import EngineConfig

if TYPE_CHECKING:
    from ..describe.model_config import ModelConfig
    from ..models.model import Model

SCALE_BYTES = 4
CODES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # → torch's name
_OTHER_NAMES = {"fp8": "fp8_e4m3", "fp8_per_token_head": "fp8_e4m3"}


@dataclass(frozen=True)
class KVFormat:
    """code: name of a float8 type of torch; "": numbers. token_scales: a scale for each token and head."""

    code: str = ""
    token_scales: bool = False

    @property
    def scales(self) -> str:
        if not self.code:
            return "none"
        return "a token and head" if self.token_scales else "a layer or head"

    def item_bytes(self, number_bytes: int) -> int:
        """Of an element, where one of the activations has `number_bytes`."""
        return 1 if self.code else number_bytes

    def scale_bytes(self, spec: KVSpec) -> int:
        """Of a token's scales: of each head's key, and of its value."""
        return 2 * SCALE_BYTES * spec.num_kv_heads if self.token_scales else 0


NUMBERS = KVFormat()


class Settings(Protocol):
    """Of planning/settings.py."""

    @property
    def kv_cache_dtype(self) -> str: ...

    @property
    def calculate_kv_scales(self) -> bool: ...


@dataclass(frozen=True)
class KVSettings:
    """What was asked of the cache, resolved by itself. Fields as in planning/settings.py."""

    kv_cache_dtype: str
    calculate_kv_scales: bool

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, dtype: str) -> KVSettings:
        """dtype: of the activations. Raises ConfigError for what cannot be."""
        asked = config.kv_cache_dtype
        return cls(
            choose_kv_cache_dtype(asked, model, dtype), config.calculate_kv_scales or asked == "fp8_per_token_head"
        )


def choose_kv_cache_dtype(asked: str, model: ModelConfig, dtype: str) -> str:
    """dtype: of the activations. → that, or a key of CODES. Raises ConfigError for what cannot be."""
    latent = any(isinstance(layer.mixer, LatentAttentionSpec) for layer in model.layers)
    if asked == "auto":
        return "fp8_e4m3" if scheme_wants_codes(model) and not latent else dtype
    chosen = _OTHER_NAMES.get(asked, asked)
    if chosen in CODES:
        if latent:
            raise ConfigError(
                f"--kv-cache-dtype {asked}: the model has latent attention, whose cache is small and kept as {dtype}: "
                "leave the option out"
            )
        return chosen
    if chosen != dtype:
        raise ConfigError(
            f"--kv-cache-dtype {asked}: the model computes in {dtype}, and its cache is of that type or of 8 bits: "
            f"choose {dtype}, {' or '.join(CODES)}"
        )
    return dtype


def scheme_wants_codes(model: ModelConfig) -> bool:
    """Whether the checkpoint says that its cache is to have 8-bit floats."""
    scheme = getattr(model.quantization, "kv_cache_scheme", None)
    return scheme is not None and scheme.get("type") == "float" and scheme.get("num_bits") == 8


def unbounded_keys(model: ModelConfig) -> bool:
    """Keys with a bias and without a norm. Where transformers' code computes the model, it is not known."""
    return model.foreign is not None or any(
        isinstance(layer.attention, AttentionSpec) and layer.attention.qkv_bias and not layer.attention.qk_norm
        for layer in model.layers
    )


def planned_format(settings: Settings, model: ModelConfig) -> KVFormat:
    """Before the checkpoint is read: its scales are there where its configuration speaks of them."""
    code = CODES.get(settings.kv_cache_dtype, "")
    by_token = settings.calculate_kv_scales or (unbounded_keys(model) and not scheme_wants_codes(model))
    return KVFormat(code, bool(code) and by_token)


def loaded_format(settings: Settings, model: Model) -> tuple[KVFormat, str]:
    """Once the checkpoint's scales are there; with a line that says whose are used, "" for numbers."""
    code = CODES.get(settings.kv_cache_dtype, "")
    if not code:
        return NUMBERS, ""
    layers = model.attention_layers()
    calibrated = sum(layer.code_scales is not None for layer in layers)
    label = f"KV cache {settings.kv_cache_dtype}: "
    if settings.calculate_kv_scales:
        return KVFormat(code, True), label + (
            "each token and head gets a scale of its own as it is written (--calculate-kv-scales; none is taken from a "
            "first batch)"
        )
    if calibrated == len(layers):
        return KVFormat(code), label + "scales of the checkpoint"
    if unbounded_keys(model.config):
        return KVFormat(code, True), label + (
            "each token and head gets a scale of its own: the checkpoint has none, and nothing bounds the keys"
        )
    if calibrated:
        return KVFormat(
            code
        ), label + f"the checkpoint's scales for {calibrated} of {len(layers)} layers, 1.0 for others"
    return KVFormat(code), label + (
        "the checkpoint has no scales, 1.0 is taken for all; --calculate-kv-scales gives each token and head its own"
    )
