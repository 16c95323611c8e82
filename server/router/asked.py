"""What routing looks at in a request: its model, and the text whose beginning a server may have in its cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request

from ..client.routing import Keys, prefix_keys
from ..http.large_body import LARGE, check
from ..lanes import Lanes

BYTES_PER_TOKEN = 4  # of text, about: the routing's blocks of 64 tokens are 256 bytes of it
LARGEST_BODY = 64 << 20  # bytes, where no limit is set: the servers have theirs
LARGEST_TEXT = 1 << 20  # bytes of it that are compared: what follows has its own beginning rarely in common
LARGEST_NAME = 64 << 10  # bytes of a model's name, of an id, of a salt
# As much of a body is looked at in the time that tokenising a character takes, about, which is how lanes count.
BYTES_PER_CHARACTER = 16
NUM_LANES = 2  # one of them for bodies below a MiB

# In the order in which chat templates write them; compared as they came.
_TEXTS = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "documents", "text_1", "text_2", "texts",
)  # fmt: skip
_MADE = ("previous_response_id", "conversation", "input_file_id")  # ids of what one server has
_EMPTY = (b"null", b'""', b"[]", b"{}", b"false", b"0")


@dataclass(frozen=True)
class Asked:
    model: str | None = None
    keys: Keys = field(default_factory=list)  # of the text; with the model and `cache_salt`, which share nothing
    num_tokens: int = 0  # of the text, about
    session: str | None = None  # requests of one session go to one server
    ids: tuple[str, ...] = ()  # what it goes on from or is about: only who made that knows it
    request_id: str = ""  # that the body gives it
    is_named: bool = False  # its client has chosen its id
    stores: bool | None = None  # None: it says nothing of it
    longer_than: float | None = None  # tokens of context that were too few

    def is_stored(self, path: str) -> bool:
        """Whether its answer stays with the server that has made it."""
        if path.startswith("/v1/conversations"):
            return True
        return path == "/v1/responses" if self.stores is None else self.stores


@dataclass
class Ask:
    """A request on its way over Ray Serve (ray_serve.py), as routing sees it. The front says when its answer begins: it
    has the router in its process."""

    asked: Asked
    num_tokens: int
    begun: bool = False


async def asked_of(request: Request, body: bytes, lanes: Lanes, *, by_key: bool = True) -> Asked:
    """What the body and the headers say. `by_key`: each key has prefixes and sessions of its own, with those who come
    behind. Raises ApiError (400)."""
    headers = request.headers
    who = (headers.get("authorization") or headers.get("x-api-key", "")) if by_key else ""
    asked = await look(body, lanes, who) if "json" in headers.get("content-type", "") else Asked()
    session = headers.get("x-session-id")
    if session is not None and who:
        session = f"{who}\0{session}"
    return replace(asked, session=session)


async def look(body: bytes, lanes: Lanes, who: str = "") -> Asked:
    """What `read` returns, on a thread where the body is large. Raises ApiError (400)."""
    if len(body) <= LARGE:
        return read(body, who)
    return await lanes.run(len(body) // BYTES_PER_CHARACTER, lambda: read(body, who))


def read(body: bytes, who: str = "") -> Asked:
    """Whatever is wrong with a body is for the server to say, but for too many values, which take long to look at.
    `who`: whose prompts share nothing with others'. Raises ApiError (400)."""
    if len(body) > LARGE:
        check(body)
    try:
        # Members stay the bytes that they are: no value is made of what is within.
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model, salt, request_id = (_text(members, name) for name in ("model", "cache_salt", "request_id"))
        made = tuple(filter(None, (_id(members, name) for name in _MADE)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Asked()
    texts = [memoryview(members[name]) for name in _TEXTS if name in members and _small(members, name) not in _EMPTY]
    size, text = sum(map(len, texts)), bytearray()
    for part in texts:
        text += part[: LARGEST_TEXT - len(text)]
    stores = {b"true": True, b"false": False}.get(_small(members, "store"))
    return Asked(
        model or None, prefix_keys(bytes(text), f"{model}\0{salt}\0{who}"), size // BYTES_PER_TOKEN,
        ids=made, request_id=request_id,
        stores=True if _small(members, "background") == b"true" else stores,
    )  # fmt: skip


def _small(members: dict[str, msgspec.Raw], name: str) -> bytes:
    """JSON; empty where there is no such member, or a large one."""
    member = memoryview(members.get(name, b""))
    return bytes(member) if len(member) <= LARGEST_NAME else b""


def _id(members: dict[str, msgspec.Raw], name: str) -> str:
    """Of a text, or of an object that has it."""
    value = msgspec.json.decode(_small(members, name) or b"null")
    found = value.get("id") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _text(members: dict[str, msgspec.Raw], name: str) -> str:
    value = msgspec.json.decode(_small(members, name) or b"null")
    return value if isinstance(value, str) else ""
