"""What a client asks an output to look like, and how the API process has it compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from ...engine.link.messages import SetVocabulary


@dataclass(frozen=True)
class Constraint:
    """What an output must look like."""

    kind: Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "tools"]
    text: str  # canonical JSON for json, choice, structural_tag; for tools, see lark.py
    any_whitespace: bool = True
    whitespace_pattern: str | None = None  # between the tokens of JSON
    additional_properties: bool = True  # False: no object has properties that its schema does not list
    markers: bool = False  # the special tokens that the model writes tool calls with may be in it


class Compile(msgspec.Struct, frozen=True, array_like=True, tag="compile"):
    """API process → compiler."""

    id: int
    constraint: Constraint
    timeout: float  # seconds


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """API process → compiler: nobody waits for this one any more, and others do."""

    id: int


class Compiled(msgspec.Struct, frozen=True, array_like=True, tag="compiled"):
    """Compiler → API process: a grammar as AddGrammar carries it, or why there is none."""

    id: int
    backend: str = ""
    payload: bytes = b""
    error: str | None = None  # one sentence for the client
    seconds: float = 0.0
    is_costly: bool = False  # it took all of its time, or the compiler with it: it is not to be tried again soon


# The first message, and the first answer: the same with xgrammar's part, as engines get it.
ToCompiler = SetVocabulary | Compile | Drop
FromCompiler = SetVocabulary | Compiled
