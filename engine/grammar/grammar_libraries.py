"""xgrammar and llguidance, their vocabularies read by their C interfaces, which leave the interpreter's lock to others.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # starting an engine alone does not need it
    import numpy as np

logger = logging.getLogger(__name__)

_RAW = 0  # xgrammar.VocabType: tokens are the bytes that they stand for
_SPECIAL = 0xFF  # llguidance: the first byte of a token that is no text
_XGRAMMAR = ("CompiledGrammar", "Grammar", "GrammarCompiler", "GrammarMatcher", "TokenizerInfo")
_MESSAGE = 1000  # bytes of an error
_UNKNOWN_LLGUIDANCE = "this release of llguidance is not known: install the one that constraints.txt names"
_TRIAL, _TRIAL_STOP = [b"a", b"b", b""], 2  # a vocabulary, and its stop token


class GrammarError(Exception):
    """The request that follows this grammar cannot go on."""


def load() -> None:
    """Loads both: 50 ms, with the interpreter's lock for much of it, and tries what is asked of them. Raises nothing:
    what needs them hears of it."""
    try:
        _try_xgrammar()
        _try_llguidance()
    except Exception as error:
        logger.warning("structured outputs are unavailable: %s: %s", type(error).__name__, error)


def _try_xgrammar() -> None:
    """A grammar of one word, on the way from the compiler's process to a mask. Raises whatever is wrong with it."""
    import numpy as np

    library, row = xgrammar(), np.zeros((1, 1), np.int32)
    info = library.TokenizerInfo.deserialize_json(tokenizer_info(_TRIAL, [_TRIAL_STOP]).decode("ascii"))
    grammar = library.Grammar.from_ebnf('root ::= "b"', "root")
    compiled = library.GrammarCompiler(info, 1, False, -1).compile_grammar_ebnf(grammar)
    matcher = library.GrammarMatcher(
        library.CompiledGrammar.deserialize_json(str(compiled.serialize_json()), info), None, False, -1, None
    )
    matcher.fill_next_token_bitmask(row, 0, False)
    if row[0, 0] & 0b111 != 0b010 or not matcher.accept_token(1, False):
        raise GrammarError("this release of xgrammar is not known: install the one that constraints.txt names")


def _try_llguidance() -> None:
    """Whether what was made by the C interface is a tokenizer for the Python module. Raises likewise."""
    import numpy as np

    made = tokenizer(np.array([1, 1, 0], np.uint32), b"ab", [_TRIAL_STOP])
    if made.vocab_size != len(_TRIAL) or made.eos_token != _TRIAL_STOP or made.tokenize_str("ba") != [1, 0]:
        raise GrammarError(_UNKNOWN_LLGUIDANCE)


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


@cache
def _llguidance() -> ctypes.CDLL:
    """llguidance.h, which the Python module exports beside its own."""
    from llguidance import LLTokenizer, _lib

    # Both are one pointer to the same: see tokenizer.
    if LLTokenizer.__basicsize__ != object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
        raise GrammarError(_UNKNOWN_LLGUIDANCE)
    library = ctypes.CDLL(str(_lib.__file__))
    library.llg_new_tokenizer_v2.restype = ctypes.c_void_p
    library.llg_free_tokenizer.argtypes = (ctypes.c_void_p,)
    return library


def tokenizer(lengths: np.ndarray, text: bytes, stop_token_ids: Sequence[int]) -> Any:
    """llguidance.LLTokenizer: a second for 150,000 tokens. `lengths`: uint32 [V], of the tokens in `text`; 0: it is no
    text. Raises GrammarError.

    LLTokenizer's own constructor would hold the interpreter's lock all the time. What it holds is a pointer, which the
    C interface makes as well: a small one is made, and the two change places."""
    import numpy as np
    from llguidance import LLTokenizer

    library = _llguidance()
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
    made = library.llg_new_tokenizer_v2(ctypes.byref(init), message, ctypes.c_size_t(_MESSAGE))
    if not made:
        raise GrammarError(f"llguidance does not take this vocabulary: {message.value.decode(errors='replace')}")
    small = LLTokenizer("byte")
    one, other = (ctypes.c_void_p.from_address(at) for at in (made, id(small) + object.__basicsize__))
    one.value, other.value = other.value, one.value
    library.llg_free_tokenizer(made)
    return small
