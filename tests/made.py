"""Tiny models that are made once: they lie in build/made/ for every process and run of tests, until what makes them is
another."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

KEPT = Path(__file__).parents[1] / "build" / "made"
LIBRARIES = ("transformers", "torch", "tokenizers", "safetensors")


@cache
def _maker(sources: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(" ".join(version(name) for name in LIBRARIES).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def folder_of(
    folder: Path, make: Callable[[Path], object], sources: Iterable[Path], *key: object, kept: Path = KEPT
) -> Path:
    """`folder`, an empty one, with what make(folder) writes into it or has written for the same `key`, which has a repr
    that says all of it. sources: the files of what makes it.

    A copy, so that a test that changes it changes nobody else's.
    """
    said = repr(key)
    if " at 0x" in said:  # an address is no name
        make(folder)
        return folder
    one = kept / hashlib.sha256(f"{_maker(tuple(sources))} {said}".encode()).hexdigest()[:32]
    if not one.exists():
        begun = kept / f"{one.name}.{os.getpid()}"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        try:
            make(begun)
            begun.rename(one)
        except OSError:
            if not one.exists():  # else another process has been faster
                raise
        finally:
            shutil.rmtree(begun, ignore_errors=True)
    shutil.copytree(one, folder, dirs_exist_ok=True)
    return folder
