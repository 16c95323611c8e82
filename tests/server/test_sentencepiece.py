# ruff: noqa: E501, recorded ids
"""Folders with a tokenizer.model alone. The ids are those of the sentencepiece package (0.2.3) for the same files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from vserve.engine.errors import ConfigError
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import load_text_model
from vserve.server.text.sentencepiece import build, parse
from vserve.server.text.tokenizer import Tokenizer

UNIGRAM, BPE, WORD = 1, 2, 3
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WORDS = ["▁t", "he", "▁the", "▁a", "in", "▁in", "er", "on", "▁c", "at", "▁cat", "aa", "aaa", "▁▁", "s."]
LETTERS = list("▁theinrocas.é")
TEXTS = [
    "the cat in a hen", "", " ", "  the  cat ", "cat\nin", "é日😀", "aaaaa", "the <start> cat", "<start>", "x<start>y", "▁a",
    "on the coast.", "</s>the",
]  # fmt: skip


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    return varint(number << 3 | 2) + varint(len(value)) + value


def written(kind: int, *, prefix: bool = True, fold: bool = False, byte_fallback: bool = True, **trainer: int) -> bytes:
    """A ModelProto. `fold`: blanks at the ends and runs of them go."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<start>", 0.0, USER_DEFINED)]
    pieces += [(f"<0x{i:02X}>", 0.0, BYTE) for i in range(256)] if byte_fallback else []
    pieces += [(word, -1.0 - i / 2, NORMAL) for i, word in enumerate(WORDS)]
    pieces += [(letter, -20.0 - i / 4, NORMAL) for i, letter in enumerate(LETTERS)]
    file = b""
    for text, score, of in pieces:
        file += field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + field(3, of))
    options = field(3, kind) + field(35, byte_fallback) + b"".join(field(int(n[1:]), v) for n, v in trainer.items())
    return file + field(2, options) + field(3, field(1, b"identity") + field(3, prefix) + field(4, fold))


FILES: dict[str, dict[str, Any]] = {
    "bpe": {"kind": BPE},
    "bpe without a prefix": {"kind": BPE, "prefix": False},
    "bpe without bytes, folded": {"kind": BPE, "byte_fallback": False, "fold": True},
    "unigram": {"kind": UNIGRAM},
    "unigram without bytes, folded": {"kind": UNIGRAM, "byte_fallback": False, "fold": True},
}
THEIRS = {
    "bpe": [[262, 270, 265, 263, 275, 261, 280], [], [273], [273, 262, 275, 270, 275], [270, 14, 264], [275, 287, 234, 155, 169, 244, 163, 156, 132], [263, 271, 271], [262, 275, 3, 270], [275, 3], [275, 124, 3, 125], [275, 263], [275, 267, 262, 268, 282, 284, 285, 276, 286], [275, 64, 51, 285, 66, 276, 261]],
    "bpe without a prefix": [[276, 261, 270, 265, 263, 275, 261, 280], [], [275], [275, 262, 275, 270, 275], [283, 269, 14, 264], [287, 234, 155, 169, 244, 163, 156, 132], [271, 272], [276, 261, 275, 3, 270], [3], [124, 3, 125], [263], [267, 262, 268, 282, 284, 285, 276, 286], [64, 51, 285, 66, 276, 261]],
    "bpe without bytes, folded": [[6, 14, 9, 7, 19, 5, 24], [], [], [6, 14], [14, 0, 8], [19, 31, 0], [7, 15, 15], [6, 19, 3, 14], [19, 3], [19, 0, 3, 0], [19, 7], [19, 11, 6, 12, 26, 28, 29, 20, 30], [19, 0, 29, 0, 20, 5]],
    "unigram": [[262, 270, 265, 263, 275, 261, 280], [], [273], [273, 262, 275, 270, 275], [270, 14, 264], [275, 287, 234, 155, 169, 244, 163, 156, 132], [263, 271, 271], [262, 275, 3, 270], [275, 3], [275, 124, 3, 125], [275, 263], [275, 267, 262, 268, 282, 284, 285, 276, 286], [275, 64, 51, 285, 66, 276, 261]],
    "unigram without bytes, folded": [[6, 14, 9, 7, 19, 5, 24], [], [], [6, 14], [14, 0, 8], [19, 31, 0], [7, 15, 15], [6, 19, 3, 14], [19, 3], [19, 0, 3, 0], [19, 7], [19, 11, 6, 12, 26, 28, 29, 20, 30], [19, 0, 29, 0, 20, 5]],
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_ids_are_those_of_sentencepiece(name: str) -> None:
    options = FILES[name]
    core = build(parse(written(**options)))
    for text, ids in zip(TEXTS, THEIRS[name], strict=True):
        # Special tokens are found in texts here, and BPE gives each part between user-defined ones a blank of its own,
        # as the tokenizer.json of such models does.
        if "</s>" in text or ("<start>" in text and options["kind"] == BPE and options.get("prefix", True)):
            continue
        assert core.encode(text, add_special_tokens=False).ids == ids, text
        if 0 not in ids and not options.get("fold"):
            assert core.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def folder_with(path: Path, file: bytes, mode: str = "auto", **settings: Any) -> Tokenizer:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "tokenizer.model").write_bytes(file)
    for name, content in settings.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return load_text_model(str(path), ServerConfig(tokenizer_mode=mode)).tokenizer


