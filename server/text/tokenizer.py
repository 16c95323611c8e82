"""A tokenizer and its chat template: text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from tokenizers import Encoding, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from ..errors import bad_request, shorten
from ..media.source import order_of
from .capabilities import Capabilities
from .conversation import with_ids
from .probe import SECONDS, Render, ask, written_call
from .shape import shape, shape_tools
from .spelled import MARK, Spellings, pieces, restored
from .template import ChatTemplate, check_variables, request_template
from .tool_text import ToolText, check_shown
from .trial import is_panic

REQUEST_SECONDS = 0.1  # of computing, for what is asked of a template that came in a request: others wait for it
BATCH = 4096  # pieces of a text at a time: what the library makes of one takes as much as many tokens


class Pair(NamedTuple):
    """Two texts as one."""

    token_ids: list[int]
    second: int = 0  # where the second one begins, for models that tell them apart by a type; 0: these do not


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads: the Rust tokenizer is never reconfigured."""

    missing = False  # there is none, only token ids

    def __init__(
        self,
        core: FastTokenizer,
        special_tokens: dict[str, str],
        templates: dict[str, str],
        load_hf: Callable[[], Any],
    ) -> None:
        """`special_tokens`: "eos_token" and so on, as templates know them. `templates`: by name, "default" among them.
        `load_hf` makes the tokenizer of transformers, for those who ask for it.
        """
        core.no_truncation()
        core.no_padding()
        self.core = core
        self.special_tokens = special_tokens
        eos = special_tokens.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else core.token_to_id(eos)
        # A byte-level decoder turns each token into bytes whatever stands before it; others (Metaspace strips the first
        # space) need to see some tokens of the prompt.
        self.byte_level = isinstance(core.decoder, decoders.ByteLevel)
        self._templates = templates
        self._compiled: dict[str, ChatTemplate] = {}
        self._load_hf = load_hf
        self._bytes: dict[int, bytes] = {}
        # Texts of single tokens, as the decoder gave them, with and without special ones; for Detokenizer.
        self.texts: dict[bool, dict[int, str]] = {True: {}, False: {}}
        self.tells_types = False  # the model is to know which tokens are of the second text of a pair
        self.users_speak_tokens = False  # special tokens in the messages of users and tools are tokens
        self.template_kwargs: dict[str, Any] = {}  # variables of the template where requests leave them out
        self.history_id: Callable[[str], str] | None = None  # what the template wants of the ids of tool calls
        self.tool_text: ToolText | None = None  # how tools are written where the template shows none

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of transformers. Takes seconds the first time: nothing that serves a request needs it."""
        return self._load_hf()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def with_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        other = Tokenizer(self.core, self.special_tokens, {"default": source}, self._load_hf)
        other.largest_id = self.largest_id
        other.users_speak_tokens, other.tells_types = self.users_speak_tokens, self.tells_types
        other.template_kwargs = self.template_kwargs
        return other

    @cached_property
    def special(self) -> dict[int, str]:
        """The special tokens, by id."""
        return {id: token.content for id, token in self.core.get_added_tokens_decoder().items() if token.special}

    @cached_property
    def largest_id(self) -> int:
        """No text gives a larger one. Takes as long as it takes to look at each, once."""
        return max(self.core.get_vocab().values(), default=-1)

    @cached_property
    def _spellings(self) -> Spellings:
        return Spellings(self.special.values())

    @cached_property
    def special_texts(self) -> frozenset[str]:
        return frozenset(self.special.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises ApiError (400) where the tokenizer itself gives up."""
        try:
            # The "fast" call leaves out the offsets, which nobody reads here.
            return self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _unreadable(error) from None

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Several at once, with special tokens around each."""
        return [one.ids for one in self.core.encode_batch_fast(texts, add_special_tokens=True)]

    def count(self, text: str) -> int:
        """How many tokens a text is, without special ones around it."""
        try:
            return len(self.core.encode_batch_fast([text], add_special_tokens=False)[0])
        except BaseException as error:
            raise _unreadable(error) from None

    def encode_pair(self, first: str, second: str) -> Pair:
        """Two texts, joined as the model wants it. Raises ApiError (400)."""
        try:
            found = self.core.encode_batch_fast([(first, second)], add_special_tokens=True)[0]
        except BaseException as error:
            raise _unreadable(error) from None
        types = found.type_ids if self.tells_types else []
        return Pair(found.ids, types.index(1) if 1 in types else 0)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that stand before and behind every text."""
        found = self.core.encode("a", add_special_tokens=True)
        inner = [i for i, special in enumerate(found.special_tokens_mask) if not special]
        return (found.ids[: inner[0]], found.ids[inner[-1] + 1 :]) if inner else ([], [])

    def cut(self, text: str, most: int) -> str:
        """Its first `most` tokens, at least 1 of them."""
        try:
            offsets = self.core.encode(text, add_special_tokens=False).offsets
        except BaseException as error:
            raise _unreadable(error) from None
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]

    def encode_rendered(self, text: str, add_special_tokens: bool) -> list[int]:
        """Of what `render` gave, whose marks are left out. Raises ApiError (400)."""
        if MARK not in text:
            return self.encode(text, add_special_tokens)
        parts = pieces(text)
        batches = (parts[start : start + BATCH] for start in range(0, len(parts), BATCH))
        try:
            encoded = (self.core.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
            if not add_special_tokens:
                return [token for batch in encoded for piece in batch for token in piece.ids]
            whole = Encoding.merge([Encoding.merge(batch, growing_offsets=False) for batch in encoded], False)
            return self.core.post_process(whole, add_special_tokens=True).ids
        except BaseException as error:
            raise _unreadable(error) from None

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, also where it is only part of a character. Special tokens are their names."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._token_bytes(token_id)
        return known

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.core.id_to_token(token_id)
        if token is None:  # a row of the embedding that no token uses
            return b""
        if self.byte_level:
            if all(char in _BYTE_OF_CHAR for char in token):
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if "▁" in token:
            return token.replace("▁", " ").encode()
        return self.core.decode([token_id], skip_special_tokens=False).encode()

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any], pictures: list[int] | None = None) -> str:
        """The prompt of a chat. `options`: add_generation_prompt, continue_final_message, tools, documents,
        chat_template (instead of the model's), and variables of the template. It may have marks: see spelled.py.
        `pictures`: gets the numbers of the pictures in the messages, in the order of the prompt.

        Raises ApiError (400) when there is no template, or it does not accept these messages, or takes too long.
        """
        variables = {**self.special_tokens, **options}
        source = variables.pop("chat_template", None)
        template = self.template(bool(options.get("tools"))) if source is None else request_template(source)
        marked = None
        if not self.users_speak_tokens:
            marked = self._spellings.marked(messages, variables.get("documents"))
        if marked is not None:
            messages, variables["documents"] = marked
        if self.history_id is not None:
            messages = with_ids(messages, self.history_id)
        seconds = SECONDS if source is None else REQUEST_SECONDS
        can, tools = self.capabilities(template, seconds), variables.get("tools")
        if self.tool_text is None:
            check_shown(messages, tools, can)
        else:
            messages, tools = self.tool_text.written(messages, tools, can)
        variables["tools"] = shape_tools(tools, can) if tools else tools
        messages = shape(messages, can, continued=bool(options.get("continue_final_message")))
        if pictures is not None:
            pictures += order_of(messages)
        text = template.render(messages, variables)
        return text if marked is None else restored(text)

    def template(self, tools: bool = False) -> ChatTemplate:
        """The model's template. Raises ApiError (400)."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._compiled.get(name)
        if template is None:
            if name not in self._templates:
                raise bad_request(
                    "This model has no chat template: send text in place of messages ('prompt' of /v1/completions, "
                    "'input' of embeddings), or start the server with --chat-template.",
                    "messages",
                    "no_chat_template",
                )
            template = self._compiled[name] = ChatTemplate(self._templates[name])
        return template

    def capabilities(self, template: ChatTemplate, seconds: float = SECONDS) -> Capabilities:
        """What a template can take, which it is asked once, for so many seconds of computing at most."""
        if template.can is None:
            template.can = ask(self._renderer(template), seconds)
        return template.can

    def written_call(self, count: int = 1) -> str:
        """How the template writes a call, or `count` of them; empty where it writes none."""
        template = self.template(tools=True)
        return written_call(self._renderer(template), self.capabilities(template), count)

    def _renderer(self, template: ChatTemplate) -> Render:
        return lambda messages, variables: template.render(messages, {**self.special_tokens, **variables})

    def renders_slowly(self, options: dict[str, Any]) -> bool:
        """A template whose author is a client, or that once took long, is to be kept off the event loop."""
        return "chat_template" in options or any(template.slow for template in self._compiled.values())

    def check_template_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Raises ApiError (400)."""
        check_variables(kwargs)


class NoTokenizer(Tokenizer):
    """Prompts are token ids, and so are answers."""

    missing = True

    def __init__(self) -> None:
        super().__init__(FastTokenizer(models.BPE()), {}, {}, no_text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        no_text()

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        return no_text() if texts else []

    def encode_pair(self, first: str, second: str) -> Pair:
        no_text("documents")

    @property
    def ends(self) -> tuple[list[int], list[int]]:
        return [], []

    def cut(self, text: str, most: int) -> str:
        no_text("documents")

    def count(self, text: str) -> int:
        no_text()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def template(self, tools: bool = False) -> ChatTemplate:
        no_text("messages")


def no_text(param: str = "prompt") -> NoReturn:
    """Raises ApiError (400)."""
    raise bad_request(
        "This server has no tokenizer (--skip-tokenizer-init): give token ids to /v1/completions or /v1/embeddings, "
        "and read 'token_ids' of the answer.", param, "no_tokenizer",
    )  # fmt: skip


def _unreadable(error: BaseException) -> BaseException:
    if is_panic(error):
        return bad_request(f"The tokenizer cannot read this text ({shorten(str(error))}).", "prompt")
    return error


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character (GPT-2's table, openai/gpt-2 src/encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
