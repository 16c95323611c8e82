"""A GGUF file (versions 2 and 3, little endian) read by its header: metadata, and where each tensor is.

Layout, as ggml's docs/gguf.md has it: "GGUF", u32 version, u64 tensors, u64 keys; per key a name, a u32 type and the
value; per tensor a name, u32 dimensions, their u64 sizes (fastest first), u32 type, u64 offset; then, at the next
multiple of general.alignment, the tensors. A string is a u64 length and UTF-8; an array a u32 type, a u64 length and
the values. Torch is not needed: what is wrong with a file is said at once.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ModelError, unreadable
from ..quant.ggml_types import REMOVED, TYPES, GGMLType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32  # of a file that names none
_MAX_DIMENSIONS = 4
_LONGEST_NAME = 128  # characters; those of tensors have 63 at most
_MAX_NESTING = 4  # arrays in arrays: allowed, and not seen yet
_CHUNK = 8 << 20  # the header of a 150k-token vocabulary is about as large
_HEADER_LIMIT = 512 << 20  # a length that leads further is no length
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LENGTH = struct.Struct("<Q")
_AGAIN = "download it again"


@dataclass(frozen=True)
class Strings:
    """An array of strings as it is in the file: most readers need none of them, and decoding takes a while."""

    count: int
    data: bytes  # per string a u64 length and UTF-8

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        """Bytes that are no UTF-8 become U+FFFD."""
        position, unpack, data = 0, _LENGTH.unpack_from, self.data
        for _ in range(self.count):
            start = position + 8
            position = start + unpack(data, position)[0]
            yield data[start:position].decode("utf-8", "replace")


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is: `num_bytes` from byte `start` of `file`, rows one after another."""

    name: str
    file: Path
    type: GGMLType
    shape: tuple[int, ...]  # rows first, as torch has it
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """Keys and tensors, those of all parts where the model is split."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings, tuples of numbers, and Strings
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """The file and, where it is the first of several, the others. Raises ModelError naming file, tensor and remedy."""
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ModelError(
            f"{path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf: give all parts "
            "the names that they were downloaded under"
        )
    names = [f"{match[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if path.name != names[0]:
        raise ModelError(f"{path} is part {int(match[2])} of {count}: pass the first one, {path.with_name(names[0])}")
    tensors: dict[str, GGUFTensor] = {}
    for number, name in enumerate(names):
        if not path.with_name(name).is_file():
            raise ModelError(f"{path.parent} lacks {name}, part {number + 1} of {count}: download it too")
        part = _read(path.with_name(name))
        if (found := part.metadata.get("split.no")) != number:
            raise ModelError(f"{part.path} says it is part {found}, its name {number} (from 0 on): {_AGAIN}")
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise ModelError(f"{part.path} has {twice[0]}, which another part has too: download all parts again")
        tensors |= part.tensors
    promised = first.metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ModelError(
            f"{path} promises {promised} tensors, its {count} parts have {len(tensors)}: download all of them again"
        )
    return GGUFFile(path, first.metadata, tensors)


def _read(path: Path) -> GGUFFile:
    try:
        state = path.stat()
        return _read_part(path, state.st_size, state.st_mtime_ns)
    except PermissionError:
        raise unreadable(path) from None
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error.strerror}): {_AGAIN}") from None


@lru_cache(maxsize=16)  # configuration, tokenizer and weights ask one after another
def _read_part(path: Path, size: int, changed: int) -> GGUFFile:
    """`changed`: when, so that a file that was replaced is read again."""
    with path.open("rb") as file:
        header = _Header(path, file, size)
        num_tensors, num_keys = header.counts()
        metadata: dict[str, Any] = {}
        for number in range(num_keys):
            key = header.name("key", number, num_keys)
            if key in metadata:
                raise header.corrupt("it is there twice")
            metadata[key] = header.value(header.number("I"))
        tensors = [header.tensor(number, num_tensors) for number in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ModelError(f"{path}: general.alignment is {alignment!r}, a multiple of 8 belongs there: {_AGAIN}")
    start = -(-header.position // alignment) * alignment
    return GGUFFile(path, metadata, _placed(path, size, start, alignment, tensors))


def _placed(path: Path, size: int, start: int, alignment: int, tensors: list[GGUFTensor]) -> dict[str, GGUFTensor]:
    """Offsets counted from the file's beginning, and checked against it and each other."""
    placed: dict[str, GGUFTensor] = {}
    end, before = 0, ""
    for one in sorted(tensors, key=lambda tensor: tensor.start):
        if one.name in placed:
            raise ModelError(f"{path}: tensor {one.name} is there twice: {_AGAIN}")
        if one.start % alignment:
            raise ModelError(
                f"{path}: tensor {one.name} has offset {one.start}, which is no multiple of the alignment {alignment}: "
                f"{_AGAIN}"
            )
        if one.start < end:
            raise ModelError(
                f"{path}: tensor {one.name} begins at offset {one.start}, before {before} ends at {end}: {_AGAIN}"
            )
        end, before = one.start + one.num_bytes, one.name
        if start + end > size:
            raise ModelError(
                f"{path} is truncated: tensor {one.name} ends at byte {start + end}, the file has {size}: {_AGAIN}"
            )
        placed[one.name] = GGUFTensor(one.name, path, one.type, one.shape, start + one.start, one.num_bytes)
    return {tensor.name: placed[tensor.name] for tensor in tensors}


