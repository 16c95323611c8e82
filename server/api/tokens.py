"""POST /tokenize, /detokenize: what becomes of text before a model sees it"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastapi import Request, Response

from ...engine.link.media import MediaItem
from ..generation.prompt import chat_options, chat_prompt
from ..generation.sampling import check_tokens
from ..http.auth import cache_salt_of
from ..http.disconnect import unless_disconnected
from ..media.expansion import check_places, expanded
from ..media.source import Source, has_pictures, refused, taken_out
from ..state import INLINE_CHARACTERS, ServerState
from ..text.encoding import Encoder
from ..text.spelled import unmarked
from ..text.tokenizer import no_text
from ..wire.encoded import encode
from ..wire.requests import ChatRequest
from ..wire.tokens import DetokenizeRequest, TokenizeRequest
from .ignored import ignored_headers
from .read import read_request
from .route import new_router

# Characters beyond which messages are rendered where bodies are read, which is Python's work too: of several threads
# that do such work, each waits for its turn, and so does the event loop, several times a request.
MUCH = 16 << 10

router = new_router()
T = TypeVar("T")


@router.post("/tokenize", response_class=Response)
async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of the prompt that messages become."""
    body = await read_request(TokenizeRequest, request)
    server = ServerState.of(request).named(body.model)
    server.model_name(body.model)
    max_model_len = server.engine_info().max_model_len
    tokenizer = server.model.tokenizer

    async def work() -> Response:
        if body.messages is not None:
            token_ids = (await chat_tokens(request, body, fits=False)).token_ids
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            encoder = Encoder(server.lanes, tokenizer, max_model_len, "prompt", fits=False)
            (token_ids,) = await server.encode(len(text), encoder, [text], special)

        def answer() -> Response:
            names = [tokenizer.core.id_to_token(token) for token in token_ids] if body.return_token_strs else None
            return json_answer(
                body.ignored,
                {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": names},
            )

        return await server.tokenise(len(token_ids), answer)

    return await watched(request, work())


@router.post("/detokenize", response_class=Response)
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    body = await read_request(DetokenizeRequest, request)
    server = ServerState.of(request).named(body.model)
    server.model_name(body.model)
    info = server.engine_info()
    if server.model.tokenizer.missing:
        no_text("tokens")
    core, skip = server.model.tokenizer.core, bool(body.skip_special_tokens)

    def work() -> Response:
        check_tokens("tokens", body.tokens, info)
        # Unlike decode, a batch lets other threads run.
        (text,) = core.decode_batch([body.tokens], skip_special_tokens=skip)
        return json_answer(body.ignored, {"prompt": text})

    return await watched(request, server.tokenise(4 * len(body.tokens), work))


class ChatPrompt(NamedTuple):
    text: str  # as the template has rendered it: one token for each picture
    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()


async def chat_tokens(
    request: Request,
    body: ChatRequest | TokenizeRequest,
    messages: Callable[[], list[dict[str, Any]]] | None = None,
    *,
    size: int | None = None,
    fits: bool = True,
    sees: bool = True,
) -> ChatPrompt:
    """The prompt of a chat that `request` asks for in whatever API. `messages` makes those of
    the whole conversation, where the body has only part of it, when they are rendered; `size`: their characters, by
    default the bytes that the request brings. `fits`: whether it is refused where it is longer than the context.
    `sees`: whether its pictures can be used. Raises ApiError (400).
    """
    server = ServerState.of(request).named(body.model)
    tokenizer = server.model.tokenizer
    options = chat_options(body, tokenizer, server.config.trust_request_chat_template)
    special = bool(body.add_special_tokens)
    encoder = Encoder(server.lanes, tokenizer, server.client.info.max_model_len, "messages", fits=fits)

    sources: list[Source] = []
    order: list[int] = []  # of them in the prompt

    def rendered(is_short: Callable[[int], bool] = encoder.is_short) -> tuple[str, list[int] | None]:
        whole = body.messages or [] if messages is None else messages()
        if has_pictures(whole):
            if not sees or not server.sees(body.model):
                raise refused(whole)
            assert server.pictures is not None
            whole, sources[:] = taken_out(whole)
            server.pictures.check_number(sources)
        return chat_prompt(whole, special, tokenizer, options, is_short, order)

    # Tools, documents and variables are part of the prompt too; many values take longer than their bytes say.
    num_characters = max(request.state.body_size if size is None else size, request.state.body_work)
    if num_characters > MUCH or request.state.body_work:
        text, _ = await ServerState.of(request).bodies.run(num_characters, lambda: rendered(lambda length: False))
        token_ids = None
        if encoder.is_short(len(text)):
            work = partial(tokenizer.encode_rendered, text, special)
            token_ids = await server.tokenise(len(text), work)
    else:
        text, token_ids = await server.tokenise(num_characters, rendered, tokenizer.renders_slowly(options))
    if token_ids is None:
        token_ids = await encoder.encode_rendered(text, special)
    if not sources:
        return ChatPrompt(unmarked(text), token_ids)
    pictures = server.pictures
    assert pictures is not None
    check_places(token_ids, len(sources), pictures.processor)
    salt = cache_salt_of(request.scope, getattr(body, "cache_salt", None))
    limit = server.client.info.max_model_len if fits else None
    if (held := getattr(request.state, "held_pictures", None)) is None:
        held = request.state.held_pictures = pictures.hold()
        if (ticket := getattr(request.state, "ticket", None)) is not None:
            ticket.on_release = partial(_one_after_another, ticket.on_release, held.release)
    try:
        items = await pictures.items([sources[i] for i in order], salt, limit, held)
        token_ids, media = expanded(token_ids, items, pictures.processor)
        return ChatPrompt(unmarked(text), token_ids, media)
    finally:
        if getattr(request.state, "ticket", None) is None:  # nothing is generated
            held.release()


def drop_pictures(request: Request) -> None:
    """Those of the prompts so far are not used."""
    if (held := getattr(request.state, "held_pictures", None)) is not None:
        held.release()


def _one_after_another(*actions: Callable[[], None] | None) -> None:
    for action in actions:
        if action is not None:
            action()


async def watched(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; where it is long, it ends when its client leaves."""
    if request.state.body_size <= INLINE_CHARACTERS:
        return await work
    return await unless_disconnected(request.receive, work)


def json_answer(ignored: list[str], content: Any) -> Response:
    return Response(encode(content), headers=ignored_headers(ignored), media_type="application/json")
