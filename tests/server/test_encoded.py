"""Long answers are written in pieces, and are what they would be in one."""

import msgspec
import pytest

from vserve.server.wire import encoded
from vserve.server.wire.encoded import encode


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [{"a": [1, 2]}] * 3,
        {"count": 0, "tokens": [], "names": None, "text": 'a "ä"\n'},
        {"tokens": list(range(3 * encoded.NUMBERS + 1)), "more": {"of": [1, 2]}, "one": [1.5]},
        {"tokens": list(range(2 * encoded.NUMBERS)), "names": [str(i) for i in range(5000)]},
        {"data": [{"index": i, "embedding": msgspec.Raw(b"[1.5,-2]")} for i in range(encoded.NUMBERS + 2)], "é": []},
        {"embeddings": {"float": [msgspec.Raw(b"[1.5,-2]")] * 9, "int8": []}, "texts": ["a", 1, None, {"b": [[]]}]},
        [[1, "a"], [list(range(10))] * 2, {"c": {}}],
        "text",
    ],
)
def test_an_answer_in_pieces_is_the_same(content: dict | list) -> None:
    assert encode(content) == msgspec.json.encode(content)


VECTOR = msgspec.Raw(msgspec.json.encode([0.123456] * 4096))


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"embedding": VECTOR} for _ in range(500)], "tokens": list(range(300_000))},
        {"embeddings": {"float": [VECTOR] * 500}},
        {"data": [{"embedding": msgspec.Raw(b"[]")}] * 10_000 + [{"embedding": VECTOR}] * 500},
        {"choices": [{"logprobs": {"content": [{"token": "abc", "logprob": -1.5}] * 100_000}}]},
        {"tokens": ["word"] * 300_000, "texts": ["a" * 1000] * 20_000},
    ],
)
def test_no_piece_is_long(content: dict) -> None:
    """While one is written, the event loop stands still, on whatever thread that is."""
    sizes = [len(piece) for piece in encoded.pieces(content)]
    assert sum(sizes) > 2 << 20 and max(sizes) <= 2 << 20
