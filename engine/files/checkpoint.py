"""The weights of a model's folder, whatever their files: what is in them by their headers, and each when asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ModelError
from ..options.model_path import is_gguf
from .gguf_checkpoint import GGUFCheckpoint
from .pickled import PATTERNS, PickledFiles, pickled_files
from .safetensors_files import SafetensorsFiles, safetensors_files
from .tensor_info import TensorInfo

logger = logging.getLogger(__name__)

FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLED = ("pt", "npcache")  # as --load-format has them: mapped files need no copy in numpy's format
_ROWS_AT_ONCE = 1024  # of two matrices that are compared


class Checkpoint(Protocol):
    """The tensors of a checkpoint by name, as Hugging Face names them."""

    @property
    def headers(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, on the CPU, mapped from its file where that is possible; from any thread.

        Raises ModelError where the file cannot be read.
        """
        ...


def open_checkpoint(folder: Path, load_format: str = "auto") -> Checkpoint:
    """Opened by its headers alone. `folder`: or a GGUF file. "auto": pickled files where there are no others.

    Raises ModelError naming what is wrong.
    """
    if is_gguf(folder):
        return GGUFCheckpoint(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: pass the folder of a Hugging Face model")
    if load_format in PICKLED:
        if files := pickled_files(folder):
            return PickledFiles(files)
        raise ModelError(f"{folder} has no {', no '.join(PATTERNS)}: leave --load-format {load_format} out")
    files, index = safetensors_files(folder)
    if files:
        return SafetensorsFiles(files, index)
    if files := pickled_files(folder):
        if load_format == "auto":
            return PickledFiles(files)
        raise ModelError(f"{folder} has no *.safetensors but {files[0].name}: pass --load-format pt, or leave it out")
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty: download the model into it")
    raise ModelError(
        f"{folder} has no *.safetensors: download the weights, or pass --load-format dummy for random ones"
    )


def read_headers(folder: Path, load_format: str = "auto") -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by name. Raises ModelError as `open_checkpoint`."""
    return open_checkpoint(Path(folder), load_format).headers


def checkpoint_bytes(folder: Path) -> int:
    """Size of the tensors in the checkpoint's files, by their headers."""
    return sum(info.num_bytes for info in read_headers(folder).values())


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The float type most of the weights are stored in; None where there are no readable weights."""
    sizes: dict[torch.dtype, int] = {}
    try:
        headers = read_headers(folder)
    except ModelError:
        return None  # loading will say what is wrong; dummy weights need none
    for info in headers.values():
        if info.dtype in FLOAT_TYPES:
            sizes[FLOAT_TYPES[info.dtype]] = sizes.get(FLOAT_TYPES[info.dtype], 0) + info.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def has_own_head(checkpoint: Checkpoint, embedding: str, head: str) -> bool:
    """Whether a checkpoint that ties its output matrix to its embedding has another one all the same, as models have
    whose two were trained apart: then the files say what it is, and config.json does not. A copy of the embedding is
    none. Raises ModelError where one of them cannot be read."""
    headers = checkpoint.headers
    if embedding not in headers or head not in headers:
        return False
    shapes = headers[embedding].shape, headers[head].shape
    if shapes[0] != shapes[1]:
        return False  # what does not fit is left alone, as a copy is
    table, matrix = checkpoint.read(embedding), checkpoint.read(head)

    def equal(rows: slice) -> bool:
        return torch.equal(table[rows].float(), matrix[rows].float())

    some = range(0, len(table), max(1, len(table) // _ROWS_AT_ONCE))  # tell at once, where the two were trained apart
    same = all(equal(slice(row, row + 1)) for row in some) and all(
        equal(slice(row, row + _ROWS_AT_ONCE)) for row in range(0, len(table), _ROWS_AT_ONCE)
    )
    if not same:
        logger.warning(
            "config.json ties %s to %s (tie_word_embeddings), but the checkpoint has another matrix of that name: it "
            "is used", head, embedding,
        )  # fmt: skip
    return not same
