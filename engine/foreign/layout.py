"""What a probe of transformers' model finds: where attention is called, which products share an input, which norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Paths are those of the model with its head ("model.layers.0.self_attn")."""

    attention: tuple[str, ...]  # the modules that call attention, in their order; one a layer of the config
    products: tuple[str, ...]  # nn.Linear modules that are called
    siblings: tuple[tuple[str, ...], ...]  # of these, those of one module that multiply the same input
    norms: Mapping[str, tuple[float, bool]]  # RMS norms → (eps, whether their weights are less one)
