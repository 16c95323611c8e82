"""Evaluates the few instructions of PTX that inline assembly has here, on arrays: what Triton's interpreter refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def evaluate(asm: str, inputs: Sequence[Tensor]) -> Tensor:
    """$0 of one output, int64 below 2^32; inputs: $1, $2, …, the same."""
    registers = {f"${place}": value for place, value in enumerate(inputs, start=1)}
    shape = inputs[0].shape

    def value(name: str) -> Tensor:
        if name in registers:
            return registers[name]
        return torch.full(shape, int(name, 0) & WORD, dtype=torch.int64)

    for instruction in asm.strip().strip("{}").split(";"):
        instruction = instruction.strip()
        if not instruction or instruction.startswith(".reg"):
            continue
        operation, rest = instruction.split(None, 1)
        target, *operands = [part.strip() for part in rest.split(",")]
        registers[target] = _OPERATIONS[operation](*map(value, operands))
    return registers["$0"]


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    found = torch.zeros_like(a)
    wanted = int(table.flatten()[0])
    for place in range(8):
        if wanted >> place & 1:
            term = torch.full_like(a, WORD)
            for operand, bit in ((a, 4), (b, 2), (c, 1)):
                term = term & (operand if place & bit else operand ^ WORD)
            found = found | term
    return found


def _prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    pool, found = a | b << 32, torch.zeros_like(a)
    for byte in range(4):
        place = selector >> (4 * byte) & 15
        assert not bool((place & 8).any()), "the sign of a byte"
        found = found | ((pool >> (8 * place)) & 0xFF) << (8 * byte)
    return found


def _pairs(kind: torch.dtype, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Both halves of registers as numbers, each result rounded once."""

    def apply(*operands: Tensor) -> Tensor:
        halves = []
        for shift in (0, 16):
            numbers = [(one >> shift & 0xFFFF).to(torch.int32).to(torch.uint16).view(kind).double() for one in operands]
            halves.append(function(*numbers).to(kind))
        low, high = (half.view(torch.int16).to(torch.int64) & 0xFFFF for half in halves)
        return low | high << 16

    return apply


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count & WORD,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    **{
        f"{name}.{pair}": _pairs(kind, function)
        for pair, kind in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16))
        for name, function in (
            ("sub", torch.sub),
            ("mul", torch.mul),
            ("mul.rn", torch.mul),
            ("add.rn", torch.add),
            ("fma.rn", lambda a, b, c: a * b + c),
        )
    },
}


def evaluate_pairs(asm: str, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of 16-bit values, as many 16-bit results: a register has two neighbours along the last dimension."""
    pairs = [torch.from_numpy(np.ascontiguousarray(values).view(np.uint32).astype(np.int64)) for values in inputs]
    return evaluate(asm, pairs).numpy().astype(np.uint32).view(np.int16)
