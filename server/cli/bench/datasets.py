"""Prompts to measure with: random token ids, random ones with shared prefixes, or a file's."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ....engine.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Messages = list[dict[str, Any]]
DATASETS = ("random", "prefix_repetition", "shared-prefix", "custom")
PROBE = "Say something."


@dataclass(frozen=True)
class BenchPrompt:
    prompt: str | list[int] | Messages
    output_len: int
    num_tokens: int | None = None  # None where only the server can tell


class Dataset(Protocol):
    def sample(self, count: int) -> list[BenchPrompt]:
        """`count` prompts; random ones are never the same twice."""


class Vocabulary:
    """The token ids that a random prompt may hold."""

    def __init__(self, size: int, special: Sequence[int] = (), tokenizer: Tokenizer | None = None) -> None:
        """`size`: ids end below it; `special` ones are left out; `tokenizer` makes text of them where that is asked."""
        self._allowed = np.setdiff1d(np.arange(size), np.array(special, dtype=np.int64))
        self._tokenizer = tokenizer
        if not len(self._allowed):
            raise ConfigError(f"the vocabulary has {size} tokens, all of them special: name another with --tokenizer")

    @classmethod
    def load(cls, source: str) -> Vocabulary:
        """Of a model's folder or its name on the hub; reads tokenizer.json alone. Raises ConfigError."""
        from tokenizers import Tokenizer

        path = Path(source)
        try:
            if path.is_dir():
                tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
            else:
                tokenizer = Tokenizer.from_pretrained(source)
        except Exception as error:  # the Rust library raises bare Exceptions
            raise ConfigError(
                f"cannot read the tokenizer.json of {source!r} ({' '.join(str(error).split())[:200]}); random prompts "
                "need the model's vocabulary: name a folder or hub model with --tokenizer"
            ) from None
        added = tokenizer.get_added_tokens_decoder()
        special = [id for id, token in added.items() if token.special]
        return cls(tokenizer.get_vocab_size(), special, tokenizer)

    def token_ids(self, rng: np.random.Generator, count: int) -> list[int]:
        ids: list[int] = self._allowed[rng.integers(0, len(self._allowed), count)].tolist()
        return ids

    def text(self, rng: np.random.Generator, token_ids: list[int]) -> tuple[str, int]:
        """A text of about these tokens and the number that it has: text that is cut elsewhere tokenises differently."""
        if self._tokenizer is None:
            raise ConfigError("prompts as text need a tokenizer: name a folder or hub model with --tokenizer")
        wanted, best = len(token_ids), ("", 0)
        for _ in range(10):
            text = self._tokenizer.decode(token_ids)
            encoded = self._tokenizer.encode(text, add_special_tokens=False).ids
            if not best[0] or abs(len(encoded) - wanted) < abs(best[1] - wanted):
                best = text, len(encoded)
            if len(encoded) == wanted:
                break
            token_ids = encoded[:wanted] + self.token_ids(rng, max(0, wanted - len(encoded)))
        return best


class RandomDataset:
    """Lengths uniform within `range_ratio` of the means, after `prefix_len` tokens that all prompts share."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rng: np.random.Generator,
        *,
        input_len: int,
        output_len: int,
        prefix_len: int = 0,
        range_ratio: float = 0.0,
        text: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._rng = rng
        self._input = _bounds(input_len, range_ratio)
        self._output = _bounds(output_len, range_ratio)
        self._text = text
        self._prefix = vocabulary.token_ids(rng, prefix_len)

    def sample(self, count: int) -> list[BenchPrompt]:
        input_lens = self._rng.integers(*self._input, count).tolist()
        output_lens = self._rng.integers(*self._output, count).tolist()
        pairs = zip(input_lens, output_lens, strict=True)
        return [_random_prompt(self._vocabulary, self._rng, self._prefix, *pair, self._text) for pair in pairs]


class PrefixRepetitionDataset:
    """Each prompt is one of `num_prefixes` prefixes, equally often, and a suffix of its own; the order is random."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rng: np.random.Generator,
        *,
        prefix_len: int,
        suffix_len: int,
        num_prefixes: int,
        output_len: int,
        text: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._rng = rng
        self._suffix_len = suffix_len
        self._output_len = output_len
        self._text = text
        self._prefixes = [vocabulary.token_ids(rng, prefix_len) for _ in range(num_prefixes)]

    def sample(self, count: int) -> list[BenchPrompt]:
        order = self._rng.permutation(np.arange(count) % len(self._prefixes))
        return [
            _random_prompt(
                self._vocabulary, self._rng, self._prefixes[i], self._suffix_len, self._output_len, self._text
            )
            for i in order
        ]


class CustomDataset:
    """A JSONL file: {"prompt": text or token ids} or {"messages": […]}, with "output_tokens" where lengths differ."""

    def __init__(self, path: Path, rng: np.random.Generator, *, output_len: int, shuffle: bool = True) -> None:
        """`output_len`: -1 takes each line's "output_tokens". Raises ConfigError."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --dataset-path {str(path)!r} ({error}): name a JSONL file") from None
        self._prompts = [
            _parse(line, f"{path}:{number}", output_len) for number, line in enumerate(lines, 1) if line.strip()
        ]
        if not self._prompts:
            raise ConfigError(f"--dataset-path {str(path)!r} has no prompts: one JSON object a line is needed")
        if shuffle:
            self._prompts = [self._prompts[i] for i in rng.permutation(len(self._prompts))]
        self._next = 0

    def sample(self, count: int) -> list[BenchPrompt]:
        """In the file's (or the shuffled) order, from the beginning again where there are too few."""
        start, self._next = self._next, self._next + count
        return [self._prompts[i % len(self._prompts)] for i in range(start, start + count)]


