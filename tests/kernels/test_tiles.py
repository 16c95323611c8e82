"""configs/tiles: every file is complete and well-formed, and a GPU without one finds another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from vserve.kernels.attention import attention_decode, attention_prefill
from vserve.kernels.attention.attention_decode import DecodeTile, decode_tile
from vserve.kernels.attention.attention_prefill import PrefillTile, prefill_tile
from vserve.kernels.launch import tiles

FILES = sorted(tiles.FOLDER.glob("*.json"))
TABLES = {
    "decode", "prefill", "small_linear_rows", "small_linear_fma", "small_linear_dot", "cublas", "linear_hopper",
    "quant_rows", "quant_linear", "quant_few", "quant_many", "fp8_linear", "experts_codes", "experts_fp8",
    "experts_few",
}  # fmt: skip
CASES = [(element_bytes, size) for element_bytes in (2, 4) for size in (64, 128, 256, 512, 576)]


def power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def test_the_default_is_there() -> None:
    assert tiles.FOLDER / tiles.DEFAULT in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_complete(path: Path) -> None:
    data = json.loads(path.read_text())
    assert set(data) == {"gpu", "capability", "found_by", *TABLES}
    assert path.stem == data["gpu"].replace(" ", "_") and len(data["capability"]) == 2
    for case, (table, limit) in product(CASES, (("decode", "max_requests"), ("prefill", "max_rows"))):
        limits = [row[limit] for row in data[table] if (row["element_bytes"], row["head_size"]) == case]
        assert limits and limits[-1] is None, "the last row of a case holds for any number"
        assert limits[:-1] == sorted(limits[:-1])
    for table in ("small_linear_fma", "small_linear_dot", "quant_rows", "quant_linear", "fp8_linear"):
        assert data[table][-1]["max_n"] is None
    assert not any("splits" in row for row in data["small_linear_fma"]), "add_up_to: one kernel"
    for table in TABLES - {"cublas", "small_linear_rows", "quant_rows"}:
        for row in data[table]:
            if not row.get("block_m", 1):
                continue  # cuBLAS's own
            assert all(power_of_two(row[name]) for name in ("block_m", "block_n", "block_k", "warps") if name in row)
            assert 1 <= row.get("stages", 1) <= 8 and power_of_two(row.get("ahead", 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_algorithms_are_well_formed(path: Path) -> None:
    rows = json.loads(path.read_text())["cublas"]
    for row in rows:
        assert len(bytes.fromhex(row["algorithm"])) == 64
        assert 1 < row["min_rows"] <= row["max_rows"]
        # Both are rounded to a tenth.
        assert row["us"] - 0.05 < 0.97 * (row["own_us"] + 0.05), "not worth a row"
    for case in {(row["n"], row["k"], row["version"]) for row in rows}:
        ranges = [row for row in rows if (row["n"], row["k"], row["version"]) == case]
        assert all(before["max_rows"] < after["min_rows"] for before, after in pairwise(ranges)), "ranges overlap"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_products_are_well_formed(path: Path) -> None:
    rows = json.loads(path.read_text())["linear_hopper"]
    for row in rows:
        assert row["consumers"] in (1, 2) and row["stages"] <= (4 if row["gated"] or row["consumers"] == 1 else 3)
        assert row["group"] >= 1
        assert row["us"] - 0.05 < 0.99 * (row["others_us"] + 0.05), "not worth a row"
    for case in {(row["n"], row["k"], row["gated"]) for row in rows}:
        ranges = [row for row in rows if (row["n"], row["k"], row["gated"]) == case]
        assert all(row["min_rows"] <= row["max_rows"] for row in ranges)
        assert all(before["max_rows"] < after["min_rows"] for before, after in pairwise(ranges)), "ranges overlap"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tiles_of_many_rows_are_well_formed(path: Path) -> None:
    """From the fewest rows on, without gaps in what is taken; of each range the last row holds for any weight."""
    rows = json.loads(path.read_text())["quant_many"]
    for bits in {row["bits"] for row in rows}:
        of_bits = [row for row in rows if row["bits"] == bits]
        for row in of_bits:
            assert row["tokens"] in (64, 128, 256) and row["min_rows"] <= row["max_rows"] and row["splits"] <= 8
            codes = row["code_stages"] * 128 * (64 if bits == 4 else 128)
            assert row["stages"] * row["tokens"] * 128 + codes + 64 * row["tokens"] * 2 < 227 << 10, "shared memory"
        limits = [row["max_rows"] for row in of_bits if row["max_n"] is None]
        assert limits == sorted({row["max_rows"] for row in of_bits})


def test_the_search_writes_what_is_read(load_module: Callable[[Path], Any]) -> None:
    """Rows of experts' tables: of all limits, with blocks of the same rows in both products."""
    bench = load_module(Path(__file__).parents[2] / "tools" / "kernels" / "bench_experts.py")
    for group in (0, 32, 128):
        best = {}
        for rows in (1 / 16, 1 / 4, *bench.MEASURED):
            firsts, seconds = bench.candidates("codes", rows, group)
            assert len(firsts) == len(seconds) > 2 and len({tile.block_m for tile in (*firsts, *seconds)}) == 1
            best[rows] = firsts[0], seconds[-1]
        found = bench.rows_of_codes("int4", group, best)
        assert [row["max_rows"] for row in found] == [limit for limit in bench.LIMITS for _ in range(2)]
        assert all(set(row) == set(tiles.tile_table("experts_codes")[0]) for row in found)
    firsts, _ = bench.candidates("fp8", 48, 0)
    assert set(bench.rows_of_fp8(16.0, firsts[:2])[0]) == set(tiles.tile_table("experts_fp8")[0])


