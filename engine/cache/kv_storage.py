"""The memory of the KV cache. How pages lie in it is decided here, and nowhere else.

Keys, values and, where tokens have scales of their own, these lie apart, each together over all blocks of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..families.layer_spec import KVSpec
from .kv_layout import KVLayout


def allocate(
    layout: KVLayout, num_blocks: int, dtype: torch.dtype, device: torch.device, more: Mapping[int, int] = {}
) -> list[tuple[Tensor, Tensor]]:
    """Of each layer: keys [num_blocks, block_size, KV, D] and values [num_blocks, block_size, KV, Dv].

    Layers at one place of their groups are given the same memory: every block is one group's at a time. Where their
    keys and their values are as large, each lie together over all blocks, contiguous; else, a block's page of keys is
    followed by its page of values, and both have strides. Values that are part of the keys are a view of them.
    dtype: of numbers; codes are of the layout's. more: layer → blocks behind those, that no request is given.
    """
    if layout.format.code:
        dtype = getattr(torch, layout.format.code)
    size, found, fewest = layout.block_size, {}, num_blocks
    for place in layout.places:
        num_blocks = fewest + max(more.get(layer, 0) for layer in place)
        specs = [layout.specs[layer] for layer in place]
        sizes = {(size * _key_elements(spec), size * _value_elements(spec)) for spec in specs}
        if len(sizes) == 1:
            ((key_page, value_page),) = sizes
            keys = torch.zeros(num_blocks, key_page, dtype=dtype, device=device)
            values = torch.zeros(num_blocks, value_page, dtype=dtype, device=device)
            for layer, spec in zip(place, specs, strict=True):
                found[layer] = _views(keys, values, spec, size)
        else:
            pages = torch.zeros(num_blocks, max(map(sum, sizes)), dtype=dtype, device=device)
            for layer, spec in zip(place, specs, strict=True):
                key_page = size * _key_elements(spec)
                values = pages[:, key_page : key_page + size * _value_elements(spec)]
                found[layer] = _views(pages[:, :key_page], values, spec, size)
    return [found[layer] for layer in range(len(layout.specs))]


def allocate_scales(
    layout: KVLayout, num_blocks: int, device: torch.device, more: Mapping[int, int] = {}
) -> list[tuple[Tensor, Tensor]]:
    """Of each layer: fp32 [num_blocks, block_size, KV] for keys, and for values; layers at one place share them too."""
    found = {}
    for place in layout.places:
        heads = max(layout.specs[layer].num_kv_heads for layer in place)
        blocks = num_blocks + max(more.get(layer, 0) for layer in place)
        both = torch.ones(2, blocks, layout.block_size * heads, dtype=torch.float32, device=device)
        for layer in place:
            mine = layout.specs[layer].num_kv_heads
            keys, values = (
                plane[:, : layout.block_size * mine].unflatten(1, (layout.block_size, mine)) for plane in both
            )
            found[layer] = keys, values
    return [found[layer] for layer in range(len(layout.specs))]


def _views(keys: Tensor, values: Tensor, spec: KVSpec, block_size: int) -> tuple[Tensor, Tensor]:
    """keys and values [num_blocks, elements of a page] as one layer has them."""
    heads = block_size, spec.num_kv_heads
    keys = keys.unflatten(1, (*heads, spec.head_dim))
    return keys, keys[..., : spec.value_dim] if spec.shared else values.unflatten(1, (*heads, spec.value_dim))


def _key_elements(spec: KVSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


def _value_elements(spec: KVSpec) -> int:
    """Of a token, beside its keys."""
    return spec.token_elements - _key_elements(spec)
