"""Which layers share blocks, what that costs, and that no two blocks share memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from vserve.engine.cache.kv_layout import KVLayout
from vserve.engine.cache.kv_storage import allocate
from vserve.engine.families.layer_spec import KVSpec

DENSE = KVSpec(8, 128, 128)
LATENT = KVSpec(1, 576, 512, shared=True)


def full(count: int, spec: KVSpec = DENSE) -> list[KVSpec]:
    return [spec] * count


def sliding(count: int, window: int, heads: int = 8, dim: int = 128) -> list[KVSpec]:
    return [KVSpec(heads, dim, dim, window)] * count


def share(layout: KVLayout, num_tokens: int) -> float:
    """Of the bytes that a context would take if every layer kept all of it."""
    each = sum(spec.token_elements for spec in layout.specs)
    return layout.request_blocks(num_tokens) * layout.block_elements / (num_tokens * each)


def test_one_kind_of_layer_is_one_group() -> None:
    layout = KVLayout.of(full(32), 16, 8192)
    assert layout.windows == (0,) and layout.groups[0].layers == tuple(range(32))
    assert layout.block_bytes(2) == 16 * 32 * 8 * 256 * 2
    assert layout.request_blocks(8192) == 512
    assert layout.longest_request(101, 8192, 8192) == 1600 and layout.longest_request(0, 8192, 8192) == 0
    assert KVLayout.of(full(27, LATENT), 16, 8192).block_elements == 16 * 27 * 576


def test_a_window_in_every_layer_is_one_group_too() -> None:
    layout = KVLayout.of(sliding(32, 4096), 16, 32768)
    assert layout.windows == (4096,) and layout.block_elements == 16 * 32 * 8 * 256
    assert layout.request_blocks(32768) == 257 and layout.request_blocks(100) == 7


@pytest.mark.parametrize("length", [100, 4096])
def test_a_window_as_long_as_the_context_is_none(length: int) -> None:
    assert KVLayout.of(full(2) + sliding(2, 4096), 16, length).windows == (0,)
    assert KVLayout.of(sliding(2, 4096), 16, length).windows == (0,)
    assert KVLayout.of(sliding(2, 4096), 16, 4200).windows == (4096,)


@pytest.mark.parametrize(
    "specs, length, layers, saved",
    [
        # Gemma 3 27B, 4B and 1B; gpt-oss 20B; Gemma 2 9B; Command R7B; a Qwen 2 with windows in its last 20 layers
        ((sliding(5, 1024) + full(1)) * 10 + sliding(2, 1024), 32768, [10, 10, 10, 10, 10, 10, 2], 0.80),
        ((sliding(5, 1024) + full(1)) * 5 + sliding(4, 1024), 131072, [5, 5, 5, 5, 5, 5, 4], 0.84),
        ((sliding(5, 512) + full(1)) * 4 + sliding(2, 512), 32768, [4, 4, 4, 4, 4, 4, 2], 0.83),
        ((sliding(1, 128) + full(1)) * 12, 131072, [12, 12], 0.49),
        ((sliding(1, 4096) + full(1)) * 21, 8192, [21, 21], 0.24),
        ((sliding(3, 4096) + full(1)) * 8, 131072, [8, 8, 8, 8], 0.72),
        (full(28) + sliding(20, 4096), 131072, [28, 20], 0.39),
    ],
    ids=["gemma3-27b", "gemma3-4b", "gemma3-1b", "gpt-oss", "gemma2", "command-r7b", "qwen2"],
)
def test_windows_beside_full_layers(specs: list[KVSpec], length: int, layers: list[int], saved: float) -> None:
    layout = KVLayout.of(specs, 16, length)
    assert [len(group.layers) for group in layout.groups] == layers
    assert layout.groups[0].window == 0 and all(group.window for group in layout.groups[1:])
    assert sorted(itertools.chain.from_iterable(group.layers for group in layout.groups)) == list(range(len(specs)))
    for group in layout.groups:
        assert {specs[layer].window for layer in group.layers} == {group.window}
    assert 1 - share(layout, length) >= saved
    assert layout.block_elements == 16 * layers[0] * 8 * 256, "a block costs the same whichever group owns it"


def test_pages_of_other_sizes_are_padded_where_that_pays() -> None:
    """Gemma 4 31B: full layers of 4 heads of 512 (keys only half as large), windows of 16 heads of 256."""
    specs = (sliding(5, 1024, 16, 256) + full(1, KVSpec(4, 512, 512))) * 10
    layout = KVLayout.of(specs, 16, 131072)
    assert [len(group.layers) for group in layout.groups] == [10] * 6
    assert layout.block_elements == 16 * 10 * 16 * 512 and share(layout, 131072) < 0.2
    short = KVLayout.of(specs, 16, 1100)  # one token behind the window: nothing to gain, and padding to lose
    assert short.windows == (0,) and short.block_elements == 16 * sum(spec.token_elements for spec in specs)


def test_many_kinds_of_windows_become_one_group_where_groups_are_too_many() -> None:
    specs = [KVSpec(2, 16, 16, window) for window in range(10, 100, 10)]  # nine kinds
    assert KVLayout.of(specs, 16, 1000).windows == (90,)
    assert KVLayout.of(specs[:3], 16, 1000).windows == (30, 20, 10)


STORED = {
    "dense": full(3, KVSpec(2, 8, 8)),
    "windows": full(1, KVSpec(2, 8, 8)) + sliding(3, 8, 2, 8),
    "other heads": [KVSpec(4, 4, 4), KVSpec(2, 8, 8, 8), KVSpec(1, 16, 16, 8)],
    "other sizes": [KVSpec(1, 16, 8), *sliding(2, 8, 2, 8), KVSpec(1, 20, 12, shared=True)],
    "latent": [KVSpec(1, 12, 8, 0, True), KVSpec(1, 12, 8, 8, True)],
}


@pytest.mark.parametrize("kind", STORED)
def test_a_block_is_one_groups_alone(kind: str) -> None:
    """What a group writes into a block changes no other block of any group; each layer has it as it wrote it."""
    specs, size, num_blocks = STORED[kind], 4, 5
    layout = KVLayout.of(specs, size, 1000)
    assert (len(layout.groups) == 1) == (kind == "dense")
    caches = allocate(layout, num_blocks, torch.float32, torch.device("cpu"))
    memory = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for pair in caches for cache in pair}
    assert sum(memory.values()) == num_blocks * layout.block_bytes(4), "the plan counts what is taken"
    owners = [layout.groups[block % len(layout.groups)] for block in range(num_blocks)]
    written: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for block, group in enumerate(owners):
        for layer in group.layers:
            spec, (keys, values) = specs[layer], caches[layer]
            assert keys.shape == (num_blocks, size, spec.num_kv_heads, spec.head_dim)
            assert values.shape == (num_blocks, size, spec.num_kv_heads, spec.value_dim)
            assert keys.stride(-1) == values.stride(-1) == 1
            keys[block] = torch.randn(keys.shape[1:])
            if spec.shared:
                assert values.data_ptr() == keys.data_ptr()
            else:
                values[block] = torch.randn(values.shape[1:])
            written[block, layer] = keys[block].clone(), values[block].clone()
    for (block, layer), (keys, values) in written.items():
        assert torch.equal(caches[layer][0][block], keys) and torch.equal(caches[layer][1][block], values)
    if kind in ("dense", "windows", "other heads"):
        assert all(cache.is_contiguous() for pair in caches for cache in pair), "the Hopper kernels want it so"
