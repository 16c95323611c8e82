"""Paged attention, decode and prefill: the torch twins and the Triton kernels against plain loops in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.attention import attention, attention_decode
from vserve.kernels.attention.attention import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_torch,
    prefill_attention,
    prefill_attention_torch,
)
from vserve.kernels.attention.attention_decode import decode_attention_triton, decode_tile
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch, choose_splits
from vserve.kernels.attention.attention_prefill import prefill_attention_triton

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])  # the interpreter's bf16 dot is wrong
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DECODE: dict[str, Callable[..., Tensor]] = {
    "torch": decode_attention_torch,
    "triton": decode_attention_triton,
    "public": decode_attention,
}
PREFILL: dict[str, Callable[..., Tensor]] = {
    "torch": prefill_attention_torch,
    "triton": prefill_attention_triton,
    "public": prefill_attention,
}
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")


@dataclass
class Batch:
    """Requests with their keys and values in a paged cache, in which everything else is NaN."""

    query: Tensor
    cache: PagedCache
    requests: RaggedBatch
    scoring: Scoring

    @property
    def prefill(self) -> tuple[Tensor, PagedCache, RaggedBatch, Scoring]:
        return self.query, self.cache, self.requests, self.scoring

    def decode(self, query_len: int = 1) -> tuple[Tensor, PagedCache, UniformBatch, Scoring]:
        return self.query, self.cache, self.decodes(query_len=query_len), self.scoring

    def decodes(self, count: int | None = None, query_len: int = 1) -> UniformBatch:
        """The first `count` requests, or all."""
        return UniformBatch(self.requests.rows[:count], self.requests.seq_lens[:count], query_len)

    def prompts(self, first: int) -> RaggedBatch:
        """The requests from `first` on."""
        ours = self.requests
        return RaggedBatch(ours.rows[first:], ours.seq_lens[first:], ours.query_start[first:], ours.max_query_len)

    @property
    def exact(self) -> tuple[Tensor, PagedCache]:
        """Query and cache in float64."""
        keys, values = self.cache.keys.double(), self.cache.values.double()
        return self.query.double(), PagedCache(keys, values, self.cache.block_table)

    @property
    def poisoned_out(self) -> Tensor:
        return self.query.new_full((*self.query.shape[:2], self.cache.values.shape[3]), float("nan"))


def make_batch(
    rng: torch.Generator,
    device: str,
    dtype: torch.dtype,
    lengths: list[int],
    query_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 64,
    value_size: int | None = None,
    page: int = 16,
    before: int = 0,
    behind: int = 0,
    window: int = 0,
    chunked: bool = False,
    soft_cap: float = 0.0,
    sinks: bool = False,
    scale: float | None = None,
    spread: float = 1.0,
) -> Batch:
    """Requests of the given context and query lengths; `before` and `behind`: query tokens that belong to none of them.

    The query is a slice of a fused qkv product; blocks are shuffled over the cache, requests over the rows of the
    table; unused cache slots and unused table entries (block 0) hold NaN. So does what lies before the window of a
    request's first query token: its blocks have been given back, and belong to others, or are the null block.
    """
    value_size = value_size or size
    num_tokens = before + sum(query_lens) + behind
    fused = torch.randn(num_tokens, heads * size + kv_heads * (size + value_size), generator=rng) * spread
    query = fused.to(device, dtype)[:, : heads * size].view(num_tokens, heads, size)

    blocks_each = [-(-length // page) for length in lengths]
    num_blocks = sum(blocks_each) + 3
    block_ids = (torch.randperm(num_blocks - 1, generator=rng) + 1).tolist()
    num_rows = len(lengths) + 2
    rows = torch.randperm(num_rows, generator=rng)[: len(lengths)]
    table = torch.zeros(num_rows, max([*blocks_each, 1]) + 2, dtype=torch.int32)
    key_cache = torch.full((num_blocks, page, kv_heads, size), float("nan"))
    value_cache = torch.full((num_blocks, page, kv_heads, value_size), float("nan"))
    for row, length, query_len, count in zip(rows.tolist(), lengths, query_lens, blocks_each, strict=True):
        blocks = [block_ids.pop() for _ in range(count)]
        first = _first_seen(length - query_len, window, chunked)
        for index, block in enumerate(blocks):
            used = min(length - index * page, page)
            key_cache[block, :used] = torch.randn(used, kv_heads, size, generator=rng) * spread
            value_cache[block, :used] = torch.randn(used, kv_heads, value_size, generator=rng)
            unseen = max(0, first - index * page)
            key_cache[block, :unseen] = value_cache[block, :unseen] = float("nan")
            table[row, index] = block if unseen < page or index % 2 else 0
    query_start = torch.tensor([0, *query_lens]).cumsum(0) + before
    return Batch(
        query,
        PagedCache(key_cache.to(device, dtype), value_cache.to(device, dtype), table.to(device)),
        RaggedBatch(
            rows.to(device, torch.int32),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            query_start.to(device, torch.int32),
            max_query_len=max(query_lens),
        ),
        Scoring(
            scale or size**-0.5,
            window,
            soft_cap,
            (torch.randn(heads, generator=rng) * 2).to(device) if sinks else None,
            chunked,
        ),
    )


def _first_seen(position: int, window: int, chunked: bool) -> int:
    """The first key that a query at this position sees."""
    if not window:
        return 0
    return max(0, position - position % window if chunked else position - window + 1)


def reference_attention(batch: Batch) -> Tensor:
    """Float64, one query token and head at a time. Rows that belong to no request are NaN."""
    scoring, requests = batch.scoring, batch.requests
    page, kv_heads, value_size = batch.cache.values.shape[1:]
    tokens, heads, _ = batch.query.shape
    query, key_cache, value_cache = (t.double().cpu() for t in (batch.query, batch.cache.keys, batch.cache.values))
    table, rows, seq_lens, starts = (
        t.tolist() for t in (batch.cache.block_table, requests.rows, requests.seq_lens, requests.query_start)
    )
    out = torch.full((tokens, heads, value_size), float("nan"), dtype=torch.float64)
    for request, length in enumerate(seq_lens):
        slots = [(table[rows[request]][p // page], p % page) for p in range(length)]
        keys = [key_cache[block, offset] for block, offset in slots]
        values = [value_cache[block, offset] for block, offset in slots]
        start, end = starts[request], starts[request + 1]
        for token in range(start, end):
            position = length - (end - token)
            first = _first_seen(position, scoring.window, scoring.chunked)
            if position < 0:
                out[token] = 0
                continue
            newest = position if requests.last_seen is None else int(requests.last_seen[token])
            key, value = torch.stack(keys[first : newest + 1]), torch.stack(values[first : newest + 1])
            for head in range(heads):
                kv_head = head * kv_heads // heads
                scores = key[:, kv_head] @ query[token, head] * scoring.scale
                if scoring.soft_cap:
                    scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
                weights = torch.exp(scores - scores.max())
                total = weights.sum()
                if scoring.sinks is not None:
                    total += torch.exp(scoring.sinks[head].double().cpu() - scores.max())
                out[token, head] = weights @ value[:, kv_head] / total
    return out


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    actual = actual.double().cpu()
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all(), "NaN or infinity from unused memory or an empty row"
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


# Context lengths straddle pages (16) and tiles (16 to 64 keys).
DECODE_CASES: dict[str, dict[str, Any]] = {
    "one_request": {"lengths": [137]},
    "one_token": {"lengths": [1]},
    "page_edges": {"lengths": [15, 16, 17, 33]},
    "tile_edges": {"lengths": [31, 32, 65, 128]},
    "padding_rows": {"lengths": [0, 40, 0]},
    "only_padding": {"lengths": [0]},
    "mha": {"lengths": [50, 3], "heads": 2},
    "gqa2_size128": {"lengths": [100, 17], "heads": 2, "kv_heads": 1, "size": 128},
    "gqa7_size80": {"lengths": [45, 70], "heads": 14, "size": 80},
    "gqa8_size256": {"lengths": [40], "heads": 8, "kv_heads": 1, "size": 256},
    "gqa16": {"lengths": [75, 20], "heads": 32},
    "value_smaller": {"lengths": [75, 20], "size": 96, "value_size": 64},
    "value_larger": {"lengths": [33], "size": 32, "value_size": 48},
    "page_not_power_of_two": {"lengths": [50, 11], "page": 12},
    "page_64": {"lengths": [130, 64], "page": 64},
    "window": {"lengths": [100, 5, 33], "window": 32},
    "window_1": {"lengths": [50, 1], "window": 1},
    "window_longer_than_context": {"lengths": [50, 20], "window": 999},
    "chunks": {"lengths": [100, 5, 64, 65], "window": 32, "chunked": True},
    "drafts_over_the_end_of_a_chunk": {"lengths": [66, 18], "query_len": 4, "window": 16, "chunked": True},
    "soft_cap": {"lengths": [70, 8], "soft_cap": 3.0, "spread": 2.0},
    "sinks": {"lengths": [70, 0, 8], "sinks": True},
    "scale": {"lengths": [70], "scale": 1.0},
    "drafts_1": {"lengths": [64, 33, 2], "query_len": 2},
    "drafts_2_window": {"lengths": [90, 18], "query_len": 3, "window": 17},
    "drafts_3_gqa7": {"lengths": [35, 0], "query_len": 4, "heads": 14},
    "drafts_4_sinks": {"lengths": [66, 5], "query_len": 5, "sinks": True},
    "drafts_7": {"lengths": [66, 9], "query_len": 8},
    "drafts_15_window": {"lengths": [70], "query_len": 16, "window": 21},
    "drafts_beyond_length": {"lengths": [2, 40, 4], "query_len": 4},
    "rows_beyond_a_tile": {"lengths": [40], "query_len": 5, "heads": 32},
    "everything": {"lengths": [99, 0], "query_len": 2, "window": 40, "soft_cap": 5.0, "sinks": True, "value_size": 32},
}


def decode_batch(rng: torch.Generator, device: str, dtype: torch.dtype, **case: Any) -> tuple[Batch, int]:
    query_len = case.pop("query_len", 1)
    lengths = case.pop("lengths")
    return make_batch(rng, device, dtype, lengths, [query_len] * len(lengths), **case), query_len


def check_decode(batch: Batch, query_len: int, out: Tensor, dtype: torch.dtype) -> Tensor:
    """`out` was poisoned: padding rows still are, since they may be a prompt's. → which rows are none."""
    real = (batch.requests.seq_lens > 0).repeat_interleave(query_len).to(out.device)
    assert_close(out[real], reference_attention(batch)[real.cpu()], dtype)
    assert out[~real].isnan().all(), "wrote a row of padding, which may be somebody else's"
    return real


