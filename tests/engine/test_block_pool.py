"""Free list, reference counts and the map of contents, against lists and sets."""

from __future__ import annotations

import random

import pytest

from vserve.engine.schedule.block_pool import NULL_BLOCK, BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    return pool.take_many(count)


def test_null_block_is_never_given_out() -> None:
    pool = BlockPool(4)
    assert take(pool, 3) == [1, 2, 3] and pool.num_free == 0
    with pytest.raises(AssertionError, match="no free block"):
        pool.take_many(1)
    pool.release([NULL_BLOCK])
    assert pool.refs[NULL_BLOCK] == 1 and pool.num_free == 0
    pool.check_invariants()


def test_least_recently_freed_goes_first_and_a_tail_before_its_head() -> None:
    pool = BlockPool(7)
    first, second = take(pool, 3), take(pool, 3)
    for block in first + second:
        pool.register(block, b"%d" % block)
    pool.release(reversed(second))
    pool.release(reversed(first))
    assert take(pool, 6) == [*reversed(second), *reversed(first)]
    pool.check_invariants()


def test_blocks_without_content_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, empty, other = take(pool, 3)
    pool.register(cached, b"a")
    pool.release([cached])
    pool.release([empty, other])
    assert set(take(pool, 2)) == {empty, other}
    assert pool.find(b"a") == cached, "evicted although an empty block was free"
    assert pool.take_many(1)[0] == cached and pool.find(b"a") is None


def test_freed_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(3)
    block = pool.take_many(1)[0]
    pool.register(block, b"a")
    pool.release([block])
    assert pool.num_free == 2 and pool.find(b"a") == block
    pool.share(block)
    assert pool.num_free == 1 and pool.refs[block] == 1
    pool.share(block)
    assert pool.num_free == 1 and pool.refs[block] == 2
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    take(pool, 2)
    assert pool.find(b"a") is None
    pool.check_invariants()


def test_equal_blocks_stay_apart_under_one_key() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    for block in blocks:
        pool.register(block, b"same")
    pool.check_invariants()
    assert pool.find(b"same") == blocks[0]
    pool.revoke(blocks[0])
    assert pool.find(b"same") == blocks[1]
    pool.revoke(blocks[2])
    pool.check_invariants()
    pool.revoke(blocks[1])
    pool.revoke(blocks[1])
    assert pool.find(b"same") is None and not pool.by_key


def test_misuse_is_refused() -> None:
    pool = BlockPool(3)
    block = pool.take_many(1)[0]
    with pytest.raises(AssertionError, match="free or registered"):
        pool.register(2, b"a")
    pool.register(block, b"a")
    with pytest.raises(AssertionError, match="free or registered"):
        pool.register(block, b"b")
    pool.release([block])
    with pytest.raises(AssertionError, match="more often than referenced"):
        pool.release([block])
    with pytest.raises(AssertionError, match="nothing to give"):
        BlockPool(1)


@pytest.mark.parametrize(
    "table, index, value",
    [
        ("refs", 1, 0),
        ("refs", 3, 1),
        ("refs", 4, -1),
        ("next", 3, 3),
        ("prev", 4, 5),
        ("keys", 2, b"x"),
        ("keys", 1, None),
    ],
)
def test_invariants_notice_damage(table: str, index: int, value: int | bytes | None) -> None:
    pool = BlockPool(6)
    pool.register(pool.take_many(1)[0], b"a")
    pool.take_many(1)[0]
    pool.check_invariants()
    getattr(pool, table)[index] = value
    with pytest.raises(AssertionError):
        pool.check_invariants()


def test_invariants_notice_a_wrong_count() -> None:
    pool = BlockPool(6)
    pool.num_free += 1
    with pytest.raises(AssertionError, match="5 blocks in the free list, 6 counted"):
        pool.check_invariants()


def test_any_sequence_of_calls_against_plain_lists() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        num_blocks = rng.randint(2, 12)
        pool = BlockPool(num_blocks)
        free, refs, keys = list(range(1, num_blocks)), dict.fromkeys(range(1, num_blocks), 0), dict[int, bytes]()
        for _ in range(250):
            held = [block for block in refs if refs[block]]
            action = rng.choice(["take", "release", "release", "register", "share", "revoke"])
            if action == "take" and free:
                block = pool.take_many(1)[0]
                assert block == free.pop(0)
                refs[block] = 1
                keys.pop(block, None)
            elif action == "release" and held:
                block = rng.choice(held)
                pool.release([block])
                refs[block] -= 1
                if not refs[block]:
                    free.insert(len(free) if block in keys else 0, block)
            elif action == "register" and (blocks := [block for block in held if block not in keys]):
                block, key = rng.choice(blocks), rng.choice([b"a", b"b", b"c"])
                pool.register(block, key)
                keys[block] = key
            elif action == "share" and keys:
                key = rng.choice(list(keys.values()))
                block = pool.find(key)
                assert block is not None and keys[block] == key
                pool.share(block)
                if not refs[block]:
                    free.remove(block)
                refs[block] += 1
            elif action == "revoke":
                block = rng.choice(list(refs))
                pool.revoke(block)
                keys.pop(block, None)
            assert pool.num_free == len(free), f"seed {seed}"
            assert pool.refs[1:] == list(refs.values()), f"seed {seed}"
            for key in (b"a", b"b", b"c"):
                assert (pool.find(key) is None) == (key not in keys.values()), f"seed {seed}"
            pool.check_invariants()
