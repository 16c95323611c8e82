"""A cache of 8-bit codes: written and read by the torch twins and by the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.attention import kv_unpack
from vserve.kernels.attention.attention import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_torch,
    prefill_attention,
    prefill_attention_torch,
)
from vserve.kernels.attention.attention_decode import decode_attention_triton
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.kv_fp8 import LARGEST, decode, encode, fixed_scales, token_scales
from vserve.kernels.attention.kv_unpack import PromptPages
from vserve.kernels.attention.rope import apply_rope_torch, qk_norm_rope_torch
from vserve.kernels.attention.rope_kv import rope_write_kv, rope_write_kv_torch, rope_write_kv_triton

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA else [])  # the interpreter's bf16 dot is wrong
CODES = list(LARGEST)
KINDS = ["fixed", "token"]
DECODE = {"torch": decode_attention_torch, "triton": decode_attention_triton}
PREFILL = {"torch": prefill_attention_torch, "triton": prefill_attention_triton}
WRITE = {"torch": rope_write_kv_torch, "triton": rope_write_kv_triton}


@pytest.fixture(scope="module")
def paged(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("test_attention.py"))


def coded(cache: PagedCache, code: torch.dtype, kind: str) -> PagedCache:
    """The same with codes; what was NaN is a code of NaN, or the largest, with a scale of NaN."""
    found = []
    for index, numbers in enumerate((cache.keys, cache.values)):
        blocks, page = numbers.shape[:2]
        unused = numbers.isnan().any(-1)
        scales = token_scales(numbers.nan_to_num(0), code)
        if kind == "fixed":
            by_head = scales.amax((0, 1)) * (0.5 + index)  # some saturate
            scales = fixed_scales(by_head.contiguous(), blocks, page)
            codes = encode(numbers, scales, code)
        else:
            codes = encode(numbers.nan_to_num(LARGEST[code]), scales, code)
            scales[unused] = float("nan")
        found.append((codes, scales))
    (keys, key_scales), (values, value_scales) = found
    return PagedCache(keys, values, cache.block_table, key_scales, value_scales)


def plain(cache: PagedCache) -> PagedCache:
    """What the codes stand for, in float64."""
    keys, values = (
        decode(codes, scales, torch.float64)
        for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    )
    return PagedCache(keys, values, cache.block_table)


def with_codes(batch: Any, code: torch.dtype, kind: str) -> tuple[Any, Any]:
    """→ the batch with codes, and one of float64 that it stands for."""
    batch.cache = coded(batch.cache, code, kind)
    return batch, replace(batch, cache=plain(batch.cache))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_codes_are_the_nearest(code: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(code).float()
    numbers = codes[codes.isfinite()].unique()
    middles = (numbers[:-1] + numbers[1:]) / 2
    given = torch.cat([numbers, middles, middles * 1.001, torch.tensor([1e9, -1e9])])
    found = encode(given[:, None] * 3.0, torch.full((len(given),), 3.0), code).float()[:, 0]
    distance = (given[:, None].clamp(-LARGEST[code], LARGEST[code]) - numbers).abs()
    nearest = distance.min(1).values
    assert torch.equal((found - given.clamp(-LARGEST[code], LARGEST[code])).abs(), nearest)
    assert encode(torch.tensor([[float("nan")]]), torch.ones(1), code).float().isnan().all()
    heads = torch.tensor([[0.1, -3.0], [0.0, 0.0]])
    scales = token_scales(heads, code)
    back = decode(encode(heads, scales, code), scales, torch.float32)
    assert back[0, 1] == pytest.approx(-3.0) and back[1].tolist() == [0.0, 0.0]


WRITE_CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "one_token": {"slots": [7]},
    "only_padding": {"slots": [-1, -1]},
    "several_groups": {"heads": 20, "kv_heads": 10, "size": 8},
    "size_not_power_of_two": {"heads": 9, "kv_heads": 3, "size": 24},
    "partial": {"heads": 5, "kv_heads": 2, "size": 20, "rot_dim": 8},
    "value_smaller": {"value_size": 10},
    "large": {"spread": 900.0},
}
PAGE, BLOCKS = 4, 5


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", WRITE)
@pytest.mark.parametrize("case", WRITE_CASES)
def test_writes_codes(case: str, path: str, kind: str, norm: bool, device: str, rng: torch.Generator) -> None:
    """Every code is `encode` of what a cache of numbers would hold, and nothing else is written."""
    options = {"heads": 4, "kv_heads": 2, "size": 16, "slots": [5, 0, -1, 19, 6], "spread": 1.0, **WRITE_CASES[case]}
    heads, kv_heads, size = options["heads"], options["kv_heads"], options["size"]
    sizes, rot_dim = (size, options.get("value_size", size)), options.get("rot_dim", size)
    slots = torch.tensor(options["slots"], dtype=torch.int32)
    positions = torch.randint(0, 64, slots.shape, generator=rng, dtype=torch.int32)
    angles = torch.rand(64, rot_dim // 2, generator=rng) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    for dtype, code in zip(DTYPES, [*CODES, CODES[0]], strict=False):
        widths = [heads * size, kv_heads * size, kv_heads * sizes[1]]
        qkv = (torch.randn(len(slots), sum(widths), generator=rng) * options["spread"]).to(dtype)
        query, key, value = (
            part.unflatten(1, (count, -1))
            for part, count in zip(qkv.clone().split(widths, 1), (heads, kv_heads, kv_heads), strict=True)
        )
        weights = [torch.rand(size, generator=rng).to(dtype) + 0.5 for _ in range(2)] if norm else []
        given = [x.clone().to(device) for x in (query, key, value)]
        if norm:
            qk_norm_rope_torch(query, key, positions, cos_sin, *weights, 1e-5)
        else:
            apply_rope_torch(query, key, positions, cos_sin)
        caches = [torch.full((BLOCKS, PAGE, kv_heads, width), 7.0).to(code).to(device) for width in sizes]
        if kind == "fixed":
            scales = [torch.rand(kv_heads, generator=rng) + 0.1 for _ in caches]
            scales = [fixed_scales(one.to(device), BLOCKS, PAGE) for one in scales]
        else:
            scales = [torch.full((BLOCKS, PAGE, kv_heads), 3.0, device=device) for _ in caches]
        before = [one.clone() for one in scales]
        arguments = [*given, positions.to(device), cos_sin.to(device), *caches, slots.to(device)]
        arguments += [*(weight.to(device) for weight in weights), 1e-5] if norm else [None, None, 0.0]
        WRITE[path](*arguments, *scales)

        tolerance = {"rtol": 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps, "atol": 1e-5}
        torch.testing.assert_close(given[0].cpu(), query, **tolerance)
        used = slots >= 0
        block, offset = slots[used].long() // PAGE, slots[used].long() % PAGE
        for cache, one, old, numbers in zip(caches, scales, before, (key, value), strict=True):
            mine, numbers = one.cpu()[block, offset], numbers[used]
            if kind == "token":
                torch.testing.assert_close(mine, token_scales(numbers, code), rtol=1e-6 + tolerance["rtol"], atol=0)
            expected, found = encode(numbers, mine, code).float(), cache.cpu()[block, offset].float()
            if numbers is value or path == "torch":
                assert torch.equal(found, expected)
            else:  # where sums differ in their last bit, a code may be its neighbour
                near = torch.isclose(found, expected, rtol=0.26, atol=2**-8)
                assert near.all() and (found != expected).sum() <= max(2, found.numel() // 50)
            untouched = torch.ones(BLOCKS * PAGE, dtype=torch.bool)
            untouched[slots[used].long()] = False
            assert (cache.cpu().float().reshape(BLOCKS * PAGE, -1)[untouched] == 7.0).all(), "wrote elsewhere"
            if kind == "token":
                assert (one.cpu().reshape(BLOCKS * PAGE, -1)[untouched] == 3.0).all(), "wrote scales elsewhere"
            else:
                assert torch.equal(one, old)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("path", WRITE)
def test_what_is_no_number_is_written_as_none(path: str, code: torch.dtype, kind: str, device: str) -> None:
    """Also that NaN which GPUs compute, all of whose bits but the sign are set: rounding must not carry into this."""
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    query, key, value = (torch.ones(3, 2, 16, device=device) for _ in range(3))
    key[:, 0, 3], value[:, 1, 5] = nan.to(device), nan.to(device)
    cos_sin = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), dim=-1).to(device)
    caches = [torch.zeros(1, PAGE, 2, 16).to(code).to(device) for _ in range(2)]
    if kind == "fixed":
        scales = [fixed_scales(torch.ones(2, device=device), 1, PAGE) for _ in caches]
    else:
        scales = [torch.ones(1, PAGE, 2, device=device) for _ in caches]
    slots = torch.arange(3, dtype=torch.int32, device=device)
    WRITE[path](query, key, value, slots, cos_sin, *caches, slots, None, None, 0.0, *scales)
    for cache, one, head, column in zip(caches, scales, (0, 1), (3, 5), strict=True):
        assert cache[0, :3, head, column].float().isnan().all()
        assert one[0, :3, head].isnan().all() == (kind == "token"), "a reader may decode the code as a number"
        if cache is caches[1] and kind == "fixed":
            assert cache[0, :3, 0].float().isnan().all(), "the key's code alone may be decoded as a number"
        else:
            other = cache[0, :3, 1 - head].float() * one[0, :3, 1 - head, None]
            assert torch.equal(other, torch.ones(3, 16).to(device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["key", "value", "infinite key"])
@pytest.mark.parametrize("path", WRITE)
def test_attention_finds_what_is_no_number(path: str, what: str, kind: str, device: str) -> None:
    """Of decodes and of prompts, in that head alone."""
    query = torch.randn(12, 4, 32, device=device)
    key, value = (torch.randn(12, 2, 32, device=device) for _ in range(2))
    broken = value if what == "value" else key
    broken[5, 1, 3] = float("inf") if what == "infinite key" else float("nan")
    cos_sin = torch.cat((torch.ones(12, 16), torch.zeros(12, 16)), dim=-1).to(device)
    caches = [torch.zeros(3, PAGE, 2, 32).to(CODES[0]).to(device) for _ in range(2)]
    scales = [torch.ones(3, PAGE, 2, device=device) for _ in caches]
    if kind == "fixed":
        scales = [fixed_scales(torch.ones(2, device=device), 3, PAGE) for _ in caches]
    slots = torch.arange(12, dtype=torch.int32, device=device)
    WRITE[path](query, key, value, slots, cos_sin, *caches, slots, None, None, 0.0, *scales)
    table, rows, lengths = torch.arange(3)[None].int(), torch.zeros(1).int(), torch.tensor([12]).int()
    cache = PagedCache(*caches, table.to(device), *scales)
    starts = torch.tensor([0, 12], dtype=torch.int32)
    batch = RaggedBatch(rows.to(device), lengths.to(device), starts.to(device), 12)
    last = UniformBatch(rows.to(device), lengths.to(device), 1)
    decoded = decode_attention(query[-1:], cache, last, Scoring(0.25), out=query[-1:].clone())
    prompt = prefill_attention(query, cache, batch, Scoring(0.25), out=query.clone())
    for out in (decoded[-1], prompt[-1]):
        assert out[:2].isfinite().all() and not out[2:].isfinite().all(-1).any()


DECODE_CASES: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": [15, 16, 17, 33, 137]},
    "padding_rows": {"lengths": [0, 40, 0]},
    "gqa4_size128": {"lengths": [100, 17], "heads": 8, "kv_heads": 2, "size": 128},
    "gqa7_size80": {"lengths": [45, 70], "heads": 14, "size": 80},
    "value_smaller": {"lengths": [75, 20], "size": 96, "value_size": 64},
    "window": {"lengths": [100, 5, 33], "window": 32},
    "soft_cap": {"lengths": [70, 8], "soft_cap": 3.0, "spread": 2.0},
    "sinks": {"lengths": [70, 0, 8], "sinks": True},
    "drafts_window": {"lengths": [90, 18], "query_len": 3, "window": 17},
    "everything": {"lengths": [99, 0], "query_len": 2, "window": 40, "soft_cap": 5.0, "sinks": True, "value_size": 32},
}


@pytest.mark.parametrize("implementation", DECODE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode(case: str, kind: str, implementation: str, paged: Any, rng: torch.Generator, device: str) -> None:
    device = "cpu" if implementation == "torch" else device
    for dtype, code in zip(DTYPES, [*CODES, CODES[0]], strict=False):
        batch, query_len = paged.decode_batch(rng, device, dtype, **DECODE_CASES[case])
        batch, exact = with_codes(batch, code, kind)
        out = batch.poisoned_out
        assert DECODE[implementation](*batch.decode(query_len), out=out) is out
        paged.check_decode(exact, query_len, out, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_split_decode(kind: str, paged: Any, rng: torch.Generator, device: str) -> None:
    for case in ({"lengths": [1, 63, 64, 300]}, {"lengths": [160, 70], "query_len": 2, "window": 66, "sinks": True}):
        batch, query_len = paged.decode_batch(rng, device, torch.float16, **case)
        batch, exact = with_codes(batch, CODES[0], kind)
        num_partials = batch.query.shape[0] * batch.query.shape[1] * 5
        nan = float("nan")
        workspace = DecodeWorkspace(
            torch.full((num_partials * 64,), nan, device=device), torch.full((num_partials,), nan, device=device)
        )
        out = decode_attention_triton(
            *batch.decode(query_len), workspace=workspace, out=batch.poisoned_out, block_n=32, num_splits=5,
            min_split_tokens=32,
        )  # fmt: skip
        paged.check_decode(exact, query_len, out, torch.float16)
        assert torch.isfinite(workspace.partial_lse).any(), "this case was meant to split"


PREFILL_CASES: dict[str, dict[str, Any]] = {
    "chunks": {"lengths": [100, 48, 70], "query_lens": [20, 16, 1]},
    "padding_rows": {"lengths": [0, 20, 0], "query_lens": [0, 20, 0]},
    "mixed_batch": {"lengths": [30, 64], "query_lens": [30, 8], "before": 3, "behind": 5},
    "gqa4_size128": {"lengths": [50], "query_lens": [20], "heads": 4, "kv_heads": 1, "size": 128},
    "value_smaller": {"lengths": [50], "query_lens": [30], "size": 96, "value_size": 64},
    "window": {"lengths": [100, 20], "query_lens": [40, 20], "window": 24},
    "soft_cap": {"lengths": [50], "query_lens": [30], "soft_cap": 3.0, "spread": 2.0},
    "sinks": {"lengths": [50, 12], "query_lens": [30, 12], "sinks": True},
}


@pytest.mark.parametrize("implementation", PREFILL)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", PREFILL_CASES)
def test_prefill(case: str, kind: str, implementation: str, paged: Any, rng: torch.Generator, device: str) -> None:
    device = "cpu" if implementation == "torch" else device
    for dtype, code in zip(DTYPES, [*CODES, CODES[0]], strict=False):
        options = dict(PREFILL_CASES[case])
        batch = paged.make_batch(rng, device, dtype, options.pop("lengths"), options.pop("query_lens"), **options)
        batch, exact = with_codes(batch, code, kind)
        out = batch.poisoned_out
        assert PREFILL[implementation](*batch.prefill, out=out) is out
        owned = slice(int(batch.requests.query_start[0]), int(batch.requests.query_start[-1]))
        paged.assert_close(out[owned], paged.reference_attention(exact)[owned], dtype)
        out[owned] = float("nan")
        assert torch.isnan(out).all(), "wrote rows that belong to no request"


@pytest.mark.parametrize("kind", KINDS)
def test_the_public_functions_take_codes(kind: str, paged: Any, rng: torch.Generator, device: str) -> None:
    """A token is written, then read by both."""
    batch = paged.make_batch(rng, device, torch.float32, [40, 17], [1, 1])
    batch, _ = with_codes(batch, CODES[0], kind)
    cache, table, rows = batch.cache, batch.cache.block_table, batch.requests.rows.long()
    last = batch.requests.seq_lens.long() - 1
    slots = (table[rows, last // 16] * 16 + last % 16).int()
    new = torch.randn(2, 2, 2, 64, generator=rng).to(device)
    still = torch.tensor([[1.0, 0.0]], device=device).expand(99, 2)  # turns by nothing
    rope_write_kv(
        batch.query.clone(), new[0], new[1], last.int(), still, cache.keys, cache.values, slots,
        key_scales=cache.key_scales, value_scales=cache.value_scales,
    )  # fmt: skip
    expected = paged.reference_attention(replace(batch, cache=plain(cache)))
    paged.assert_close(decode_attention(*batch.decode()), expected, torch.float32)
    paged.assert_close(prefill_attention(*batch.prefill), expected, torch.float32)
    written = decode(cache.values, cache.value_scales, torch.float32)[slots.long() // 16, slots.long() % 16]
    assert (written - new[1]).abs().max() < 0.5, "values of up to 4 or so, with three bits behind the first"


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("fits", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_prompts(
    kind: str, fits: bool, implementation: str, paged: Any, rng: torch.Generator, device: str, monkeypatch: Any
) -> None:
    """Pages in the scratch give what the codes stand for; where they do not fit, nothing is there to be done."""
    if implementation == "triton":
        monkeypatch.setattr(kv_unpack, "place_prompts", kv_unpack.place_prompts_triton)
        monkeypatch.setattr(kv_unpack, "unpack_pages", kv_unpack.unpack_pages_triton)
        monkeypatch.setattr(kv_unpack, "PROGRAMS", 3)
    else:
        device = "cpu"
    lengths, query_lens = [40, 0, 17, 70, 0], [9, 0, 17, 1, 0]
    batch = paged.make_batch(
        rng, device, torch.float32, lengths, query_lens, kv_heads=3, heads=6, value_size=40, before=4, behind=3
    )
    batch, exact = with_codes(batch, CODES[0], kind)
    pages = PromptPages.create(160 if fits else 159, 16, 3 * 104, torch.float32, device)
    pages = replace(pages, num_blocks=10 if fits else 9)
    assert pages.like(batch.cache).keys.shape == (pages.num_blocks, 16, 3, 64)
    unpacked = kv_unpack.UnpackedPrompts(batch.requests, pages, 5)
    assert unpacked.outside is not None, "five requests of five blocks each are more than the scratch"
    numbers = unpacked.unpack(batch.cache)
    inside, outside = unpacked.inside.query_start.tolist(), unpacked.outside.query_start.tolist()
    assert (inside, outside)[fits] == [4] * 6, "one of both has nothing to do"
    assert (outside, inside)[fits] == batch.requests.query_start.tolist()
    expected = paged.reference_attention(exact)
    for cache, requests in ((numbers, unpacked.inside), (batch.cache, unpacked.outside)):
        out = prefill_attention_torch(batch.query, cache, requests, batch.scoring, out=batch.poisoned_out)
        if requests.query_start[-1] > 4:
            paged.assert_close(out[4:-3], expected[4:-3], torch.float32)
        else:
            assert out.isnan().all()
    assert kv_unpack.UnpackedPrompts(batch.requests, replace(pages, num_blocks=25), 5).outside is None


_COMPILE = """
from vserve.kernels.attention import attention_decode, kv_unpack
from vserve.kernels.launch import pdl
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring, UniformBatch
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.kv_fp8 import fixed_scales
from vserve.kernels.attention.rope_kv import rope_write_kv_triton