def _bounds(mean: int, ratio: float) -> tuple[int, int]:
    """Half-open."""
    return max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio))) + 1


def _random_prompt(
    vocabulary: Vocabulary, rng: np.random.Generator, prefix: list[int], input_len: int, output_len: int, text: bool
) -> BenchPrompt:
    token_ids = prefix + vocabulary.token_ids(rng, input_len)
    if not text:
        return BenchPrompt(token_ids, output_len, len(token_ids))
    words, num_tokens = vocabulary.text(rng, token_ids)
    return BenchPrompt(words, output_len, num_tokens)


def _parse(line: str, where: str, output_len: int) -> BenchPrompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}): repair or delete the line") from None
    prompt = (entry.get("prompt") or entry.get("messages")) if isinstance(entry, dict) else None
    token_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    messages = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
    if not prompt or not (isinstance(prompt, str) or token_ids or messages):
        raise ConfigError(f'{where} has no prompt: write {{"prompt": text or token ids}} or {{"messages": […]}}')
    if output_len < 0:
        output_len = entry.get("output_tokens", 0)
        if type(output_len) is not int or output_len < 1:
            raise ConfigError(f'{where} has no "output_tokens" of at least 1: add it, or set --custom-output-len')
    return BenchPrompt(prompt, output_len, len(prompt) if token_ids else None)


def add_arguments(parser: Any, num_prompts: int) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset-name", choices=DATASETS, default="random",
                       help="random: token ids; prefix_repetition (shared-prefix): prompts that share prefixes; "
                            "custom: the prompts of --dataset-path (default: random)")  # fmt: skip
    group.add_argument("--dataset-path", type=Path, metavar="FILE",
                       help='JSONL with "prompt" (text or token ids) or "messages" in each line')  # fmt: skip
    group.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N",
                       help=f"requests to send (default: {num_prompts})")  # fmt: skip
    group.add_argument("--input-len", "--random-input-len", "--suffix-len", "--prefix-repetition-suffix-len",
                       dest="input_len", type=int, metavar="N",
                       help="tokens of a random prompt, those of its shared prefix not counted (default: 1024; "
                            "256 with prefix_repetition)")  # fmt: skip
    group.add_argument("--output-len", "--random-output-len", "--prefix-repetition-output-len", "--custom-output-len",
                       dest="output_len", type=int, metavar="N",
                       help="tokens to generate (default: 128; 256 with custom, where -1 means each line's "
                            '"output_tokens")')  # fmt: skip
    group.add_argument("--prefix-len", "--random-prefix-len", "--prefix-repetition-prefix-len",
                       dest="prefix_len", type=int, metavar="N",
                       help="tokens of a shared prefix (default: 0; 256 with prefix_repetition)")  # fmt: skip
    group.add_argument("--num-prefixes", "--prefix-repetition-num-prefixes", dest="num_prefixes", type=int, default=10,
                       metavar="N", help="different prefixes of prefix_repetition (default: 10)")  # fmt: skip
    group.add_argument("--random-range-ratio", "--range-ratio", dest="range_ratio", type=float, default=0.0,
                       metavar="X", help="random: lengths are uniform within this share of their means, 0 to below 1 "
                                         "(default: 0)")  # fmt: skip
    group.add_argument("--text-prompts", action="store_true",
                       help="send random prompts as text instead of token ids (always so for openai-chat)")  # fmt: skip
    group.add_argument("--disable-shuffle", action="store_true", help="custom: keep the file's order")


def check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for values that no dataset can have."""
    for name, least in (("num_prompts", 1), ("input_len", 1), ("prefix_len", 0), ("num_prefixes", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be at least {least}")
    custom = arguments.dataset_name == "custom"
    if arguments.output_len is not None and arguments.output_len < 1 and not (custom and arguments.output_len == -1):
        raise ConfigError(f"--output-len is {arguments.output_len}: it must be at least 1")
    if not 0 <= arguments.range_ratio < 1:
        raise ConfigError(f"--random-range-ratio is {arguments.range_ratio}: it must be from 0 to below 1")
    if custom and arguments.dataset_path is None:
        raise ConfigError("--dataset-name custom needs a file: name it with --dataset-path")


def make_dataset(
    arguments: argparse.Namespace, rng: np.random.Generator, vocabulary: Vocabulary | None, text: bool = False
) -> Dataset:
    """The dataset that the options describe; `vocabulary` is None for custom alone. Raises ConfigError."""

    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    if arguments.dataset_name == "custom":
        return CustomDataset(
            arguments.dataset_path, rng,
            output_len=given(arguments.output_len, 256), shuffle=not arguments.disable_shuffle,
        )  # fmt: skip
    assert vocabulary is not None
    text = text or arguments.text_prompts
    if arguments.dataset_name == "random":
        return RandomDataset(
            vocabulary, rng,
            input_len=given(arguments.input_len, 1024), output_len=given(arguments.output_len, 128),
            prefix_len=given(arguments.prefix_len, 0), range_ratio=arguments.range_ratio, text=text,
        )  # fmt: skip
    return PrefixRepetitionDataset(
        vocabulary, rng,
        prefix_len=given(arguments.prefix_len, 256), suffix_len=given(arguments.input_len, 256),
        num_prefixes=arguments.num_prefixes, output_len=given(arguments.output_len, 128), text=text,
    )  # fmt: skip
