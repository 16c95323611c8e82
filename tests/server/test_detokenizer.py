"""Incremental decoding and stop strings give one text, however it comes in pieces."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from vserve.server.options.config import ServerConfig
from vserve.server.text.detokenizer import MAX_PENDING, Detokenizer, StopStrings, TightDetokenizer
from vserve.server.text.model import TextModel, load_text_model
from vserve.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer in Llama 2's style: words start with ▁, whatever is unknown is spelt in bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁Hello", "Hello", "▁world", "!", "▁the", "a", "b", "é"):
        vocab[piece] = len(vocab)
    core = FastTokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=True, byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    folder: Path = tmp_path_factory.mktemp("fallback")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}')
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return load_text_model(str(folder), ServerConfig()).tokenizer


def decode(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt or [], skip)
    return "".join([detokenizer.feed(token) for token in ids] + [detokenizer.flush()])


@given(ids=st.lists(st.integers(0, 319), max_size=60), skip=st.booleans())
def test_any_tokens_give_what_decode_gives(text_model: TextModel, ids: list[int], skip: bool) -> None:
    """Broken characters and special tokens included."""
    expected = text_model.tokenizer.core.decode(ids, skip_special_tokens=skip)
    assert decode(text_model.tokenizer, ids, skip=skip) == expected


@given(text=st.text(max_size=40))
def test_text_comes_back_without_replacements(text_model: TextModel, text: str) -> None:
    detokenizer = Detokenizer(text_model.tokenizer, [], True)
    pieces = [detokenizer.feed(token) for token in text_model.tokenizer.encode(text, False)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(text=st.text(alphabet="ab é你👩 Hworldt!", max_size=30))
def test_byte_fallback_text_comes_back(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode("a" + text, False)
    assert decode(byte_fallback, ids) == byte_fallback.core.decode(ids)


@given(ids=st.lists(st.integers(0, 267), max_size=40))
def test_byte_fallback_garbage_neither_fails_nor_repeats(byte_fallback: Tokenizer, ids: list[int]) -> None:
    """Runs of bytes that are no character make the decoder change its mind: "Invalid prefix encountered"."""
    text = decode(byte_fallback, ids)
    for piece in ("Hello", "world"):
        assert text.count(piece) == byte_fallback.core.decode(ids).count(piece)


def test_the_first_word_keeps_its_space(byte_fallback: Tokenizer) -> None:
    """Decoded alone, it would lose it: the decoder takes it for the beginning of the text."""
    hello, world = (byte_fallback.core.token_to_id(piece) for piece in ("▁Hello", "▁world"))
    assert decode(byte_fallback, [world], prompt=[1, hello]) == " world"
    assert decode(byte_fallback, [world], prompt=[1]) == "world"
    half = byte_fallback.encode("a你", False)[:-1]  # a prompt that ends inside a character
    assert decode(byte_fallback, [world, hello], prompt=half) in ("world Hello", " world Hello")


def test_endless_half_characters_come_out(text_model: TextModel) -> None:
    """A stream of lone continuation bytes must not be decoded again and again from its start."""
    lone = next(token for token in range(320) if text_model.tokenizer.token_bytes(token) == b"\xe4")
    detokenizer = Detokenizer(text_model.tokenizer, [], True)
    pieces = [detokenizer.feed(lone) for _ in range(10 * MAX_PENDING)]
    assert "".join(pieces).count("\ufffd") >= 8 * MAX_PENDING
    assert set("".join(pieces)) == {"\ufffd"}
    rest = detokenizer.flush() + decode(text_model.tokenizer, text_model.tokenizer.encode("ok", False))
    assert rest.endswith("ok")


def test_no_token_at_all(text_model: TextModel) -> None:
    assert decode(text_model.tokenizer, [319 + 1, 2**31, 50, -1, 2**40]) == text_model.tokenizer.core.decode([50])


def test_token_bytes_put_together_are_the_text(text_model: TextModel, byte_fallback: Tokenizer) -> None:
    for tokenizer in (text_model.tokenizer, byte_fallback):
        ids = tokenizer.encode(" Hello é你!", False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "Hello é你!"
    assert text_model.tokenizer.token_bytes(2) == b"<|im_end|>"
    assert text_model.tokenizer.token_bytes(10**6) == b""


def test_no_space_between_special_tokens() -> None:
    """A decoder that joins words with spaces; what stands beside text keeps its space."""
    core = FastTokenizer(models.WordLevel({"one": 0, "two": 1, "[A]": 2, "[B]": 3}, "one"))
    core.add_special_tokens(["[A]", "[B]"])
    core.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(core, {}, {}, lambda: None)
    for prompt, ids, expected in (
        ([0], [1, 2, 3, 3, 0, 2, 1], " two [A][B][B] one [A] two"),
        ([2], [3, 2, 1], "[B][A] two"),
        ([], [1, 0], "two one"),
    ):
        detokenizer = TightDetokenizer(tokenizer, prompt)
        assert "".join([detokenizer.feed(token) for token in ids] + [detokenizer.flush()]) == expected
    assert decode(tokenizer, [1, 2, 3], prompt=[0], skip=False) == " two [A] [B]"


# ---- stop strings ----

WORDS = st.text(alphabet="abé", min_size=1, max_size=4)


def earliest(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain way: look at every prefix, shortest first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(pieces=st.lists(st.text(alphabet="abé", max_size=4), max_size=12), stops=st.lists(WORDS, min_size=1, max_size=3))
def test_stop_strings_in_any_pieces(pieces: list[str], stops: list[str]) -> None:
    expected, matched = earliest("".join(pieces), stops)
    finder = StopStrings(stops)
    out = ""
    for piece in pieces:
        out += finder.push(piece)
        assert expected.startswith(out)  # nothing goes out that is later taken back
        if finder.matched is not None:
            break
    else:
        out += finder.flush()
    assert (out, finder.matched) == (expected, matched)


def plainly(stops: list[str], held: str, new: str) -> tuple[int, str] | None:
    """The plain way, after each piece: all stop strings that end in the new one; where the first ends, the longest."""
    text = held + new
    ends = [(text[:end], stop) for end in range(len(held) + 1, len(text) + 1) for stop in stops]
    found = [(len(before), -len(stop), stop) for before, stop in ends if before.endswith(stop)]
    return (min(found)[0], min(found)[2]) if found else None


@given(
    pieces=st.lists(st.tuples(st.text(alphabet="abé", max_size=4), st.booleans()), max_size=12),
    stops=st.lists(WORDS, min_size=1, max_size=40), include=st.booleans(),
)  # fmt: skip
def test_many_stop_strings_are_found_as_plainly(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    finder, held, hold = StopStrings(stops, include), "", max(map(len, stops)) - 1
    for piece, armed in pieces:
        expected = plainly(stops, held, piece) if armed else None
        assert finder.completes(piece, armed) is (expected is not None)
        out, text = finder.push(piece, armed), held + piece
        if expected is not None:
            end, stop = expected
            assert (out, finder.matched) == (text[: end if include else end - len(stop)], stop)
            return
        held = text[max(0, len(text) - hold) :]
        assert (out, finder.matched) == (text[: len(text) - len(held)], None)
    assert finder.flush() == held


def test_a_token_costs_no_more_with_many_stop_strings() -> None:
    """Of 128 strings, each of which ends as the text's words do."""
    words = ["the", " mar", "ket", " of", " Ree", "kj", "avik", " is", " o", "pen", " to", "day", "."] * 200

    def seconds(stops: list[str]) -> float:
        finder = StopStrings(stops)
        begun = time.perf_counter()
        for word in words:
            finder.push(word)
        return time.perf_counter() - begun

    many = [f"{chr(97 + index % 26)}-{index:03d}{'k ' if index % 2 else 'n'}" * 4 for index in range(128)]
    pairs = [(seconds(["###"]), seconds(many)) for _ in range(7)]
    assert min(many for _, many in pairs) < 12 * min(one for one, _ in pairs)


