"""Block tables, hash chains, and admission as one decision."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest

from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.kv_cache import KVCacheManager
from vserve.engine.schedule.request import Request


def make(num_blocks: int = 11, block_size: int = 4, **options) -> KVCacheManager:
    return KVCacheManager(
        SchedulerConfig(
            max_model_len=1000, max_num_batched_tokens=64, max_num_seqs=8, block_size=block_size,
            num_blocks=num_blocks, **options,
        )
    )  # fmt: skip


def request(id: int, prompt, salt: str | None = None) -> Request:
    return Request(id, prompt, SamplingParams(max_tokens=10), cache_salt=salt)


def admit(kv: KVCacheManager, req: Request, budget: int = 64, whole: int = 0) -> int:
    """As the scheduler does it: hash, match and allocate, register what the step will compute."""
    kv.extend_hashes(req)
    num_new = kv.admit(req, budget, whole)
    if num_new:
        kv.register(req, req.num_computed_tokens + num_new, [])
        req.num_computed_tokens += num_new
    return num_new


def blocks(kv: KVCacheManager, req: Request, group: int = 0) -> list[int]:
    return kv.tables[req.id].groups[group]


# ---- hashes ----
def test_hash_chain_is_sha256_of_parent_tokens_and_salt() -> None:
    kv = make()
    tokens = [5, 0, 70_000, 1, 2, 3, 4, 2**31 - 1, 9]
    req = request(1, tokens, "pepper")
    kv.extend_hashes(req)
    first = hashlib.sha256(kv.seed + struct.pack("<4i", *tokens[:4]) + b"\x0a\0\0\0" + b"saltpepper").digest()
    second = hashlib.sha256(first + struct.pack("<4i", *tokens[4:8])).digest()
    assert req.block_hashes == [first, second]


def test_hashes_grow_with_the_tokens() -> None:
    kv = make()
    tokens = list(range(23))
    at_once, bit_by_bit = request(1, tokens, "s"), request(2, tokens[:3], "s")
    kv.extend_hashes(at_once)
    for token in tokens[3:]:
        kv.extend_hashes(bit_by_bit)
        bit_by_bit.token_ids.append(token)
    kv.extend_hashes(bit_by_bit)
    assert bit_by_bit.block_hashes == at_once.block_hashes and len(at_once.block_hashes) == 5


def test_hashes_differ_by_salt_prefix_and_process() -> None:
    kv = make()
    seen = set()
    for salt in (None, "", "a", "b", "\ud800"):  # a lone surrogate is legal JSON
        req = request(1, [1, 2, 3, 4] * 2, salt)
        kv.extend_hashes(req)
        seen.update(req.block_hashes)
    assert len(seen) == 10
    assert kv.seed != make().seed and len(kv.seed) == 32


def test_row_35_a_forged_prompt_reuses_no_blocks() -> None:
    """Tokens that read like a salt, a salt that reads like tokens, and keys computed with everything but the secret."""
    kv = make(num_blocks=40)
    head, salt = [1, 2, 3, 4], "8 bytes."
    forged = [*head, *struct.unpack("<4i", b"\x0c\0\0\0" + b"salt" + salt.encode())]
    assert admit(kv, request(1, [*head, *head, 9], salt)) == 9
    assert admit(kv, request(2, [*forged, 9])) == 9  # without a salt: the same bytes, in another place
    assert admit(kv, request(3, [*head, *head, 9])) == 5  # what 2 has in common with it, and nothing of 1
    assert admit(kv, request(4, [*head, *head, 9], salt[:-1])) == admit(kv, request(5, [*head, *head, 9], "")) == 9
    elsewhere = make()
    known = request(6, [*head, *head], salt)
    elsewhere.extend_hashes(known)
    assert all(kv.pool.find(key) is None for key in known.block_hashes)
    kv.extend_hashes(mine := request(7, [*head, *head], salt))
    assert kv.pool.find(mine.block_hashes[0]) is not None


def test_no_hashing_without_prefix_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make(enable_prefix_caching=False)
    monkeypatch.setattr("vserve.engine.schedule.kv_cache.sha256", None)
    first, second = request(1, range(12)), request(2, range(12))
    assert admit(kv, first) == 12 and admit(kv, second) == 12
    assert first.block_hashes == [] and kv.prefix_queries == 0 and not kv.pool.by_key
    assert second.num_cached_tokens == 0


# ---- admission ----
def test_prefix_hit_shares_blocks_and_computes_the_rest() -> None:
    kv = make()
    first, second = request(1, range(10)), request(2, [*range(9), 99, 98])
    assert admit(kv, first) == 10
    assert admit(kv, second) == 3 and second.num_cached_tokens == 8
    assert blocks(kv, second)[:2] == blocks(kv, first)[:2] and blocks(kv, second)[2] != blocks(kv, first)[2]
    assert (kv.prefix_queries, kv.prefix_hits) == (21, 8)
    kv.check_invariants({1: first, 2: second}, True)


@pytest.mark.parametrize("length, hit", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_hit_leaves_at_least_one_token_to_compute(length: int, hit: int) -> None:
    kv = make()
    first, second = request(1, range(length)), request(2, range(length))
    admit(kv, first)
    assert admit(kv, second) == length - hit and second.num_cached_tokens == hit


def test_salts_do_not_share() -> None:
    kv = make(num_blocks=20)
    for id, salt in enumerate([None, "", "a", "b"]):
        assert admit(kv, request(id, range(9), salt)) == 9
    assert admit(kv, request(9, range(9), "a")) == 1


def test_whole_prompt_must_fit_although_a_chunk_is_allocated() -> None:
    kv = make(num_blocks=4)  # 12 tokens
    assert admit(kv, request(1, range(13)), budget=4) == 0
    assert kv.num_free_blocks == 3 and not kv.tables
    small = request(2, range(12))
    assert admit(kv, small, budget=5) == 5
    assert len(blocks(kv, small)) == 2 and kv.num_free_blocks == 1


def test_free_hits_count_as_consumption() -> None:
    kv = make(num_blocks=4)
    first = request(1, range(9))
    admit(kv, first)
    kv.free(first)
    holder = request(2, [50, 51])
    admit(kv, holder)
    assert blocks(kv, holder) == [3], "a block without content is taken before the cached ones"
    second = request(3, range(9))  # needs 3 blocks; its 2 hits are the only free ones
    assert admit(kv, second) == 0 and kv.num_free_blocks == 2
    assert second.num_computed_tokens == 0 and second.num_cached_tokens is None and kv.prefix_queries == 11
    kv.free(holder)
    assert admit(kv, second) == 1 and second.num_cached_tokens == 8


def test_prompt_is_not_cut_without_chunks_unless_it_can_never_fit() -> None:
    kv = make(num_blocks=40)
    assert admit(kv, request(1, range(10)), budget=9, whole=64) == 0
    assert admit(kv, request(2, range(100, 110)), budget=10, whole=64) == 10
    assert admit(kv, request(3, range(200, 265)), budget=9, whole=64) == 9  # resumed, has outgrown a step of 64


def test_resumed_request_does_not_count_as_query_again() -> None:
    kv = make()
    req = request(1, range(9))
    admit(kv, req)
    kv.free(req)
    req.num_computed_tokens = 0
    assert kv.admit(req, 64, 0) == 1
    assert req.num_cached_tokens == 0, "of the first admission"
    assert (kv.prefix_queries, kv.prefix_hits) == (9, 0)


# ---- tables ----
def test_grow_is_all_or_nothing() -> None:
    kv = make(num_blocks=5, windows=(0, 0))
    req = request(1, range(4))
    assert admit(kv, req) == 4
    assert kv.grow(req, 4) == 0 and kv.grow(req, 9) == -1 and kv.num_free_blocks == 2
    assert kv.grow(req, 8) == 1 and kv.num_free_blocks == 0
    kv.check_invariants({1: req}, True)


def test_hit_is_the_longest_that_all_groups_hold() -> None:
    kv = make(num_blocks=40, windows=(0, 0))
    first = request(1, range(13))
    admit(kv, first)
    assert set(blocks(kv, first, 0)).isdisjoint(blocks(kv, first, 1))
    kv.pool.revoke(blocks(kv, first, 1)[2])
    second = request(2, range(13))
    assert admit(kv, second) == 5 and second.num_cached_tokens == 8
    for group in (0, 1):
        assert blocks(kv, second, group)[:2] == blocks(kv, first, group)[:2]


def test_only_full_blocks_of_known_tokens_are_registered() -> None:
    kv = make()
    req = request(1, range(7))
    admit(kv, req, budget=3)
    assert not kv.pool.by_key
    kv.grow(req, 9)
    registered: list = []
    kv.register(req, 9, registered)  # two more are computed than have values
    assert [block for _, block, _ in registered] == blocks(kv, req)[:1]
    kv.register(req, 9, registered)
    assert len(registered) == 1


def test_equal_blocks_are_not_merged() -> None:
    kv = make()
    first, second = request(1, range(8)), request(2, range(8))
    for req in (first, second):
        kv.extend_hashes(req)
        assert kv.admit(req, 64, 0) == 8  # registered only after both were admitted
    for req in (first, second):
        kv.register(req, 8, [])
        req.num_computed_tokens = 8
    assert set(blocks(kv, first)).isdisjoint(blocks(kv, second))
    kv.free(first)
    third = request(3, range(9))
    assert admit(kv, third) == 1
    kv.check_invariants({2: second, 3: third}, True)


def test_heads_outlive_tails() -> None:
    kv = make(num_blocks=6)
    req = request(1, range(20))
    admit(kv, req)
    kv.free(req)
    admit(kv, request(2, range(50, 62)))  # takes three blocks: the tail of the first
    probe = request(3, range(8))
    kv.extend_hashes(probe)
    assert len(kv._match(probe, 2)[0]) == 2


def test_revoke_spares_a_block_with_a_new_key() -> None:
    kv = make(num_blocks=3)
    old, new = request(1, range(8)), request(2, range(50, 58))
    kv.extend_hashes(old)
    kv.admit(old, 64, 0)
    registered: list = []
    kv.register(old, 8, registered)
    kv.free(old)
    admit(kv, new)
    kv.revoke(registered)
    assert len(kv.pool.by_key) == 2
    kv.distrust(new)
    assert not kv.pool.by_key
    kv.distrust(old)  # holds no blocks: nothing to forget
    kv.check_invariants({2: new}, True)


def test_invariants_notice_a_leak() -> None:
    kv = make()
    req = request(1, range(8))
    admit(kv, req)
    with pytest.raises(AssertionError, match="do not run"):
        kv.check_invariants({}, False)
    kv.pool.refs[blocks(kv, req)[0]] += 1
    with pytest.raises(AssertionError, match="reference counts"):
        kv.check_invariants({1: req}, True)
    kv.tables.clear()
    with pytest.raises(AssertionError, match="blocks are referenced"):
        kv.check_invariants({}, False)


# ---- windows ----
def compute(kv: KVCacheManager, req: Request, num_tokens: int, chunk: int) -> bool:
    """Steps of up to `chunk` tokens, as the scheduler plans them; False where there is no room."""
    kv.extend_hashes(req)
    if req.id not in kv.tables and not admit(kv, req, chunk):
        return False
    while req.num_computed_tokens < num_tokens:
        end = min(req.num_computed_tokens + chunk, num_tokens)
        if kv.grow(req, end) < 0:
            return False
        kv.register(req, end, [])
        req.num_computed_tokens = end
    return True


def windowed(*windows: int, chunk: int = 8, **options) -> KVCacheManager:
    config = {"max_model_len": 1000, "max_num_seqs": 8, "block_size": 4, "num_blocks": 200} | options
    return KVCacheManager(SchedulerConfig(max_num_batched_tokens=chunk, windows=windows, **config))


def test_a_window_keeps_what_its_next_token_sees() -> None:
    kv = windowed(0, 10)
    req = request(1, range(100))
    assert compute(kv, req, 100, chunk=8)
    full, window = kv.tables[1].groups
    assert len(full) == len(window) == 25 and 0 not in full
    # The step of tokens 96 to 99 was planned when 96 were computed: token 96 sees tokens 87 to 96, and block 21 on.
    assert [index for index, block in enumerate(window) if block] == [21, 22, 23, 24]
    assert kv.num_free_blocks == 199 - 25 - 4
    kv.check_invariants({1: req}, True)
    kv.free(req)
    assert kv.num_free_blocks == 199


@pytest.mark.parametrize("windows", [(0, 10), (10,), (0, 10, 10), (0, 33, 1)])
def test_more_contexts_fit_the_same_bytes_as_windows_say(windows: tuple[int, ...]) -> None:
    """Within one page a sequence and window, of what the window itself takes."""
    length, page, num_blocks = 400, 4, 1200
    kv = windowed(*windows, chunk=4, num_blocks=num_blocks + 1, max_num_seqs=1000)
    running = {}
    for id in range(1000):
        req = request(id, range(1000 * id, 1000 * id + length))
        if not compute(kv, req, length, chunk=4):
            break
        running[id] = req
    bound = sum(length // page if not window else -(-window // page) + 1 for window in windows)
    transient = sum(1 for window in windows if window)  # of the one that did not fit
    assert len(running) >= (num_blocks - transient) // bound > num_blocks // (len(windows) * length // page)
    held = num_blocks - kv.num_free_blocks
    assert held <= (len(running) + 1) * bound + transient


def test_a_prefix_is_hit_when_windows_hold_its_end_alone() -> None:
    kv = windowed(0, 9)  # the first token of a block sees two blocks before its own
    first = request(1, range(40))
    assert compute(kv, first, 40, chunk=4)
    kv.free(first)
    second = request(2, [*range(32), 77, 78])
    assert compute(kv, second, 34, chunk=4) and second.num_cached_tokens == 32
    assert [block == 0 for block in kv.tables[2].groups[1]] == [True] * 6 + [False] * 3
    kv.check_invariants({2: second}, True)
    kv.free(second)
    kv.pool.revoke(kv.pool.find(first.block_hashes[6] + kv.groups[1].suffix))  # type: ignore[arg-type]
    third = request(3, [*range(32), 77, 78])
    assert compute(kv, third, 34, chunk=4) and third.num_cached_tokens == 24, "behind a gap the window is not whole"


def longest_prefix(kv: KVCacheManager, windows: tuple[int, ...], keys: list[bytes]) -> int:
    """By trying every length: all blocks of full groups, of windows those that the next token sees."""
    size = kv.block_size
    for length in range(len(keys), 0, -1):
        if all(
            kv.pool.find(keys[index] + group.suffix) is not None
            for group, window in zip(kv.groups, windows, strict=True)
            for index in range(length)
            if not window or (index + 1) * size - 1 > length * size - window
        ):
            return length
    return 0


@pytest.mark.parametrize("seed", range(8))
def test_hits_are_those_of_every_length_tried(seed: int) -> None:
    """Requests come, grow, end and are distrusted at random, in a pool that is too small for what they leave."""
    rng = random.Random(seed)
    windows = rng.choice([(0, 5), (7,), (0, 9, 9), (0, 0, 3), (0, 14, 6, 1)])
    kv = windowed(*windows, num_blocks=1 + 30 * len(windows), block_size=rng.choice([1, 2, 4]))
    stems = [[rng.randrange(5) for _ in range(60)] for _ in range(2)]
    running: dict[int, Request] = {}
    lengths = set()
    for id in range(600):
        if running and rng.random() < 0.5:
            req = running[rng.choice(list(running))]
            if rng.random() < 0.5:
                kv.free(running.pop(req.id))
            elif rng.random() < 0.1:
                kv.distrust(req)
            else:
                compute(kv, req, min(len(req.token_ids), req.num_computed_tokens + rng.randint(1, 8)), 8)
        stem = rng.choice(stems)
        req = request(id, [*stem[: rng.randint(1, 60)], *(rng.randrange(5) for _ in range(rng.randint(0, 3)))])
        kv.extend_hashes(req)
        limit = (len(req.token_ids) - 1) // kv.block_size
        hits = kv._match(req, limit)
        assert {len(blocks) for blocks in hits} == {longest_prefix(kv, windows, req.block_hashes[:limit])}
        lengths.add(len(hits[0]))
        for group, window, blocks in zip(kv.groups, windows, hits, strict=True):
            for index, block in enumerate(blocks):
                seen = not window or (index + 1) * kv.block_size - 1 > len(blocks) * kv.block_size - window
                assert (block != 0) == seen
                assert not seen or kv.pool.keys[block] == req.block_hashes[index] + group.suffix
        if admit(kv, req, rng.randint(1, 8)):
            running[id] = req
        kv.check_invariants(running, True)
    assert len(lengths) > 5
    for req in running.values():
        kv.free(req)
    kv.check_invariants({}, True)
    assert kv.num_free_blocks == kv.pool.num_blocks - 1


def test_a_request_must_fit_with_the_steps_that_read_it() -> None:
    assert windowed(0, 16, chunk=8, num_blocks=1 + 10 + 7).max_tokens == 40  # 16 - 1 + 8 tokens lie in up to 7 blocks
    assert windowed(0, 16, chunk=8, num_blocks=1 + 10 + 6).max_tokens == 36
    assert windowed(16, chunk=8, num_blocks=1 + 7).max_tokens == 1000, "a window slides on for ever"
    assert windowed(16, chunk=8, num_blocks=1 + 6).max_tokens == 24
    assert windowed(0, 0, num_blocks=1 + 11).max_tokens == 20


def test_a_narrow_window_leaves_blocks_before_their_tokens_are_known() -> None:
    """With two steps in flight the host does not know the last tokens, which a window of one has left behind."""
    kv = windowed(0, 1, chunk=4)
    req = request(1, range(3))
    assert compute(kv, req, 3, chunk=4)
    for end in (4, 5, 6):
        assert kv.grow(req, end) >= 0
        req.num_computed_tokens = end
    for token in (7, 8, 9):
        req.token_ids.append(token)
        kv.extend_hashes(req)
    assert kv.tables[1].groups[1][0] == 0
    registered: list = []
    kv.register(req, 6, registered)
    assert [block for _, block, _ in registered] == [kv.tables[1].groups[0][0]]
    kv.check_invariants({1: req}, True)


# ---- keys ----
def test_engines_with_one_seed_agree_on_keys() -> None:
    def key(**options) -> bytes:
        kv, req = make(**options), request(1, range(4), "salt")
        kv.extend_hashes(req)
        return req.block_hashes[0]

    assert key(prefix_cache_seed="fleet") == key(prefix_cache_seed="fleet")
    assert len({key(prefix_cache_seed="fleet"), key(prefix_cache_seed="other"), key(), key()}) == 4
    assert "fleet" not in repr(make(prefix_cache_seed="fleet").seed)


def test_extra_keys_tell_blocks_apart_from_theirs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make()

    def hashes(*extras: bytes) -> list[bytes]:
        found = {1: extras} if extras else {}
        monkeypatch.setattr("vserve.engine.schedule.kv_cache.extra_keys", lambda *_: found)
        req = request(1, range(12))
        kv.extend_hashes(req)
        return req.block_hashes

    plain = hashes()
    assert hashes() == plain
    found = [hashes(b"a"), hashes(b"b"), hashes(b"a", b"b"), hashes(b"ab"), hashes(b"")]
    assert all(other[0] == plain[0] for other in found), "what comes before is the same"
    for index in (1, 2):
        assert len({plain[index], *(other[index] for other in found)}) == 6
