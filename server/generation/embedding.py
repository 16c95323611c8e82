"""Inputs become engine requests for embeddings, and the engine's word on each becomes a vector."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import msgspec

from ...engine.errors import ConfigError
from ...engine.link.messages import EngineInfo, RequestOutput
from ...engine.link.sampling_params import Pooling, SamplingParams
from ..client.mailbox import MailboxLike
from ..errors import bad_request, context_length_exceeded, shorten, unsupported
from ..text.detokenizer import Detokenizer, NoText
from ..text.model import TextModel
from ..text.pooling import PoolingDefaults
from ..text.tokenizer import Pair, Tokenizer
from ..wire.embeddings import EmbeddingRequest
from ..wire.pooled import PooledRequest
from .choice import Choice, Delta, Prompt, TextOptions
from .sampling import prompt_ids, truncated


def resolve_embeddings(
    request: EmbeddingRequest, inputs: Sequence[list[int]], model: TextModel, info: EngineInfo
) -> list[list[Prompt]]:
    """The pieces of each input: one, but for an input that is longer than the context where that is allowed. Raises
    ApiError (400) for what this model or engine cannot do."""
    pooling = embedding(model, info, is_normalized(request, model), request.dimensions)
    info = of_embeddings(model, info)
    check_prompts(request, info)
    whole, piece = sampling_of(pooling), sampling_of(msgspec.structs.replace(pooling, normalize=False))
    size, longest = info.max_model_len, model.pooling.longest
    prompts = []
    for token_ids in inputs:
        ids = _ids(request, token_ids, request.is_text, request.param, model, info)
        if len(ids) <= size:
            prompts.append([Prompt(ids, whole)])
        elif longest is None or 0 < longest < len(ids):
            raise context_length_exceeded(max(size, longest or 0), len(ids), None, request.param)
        else:
            prompts.append([Prompt(ids[start : start + size], piece) for start in range(0, len(ids), size)])
    return prompts


def resolve_pooled(
    request: PooledRequest, inputs: Sequence[list[int] | Pair], pooling: Pooling, model: TextModel, info: EngineInfo,
    *, param: str, is_text: bool = True,
) -> list[Prompt]:  # fmt: skip
    """A prompt of each input, `param` the field that has them. Raises ApiError (400)."""
    check_prompts(request, info)
    plain, prompts = sampling_of(pooling), []
    for one in inputs:
        token_ids, second = one if isinstance(one, Pair) else (one, 0)
        ids = _ids(request, token_ids, is_text, param, model, info)
        if len(ids) > info.max_model_len:
            raise context_length_exceeded(info.max_model_len, len(ids), None, param)
        sampling = sampling_of(msgspec.structs.replace(pooling, second=second)) if second else plain
        prompts.append(Prompt(ids, sampling))
    return prompts


def embedding(model: TextModel, info: EngineInfo, normalize: bool, dimensions: int | None = None) -> Pooling:
    """How this model makes one of a text. Raises ApiError (400) where it cannot, or has no so many dimensions."""
    pooling = model.pooling
    if pooling.problem is not None:
        raise unsupported("model", f"Embedding with this model ({pooling.problem}; --pooling overrides it)")
    if dimensions is not None and (problem := _problem(dimensions, pooling, info)):
        raise bad_request(f"'dimensions' is {dimensions}; {problem}.", "dimensions")
    return Pooling(pooling.kind, normalize, pooling.dimensions if dimensions is None else dimensions, head=True)


def check_dimensions(pooling: PoolingDefaults, info: EngineInfo) -> None:
    """Those that requests get which say none. Raises ConfigError."""
    if pooling.dimensions is not None and (problem := _problem(pooling.dimensions, pooling, info)):
        raise ConfigError(
            f"--pooler-config has dimensions {pooling.dimensions}: {problem}; set it to what the model has, or leave "
            "it out"
        )


def _problem(dimensions: int, pooling: PoolingDefaults, info: EngineInfo) -> str:
    if dimensions > info.hidden_size:
        return f"this model's embeddings have {info.hidden_size}"
    if pooling.matryoshka and dimensions not in pooling.matryoshka:
        return f"this model was trained for {', '.join(map(str, pooling.matryoshka))}"
    return ""


def of_embeddings(model: TextModel, info: EngineInfo) -> EngineInfo:
    """With the context that an embedding may have, where the model's folder says less than the engine."""
    most = model.pooling.max_tokens
    return info if most is None or most >= info.max_model_len else msgspec.structs.replace(info, max_model_len=most)


def check_prompts(request: PooledRequest, info: EngineInfo) -> None:
    """Raises ApiError (400)."""
    if request.priority and info.scheduling_policy != "priority":
        raise unsupported("priority", "'priority' (without --scheduling-policy priority)")


