"""What those APIs share that ask for vectors or numbers of texts: nothing is streamed, nothing is sampled."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import Response

from ..errors import ApiError
from ..generation.answer import Answer
from ..generation.choice import Choice, Prompt
from ..generation.embedding import EmbeddingChoice, EmbeddingOptions, numbers, packed
from ..generation.generation import Generation
from ..generation.weight import NUMBER, check_vectors
from ..http.auth import key_of
from ..text.encoding import Encoder
from ..wire.pooled import EncodedRequest, InputRequest, PooledRequest
from ..wire.tokens import TokenizeRequest
from .dialect import Dialect, Load, Ready
from .tokens import chat_tokens


class PooledDialect(Dialect):
    body: PooledRequest
    bytes_per_number = NUMBER  # of what the answer is made of

    @property
    def param(self) -> str:
        """The field that has the texts."""
        raise NotImplementedError

    def load(self, num_tokens: int) -> Load:
        """A list, which is soon done, counts as no more than runs at once, and than its key may have open: the queue
        has room for others beside it."""
        key, most = key_of(self.request.scope), self.server.client.info.max_num_seqs
        if key is not None and key.quota.max_open_requests:
            most = min(most, key.quota.max_open_requests)
        return Load(min(self.num_prompts, most), min(num_tokens, self.server.admission.capacity), self.param)

    async def prepare(self, prompts: Sequence[Prompt]) -> Ready:
        limit, info = self.server.config.max_answer_bytes, self.server.client.info
        check_vectors(prompts, limit, info, self.param, self.bytes_per_number)
        return Ready(prompts, EmbeddingOptions())

    def slowness(self, answers: Sequence[Answer]) -> int:
        info = self.server.client.info
        return len(answers) * (len(info.labels) or info.hidden_size)


class InputDialect(PooledDialect):
    """Of inputs, or of one conversation."""

    body: InputRequest

    @property
    def num_prompts(self) -> int:
        return self.body.num_inputs

    @property
    def param(self) -> str:
        return self.body.param

    async def token_ids(self, fits: bool, prefix: str = "") -> list[list[int]]:
        """Of each input. `fits`: those are refused that are longer than the context; `prefix`: stands before each text.
        Raises ApiError (400)."""
        body, server, info = self.body, self.server, self.server.client.info
        if body.messages is not None:
            chat = TokenizeRequest.model_construct(
                model=server.model.names[0], messages=body.messages, add_special_tokens=body.add_special_tokens,
                add_generation_prompt=bool(body.add_generation_prompt), chat_template=body.chat_template,
                continue_final_message=body.continue_final_message, chat_template_kwargs=body.chat_template_kwargs,
            )  # fmt: skip
            return [(await chat_tokens(self.request, chat, fits=fits, sees=False)).token_ids]
        inputs: Sequence[str | list[int]] = body.input
        if prefix:
            inputs = [prefix + one if isinstance(one, str) else one for one in inputs]
        num_characters = sum(len(text) for text in inputs if isinstance(text, str))
        encoder = Encoder(server.lanes, server.model.tokenizer, info.max_model_len, self.param, fits=fits)
        return await server.encode(num_characters, encoder, inputs, body.add_special_tokens is not False)


def vector_of(choice: Choice) -> bytes:
    """What the engine has said of a prompt: little-endian float32."""
    assert isinstance(choice, EmbeddingChoice)
    if choice.embedding is None:
        raise ApiError(400, "The request was cancelled.", code="cancelled")
    return choice.embedding


def encoded(vector: bytes, body: EncodedRequest) -> str | msgspec.Raw:
    """As the body wants it, where the answer is JSON."""
    return b64encode(in_bytes(vector, body)).decode() if body.encoding_format == "base64" else listed(numbers(vector))


def listed(values: Sequence[float]) -> msgspec.Raw:
    """JSON by itself: while an encoder writes millions of numbers in one go, no other thread runs."""
    return msgspec.Raw(msgspec.json.encode(values))


def in_bytes(vector: bytes, body: EncodedRequest) -> bytes:
    """`vector`: little-endian float32."""
    if body.embed_dtype in (None, "float32") and body.endianness != "big":
        return vector
    return packed(vector, body.embed_dtype or "float32", body.endianness == "big")


def raw_response(
    vectors: Sequence[tuple[bytes, Sequence[int]]], body: EncodedRequest, about: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Response:  # fmt: skip
    """The vectors one behind the other, each given with its shape. Where the body asks for it, the header `metadata`
    has `about`, and what lies where."""
    parts = [in_bytes(vector, body) for vector, _ in vectors]
    own = dict(headers)
    if body.encoding_format == "bytes":
        ends = list(accumulate(map(len, parts)))
        form = {"embed_dtype": body.embed_dtype or "float32", "endianness": body.endianness or "native"}
        data = [
            {"index": index, **form, "start": end - len(part), "end": end, "shape": list(shape)}
            for index, (part, end, (_, shape)) in enumerate(zip(parts, ends, vectors, strict=True))
        ]
        own["metadata"] = json.dumps({**about, "data": data}, separators=(",", ":"))  # ASCII, as headers are
    return Response(b"".join(parts), headers=own, media_type="application/octet-stream")


def usage(generation: Generation) -> dict[str, Any]:
    num_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
