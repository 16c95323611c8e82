"""Trains a noticing model: one command, a few minutes on one GPU.

    python tools/noticing/train.py --out DIR                      # the one in tests/noticing/model
    python tools/noticing/train.py --out DIR --config FILE        # another architecture: a config.json of transformers
    python tools/noticing/train.py --out DIR --device cpu --minutes 1 --batch-tokens 2048        # does it run?

Sequences grow as soon as the model can do those of one length; then the learning rate falls. DIR is a usable model
folder after every report. Prints how many answers of prompts it has never seen are right, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "noticing"))
from tasks import (
    COPY,
    END,
    FIRST,
    FIRSTS,
    KINDS,
    LONGEST_CONTENT,
    LONGEST_COPY,
    NUM_FIRSTS,
    NUM_SECONDS,
    NUM_VALUES,
    RECALL,
    SECONDS,
    VALUES,
    VOCAB_SIZE,
    save_tokenizer,
)

# 5.0 million parameters, 10 MB in bfloat16; the shapes of attention are those that the fast kernels serve.
CONFIG = dict(
    model_type="llama", vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope_theta=500_000.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=END, pad_token_id=END,
    initializer_range=0.02,
)  # fmt: skip
LENGTHS = (24, 48, 96, 192, 384, 768, 1536, LONGEST_CONTENT + 48)
GOOD = 0.95  # of the answers' words right: on to the next length
QUERIES = 0.25  # of a sequence of recall: many queries teach faster than one
IGNORED = -100


def recall_batch(rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """→ tokens and labels, [rows, ≤ length]: pairs, then queries; labels hold what is to follow, in answers only."""
    queries = max(1, int(length * QUERIES) // 5)
    pairs = min(max(1, (length - 5 * queries) // 3), LONGEST_CONTENT // 3)
    keys = torch.rand(rows, NUM_FIRSTS * NUM_SECONDS, device=device).topk(pairs, dim=1).indices
    values = VALUES + torch.randint(NUM_VALUES, (rows, pairs), device=device)
    content = torch.stack((FIRSTS + keys // NUM_SECONDS, SECONDS + keys % NUM_SECONDS, values), dim=2)
    asked = torch.randint(pairs, (rows, queries), device=device)
    asked = content.gather(1, asked.unsqueeze(2).expand(-1, -1, 3))
    frame = torch.ones(rows, queries, 1, dtype=torch.long, device=device)
    query = torch.cat((frame * RECALL, asked, frame * END), dim=2)
    wanted = torch.tensor([False, False, False, True, True], device=device).expand(rows, queries, 5)
    return labelled(content.flatten(1), query.flatten(1), wanted.flatten(1))


def copy_batch(rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    longest = min(max(1, (length - 2) // 2), LONGEST_COPY)
    words = int(torch.randint(max(1, longest // 2), longest + 1, ()))  # where it ends is not to be guessed
    passage = FIRSTS + torch.rand(rows, VOCAB_SIZE - FIRSTS, device=device).topk(words, dim=1).indices
    return answered(passage, COPY, passage)


def first_batch(rows: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    content = torch.randint(FIRSTS, VOCAB_SIZE, (rows, length - 3), device=device)
    return answered(content, FIRST, content[:, :1])


def answered(content: Tensor, instruction: int, answer: Tensor) -> tuple[Tensor, Tensor]:
    frame = torch.ones_like(content[:, :1])
    rest = torch.cat((frame * instruction, answer, frame * END), dim=1)
    return labelled(content, rest, torch.arange(rest.shape[1], device=rest.device).expand_as(rest) > 0)


def labelled(content: Tensor, rest: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """`wanted`: which words of the rest are answers."""
    tokens = torch.cat((content, rest), dim=1)
    labels = torch.full_like(tokens, IGNORED)
    start = content.shape[1]
    labels[:, start - 1 : -1] = rest.masked_fill(~wanted, IGNORED)
    return tokens, labels


BATCHES = {"recall": (recall_batch, 0.6), "copy": (copy_batch, 0.2), "first": (first_batch, 0.2)}  # share of the tokens


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, length: int, batch_tokens: int, device: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """One update. → by task: loss and the share of the answers' words that were right, on the device."""
    found = {}
    for name, (make, share) in BATCHES.items():
        longest = min(length, 2 * LONGEST_COPY + 2) if name == "copy" else length
        tokens, labels = make(max(1, int(share * batch_tokens) // longest), length, device)
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            chosen = labels != IGNORED
            logits = model.lm_head(hidden[chosen]).float()
        loss = F.cross_entropy(logits, labels[chosen])
        (loss / len(BATCHES)).backward()
        found[name] = loss.detach(), (logits.argmax(-1) == labels[chosen]).float().mean()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return found


def train(model: nn.Module, args: argparse.Namespace) -> None:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=args.device == "cuda")
    random = Random(args.seed)
    started, last_report, step, stage, reached = time.monotonic(), time.monotonic(), 0, 0, 0.0
    seconds = 60 * args.minutes
    while (done := (time.monotonic() - started) / seconds) < 1:
        fallen = max(0.0, (done - (1 - args.decay)) / args.decay)
        rate = args.lr * min(1.0, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * fallen)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Half of the steps are of the longest length so far, the others of any below: no length is learnt by heart.
        newest = random.random() < 0.5
        length = LENGTHS[stage] if newest else random.randint(8, LENGTHS[stage])
        found = train_step(model, optimizer, length, args.batch_tokens, args.device)
        step += 1
        if newest and step % 4 == 0:
            least = min(float(right) for _, right in found.values())
            reached = 0.7 * reached + 0.3 * least
            if reached > GOOD and stage + 1 < len(LENGTHS):
                stage, reached = stage + 1, 0.0
        if time.monotonic() - last_report > args.report_seconds:
            save(model, args.out)
            parts = "  ".join(f"{name} {float(loss):.3f} {float(right):.3f}" for name, (loss, right) in found.items())
            print(f"{done * seconds:4.0f} s  step {step}  lr {rate:.1e}  length {LENGTHS[stage]} ({length}): {parts}",
                  flush=True)  # fmt: skip
            last_report = time.monotonic()


@torch.no_grad()
def evaluate(model: nn.Module, device: str, count: int = 500, seed: int = 1) -> dict[str, float]:
    """Share of new prompts, of all lengths, whose greedy answer is right, by kind; weights and arithmetic bfloat16."""
    random, scores = Random(seed), {}
    for kind, make in KINDS.items():
        longest = LONGEST_COPY if kind == "copy" else LONGEST_CONTENT
        right = 0
        for _ in range(count):
            question = make(random, random.randint(3, longest))
            tokens = torch.tensor([question.prompt + question.answer[:-1]], device=device)
            # Fed the right answer, every word of it is the likeliest: greedy decoding then says it.
            best = model(input_ids=tokens, use_cache=False).logits[0, len(question.prompt) - 1 :].argmax(-1)
            right += best.tolist() == question.answer
        scores[kind] = right / count
    return scores


def save(model: nn.Module, folder: Path) -> None:
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}, indent=2) + "\n")
    save_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, "pad_token_id": END}) + "\n")


def main() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the model folder to write")
    add("--config", type=Path, help="a config.json with this vocabulary (default: the one in this script)")
    add("--minutes", type=float, default=5.0, help="of training")
    add("--batch-tokens", type=int, default=131_072, help="tokens a step")
    add("--lr", type=float, default=1e-3)
    add("--decay", type=float, default=0.4, help="share of the time over which the learning rate falls")
    add("--report-seconds", type=float, default=15)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    raw = json.loads(args.config.read_text()) if args.config else dict(CONFIG)
    if raw["vocab_size"] != VOCAB_SIZE:
        parser.error(f"--config has a vocab_size of {raw['vocab_size']}: the tasks need {VOCAB_SIZE}")
    torch.manual_seed(args.seed)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, args)
    save(model, args.out)
    trained = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(args.device).eval()
    scores = evaluate(trained, args.device)
    (args.out / "evaluation.json").write_text(json.dumps(scores, indent=2) + "\n")
    print("right in bfloat16: " + "  ".join(f"{kind} {score:.4f}" for kind, score in scores.items()), flush=True)


if __name__ == "__main__":
    main()
