"""Headers of GGUF files: what the package gguf wrote is read, and every fault is said in one line."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from vserve.engine.errors import ModelError
from vserve.engine.files.gguf_file import read_gguf


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name: str = "a", shape: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    """`shape` fastest first, as in the file."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = key("general.architecture", 8, string("llama"))


def assembled(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 512,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    keys = [ARCHITECTURE] if keys is None else keys
    tensors = [tensor(), tensor("b", offset=256)] if tensors is None else tensors
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + bytes(range(256)) * (data // 256) + bytes(data % 256)


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        read_gguf(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message and len(message) < len(str(path)) + 200
    return message


@pytest.mark.parametrize("version", [2, 3])
def test_what_is_read(tmp_path: Path, version: int) -> None:
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60_000), 3: ("h", -5), 4: ("I", 2**32 - 1), 5: ("i", -7),
               6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**62)), 12: ("d", 0.1)}  # fmt: skip
    keys = [ARCHITECTURE, key("text", 8, string("naïve\n🤗"))]
    for kind, (code, value) in numbers.items():
        keys.append(key(f"number.{kind}", kind, struct.pack("<" + code, value)))
        keys.append(key(f"array.{kind}", 9, struct.pack(f"<IQ2{code}", kind, 2, value, value)))
    keys.append(key("strings", 9, struct.pack("<IQ", 8, 3) + string("") + string("é") + b"\x01" + bytes(7) + b"\xff"))
    keys.append(key("nested", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 1, 2) * 2))
    path = tmp_path / "m.gguf"
    path.write_bytes(assembled(keys, version=version))
    file = read_gguf(path)
    for kind, (_, value) in numbers.items():
        assert file.metadata[f"number.{kind}"] == value and type(file.metadata[f"number.{kind}"]) is type(value)
        assert file.metadata[f"array.{kind}"] == (value, value)
    assert file.metadata["text"] == "naïve\n🤗"
    assert list(file.metadata["strings"]) == ["", "é", "\ufffd"] and len(file.metadata["strings"]) == 3
    assert file.metadata["nested"] == ((1, 2), (1, 2))
    b = file.tensors["b"]
    assert (b.shape, b.type.name, b.num_bytes, b.file) == ((2, 32), "F32", 256, path)
    assert path.read_bytes()[b.start : b.start + 256] == bytes(range(256))


def test_as_the_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "é", "🤗"])
    for number, (shape, kind) in enumerate([((3, 64), "Q4_0"), ((5,), "F32"), ((2, 3, 32), "Q8_0"), ((7, 2), "F16")]):
        values = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"t{number}", gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.metadata["tokenizer.ggml.tokens"]) == ["a", "é", "🤗"]
    assert list(ours.tensors) == [one.name for one in theirs.tensors]
    data = path.read_bytes()
    for one in theirs.tensors:
        mine = ours.tensors[one.name]
        assert mine.shape == tuple(one.shape.tolist()[::-1]) and mine.type.name == one.tensor_type.name
        assert (mine.start, mine.num_bytes) == (one.data_offset, one.n_bytes)
        assert data[mine.start : mine.start + mine.num_bytes] == one.data.tobytes()


