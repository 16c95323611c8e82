"""download a model, or go on where that was broken off; `vserve MODEL` does it too"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import sys
from pathlib import Path

from ...engine.describe.download import Report
from ...engine.errors import ConfigError, ModelError
from ...engine.options.config import EngineConfig
from ...engine.options.model_path import find_model
from .download_line import Download, size
from .flags import add_flags, read_flags

EXAMPLES = ("vserve pull Qwen/Qwen3-0.6B", "vserve pull https://huggingface.co/owner/model-GGUF:Q4_K_M")
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the name of a file in the hub's cache that is kept apart for its size
_PIECE = 1 << 24  # bytes that are read at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig, only=("model", "revision", "download_dir", "load_format", "trust_remote_code"))
    parser.add_argument("--no-check", action="store_true", help="do not compare the files with their checksums")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when the files are here, 1 where they cannot be had, 2 for a wrong name."""
    if not (arguments.model or arguments.opt_model):
        print("vserve: name a model, as in `vserve pull Qwen/Qwen3-0.6B`", file=sys.stderr)
        return 2
    logging.getLogger("httpx").setLevel(logging.WARNING)
    line = Line()
    try:
        engine, _ = read_flags(arguments)
        if (here := find_model(engine.model)) is not None:
            print(f"{engine.model} is on this machine: {here}")
            return 0
        folder = fetch(engine, line)
        if not arguments.no_check and (wrong := damaged(folder, line)):
            line.end()
            print(f"vserve: {wrong.name} is not what the hub has (its checksum differs): remove {wrong} and pull again",
                  file=sys.stderr)  # fmt: skip
            return 1
    except ModelError as error:
        line.end()
        print(f"vserve: {error}", file=sys.stderr)
        return 1
    except ConfigError as error:
        line.end()
        print(f"vserve: {error}", file=sys.stderr)
        return 2
    line.end()
    print(
        f"{folder}\n{size(sum(file.stat().st_size for file in _files(folder)))}; serve it with `vserve {engine.model}`"
    )
    return 0


def fetch(engine: EngineConfig, report: Report) -> Path:
    """The folder, or the GGUF file. What cannot be served is refused before its weights come. Raises ModelError,
    ConfigError."""
    from ...engine.describe.model_source import resolve_model_path
    from ...engine.describe.reading import check_before_download

    check_before_download(engine)
    return resolve_model_path(
        engine.model, engine.revision, engine.download_dir, engine.load_format, engine.trust_remote_code, report
    )


class Line:
    """One line that says how far it is; on a terminal alone."""

    def __init__(self) -> None:
        self._download, self._terminal, self._drawn = Download(), sys.stderr.isatty(), False

    def __call__(self, done: int, total: int) -> None:
        self.show(self._download.line(done, total))

    def show(self, text: str) -> None:
        if self._terminal:
            self._drawn = True
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._drawn:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        self._drawn = False


def damaged(folder: Path, line: Line) -> Path | None:
    """The first file whose content is not what its name in the cache says, which is the checksum of what is large."""
    for file in _files(folder):
        blob = Path(os.path.realpath(file))
        if not _SHA256.fullmatch(blob.name):
            continue
        digest = hashlib.sha256()
        with blob.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                line.show(f"checking {file.name}")
        if digest.hexdigest() != blob.name:
            return blob
    return None


def _files(folder: Path) -> list[Path]:
    return [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
