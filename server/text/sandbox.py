"""Jinja with limits: a template is a program that somebody else wrote, so it gets little time and little memory.

The environment has what transformers gives chat templates, and three guards. Loops, calls, filters and whatever else
makes a value tick a clock. Each value that is made counts against a budget by the size of its printed form, so what
doubles itself ends soon. What would be large at once (`'x' * 10**9`, `s|replace('', s)`) is estimated beforehand.
"""

from __future__ import annotations

import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0  # of this thread's computing: a busy machine takes longer by the clock on the wall
MAX_SIZE = 8 << 20  # characters of one value, and of the whole text
MAX_WORK = 512 << 20  # characters of all values together
MAX_WIDTH = 100_000  # whatever pads text, or counts parts
MAX_BITS = 4096  # of an integer
TICKS_A_LOOK = 64  # at the clock
# Filters that make something of each character, when they get a text.
_BY_ITEM = ("batch", "groupby", "list", "map", "reject", "select", "slice", "sort", "unique")
_SIZE_OF_ITEM = 16  # at least, in a list: sorting short items costs more than writing them


class LimitError(Exception):
    """The template asks for more than it gets."""


class Meter:
    """What one rendering has used up."""

    __slots__ = ("_deadline", "_until_look", "_work")

    def __init__(self) -> None:
        self._deadline = time.thread_time() + MAX_SECONDS
        self._until_look = TICKS_A_LOOK
        self._work = 0

    def tick(self, size: int = 0) -> None:
        self._until_look -= 1 + (size >> 10)  # what makes much takes long
        if self._until_look < 0:
            self._until_look = TICKS_A_LOOK
            if time.thread_time() > self._deadline:
                raise LimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def spend(self, size: int) -> None:
        self.tick(size)
        self._work += size
        if size > MAX_SIZE or self._work > MAX_WORK:
            raise too_large()


class Sandbox(ImmutableSandboxedEnvironment):
    """Compile and render inside `with sandbox.metered()`, which belongs to the thread."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False)
        self._local = threading.local()
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals |= {
            "raise_exception": raise_exception, "strftime_now": strftime_now, "dict": Dict(), "namespace": Names,
        }  # fmt: skip
        del self.globals["lipsum"]
        for name in ("pprint", "urlize", "wordwrap"):  # their cost is hard to foresee, and no chat needs them
            del self.filters[name]
        self.filters |= {"tojson": tojson, "sum": self._sum}
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_watched": self._watched, "_made": self._made}

    @contextmanager
    def metered(self) -> Iterator[Meter]:
        before = getattr(self._local, "meter", None)
        self._local.meter = meter = Meter()
        try:
            yield meter
        finally:
            self._local.meter = before

    # ---- the guards ----

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Guards().visit(source), *arguments, **options)

    def _watched(self, iterable: Iterable[Any]) -> Iterator[Any]:
        tick = self._local.meter.tick
        for item in iterable:
            tick()
            yield item

    def _made(self, value: Any) -> Any:
        self._local.meter.spend(size_of(value))
        return value

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self._local.meter.spend(sum(map(len, pieces)))
        return "".join(pieces)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or context comes before the value

        @wraps(function)
        def guarded(*arguments: Any, **options: Any) -> Any:
            _foresee(name, arguments[first], arguments[first + 1 :], options)
            return self._made(function(*arguments, **options))

        return guarded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _foresee_product(left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
                raise too_large()
        elif operator == "%" and isinstance(left, str):
            _foresee_percent(left, (right,))
        return self._made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _foresee(__obj.__name__, owner, arguments, options)
        return __self._made(super().call(__context, __obj, *arguments, **options))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes | int) and attr in ("expandtabs", "maketrans", "to_bytes", "translate"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text = value.__self__

        @wraps(formatted)
        def foreseen(*arguments: Any, **options: Any) -> str:
            _foresee_braces(text, (*arguments, *options.values()))
            return formatted(*arguments, **options)

        return foreseen

    def _sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """As Jinja's, for numbers: a sum of lists costs the square of their number."""
        for item in iterable:
            value = item if attribute is None else self.getitem(item, attribute)
            if not isinstance(value, int | float):
                raise TypeError("sum is for numbers")
            start += value
        return start


