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
        {"tokens": list(range(3 * encoded.ENTRIES + 1)), "more": {"of": [1, 2]}, "one": [1.5]},
        {"tokens": list(range(2 * encoded.ENTRIES)), "names": [str(i) for i in range(5000)]},
        {"data": [{"index": i, "embedding": msgspec.Raw(b"[1.5,-2]")} for i in range(encoded.ENTRIES + 2)], "é": []},
    ],
)
def test_an_answer_in_pieces_is_the_same(content: dict | list) -> None:
    assert encode(content) == msgspec.json.encode(content)


def test_no_piece_is_long() -> None:
    """While one is written, the event loop stands still, on whatever thread that is."""
    vector = msgspec.Raw(msgspec.json.encode([0.123456] * 4096))
    content = {"data": [{"embedding": vector} for _ in range(500)], "tokens": list(range(300_000))}
    sizes = [len(piece) for piece in encoded._members(content)]
    assert sum(sizes) > 15 << 20 and max(sizes) <= 2 * encoded.PIECE
