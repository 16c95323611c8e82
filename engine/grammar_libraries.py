"""xgrammar and llguidance by their C interfaces, whose long calls leave the interpreter's lock to other threads.

Their Python packages hold it, and a step of the engine waits: llguidance's for 0.7 s in one piece while it takes in
150,000 tokens, xgrammar's for 0.1 s for the same, and for 1.5 s of importing transformers."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_RAW = 0  # xgrammar.VocabType: tokens are the bytes that they stand for
_SPECIAL = 0xFF  # llguidance: the first byte of a token that is no text
_XGRAMMAR = ("CompiledGrammar", "Grammar", "GrammarCompiler", "GrammarMatcher", "TokenizerInfo")
_MESSAGE = 1000  # bytes of an error


class GrammarError(Exception):
    """The request that follows this grammar cannot go on."""


def load() -> None:
    """Loads both: 50 ms, with the interpreter's lock for much of it. Raises nothing: who needs them hears of it."""
    try:
        xgrammar()
        _llguidance()
    except Exception as error:
        logger.warning("structured outputs are unavailable: %s: %s", type(error).__name__, error)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)  # does not import it
    if spec is None or not spec.submodule_search_locations:
        raise GrammarError(f"{package} is not installed: structured outputs need it")
    return Path(spec.submodule_search_locations[0])


# ---- xgrammar ----


@cache
def xgrammar() -> SimpleNamespace:
    """The C++ classes of xgrammar, by their names, with its methods."""
    import tvm_ffi
    from tvm_ffi.libinfo import load_lib_module

    load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=[_folder("xgrammar")])

    def bound(name: str) -> Any:
        new = type(name, (tvm_ffi.Object,), {"__slots__": ()})
        return tvm_ffi.register_object(f"xgrammar.tvm_ffi_binding.{name}")(new)

    return SimpleNamespace(**{name: bound(name) for name in _XGRAMMAR})


def tokenizer_info(tokens: Sequence[bytes], stop_token_ids: Sequence[int]) -> bytes:
    """What `xgrammar().TokenizerInfo.deserialize_json` makes a vocabulary of, in ASCII. To make it takes 0.7 s for
    150,000 tokens, much of it with the interpreter's lock: work for another process than the engine's."""
    info = xgrammar().TokenizerInfo(list(tokens), _RAW, len(tokens), list(stop_token_ids), False)
    return json.dumps(json.loads(str(info.serialize_json()))).encode()


