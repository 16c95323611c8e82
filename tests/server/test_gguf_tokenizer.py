"""Tokenizers inside GGUF files: the ids and texts of the tokenizer that was written, or of a plain SentencePiece."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from vserve.engine.errors import ConfigError, ModelError
from vserve.engine.files.gguf_file import Strings, read_gguf
from vserve.server.cli import main, serve
from vserve.server.cli.flags import read_flags
from vserve.server.options.config import ServerConfig
from vserve.server.text.detokenizer import Detokenizer
from vserve.server.text.files import read_tokenizer
from vserve.server.text.gguf_tokenizer import read_gguf_tokenizer
from vserve.server.text.model import load_text_model

DEMO = Path(__file__).parents[2] / "configs" / "demo"
TEXTS = [
    "", " ", "Hello world!", "  two  spaces ", "line\n\nbreak\r\n\n  x", "It's 12345 o'clock, WE'LL see: 3.14159",
    "naïve cafe\u0301 你好，世界 🤗👍🏽 \x00\ufffd", "<|im_start|>user\nHi<|im_end|>", "<s>a</s> <|endoftext|>",
    "A .B , C ! n't 's",
    "\ttab ▁under __init__(self): return {'a': [1, 22, 333, 4444]}", "CamelCaseWord ABCdef äÖÜß Ελληνικά русский",
    "مرحبا हिन्दी ไทย 한국어", "price: $5 + 7 = 12 <=> ~|x|^2", "   \n \t \r\n   end   ", "<tool_call>{}</tool_call>",
    "x" * 300, "don't DON'T Don’t", "²³¼ ①", "a//b\n//c", "[INST] hi [/INST]", "<0x41> <unk>",
]  # fmt: skip


def same(ours: Tokenizer, theirs: Tokenizer, texts: list[str] = TEXTS) -> None:
    for text in texts:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add).ids
            assert ours.encode(text, add_special_tokens=add).ids == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    mine, other = ours.get_added_tokens_decoder(), theirs.get_added_tokens_decoder()
    assert {index: (token.content, token.special) for index, token in mine.items()} == {
        index: (token.content, token.special) for index, token in other.items()
    }


def divided(words: list[str], nfc: bool = False) -> Tokenizer:
    """The demo's vocabulary, text divided by these expressions."""
    core = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    core.normalizer = normalizers.NFC() if nfc else None
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), behavior="isolated") for one in words),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return core


