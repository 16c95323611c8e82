"""The books on pictures: what tells blocks apart, and how far prompts go. Whole workloads: test_media_properties."""

from __future__ import annotations

from typing import Any

import pytest

from vserve.engine.describe.divide import patch_cost
from vserve.engine.families.layer_spec import AttentionSpec, LayerSpec, MLPSpec
from vserve.engine.families.vision_spec import BlockSpec
from vserve.engine.link.media import MediaItem
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.planning.settings import pictures
from vserve.engine.schedule.encoder_cache import PATCHES_BESIDE_DECODES, STEP_PATCHES, EncoderCache
from vserve.engine.schedule.kv_cache import KVCacheManager
from vserve.engine.schedule.kv_events import KVEvents
from vserve.engine.schedule.request import Request

PICTURE = 9


def config(**options: Any) -> SchedulerConfig:
    given: dict[str, Any] = dict(
        max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=4, block_size=4, num_blocks=2000,
        encoder_cache_tokens=100, media_tokens=(PICTURE, -1), prefix_cache_seed="fleet",
    )  # fmt: skip
    return SchedulerConfig(**(given | options))


def item(start: int, length: int, key: bytes = b"a", patches: int = 0) -> MediaItem:
    return MediaItem(key, start, length, (1, 1, patches or length), (1, 1, 1), (1, 1), b"rgb")


def request(id: int, length: int, *media: MediaItem, **options: Any) -> Request:
    ids = [1] * length
    for one in media:
        ids[one.start : one.start + one.length] = [PICTURE] * one.length
    return Request(id, ids, SamplingParams(max_tokens=4), media=media, **options)


def hashes(*media: MediaItem, length: int = 32, **options: Any) -> list[bytes]:
    kv, one = KVCacheManager(config()), request(1, length, *media, **options)
    kv.extend_hashes(one)
    return one.block_hashes


def test_blocks_with_a_picture_are_told_apart_by_it() -> None:
    """Those before are the same, and so is the same picture in the same place, alone."""
    base, same = hashes(item(6, 10)), hashes(item(6, 10))
    assert base == same
    other, salted = hashes(item(6, 10, b"b")), hashes(item(6, 10), cache_salt="x")
    assert base[0] == other[0] and not set(base[1:]) & set(other[1:])
    assert not set(base) & set(salted)
    plain = Request(1, request(1, 32, item(6, 10)).token_ids, SamplingParams(max_tokens=4))
    kv = KVCacheManager(config())
    kv.extend_hashes(plain)
    assert plain.block_hashes[0] == base[0] and not set(plain.block_hashes[1:]) & set(base)


def test_where_a_picture_begins_and_which_come_together_tell_blocks_apart() -> None:
    """The ids are the same in all of these."""
    ids = request(1, 32, item(4, 8)).token_ids
    found = []
    for media in (
        (item(4, 8),),
        (item(4, 7),),
        (item(5, 7),),
        (item(4, 4), item(8, 4)),
        (item(4, 2), item(6, 6, b"b")),
    ):
        kv = KVCacheManager(config())
        one = Request(1, ids, SamplingParams(max_tokens=4), media=media)
        kv.extend_hashes(one)
        found.append(one.block_hashes)
    assert len({blocks[0] for blocks in found}) == 1
    assert len({blocks[2] for blocks in found}) == 4, "a picture that ends a token earlier has the same first features"


def test_hashes_made_bit_by_bit_are_those_of_the_whole() -> None:
    kv, one = KVCacheManager(config()), request(1, 6, item(2, 4))
    for token in [1] * 30:
        kv.extend_hashes(one)
        one.token_ids.append(token)
    kv.extend_hashes(one)
    whole = request(2, 36, item(2, 4))
    kv.extend_hashes(whole)
    assert one.block_hashes == whole.block_hashes


def test_events_name_the_pictures_of_each_block() -> None:
    heard: list[Any] = []
    kv = KVCacheManager(config())
    kv.publish(events := KVEvents(lambda batch: heard.extend(batch), 4, (0,)))
    one = request(1, 24, item(6, 6, b"\x0a"), item(13, 2, b"\x0b"), cache_salt="salt")
    kv.extend_hashes(one)
    assert kv.encoder is not None
    kv.encoder.begin(False)
    assert kv.admit(one, 4096, 0) == 24
    kv.register(one, 24, [])
    events.flush()
    *_, stored = heard
    assert stored.extra_keys == [("salt",), ("0a",), ("0a",), ("0b",), None, None]


