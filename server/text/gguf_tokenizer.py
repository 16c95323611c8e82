"""The tokenizer inside a GGUF file, put together with the tokenizers library alone.

The file has tokens, their kinds and scores or merges; how text is divided before is only named, and the names are those
of llama.cpp. A name that is not known here is refused: a wrong division gives a model tokens that it never saw.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from ...engine.errors import ModelError
from ...engine.files.gguf_file import GGUFFile, Strings
from .files import QWEN_WORDS, TokenizerFiles

logger = logging.getLogger(__name__)
SHOWN = 8  # names in an error

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_NAMED = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding",
    "mask_token": "mask",
}  # fmt: skip
_REMEDY = "name another tokenizer with --tokenizer"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = QWEN_WORDS.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre → expressions, each of which divides what the one before has left.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9]{3}")
_WORDS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2_WORDS,),
    "qwen2": (QWEN_WORDS,),
    "deepseek-r1-qwen": (QWEN_WORDS,),
    "tekken": (_TEKKEN_WORDS,),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (_GPT4O_WORDS,)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx", "glm4", "chatglm-bpe"),
        (_LLAMA3_WORDS,),
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2_WORDS)),
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is brought into NFC first
# A text begins with the bos token.
_BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
_WHOLE_WORDS = (*_BEGUN, "gpt-4o")  # a word that is a token is that token whatever the merges say


def read_gguf_tokenizer(file: GGUFFile) -> TokenizerFiles:
    """Raises ModelError naming the key at fault."""
    keys = file.metadata
    kind = keys.get("tokenizer.ggml.model")
    build = _BUILDERS.get(str(kind))
    if kind is None or build is None:
        found = "no tokenizer" if kind is None else f"a tokenizer of the kind {kind!r:.40}"
        raise ModelError(f"{file.path} has {found}, read are {', '.join(_BUILDERS)}: {_REMEDY}")
    table = _Table(file)
    try:
        if isinstance(text := keys.get("tokenizer.huggingface.json"), str):  # the original: nothing can be nearer
            core = FastTokenizer.from_str(text)
        else:
            core = build(table)
    except ModelError:
        raise
    except Exception as error:  # the library raises whatever the vocabulary provokes
        raise ModelError(
            f"{file.path}: its {kind} tokenizer cannot be built ({' '.join(str(error).split())[:120]}): {_REMEDY}"
        ) from None
    return TokenizerFiles(core, table.named, _templates(file))


def _templates(file: GGUFFile) -> dict[str, str]:
    names = file.metadata.get("tokenizer.chat_templates")
    found = {}
    for name in names if isinstance(names, Strings) else ():
        found[name] = file.metadata.get(f"tokenizer.chat_template.{name}")
    found["default"] = file.metadata.get("tokenizer.chat_template", found.get("default"))
    return {name: text for name, text in found.items() if isinstance(text, str)}


class _Table:
    """The vocabulary: tokens by id, and what kind each is of."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.keys = file, file.metadata
        tokens = self._get("tokens", Strings)
        self.tokens: list[str] = list(tokens)
        self.kinds: tuple[int, ...] = self.array("token_type", (_NORMAL,) * len(tokens))
        self.named = {name: text for name in _NAMED if (text := self._token(name)) is not None}

    def array(self, key: str, default: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """One value a token."""
        values = default if default is not None and f"tokenizer.ggml.{key}" not in self.keys else self._get(key, tuple)
        if len(values) != len(self.tokens):
            raise ModelError(
                f"{self.file.path}: tokenizer.ggml.{key} has {len(values)} values for {len(self.tokens)} tokens: "
                "download it again"
            )
        return values

    def merges(self) -> list[tuple[str, str]]:
        """Of byte-level tokens, where only a blank can stand between the two."""
        found = []
        for merge in self._get("merges", Strings):
            left, _, right = merge.partition(" ")
            found.append((left, right))
        return found

    def vocabulary(self) -> dict[str, int]:
        """Without rows of the embedding that have no token ([PAD151936])."""
        return {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED
        }

    def add_whole(self, core: FastTokenizer) -> None:
        """Tokens that stand for themselves in a text: control tokens, which are special, and user-defined ones."""
        whole = [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
        core.add_tokens(whole)

    def add_ends(self, core: FastTokenizer, bos: bool) -> None:
        """bos and eos around a text; `bos`: where no key says it."""
        before = self.named.get("bos_token") if self.keys.get("tokenizer.ggml.add_bos_token", bos) else None
        after = self.named.get("eos_token") if self.keys.get("tokenizer.ggml.add_eos_token", False) else None
        if before is None and after is None:
            return
        single = [text for text in (before, "$A", after) if text is not None]
        ends = {text: core.token_to_id(text) for text in (before, after) if text is not None}
        pair = [*single, *(f"{text.replace('$A', '$B')}:1" for text in single)]
        core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ends.items()))

    def _get(self, key: str, kind: type) -> Any:
        value = self.keys.get(f"tokenizer.ggml.{key}")
        if value is None:
            raise ModelError(f"{self.file.path} lacks the key tokenizer.ggml.{key}: {_REMEDY}")
        if not isinstance(value, kind):
            raise ModelError(
                f"{self.file.path}: tokenizer.ggml.{key} is a {type(value).__name__}, an array of "
                f"{'strings' if kind is Strings else 'numbers'} belongs there: download it again"
            )
        return value

    def _token(self, name: str) -> str | None:
        key = f"tokenizer.ggml.{_NAMED[name]}_token_id"
        index = self.keys.get(key)
        if index is None:
            return None
        if not isinstance(index, int) or not 0 <= index < len(self.tokens):
            raise ModelError(f"{self.file.path}: {key} is {index!r}, there are {len(self.tokens)} tokens: {_REMEDY}")
        return self.tokens[index]


