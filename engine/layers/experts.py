"""The experts of a mixture: many small gated MLPs, of which each token goes through a few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.experts.gating import GELU, RELU2
from ...kernels.experts.moe import ExpertWeights, experts
from ...kernels.experts.moe_lora import ExpertLora
from ..describe.divide import whole_experts
from ..errors import ModelError
from ..families.layer_spec import MoESpec
from ..quant.codes import Codes
from ..quant.decoded import decoded, finite
from ..quant.eight_bits import Fp8
from ..quant.experts import Biases, ExpertsMethod, PackedExperts, QuantizedExperts
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.fp4 import decode_experts
from ..quant.online import Online
from ..quant.settings import SCALES
from ..quant.weights import Placement, copy_weight, keep_at_hand

PARTS = ("gate", "up", "down")
UNGATED = PARTS[1:]
KINDS = {"gelu_tanh": GELU, "relu2": RELU2}  # activations that a number below 0 says
STACKED = "stacked"  # the part of a file that has all experts in one tensor
CODES_ON = ("cpu",)  # where each matrix of codes is a module of its own


class Adapter(Protocol):
    """What low-rank adapters add to the experts' products; see engine/adapters/tables.py."""

    @property
    def lora(self) -> ExpertLora | None:
        """Of this rank's experts and the tokens of the step under way; None: no adapter changes anything here."""
        ...