@pytest.mark.parametrize("implementation", DECODE)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode(case: str, implementation: str, rng: torch.Generator, device: str) -> None:
    device = "cpu" if implementation == "torch" else device
    for dtype in DTYPES if implementation != "public" else DTYPES[:1]:
        batch, query_len = decode_batch(rng, device, dtype, **DECODE_CASES[case])
        out = batch.poisoned_out
        result = DECODE[implementation](*batch.decode(query_len), out=out)
        assert result is out
        real = check_decode(batch, query_len, out, dtype)
        if implementation == "public":
            fresh = decode_attention(*batch.decode(query_len))
            torch.testing.assert_close(fresh[real], out[real], rtol=0, atol=0)


SPLIT_CASES: dict[str, dict[str, Any]] = {
    "short_and_long": {"lengths": [1, 63, 64, 300]},
    "split_edges": {"lengths": [127, 128, 129, 0]},
    "window": {"lengths": [257, 90], "window": 100},
    "chunks": {"lengths": [257, 301, 200], "window": 100, "chunked": True},
    "drafts": {"lengths": [129, 193, 3], "query_len": 3},
    "drafts_window_sinks": {"lengths": [160, 70], "query_len": 2, "window": 66, "sinks": True},
    "value_size_gqa7": {"lengths": [200], "heads": 7, "kv_heads": 1, "size": 80, "value_size": 48},
    "soft_cap": {"lengths": [140], "soft_cap": 4.0},
    "many": {"lengths": [150, 300], "heads": 2, "kv_heads": 1},
}


