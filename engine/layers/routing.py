"""The router of a mixture: a product that says which experts a token goes to, and counts of how many each got."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.experts.moe_route import Routing, route
from ...kernels.experts.moe_router import norm_router, norm_router_rows
from ...kernels.norm.norm import Unnormed
from ..families.layer_spec import RoutingSpec
from ..quant.decoded import decoded
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.weights import Placement, frozen, keep_at_hand

CORRECTION = "correction"  # the part of a file that has it, where that is not the router's


class Router(nn.Module):
    """x [T, hidden] → itself, experts int32 [T, k] and weights fp32 [T, k]. Every rank holds and computes all of it.

    Logits are fp32 sums, never rounded: near ties would send tokens to other experts. The correction is fp32 in every
    model: of 256 experts, many differ by less than bf16 can say.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: nn.Parameter | None
    counted: ExpertLoad | None = None  # where tokens are counted, in the row `layer`
    layer = 0
    norm_rows = 0  # up to how many rows x may be Unnormed

    def __init__(self, spec: RoutingSpec, hidden: int, place: Placement) -> None:
        super().__init__()
        self.spec, self.hidden, self.place = spec, hidden, place
        self.dtype = torch.float32 if spec.fp32 or place.device.type == "cpu" else place.dtype
        self.how = Routing(
            spec.top_k, spec.score, spec.num_groups, spec.kept_groups, spec.group_score, spec.softmax_chosen,
            spec.renormalize, spec.epsilon, spec.factor,
        )  # fmt: skip

    def choose(self, formats: Mapping[str, Format]) -> None:
        self._format = formats.get("")

    def weight_map(self, prefix: str) -> dict[str, tuple[Router, str]]:
        """prefix: of what has router and experts."""
        found, spec = {f"{prefix}.router": (self, "")}, self.spec
        return found | {prefix: (self, CORRECTION)} if spec.correction_apart else found

    def expected(self, part: str) -> dict[str, Stored]:
        size = self.spec.num_experts
        correction = {self.spec.correction_name: Stored((size,), FLOATS)} if self.spec.correction else {}
        if part == CORRECTION:
            return correction
        found = {"weight": Stored((size, self.hidden), FLOATS)}
        if self._format is not None:
            found = dict(self._format.expected(size, self.hidden))
        if self.spec.bias:
            found["bias"] = Stored((size,), FLOATS)
        return found if self.spec.correction_apart else found | correction

    def create(self) -> None:
        size, device = self.spec.num_experts, self.place.device

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return frozen(torch.empty(shape, dtype=dtype, device=device))

        self.weight = empty(size, self.hidden, dtype=self.dtype)
        self.bias = empty(size) if self.spec.bias else None
        self.correction = empty(size) if self.spec.correction else None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if self.correction is not None and self.spec.correction_name in tensors:
            self.correction.copy_(tensors[self.spec.correction_name])
        if part == CORRECTION:
            return
        if self._format is None:
            self.weight.copy_(tensors["weight"])
        else:
            codes = decoded(self._format, tensors, self.spec.num_experts, self.hidden, self.place.device)
            self.weight.copy_(codes.dequantize())
        if self.bias is not None:
            self.bias.copy_(tensors["bias"])

    def finish(self) -> None:
        self.norm_rows = 0 if self.spec.logit_cap else norm_router_rows(self.weight)
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0.0, DUMMY_STD, generator=generator)
        for vector in (self.bias, self.correction):
            if vector is not None:
                vector.normal_(0.0, DUMMY_STD, generator=generator)

    def norms(self, rows: int) -> bool:
        """As of a Reader (norm.py)."""
        return rows <= self.norm_rows

    def fp8_input(self, rows: int) -> None:
        return None

    def forward(self, x: Tensor | Unnormed, mine: range | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """mine: the experts of this rank; None: all. The first result: x as the experts take it, normed."""
        x, logits = norm_router(x, self.weight, self.bias) if isinstance(x, Unnormed) else (x, self._logits(x))
        if cap := self.spec.logit_cap:
            logits = logits.div_(cap).tanh_().mul_(cap)
        if self.counted is None or self.counted.query_start is None:
            return x, *route(logits, self.how, self.correction, mine=mine)
        counts, query_start = self.counted.layers[self.layer], self.counted.query_start
        return x, *route(logits, self.how, self.correction, counts, mine, query_start)

    def _logits(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float32:
            return functional.linear(x.float(), self.weight, self.bias)
        logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return logits if self.bias is None else logits.add_(self.bias)


def watch(routers: Sequence[Router | None], device: torch.device) -> ExpertLoad | None:
    """Has the routers count, each layer's or None; those with other numbers of experts than the first are left out."""
    found = [router for router in routers[:-1] if router is not None]
    alike = [router for router in found if router.spec.num_experts == found[0].spec.num_experts]
    if not alike:
        return None
    load = ExpertLoad(len(alike), alike[0].spec.num_experts, device)
    for index, router in enumerate(alike):
        router.counted, router.layer = load, index
    return load


WINDOW = 64  # tokens that an expert of a layer got on average: with fewer, chance alone makes one of them the busiest
EXPERT_SECONDS = 1.0  # between two looks at the counts


class ExpertLoad:
    """Of all layers that have a router but the last one, which sees no more tokens than are sampled from.

    Whole numbers, added in whatever order: steps are as they were. What pads a step is not counted.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        # Rows begin where Triton's variant for aligned pointers may be used.
        self._rows = torch.zeros(num_layers, num_experts + num_experts % 2, dtype=torch.int64, device=device)
        self.layers = list(self._rows[:, :num_experts])
        self.query_start: Tensor | None = None  # int32 [requests + 1], of the step whose tokens are routed

    @property
    def counts(self) -> Tensor:
        """int64 [layers, E], since the last `clear`."""
        return self._rows[:, : self.num_experts]

    def clear(self) -> None:
        self._rows.zero_()


class ExpertCounts(NamedTuple):
    tokens: tuple[int, ...] = ()  # of each expert, all layers together, since the start
    imbalance: float = 0.0  # tokens of a layer's busiest expert ÷ those of its average one, the mean over layers


class ExpertCounter:
    """Makes of counts what is told of them. The imbalance is that of the last window in which it says anything."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._imbalance, self._read = 0.0, 0.0

    def due(self, load: ExpertLoad | None) -> Tensor | None:
        """The counts on the device, where it is time to read them."""
        if load is None or time.monotonic() - self._read < EXPERT_SECONDS:
            return None
        self._read = time.monotonic()
        return load.counts

    def take(self, counts: Tensor) -> ExpertCounts:
        """counts int64 [layers, E] on the host, none less than before."""
        lately = counts if self._before is None else counts - self._before
        total = lately.sum(dim=1)
        if int(total.min()) >= WINDOW * counts.shape[1]:
            self._imbalance = float((lately.amax(dim=1) * counts.shape[1] / total).mean())
            self._before = counts.clone()
        return ExpertCounts(tuple(counts.sum(dim=0).tolist()), self._imbalance)
