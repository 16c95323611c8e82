"""Row 44: tokenizers whose regular expression backtracks without end."""

from __future__ import annotations

import itertools
import time

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from vserve.engine.errors import ConfigError
from vserve.server.errors import ApiError
from vserve.server.text.tokenizer import Tokenizer as TextTokenizer
from vserve.server.text.trial import try_out

GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer(pattern: str) -> Tokenizer:
    core = Tokenizer(models.BPE({"?": 0}, [], unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return core


@pytest.mark.parametrize("pattern", [GPT2, QWEN])
def test_those_of_well_known_models_pass(pattern: str) -> None:
    try_out(tokenizer(pattern))


def test_a_machine_that_stands_still_for_once_refuses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, clock = itertools.count(), time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: clock() + 10 * (next(calls) >= 5))
    try_out(tokenizer(GPT2))
    assert next(calls) > 100


@pytest.mark.parametrize(("pattern", "words"), [("(a+)+b", "retry"), ("(?:1|11)+$", "'1'"), (r"\s+\s+$", "takes")])
@pytest.mark.slow
def test_row_44_a_pathological_one_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer") as caught:
        try_out(tokenizer(pattern))
    assert words in str(caught.value)


def test_row_44_a_text_that_is_too_much_all_the_same_is_a_bad_request() -> None:
    text = TextTokenizer(tokenizer("(q+)+b"), {}, {}, lambda: None)
    try_out(text.core)  # no sample has a q
    with pytest.raises(ApiError) as caught:
        text.encode("q" * 60, add_special_tokens=False)
    assert caught.value.status == 400 and caught.value.param == "prompt"