@pytest.mark.parametrize(
    ("case", "num_splits"),
    [*((case, splits) for case in SPLIT_CASES if case != "many" for splits in (2, 5)), ("many", 16)],
)
@pytest.mark.slow
def test_split_decode(case: str, num_splits: int, rng: torch.Generator, device: str) -> None:
    """Splits of 32 keys and more, merged, from scratch memory that holds NaN."""
    for dtype in DTYPES:
        batch, query_len = decode_batch(rng, device, dtype, **SPLIT_CASES[case])
        num_partials = batch.query.shape[0] * batch.query.shape[1] * num_splits
        workspace = DecodeWorkspace(
            torch.full((num_partials * batch.cache.values.shape[3],), float("nan"), device=device),
            torch.full((num_partials,), float("nan"), device=device),
        )
        out = decode_attention_triton(
            *batch.decode(query_len), workspace=workspace, out=batch.poisoned_out, block_n=32, num_splits=num_splits,
            min_split_tokens=32,
        )  # fmt: skip
        check_decode(batch, query_len, out, dtype)
        if max(batch.requests.seq_lens.tolist()) >= 64 and not batch.scoring.window:
            assert torch.isfinite(workspace.partial_lse).any(), "this case was meant to split"


def test_default_splits_use_the_workspace(rng: torch.Generator, device: str) -> None:
    batch, _ = decode_batch(rng, device, torch.float32, lengths=[290, 7])
    workspace = DecodeWorkspace.create(2, 4, 64, device)
    workspace.partial_lse.fill_(float("nan"))
    out = decode_attention(*batch.decode(), workspace=workspace)
    assert_close(out, reference_attention(batch), torch.float32)
    triton_out = decode_attention_triton(*batch.decode(), workspace=workspace)
    assert_close(triton_out, reference_attention(batch), torch.float32)
    assert torch.isfinite(workspace.partial_lse).any()


def test_small_workspace_is_refused(rng: torch.Generator, device: str) -> None:
    batch, _ = decode_batch(rng, device, torch.float32, lengths=[290, 7])
    with pytest.raises(ValueError, match=r"holds 4 partial results.*need 32"):
        decode_attention_triton(
            *batch.decode(), workspace=DecodeWorkspace(torch.empty(256), torch.empty(4)), num_splits=4
        )