def test_a_gpu_finds_its_nearest_relation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FOLDER", tmp_path)
    gpus = {"NVIDIA H200": [9, 0], "NVIDIA A100": [8, 0], "NVIDIA L4": [8, 9], "NVIDIA L40": [8, 9]}
    for gpu, capability in gpus.items():
        content = {"capability": capability, "decode": [{"gpu": gpu}]}
        (tmp_path / f"{gpu.replace(' ', '_')}.json").write_text(json.dumps(content))

    def found(gpu: str, capability: tuple[int, int]) -> str:
        (row,) = tiles.read_table("decode", gpu, capability)
        return row["gpu"]

    assert found("NVIDIA L40", (8, 9)) == "NVIDIA L40"
    assert found("NVIDIA L40S", (8, 9)) == "NVIDIA L4"  # the same capability
    assert found("NVIDIA A10", (8, 6)) == "NVIDIA A100"  # the same generation
    assert found("NVIDIA H100 80GB HBM3", (9, 0)) == "NVIDIA H200"
    assert found("NVIDIA B200", (10, 0)) == "NVIDIA H200"  # none: the default
    with pytest.raises(KeyError, match="unheard"):
        tiles.read_table("unheard", "NVIDIA L4", (8, 9))


def test_the_kernels_take_their_tiles_from_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"element_bytes": 4, "head_size": 64}
    table = {
        "decode": (
            {"element_bytes": 2, "head_size": 128, "max_requests": 2, "block_n": 16, "warps": 1, "stages": 5},
            {"element_bytes": 2, "head_size": 128, "max_requests": None, "block_n": 8, "warps": 1, "stages": 2},
        ),
        "prefill": (
            case | {"max_rows": 9, "block_m": 32, "block_n": 16, "warps": 2, "stages": 1},
            case | {"max_rows": None, "block_m": 8, "block_n": 4, "warps": 2, "stages": 1},
        ),
    }
    caches = (decode_tile, attention_prefill._prefill_tiles)
    for module in (attention_decode, attention_prefill):
        monkeypatch.setattr(module, "tile_table", table.__getitem__)
    for cached in caches:
        cached.cache_clear()
    try:
        assert decode_tile(torch.bfloat16, 100, 2) == DecodeTile(16, 1, 5)
        assert decode_tile(torch.bfloat16, 100, 3) == DecodeTile(8, 1, 2)
        assert prefill_tile(torch.float32, 40, 9) == PrefillTile(32, 16, 2, 1)
        assert prefill_tile(torch.float32, 64, 10) == PrefillTile(8, 4, 2, 1)
    finally:
        for cached in caches:
            cached.cache_clear()
