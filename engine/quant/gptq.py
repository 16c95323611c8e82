"""GPTQ, AWQ as AutoAWQ's gemm version stores it, and AutoRound, which has the layouts of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .format import Stored
from .settings import (
    SCALES,
    Headers,
    entries,
    expression,
    flag,
    group_size,
    last,
    layout,
    names,
    number,
    other_layout,
    value,
    whole_groups,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes


BITS = (2, 3, 4, 8)  # GPTQModel has 5 to 7 too, in planes
TENSORS = ("qweight", "qzeros", "scales", "g_idx")
MARLIN = ("B", "s")  # what its files call qweight and scales


@dataclass(frozen=True)
class Gptq:
    """w = (code - zero) · scale. `version` 1 stores zero - 1, which wraps around in its bits; version 2 the zero.

    borrows: GPTQModel subtracts from whole words, so that below 0 a field takes 1 of its neighbour. 3 bits it does not.
    """

    bits: int
    group: int | None  # None: one scale a row
    symmetric: bool
    version: int = 1
    borrows: bool = False

    @property
    def name(self) -> str:
        group = "channel" if self.group is None else self.group
        return f"GPTQ int{self.bits} G={group}{'' if self.symmetric else ' asymmetric'}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            "qweight": Stored((-(-columns * self.bits // 32), rows), ("I32",)),
            "qzeros": Stored((groups, -(-rows * self.bits // 32)), ("I32",), optional=self.symmetric),
            "scales": Stored((groups, rows), SCALES),
            "g_idx": Stored((columns,), ("I32", "I64"), optional=True),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .integers import bit_stream, integer_codes

        codes = bit_stream(tensors["qweight"].t(), self.bits, columns)
        zeros = None
        if "qzeros" in tensors:
            in_words = self.version == 1 and self.borrows and self.bits != 3
            words = tensors["qzeros"] + (sum(1 << i for i in range(0, 32, self.bits)) if in_words else 0)
            zeros = bit_stream(words, self.bits, rows).t()
            if self.version == 1 and not in_words:
                zeros = (zeros + 1) & ((1 << self.bits) - 1)
        groups = None if self.group is None else tensors.get("g_idx")
        if groups is None:
            whole_groups(columns, self.group)
        scales, group = tensors["scales"].t(), self.group or columns
        return integer_codes(codes, scales, zeros, group, self.bits, self.symmetric, groups)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, self.bits, self.group or columns, self.symmetric, generator)


class GptqScheme:
    """quant_method gptq: of AutoGPTQ, GPTQModel and transformers."""

    method = "gptq"
    widths: Sequence[int] = BITS

    def __init__(self, config: Mapping[str, Any]) -> None:
        form = layout(config, "checkpoint_format", "format", among=("gptq", "gptq_v2"), default="gptq")
        self.version = 2 if form == "gptq_v2" else 1
        self.borrows = "gptqmodel" in str(value(config, "meta", default="")).lower()
        self.base = self._read(config)
        self.lm_head = flag(config, "lm_head", False)
        self.modules = names(config, "modules_in_block_to_quantize")
        self.kept = names(config, "modules_to_not_convert")
        # Ordered: the first that matches the start of a module's path counts. "-:": what it matches is not quantised.
        self.dynamic = [
            (
                expression(pattern.removeprefix("-:").removeprefix("+:"), "dynamic"),
                self._override(config, pattern, entry),
                _orders({**config, **entry}),
            )
            for pattern, entry in entries(config, "dynamic").items()
        ]
        self._orders_others = _orders(config)
        self.orders_columns = self._orders_others or any(ordered for *_, ordered in self.dynamic)

    def orders(self, path: str) -> bool:
        """Whether the configuration says that the module's columns have an order. g_idx, in its files, decides: this is
        for code that has to know it before."""
        ordered = next((ordered for pattern, _, ordered in self.dynamic if pattern.match(path)), self._orders_others)
        return ordered and self.format(path, None) is not None

    def format(self, path: str, stored: Headers | None) -> Gptq | None:
        matched = [override for pattern, override, _ in self.dynamic if pattern.match(path)]
        found = matched[0] if matched else self.base
        if stored is None:
            return found if self._quantised(path, bool(matched)) else None
        if all(suffix in stored for suffix in MARLIN):
            raise other_layout("Marlin")
        return (found or self.base) if any(suffix in stored for suffix in TENSORS) else None

    def _read(self, config: Mapping[str, Any]) -> Gptq:
        bits = number(config, "bits", among=self.widths)
        symmetric = flag(config, "sym", True)
        return Gptq(bits, group_size(config, "group_size", default=128), symmetric, self.version, self.borrows)

    def _override(self, config: Mapping[str, Any], pattern: str, entry: Mapping[str, Any]) -> Gptq | None:
        return None if pattern.startswith("-:") else self._read({**config, **entry})

    def _quantised(self, path: str, matched: bool) -> bool:
        """What the configuration says, where there are no files."""
        if last(path) == "embed_tokens":
            return False
        if last(path) == "lm_head":
            return self.lm_head or matched
        if any(name in path for name in self.kept):
            return False
        return not self.modules or any(path.endswith(name) for name in self.modules)


def _orders(config: Mapping[str, Any]) -> bool:
    """One group has no order, and of groups that were chosen beforehand (static_groups) the columns lie in theirs."""
    meta = value(config, "meta", default={})
    objects = (config, meta) if isinstance(meta, Mapping) else (config,)
    if any(values.get("static_groups") is True for values in objects):
        return False
    return flag(config, "desc_act", False) and group_size(config, "group_size", default=128) is not None


AWQ_BITS = 4
PER_WORD = 8
SHIFTS = tuple(AWQ_BITS * nibble for nibble in (0, 4, 1, 5, 2, 6, 3, 7))  # of the eight rows, in a word
AWQ_TENSORS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class Awq:
    """w = (code - zero) · scale. The factors of activations are folded into the norms before."""

    group: int | None  # None: one scale a row
    symmetric: bool = False

    @property
    def name(self) -> str:
        return f"AWQ int4 G={'channel' if self.group is None else self.group}{' symmetric' if self.symmetric else ''}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        if rows % PER_WORD:
            raise ModelError(
                f"AWQ packs {PER_WORD} rows into a word, this matrix has {rows}: export the checkpoint again as gptq "
                "or compressed-tensors"
            )
        whole_groups(columns, self.group)
        groups = 1 if self.group is None else -(-columns // self.group)
        return {
            "qweight": Stored((columns, rows // PER_WORD), ("I32",)),
            "qzeros": Stored((groups, rows // PER_WORD), ("I32",), optional=self.symmetric),
            "scales": Stored((groups, rows), SCALES),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .integers import integer_codes

        zeros = _unpack(tensors["qzeros"]) if "qzeros" in tensors else None
        codes, scales = _unpack(tensors["qweight"]), tensors["scales"].t()
        return integer_codes(codes, scales, zeros, self.group or columns, AWQ_BITS, self.symmetric)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, AWQ_BITS, self.group or columns, self.symmetric, generator)


def _unpack(words: Tensor) -> Tensor:
    """int32 [K, N / 8] → uint8 [N, K]."""
    from .integers import fields

    return fields(words.t().contiguous(), AWQ_BITS, SHIFTS, 1).flatten(0, 1)


class AwqScheme:
    """quant_method awq: of AutoAWQ, GPTQModel and transformers."""

    method = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        backend = config.get("backend")
        if backend == "llm-awq":  # transformers has the packing's name here
            config = {**config, "version": backend}
        layout(config, "version", "checkpoint_format", "format", among=("gemm",), default="gemm")
        number(config, "bits", "w_bit", among=(AWQ_BITS,), default=AWQ_BITS)
        group = group_size(config, "group_size", "q_group_size", default=128)
        self.base = Awq(group, not flag(config, "zero_point", True))
        self.kept = names(config, "modules_to_not_convert")

    def format(self, path: str, stored: Headers | None) -> Awq | None:
        if stored is None:
            kept = last(path) in ("lm_head", "embed_tokens") or any(name in path for name in self.kept)
            return None if kept else self.base
        return self.base if any(suffix in stored for suffix in AWQ_TENSORS) else None


# Plain auto_round, of asymmetric matrices, stores zeros as they are. All other files of GPTQ's layout store zero - 1.
VERSIONS = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_gptq": "gptq", "gptq": "gptq"}
VERSIONS["auto_round"] = "gptq_v2"
AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq")
PLAIN_BITS = 16  # from here on a layer is not quantised


class _Layer(GptqScheme):
    """5 to 7 bits are streams like the others."""

    widths = range(2, 9)


class AutoRoundScheme:
    """quant_method auto-round (intel/auto-round)."""

    method = "auto-round"

    def __init__(self, config: Mapping[str, Any]) -> None:
        packing = layout(config, "packing_format", among=(*VERSIONS, *AWQ), default="auto_round:auto_gptq")
        self.packing = packing
        self.base = self._scheme(config)
        self.blocks = names({"names": _as_list(config.get("block_name_to_quantize"))}, "names")
        self.kept = [expression(name, "modules_to_not_convert") for name in names(config, "modules_to_not_convert")]
        self.layers: dict[str, GptqScheme | AwqScheme | None] = {}
        self.patterns: list[tuple[re.Pattern[str], GptqScheme | AwqScheme | None]] = []
        for name, entry in entries(config, "extra_config").items():
            bits = entry.get("bits")
            plain = isinstance(bits, int) and bits >= PLAIN_BITS
            own = None if plain else self._scheme({**config, **entry})
            self.layers[name] = own
            if re.fullmatch(r"[\w.-]+", name) is None:
                self.patterns.append((expression(name, "extra_config"), own))

    def format(self, path: str, stored: Headers | None) -> Gptq | Awq | None:
        scheme, named = self._own(path)
        if stored is not None:
            return (scheme or self.base).format(path, stored)
        if scheme is None or any(pattern.search(path) for pattern in self.kept):
            return None
        if named:
            return scheme.base
        if self.blocks and not any(path == block or path.startswith(block + ".") for block in self.blocks):
            return None
        return scheme.format(path, None)

    def _own(self, path: str) -> tuple[GptqScheme | AwqScheme | None, bool]:
        """What the path is stored as, and whether the configuration names it."""
        if path in self.layers:
            return self.layers[path], True
        for pattern, scheme in self.patterns:
            if pattern.search(path):
                return scheme, True
        return self.base, False

    def _scheme(self, config: Mapping[str, Any]) -> GptqScheme | AwqScheme:
        settings = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
        if self.packing in AWQ:
            return AwqScheme({**settings, "zero_point": not settings.get("sym", True)})
        return _Layer({**settings, "checkpoint_format": VERSIONS[self.packing]})


def _as_list(blocks: Any) -> Any:
    """ "model.layers", "model.layers,model.vision", or lists of blocks."""
    return [name.strip() for name in blocks.split(",")] if isinstance(blocks, str) else blocks
