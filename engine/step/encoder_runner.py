"""Steps of whole texts: packed, computed, pooled. What ModelRunner is for models with a cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_layout import KVLayout
from ..families.layer_spec import KVSpec
from ..layers.packed import Packed
from ..link.plan import NewRow, StepPlan, StepResult
from ..link.sampling_params import ALL, CLS, LAST, MEAN, Pooling, SamplingParams
from ..models.encoder import Encoder
from .compilations import LateCompilations
from .mask import TokenMask
from .prompt_results import Pooled

LATE = "late"  # see HeadSpec.pooled
HEADED = Pooling(MEAN, head=True)
WARM_UP = (2048, 1024, 512, 256, 128, 96, 64, 32, 17, 16, 8, 4, 2, 1)  # tokens of steps


@dataclass
class Pending:
    """A step whose vectors are on their way to the host."""

    plan: StepPlan
    pooled: Pooled
    vectors: Tensor
    order: list[int]  # of the plan's rows, as they were computed
    started: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def wait(self) -> StepResult:
        """Blocks until it is over, without holding the interpreter's lock."""
        if self.events is not None:
            begin, end = self.events
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
        else:
            seconds = time.perf_counter() - self.started
        found = dict(zip(self.order, self.pooled.embeddings(self.vectors), strict=True))
        return StepResult(
            self.plan.step, [], device_seconds=seconds, embeddings=[found[index] for index in self.plan.pooled]
        )


