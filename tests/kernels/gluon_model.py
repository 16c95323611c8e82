"""Runs a warp-specialised Gluon kernel's own source in Python: its warps in any order, its copies as late as one likes.

A thread a warp, of which one runs at a time: at each wait, arrival, product and copy the schedule says who goes on.
Shared memory is an array of numbers. A copy into it destroys what is there when it is issued, and is there when the
schedule says so. A product reads its operands when it is waited for, and must find what was there when it was issued.
So an order that a GPU meets once in a year gives NaN or `Overwritten` here, when it is asked for.

Proxies, swizzles and layouts are not modelled, nor are the threads of a warp.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

Schedule = Callable[[Sequence[str]], int]  # names of those who can go on → which of them does


class Overwritten(Exception):
    """A product's operand changed, or was not there, while the product ran."""


class Deadlock(Exception):
    """Nobody can go on."""


class Tile(np.ndarray):
    """Shared memory, registers or a part of them."""

    layout = None

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any) -> Tile:
        return self

    def index(self, at: int) -> Any:
        return self[at]

    def permute(self, order: tuple[int, ...]) -> Any:
        return self.transpose(order)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        return self.reshape(shape)  # a view: what is allocated is contiguous

    def load(self, layout: Any) -> Any:
        return self.copy()

    def store(self, values: Any) -> None:
        self[...] = values


class Matrix:
    """A descriptor of global memory."""

    dtype = layout = None

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Pointer:
    """To numbers of global memory that nobody writes."""

    def __init__(self, values: np.ndarray, place: Any = 0) -> None:
        self.values, self.place = values, place

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.place + offset)

    def load(self, mask: Any = True, other: Any = 0) -> Any:
        mask, place = np.broadcast_arrays(mask, self.place)
        assert ((place >= 0) & (place < self.values.size))[mask].all(), "a load from somewhere else"
        found = np.where(mask, self.values.reshape(-1)[np.where(mask, place, 0)], other)
        return found.view(Tile) if found.ndim else found.item()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes are there."""

    def __init__(self) -> None:
        self.phases = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = 0

    def change(self, arrivals: int = 0, announced: int = 0) -> None:
        self.missing -= arrivals
        self.bytes += announced
        assert self.missing >= 0, "more arrivals than the phase has"
        if self.missing == 0 == self.bytes:
            self.phases, self.missing = self.phases + 1, self.count

    def ended(self, parity: int) -> bool:
        return self.phases & 1 != parity


class Sums:
    """An accumulator, whose products may be under way."""

    def __init__(self, values: Tile) -> None:
        self.values = values


class Copy:
    """On its way into shared memory."""

    name = "copy"

    def __init__(self, values: np.ndarray, place: Tile, bar: Barrier) -> None:
        self.values, self.place, self.bar = values, place, bar
        place[...] = np.nan

    def ready(self) -> bool:
        return True

    def go_on(self) -> bool:
        self.place[...] = self.values
        self.bar.change(announced=-2 * self.place.size)
        return False


class Warp:
    """A partition of the kernel: a thread that runs until its next operation when it is told to."""

    def __init__(self, name: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.name = name
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[tuple[Sums, Tile, Tile, Tile, Tile, bool]] = []
        self.stores: list[tuple[Matrix, list[int], Tile]] = []
        self.error: BaseException | None = None
        self._turn, self._yielded = threading.Semaphore(0), threading.Semaphore(0)
        self._over = self._abandoned = False
        self._thread = threading.Thread(target=self._run, args=(function, args), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._turn.acquire()
        try:
            if not self._abandoned:
                function(*args)
        except BaseException as error:
            self.error = error
        self._over = True
        self._yielded.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """By the warp's own thread: until the schedule picks it again, which it does when it is ready."""
        self.ready = ready
        self._yielded.release()
        self._turn.acquire()
        if self._abandoned:
            raise SystemExit

    def go_on(self) -> bool:
        """By the machine → whether it will have to go on again."""
        self._turn.release()
        self._yielded.acquire()
        if self.error is not None:
            raise self.error
        return not self._over

    def abandon(self) -> None:
        self._abandoned = True
        self._turn.release()
        self._thread.join()


