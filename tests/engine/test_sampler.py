"""A step pays for what its rows ask, and for what a request brings along only once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from vserve.engine.cache.batch import SampleBatch
from vserve.engine.cache.rows import RowTables, Upload
from vserve.engine.link.messages import pack_tokens
from vserve.engine.link.plan import NewRow, StepPlan
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.step import sampler as sampler_module
from vserve.engine.step.sampler import COUNT_ROWS, Sampler, Samples

VOCAB, PROMPT = 3000, 4


class Rows:
    """Requests on the rows of a table, each of `PROMPT` tokens and so many outputs."""

    def __init__(self, *params: SamplingParams) -> None:
        device = torch.device("cpu")
        self.tables = RowTables(len(params), 64, 4, 1, device)
        self.sampler = Sampler(self.tables)
        self.params = params
        self.histories = [[10 * i + j for j in range(PROMPT)] for i in range(len(params))]
        new = [
            NewRow(i, i, pack_tokens(tokens), PROMPT, 0, p)
            for i, (tokens, p) in enumerate(zip(self.histories, params, strict=True))
        ]
        upload = Upload()
        writes = self.tables.stage(StepPlan(0, [], [], [], [], 0, new, [[]]), upload)
        self.tables.apply(writes, upload.send(device))

    def sample(self, logits: torch.Tensor) -> Samples:
        """All rows, in an order of their own; each gets the token 7 as its next."""
        rows = list(range(len(self.params)))
        random.Random(3).shuffle(rows)
        lengths = [len(self.histories[row]) for row in rows]
        plan = StepPlan(
            0, rows, [1] * len(rows), [n - 1 for n in lengths], list(range(len(rows))), len(rows), [], [[]]
        )  # fmt: skip
        mine = logits[rows].clone()
        index = np.array(rows, np.int32)
        batch = SampleBatch(plan, torch.from_numpy(index), index, torch.tensor(lengths, dtype=torch.int32))
        self.order, samples = rows, self.sampler(mine, batch)
        self.logits = torch.empty_like(mine)
        self.logits[rows] = mine
        for row in rows:
            self.tables.history.pages.view(len(self.params) + 1, -1)[row, len(self.histories[row])] = 7
            self.histories[row].append(7)
        return samples


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what goes to the device."""
    sizes: list[int] = []
    add = Upload.add

    def noted(self: Upload, values: np.ndarray | list[int]) -> int:
        sizes.append(np.asarray(values).size)
        return add(self, values)

    monkeypatch.setattr(Upload, "add", noted)
    return sizes


def greedy(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "temperature": 0.0, "eos_token_ids": (2,), **options})


def test_a_bias_is_laid_out_once(uploads) -> None:
    rng = random.Random(1)
    biases = [{t: rng.gauss(0, 9) for t in rng.sample(range(VOCAB), 300)} for _ in range(64)]
    rows = Rows(*(greedy(logit_bias=bias) for bias in biases))
    logits = torch.randn(64, VOCAB)
    uploads.clear()
    for _ in range(6):
        rows.sample(logits)
        expected = logits.clone()
        for i, bias in enumerate(biases):
            expected[i, list(bias)] += torch.tensor(list(bias.values()))
        torch.testing.assert_close(rows.logits, expected)
    large = [size for size in uploads if size > 200]
    assert large == [600] * 64, "more than once"


def test_bias_and_ends_that_come_too_early() -> None:
    """What would end a request is forbidden below min_tokens, whatever its bias says, and biased afterwards."""
    params = [
        greedy(logit_bias={2: 5.0, 8: -3.0}, min_tokens=2, stop_token_ids=(9, VOCAB + 5)),
        greedy(min_tokens=1, ignore_eos=True, stop_token_ids=(4,)),
        greedy(logit_bias={1: 1.0}),
        greedy(),
    ]
    rows, logits = Rows(*params), torch.zeros(4, VOCAB)
    for num_outputs in range(4):
        rows.sample(logits)
        seen = [{t: row[t].item() for t in row.nonzero().flatten().tolist()} for row in rows.logits]
        never = -float("inf")
        held = {2: never, 8: -3.0, 9: never} if num_outputs < 2 else {2: 5.0, 8: -3.0}
        assert seen == [held, {4: never} if num_outputs < 1 else {}, {1: 1.0}, {}]