pdl.pdl_available = lambda device: True
attention_decode.packs = lambda device: True
code = getattr(torch, sys.argv[1])

def run(requests, first, blocks):
    query = torch.empty(requests * 40, 32, 128, dtype=torch.bfloat16)
    keys = torch.empty(20, 16, 8, 128, dtype=code)
    scales = torch.empty(20, 16, 8) if sys.argv[2] == "token" else fixed_scales(torch.ones(8), 20, 16)
    cache = PagedCache(keys, keys, torch.zeros(4, blocks, dtype=torch.int32), scales, scales)
    ints = torch.zeros(requests + 9, dtype=torch.int32)[first:]
    rows = ints[:requests]
    attention_decode.decode_attention_triton(query[:requests], cache, UniformBatch(rows, rows), Scoring(0.1),
                                             num_splits=4)
    prompts = RaggedBatch(rows, rows, ints[:requests + 1], 999)
    prefill_attention_triton(query, cache, prompts, Scoring(0.1))
    rope_write_kv_triton(query[:requests], query[:requests, :8], query[:requests, 8:16], rows, torch.empty(64, 128),
                         keys, keys, rows, query[0, 0], query[0, 0], 1e-6, scales, scales)
    kv_unpack.place_prompts_triton(prompts, 16, 40)
    pages = kv_unpack.PromptPages.create(320, 16, 2048, query.dtype, "cpu")
    kv_unpack.unpack_pages_triton(cache, prompts, torch.zeros(9, dtype=torch.int32)[first % 2:], pages.like(cache))