def test_a_file_that_is_cut_anywhere_is_truncated(tmp_path: Path) -> None:
    strings = key("strings", 9, struct.pack("<IQ", 8, 2) + string("one") + string("two"))
    numbers = key("numbers", 9, struct.pack("<IQ3I", 4, 3, 1, 2, 3))
    content = assembled([ARCHITECTURE, strings, numbers])
    (tmp_path / "m.gguf").write_bytes(content)
    read_gguf(tmp_path / "m.gguf")
    for size in range(len(content)):
        message = refused(tmp_path / f"{size}.gguf", content[:size])
        assert ("is truncated" in message or "cannot hold" in message) and "download it again" in message, message
        assert str(size) in message
    assert "tensor b ends at byte" in message and f"the file has {size}" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (assembled(magic=b"PK\x03\x04"), "begins with b'PK\\x03\\x04', a GGUF file with b'GGUF': pass a GGUF file"),
        (assembled(version=1), "is GGUF version 1, read are 2 and 3: convert the model with a current llama.cpp"),
        (assembled(version=4), "is GGUF version 4, read are 2 and 3"),
        (assembled(version=3 << 24), "is big-endian, only little-endian files are read: convert it with"),
        (assembled(counts=(2**60, 1)), "bytes cannot hold 1152921504606846976 tensors and 1 keys: download it again"),
        (assembled(counts=(2, 2**40)), "bytes cannot hold 2 tensors and 1099511627776 keys"),
        (assembled([ARCHITECTURE, ARCHITECTURE]), "at key general.architecture: it is there twice"),
        (assembled([key("o\nd", 4, b"1234")]), "at key 1 of 1: 'o\\nd' is no name: download it again"),
        (assembled(tensors=[tensor("a" * 200)]), "at tensor 1 of 1: 'aaaa"),
        (assembled([key("odd", 13, b"1234")]), "at key odd: it has a value of type 13, known are 0 to 12"),
        (assembled([key("odd", 9, struct.pack("<IQ", 13, 1) + b"1234")]), "it has a value of type 13"),
        (assembled([key("odd", 9, struct.pack("<IQ", 9, 1) * 9)]), "at key odd: it has a value of type 9"),
        (assembled([key("odd", 8, struct.pack("<Q", 2) + b"\xc3(")]), "byte 0 of a string is no UTF-8: download it"),
        (assembled([key("odd", 8, struct.pack("<Q", 2**62))]), "is truncated at key odd"),
        (assembled([key("odd", 9, struct.pack("<IQ", 4, 2**62))]), "is truncated at key odd"),
        (assembled([key("odd", 9, struct.pack("<IQ", 8, 2**62))]), "is truncated at key odd"),
        (assembled([key("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0, a multiple of 8"),
        (assembled([key("general.alignment", 8, string("8"))]), "general.alignment is '8', a multiple of 8"),
        (assembled(tensors=[tensor(shape=(1,) * 5)]), "tensor a: it has 5 dimensions, 1 to 4 are possible"),
        (assembled(tensors=[tensor(shape=())]), "tensor a: it has 0 dimensions"),
        (assembled(tensors=[tensor(shape=(32, 0))]), "tensor a: it has shape [0, 32], F32 has blocks of 1"),
        (assembled(tensors=[tensor(shape=(48, 2), kind=2)]), "it has shape [2, 48], Q4_0 has blocks of 32 in a row"),
        (assembled(tensors=[tensor(kind=99)]), "tensor a has the unknown type 99, known are 0 to 41: get the model in"),
        (assembled(tensors=[tensor(kind=31)]), "type 31 (Q4_0_4_4), which the format no longer has: get"),
        (assembled(tensors=[tensor(kind=36)]), "(IQ4_NL_4_4), which the format no longer has: get the model in IQ4_NL"),
        (assembled(tensors=[tensor(offset=8)]), "tensor a has offset 8, which is no multiple of the alignment 32"),
        (assembled(tensors=[tensor(), tensor(offset=256)]), "tensor a is there twice"),
        (assembled(tensors=[tensor(), tensor("b", offset=128)]), "tensor b begins at offset 128, before a ends at 256"),
        (assembled(tensors=[tensor(shape=(2**40, 2**40))]), "is truncated: tensor a ends at byte"),
        (assembled(tensors=[tensor(offset=2**63)]), "is truncated: tensor a ends at byte"),
    ],
)  # fmt: skip
def test_faults(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refused(tmp_path / "m.gguf", content)


def test_random_damage_is_a_model_error_or_nothing(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: no other exception, no endless loop, no giant allocation."""
    strings = key("strings", 9, struct.pack("<IQ", 8, 2) + string("one") + string("two"))
    whole = assembled([ARCHITECTURE, strings, key("numbers", 9, struct.pack("<IQ3I", 4, 3, 1, 2, 3))])
    random, header, failed = np.random.default_rng(0), len(whole) - 512, 0
    start = time.monotonic()
    for round in range(1500):
        content = bytearray(whole)
        for at in random.integers(0, header, random.integers(1, 4)):
            content[at] = random.integers(0, 256)
        path = tmp_path / f"{round}.gguf"
        path.write_bytes(content)
        try:
            read_gguf(path)
        except ModelError as error:
            assert "\n" not in str(error) and str(path) in str(error)
            failed += 1
        path.unlink()
    assert failed > 500 and time.monotonic() - start < 60


def test_what_is_no_file_or_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*absent\.gguf \(No such file or directory\): download"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match=r"cannot read .*\(Is a directory\)"):
        read_gguf(tmp_path)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(assembled())
    assert read_gguf(path).metadata == {"general.architecture": "llama"}
    path.write_bytes(assembled([key("general.architecture", 8, string("qwen3"))]))
    os.utime(path, ns=(1, 1))
    assert read_gguf(path).metadata == {"general.architecture": "qwen3"}


def test_a_large_vocabulary_takes_no_time(tmp_path: Path, slowness: float) -> None:
    count = 150_000
    tokens = b"".join(string(f"token{number}") for number in range(count))
    merges = b"".join(string(f"left{number} right") for number in range(count))
    keys = [key(name, 9, struct.pack("<IQ", 8, count) + data) for name, data in (("t", tokens), ("m", merges))]
    path = tmp_path / "m.gguf"
    path.write_bytes(assembled(keys))
    start = time.process_time()
    file = read_gguf(path)
    found: Any = list(file.metadata["t"])
    assert time.process_time() - start < 1 * slowness  # measured: 0.06
    assert (len(found), found[-1]) == (count, "token149999") and "b" in file.tensors