def test_a_folder_with_tokenizer_model_alone_loads(tmp_path: Path) -> None:
    tokenizer = folder_with(tmp_path, written(BPE))
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("the cat", True) == [1, 262, 270] and tokenizer.encode("the cat", False) == [262, 270]
    assert tokenizer.encode("the</s>the", False) == [262, 2, 262]
    assert set(tokenizer.special.values()) == {"<unk>", "<s>", "</s>"}
    assert tokenizer.token_bytes(262) == b" the" and tokenizer.token_bytes(14) == b"\n"
    assert tokenizer.hf.encode("the cat") == [1, 262, 270]


def test_what_the_other_files_say_of_it_counts(tmp_path: Path) -> None:
    added = {"content": "<|im_end|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    size = 4 + 256 + len(WORDS) + len(LETTERS)
    config = {
        "add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "<|im_end|>"}, "legacy": False,
        "added_tokens_decoder": {str(size): {**added, "single_word": False}}, "chat_template": "{{ bos_token }}:",
    }  # fmt: skip
    tokenizer = folder_with(tmp_path, written(BPE), tokenizer_config=config, added_tokens={"<own>": size + 1})
    assert tokenizer.encode("the cat", True) == [262, 270, size] and tokenizer.eos_token_id == size
    assert tokenizer.encode("the<own>cat", False)[1] == size + 1
    assert tokenizer.render([], {}) == "<s>:"


def test_slow_is_the_file_of_sentencepiece(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    other = build(parse(written(UNIGRAM, byte_fallback=False))).to_str()
    (tmp_path / "tokenizer.json").write_text(other)
    config = {"tokenizer_class": "TokenizersBackend"}
    ids = {
        mode: folder_with(tmp_path, written(BPE), mode, tokenizer_config=config).encode("the cat", False)
        for mode in ("auto", "hf", "slow")
    }
    assert ids["slow"] == [262, 270] and ids["auto"] == ids["hf"] == [6, 14] and not caplog.text
    (tmp_path / "tokenizer.model").unlink()
    alone = load_text_model(str(tmp_path), ServerConfig(tokenizer_mode="slow")).tokenizer
    assert alone.encode("the cat", False) == [6, 14] and "no tokenizer.model" in caplog.text


@pytest.mark.parametrize(
    ("file", "settings", "words"),
    [
        (written(WORD), {}, "a SentencePiece model of type word; bpe and unigram are read"),
        (written(BPE, f24=1), {}, "treat_whitespace_as_suffix"),
        (written(BPE), {"added_tokens": {"<own>": 5000}}, "'<own>' the id 293?, not 5000"),
        (written(BPE)[:-3], {}, "tokenizer.model is broken (it is cut off): download it again"),
        (b"\n\x02", {}, "tokenizer.model is broken (it is cut off)"),
        (b"\n\x02\x18\x01\x12\x02\x1b\x01", {}, "tokenizer.model is broken (wire type 3"),
    ],
)
def test_what_is_not_read_is_said(tmp_path: Path, file: bytes, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="cannot load the tokenizer") as raised:
        folder_with(tmp_path, file, **settings)
    assert words.replace("293?", str(4 + 256 + len(WORDS) + len(LETTERS))) in str(raised.value)
