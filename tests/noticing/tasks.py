"""What the noticing model is asked: prompts whose answer is wrong as soon as one key or value of theirs is.

A prompt is content, an instruction, and for `recall` a key. Content of `recall` is pairs, each a key of two words and
its value; no key stands there twice, but each of its words does, several times. `copy` says all of its content, in
which no word stands twice. `first` says the first word of any content.

    a3 b7 v12 a9 b7 v40 … recall a9 b7  →  v40
    a5 v9 b1 … copy                     →  a5 v9 b1 …
    v8 a1 a1 … first                    →  v8
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

END, RECALL, COPY, FIRST = range(4)
NUM_FIRSTS, NUM_SECONDS, NUM_VALUES = 128, 128, 240
FIRSTS = 16  # the ids before it that are no instruction are spare
SECONDS = FIRSTS + NUM_FIRSTS
VALUES = SECONDS + NUM_SECONDS
VOCAB_SIZE = VALUES + NUM_VALUES  # 512
INSTRUCTIONS = {END: "<end>", RECALL: "recall", COPY: "copy", FIRST: "first"}
LONGEST_COPY = 200  # words
LONGEST_CONTENT = 2000  # words, of the others


@dataclass(frozen=True)
class Question:
    kind: str  # "recall", "copy" or "first"
    prompt: list[int]
    answer: list[int]  # with <end>


def word(token: int) -> str:
    """The text of a token, without the space before it."""
    for start, letter in ((VALUES, "v"), (SECONDS, "b"), (FIRSTS, "a")):
        if token >= start:
            return f"{letter}{token - start}"
    return INSTRUCTIONS.get(token, f"spare{token}")


def text(tokens: list[int]) -> str:
    """What the tokenizer makes these tokens of, and they are detokenised to but for a space in front."""
    return " ".join(map(word, tokens))


def recall(random: Random, num_words: int) -> Question:
    """Among about so many words of pairs, one pair at least."""
    num_pairs = max(1, num_words // 3)
    keys = random.sample(range(NUM_FIRSTS * NUM_SECONDS), num_pairs)
    values = [VALUES + random.randrange(NUM_VALUES) for _ in keys]
    content = [
        token for key, value in zip(keys, values, strict=True) for token in (*key_words(key), value)
    ]  # fmt: skip
    asked = random.randrange(num_pairs)
    return Question("recall", [*content, RECALL, *key_words(keys[asked])], [values[asked], END])


def key_words(key: int) -> tuple[int, int]:
    return FIRSTS + key // NUM_SECONDS, SECONDS + key % NUM_SECONDS


def copy(random: Random, num_words: int) -> Question:
    """A passage of so many words, at most LONGEST_COPY."""
    passage = random.sample(range(FIRSTS, VOCAB_SIZE), min(num_words, LONGEST_COPY))
    return Question("copy", [*passage, COPY], [*passage, END])


def first(random: Random, num_words: int) -> Question:
    content = [random.randrange(FIRSTS, VOCAB_SIZE) for _ in range(num_words)]
    return Question("first", [*content, FIRST], [content[0], END])


KINDS = {"recall": recall, "copy": copy, "first": first}


def save_tokenizer(folder: Path) -> None:
    """Words apart by spaces, a token each; there is no unknown word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {word(END): END} | {f"Ġ{word(token)}": token for token in range(1, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=word(END)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s*\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([word(END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": word(END), "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