# ---- llguidance ----


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2 of llguidance.h; the library reads no more than `struct_size`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_void_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _Limits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _MatcherInit(ctypes.Structure):
    """LlgConstraintInit, and room for what later versions may add to it."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", _Limits),
        ("reserved", ctypes.c_uint64 * 32),
    )


_POINTER, _SIZE, _INT, _BOOL = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_bool
# By name: the result and the arguments.
_LONG: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llg_new_tokenizer_v2": (_POINTER, (_POINTER, ctypes.c_char_p, _SIZE)),
    "llg_new_matcher": (_POINTER, (_POINTER, ctypes.c_char_p, ctypes.c_char_p)),
    "llg_validate_grammar": (_INT, (_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, _SIZE)),
    "llg_matcher_compute_mask_into": (_INT, (_POINTER, _POINTER, _SIZE)),
}
# Microseconds each: to give the lock away for these would be to wait for it again.
_SHORT: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llg_constraint_init_set_defaults": (None, (_POINTER, _POINTER)),
    "llg_clone_matcher": (_POINTER, (_POINTER,)),
    "llg_matcher_validate_tokens": (_INT, (_POINTER, _POINTER, _SIZE)),
    "llg_matcher_consume_token": (_INT, (_POINTER, ctypes.c_uint32)),
    "llg_matcher_rollback": (_INT, (_POINTER, _SIZE)),
    "llg_matcher_is_accepting": (_BOOL, (_POINTER,)),
    "llg_matcher_is_stopped": (_BOOL, (_POINTER,)),
    "llg_matcher_get_error": (ctypes.c_char_p, (_POINTER,)),
    "llg_free_matcher": (None, (_POINTER,)),
    "llg_free_tokenizer": (None, (_POINTER,)),
}


@cache
def _llguidance() -> SimpleNamespace:
    """The functions of llguidance.h."""
    path = str(next(_folder("llguidance").glob("_lib*.so")))
    functions: dict[str, Any] = {}
    for library, names in ((ctypes.CDLL(path), _LONG), (ctypes.PyDLL(path), _SHORT)):
        for name, (result, arguments) in names.items():
            function = functions[name] = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return SimpleNamespace(**functions)


class LlgTokenizer:
    """The tokens as llguidance wants them: a second for 150,000 of them."""

    def __init__(self, lengths: np.ndarray, text: bytes, stop_token_ids: Sequence[int]) -> None:
        """`lengths`: uint32 [V], of the tokens in `text`; 0: it is no text. Raises GrammarError."""
        self._functions, self._handle = _llguidance(), None
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        data = np.insert(np.frombuffer(text, np.uint8), starts[lengths == 0], _SPECIAL)
        sizes = np.maximum(lengths, 1).astype(np.uint32)
        stops = np.array(stop_token_ids, np.uint32)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit), vocab_size=len(sizes), tok_eos=stop_token_ids[0],
            token_lens=sizes.ctypes.data, token_bytes=data.ctypes.data, use_approximate_greedy_tokenize_fn=True,
            tok_eos_extra=stops[1:].ctypes.data, tok_eos_extra_count=len(stops) - 1,
        )  # fmt: skip
        message = ctypes.create_string_buffer(_MESSAGE)
        self._handle = self._functions.llg_new_tokenizer_v2(ctypes.byref(init), message, _MESSAGE)
        if not self._handle:
            raise GrammarError(f"llguidance does not take this vocabulary: {message.value.decode(errors='replace')}")
        self.init = _MatcherInit()
        self._functions.llg_constraint_init_set_defaults(ctypes.byref(self.init), self._handle)
        self.init.log_stderr_level = 0
        self.init.limits.verbose_errors = False

    def __del__(self) -> None:
        if self._handle:
            self._functions.llg_free_tokenizer(self._handle)

    def problem(self, source: bytes) -> str:
        """Why this is no grammar in llguidance's Lark, or what it warns of; "" where it is one."""
        message = ctypes.create_string_buffer(_MESSAGE)
        code = self._functions.llg_validate_grammar(
            ctypes.byref(self.init), b"lark", _terminated(source), message, _MESSAGE
        )
        return message.value.decode(errors="replace") if code < 0 else ""


class LlgMatcher:
    """Where one output stands in a grammar of llguidance's. Not for several threads at once."""

    def __init__(self, tokenizer: LlgTokenizer, handle: int) -> None:
        self._tokenizer = tokenizer  # has to be there as long as this
        self._functions, self._handle = _llguidance(), handle

    @classmethod
    def of(cls, tokenizer: LlgTokenizer, source: bytes) -> LlgMatcher:
        """At the beginning. Raises GrammarError."""
        matcher = cls(
            tokenizer,
            _llguidance().llg_new_matcher(ctypes.byref(tokenizer.init), b"lark", _terminated(source)),
        )
        matcher._check()
        return matcher

    def __del__(self) -> None:
        self._functions.llg_free_matcher(self._handle)

    def copy(self) -> LlgMatcher:
        return LlgMatcher(self._tokenizer, self._functions.llg_clone_matcher(self._handle))

    def fill(self, row: np.ndarray) -> None:
        """See Matcher.fill. Nothing is allowed where only a stop token can follow."""
        if self._functions.llg_matcher_is_stopped(self._handle):  # or it has failed
            row[:] = 0
            self._check()
        else:
            self._check(self._functions.llg_matcher_compute_mask_into(self._handle, row.ctypes.data, row.nbytes))

    def accept(self, token_id: int) -> bool:
        functions, handle = self._functions, self._handle
        if functions.llg_matcher_is_stopped(handle):
            return False
        token = ctypes.c_uint32(token_id)
        if functions.llg_matcher_validate_tokens(handle, ctypes.byref(token), 1) != 1:
            return False
        self._check(functions.llg_matcher_consume_token(handle, token_id))
        return True

    def rollback(self, count: int) -> None:
        self._check(self._functions.llg_matcher_rollback(self._handle, count))

    def may_end(self) -> bool:
        accepting: bool = self._functions.llg_matcher_is_accepting(self._handle)
        return accepting

    def _check(self, code: int = -1) -> None:
        """`code`: what a call has returned, negative where there may be an error."""
        if code < 0 and (error := self._functions.llg_matcher_get_error(self._handle)) is not None:
            raise GrammarError(error.decode(errors="replace").strip().partition("\n")[0])


def _terminated(source: bytes) -> bytes:
    """C's strings end at the first zero."""
    if b"\0" in source:
        raise GrammarError("it has a NUL character: write it as \\x00")
    return source