class _Header:
    """The file from its beginning, read on as far as it is asked for."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.data = bytearray()
        self.position = 0
        self.place = "its first bytes"  # for messages

    def counts(self) -> tuple[int, int]:
        """Tensors and keys."""
        magic = bytes(self._take(4))
        if magic != _MAGIC:
            raise ModelError(f"{self.path} begins with {magic!r}, a GGUF file with {_MAGIC!r}: pass a GGUF file")
        version = self.number("I")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS and swapped in _VERSIONS:
            raise ModelError(
                f"{self.path} is big-endian, only little-endian files are read: convert it with gguf_convert_endian.py"
            )
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version}, read are 2 and 3: convert the model with a current llama.cpp"
            )
        tensors, keys = self.number("Q"), self.number("Q")
        if 24 * tensors + 13 * keys > self.size:  # the least that entries take
            raise self.corrupt(f"{self.size} bytes cannot hold {tensors} tensors and {keys} keys")
        return tensors, keys

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        try:
            return self._take(self.number("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.corrupt(f"byte {error.start} of a string is no UTF-8") from None

    def name(self, what: str, number: int, of: int) -> str:
        """Of a key or tensor, at whose place the header then is."""
        self.place = f"{what} {number + 1} of {of}"
        name = self.text()
        if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
            raise self.corrupt(f"{name[:40]!r} is no name")
        self.place = f"{what} {name}"
        return name

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or nesting > _MAX_NESTING:
            raise self.corrupt(f"it has a value of type {kind}, known are 0 to 12")
        of, count = self.number("I"), self.number("Q")
        if of in _NUMBERS:
            code = _NUMBERS[of]
            return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code)))
        if of == _STRING:
            return self._strings(count)
        return tuple(self.value(of, nesting + 1) for _ in range(count))

    def tensor(self, number: int, of: int) -> GGUFTensor:
        """Of the table; its start is still counted from the first tensor's."""
        name = self.name("tensor", number, of)
        dimensions = self.number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.corrupt(f"it has {dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are possible")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind in REMOVED:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind} ({REMOVED[kind]}), which the format no longer has: get "
                f"the model in {REMOVED[kind][:6].rstrip('_')}"
            )
        if kind not in TYPES:
            raise ModelError(
                f"{self.path}: tensor {name} has the unknown type {kind}, known are {min(TYPES)} to {max(TYPES)}: "
                "get the model in another type (Q4_K, Q8_0, …)"
            )
        stored = TYPES[kind]
        if 0 in shape or shape[-1] % stored.elements:
            raise self.corrupt(f"it has shape {list(shape)}, {stored.name} has blocks of {stored.elements} in a row")
        return GGUFTensor(name, self.path, stored, shape, offset, stored.row_bytes(prod(shape)))

    def corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is corrupt at {self.place}: {what}: {_AGAIN}")

    def _strings(self, count: int) -> Strings:
        first = end = self.position
        unpack, data, known = _LENGTH.unpack_from, self.data, len(self.data)
        for _ in range(count):  # hundreds of thousands: nothing here that is not needed
            if end + 8 > known:
                known = self._read_to(end + 8)
            end += 8 + unpack(data, end)[0]
            if end > known:
                known = self._read_to(end)
        self.position = end
        return Strings(count, bytes(data[first:end]))

    def _take(self, count: int) -> bytearray:
        end = self.position + count
        if end > len(self.data):
            self._read_to(end)
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _read_to(self, end: int) -> int:
        """How much is there then: at least `end` bytes."""
        if end > self.size:
            raise ModelError(
                f"{self.path} is truncated at {self.place}: {end} bytes are needed, it has {self.size}: {_AGAIN}"
            )
        if end > _HEADER_LIMIT:
            raise self.corrupt(f"a length leads to byte {end}, headers have {_HEADER_LIMIT} at most")
        while len(self.data) < end:
            chunk = self.file.read(max(_CHUNK, end - len(self.data)))
            if not chunk:  # it has become shorter meanwhile
                raise ModelError(f"{self.path} is truncated: it ends at byte {len(self.data)}: {_AGAIN}")
            self.data += chunk
        return len(self.data)


class Keys:
    """Those that begin with the name of the architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.metadata.get("general.architecture")
        self.remedy = "download it again, or convert the model with a current llama.cpp"

    def __contains__(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, tuple) and value and len(set(value)) == 1:  # one a layer
            value = value[0]
        if value is None:
            raise ModelError(f"{self.file.path} lacks the key {self.prefix}.{key}: {self.remedy}")
        if not is_number(value) or not math.isfinite(value) or value < 0:
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r:.60}, a number from 0 on belongs there, one for "
                f"all layers: {self.remedy}"
            )
        return float(f"{value:.7g}") if isinstance(value, float) else value  # fp32 0.15 is 0.1500000059…

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value or value != int(value):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is {value!r}, a whole number above 0 belongs there: "
                f"{self.remedy}"
            )
        return int(value)

    def positive(self, key: str, default: float | None = None) -> float:
        if not (value := self.number(key, default)):
            raise ModelError(
                f"{self.file.path}: {self.prefix}.{key} is 0, a number above 0 belongs there: {self.remedy}"
            )
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
