"""Runs kernels/linear/quant_many_gluon.py in Python: its warps by gluon_model.py's machine, its arithmetic by
gluon_tiles.py's language. Registers are torch tensors, shared memory is numpy's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Load = Callable[[Path], Any]


def kernel(load_module: Load, source: str, schedule: Callable[..., int]) -> Any:
    """In place of the kernel: `kernel[grid](…)` of CPU tensors and descriptors, as one program."""
    here = Path(__file__)
    model, tiles, ptx = (load_module(here.with_name(f"{name}.py")) for name in ("gluon_model", "gluon_tiles", "ptx"))
    tile = tiles.tile

    class Values(tiles.Tile):  # type: ignore[misc, name-defined]
        def to(self, dtype: Any, bitcast: bool = False) -> Any:
            plain = self.as_subclass(Tensor)
            return (plain.contiguous().view(dtype) if bitcast else plain.to(dtype)).as_subclass(Values)

    class Shared(model.Tile):  # type: ignore[misc, name-defined]
        element: Any = None

        def __array_finalize__(self, other: Any) -> None:
            self.element = getattr(other, "element", None)

        @property
        def dtype(self) -> Any:  # type: ignore[override]
            return self.element

        def slice(self, start: int, length: int, dim: int) -> Any:
            return self[(slice(None),) * dim + (slice(start, start + length),)]

        def load(self, layout: Any) -> Any:
            values = np.array(self, dtype=np.float64)
            assert not np.isnan(values).any(), "read before it was there"
            return torch.from_numpy(values).to(self.element).as_subclass(Values)

    class Language(tiles.Language):  # type: ignore[misc, name-defined]
        constexpr = staticmethod(lambda value: value)
        barrier = staticmethod(lambda: None)
        convert_layout = staticmethod(lambda values, layout: values)
        permute = staticmethod(lambda values, order: values.permute(*order))
        broadcast = staticmethod(lambda a, b: torch.broadcast_tensors(a, b))

        def num_programs(self, axis: int) -> int:
            return 1

        def program_id(self, axis: int) -> int:
            return 0

        def minimum(self, values: Any, other: Any) -> Any:
            both = isinstance(values, int) and isinstance(other, int)
            return min(values, other) if both else super().minimum(values, other)

        def load(self, pointer: Any, mask: Any = True, other: float = 0.0, cache_modifier: str = "") -> Any:
            return super().load(pointer, mask, other).as_subclass(Values)

        def store(self, pointer: Any, values: Any, mask: Any = True) -> None:
            super().store(pointer, tile(values).to(pointer.memory.dtype), mask)

        def zeros(self, *args: Any) -> Any:
            return super().zeros(*args).as_subclass(Values)

        def inline_asm_elementwise(self, *args: Any, **options: Any) -> Any:
            return super().inline_asm_elementwise(*args, **options).as_subclass(Values)

        def atomic_add(self, pointer: Any, value: int, sem: str, scope: str) -> int:
            before = int(self.load(pointer))
            self.store(pointer, before + value)
            return before

        def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
            if layout == "barriers":
                return SimpleNamespace(index=[model.Barrier() for _ in range(shape[0])].__getitem__)
            values = np.full(shape, np.nan).view(Shared)
            values.element = dtype
            return values

    class Machine(model.Machine):  # type: ignore[misc, name-defined]
        def multiply(self, left: Any, right: Any, sums: Any, use_acc: bool = True, is_async: bool = False) -> Any:
            if isinstance(sums, Tensor):
                sums = model.Sums(sums.double().numpy())
            left = left.as_subclass(Tensor).double().numpy()
            return super().multiply(left, right, sums, use_acc, is_async)

        def multiply_wait(self, pending: int, deps: list[Any]) -> Any:
            sums = super().multiply_wait(pending, deps)
            return sums if pending else torch.from_numpy(np.array(sums.values)).float().as_subclass(Values)

    class Matrix(model.Matrix):  # type: ignore[misc, name-defined]
        def __init__(self, memory: Tensor, desc: tuple[Any, ...]) -> None:
            _, self.dtype, rows, columns, stride, *box = desc
            assert box[1] * 2 == (box[2] if len(box) > 2 else 128), "a row of a box is one swizzled row"
            super().__init__(memory.as_strided((rows, columns), (stride, 1)).double().numpy())
            self.layout, self.block_type = None, SimpleNamespace(shape=box[:2])

    machine = Machine(schedule)
    language = Language(4, (0,), ptx)
    language.warp_specialize = machine.run
    names = model.interpret(source, schedule)  # for its stand-ins
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=model.Barrier.init, wait=machine.wait, arrive=machine.arrive,
        expect=machine.expect,
    )  # fmt: skip
    names.update(
        gl=language, mbarrier=mbarrier, tma=SimpleNamespace(async_copy_global_to_shared=machine.fetch),
        warpgroup_mma=machine.multiply, warpgroup_mma_wait=machine.multiply_wait,
    )  # fmt: skip

    class Kernel:
        def __init__(self) -> None:
            self.launches = 0
            self.memories: dict[int, Tensor] = {}

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, num_warps: int, **constants: Any) -> None:
                self.launches += 1
                values = [tiles.Pointer.to(one) if isinstance(one, Tensor) else one for one in args]
                values[:2] = [Matrix(self.memories[desc[0]], desc) for desc in args[:2]]
                names["quant_many_kernel"](*values, **constants)

            return launch

    return Kernel()