@pytest.fixture
def written(gguf_models: Any, tmp_path: Path) -> Callable[..., Path]:
    """written(pre, …) → a file with the demo's tokenizer and nothing else."""

    def write(pre: str = "qwen2", add: Callable[[Any], None] = lambda writer: None, **rest: Any) -> Path:
        path = tmp_path / f"{pre}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        gguf_models.add_tokenizer(writer, DEMO, 1536, pre, **rest)
        add(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


def test_the_tokenizer_of_the_demo(written: Any) -> None:
    """Its way to divide text is its own: the file carries tokenizer.json."""
    original = read_tokenizer(DEMO)
    found = read_gguf_tokenizer(read_gguf(written(json_tokenizer=True)))
    assert original is not None
    same(found.core, original.core)
    assert (found.special_tokens, found.templates) == (original.special_tokens, original.templates)


# By the formulas of the tokenizer.json of Llama 3, Qwen 2, Mistral Nemo, SmolLM and GPT-2.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# of gpt-oss
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE = {
    "gpt-4o": [O200K],
    "llama-bpe": [LLAMA3],
    "qwen2": [PRETOKENIZE_REGEX],
    "tekken": [TEKKEN],
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


@pytest.mark.parametrize("pre", PRE)
def test_ways_to_divide_text(written: Any, pre: str) -> None:
    theirs = divided(PRE[pre], nfc=pre == "qwen2")
    if pre in ("llama-bpe", "tekken", "gpt-4o"):
        theirs.model.ignore_merges = True
    ours = read_gguf_tokenizer(read_gguf(written(pre))).core
    same(ours, theirs)
    for text in TEXTS:  # the vocabulary may have no token that would tell
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
    others = [divided(words) for name, words in PRE.items() if name != pre]
    for other in others:  # these texts tell them apart
        assert any(
            [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
            != [piece for piece, _ in other.pre_tokenizer.pre_tokenize_str(text)]
            for text in TEXTS
        )


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-4o", True), ("qwen2", False)])
def test_words_that_no_merges_lead_to(written: Any, pre: str, whole: bool) -> None:
    """Llama 3's vocabulary has some: a word that is a token is that token."""
    content = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    word = next(token for token in reversed(content["vocab"]) if token.isalpha() and token.isascii() and len(token) > 4)
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_token_merges
        patch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, merges: add(self, merges[:100]))
        core = read_gguf_tokenizer(read_gguf(written(pre))).core
    assert (core.encode(word).tokens == [word]) is whole


def test_as_transformers_has_it(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    """From the folder that was converted; from the file too, where it leaves out that Qwen's text is composed."""
    folder = tiny_model("qwen2", tie_word_embeddings=True)
    ours = read_gguf_tokenizer(read_gguf(gguf_models.write_gguf(folder, tmp_path / "m.gguf")))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ours.templates == {"default": theirs.chat_template}
    same(ours.core, theirs.backend_tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    same(ours.core, theirs.backend_tokenizer, [unicodedata.normalize("NFC", text) for text in TEXTS])


def test_the_server_takes_it(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("qwen2", vocab_size=320, tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        finish = gguf.GGUFWriter.write_header_to_file
        patch.setattr(
            gguf.GGUFWriter, "write_header_to_file",
            lambda self: (self.add_float32("general.sampling.temp", 0.6), finish(self)),
        )  # fmt: skip
        path = gguf_models.write_gguf(folder, tmp_path / "m.gguf", lambda name: "Q8_0")
    ours, theirs = load_text_model(str(path), ServerConfig()), load_text_model(str(folder), ServerConfig())
    messages = [{"role": "user", "content": "Hello <|im_end|> there"}]
    options = {"add_generation_prompt": True}
    prompt = ours.tokenizer.render(messages, options)
    assert prompt == theirs.tokenizer.render(messages, options)
    ids = ours.tokenizer.encode_rendered(prompt, add_special_tokens=False)
    assert ids == theirs.tokenizer.encode_rendered(prompt, add_special_tokens=False)
    assert ours.tokenizer.special == theirs.tokenizer.special
    assert ours.tokenizer.eos_token_id == theirs.tokenizer.eos_token_id == 2
    assert ours.eos_token_ids == (2, 0) and theirs.eos_token_ids == (2,)  # llama.cpp ends at <|endoftext|> too
    assert ours.tokenizer.largest_id == theirs.tokenizer.largest_id == 299  # not the rows that no token has
    assert [ours.tokenizer.token_bytes(index) for index in range(320)] == [
        theirs.tokenizer.token_bytes(index) for index in range(320)
    ]
    assert ours.tokenizer.hf.encode("Hello there") == ours.tokenizer.encode("Hello there", add_special_tokens=True)
    assert ours.defaults == {"temperature": 0.6} and ours.default_sources == {"temperature": "generation_config.json"}
    assert (ours.pooling.kind, ours.pooling.source) == ("last", "default")


def test_pooling_is_read(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    def pooling(number: int) -> Any:
        path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / f"{number}.gguf", keys={"pooling_type": number})
        return load_text_model(str(path), ServerConfig()).pooling

    assert (pooling(1).kind, pooling(1).source, pooling(3).kind) == ("mean", "qwen3.pooling_type", "last")
    assert pooling(0).problem is None and pooling(4).problem == "qwen3.pooling_type is 4, which is not supported"


def test_ends_are_added_as_the_keys_say(written: Any) -> None:
    def ids(pre: str, **keys: bool) -> list[int]:
        def add(writer: Any) -> None:
            writer.add_bos_token_id(0)
            for name, value in keys.items():
                writer.add_bool(f"tokenizer.ggml.{name}", value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda self, value: None)
            core = read_gguf_tokenizer(read_gguf(written(pre, add=add))).core
        plain = core.encode("hi", add_special_tokens=False).ids
        found = core.encode("hi").ids
        assert [index for index in found if index in plain] == plain
        pair = [index for index in core.encode("hi", "hi").ids if index not in plain]
        assert pair == [index for index in found if index not in plain] * 2
        return [index for index in found if index not in plain]

    assert ids("qwen2") == [] and ids("llama-bpe") == [0]
    assert ids("qwen2", add_bos_token=True) == [0]
    assert ids("llama-bpe", add_bos_token=False, add_eos_token=True) == [2]
    assert ids("llama-bpe", add_eos_token=True) == [0, 2]


def test_user_defined_tokens_stay_whole_and_are_not_special(written: Any) -> None:
    core = read_gguf_tokenizer(read_gguf(written())).core
    index = core.token_to_id("<tool_call>")
    assert core.encode("a<tool_call>b").ids.count(index) == 1
    assert not core.get_added_tokens_decoder()[index].special
    assert "<tool_call>" in core.decode(core.encode("<tool_call>").ids) and core.decode([2]) == ""


def test_without_a_name_of_the_rules(written: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda self, pre: None)
        path = written("default")
    same(read_gguf_tokenizer(read_gguf(path)).core, divided(PRE["default"]))
    assert "default.gguf does not say how its tokenizer divides text" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# ---- SentencePiece ----
class PlainSentencePiece:
    """The algorithm of SentencePiece's BPE, word for word: the two neighbours whose whole has the highest score are
    joined, the leftmost of equals, until none has a piece; what is no piece becomes bytes."""

    def __init__(self, pieces: dict[str, float], ids: dict[str, int]) -> None:
        self.pieces, self.ids = pieces, ids

    def encode(self, text: str) -> list[int]:
        symbols = list(("▁" + text.replace(" ", "▁")) if text else "")
        while True:
            scores = [self.pieces.get(a + b) for a, b in itertools.pairwise(symbols)]
            known = [score for score in scores if score is not None]
            if not known:
                break
            at = scores.index(max(known))
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        found: list[int] = []
        for symbol in symbols:
            if symbol in self.pieces:
                found.append(self.ids[symbol])
            else:
                found += [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return found


CORPUS = "the quick brown fox jumps over the lazy dog and then the other dog sleeps in the sun there naïve café hello"


def sentencepiece_vocabulary(seed: int) -> tuple[list[str], list[float], list[int]]:
    """Every character, then parts of words with scores that no length or order explains; as a GGUF file lists them."""
    generator = random.Random(seed)
    text = "▁" + CORPUS.replace(" ", "▁")
    parts = {text[i : i + n] for n in range(2, 8) for i in range(len(text)) if "▁" not in text[i + 1 : i + n]}
    chosen = generator.sample(sorted(parts), len(parts) // 2)
    scores = [-float(i) for i in range(len(chosen))]
    generator.shuffle(scores)
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    byte_pieces = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    characters = [(char, -1000.0 - i, 1) for i, char in enumerate(sorted(set(text)))]
    merged = list(zip(chosen, scores, [1] * len(chosen), strict=True))
    table = [*special, *byte_pieces, *merged, *characters, ("<|user|>", 0.0, 4), ("the▁quick", 0.0, 5)]
    tokens, all_scores, kinds = zip(*table, strict=True)
    return list(tokens), list(all_scores), list(kinds)


def add_sentencepiece(writer: Any, seed: int = 0) -> None:
    tokens, scores, kinds = sentencepiece_vocabulary(seed)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> Callable[..., Path]:
    def write(seed: int = 0, **keys: bool) -> Path:
        path = tmp_path / f"{seed}{len(keys)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        add_sentencepiece(writer, seed)
        for name, value in keys.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_joins_what_scores_highest(sentencepiece: Any, seed: int) -> None:
    core = read_gguf_tokenizer(read_gguf(sentencepiece(seed))).core
    tokens, scores, kinds = sentencepiece_vocabulary(seed)
    pieces = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    plain = PlainSentencePiece(pieces, {token: index for index, token in enumerate(tokens)})
    generator = random.Random(seed)
    words = [*CORPUS.split(), "theother", "xyz", "ÄÖ", "你", "  ", "dogs", "then"]
    texts = [" ".join(generator.choices(words, k=generator.randint(1, 8))) for _ in range(300)]
    for text in [*texts, CORPUS, " lead", "trail ", "a", " "]:
        ids = core.encode(text, add_special_tokens=False).ids
        assert ids == plain.encode(text), text
        assert core.decode(ids) == text
    longer = [len(core.encode(text).ids) for text in texts]
    assert min(longer) > 0 and core.encode("quick").ids[0] == 1


def test_sentencepiece_special_tokens(sentencepiece: Any) -> None:
    core = read_gguf_tokenizer(read_gguf(sentencepiece())).core
    tokens = sentencepiece_vocabulary(0)[0]
    user, end = tokens.index("<|user|>"), 2
    ids = core.encode("<|user|>the</s>the").ids
    alone = core.encode("the", add_special_tokens=False).ids
    assert ids == [1, user, *alone, end, *alone]  # each part begins as a text does, as in llama.cpp
    assert core.token_to_id("the▁quick") is None
    added = core.get_added_tokens_decoder()
    assert {index: token.special for index, token in added.items()} == {0: True, 1: True, 2: True, user: False}
    assert core.decode([1, user, *alone, end]) == "<|user|> the"
    plain = read_gguf_tokenizer(read_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))).core
    assert plain.encode("the").ids != alone and plain.decode(plain.encode(" the").ids) == " the"
    text = " the"  # the blank is part of the text here, and part of the decoded one
    assert plain.encode(text).ids == alone


def test_the_server_takes_sentencepiece(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Token by token it is the text that was encoded: blanks, special tokens, characters in several bytes."""
    tokens, _, kinds = sentencepiece_vocabulary(0)
    folder = tiny_model("llama", vocab_size=len(tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "add_tokenizer", lambda writer, *rest: add_sentencepiece(writer))
        path = gguf_models.write_gguf(folder, tmp_path / "m.gguf")
    model = load_text_model(str(path), ServerConfig())
    tokenizer = model.tokenizer
    assert (model.eos_token_ids, tokenizer.eos_token_id, tokenizer.has_chat_template) == ((2,), 2, False)
    assert tokenizer.largest_id == len(tokens) - 2  # the last is unused
    for text in ["the quick brown fox", " the  dogs ", "naïve 你好 🤗 the", "a<|user|> sun"]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids[0] == 1
        whole = tokenizer.core.decode(ids, skip_special_tokens=True)
        assert whole == text.replace("|>", "|> ")  # a part after a special token begins with a blank of its own
        for cut in range(1, len(ids)):
            detokenizer = Detokenizer(tokenizer, ids[:cut], True)
            streamed = "".join([detokenizer.feed(token) for token in ids[cut:]]) + detokenizer.flush()
            assert whole.endswith(streamed) or "\ufffd" in streamed, (text, cut)  # cut within a character
        detokenizer = Detokenizer(tokenizer, [], True)
        assert "".join([detokenizer.feed(token) for token in ids]) + detokenizer.flush() == whole
    assert tokenizer.token_bytes(tokens.index("<0xE4>")) == b"\xe4" and kinds[tokens.index("<0xE4>")] == 6
    assert tokenizer.token_bytes(tokens.index("▁")) == b" "


def test_large_vocabularies_take_no_time(tmp_path: Path, slowness: float) -> None:
    """32,000 pieces of SentencePiece: their merges are found, not stored."""
    generator = random.Random(0)
    pieces = list({"".join(generator.choices("abcdefgh▁", k=generator.randint(2, 7))) for _ in range(40_000)})[:32_000]
    tokens = ["<unk>", *"abcdefgh▁", *pieces]
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2] + [1] * (len(tokens) - 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    start = time.process_time()
    core = read_gguf_tokenizer(read_gguf(path)).core
    assert time.process_time() - start < 3 * slowness
    assert core.get_vocab_size() == len(tokens)


# ---- faults ----
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"gpt2", b"bert", "has a tokenizer of the kind 'bert', read are gpt2, llama: name another tokenizer"),
        (b"ggml.model", b"ggml.mudel", "has no tokenizer, read are gpt2, llama: name another tokenizer"),
        (b"ggml.tokens", b"ggml.tokkns", "lacks the key tokenizer.ggml.tokens: name another tokenizer"),
        (b"ggml.merges", b"ggml.mergis", "lacks the key tokenizer.ggml.merges: name another tokenizer"),
        (b"\0qwen2", b"\0other", "divides text by the rules 'other' (tokenizer.ggml.pre), read are default, gpt-2"),
        (b"eos_token_id\4\0\0\0\2\0", b"eos_token_id\4\0\0\0\2\t", "eos_token_id is 2306, there are 1536 tokens"),
        (b"\0\xc4\xa0 t", b"\0\xc4\xa0 \1", "its gpt2 tokenizer cannot be built ("),
    ],
)  # fmt: skip
def test_faults(written: Any, old: bytes, new: bytes, words: str) -> None:
    path = written()
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ModelError) as error:
        read_gguf_tokenizer(read_gguf(path))
    assert words in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


ODD: list[Any] = [
    None, "x", "", -1, 0, 3, 2**40, 1.5, True, False, (), (1, 2), (1.0,), ((1,),), Strings(0, b""),
    Strings(1, b"\1" + bytes(7) + b"a"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_key_of_any_kind_is_read_or_refused(written: Any, sentencepiece: Any, kind: str) -> None:
    file = read_gguf(written() if kind == "gpt2" else sentencepiece())
    keys = {
        **file.metadata, "tokenizer.huggingface.json": None, "tokenizer.chat_templates": (),
        "tokenizer.chat_template": "", "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_eos_token": True,
    }  # fmt: skip
    refused = 0
    for key in keys:
        for value in ODD:
            try:
                found = read_gguf_tokenizer(dataclasses.replace(file, metadata=keys | {key: value}))
                assert all(isinstance(text, str) for text in found.templates.values())
            except ModelError as error:
                assert "\n" not in str(error) and len(str(error)) < 300 + len(str(file.path))
                refused += 1
    assert refused > 40


def test_lengths_must_agree(sentencepiece: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        add = gguf.GGUFWriter.add_token_scores
        patch.setattr(gguf.GGUFWriter, "add_token_scores", lambda self, scores: add(self, scores[:-1]))
        path = sentencepiece()
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores has \d+ values for \d+ tokens: download it again"):
        read_gguf_tokenizer(read_gguf(path))


def test_another_tokenizer_can_be_named(written: Any, gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    folder = tiny_model("qwen2")
    path = gguf_models.write_gguf(folder, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokkns"))
    with pytest.raises(
        ConfigError, match=r"lacks the key tokenizer\.ggml\.tokens: name another tokenizer with --token"
    ):
        load_text_model(str(path), ServerConfig())
    assert load_text_model(str(path), ServerConfig(tokenizer=str(folder))).tokenizer.largest_id == 299
    other = gguf_models.write_gguf(folder, tmp_path / "other.gguf")
    assert load_text_model(str(path), ServerConfig(tokenizer=str(other))).tokenizer.largest_id == 299


# ---- the command line ----
def test_the_file_is_named_by_its_stem(gguf_models: Any, tiny_model: Any, tmp_path: Path) -> None:
    path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / "Tiny-Q8_0.gguf")
    engine, server = read_flags(main.command_parser("serve", serve).parse_args([str(path)]))
    assert engine.model == str(path) and server.served_model_name == ("Tiny-Q8_0", str(path))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"qwen3", b"jamba", "has the architecture 'jamba', served are llama, qwen2, qwen3, qwen2moe, qwen3moe"),
        (b"GGUF", b"GGML", "begins with b'GGML', a GGUF file with b'GGUF': pass a GGUF file"),
        (b"blk.1.ffn_up.w", b"blk.1.ffn_ub.w", "has the tensor blk.1.ffn_ub.weight, for which Qwen3ForCausalLM has no"),
        (b"", b"", "is truncated: tensor "),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_before_torch(
    gguf_models: Any, tiny_model: Any, tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    path = gguf_models.write_gguf(tiny_model("qwen3"), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(old, new) if old else path.read_bytes()[:-500])
    run = "import sys; sys.modules['torch'] = None; from vserve.server.cli.main import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", run, str(path), "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"vserve: {path}") and words in line
