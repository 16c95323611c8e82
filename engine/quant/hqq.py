"""HQQ: zero points that are any number, and codes packed across the groups of the flattened matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .format import DUMMY_STD, Stored
from .settings import SCALES, Headers, entries, flag, group_size, last, listed, names, number, value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

STORED_BITS = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1: 1}  # nbits → bits that a code takes in the file
# Codes in a byte or, for 3 bits, in an int32: the first in the highest bits that are used.
PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
# What lies beside the matrix and says again how it is stored.
AXIS, BITS, SHAPE, FLAGS = "axis", "nbits", "shape", ("quant_scale", "quant_zero", "view_as_float")
BESIDE = (
    AXIS, BITS, SHAPE, *FLAGS, "group_size", "packing", "unpack_view_dtype", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
AGAIN = "quantize the model again with axis=1, without quant_scale, quant_zero and view_as_float"


@dataclass(frozen=True)
class Hqq:
    """w = (code - zero) · scale. The matrix is seen as [N · K / group, group]; a word holds a code of distant rows."""

    bits: int
    group: int | None = 64  # None: one scale a row
    beside: tuple[tuple[str, Stored], ...] = ()

    @property
    def name(self) -> str:
        return f"HQQ int{self.bits} G={'channel' if self.group is None else self.group}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        group, per_word = self.group or columns, PER_WORD[self.bits]
        groups = rows * columns // group
        if rows * columns % group or (self.bits != 3 and groups % per_word):
            raise ModelError(
                f"HQQ packs {per_word} groups of {group} into one of bytes, a matrix [{rows}, {columns}] has "
                f"{rows * columns / group:g} groups: {AGAIN}, and another group_size"
            )
        packed = (-(-groups // per_word), group)
        return {
            "W_q": Stored(packed, ("I32" if self.bits == 3 else "U8",)),
            "scale": Stored((groups, 1), SCALES),
            "zero": Stored((groups, 1), SCALES),
            **dict(self.beside),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes
        from .integers import fields, flat_groups

        self._check(tensors, rows, columns)
        shifts = [self.bits * i for i in reversed(range(PER_WORD[self.bits]))]
        codes = fields(tensors["W_q"], self.bits, shifts, 0).flatten()[: rows * columns].view(rows, columns)
        size = self.group or columns
        scales, group = flat_groups(tensors["scale"].float(), size, rows, columns)
        zeros, _ = flat_groups(tensors["zero"].float(), size, rows, columns)
        return Codes(codes, scales, group, self.bits, zeros=zeros)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes
        from .integers import flat_groups

        self.expected(rows, columns)
        count, size = 1 << self.bits, self.group or columns
        codes = torch.randint(
            0, count, (rows, columns), dtype=torch.uint8, generator=generator, device=generator.device
        )
        flat = torch.full((rows * columns // size,), DUMMY_STD * (12 / (count**2 - 1)) ** 0.5, device=generator.device)
        scales, group = flat_groups(flat, size, rows, columns)
        return Codes(codes, scales, group, self.bits, zeros=torch.full_like(scales, (count - 1) / 2))

    def _check(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> None:
        for suffix, wanted in ((AXIS, 1), *((suffix, 0) for suffix in FLAGS)):
            if suffix in tensors and (found := _one(tensors[suffix])) != wanted:
                raise ModelError(f"{suffix} is {found} in the checkpoint, read is {wanted}: {AGAIN}")
        bits = _one(tensors[BITS]) if BITS in tensors else self.bits
        if STORED_BITS.get(bits) != self.bits:
            raise ModelError(
                f"nbits is {bits} in the checkpoint, W_q's shape is that of {self.bits} bits: download it again"
            )
        if SHAPE in tensors and (shape := tensors[SHAPE].tolist()) != [rows, columns]:
            raise ModelError(
                f"shape is {shape} in the checkpoint, config.json makes the matrix {[rows, columns]}: the weights and "
                "the config are not of one model, download both again"
            )


def _one(tensor: Tensor) -> Any:
    """The number in it, or the list of its numbers where they are several, which is none of those that are read."""
    return tensor.item() if tensor.numel() == 1 else str(tensor.tolist())


class HqqScheme:
    """quant_method hqq: of transformers."""

    method = "hqq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        params = value(config, "quant_config", default={})
        if not isinstance(params, dict) or not params:
            raise ModelError(
                f"quantization_config: quant_config is {params!r:.60}, an object with weight_quant_params belongs "
                "there: correct config.json"
            )
        self.kept = ("lm_head",) if config.get("skip_modules") is None else names(config, "skip_modules")
        self.base: Hqq | None = None
        self.layers: dict[str, Hqq] = {}  # by the module's path without "model", "layers" and numbers
        if "weight_quant_params" in params:
            self.base = _read(params)
        else:
            self.layers = {tag: _read(entry) for tag, entry in entries(config, "quant_config").items()}

    def format(self, path: str, stored: Headers | None) -> Hqq | None:
        if stored is not None:
            return _find(path, stored) if "W_q" in stored else None
        if any(name in path for name in self.kept) or last(path) == "embed_tokens":
            return None
        parts = [part for part in path.split(".") if part not in ("model", "layers") and not part.isnumeric()]
        return self.layers.get(".".join(parts), self.base)


def _read(params: Mapping[str, Any]) -> Hqq:
    weights = params.get("weight_quant_params")
    if not isinstance(weights, dict):
        raise ModelError(
            f"quantization_config: weight_quant_params is {weights!r:.60}, an object belongs there: correct config.json"
        )
    number(weights, "axis", among=(1,), default=0)
    flag(weights, "view_as_float", False)
    bits = STORED_BITS[number(weights, "nbits", among=tuple(STORED_BITS), default=4)]
    return Hqq(bits, None if weights.get("group_size", 64) is None else group_size(weights, "group_size", default=64))


def _find(path: str, stored: Headers) -> Hqq:
    """Bits and groups from the shapes alone. Raises ModelError where they are none that is read."""
    dtype, shape = stored["W_q"]
    groups = stored["scale"][1] if "scale" in stored else ()
    if dtype in ("U8", "I32") and len(shape) == 2 and len(groups) == 2 and groups[1] == 1:
        for bits, per_word in PER_WORD.items():
            if (dtype == "I32") == (bits == 3) and -(-groups[0] // per_word) == shape[0]:
                beside = tuple((s, Stored(stored[s][1], (stored[s][0],), optional=True)) for s in BESIDE if s in stored)
                return Hqq(bits, shape[1], beside)
    raise ModelError(
        f"{path}.W_q is {dtype} {list(shape)} and its scale {list(groups)}; HQQ's bits along the input "
        f"that are read {listed(PER_WORD)}: {AGAIN}"
    )