def sampling_of(pooling: Pooling) -> SamplingParams:
    """Nothing is sampled: the engine wants to know a limit all the same."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)


def _ids(
    request: PooledRequest, token_ids: Sequence[int], is_text: bool, param: str, model: TextModel, info: EngineInfo
) -> array[int]:
    if not token_ids:
        raise bad_request(f"'{param}' gives no tokens.", param)
    ids = prompt_ids(param, token_ids, is_text, model.tokenizer, info)
    kept = truncated(request, ids, info, 0)
    return kept if len(kept) == len(ids) else _with_ends(request, ids, len(kept), model.tokenizer)


def _with_ends(request: PooledRequest, ids: array[int], most: int, tokenizer: Tokenizer) -> array[int]:
    """So many tokens, among them the special ones that stand around every text: pooling may want their states."""
    first, last = (array("i", end) for end in tokenizer.ends)
    left = most - len(first) - len(last)
    if left < 1 or ids[: len(first)] != first or ids[len(ids) - len(last) :] != last:
        return ids[:most] if request.truncation_side == "right" else ids[-most:]
    inner = ids[len(first) : len(ids) - len(last)]
    return first + (inner[:left] if request.truncation_side == "right" else inner[-left:]) + last


def prompt_prefix(request: EmbeddingRequest, model: TextModel) -> str:
    """What stands before each text. Raises ApiError (400) for a prompt that the model's folder does not have."""
    prompts, name = model.pooling.prompts, request.prompt_name
    if name is None:
        return model.pooling.prefix
    if name not in prompts:
        known = f"choose one of {', '.join(prompts)}" if prompts else "it has none"
        raise bad_request(f"'prompt_name' is {shorten(name)!r}, which the model's folder does not have: {known}.",
                          "prompt_name")  # fmt: skip
    return prompts[name]


def is_normalized(request: EmbeddingRequest, model: TextModel) -> bool:
    return model.pooling.normalize if request.is_normalized is None else request.is_normalized


def merged(vectors: Sequence[bytes], num_tokens: Sequence[int], normalize: bool) -> bytes:
    """The mean of the pieces' vectors, each with the weight of its tokens: for mean pooling, that of all tokens."""
    import numpy as np  # the server starts without it

    values = np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)
    mean = np.average(values, axis=0, weights=num_tokens)
    if normalize and (length := np.linalg.norm(mean)) > 0:
        mean /= length
    return mean.astype("<f4").tobytes()


class EmbeddingChoice(Choice):
    """The answer to one input: a vector, in one output of the engine."""

    __slots__ = ("embedding",)

    embedding: bytes | None  # little-endian float32; None before it is there, and where it never comes

    def __init__(
        self, index: int, prompt: Prompt, mailbox: MailboxLike, detokenizer: Detokenizer, options: TextOptions
    ) -> None:
        super().__init__(index, prompt, mailbox, detokenizer, options)
        self.embedding = None

    def feed(self, output: RequestOutput) -> Delta:
        self.embedding = output.embedding
        self.finish_reason = output.finish_reason
        return Delta("", [], None, None, output.finish_reason)


@dataclass(frozen=True, slots=True)
class EmbeddingOptions(TextOptions):
    """What takes the place of text."""

    def choice(self, index: int, prompt: Prompt, mailbox: MailboxLike, tokenizer: Tokenizer) -> Choice:
        return EmbeddingChoice(index, prompt, mailbox, NoText(), self)


def numbers(embedding: bytes) -> list[float]:
    """Of little-endian float32."""
    return list(struct.unpack(f"<{len(embedding) // 4}f", embedding))


def as_bytes(values: Sequence[float]) -> bytes:
    """Little-endian float32."""
    return struct.pack(f"<{len(values)}f", *values)


def packed(embedding: bytes, dtype: str, big: bool) -> bytes:
    """The same of float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2, rounded to even; what is too large becomes
    infinite, or of fp8_e4m3, which has no infinity, 448, as torch has it."""
    import numpy as np  # the server starts without it

    order = ">" if big else "<"
    values = np.frombuffer(embedding, "<f4")
    if dtype.startswith("fp8"):
        middles = np.array(_middles(dtype), np.float32)
        sizes = np.abs(values)
        codes = np.searchsorted(middles, sizes)  # of a number in the middle, the lower one
        tied = sizes == middles[np.minimum(codes, len(middles) - 1)]
        codes += tied & codes & 1
        return (codes | np.signbit(values) << 7).astype(np.uint8).tobytes()
    if dtype == "bfloat16":
        bits = values.view("<u4").astype(np.uint32)
        halves = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return halves.astype(f"{order}u2").tobytes()
    with np.errstate(over="ignore"):
        return values.astype(order + ("f2" if dtype == "float16" else "f4")).tobytes()


@cache
def _middles(dtype: str) -> list[float]:
    """Between the size of each code of a format of 8 bits and the next one's; the last of fp8_e5m2 is infinite."""
    fraction, bias, last = (3, 7, 0x7E) if dtype == "fp8_e4m3" else (2, 15, 0x7C)
    sizes = []
    for code in range(last + 1):
        exponent, part = code >> fraction, code & (1 << fraction) - 1
        whole = min(exponent, 1) << fraction  # a subnormal number has no leading 1
        sizes.append((whole + part) * 2.0 ** (max(exponent, 1) - bias - fraction))
    return [(one + other) / 2 for one, other in pairwise(sizes)]


def bits(embedding: bytes, signed: bool) -> list[int]:
    """A bit a number, whether it is above 0, the first in the highest place of each byte: as int8 or uint8."""
    import numpy as np  # the server starts without it

    packed_bits = np.packbits(np.frombuffer(embedding, "<f4") > 0)
    return [int(byte) for byte in (packed_bits.view(np.int8) if signed else packed_bits)]