for requests, first, blocks in ((1, 0, 64), (2, 1, 65), (16, 3, 1)):
    run(requests, first, blocks)
names = [name for name, _ in kernels.values()]
print(json.dumps({
    name: {
        **resources(kernel),
        "variants": names.count(name),
        "shared": kernel.metadata.shared,
        "lookahead": max(map(int, re.findall(r"cp\\.async\\.wait_group\\s+(\\d+)", kernel.asm["ptx"])), default=0),
        "loads_of_bytes": len(re.findall(r"ld\\.shared\\S*\\.[bu]8", kernel.asm["ptx"])),
    }
    for name, kernel in kernels.values()
}))
"""


@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("float8_e4m3fn", "token"),
        pytest.param("float8_e4m3fn", "fixed", marks=pytest.mark.slow),
        pytest.param("float8_e5m2", "fixed", marks=pytest.mark.slow),
    ],
)
def test_compiles_for_hopper(code: str, kind: str, run_for_hopper: Callable[..., Any]) -> None:
    """Nothing spills, loads are in flight, decode attention reads no single bytes, and batch sizes share kernels."""
    kernels = run_for_hopper(_COMPILE, code, kind)
    named = ("decode_fp8", "_merge", "_prefill", "_rope_write_kv", "_place", "_unpack")
    assert set(kernels) == {f"{name}_kernel" for name in named}
    for name, kernel in kernels.items():
        assert kernel["stack"] == kernel["local"] == 0, f"{name} spills"
        assert kernel["variants"] == 1, f"{name} was compiled again for another batch size"
    decode, prefill = kernels["decode_fp8_kernel"], kernels["_prefill_kernel"]
    assert decode["shared"] <= 100 * 1024 and decode["lookahead"] >= 2 and decode["loads_of_bytes"] == 0
    assert prefill["shared"] <= 227 * 1024 and prefill["lookahead"] >= 2