def _byte_level(table: _Table) -> FastTokenizer:
    """BPE over bytes, as GPT-2 began it."""
    pre = table.keys.get("tokenizer.ggml.pre")
    if pre is None:  # older than the key: transformers knows Qwen's by the architecture, nobody the others
        pre = "qwen2" if str(table.keys.get("general.architecture")).startswith("qwen") else "default"
        logger.warning(
            "%s does not say how its tokenizer divides text (tokenizer.ggml.pre): %r is assumed, and answers may "
            "suffer; convert the model again, or %s", table.file.path.name, pre, _REMEDY,
        )  # fmt: skip
    if pre not in _WORDS:
        raise ModelError(
            f"{table.file.path} divides text by the rules {pre!r:.40} (tokenizer.ggml.pre), read are "
            f"{', '.join([*_WORDS][:SHOWN])} and {len(_WORDS) - SHOWN} more: {_REMEDY}"
        )
    core = FastTokenizer(models.BPE(vocab=table.vocabulary(), merges=table.merges(), ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        core.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in _WORDS[pre]]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    table.add_whole(core)
    table.add_ends(core, bos=pre in _BEGUN)
    return core


def _sentencepiece(table: _Table) -> FastTokenizer:
    """SentencePiece's BPE by scores, with bytes for characters that have no piece."""
    vocabulary = table.vocabulary()
    scores = table.array("scores")
    pieces = {
        token: score
        for token, score, kind in zip(table.tokens, scores, table.kinds, strict=True)
        if kind == _NORMAL
    }  # fmt: skip
    unknown = table.named.get("unk_token") or next(
        (token for token, kind in zip(table.tokens, table.kinds, strict=True) if kind == _UNKNOWN), None
    )
    core = FastTokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges_of(pieces, vocabulary), unk_token=unknown, fuse_unk=True,
            byte_fallback=_BYTE in table.kinds,
        )
    )  # fmt: skip
    blanks: list[Any] = [normalizers.Replace(" ", "▁")]
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if table.keys.get("tokenizer.ggml.add_space_prefix", True):
        # Of each part between special tokens, as llama.cpp and SentencePiece have it
        blanks.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(content=" ", left=1))
    core.normalizer = normalizers.Sequence(blanks)
    core.decoder = decoders.Sequence(steps)
    table.add_whole(core)
    table.add_ends(core, bos=True)
    return core


def merges_of(pieces: dict[str, float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece joins them: it takes the two neighbours whose whole scores highest,
    however the whole came about. `vocabulary` orders what scores alike.

    Of two overlapping pairs that make the same whole (ab·a, a·ba in "ab a ba") SentencePiece takes the left one, merges
    the one whose cut comes first: as in the tokenizer.json that transformers makes of such a vocabulary.
    """
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: (-pieces[piece], vocabulary[piece]))
        for cut in _cuts(piece, pieces)
    ]


def _cuts(piece: str, pieces: dict[str, float]) -> Iterable[int]:
    return (cut for cut in range(1, len(piece)) if piece[:cut] in pieces and piece[cut:] in pieces)


_BUILDERS: dict[str, Callable[[_Table], FastTokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
