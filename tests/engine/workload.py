"""What a stress asks, drawn at random: options of an engine, requests that share prefixes, and how long each stays."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vserve.engine.link.sampling_params import Pooling, SamplingParams, Thinking

from .test_draft_grammars import CLOSE, END

LONGEST = 96  # tokens of a context
MOST_TOKENS = 40  # of an answer
ADAPTERS = (1, 2, 3)  # ids
HEADLESS = (1, 2)  # of them, those that leave logits as they are


@dataclass(frozen=True)
class Asked:
    """`n` answers to one prompt."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    salt: str | None = None

    def choices(self) -> list[SamplingParams]:
        return [self.sampling.of_choice(choice) for choice in range(self.n)]


@dataclass(frozen=True)
class Sent:
    asked: Asked
    delay: float  # seconds from the start of its wave
    leaves: int | None  # after so many tokens of an answer, without waiting for the rest; None: it stays


class Workload:
    """Everything follows from the seed, but for when each thing happens."""

    def __init__(self, seed: int, grammars: list[str], drafters: list[Path], num_groups: int = 1) -> None:
        """grammars: keys; drafters: folders of models that may draft; num_groups: of layers with a block table of
        their own."""
        self.rng = rng = random.Random(f"stress {seed}")
        self.grammars, self.num_groups = grammars, num_groups
        self.has_adapters = rng.random() < 0.8
        kinds = ["ngram", *map(str, drafters), ""]
        self.options = self._options(kinds[seed // 2 % len(kinds)])  # seeds in a row come to all of them
        self._stems = [[rng.randrange(5, 290) for _ in range(48)] for _ in range(3)]
        self._stems.append([*range(20, 27)] * 7)  # n-grams of this one hold
        self.pool = [self._asked() for _ in range(14)]

    def wave(self, count: int) -> list[Sent]:
        rng = self.rng
        spread = rng.choice((0.0, 0.1, 0.4))
        return [
            Sent(rng.choice(self.pool), spread * rng.random(), rng.randrange(8) if rng.random() < 0.2 else None)
            for _ in range(count)
        ]

    def _options(self, drafter: str) -> dict[str, Any]:
        """drafter: "ngram", the folder of a model, or ""."""
        rng = self.rng
        size, tokens = rng.choice((2, 4, 8, 16)), rng.choice((16, 24, 48, 96))
        # Little more than one of the longest requests takes: others are preempted.
        blocks = self.num_groups * -(-(LONGEST + 16) // size) + rng.choice((1, 8))
        options: dict[str, Any] = {
            "max_model_len": LONGEST, "block_size": size, "num_gpu_blocks_override": blocks,
            "max_num_seqs": rng.choice((3, 6, 9, 12)), "max_num_batched_tokens": tokens,
            "max_mixed_tokens": rng.choice((0, 16)), "enable_prefix_caching": rng.random() < 0.85,
            "scheduling_policy": rng.choice(("fcfs", "priority")),
        }  # fmt: skip
        if rng.random() < 0.3:
            options |= {"max_num_partial_prefills": rng.choice((1, 3))}
        if self.has_adapters:
            options |= {"enable_lora": True, "max_loras": rng.choice((1, 2)), "max_cpu_loras": 2}
        if drafter:
            count = rng.choice((1, 2, 3))
            drafts: dict[str, Any] = {"num_speculative_tokens": count}
            if drafter == "ngram":
                drafts |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
            else:
                drafts |= {"model": drafter}
            drafts["num_speculative_tokens_per_batch_size"] = [[1, rng.choice((3, 6, 64)), count]]
            options["speculative_config"] = json.dumps(drafts)
        return options

    def _asked(self) -> Asked:
        rng = self.rng
        stem = rng.choice(self._stems)
        own = [rng.randrange(5, 290) for _ in range(rng.randint(0 if len(stem) == 49 else 1, 12))]
        prompt = stem[: rng.choice((1, 8, 16, 24, 40))] + own
        adapter = rng.choice((0, *ADAPTERS)) if self.has_adapters else 0
        salt = "salt" if rng.random() < 0.1 else None
        if rng.random() < 0.05:
            pooled = SamplingParams(max_tokens=1, pooling=Pooling(rng.choice(("last", "mean"))), adapter=adapter)
            return Asked(tuple(prompt), pooled, salt=salt)
        n = rng.choice((1, 1, 1, 2, 3))
        return Asked(tuple(prompt), self._sampling(adapter), n, rng.randrange(3), salt)

    def _sampling(self, adapter: int) -> SamplingParams:
        rng = self.rng
        ways: dict[str, Any] = {
            "max_tokens": rng.choice((rng.randint(1, MOST_TOKENS), MOST_TOKENS)), "eos_token_ids": (END,),
            "temperature": 0.0, "adapter": adapter,
        }  # fmt: skip

        def sometimes(share: float, **options: Any) -> None:
            if rng.random() < share:
                ways.update(options)

        if rng.random() < 0.6:
            ways |= {"temperature": rng.choice((0.3, 0.9, 1.4)), "seed": rng.randrange(1 << 40)}
            sometimes(0.3, top_p=rng.choice((0.5, 0.9)))
            sometimes(0.3, top_k=rng.choice((1, 20)))
            sometimes(0.3, min_p=0.02)
        sometimes(0.2, repetition_penalty=1.3)
        sometimes(0.2, presence_penalty=0.7)
        sometimes(0.2, frequency_penalty=0.4)
        sometimes(0.2, stop_token_ids=tuple(rng.sample(range(5, 290), 6)))
        sometimes(0.2, min_tokens=rng.randint(1, 6))
        sometimes(0.3, logprobs=rng.choice((0, 3)))
        sometimes(0.2, logit_bias={rng.randrange(5, 290): 4.0, rng.randrange(5, 290): -4.0})
        sometimes(0.2, bad_words=((rng.randrange(5, 290),), (rng.randrange(5, 290), rng.randrange(5, 290))))
        if rng.random() < 0.3:
            ways |= {"grammar": rng.choice(self.grammars)}
        else:
            sometimes(0.1, allowed_token_ids=tuple(range(rng.randrange(5, 100), 200)))
            sometimes(0.5, ignore_eos=True)
            if adapter in (0, *HEADLESS):
                sometimes(0.1, prompt_logprobs=rng.choice((0, 2)))
        sometimes(0.1, thinking=Thinking(-1, CLOSE, True, rng.randrange(6)))
        return SamplingParams(**ways)
