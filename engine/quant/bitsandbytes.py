"""bitsandbytes: tables of 16 values (NF4, FP4) with a scale for each 64 of the flattened matrix, and int8 rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .format import DUMMY_STD, Stored
from .settings import Headers, expression, flag, last, listed, names, value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .codes import Codes

# Dettmers et al., QLoRA (arXiv 2305.14314), appendix E: quantiles of the normal distribution.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # of 12: the sign is the highest bit
TABLES = {"nf4": NF4, "fp4": tuple(sign * step / 12 for sign in (1, -1) for step in _FP4)}
BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)  # the usual one first
NESTED = 256  # absmax values that share a scale of their own
STATE = "weight.quant_state.bitsandbytes__"
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # bytes: two codes each
AGAIN = "download the checkpoint again"


@dataclass(frozen=True)
class Table4:
    """w = quant_map[code] · absmax. `nested`: absmax is stored as 8-bit codes itself."""

    kind: str  # "nf4" or "fp4"
    block: int = 64
    nested: bool = False
    storage: str = "U8"  # the type that the bytes were stored as
    state: int | None = None  # bytes of the JSON that says all this again

    @property
    def name(self) -> str:
        return f"bitsandbytes {self.kind.upper()}"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        blocks = -(-rows * columns // self.block)
        tensors = {
            "weight": Stored((-(-rows * columns // (2 * STORAGE[self.storage])), 1), (self.storage,)),
            "weight.absmax": Stored((blocks,), ("U8",) if self.nested else ("F32",)),
            "weight.quant_map": Stored((16,), ("F32",)),
        }
        if self.nested:
            tensors["weight.nested_absmax"] = Stored((-(-blocks // NESTED),), ("F32",))
            tensors["weight.nested_quant_map"] = Stored((256,), ("F32",))
        if self.state is not None:
            tensors[STATE + self.kind] = Stored((self.state,), ("U8",), optional=not self.nested)
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        import torch

        from .codes import Codes
        from .integers import flat_groups, nibbles

        state = self._state(tensors, rows, columns)
        absmax = tensors["weight.absmax"]
        if self.nested:
            outer = tensors["weight.nested_absmax"].repeat_interleave(NESTED)[: absmax.shape[0]]
            absmax = tensors["weight.nested_quant_map"][absmax.int()] * outer + float(state["nested_offset"])
        scales, group = flat_groups(absmax, self.block, rows, columns)
        codes = nibbles(tensors["weight"].reshape(-1).view(torch.uint8), rows * columns).view(rows, columns)
        return Codes(codes, scales, group, 4, table=tensors["weight.quant_map"].float())

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        import torch

        from .codes import Codes
        from .integers import flat_groups

        device = generator.device
        table = torch.tensor(TABLES[self.kind], device=device)
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator, device=device)
        flat = torch.full(
            (-(-rows * columns // self.block),), DUMMY_STD / float(table.std(correction=0)), device=device
        )
        scales, group = flat_groups(flat, self.block, rows, columns)
        return Codes(codes, scales, group, 4, table=table)

    def _state(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> dict[str, Any]:
        """Raises ModelError where it contradicts what was read from the headers."""
        if STATE + self.kind not in tensors:
            return {}
        raw = bytes(tensors[STATE + self.kind].tolist())
        try:
            state = json.loads(raw)
        except ValueError as error:
            raise ModelError(f"{STATE}{self.kind} is no JSON ({error}): {AGAIN}") from None
        if not isinstance(state, dict):
            raise ModelError(f"{STATE}{self.kind} holds a {type(state).__name__} where an object belongs: {AGAIN}")
        wanted = {"quant_type": self.kind, "blocksize": self.block, "shape": [rows, columns]}
        if self.nested:
            wanted["nested_blocksize"] = NESTED
            if not isinstance(state.get("nested_offset"), (int, float)):
                raise ModelError(f"{STATE}{self.kind} has no nested_offset: {AGAIN}")
        for key, right in wanted.items():
            if state.get(key) != right:
                raise ModelError(f"{STATE}{self.kind} has {key} {state.get(key)}, the files make it {right}: {AGAIN}")
        return state


@dataclass(frozen=True)
class Int8Rows:
    """w = weight · SCB / 127. The outliers of inputs, for which the method is known, are multiplied as they are."""

    name = "bitsandbytes int8"

    def expected(self, rows: int, columns: int) -> dict[str, Stored]:
        return {
            "weight": Stored((rows, columns), ("I8",)),
            "SCB": Stored((rows,), ("F32",)),
            "weight_format": Stored((), ("U8",), optional=True),
        }

    def decode(self, tensors: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        from .codes import Codes

        if "weight_format" in tensors and (form := int(tensors["weight_format"])) != 0:
            raise ModelError(
                f"weight_format is {form}, which is a layout of single GPUs, read is 0 (rows): save the model again "
                "with bitsandbytes 0.45 or later"
            )
        return Codes(tensors["weight"], (tensors["SCB"].float() / 127).view(rows, 1), columns, 8)

    def dummy(self, rows: int, columns: int, generator: torch.Generator) -> Codes:
        from .integers import random_codes

        return random_codes(rows, columns, 8, columns, True, generator)


class BitsAndBytesScheme:
    """quant_method bitsandbytes: of transformers."""

    method = "bitsandbytes"

    def __init__(self, config: Mapping[str, Any]) -> None:
        four = flag({"load_in_4bit": value(config, "load_in_4bit", "_load_in_4bit")}, "load_in_4bit", False)
        eight = flag({"load_in_8bit": value(config, "load_in_8bit", "_load_in_8bit")}, "load_in_8bit", False)
        if four == eight:
            raise ModelError(
                f"quantization_config: load_in_4bit is {four} and load_in_8bit is {eight}, one of them has to be true: "
                "correct config.json"
            )
        kind = value(config, "bnb_4bit_quant_type", default="fp4")
        if four and (not isinstance(kind, str) or kind not in TABLES):
            raise ModelError(
                f"quantization_config: bnb_4bit_quant_type is {kind!r:.60}, read {listed(TABLES)}: use another "
                "checkpoint, or the unquantized model"
            )
        self.base: Table4 | Int8Rows = (
            Table4(kind, nested=flag(config, "bnb_4bit_use_double_quant", False)) if four else Int8Rows()
        )
        kept = ("lm_head",) if config.get("llm_int8_skip_modules") is None else names(config, "llm_int8_skip_modules")
        # transformers reads them as parts of a path, or expressions of them, from its start or at its end
        self.kept = [expression(rf"(?:{name})(?:(?<=\.)|(?=\.|$))", "llm_int8_skip_modules") for name in kept]
        self.ends = kept

    def format(self, path: str, stored: Headers | None) -> Table4 | Int8Rows | None:
        if stored is not None:
            return _find(path, stored)
        if last(path) == "embed_tokens" or path.endswith(self.ends) or any(name.match(path) for name in self.kept):
            return None
        return self.base


def _find(path: str, stored: Headers) -> Table4 | Int8Rows | None:
    """Kind and block from the headers alone. Raises ModelError where there is no such block."""
    if "SCB" in stored or ("weight" in stored and stored["weight"][0] == "I8" and "weight.absmax" not in stored):
        return Int8Rows()
    states = [suffix for suffix in stored if suffix.startswith(STATE)]
    if "weight.absmax" not in stored and not states:
        return None
    kind = states[0].removeprefix(STATE) if states else "nf4"
    if kind not in TABLES:
        raise ModelError(f"{path}.{states[0]}: read {listed(TABLES)}, use another checkpoint")
    storage, shape = stored.get("weight", ("U8", ()))
    absmax, blocks = stored.get("weight.absmax", ("F32", (0,)))
    elements = 2 * STORAGE.get(storage, 1) * (shape[0] if shape else 0)
    sizes = [size for size in BLOCKS if blocks and -(-elements // size) == blocks[0]]
    if elements and blocks != (0,) and (not sizes or storage not in STORAGE):
        raise ModelError(
            f"{path}.weight is {storage} {list(shape)} and its absmax {list(blocks)}, which are no blocks of 32 to "
            f"4096: {AGAIN}"
        )
    if states and len(stored[states[0]][1]) != 1:
        raise ModelError(f"{path}.{states[0]} has shape {list(stored[states[0]][1])}, a list belongs there: {AGAIN}")
    state = stored[states[0]][1][0] if states else None
    return Table4(kind, sizes[0] if sizes else BLOCKS[0], absmax == "U8", storage, state)