@pytest.mark.parametrize("num_sms", [8, 108, 132])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_split_choice(num_sms: int, kv_heads: int) -> None:
    for requests in range(1, 600):
        for max_context in (16, 1000, 8192, 131072):
            splits, min_tokens = choose_splits(requests, kv_heads, num_sms, max_context)
            assert 1 <= splits <= 64
            assert requests == 1 or splits & (splits - 1) == 0
            assert splits == 1 or splits * min_tokens <= max_context, "a split that no context can fill"
            assert splits == 1 or splits * requests * kv_heads <= 8 * num_sms
    assert choose_splits(1, 8, 132, 131072)[0] == 33, "a lone long context must fill the card"
    assert choose_splits(256, 8, 132, 131072)[0] == 1, "a batch that fills the card needs no merge"


def test_workspace_holds_every_smaller_batch() -> None:
    workspace = DecodeWorkspace.create(300, 32, 128, "cpu", max_query_len=3, num_kv_heads=8)
    for requests in range(1, 301):
        splits, _ = choose_splits(requests, 8, 132, 1 << 20)
        if splits > 1:
            assert requests * 3 * 32 * splits <= workspace.partial_lse.numel()
    assert workspace.partial_out.numel() == workspace.partial_lse.numel() * 128
    assert workspace.partial_out.nbytes < 16 << 20


