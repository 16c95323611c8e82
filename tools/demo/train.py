"""Makes the demo model: tokenizer, training text, training, and its measurement, in one command.

    python3 train.py --out DIR --minutes 10       # one H200; DIR then holds the model folder
    python3 train.py --out DIR --resume OTHER --tokenizer NEW     # on from OTHER's weights, with another vocabulary
    python3 train.py --out DIR --init-only        # the same folder with random weights
    python3 train.py --out DIR --device cpu --minutes 3 --batch-tokens 4096 --writers 1    # does it run?

DIR is a usable model folder after every report, so a run that is cut off loses only its last minute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from subprocess import Popen

import torch
import torch.nn.functional as F
from chat import IM_END, render
from data import BARS, MIX, held_out_prompts
from evaluate import evaluate
from model import CONFIG, Llama, load_model, save_model
from shards import TARGET_BIT, Pool, start_writers
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers.utils import logging


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train vserve's demo model.")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, default=10, help="wall time until training ends; measuring is extra")
    parser.add_argument("--init-only", action="store_true", help="write tokenizer, config and random weights only")
    parser.add_argument("--resume", type=Path, help="start from this folder's weights and tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="this folder's tokenizer, not that of --resume or a new one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-tokens", type=int, default=196_608, help="tokens a step, padding included")
    parser.add_argument("--pool-tokens", type=float, default=1e9, help="training text to generate, padding included")
    num_writers = max(1, min(8, (os.cpu_count() or 2) - 3))
    parser.add_argument("--writers", type=int, default=num_writers, help="processes that generate it")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--decay", type=float, default=0.6, help="share of the time over which the learning rate falls")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--mix", nargs="*", default=[], metavar="SKILL=WEIGHT", help=f"change the mixture {MIX}")
    parser.add_argument("--report-seconds", type=float, default=45, help="time between measurements with checkpoints")
    parser.add_argument("--compile", action="store_true", help="compile the model (slow to start, then faster)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def mixture(changes: list[str]) -> dict[str, float]:
    mix = dict(MIX)
    for change in changes:
        skill, _, weight = change.partition("=")
        if skill not in mix:
            raise SystemExit(f"--mix {change}: unknown skill {skill!r}; choose from {', '.join(mix)}")
        mix[skill] = float(weight)
    return mix


def held_out_batches(tokenizer: Tokenizer, prompts_per_skill: int, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """{skill: (tokens, labels), both [prompts, length]}, labels as in `Pool.batch` but only at each last answer."""
    batches = {}
    for skill in BARS:
        rows = []
        for prompt, answer in held_out_prompts(skill, prompts_per_skill, seed=1):
            before = tokenizer.encode(render(prompt, add_generation_prompt=True), add_special_tokens=False).ids
            after = tokenizer.encode(answer + IM_END, add_special_tokens=False).ids
            rows.append((before, after))
        length = max(len(before) + len(after) for before, after in rows)
        tokens, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
        for i, (before, after) in enumerate(rows):
            tokens[i, : len(before) + len(after)] = torch.tensor(before + after)
            labels[i, len(before) - 1 : len(before) + len(after) - 1] = torch.tensor(after)
        batches[skill] = tokens.to(device), labels.to(device)
    return batches


@torch.no_grad()
def exact_match(model: nn.Module, batches: dict[str, tuple[Tensor, Tensor]], device: str) -> dict[str, float]:
    """Greedy decoding gives the right answer exactly if, fed the right answer, every token of it is the likeliest."""
    scores = {}
    for skill, (tokens, labels) in batches.items():
        right = 0
        for i in range(0, len(tokens), 64):
            with torch.autocast(device, torch.bfloat16):
                best = model(tokens[i : i + 64]).argmax(-1)
            wanted = labels[i : i + 64]
            right += int(((best == wanted) | (wanted == -100)).all(-1).sum())
        scores[skill] = right / len(tokens)
    return scores


def learning_rate(args: argparse.Namespace, step: int, done: float) -> float:
    """Warm-up, plateau, then a fall to 1 % along a cosine; `done` is the share of the time that has passed."""
    warm = min(1.0, (step + 1) / args.warmup)
    fallen = min(1.0, max(0.0, (done - (1 - args.decay)) / args.decay))
    return args.lr * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fallen)))


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=args.device == "cuda")


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[tuple[Tensor, Tensor]], device: str
) -> Tensor:
    """One update with the mean loss over all target tokens of `parts`; returns that loss, on the device."""
    num_targets = torch.stack([(labels >= 0).sum() for _, labels in parts]).sum()
    total = torch.zeros((), device=device)
    for tokens, labels in parts:
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (loss / num_targets).backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total / num_targets


def train(
    model: Llama,
    tokenizer: Tokenizer,
    pool: Pool,
    writers: list[Popen[bytes]],
    args: argparse.Namespace,
    started: float,
) -> None:
    """Trains `model` in place until `args.minutes` after `started` (time.monotonic); reports and saves as it goes."""
    optimizer, batches = make_optimizer(model, args), held_out_batches(tokenizer, 192, args.device)
    torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
    forward = torch.compile(model) if args.compile else model
    pool.wait_for(2000, writers)
    first_step = last_report = time.monotonic()
    seconds, step, losses = 60 * args.minutes, 0, []
    print(f"text is there after {first_step - started:.0f} s", flush=True)
    while (now := time.monotonic()) - started < seconds:
        pool.load()
        rate = learning_rate(args, step, (now - first_step) / max(1e-9, started + seconds - first_step))
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(train_step(forward, optimizer, pool.batch(args.batch_tokens), args.device))
        step += 1
        if args.device == "cuda" and step % 20 == 0:
            torch.cuda.synchronize()  # or the clock above would run ahead of the work
        if now - last_report > args.report_seconds:
            report(model, batches, pool, args, step, losses, rate, now - first_step)
            losses, last_report = [], now
    report(model, batches, pool, args, step, losses, rate, time.monotonic() - first_step)


def report(model: Llama, batches: dict[str, tuple[Tensor, Tensor]], pool: Pool, args: argparse.Namespace, step: int,
           losses: list[Tensor], rate: float, seconds: float) -> None:  # fmt: skip
    loss = float(torch.stack(losses).mean()) if losses else float("nan")
    scores = exact_match(model, batches, args.device)
    save_model(model, args.out)
    speed = step * args.batch_tokens / seconds
    print(f"{seconds:5.0f} s  step {step}  loss {loss:.4f}  lr {rate:.1e}  {speed:,.0f} tokens/s  "
          f"{pool.tokens_seen():,} tokens of text", flush=True)  # fmt: skip
    print("         " + "  ".join(f"{skill} {100 * score:.0f}" for skill, score in scores.items()), flush=True)


def main() -> None:
    args, started = parse_arguments(), time.monotonic()
    logging.disable_progress_bar()
    mix = mixture(args.mix)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    ready = args.tokenizer or args.resume
    tokenizer = Tokenizer.from_file(str(ready / "tokenizer.json")) if ready else train_tokenizer(CONFIG.vocab_size)
    if tokenizer.get_vocab_size() != CONFIG.vocab_size or CONFIG.vocab_size > TARGET_BIT:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {CONFIG.vocab_size}")
    save_tokenizer(tokenizer, args.out)
    with tempfile.TemporaryDirectory() as folder:
        writers = []
        try:
            if not args.init_only:  # before the device starts up: the writers need the time
                paths = Path(folder), args.out / "tokenizer.json"
                writers = start_writers(*paths, args.writers, int(args.pool_tokens), args.seed, mix)
            model = Llama(CONFIG)
            if args.resume:
                load_model(model, args.resume, tokenizer)
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters; mixture {json.dumps(mix)}", flush=True)
            save_model(model, args.out)
            if args.init_only:
                return
            model.to(args.device)
            train(model, tokenizer, Pool(Path(folder), torch.device(args.device)), writers, args, started)
        finally:
            for writer in writers:
                writer.terminate()
            for writer in writers:
                writer.wait()
    scores = evaluate(args.out, args.device, 250, 125, show=3)
    (args.out / "evaluation.json").write_text(json.dumps({k: round(v, 4) for k, v in scores.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
