"""Options of files and batches: what of them is kept, for how long, and how much of it is worked on."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.options.option import Bounds, option


@dataclass(frozen=True)
class BatchConfig:
    file_store_bytes: int = option(
        256 << 20, "bytes of memory that the files of /v1/files and the answers of batches may take; 0: there are "
        "neither files nor batches", group="batches", bounds=Bounds(0, 1 << 40, zero="none"),
    )  # fmt: skip
    file_store_size: int = option(1024, "how many such files there may be", group="batches", bounds=Bounds(1, 10**6))
    max_file_size: int = option(
        64 << 20, "bytes of a body that brings a file", group="batches", bounds=Bounds(1, 1 << 40)
    )
    file_lifetime: float = option(
        86_400.0, "seconds after which a file, and a batch that has ended, is forgotten", group="batches",
        bounds=Bounds(1, 10**8, unit="seconds"),
    )  # fmt: skip
    max_batches: int = option(
        64, "how many batches there may be, those that have ended included, which make room", group="batches",
        bounds=Bounds(1, 10**5),
    )  # fmt: skip
    max_batch_requests: int = option(50_000, "requests of a batch", group="batches", bounds=Bounds(1, 10**6))
    batch_concurrency: int = option(
        64, "requests of all batches that are in work at once", group="batches", bounds=Bounds(1, 65_536)
    )
