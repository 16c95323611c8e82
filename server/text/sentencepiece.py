"""A tokenizer.model of SentencePiece, put together with the tokenizers library alone, where there is no tokenizer.json.

The file is a protocol buffer (ModelProto of sentencepiece_model.proto): pieces with scores and kinds, how text is
normalised, and which of two algorithms divides it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from .files import NAMED_TOKENS, TokenizerFiles, read_templates
from .gguf_tokenizer import merges_of

FILE = "tokenizer.model"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE = 1, 2
_KINDS = {3: "word", 4: "char"}  # of models that are not read
_SPECIAL = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}  # field, default


@dataclass
class SentencePieceModel:
    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    trainer: dict[int, Any] = field(default_factory=dict)  # TrainerSpec, by the fields' numbers
    normalizer: dict[int, Any] = field(default_factory=dict)  # NormalizerSpec

    @property
    def named(self) -> dict[str, str]:
        found = {}
        for name, (number, default) in _SPECIAL.items():
            index = struct.unpack("<i", struct.pack("<I", self.trainer.get(number, default) & 0xFFFFFFFF))[0]
            if 0 <= index < len(self.pieces):
                found[name] = self.pieces[index]
        return found


def parse(data: bytes) -> SentencePieceModel:
    """Raises ValueError where this is no ModelProto."""
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            model.pieces.append(_message(piece.get(1, b"")).decode())
            model.scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
            model.kinds.append(piece.get(3, _NORMAL))
        elif number in (2, 3):
            (model.trainer if number == 2 else model.normalizer).update(_fields(_message(value)))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands where bytes belong")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: an int for a varint, bytes otherwise. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number has no end")


def read_sentencepiece(folder: Path) -> TokenizerFiles | None:
    """None where there is no tokenizer.model of SentencePiece's. Raises OSError, and ValueError for what is not
    read.
    """
    if not (folder / FILE).exists():
        return None
    data = (folder / FILE).read_bytes()
    if not data.startswith(b"\n"):  # a piece; other tokenizers have text in files of this name
        return None
    try:
        model = parse(data)
    except (ValueError, TypeError, struct.error) as error:
        raise ValueError(f"{FILE} is broken ({error}): download it again") from None
    config = _settings(folder / "tokenizer_config.json")
    listed = _settings(folder / "special_tokens_map.json")
    named = model.named
    for name in NAMED_TOKENS:
        token = config.get(name, listed.get(name))
        if token is not None:
            named[name] = str(token["content"] if isinstance(token, dict) else token)
    core = build(model, config.get("add_prefix_space"), config.get("legacy") is not False)
    _add(core, config.get("added_tokens_decoder") or {}, _settings(folder / "added_tokens.json"))
    words = [AddedToken(word, special=True, normalized=False) for word in named.values()]
    core.add_special_tokens([word for word in words if core.token_to_id(word.content) is not None])
    before = named.get("bos_token") if config.get("add_bos_token", True) else None
    after = named.get("eos_token") if config.get("add_eos_token", False) else None
    _add_ends(core, before, after)
    return TokenizerFiles(core, named, read_templates(folder, config))


def build(model: SentencePieceModel, add_prefix_space: bool | None = None, legacy: bool = True) -> FastTokenizer:
    """`add_prefix_space`: a blank before the text, None: as the file says; `legacy`: before each part of it that stands
    between special tokens, as the tokenizer.json of such models has it, and otherwise as transformers does where it is
    told "legacy": false. Raises ValueError.
    """
    kind = model.trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"{FILE} is a SentencePiece model of type {_KINDS.get(kind, kind)}; bpe and unigram are read")
    if model.trainer.get(24) or not model.normalizer.get(5, 1):
        raise ValueError(
            f"{FILE} writes blanks in a way that is not read (treat_whitespace_as_suffix, escape_whitespaces)"
        )
    core = FastTokenizer(_unigram(model) if kind == _UNIGRAM else _bpe(model))
    prefix = bool(model.normalizer.get(3, 1)) if add_prefix_space is None else add_prefix_space
    steps: list[Any] = []
    if charsmap := model.normalizer.get(2):
        steps.append(normalizers.Precompiled(charsmap))
    if model.normalizer.get(4, 1):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix and legacy:
        steps.append(normalizers.Prepend("▁"))
    if prefix and not legacy:
        core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        steps.append(normalizers.Replace(" ", "▁"))
    core.normalizer = normalizers.Sequence(steps)
    shown: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*shown, decoders.Strip(content=" ", left=1)] if prefix else shown)
    # In a model of the kind unigram, user-defined pieces are found as others are.
    whole = (_UNKNOWN, _CONTROL) if kind == _UNIGRAM else (_UNKNOWN, _CONTROL, _USER_DEFINED)
    core.add_tokens(
        [
            AddedToken(piece, special=one != _USER_DEFINED, normalized="▁" in piece and not prefix)
            for piece, one in zip(model.pieces, model.kinds, strict=True)
            if one in whole and " " not in piece  # SentencePiece looks for them where blanks are ▁
        ]
    )
    return core


def _bpe(model: SentencePieceModel) -> models.BPE:
    vocabulary = {piece: index for index, piece in enumerate(model.pieces)}
    normal = {
        piece: score
        for piece, score, kind in zip(model.pieces, model.scores, model.kinds, strict=True)
        if kind == _NORMAL
    }  # fmt: skip
    return models.BPE(
        vocab=vocabulary, merges=merges_of(normal, vocabulary), unk_token=model.named.get("unk_token"), fuse_unk=True,
        byte_fallback=_BYTE in model.kinds,
    )  # fmt: skip


def _unigram(model: SentencePieceModel) -> models.Unigram:
    """User-defined pieces get a score that is better than any other way to their text, as SentencePiece has it
    (unigram_model.h); pieces that no text may have the lowest one: a lower would change what is unknown.
    """
    pieces = list(zip(model.pieces, model.scores, model.kinds, strict=True))
    normal = [score for _, score, kind in pieces if kind == _NORMAL] or [0.0]
    ours = {_NORMAL: lambda piece, score: score, _USER_DEFINED: lambda piece, score: len(piece) * max(normal) - 0.1}
    scores = [ours.get(kind, lambda *_: min(normal))(piece, score) for piece, score, kind in pieces]
    return models.Unigram(
        vocab=list(zip(model.pieces, scores, strict=True)), unk_id=model.trainer.get(40, 0),
        byte_fallback=_BYTE in model.kinds,
    )  # fmt: skip


def _add(core: FastTokenizer, listed: dict[str, Any], plain: dict[str, Any]) -> None:
    """Tokens that came after the model, with their ids. Raises ValueError."""
    tokens = {
        int(index): AddedToken(**{k: v for k, v in token.items() if k != "__type"}) for index, token in listed.items()
    }
    for text, index in plain.items():
        tokens.setdefault(int(index), AddedToken(text, normalized=False))
    for index, token in sorted(tokens.items()):
        core.add_tokens([token])
        if (given := core.token_to_id(token.content)) != index:
            raise ValueError(f"{FILE} gives the added token {token.content[:40]!r} the id {given}, not {index}")


def _add_ends(core: FastTokenizer, before: str | None, after: str | None) -> None:
    single = [text for text in (before, "$A", after) if text is not None]
    if len(single) == 1:
        return
    ends = [(text, core.token_to_id(text)) for text in (before, after) if text is not None]
    pair = [*single, *(f"{text.replace('$A', '$B')}:1" for text in single)]
    core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)


def _settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content
