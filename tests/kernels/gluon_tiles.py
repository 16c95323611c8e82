"""Runs a Gluon kernel whose programs are tensors in registers and in shared memory, from its own source, on CPU
tensors: its arithmetic of indices, masks and sums, and every load's and store's bounds. Layouts are not modelled: those
the compiler keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Load = Callable[[Path], Any]


class Tile(Tensor):
    """A value of the kernel: an operation gives a new one."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def __iadd__(self, other: Any) -> Tile:
        return self + other  # type: ignore[no-any-return]

    def __isub__(self, other: Any) -> Tile:
        return self - other  # type: ignore[no-any-return]

    def __imul__(self, other: Any) -> Tile:
        return self * other  # type: ignore[no-any-return]


def tile(values: Any) -> Tile:
    return torch.as_tensor(values).as_subclass(Tile)


class Pointer:
    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, values: Tensor) -> Pointer:
        """Of a view's elements and all behind them: no others."""
        size = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
        return cls(values.as_strided((size,), (1,)))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def unsqueeze(self, axis: int) -> Pointer:
        return Pointer(self.memory, self.offset.unsqueeze(axis))

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.offset[places])

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        places, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask))
        inside = (places >= 0) & (places < len(self.memory))
        assert bool((inside | ~mask).all()), f"outside of {len(self.memory)} elements"
        return places.where(mask, 0).as_subclass(Tensor), mask.as_subclass(Tensor)


class Shared:
    """Memory of a program; a copy into it is there at once."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def index(self, place: Any) -> Shared:
        return Shared(self.values[int(place)])

    def load(self, layout: Any) -> Tile:
        return tile(self.values)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.values.view(dtype).reshape(list(shape)))

    def _keep_alive(self) -> None:
        pass


class Copies:
    """What they use of gluon.language.nvidia.ampere.async_copy."""

    @staticmethod
    def async_copy_global_to_shared(shared: Shared, pointer: Pointer, mask: Any = True) -> None:
        places, mask = pointer.places(mask)
        values = pointer.memory[places]
        shared.values.copy_(values.where(mask, torch.zeros((), dtype=values.dtype)))

    @staticmethod
    def commit_group() -> None:
        pass

    @staticmethod
    def wait_group(count: int) -> None:
        assert count == 0


class Language:
    """What the kernels use of triton.experimental.gluon.language."""

    int16, int32, int64 = torch.int16, torch.int32, torch.int64
    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    static_range = range

    def __init__(self, num_warps: int, program: Sequence[int], ptx: Any) -> None:
        self.warps, self.program, self.ptx = num_warps, program, ptx

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("Layout"):
            raise AttributeError(name)
        return lambda *_: None

    def num_warps(self) -> int:
        return self.warps

    def program_id(self, axis: int) -> Tile:
        return tile(self.program[axis])

    def arange(self, start: int, end: int, layout: Any) -> Tile:
        return tile(torch.arange(start, end))

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype, layout: Any) -> Tile:
        return tile(torch.full(list(shape), value, dtype=dtype))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, layout: Any) -> Tile:
        return self.full(shape, 0, dtype, layout)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        values = torch.empty(list(shape), dtype=dtype)
        return Shared(values.fill_(float("nan")) if dtype.is_floating_point else values)

    def broadcast(self, values: Tensor, other: Tensor) -> Sequence[Tensor]:
        return torch.broadcast_tensors(values, other)

    def expand_dims(self, values: Any, axis: int) -> Any:
        return values.unsqueeze(axis)

    def reshape(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        return values.reshape(list(shape))

    def permute(self, values: Tensor, order: Sequence[int]) -> Tensor:
        return values.permute(list(order))

    def convert_layout(self, values: Tensor, layout: Any) -> Tensor:
        return values

    def minimum(self, values: Any, other: Any) -> Tile:
        return tile(torch.minimum(tile(values), tile(other)))

    def maximum(self, values: Any, other: Any) -> Tile:
        return tile(torch.maximum(tile(values), tile(other)))

    def where(self, mask: Tensor, values: Tensor, other: Any) -> Tensor:
        return torch.where(mask, values, other)

    def exp(self, values: Tensor) -> Tensor:
        return values.exp()

    def sum(self, values: Tensor, axis: int) -> Tensor:
        return values.sum(axis)

    def load(
        self, pointer: Pointer, mask: Any = True, other: float = 0.0, eviction_policy: str = "",
        cache_modifier: str = "",
    ) -> Tile:  # fmt: skip
        places, mask = pointer.places(mask)
        values = pointer.memory[places]
        return tile(values.where(mask, torch.tensor(other, dtype=values.dtype)))

    def store(self, pointer: Pointer, values: Tensor, mask: Any = True) -> None:
        places, mask = pointer.places(mask)
        pointer.memory[places[mask]] = values.as_subclass(Tensor).broadcast_to(mask.shape)[mask]

    def inline_asm_elementwise(self, asm: str, _: str, values: Sequence[Tensor], dtype: torch.dtype, **__: Any) -> Tile:
        words = [one.as_subclass(Tensor).contiguous().view(torch.int16).numpy() for one in values]
        return tile(torch.from_numpy(np.asarray(self.ptx.evaluate_pairs(asm, *words))).view(dtype))

    def mma_v2(self, left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
        return left.float() @ right.float() + sums


class Kernel:
    """In place of a Gluon kernel: `kernel[grid](…)` of CPU tensors."""

    def __init__(self, kernel: Any, ptx: Any) -> None:
        self.kernel, self.ptx = kernel, ptx
        self.launches = 0

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            self.launches += 1
            values = [Pointer.to(one) if isinstance(one, Tensor) else tile(one) for one in args]
            for program in product(*map(range, grid)):
                run = self._bound(self.kernel, Language(num_warps, program, self.ptx))
                run(*values, **constants)

        return launch

    def _bound(self, function: Any, language: Language) -> FunctionType:
        """The function's own code, with other globals."""
        plain = function.fn
        names = {**plain.__globals__, "gl": language, "mma_v2": language.mma_v2, "async_copy": Copies}
        for name in plain.__code__.co_names:
            value = names.get(name)
            if hasattr(value, "fn"):
                names[name] = self._bound(value, language)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
        return FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
