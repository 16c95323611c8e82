"""The demo model's tokenizer: byte-level BPE trained on its own text, one token a digit, with a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
from data import Message, conversation
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2  # special tokens come first; END_OF_TEXT also pads
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Contractions; single digits; words with their space; punctuation, which keeps the space before a digit (", 1" is two
# tokens, so that a list of numbers costs one token a comma); white space.
PATTERN = r"'(?:s|t|re|ve|m|ll|d)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+(?!\S)|\s+"


def render(messages: list[Message]) -> str:
    """What CHAT_TEMPLATE makes of them, without its generation prompt."""
    return "".join(f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)


def train_tokenizer(vocab_size: int, num_conversations: int = 60_000, seed: int = 1) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    r = Random(seed)
    texts = (m["role"] + "\n" + m["content"] for _ in range(num_conversations) for m in conversation(r))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def target_mask(tokens: np.ndarray, assistant_id: int) -> np.ndarray:
    """True at the tokens which the model is to produce: after each "<|im_start|>assistant\\n", through <|im_end|>.

    `tokens` is one-dimensional and may hold many conversations after each other.
    """
    begins = np.flatnonzero((tokens[:-1] == IM_START_ID) & (tokens[1:] == assistant_id)) + 3
    ends = np.flatnonzero(tokens == IM_END_ID)
    ends = ends[np.searchsorted(ends, begins)]
    steps = np.zeros(len(tokens) + 1, np.int8)
    steps[begins] += 1
    steps[ends + 1] -= 1
    return np.cumsum(steps[:-1]).astype(bool)
