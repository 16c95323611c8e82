"""Training text as padded token rows: `python shards.py` writes files of them, `Pool` makes batches.

A row is one conversation, padded on the right to the width of its bucket: every conversation starts at position 0, as
it does when served, and plain causal attention never sees another conversation. The highest bit of a token (uint16)
says that the model is to produce it, i.e. that it carries loss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from chat import Chat, num_untrained, render
from data import MIX, conversation
from tokenizer import target_mask
from tokenizers import Tokenizer

WIDTHS = (64, 192, 320, 448, 1024)
TARGET_BIT = 0x8000


def encode_rows(tokenizer: Tokenizer, chats: list[Chat]) -> dict[int, np.ndarray]:
    """Conversations as {width: uint16 [rows, width]}; one longer than the last width is dropped."""
    texts = [render(chat) for chat in chats]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    lengths = np.array([len(row) for row in ids])
    flat = np.concatenate([np.array(row, np.uint16) for row in ids])
    assistant_id = tokenizer.token_to_id("assistant")
    starts = np.cumsum(lengths) - lengths
    mask = target_mask(flat, assistant_id, starts, np.array([num_untrained(chat) for chat in chats]))
    flat = np.where(mask, flat | TARGET_BIT, flat).astype(np.uint16)
    out, shorter = {}, 0
    for width in WIDTHS:
        chosen = np.flatnonzero((lengths > shorter) & (lengths <= width))
        columns = np.arange(width)
        index = np.minimum(starts[chosen, None] + columns, len(flat) - 1)
        out[width] = np.where(columns < lengths[chosen, None], flat[index], 0).astype(np.uint16)
        shorter = width
    return out


def write_shards(folder: Path, tokenizer_path: Path, seed: int, num_tokens: int, mix: dict[str, float]) -> None:
    """Writes shards until `num_tokens` (padding included) are out, or the parent process is gone."""
    tokenizer, r, written, number = Tokenizer.from_file(str(tokenizer_path)), Random(seed), 0, 0
    parent = os.getppid()
    while written < num_tokens and os.getppid() == parent:
        rows = encode_rows(tokenizer, [conversation(r, mix) for _ in range(500 if number == 0 else 4000)])
        temporary = folder / f"{seed}-{number}.tmp"
        with temporary.open("wb") as file:
            np.savez(file, **{str(width): tokens for width, tokens in rows.items()})
        temporary.rename(temporary.with_suffix(".npz"))  # whoever reads sees whole files only
        written += sum(tokens.size for tokens in rows.values())
        number += 1


def start_writers(
    folder: Path, tokenizer_path: Path, num_writers: int, num_tokens: int, seed: int, mix: dict[str, float]
) -> list[subprocess.Popen[bytes]]:
    """`num_writers` processes that together write `num_tokens`; each its own seed, so none repeats another's text."""
    each = num_tokens // num_writers
    command = [sys.executable, __file__, str(folder), str(tokenizer_path), "--tokens", str(each)]
    command += ["--mix", json.dumps(mix)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return [
        subprocess.Popen([*command, "--seed", str(seed * 1000 + i)], env=environment) for i in range(1, num_writers + 1)
    ]


class Pool:
    """All rows seen so far, on the device. Batches are fresh rows while there are any, then random earlier ones.

    A batch takes rows of every width in the proportion in which they occur, so each is a fair sample of the mixture.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.folder, self.device = folder, device
        self.rows: dict[int, torch.Tensor] = {}
        self.filled = dict.fromkeys(WIDTHS, 0)
        self.used = dict.fromkeys(WIDTHS, 0)

    def load(self, max_files: int = 4) -> None:
        """Takes in what the writers have finished and deletes the files."""
        for path in sorted(self.folder.glob("*.npz"))[:max_files]:
            with np.load(path, allow_pickle=False) as arrays:
                for width in WIDTHS:
                    self._append(width, torch.from_numpy(arrays[str(width)].view(np.int16)))
            path.unlink()

    def _append(self, width: int, new: torch.Tensor) -> None:
        start, end = self.filled[width], self.filled[width] + len(new)
        rows = self.rows.get(width)
        if rows is None or end > len(rows):  # doubling keeps the copies few
            grown = torch.zeros(max(2 * end, 4096), width, dtype=torch.int16, device=self.device)
            if rows is not None:
                grown[:start] = rows[:start]
            self.rows[width] = rows = grown
        rows[start:end] = new.to(self.device)
        self.filled[width] = end

    def wait_for(self, num_rows: int, writers: list[subprocess.Popen[bytes]]) -> None:
        while sum(self.filled.values()) < num_rows or min(self.filled.values()) == 0:
            if any(writer.poll() for writer in writers):
                raise RuntimeError("a process that writes training text failed; its message is above")
            time.sleep(0.1)
            self.load()

    def tokens_seen(self) -> int:
        return sum(width * count for width, count in self.filled.items())

    def batch(self, batch_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One (tokens, labels) a width, int64 [rows, width]; labels[:, i] follows tokens[:, i], or -100."""
        scale = batch_tokens / self.tokens_seen()
        parts = []
        for width in WIDTHS:
            count = max(1, min(round(self.filled[width] * scale), self.filled[width]))
            start, filled = self.used[width], self.filled[width]
            if start + count <= filled:
                rows = self.rows[width][start : start + count]
                self.used[width] = start + count
            else:
                rows = self.rows[width][torch.randint(filled, (count,), device=self.device)]
            tokens = rows.long()
            labels = torch.full_like(tokens, -100)  # the sign of an int16 is TARGET_BIT
            labels[:, :-1] = torch.where(tokens < 0, tokens & 0x7FFF, -100)[:, 1:]
            parts.append((tokens & 0x7FFF, labels))
        return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write training text as token shards.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--mix", type=json.loads, default=MIX)
    args = parser.parse_args()
    write_shards(args.folder, args.tokenizer, args.seed, args.tokens, args.mix)
