"""The bytes of an embedding: float32, float16 and bfloat16, in either order, in JSON and alone."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from typing import Any

import pytest
import torch

from vserve.engine.link.messages import RequestOutput
from vserve.server.api.pooled import raw_response
from vserve.server.generation.embedding import packed
from vserve.server.wire.pooled import EncodedRequest

VALUES = [0.0, -0.5, 1 / 3, -2.7182817, 1e-3, 65504.0, 1.00390625, 1.01171875]  # the last two lie between two bfloat16


@pytest.fixture
def embedding_client(client: Any, engine: Any) -> Any:
    """Its engine embeds everything as VALUES."""

    async def embed(request: Any, mailbox: Any) -> None:
        vector = struct.pack(f"<{len(VALUES)}f", *VALUES)
        engine._put(mailbox, RequestOutput(request.id, [], "stop", embedding=vector))

    engine._run = embed
    return client


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_bytes_are_those_of_torch(embedding_client: Any, dtype: str, endianness: str) -> None:
    body = {"input": "a", "encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    answer = embedding_client.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    raw = bytearray(b64decode(answer.json()["data"][0]["embedding"]))
    wanted = torch.tensor(VALUES).to(getattr(torch, dtype))
    size = wanted.element_size()
    if endianness == "big":
        raw = bytearray(b"".join(bytes(raw[i : i + size][::-1]) for i in range(0, len(raw), size)))
    assert torch.equal(torch.frombuffer(raw, dtype=wanted.dtype), wanted)


def test_numbers_have_no_bytes(embedding_client: Any, engine: Any) -> None:
    plain = embedding_client.post("/v1/embeddings", {"input": "a", "embed_dtype": "float32"}).json()
    assert plain["data"][0]["embedding"] == pytest.approx(VALUES)
    for field, value in (("embed_dtype", "float16"), ("endianness", "big"), ("embed_dtype", "int8")):
        answer = embedding_client.post("/v1/embeddings", {"input": "a", field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_a_byte_a_number_is_what_torch_makes_of_it(dtype: str, embedding_client: Any) -> None:
    """Every number of the format, what lies between two of them and next to that, and beyond them."""
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[dtype]
    there = torch.arange(256, dtype=torch.uint8).view(kind).float()
    there = there[there.isfinite()].sort().values
    between = (there[1:] + there[:-1]) / 2
    around = [torch.nextafter(between, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    values = torch.cat([there, between, *around, torch.tensor([460.0, 479.0, 500.0, 1e6, -1e6, 61440.0, 65000.0, 0.0])])
    assert packed(values.numpy().tobytes(), dtype, False) == values.to(kind).view(torch.uint8).numpy().tobytes()
    body = {"input": "a", "encoding_format": "base64", "embed_dtype": dtype}
    answer = embedding_client.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert b64decode(answer) == torch.tensor(VALUES).to(kind).view(torch.uint8).numpy().tobytes()


def test_what_float16_cannot_hold() -> None:
    assert struct.unpack("<2e", packed(struct.pack("<2f", 1e6, 1.0), "float16", False)) == (float("inf"), 1.0)


def test_a_body_of_bytes(embedding_client: Any) -> None:
    body = {"input": ["a", "b"], "embed_dtype": "float16", "endianness": "big"}
    wanted = struct.pack(f">{len(VALUES)}e", *VALUES)
    for path in ("/v1/embeddings", "/pooling"):
        answer = embedding_client.post(path, body | {"encoding_format": "bytes"})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.content == wanted + wanted
        told = json.loads(answer.headers["metadata"])
        form = {"embed_dtype": "float16", "endianness": "big", "shape": [len(VALUES)]}
        size = len(wanted)
        assert told["data"] == [{"index": i, **form, "start": i * size, "end": (i + 1) * size} for i in range(2)]
        assert told["model"] == "test" and told["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        alone = embedding_client.post(path, body | {"encoding_format": "bytes_only"})
        assert alone.content == wanted + wanted and "metadata" not in alone.headers


def test_a_header_is_ascii_whatever_a_model_is_called() -> None:
    body = EncodedRequest(input="a", encoding_format="bytes")
    answer = raw_response([(bytes(4), (1,))], body, {"model": "é 模型"}, {})
    told = dict(answer.raw_headers)[b"metadata"]
    assert told.isascii() and json.loads(told)["model"] == "é 模型"


def test_a_header_has_an_end(embedding_client: Any) -> None:
    answer = embedding_client.post("/v1/embeddings", {"input": ["a"] * 257, "encoding_format": "bytes"})
    assert answer.status_code == 400 and "for 256 inputs, not 257" in answer.json()["error"]["message"]
    answer = embedding_client.post("/v1/embeddings", {"input": ["a"] * 257, "encoding_format": "bytes_only"})
    assert answer.status_code == 200 and len(answer.content) == 257 * 4 * len(VALUES)
