"""Sampled answers with drafts follow the model's own distribution: chi-squared over pairs of drafted positions."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import vserve.engine.step.runner as runner_module
from vserve.engine.cache.rows import RowTables
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.speculation import Speculation

ALLOWED = (5, 40, 90, 150, 200, 280)
PROMPT = [17, 60, 33, 120]
NUM_ANSWERS = 3000


class Biased:
    """Drafts the same tokens for everybody: right for some, wrong for most."""

    def __init__(self, settings: Speculation) -> None:
        self.count = settings.num_drafts

    def propose(self, tables: RowTables, rows: Tensor, sample_index: Tensor) -> Tensor:
        for row, sample in zip(rows.tolist(), sample_index.tolist(), strict=True):
            if sample >= 0:
                length = int(tables.num_computed[row]) + 1
                drafts = torch.tensor((ALLOWED[:2] * self.count)[: self.count], dtype=torch.int32)
                places = torch.arange(length, length + self.count) % tables.history.ring
                tables.history.recent[row, places] = drafts
                tables.num_proposed[row] = self.count
        return torch.where(sample_index >= 0, self.count, 0).int()


def conditional(engine: Any, prefixes: list[tuple[int, ...]]) -> dict[tuple[int, ...], list[float]]:
    """Of each allowed token behind the prompt and a prefix."""
    ask = SamplingParams(max_tokens=1, temperature=0.0, logprobs=300, ignore_eos=True)
    (answers,), _ = engine.run([([*PROMPT, *prefix], ask) for prefix in prefixes])
    found = {}
    for prefix, answer in zip(prefixes, answers, strict=True):
        entry = answer.logprobs[0]
        known = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        weights = [math.exp(known[token] - max(known[token] for token in ALLOWED)) for token in ALLOWED]
        found[prefix] = [weight / sum(weights) for weight in weights]
    return found


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.slow
def test_pairs_of_drafted_tokens_follow_the_models_law(
    engine: Any, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    """`spoilt`: drafts hold that were not sampled, which the test has to notice."""
    ones = [(token,) for token in ALLOWED]
    law = conditional(engine, [(), *ones, *product(ALLOWED, repeat=2)])
    index = {token: i for i, token in enumerate(ALLOWED)}
    expected = {
        (second, third): sum(
            law[()][index[first]] * law[first,][index[second]] * law[first, second][index[third]] for first in ALLOWED
        )
        for second, third in product(ALLOWED, repeat=2)
    }
    assert sum(expected.values()) == pytest.approx(1)
    monkeypatch.setattr(runner_module, "NgramDrafter", Biased)
    monkeypatch.setattr("vserve.engine.schedule.planner.BESIDE_DRAFTS", 1 << 30)  # everybody drafts, however many wait
    monkeypatch.setattr("vserve.engine.schedule.sharing.PROBES", 1)  # and however few hold
    table = {"num_speculative_tokens_per_batch_size": [[1, 64, 2]]}
    asked: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2, **table}
    if spoilt:
        monkeypatch.setattr("vserve.engine.planning.settings.choose_speculation", _spoil(asked))
    ways = [
        SamplingParams(max_tokens=3, seed=i, ignore_eos=True, allowed_token_ids=ALLOWED) for i in range(NUM_ANSWERS)
    ]
    (answers,), stats = engine.run(
        [(PROMPT, way) for way in ways], speculative_config=json.dumps(asked), max_num_seqs=64,
        max_num_batched_tokens=512,
    )  # fmt: skip
    counts = Counter((answer.tokens[1], answer.tokens[2]) for answer in answers)
    assert stats.num_drafts > NUM_ANSWERS / 2 and sum(stats.num_accepted_tokens) > NUM_ANSWERS / 20
    # Pairs that are rare count together.
    cells = [(counts[pair], NUM_ANSWERS * share) for pair, share in expected.items() if NUM_ANSWERS * share >= 5]
    cells.append((NUM_ANSWERS - sum(seen for seen, _ in cells), NUM_ANSWERS - sum(wanted for _, wanted in cells)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted > 0.5)
    degrees = len(cells) - 1
    limit = degrees + 4 * math.sqrt(2 * degrees)
    assert (statistic > limit) == spoilt, f"{statistic:.0f} at {degrees} degrees of freedom"


def _spoil(asked: dict[str, Any]) -> Any:
    from vserve.engine.options.speculation import read_speculation

    imposed = asked | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.2, 0.1]}
    speculation = read_speculation(json.dumps(imposed))
    assert speculation is not None
    return lambda config, model, tokens, seqs: speculation.within(seqs, tokens)
