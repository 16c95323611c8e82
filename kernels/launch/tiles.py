"""Tuned tiles are data: one JSON file a GPU in configs/tiles. tools/kernels/tune.py writes most of its tables; those of
small_linear are written by hand, from what bench_linear.py --sweep prints.

A file holds a table a kernel. The rows of a table stand in the order in which they are tried; a limit (`max_…`) that is
null holds for everything. A GPU without a file takes that of the nearest relation, at last the H200's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "configs" / "tiles"
DEFAULT = "NVIDIA_H200.json"

Row = dict[str, Any]


@lru_cache
def tile_table(kernel: str) -> tuple[Row, ...]:
    """The rows for a kernel on this process's current GPU; KeyError for a kernel without tiles."""
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        return read_table(kernel, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return read_table(kernel, "", (0, 0))


def read_table(kernel: str, gpu: str, capability: tuple[int, int]) -> tuple[Row, ...]:
    """The rows for a kernel on the named GPU of this compute capability."""
    return tuple(json.loads(nearest(gpu, capability).read_text())[kernel])


def nearest(gpu: str, capability: tuple[int, int]) -> Path:
    """The GPU's own file, else one of its compute capability, else of its generation, else the H200's."""
    own = FOLDER / f"{gpu.replace(' ', '_')}.json"
    if own.is_file():
        return own
    found = {path: tuple(json.loads(path.read_text())["capability"]) for path in sorted(FOLDER.glob("*.json"))}
    same = [path for path, other in found.items() if other == capability]
    generation = [path for path, other in found.items() if other[0] == capability[0]]
    return next(iter(same + generation), FOLDER / DEFAULT)


def assign_rows(found: list[Any], row: Row, value: object) -> None:
    """found, by number of rows: `value` from the row's min_rows to its max_rows, None before where nothing was."""
    first, last = row["min_rows"], row["max_rows"]
    found += [None] * (last + 1 - len(found))
    found[first : last + 1] = [value] * (last + 1 - first)


def fits(limit: int | None, size: float) -> bool:
    return limit is None or size <= limit