# (context lengths, query lengths); the rest as for decode. `block_m` forces small row tiles on the Triton kernel.
PREFILL_CASES: dict[str, dict[str, Any]] = {
    "fresh": {"lengths": [37], "query_lens": [37]},
    "one_token": {"lengths": [1], "query_lens": [1]},
    "page_and_tile_edges": {"lengths": [16, 33, 64], "query_lens": [16, 33, 64]},
    "chunks": {"lengths": [100, 48, 70], "query_lens": [20, 16, 1]},
    "padding_rows": {"lengths": [0, 20, 0], "query_lens": [0, 20, 0]},
    "mixed_batch": {"lengths": [30, 64], "query_lens": [30, 8], "before": 3, "behind": 5},
    "small_row_tiles": {"lengths": [70, 90], "query_lens": [33, 18], "block_m": 16},
    "small_tiles_chunk": {"lengths": [128], "query_lens": [32], "block_m": 16, "block_n": 32},
    "mha": {"lengths": [40], "query_lens": [24], "heads": 2},
    "gqa4_size128": {"lengths": [50], "query_lens": [20], "heads": 4, "kv_heads": 1, "size": 128},
    "gqa7_size80": {"lengths": [45, 30], "query_lens": [20, 30], "heads": 7, "kv_heads": 1, "size": 80},
    "gqa8_size256": {"lengths": [40], "query_lens": [9], "heads": 8, "kv_heads": 1, "size": 256},
    "gqa16": {"lengths": [35], "query_lens": [11], "heads": 16, "kv_heads": 1},
    "value_smaller": {"lengths": [50], "query_lens": [30], "size": 96, "value_size": 64},
    "page_not_power_of_two": {"lengths": [50, 11], "query_lens": [26, 11], "page": 12},
    "window": {"lengths": [100, 20], "query_lens": [40, 20], "window": 24, "block_m": 32, "block_n": 16},
    "window_1": {"lengths": [40], "query_lens": [20], "window": 1},
    "chunks_of_24": {
        "lengths": [100, 20], "query_lens": [60, 20], "window": 24, "chunked": True, "block_m": 32, "block_n": 16,
    },
    "window_of_full_tiles": {"lengths": [150], "query_lens": [20], "window": 100, "block_m": 16, "block_n": 16},
    "window_longer_than_context": {"lengths": [50], "query_lens": [30], "window": 999},
    # 18 tokens a block: its second tile starts exactly at the last row's window limit.
    "window_limit_at_tile_start": {
        "lengths": [120], "query_lens": [36], "window": 60, "heads": 7, "kv_heads": 1, "size": 32, "block_m": 128,
        "block_n": 16,
    },
    "soft_cap": {"lengths": [50], "query_lens": [30], "soft_cap": 3.0, "spread": 2.0},
    "sinks": {"lengths": [50, 12], "query_lens": [30, 12], "sinks": True},
    "everything": {
        "lengths": [80, 9], "query_lens": [25, 9], "before": 2, "behind": 2, "window": 40, "soft_cap": 5.0,
        "sinks": True, "value_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("implementation", PREFILL)
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_prefill(case: str, implementation: str, rng: torch.Generator, device: str) -> None:
    device = "cpu" if implementation == "torch" else device
    options = dict(PREFILL_CASES[case])
    tile = {name: options.pop(name) for name in ("block_m", "block_n") if name in options}
    for dtype in DTYPES if implementation != "public" else DTYPES[:1]:
        batch = make_batch(rng, device, dtype, options["lengths"], options["query_lens"],
                           **{k: v for k, v in options.items() if k not in ("lengths", "query_lens")})  # fmt: skip
        out = batch.poisoned_out
        result = PREFILL[implementation](*batch.prefill, out=out, **(tile if implementation == "triton" else {}))
        assert result is out
        owned = slice(int(batch.requests.query_start[0]), int(batch.requests.query_start[-1]))
        assert_close(out[owned], reference_attention(batch)[owned], dtype)
        out[owned] = float("nan")
        assert torch.isnan(out).all(), "wrote rows that belong to no request"


# Prompts with pictures, by (request, first token, tokens), each of which sees all of its picture.
PICTURE_CASES: dict[str, tuple[list[tuple[int, int, int]], dict[str, Any]]] = {
    "one": ([(0, 5, 20)], {"lengths": [37], "query_lens": [37]}),
    "over_tiles": ([(0, 3, 30), (1, 0, 18)], {"lengths": [90, 90], "query_lens": [40, 18], "block_m": 16}),
    "window": ([(0, 2, 35)], {"lengths": [100], "query_lens": [60], "window": 16, "block_m": 16, "block_n": 16}),
    "mixed_batch": (
        [(1, 8, 20), (1, 28, 12), (2, 0, 1)],
        {"lengths": [30, 64, 9], "query_lens": [30, 40, 1], "before": 3, "behind": 5, "size": 32, "kv_heads": 1},
    ),
    "large_heads": ([(0, 1, 8)], {"lengths": [40], "query_lens": [9], "heads": 8, "kv_heads": 1, "size": 256}),
}


@pytest.mark.parametrize("implementation", PREFILL)
@pytest.mark.parametrize("case", PICTURE_CASES)
def test_prefill_of_pictures(case: str, implementation: str, rng: torch.Generator, device: str) -> None:
    device = "cpu" if implementation == "torch" else device
    pictures, options = PICTURE_CASES[case][0], dict(PICTURE_CASES[case][1])
    tile = {name: options.pop(name) for name in ("block_m", "block_n") if name in options}
    batch = make_batch(rng, device, torch.float32, **options)
    starts, lengths = batch.requests.query_start.tolist(), batch.requests.seq_lens.tolist()
    seen = torch.full((len(batch.query),), -1, dtype=torch.int32)  # of tokens of no request: nothing is read for them
    for start, end, length in zip(starts[:-1], starts[1:], lengths, strict=True):
        seen[start:end] = torch.arange(length - (end - start), length)
    for request, first, count in pictures:
        picture = seen[starts[request] + first : starts[request] + first + count]
        picture.fill_(int(picture[-1]))
    batch.requests = replace(batch.requests, last_seen=seen.to(device))
    out = batch.poisoned_out
    PREFILL[implementation](*batch.prefill, out=out, **(tile if implementation == "triton" else {}))
    expected = reference_attention(batch)
    owned = slice(starts[0], starts[-1])
    assert_close(out[owned], expected[owned], torch.float32)
    out[owned] = float("nan")
    assert torch.isnan(out).all(), "wrote rows that belong to no request"
    causal = reference_attention(replace(batch, requests=replace(batch.requests, last_seen=None)))
    assert not torch.allclose(causal[owned], expected[owned]), "no picture is seen ahead"


def test_prefill_of_the_tail_of_a_mixed_batch(rng: torch.Generator, device: str) -> None:
    """The caller's way: one batch, decodes first, each kernel given its slice of the same tensors."""
    batch = make_batch(rng, device, torch.float32, [40, 77, 50, 30], [1, 1, 9, 30], behind=2)
    expected = reference_attention(batch)
    for decode, prefill in (("public", "public"), ("triton", "triton")):
        out = batch.poisoned_out
        query, cache, scoring = batch.query, batch.cache, batch.scoring
        DECODE[decode](query[:2], cache, batch.decodes(2), scoring, out=out[:2])
        PREFILL[prefill](query, cache, replace(batch.prompts(2), max_query_len=100), scoring, out=out)
        assert_close(out[:41], expected[:41], torch.float32)
        assert torch.isnan(out[41:]).all()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_strided_caches(implementation: str, rng: torch.Generator, device: str) -> None:
    """Keys and values interleaved in one buffer, heads before slots: only the last dimension is contiguous."""
    device = "cpu" if implementation == "torch" else device
    batch = make_batch(rng, device, torch.float32, [70, 20, 9], [20, 5, 1])
    cache = batch.cache
    blocks, page, kv_heads, size = cache.keys.shape
    buffer = torch.full((blocks, 2, kv_heads, page, size), float("nan"), device=device)
    buffer[:, 0] = cache.keys.transpose(1, 2)
    buffer[:, 1] = cache.values.transpose(1, 2)
    batch.cache = PagedCache(buffer[:, 0].transpose(1, 2), buffer[:, 1].transpose(1, 2), cache.block_table)
    check_prefill_and_last_tokens(batch, implementation)


LATENT_CASES: dict[str, dict[str, Any]] = {
    "two_tiles": {"size": 96, "value_size": 64},
    "tail_not_power_of_two": {"size": 44, "value_size": 32},
    "value_not_power_of_two": {"size": 96, "value_size": 48},
    "value_is_all": {"size": 64, "value_size": 64},
    "window": {"size": 48, "value_size": 32, "window": 24},
    "sinks_and_cap": {"size": 48, "value_size": 32, "soft_cap": 5.0, "sinks": True},
    "heads_beyond_a_tile": {"size": 48, "value_size": 32, "heads": 128},
    "deepseek_lite": {"size": 576, "value_size": 512, "heads": 16, "lengths": [40, 17, 9]},
    "deepseek": {"size": 576, "value_size": 512, "heads": 128, "lengths": [6, 5, 2]},
}


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("case", LATENT_CASES)
@pytest.mark.slow
def test_values_within_keys(
    case: str, implementation: str, rng: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor for both, of one head: of each key, the first elements are the value (latent attention)."""
    monkeypatch.setattr(attention, "_ONE_HEAD_ROWS", 20)  # the twin does a few tokens at a time
    device = "cpu" if implementation == "torch" else device
    options = {"lengths": [70, 20, 9], "heads": 6, **LATENT_CASES[case]}
    value_size = options.pop("value_size")
    lengths = [*options.pop("lengths"), 0]
    for dtype in DTYPES:
        batch = make_batch(rng, device, dtype, lengths, [lengths[0] // 4, 5, 1, 0], kv_heads=1, behind=2, **options)
        keys, table = batch.cache.keys, batch.cache.block_table
        batch.cache = PagedCache(keys, keys[..., :value_size], table)
        expected = reference_attention(batch)[:-2]
        out = PREFILL[implementation](*batch.prefill, out=batch.poisoned_out)
        assert_close(out[:-2], expected, dtype)
        assert out[-2:].isnan().all(), "wrote rows that belong to no request"
        last = batch.requests.query_start[1:].long() - 1
        last_query, (_, *others) = batch.query[last], batch.decode()
        out = last_query.new_full((*last_query.shape[:2], value_size), float("nan"))
        DECODE[implementation](last_query, *others, out=out)
        assert_close(out[:-1], expected[last.cpu()][:-1], dtype)
        assert out[-1].isnan().all(), "wrote a row of padding"


@pytest.mark.parametrize(
    ("requests", "heads", "splits"), [(1, 16, 64), (1, 128, 64), (16, 128, 8), (64, 128, 2), (64, 16, 4)]
)
def test_latent_attention_is_split_for_the_programs_that_fit(
    requests: int, heads: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of DeepSeek's rows, one or two programs on each of 132 SMs."""
    launched: list[tuple[int, int, int]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            launched.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(attention_decode, "_decode_kernel", Recorded())
    monkeypatch.setattr(attention_decode, "_merge_kernel", Recorded())
    keys = torch.empty(2, 16, 1, 576, dtype=torch.bfloat16)
    cache = PagedCache(keys, keys[..., :512], torch.zeros(requests, 512, dtype=torch.int32))
    ints = torch.ones(requests, dtype=torch.int32)
    query = torch.empty(requests, heads, 576, dtype=torch.bfloat16)
    decode_attention_triton(query, cache, UniformBatch(ints, ints), Scoring(0.1))
    assert launched[0] == (-(-heads // 64), requests, splits)


@pytest.mark.parametrize("num_splits", [2, 5])
def test_split_decode_of_values_within_keys(num_splits: int, rng: torch.Generator, device: str) -> None:
    batch, _ = decode_batch(rng, device, torch.float32, lengths=[150, 0, 40], heads=70, kv_heads=1, size=48)
    keys, table = batch.cache.keys, batch.cache.block_table
    batch.cache = PagedCache(keys, keys[..., :32], table)
    out = decode_attention_triton(
        *batch.decode(), out=batch.poisoned_out, block_n=16, num_splits=num_splits, min_split_tokens=16
    )
    check_decode(batch, 1, out, torch.float32)


def check_prefill_and_last_tokens(batch: Batch, implementation: str) -> None:
    """The batch as prompts, and the last token of each as a decode."""
    last = batch.requests.query_start[1:].long() - 1
    expected = reference_attention(batch)
    out = PREFILL[implementation](*batch.prefill)
    assert_close(out, expected, torch.float32)
    out = DECODE[implementation](batch.query[last], *batch.decode()[1:])
    assert_close(out, expected[last.cpu()], torch.float32)


def test_empty_batch(device: str) -> None:
    query = torch.empty(0, 4, 64, device=device)
    keys = torch.empty(2, 16, 2, 64, device=device)
    cache = PagedCache(keys, keys, torch.zeros(1, 2, dtype=torch.int32, device=device))
    none = torch.empty(0, dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    for decode in DECODE.values():
        assert decode(query, cache, UniformBatch(none, none), Scoring(1.0)).shape == (0, 4, 64)
    for prefill in PREFILL.values():
        assert prefill(query, cache, RaggedBatch(none, none, start, 0), Scoring(1.0)).shape == (0, 4, 64)


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("requests", "longest"), [(1, 8000), (64, 1100), (256, 300)])
def test_large_decode(requests: int, longest: int, dtype: torch.dtype, rng: torch.Generator, device: str) -> None:
    lengths = torch.randint(longest // 2, longest, (requests,), generator=rng).tolist()
    for query_len, window in ((1, 0), (3, 0), (1, 512)):
        batch = make_batch(rng, device, dtype, lengths, [query_len] * requests, heads=32, kv_heads=8, size=128,
                           window=window)  # fmt: skip
        out = decode_attention(*batch.decode(query_len), out=batch.poisoned_out)
        expected = decode_attention_torch(*batch.exact, *batch.decode(query_len)[2:])
        assert_close(out, expected.cpu(), dtype)


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_large_prefill(size: int, dtype: torch.dtype, rng: torch.Generator, device: str) -> None:
    for lengths, query_lens, window in (([2048, 2048], [2048, 2048], 0), ([3000, 500], [1000, 500], 0),
                                        ([2500], [2000], 700)):  # fmt: skip
        batch = make_batch(rng, device, dtype, lengths, query_lens, heads=32, kv_heads=8, size=size, window=window)
        out = prefill_attention(*batch.prefill)
        expected = prefill_attention_torch(*batch.exact, *batch.prefill[2:])
        assert_close(out, expected.cpu(), dtype)


@pytest.mark.gpu
@requires_cuda
def test_decode_in_a_cuda_graph(rng: torch.Generator, device: str) -> None:
    """A graph captured at length 1 must be right for any length within the block table."""
    batch, _ = decode_batch(rng, device, torch.bfloat16, lengths=[900, 0, 33, 1500], heads=32, kv_heads=8, size=128)
    lengths = batch.requests.seq_lens.clone()
    out = batch.poisoned_out
    workspace = DecodeWorkspace.create(4, 32, 128, device)
    decode_attention(*batch.decode(), workspace=workspace, out=out)
    batch.requests.seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*batch.decode(), workspace=workspace, out=out)
    batch.requests.seq_lens.copy_(lengths)
    out.fill_(float("nan"))
    graph.replay()
    check_decode(batch, 1, out, torch.bfloat16)


_COMPILE_LATENT = """
from vserve.kernels.launch import pdl
from vserve.kernels.attention.attention_decode import decode_attention_triton
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.attention.attention_prefill import prefill_attention_triton

JITFunction.__getitem__ = warm_up_instead
pdl.pdl_available = lambda device: True
dtype, heads = getattr(torch, sys.argv[2]), int(sys.argv[1])
query, keys = torch.empty(160, heads, 576, dtype=dtype), torch.empty(2, 16, 1, 576, dtype=dtype)
cache = PagedCache(keys, keys[..., :512], torch.zeros(4, 64, dtype=torch.int32))
ints = torch.zeros(5, dtype=torch.int32)
decode_attention_triton(query[:4], cache, UniformBatch(ints[:4], ints[:4]), Scoring(0.1), num_splits=4)
prefill_attention_triton(query, cache, RaggedBatch(ints[:4], ints[:4], ints, 999), Scoring(0.1))
print(json.dumps({
    name: {
        **resources(kernel),
        "shared": kernel.metadata.shared,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", kernel.asm["ptx"])), default=0),
    }
    for name, kernel in kernels.values()
}))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (128, "bfloat16"),
        pytest.param(16, "bfloat16", marks=pytest.mark.slow),
        pytest.param(128, "float32", marks=pytest.mark.slow),
    ],
)
def test_latent_attention_compiles_for_hopper(heads: int, dtype: str, run_for_hopper: Callable[..., Any]) -> None:
    """DeepSeek's rows of 512 + 64 elements: fit shared memory, hardly spill, and keep loads in flight."""
    found = run_for_hopper(_COMPILE_LATENT, str(heads), dtype)
    for name in ("_decode_kernel", "_prefill_kernel"):
        assert found[name]["shared"] <= 227 * 1024
        if dtype == "bfloat16":
            assert found[name]["stack"] <= 128
            assert found[name]["lookahead"] >= 2, f"{name} waits for every load it has just issued"


_COMPILE = """
from vserve.kernels.launch import pdl
from vserve.kernels.attention.attention_decode import decode_attention_triton
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.rope_kv import rope_write_kv_triton

pdl.pdl_available = lambda device: sys.argv[3] == "pdl"
angles = torch.empty(64, int(sys.argv[1]))

def run(size, dtype, requests, first, blocks, splits, rows):
    query = torch.empty(requests * 40, 32, size, dtype=dtype)
    keys = torch.empty(2, 16, 8, size, dtype=dtype)
    cache = PagedCache(keys, keys, torch.zeros(4, blocks, dtype=torch.int32))
    ints = torch.zeros(requests + 9, dtype=torch.int32)[first:]
    decodes = UniformBatch(ints[:requests], ints[:requests])
    decode_attention_triton(query[:requests], cache, decodes, Scoring(0.1), num_splits=splits)
    prompts = RaggedBatch(ints[:requests], ints[:requests], ints[:requests + 1], rows)
    prefill_attention_triton(query, cache, prompts, Scoring(0.1))
    rope_write_kv_triton(query[:requests], query[:requests, :8], query[:requests, 8:16], ints[:requests], angles,
                         keys, keys, ints[:requests], query[0, 0], query[0, 0], 1e-6)

def before_waiting(ptx):
    # Loads, and all that must not stand there, ahead of griddepcontrol.wait.
    head, _, _ = ptx[ptx.index(".entry"):].partition("griddepcontrol.wait")
    wrong = r"st\\.global|cp\\.async|\\b(ret;|exit;|bra\\b)"
    return len(re.findall(r"ld\\.global", head)), len(re.findall(wrong, head))

size, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
run(size, dtype, 1, 0, 64, 4, 999)
run(size, dtype, 2, 1, 65, 4, 1000)
run(size, dtype, 16, 3, 1, 4, 1001)
names = [name for name, _ in kernels.values()]
print(json.dumps([
    {
        "kernel": name,
        "variants": names.count(name),
        "shared": kernel.metadata.shared,
        "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
        "async_copies": "cp.async.cg" in kernel.asm["ptx"],
        "dependents": kernel.asm["ptx"].count("griddepcontrol.launch_dependents"),
        "before_waiting": before_waiting(kernel.asm["ptx"]),
        "launch_pdl": kernel.metadata.launch_pdl,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", kernel.asm["ptx"])), default=0),
    }
    for name, kernel in kernels.values()
]))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("size", "dtype", "pdl"),
    [
        (128, "bfloat16", True),
        (256, "bfloat16", True),
        pytest.param(128, "bfloat16", False, marks=pytest.mark.slow),
        pytest.param(64, "float16", True, marks=pytest.mark.slow),
        pytest.param(80, "float32", True, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(size: int, dtype: str, pdl: bool, run_for_hopper: Callable[..., Any]) -> None:
    """Compiles, fits shared memory, keeps loads in flight, waits for the kernel before it touches memory, and is not
    compiled again for other batch sizes."""
    report = run_for_hopper(_COMPILE, str(size), dtype, "pdl" if pdl else "plain")
    kernels = {kernel["kernel"]: kernel for kernel in report}
    dependent = {"_decode_kernel", "_merge_kernel", "_rope_write_kv_kernel"}
    assert set(kernels) == dependent | {"_prefill_kernel"}
    for name, kernel in kernels.items():
        tiles = {decode_tile(getattr(torch, dtype), size, requests) for requests in (1, 2, 16)}
        variants = len(tiles) if name == "_decode_kernel" else 1
        assert kernel["variants"] == variants, f"{name} was compiled again for another batch size"
        assert kernel["shared"] <= 227 * 1024
        if pdl and name in dependent:
            assert kernel["launch_pdl"] and kernel["dependents"] == 1
            loads, others = kernel["before_waiting"]
            assert others == 0, f"{name} writes or branches before it has waited"
            if name == "_decode_kernel":
                assert 2 < loads < 12  # of the request's row, its length and its first block numbers
            elif name == "_merge_kernel":
                assert loads == 1  # of the request's length
            else:
                assert 4 <= loads < 12  # of the token's position and slot, and of its angles
        else:
            assert not kernel["launch_pdl"] and kernel["dependents"] == 0
    if (size, dtype) == (128, "bfloat16"):
        # On an SM: as many programs as choose_splits makes for each of a lone request, and of most other batches.
        shared = {kernel["shared"] for kernel in report if kernel["kernel"] == "_decode_kernel"}
        assert {2, 4} <= {(228 << 10) // (size + 1024) for size in shared}
    if dtype != "float32":
        assert kernels["_prefill_kernel"]["wgmma"]
        for name in ("_decode_kernel", "_prefill_kernel"):
            assert kernels[name]["async_copies"]
            assert kernels[name]["lookahead"] >= 2, f"{name} waits for every load it has just issued"
