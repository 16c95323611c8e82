"""Measures the demo model: exact match of its greedy answers to held-out prompts, skill by skill.

`python evaluate.py [MODEL_DIR]` prints a table and exits with 1 if a skill is below its bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path

import torch
from chat import DEMO
from data import BARS, held_out_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


@torch.inference_mode()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], wanted: list[str], batch_size: int
) -> list[str | None]:
    """Greedy continuations without the closing <|im_end|>; None for one longer than any `wanted` in its batch."""
    found: list[str | None] = []
    for start in range(0, len(prompts), batch_size):
        texts = prompts[start : start + batch_size]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        batch = batch.to(model.device)
        max_new_tokens = 4 + max(len(ids) for ids in tokenizer(wanted[start : start + batch_size])["input_ids"])
        output = model.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=max_new_tokens, do_sample=False,
            temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        for row in output[:, batch["input_ids"].shape[1] :].tolist():
            ended = tokenizer.eos_token_id in row
            found.append(tokenizer.decode(row[: row.index(tokenizer.eos_token_id)]) if ended else None)
    return found


def evaluate(
    folder: Path, device: str, prompts_per_skill: int, batch_size: int, show: int, skills: Collection[str] = tuple(BARS)
) -> dict[str, float]:
    """{skill: share of held-out prompts answered exactly right, end of turn included}; prints as it goes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model = model.to(device).eval()
    scores = {}
    print(f"{'skill':<12} {'exact match':>11}  {'bar':>5}")
    for skill in skills:
        bar = BARS[skill]
        samples = held_out_prompts(skill, prompts_per_skill)
        samples.sort(key=lambda sample: len(sample[1]))  # batches of like lengths: fewer wasted steps
        prompts = [
            tokenizer.apply_chat_template(
                prompt.messages, prompt.tools, add_generation_prompt=True, tokenize=False,
                enable_thinking=prompt.enable_thinking,
            ) for prompt, _ in samples
        ]  # fmt: skip
        given = answers(model, tokenizer, prompts, [answer for _, answer in samples], batch_size)
        wrong = [(p, want, got) for (p, want), got in zip(samples, given, strict=True) if got != want]
        scores[skill] = 1 - len(wrong) / len(samples)
        verdict = "" if scores[skill] >= bar else "  too low"
        print(f"{skill:<12} {100 * scores[skill]:>9.1f} %  {100 * bar:>3.0f} %{verdict}")
        for prompt, want, got in wrong[:show]:
            print(f"    {prompt.messages[-1]['content']!r}: expected {want!r}, got {got!r}")
        sys.stdout.flush()
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Exact match of the demo model on held-out prompts, skill by skill.")
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=250, help="held-out prompts a skill (default 250)")
    parser.add_argument("--skills", nargs="+", choices=tuple(BARS), default=tuple(BARS), metavar="SKILL")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print a skill")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    args = parser.parse_args()
    scores = evaluate(args.model, args.device, args.prompts, args.batch_size, args.show, args.skills)
    if args.json:
        args.json.write_text(json.dumps({k: round(v, 4) for k, v in scores.items()}, indent=2) + "\n")
    sys.exit(any(score < BARS[skill] for skill, score in scores.items()))


if __name__ == "__main__":
    main()