def test_every_split_of_a_text_with_a_stop_string() -> None:
    text, stops = "né👩‍🚀 ENDing END", ["END", "🚀 E"]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            finder = StopStrings(stops)
            out = ""
            for piece in (text[:first], text[first:second], text[second:]):
                if finder.matched is None:
                    out += finder.push(piece)
            assert (out, finder.matched) == ("né👩‍", "🚀 E")


def test_unarmed_text_ends_no_stop_string() -> None:
    finder = StopStrings(["ab"])
    out = finder.push("ab", armed=False) + finder.push("xa", armed=False) + finder.push("b")
    assert (out, finder.matched) == ("abx", "ab")  # it may begin there


def test_included_stop_string() -> None:
    finder = StopStrings(["ab"], include=True)
    assert finder.push("xa") + finder.push("by") == "xab"


def test_special_tokens_are_listed_once_for_all_choices(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have thousands of them, and a request up to 16,384 choices."""
    tokenizer = Tokenizer(text_model.tokenizer.core, {}, {}, lambda: None)
    listed = 0

    class Core:
        def __getattr__(self, name: str) -> Any:
            nonlocal listed
            listed += name == "get_added_tokens_decoder"
            return getattr(text_model.tokenizer.core, name)

    monkeypatch.setattr(tokenizer, "core", Core())
    for _ in range(20):
        TightDetokenizer(tokenizer, [5])
    assert listed == 1
