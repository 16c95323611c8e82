"""The demo model's tokenizer: byte-level BPE trained on its own text, one token a digit, with a ChatML template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import numpy as np
from chat import IM_END, IM_START, TEMPLATE_PATH, render
from data import conversation
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2  # special tokens come first; END_OF_TEXT also pads
# One token each, but part of the text: not special, as in Qwen's tokenizers. They come last.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# Contractions; single digits; words with their space; punctuation, which keeps the space before a digit (", 1" is two
# tokens, so that a list of numbers costs one token a comma); white space.
PATTERN = r"'(?:s|t|re|ve|m|ll|d)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+(?!\S)|\s+"


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
        vocab_size=vocab_size - len(MARKS),
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    r, marks = Random(seed), re.compile("|".join(map(re.escape, (IM_START, IM_END, *MARKS))))
    texts = (text for _ in range(num_conversations) for text in marks.split(render(conversation(r))))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
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
    }
    (folder / TEMPLATE_PATH.name).write_text(TEMPLATE_PATH.read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def target_mask(tokens: np.ndarray, assistant_id: int, starts: np.ndarray, num_untrained: np.ndarray) -> np.ndarray:
    """True at the tokens which the model is to produce: after each "<|im_start|>assistant\\n", through <|im_end|>.

    `tokens` is one-dimensional and holds conversations after each other, which begin at `starts`; the first
    `num_untrained` of the assistant's messages of each are left out.
    """
    begins = np.flatnonzero((tokens[:-1] == IM_START_ID) & (tokens[1:] == assistant_id)) + 3
    chat = np.searchsorted(starts, begins, side="right") - 1
    earlier = np.arange(len(begins)) - np.searchsorted(begins, starts)[chat]  # messages before it in its conversation
    begins = begins[earlier >= num_untrained[chat]]
    ends = np.flatnonzero(tokens == IM_END_ID)
    ends = ends[np.searchsorted(ends, begins)]
    steps = np.zeros(len(tokens) + 1, np.int8)
    steps[begins] += 1
    steps[ends + 1] -= 1
    return np.cumsum(steps[:-1]).astype(bool)