class Machine:
    """One program of a grid of one."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.running: list[Warp | Copy] = []
        self.current: Warp | None = None

    def run(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: object) -> None:
        """gl.warp_specialize"""
        warps = [Warp(name_of(function, args), function, args) for function, args in partitions]
        self.running += warps
        try:
            while self.running:
                able = [one for one in self.running if one.ready()]
                if not able:
                    raise Deadlock([one.name for one in self.running])
                chosen = able[self.schedule([one.name for one in able])]
                self.current = chosen if isinstance(chosen, Warp) else None
                if not chosen.go_on():
                    self.running.remove(chosen)
        finally:
            for warp in warps:
                warp.abandon()

    def _pause(self, ready: Callable[[], bool] = lambda: True) -> Warp:
        warp = self.current
        assert warp is not None
        warp.pause(ready)
        return warp

    # ---- what the kernel calls ----

    def wait(self, bar: Barrier, parity: int) -> None:
        self._pause(lambda: bar.ended(parity))

    def arrive(self, bar: Barrier, count: int = 1, pred: bool = True) -> None:
        self._pause()
        if pred:
            bar.change(arrivals=count)

    def expect(self, bar: Barrier, size: int) -> None:
        self._pause()
        bar.change(arrivals=1, announced=size)

    def fetch(self, matrix: Matrix, start: list[int], bar: Barrier, place: Tile) -> None:
        self._pause()
        values = np.zeros(place.shape)
        part = matrix.values[start[0] : start[0] + place.shape[0], start[1] : start[1] + place.shape[1]]
        values[: part.shape[0], : part.shape[1]] = part
        self.running.append(Copy(values, place, bar))

    def put(self, matrix: Matrix, start: list[int], place: Tile) -> None:
        self._pause().stores.append((matrix, start, place))

    def store_wait(self, pending: int) -> None:
        warp = self._pause()
        while len(warp.stores) > pending:
            matrix, (row, column), place = warp.stores.pop(0)
            part = matrix.values[row : row + place.shape[0], column : column + place.shape[1]]
            part[...] = place[: part.shape[0], : part.shape[1]]

    def multiply(self, x: Tile, weight: Tile, sums: Sums, use_acc: bool = True, is_async: bool = False) -> Sums:
        self._pause().products.append((sums, x, weight, x.copy(), weight.copy(), use_acc))
        return sums if is_async else self.multiply_wait(0, [sums])

    def multiply_wait(self, pending: int, deps: list[Sums]) -> Sums:
        warp = self._pause()
        while len(warp.products) > pending:
            sums, x, weight, issued_x, issued_weight, use_acc = warp.products.pop(0)
            if not (np.array_equal(x, issued_x) and np.array_equal(weight, issued_weight)):  # never of NaN
                raise Overwritten(f"an operand of {warp.name} changed, or was not there, while its product ran")
            sums.values = (sums.values if use_acc else 0) + issued_x @ issued_weight
        (sums,) = deps
        return sums


def name_of(function: Callable[..., None], args: tuple[Any, ...]) -> str:
    return f"{function.__name__}{args[0] if isinstance(args[0], int) else ''}"


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
    return np.full(shape, np.nan).view(Tile)


def _zeros(shape: list[int], dtype: Any, layout: Any) -> Any:
    """An accumulator, or an operand in registers."""
    values = np.zeros(shape).view(Tile)
    return values if layout == "operand" else Sums(values)


def _jit(function: Any = None, **_: object) -> Any:
    return function or (lambda function: function)


def interpret(source: str, schedule: Schedule) -> dict[str, Any]:
    """The names of a module of Gluon kernels, whose functions run here by the schedule."""
    machine = Machine(schedule)
    language = SimpleNamespace(
        constexpr=lambda value: value, float32=None, int32=None, int64=None, minimum=min, static_range=range,
        program_id=lambda axis: 0, num_programs=lambda axis: 1, barrier=lambda: None,
        zeros=_zeros, load=Pointer.load, where=lambda *parts: np.where(*parts).view(Tile), maximum=max,
        arange=lambda first, end, layout: np.arange(first, end),
        SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: "operand",
        NVMMADistributedLayout=lambda *_: None, allocate_shared_memory=_allocate, warp_specialize=machine.run,
        reshape=lambda sums, shape: sums.values.reshape(shape), permute=np.transpose,
        split=lambda pairs: (pairs[..., 0], pairs[..., 1]), exp2=np.exp2,
        inline_asm_elementwise=lambda *_, **__: None,  # to sleep: who is slow says the schedule
    )  # fmt: skip
    names: dict[str, Any] = {
        "gluon": SimpleNamespace(jit=_jit),
        "gl": language,
        "fence_async_shared": lambda: None,
        "wait": lambda: None,  # for the kernel before: what it writes is there
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=Barrier.init, wait=machine.wait, arrive=machine.arrive,
            expect=machine.expect,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.fetch, async_copy_shared_to_global=machine.put,
            store_wait=machine.store_wait,
        ),
        "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.multiply_wait,
    }  # fmt: skip
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    exec(compile(tree, "<kernel>", "exec"), names)
    return names