class _Guards(NodeTransformer):
    """Puts the clock into every loop, and has every value weighed that no call, filter or operator makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_watched")
        return node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_made")

    visit_Concat = _made

    def _literal(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        if getattr(node, "ctx", "load") != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return self.generic_visit(node)
        return self._made(node)

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    made.environment = node.environment
    return made


def too_large() -> LimitError:
    return LimitError(f"it makes more than {MAX_SIZE >> 20} million characters")


def size_of(value: Any) -> int:
    """About the length of its printed form; counting stops soon after MAX_SIZE, where parts are shared many times."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return value.bit_length() // 3 if isinstance(value, int) else 1
    size, stack = 0, [value]
    while stack:
        item = stack.pop()
        size += _SIZE_OF_ITEM
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        if size + _SIZE_OF_ITEM * len(stack) > MAX_SIZE:
            raise too_large()
    return size


def _foresee(name: str, value: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raises LimitError for a filter or a method that would make too much of `value`."""
    given = (*arguments, *options.values())
    for argument in given:
        if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise LimitError(f"{name} has a number above {MAX_WIDTH}")
    if name in _BY_ITEM and isinstance(value, str | bytes) and len(value) > MAX_WIDTH:
        raise LimitError(f"{name} takes a text of more than {MAX_WIDTH} characters apart")
    if name == "replace" and len(given) > 1:
        old, new = str(given[0]), str(given[1])
        _allow(str(value).count(old) * len(new))
    elif name == "join" and given:
        # the filter's value is what is joined; the method's value is what stands between
        parts, between = (arguments[0], value) if isinstance(value, str) and not options else (value, given[0])
        num_parts = len(parts) if hasattr(parts, "__len__") else MAX_WIDTH
        _allow(num_parts * len(str(between)))
    elif name == "indent":
        width = next((w for w in given if not isinstance(w, bool)), 4)
        _allow((str(value).count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    elif name == "tojson" and any(size_of(argument) > 100 or _is_above(argument, 100) for argument in given):
        raise LimitError("tojson has an indent or a separator above 100")
    elif name == "round" and any(_is_above(argument, 100) for argument in given):
        raise LimitError("round has a precision above 100")
    elif name == "format" and isinstance(value, str):
        _foresee_percent(value, given)


def _foresee_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if not isinstance(times, int):
            continue
        if isinstance(many, int):
            if many.bit_length() + times.bit_length() > MAX_BITS:
                raise too_large()
        elif isinstance(many, str | bytes | list | tuple):
            _allow(max(1, size_of(many)) * times)


def _foresee_percent(text: str, values: Iterable[Any]) -> None:
    if re.search(r"%[^%a-zA-Z]*(\*|\d{6})", text):
        raise _too_wide()
    _allow(text.count("%") * sum(map(size_of, values)))


def _foresee_braces(text: str, values: Iterable[Any]) -> None:
    fields = [spec for _, name, spec, _ in string.Formatter().parse(text) if name is not None]
    if any(spec and re.search(r"\{|\d{6}", spec) for spec in fields):
        raise _too_wide()
    _allow(len(fields) * sum(map(size_of, values)))


def _too_wide() -> LimitError:
    return LimitError("a format has a width that is large, or that a value sets")


def _allow(size: int) -> None:
    if size > MAX_SIZE:
        raise too_large()


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and abs(value) > limit


# ---- what transformers gives to templates ----


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class Dict:
    """`dict(...)` without the class, whose attributes lead elsewhere."""

    def __call__(self, *arguments: Any, **items: Any) -> dict[Any, Any]:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class Names(Namespace):
    """`namespace(...)`, which refuses names that begin with an underscore and prints as nothing large."""

    def __init__(*arguments: Any, **items: Any) -> None:
        attributes = dict(*arguments[1:], **items)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(arguments[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not have the name {name!r}")


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