def test_who_waits_for_room_holds_nothing() -> None:
    """Of two pictures that the cache cannot hold at once, the second one waits before its first token."""
    cache = EncoderCache(config(encoder_cache_tokens=10))
    one, other = request(1, 40, item(2, 8, b"a"), item(20, 8, b"b")), request(2, 20, item(4, 8, b"c"))
    cache.begin(False)
    assert cache.reach(one, 0, 40) == 20
    cache.take(one, 20)
    assert cache.reach(other, 0, 20) == 4
    cache.take(other, 4)
    assert [encode.item.key for encode in cache.hand_over()[1]] == [b"a"]
    one.num_computed_tokens, other.num_computed_tokens = 20, 4
    cache.begin(False)
    assert cache.reach(other, 4, 16) == 16, "what one has behind it makes room"
    other_held = cache.held[2].entries
    assert not other_held
    cache.take(other, 16)
    assert cache.reach(one, 20, 20) == 0
    forgotten, encoded = cache.hand_over()
    assert len(forgotten) == 1 and [encode.item.key for encode in encoded] == [b"c"]


def test_a_step_encodes_so_many_patches_and_one_picture_always() -> None:
    cache = EncoderCache(config(encoder_cache_tokens=1000))
    small = [item(10 * i, 8, bytes([i]), PATCHES_BESIDE_DECODES // 2) for i in range(12)]
    one, large = request(1, 120, *small), request(2, 20, item(4, 8, b"z", 2 * STEP_PATCHES))
    cache.begin(beside_decodes=True)
    assert cache.reach(one, 0, 120) == 20, "two of them"
    assert cache.reach(large, 0, 20) == 20, "whatever its size"
    cache.begin(beside_decodes=False)
    assert cache.reach(one, 0, 120) == 80, "eight of them"
    cache.take(one, 80)
    assert cache.reach(large, 0, 20) == 4, "beside others it waits"


def test_what_is_encoded_beside_decodes_takes_room_of_the_chunk() -> None:
    """A step with both is no longer than others; without decodes nobody waits for it."""
    cache = EncoderCache(config(encoder_cache_tokens=1000, max_mixed_tokens=100, patch_cost=0.5))
    one, two = (request(id, 200, item(10, 40, bytes([id]), 120)) for id in (1, 2))
    cache.begin(beside_decodes=False)
    assert cache.reach(one, 0, 100) == 100
    cache.begin(beside_decodes=True)
    assert cache.reach(one, 0, 100) == 40, "60 of its tokens go for 120 patches"
    assert cache.reach(one, 0, 50) == 11, "too little for both, but nobody else is in the step"
    assert cache.take(one, 40) == 60
    one.num_computed_tokens = 40
    cache.begin(beside_decodes=True)
    assert cache.reach(one, 40, 60) == 60 and cache.take(one, 60) == 0
    assert cache.reach(two, 0, 40) == 10, "beside another prompt it waits before its picture"
    assert cache.reach(two, 0, 90) == 30


def test_a_patch_costs_what_the_tower_multiplies() -> None:
    """Of a megapixel, a third of its tokens' prefill in the shape of Qwen3-VL-8B."""

    class Vision:
        blocks = BlockSpec(depth=27, hidden=1152, inner=4304, heads=16)

    class Model:
        vision, hidden_size = Vision, 4096
        layers = (LayerSpec(AttentionSpec(32, 8, 128, None), MLPSpec(12288)),) * 36

    assert 4096 * patch_cost(Model) / 1024 == pytest.approx(0.36, rel=0.1)  # type: ignore[arg-type]
    assert patch_cost(type("Text", (), {"vision": None})) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(("seqs", "longest"), [(16, 256), (4000, 97), (4096, 1)])
def test_a_picture_that_is_not_cut_has_room_beside_decodes(seqs: int, longest: int) -> None:
    class Vision:
        image_token, video_token, merge, mrope, bidirectional = 5, None, 4, None, "all"
        blocks = BlockSpec(depth=2, hidden=64, inner=128, heads=2)

    class Model:
        vision, causal, hidden_size = Vision, True, 64
        layers = (LayerSpec(AttentionSpec(4, 2, 16, None), MLPSpec(96)),)

    class Options:
        mm_encoder_cache_tokens = None

    found = pictures(Options, Model, (4096, 256), 8192, 4096, seqs)  # type: ignore[arg-type]
    assert (found["media_whole"], found["longest_media"]) == (True, longest)
    cache = EncoderCache(config(media_whole=True, longest_media=longest, encoder_cache_tokens=300))
    error = cache.problem(request(1, 300, item(4, 256)).token_ids, [item(4, 256)])
    assert (error is None) == (longest >= 256)
    if longest >= 256:
        one = request(1, 300, item(4, 256))
        cache.begin(False)
        assert cache.reach(one, 0, 259) == 4 and cache.reach(one, 0, 260) == 260
        assert [cache.outside(one, n) for n in (3, 4, 5, 259, 260, 261)] == [3, 4, 4, 4, 260, 261]