class EncoderRunner:
    """A plan's rows are all new and whole: nothing is kept from one step to the next."""

    num_graph_misses = 0  # there are no graphs

    def __init__(self, model: Any, max_model_len: int, device: torch.device) -> None:
        """model: an Encoder, or a CausalLM that attends both ways."""
        self.model, self.device, self.max_model_len = model, device, max_model_len
        self.head = model.pooling_head
        self.layout = KVLayout.of([KVSpec(1, 1, 1)], max_model_len, max_model_len)  # a text takes one block, of nothing
        self._late = LateCompilations()
        self._pending: Pending | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Launches the step. `sample` must follow."""
        if plan.sampled:
            raise ValueError("this model generates no text")
        started, begin = time.perf_counter(), self._record()
        rows = {row.row: row for row in plan.new_rows}
        # Neighbours of equal length share a call of attention where there is no kernel for different ones.
        order = sorted(plan.pooled, key=plan.num_tokens.__getitem__)
        texts = [rows[plan.rows[index]] for index in order]
        states, batch = self._states(texts)
        poolings = [self._pooling(row.sampling) for row in texts]
        pooled = self._pool(states, batch, poolings)
        host = pooled.vectors.to("cpu", non_blocking=True)
        end = self._record()
        events = None if begin is None or end is None else (begin, end)
        self._pending = Pending(plan, pooled, host, order, started, events)

    def sample(self, mask: TokenMask | None = None) -> Pending:
        """The step's vectors: nothing is sampled."""
        assert self._pending is not None, "sample() without execute()"
        pending, self._pending = self._pending, None
        return pending

    @property
    def num_late_compilations(self) -> int:
        return len(self._late)

    def count_compilations(self) -> None:
        """From here on every kernel should be ready."""
        self._late.count()

    def warm_up(self) -> None:
        """Few tokens and many: other kernels multiply them."""
        for num_tokens in WARM_UP if self.device.type == "cuda" else (4,):
            self.dummy_step(-(-num_tokens // self.max_model_len), num_tokens)

    @property
    def largest_pooling(self) -> Pooling:
        """Of those that may be asked of this model, the one with the largest results."""
        spec = None if self.head is None else self.head.spec
        if spec is None or spec.task == "embed":
            return Pooling(ALL, normalize=False)
        return Pooling(ALL if spec.by_token else MEAN, head=True)

    def dummy_step(self, num_texts: int, num_tokens: int, pooling: Pooling = HEADED) -> None:
        """A step of so many texts, about equally long."""
        lengths = [min(len(part), self.max_model_len) for part in np.array_split(np.arange(num_tokens), num_texts)]
        sampling = SamplingParams(max_tokens=1, pooling=pooling)
        rows = [NewRow(i, 0, bytes(4 * n), n, 0, sampling) for i, n in enumerate(lengths) if n]
        every = list(range(len(rows)))
        self.execute(StepPlan(-1, every, [row.num_prompt_tokens for row in rows], [0] * len(rows), [], 0, rows, [],
                              pooled=every))  # fmt: skip
        self.sample().wait()

    def _states(self, texts: Sequence[NewRow]) -> tuple[Tensor, Packed]:
        """Hidden states of all tokens, text by text."""
        lengths = [row.num_prompt_tokens for row in texts]
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        header = [np.frombuffer(b"".join(row.token_ids for row in texts), np.int32), positions, np.append(0, ends)]
        seconds = [self._pooling(row.sampling).second for row in texts]
        if any(seconds) and isinstance(self.model, Encoder) and self.model.spec.token_types > 1:
            header.append(positions >= np.repeat([second or length for second, length in zip(seconds, lengths,
                                                  strict=True)], lengths))  # fmt: skip
        host = torch.from_numpy(np.concatenate(header).astype(np.int32))
        if self.device.type == "cuda":
            host = host.pin_memory()  # or the copy would wait for the step before, and the host with it
        flat = host.to(self.device, non_blocking=True)
        ids, places, starts, *rest = flat.split([len(part) for part in header])
        types = rest[0] if rest else None
        batch = Packed(lengths, starts)
        if isinstance(self.model, Encoder):
            return self.model(ids, places, batch, types), batch
        return self.model(ids, places, batch), batch

    def _pool(self, states: Tensor, batch: Packed, poolings: Sequence[Pooling]) -> Pooled:
        starts = batch.starts.long()
        kinds = [self._kind(pooling) for pooling in poolings]
        found: list[Tensor] = [states] * len(kinds)
        if MEAN in kinds:
            means = torch.segment_reduce(states.float(), "mean", offsets=starts, axis=0, unsafe=True)
        for kind, rows in ((CLS, starts[:-1]), (LAST, starts[1:] - 1)):
            if kind in kinds:
                picked = states.index_select(0, rows).float()
                for i in (i for i, one in enumerate(kinds) if one == kind):
                    found[i] = picked[i : i + 1]
        ends = np.cumsum(batch.lengths).tolist()
        for i, kind in enumerate(kinds):
            if kind == MEAN:
                found[i] = means[i : i + 1]
            elif kind in (ALL, LATE):  # as they are: what they go into makes them fp32
                found[i] = states[ends[i] - batch.lengths[i] : ends[i]]
        through = [i for i, pooling in enumerate(poolings) if pooling.head]
        if self.head is not None and through:
            sizes = [len(found[i]) for i in through]
            parts = self.head(_joined([found[i] for i in through])).split(sizes)
            for i, part in zip(through, parts, strict=True):
                found[i] = part.mean(0, keepdim=True) if kinds[i] == LATE else part
        return Pooled(_joined([one.flatten() for one in found]), [one.numel() for one in found], list(poolings))

    def _kind(self, pooling: Pooling) -> str:
        """What classes are made of, the model says."""
        if pooling.kind == ALL or not pooling.head or self.head is None:
            return pooling.kind
        return self.head.spec.pooled or pooling.kind

    @staticmethod
    def _pooling(sampling: SamplingParams) -> Pooling:
        assert sampling.pooling is not None, "the server lets nobody generate"
        return sampling.pooling

    def _record(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event


def _joined(parts: list[Tensor]) -> Tensor:
    """One after the other, in fp32 whatever they are, without a copy of any in between."""
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=parts[0].new_empty(shape, dtype=torch.float32))