class Experts(nn.Module):
    """Σ_k w_k · expert_k(x). Ranks divide every expert like an MLP, gate and up by rows, down by columns; or they hold
    some of the experts each, which is decided when it is known how these are stored (`whole_experts`)."""

    method: ExpertsMethod

    def __init__(self, spec: MoESpec, hidden: int, place: Placement) -> None:
        super().__init__()
        self.spec, self.hidden, self.place = spec, hidden, place
        self.num_experts = spec.routing.num_experts
        self.mine = range(self.num_experts)  # the experts of this rank
        self.span = (0, spec.inner)  # (first, number) of their gates that it has
        self.parts = PARTS if spec.gated else UNGATED
        assert spec.gated or not (spec.bias or spec.stored), "no model has it so"
        self.formats: dict[str, Format] = {}
        self.biases: tuple[Tensor | None, Tensor | None] = (None, None)
        self.adapter: Adapter | None = None

    def weight_map(self, prefix: str) -> dict[str, tuple[Experts, str]]:
        if self.spec.stored:
            return {prefix: (self, STACKED)}
        return {
            f"{prefix}.{expert}.{part}_proj": (self, f"{expert}.{part}")
            for expert in range(self.num_experts)
            for part in self.parts
        }

    def choose(self, formats: Mapping[str, Format]) -> None:
        # Kernels of codes have gates: what a checkpoint has as codes becomes numbers, and what is numbers stays so.
        online = any(isinstance(format, Online) for format in formats.values())
        self.formats = {} if online and not self.spec.gated else dict(formats)
        place, size = self.place, self.place.tp_size
        if whole_experts(self.num_experts, self.spec.inner, size, bool(formats), place.whole_experts):
            first, count = place.span(self.num_experts)
            self.mine = range(first, first + count)
        else:
            self.span = place.span(self.spec.inner)

    def expected(self, part: str) -> dict[str, Stored]:
        format = self.formats.get(part)
        if part == STACKED:
            return self._expected_stacked()
        rows, columns = self.shape_of(part.partition(".")[2])
        found = {"weight": Stored((rows, columns), FLOATS)} if format is None else format.expected(rows, columns)
        return found | {"bias": Stored((rows,), FLOATS)} if self.spec.bias else found

    def create(self) -> None:
        inner, place = self.span[1], self.place
        if self.spec.bias:
            biases = place.empty(len(self.mine), 2 * inner), place.empty(len(self.mine), self.hidden)
            self.gate_up_bias, self.down_bias = self.biases = biases
        if self.formats and not self.spec.gated:
            self.method = self._numbers()
        elif self.formats and place.device.type in CODES_ON:
            self.method = QuantizedExperts(len(self.mine), place, self._limit)
        elif self.formats:
            self.method = PackedExperts(len(self.mine), self.num_experts, place, self._limit, self._numbers)
        else:
            self.method = self._numbers()

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if part == STACKED:
            self._load_stacked(tensors)
            return
        number, _, name = part.partition(".")
        expert, format = int(number), self.formats.get(part)
        if expert not in self.mine:
            return
        if format is None:
            self._take(expert, name, tensors["weight"])
        else:
            cut = self.span[1] < self.spec.inner
            self._take(expert, name, decoded(format, tensors, *self.shape_of(name), self.place.device, cut))
        if self.spec.bias:
            self._take_bias(expert, name, tensors["bias"])

    def finish(self) -> None:
        self.method.finish()
        keep_at_hand(self)

    def randomize(self, generator: torch.Generator) -> None:
        for expert in self.mine:
            for name in self.parts:
                shape = self.shape_of(name)
                format = self.formats.get(f"{expert}.{name}") or self.formats.get(STACKED)
                if format is None:
                    matrix = self.place.empty(*shape).data
                    self._take(expert, name, matrix.normal_(0.0, DUMMY_STD, generator=generator))
                else:
                    self._take(expert, name, format.dummy(*shape, generator))
        for bias in self.biases:
            if bias is not None:
                bias.normal_(0.0, DUMMY_STD, generator=generator)

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, beside: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, hidden], ids int32 and weights fp32 [T, k] → [T, hidden], this rank's summand. `beside` is added.
        residual [T, hidden]: is added to, and returned.

        ids count from this rank's first expert on; where they are another's, the weight is 0, the id one past the last.
        """
        lora = None if self.adapter is None else self.adapter.lora
        return self.method.mix(x, ids, weights, self.biases, beside, lora, residual)

    @property
    def quantised(self) -> Counter[str]:
        """Names of formats, by how many matrices have them."""
        found = Counter(format.name for part, format in self.formats.items() if part != STACKED)
        whole = self.formats.get(STACKED)
        return found if whole is None else Counter({whole.name: len(self.parts) * self.num_experts})

    @property
    def _limit(self) -> float:
        """As of kernels/experts/gating.py."""
        if self.spec.activation in KINDS:
            return KINDS[self.spec.activation]
        return self.spec.limit if self.spec.activation == "clamped" else 0.0

    def _numbers(self) -> UnquantizedExperts:
        sizes = len(self.mine), self.num_experts, self.hidden, self.span[1]
        return UnquantizedExperts(*sizes, self.place, self._limit)

    def shape_of(self, name: str) -> tuple[int, int]:
        """[N, K] of the whole matrix of an expert's gate, up or down."""
        return (self.hidden, self.spec.inner) if name == "down" else (self.spec.inner, self.hidden)

    def _take(self, expert: int, name: str, whole: Tensor | Codes) -> None:
        start, size = self.span
        if isinstance(whole, Tensor):
            share: Tensor | Codes = whole.narrow(1 if name == "down" else 0, start, size)
        elif name != "down":
            share = whole.rows(start, size)
        else:
            share = whole if size == whole.shape[1] else whole.ordered().columns(start, size)
        share = share if isinstance(share, Tensor) else share.to(self.place.device)
        self.method.take(expert - self.mine.start, name, share)

    def _take_bias(self, expert: int, name: str, whole: Tensor) -> None:
        gate_up, down = self.biases
        assert gate_up is not None and down is not None
        start, size = self.span
        whole_matrix = size == self.spec.inner
        expert -= self.mine.start
        if name != "down":
            gate_up[expert].narrow(0, size if name == "up" else 0, size).copy_(whole.narrow(0, start, size))
        elif whole_matrix or self.place.tp_rank == 0:
            down[expert].copy_(whole)
        else:
            down[expert].zero_()  # the ranks' results are summed: only the first adds the bias

    def _expected_stacked(self) -> dict[str, Stored]:
        size, (first, second) = self.num_experts, self.spec.stacked_names
        shapes = {first: (2 * self.spec.inner, self.hidden), second: (self.hidden, self.spec.inner)}
        found = {}
        for name, (rows, columns) in shapes.items():
            if self.spec.stored == "blocks":
                if STACKED not in self.formats:
                    raise ModelError(
                        "experts are stored as MXFP4 blocks, and config.json has no quantization_config that says so: "
                        "take the config.json that came with these weights"
                    )
                self.formats[STACKED].expected(rows, columns)  # raises where there are no whole groups
                found[f"{name}_blocks"] = Stored((size, rows, columns // 32, 16), ("U8",))
                found[f"{name}_scales"] = Stored((size, rows, columns // 32), ("U8",))
            elif isinstance(format := self.formats.get(STACKED), Fp8):
                blocks = format.scales.blocks(rows, columns)
                found[name] = Stored((size, rows, columns), ("F8_E4M3",))
                found[f"{name}_scale_inv"] = Stored((size, *blocks), SCALES)
                found[f"{name}_activation_scale"] = Stored((size,), SCALES, optional=True)  # a token's own is used
            else:
                shape = (rows, columns) if self.spec.stored == "stacked" else (columns, rows)
                found[name] = Stored((size, *shape), FLOATS)
            if self.spec.bias:
                found[f"{name}_bias"] = Stored((size, rows), FLOATS)
        return found

    def _load_stacked(self, tensors: Mapping[str, Tensor]) -> None:
        first, second = self.spec.stacked_names
        for expert in self.mine:
            for name, matrix in self._matrices(tensors, expert):
                self._take(expert, name, matrix)
            if self.spec.bias:
                biases = *self._halves(tensors[f"{first}_bias"][expert]), ("down", tensors[f"{second}_bias"][expert])
                for name, bias in biases:
                    self._take_bias(expert, name, bias)

    def _matrices(self, tensors: Mapping[str, Tensor], expert: int) -> Iterator[tuple[str, Tensor | Codes]]:
        """One expert's, of tensors that have all of them."""
        first, second = self.spec.stacked_names
        format, inner = self.formats.get(STACKED), self.spec.inner
        if self.spec.stored == "blocks":
            both = self._decoded_blocks(tensors, first, expert)
            yield "gate", both.rows(0, inner)
            yield "up", both.rows(inner, inner)
            yield "down", self._decoded_blocks(tensors, second, expert)
            return
        if isinstance(format, Fp8):
            both = self._decoded_fp8(format, tensors, first, expert, 2 * inner, self.hidden)
            yield "gate", both.rows(0, inner)
            yield "up", both.rows(inner, inner)
            yield "down", self._decoded_fp8(format, tensors, second, expert, self.hidden, inner)
            return
        gate_up, down = (tensors[name][expert] for name in (first, second))
        if self.spec.stored == "transposed":
            gate_up, down = gate_up.t(), down.t()
        for name, matrix in (*self._halves(gate_up), ("down", down)):
            if format is None:
                yield name, matrix
            else:
                yield name, decoded(format, {"weight": matrix}, *self.shape_of(name), self.place.device)

    def _decoded_blocks(self, tensors: Mapping[str, Tensor], name: str, expert: int) -> Codes:
        """One expert's MXFP4; of gate and up, the rows of gate first."""
        one = slice(expert, expert + 1)
        blocks, scales = (tensors[f"{name}_{kind}"][one].to(self.place.device) for kind in ("blocks", "scales"))
        alternating = self.spec.interleaved and name == self.spec.stacked_names[0]
        return finite(decode_experts(blocks, scales, alternating)[0], {f"{name}_scales": scales})

    def _decoded_fp8(
        self, format: Fp8, tensors: Mapping[str, Tensor], name: str, expert: int, rows: int, columns: int
    ) -> Codes:
        one = {"weight": tensors[name][expert], format.scales.suffix: tensors[f"{name}_scale_inv"][expert]}
        return decoded(format, one, rows, columns, self.place.device)

    def _halves(self, both: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Rows of gate and up of one tensor."""
        gate, up = (both[::2], both[1::2]) if self.spec.interleaved else both.chunk(2)
        yield "gate", gate
        yield "up", up


class UnquantizedExperts(nn.Module):
    """The matrices as numbers in the activations' dtype, gate and up of an expert one matrix, or up alone."""

    def __init__(self, num_experts: int, of: int, hidden: int, inner: int, place: Placement, limit: float) -> None:
        """num_experts of all ranks' `of`."""
        super().__init__()
        self.of, self.inner, self.limit, self.dtype = of, inner, limit, place.dtype
        self.gate_up = _empty(place, num_experts, inner if limit == RELU2 else 2 * inner, hidden)
        self.down = _empty(place, num_experts, hidden, inner)

    def take(self, expert: int, part: str, matrix: Tensor | Codes) -> None:
        if isinstance(matrix, Codes):
            matrix = matrix.numbers(self.dtype)
        if part == "down":
            target = self.down[expert]
        else:
            second = part == "up" and self.limit != RELU2
            target = self.gate_up[expert].narrow(0, self.inner if second else 0, self.inner)
        copy_weight(target, matrix)

    def finish(self) -> None:
        keep_at_hand(self)

    def products(self) -> Counter[str]:
        return Counter({"16-bit products, dequantised": 2 * len(self.down)})

    def mix(
        self, x: Tensor, ids: Tensor, weights: Tensor, biases: Biases, beside: Tensor | None,
        lora: ExpertLora | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        matrices = ExpertWeights(self.gate_up, self.down, *biases)
        return experts(x, ids, weights, matrices, self.limit, beside, self.of, lora, residual)


def _empty(place: Placement, num_experts: int, rows: int, columns: int) -> nn.Parameter:
    """[E, N, K]; on the CPU stored column by column, where a product with one row streams through the matrix."""
    if place.device.type != "cpu":
        return place.empty(num_experts, rows, columns)
    weight = place.empty(num_experts, columns, rows)
    weight.data = weight.data.transpose(1, 2)
    return weight