def test_a_row_that_goes_to_another_request_has_the_others_bias() -> None:
    rows = Rows(greedy(logit_bias={1: 1.0}))
    rows.sample(torch.zeros(1, VOCAB))
    rows.tables.sampling[0] = greedy(logit_bias={5: 2.0})
    rows.sample(torch.zeros(1, VOCAB))
    assert rows.logits[0].nonzero().flatten().tolist() == [5]


def test_penalties_are_counted_for_those_who_ask(monkeypatch) -> None:
    """In one place, that is kept and bounded."""
    seen: list[tuple[list[int], torch.Tensor]] = []
    real = sampler_module.apply_penalties

    def noted(logits, token_ids, rows, *others):
        index, counts = others[-2:]
        seen.append((rows[index.long()].tolist(), counts))
        real(logits, token_ids, rows, *others)

    monkeypatch.setattr(sampler_module, "apply_penalties", noted)
    asking = {3, 17, 100}
    rows = Rows(*(greedy(frequency_penalty=1.0 * (i in asking)) for i in range(130)))
    logits = torch.zeros(130, VOCAB)
    for num_outputs in range(3):
        rows.sample(logits)
        for i in range(130):
            assert rows.logits[i, 7].item() == (-num_outputs if i in asking else 0)
            assert not rows.logits[i, :7].any()
    assert [set(chosen) for chosen, _ in seen] == [asking] * 3
    places = [counts for _, counts in seen]
    assert places[0] is places[1] is places[2] and places[0].shape == (COUNT_ROWS, VOCAB)


def test_one_launch_a_kind_however_many_rows(monkeypatch) -> None:
    """64 rows of everything: the number of calls does not depend on how many rows ask."""
    calls: dict[str, int] = {}
    for name in ("apply_logit_bias", "apply_token_mask", "apply_bad_words", "apply_penalties"):
        real = getattr(sampler_module, name)

        def counted(*args, _name=name, _real=real):
            calls[_name] = calls.get(_name, 0) + 1
            _real(*args)

        monkeypatch.setattr(sampler_module, name, counted)
    params = greedy(
        logit_bias={5: 1.0}, presence_penalty=0.5, bad_words=((5,), (6, 7)), allowed_token_ids=tuple(range(100))
    )
    rows = Rows(*[params] * 64)
    rows.sample(torch.zeros(64, VOCAB))
    assert calls == dict.fromkeys(calls, 1) and len(calls) == 4


def test_named_tokens_take_the_place_of_the_likeliest() -> None:
    """Of the rows that name some; a step's other rows have what they asked for."""
    rows = Rows(
        SamplingParams(max_tokens=9, logprobs=3, logprob_token_ids=(5, 2999, 5), logit_bias={5: 50.0}),
        SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, logprobs=4),
    )  # fmt: skip
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(dim=-1)
    samples = rows.sample(logits)
    assert samples.logprobs is not None and samples.logprob_rows is not None
    _, _, ids, tops = samples.logprobs
    named, free = ([rows.order[i] for i in samples.logprob_rows].index(row) for row in (0, 2))
    assert ids[named, :3].tolist() == [5, 2999, 5]
    torch.testing.assert_close(tops[named, :3], expected[0, [5, 2999, 5]])
    torch.testing.assert_close(tops[free], expected[2].topk(4).values)
    assert ids[free].tolist() == expected[2].topk(4).indices.tolist()
    problem = SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=(VOCAB,)).problem(VOCAB)
    assert problem == "logprob_token_ids has the token id 3000; the vocabulary ends at 2999"
    assert "2 ids, and logprobs is 1" in str(
        SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=(1, 2)).problem(9)
    )
