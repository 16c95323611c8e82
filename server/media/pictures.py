"""Pictures as a request gets them: fetched, found in the cache or decoded, within the shares of whoever sends them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ...engine.link.media import MediaItem
from ...engine.options.cgroup import num_cores
from ...engine.vision.processors import encode
from ..errors import ApiError, bad_request, context_length_exceeded
from ..histogram import COMPILE, Histogram
from ..lanes import SHORT, TENANT, Job, Lanes
from ..options.media import MediaConfig
from .cache import PictureCache
from .fetch import Fetcher, FetchError
from .processes import DecodeProcesses, DecoderError
from .room import Held, Room
from .source import Source

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

MOST_PROCESSES = 8
BYTES = 16  # of a file, that take about as long as a character that is tokenised
INLINE = 64 << 10  # characters of base64 whose key is made in the event loop


class PictureLanes(Lanes):
    """A thread for each process that decodes, which waits for it; and one beside them that makes keys."""

    def _full(self, job: Job) -> ApiError:
        return ApiError(
            429,
            "Too many pictures wait to be decoded: send fewer at a time, and try again in 1 s.",
            type="rate_limit_error",
            code="queue_full",
            headers={"retry-after": "1"},
        )


class Pictures:
    def __init__(
        self,
        processor: Processor,
        config: MediaConfig,
        rejected: Callable[[], None] = lambda: None,
        waited_for: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`rejected` counts pictures for which there was no room, `waited_for` hears how long each waited to be
        decoded."""
        self.processor = processor
        self.cache = PictureCache(config.media_cache_bytes)
        self.decode_seconds = Histogram(COMPILE)
        self.num_failures = 0
        self.processes = DecodeProcesses(encode(processor))
        self._most = config.most_pictures()
        self._max_size = config.max_media_size
        self._fetcher = Fetcher(config)
        self._room = Room()
        num_processes = config.media_processes or max(1, min(MOST_PROCESSES, num_cores() - 2))
        self.lanes = PictureLanes(1 + num_processes, rejected, waited_for, "decode")
        self._can_decode = find_spec("PIL") is not None
        self._secret = os.urandom(16)  # keys of files are nobody's to guess

    def start(self) -> None:
        """Has the libraries of the decoding processes loaded, before anybody waits for them."""
        self.processes.start()

    def check_number(self, sources: Sequence[Source]) -> None:
        """Raises ApiError (400)."""
        if len(sources) > self._most:
            raise bad_request(
                f"The prompt has {len(sources)} pictures; at most {self._most} are allowed (--limit-mm-per-prompt).",
                sources[self._most].where,
                "too_many_pictures",
            )

    def hold(self) -> Held:
        """Room for the pictures of a request of this tenant, to be released when it is over."""
        return Held(self._room, TENANT.get())

    async def items(
        self, sources: Sequence[Source], salt: str | None, max_tokens: int | None, held: Held
    ) -> list[MediaItem]:
        """Each picture as the engine gets it, at the start of a prompt. `salt`: who may find what is cached;
        `max_tokens`: of all of them together. Raises ApiError (400, 429)."""
        self.check_number(sources)
        num_tokens = 0

        async def one(source: Source) -> MediaItem:
            nonlocal num_tokens
            item = await self._item(source, salt or "", held)
            held.grow(len(item.pixels))
            num_tokens += item.length
            if max_tokens is not None and num_tokens > max_tokens:  # the others need not be decoded
                raise context_length_exceeded(max_tokens, num_tokens, None, source.where)
            return item

        tasks = [asyncio.create_task(one(source)) for source in sources]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _item(self, source: Source, space: str, held: Held) -> MediaItem:
        """`space`: nothing of another one is found."""
        name = None
        if source.uuid is not None:  # anybody may think of one: it is found by the same key or address alone
            name = self._key(f"{TENANT.get()} {space}", "uuid", source.uuid.encode("utf-8", "replace"))
        if not source.url and not source.encoded and name is not None:
            if (item := self.cache.named(name)) is None:
                raise _bad(source, "is not here any more, or never was under its 'uuid': send it with its data")
            return item
        if source.url:
            try:
                data = await self._fetcher.fetch(source.url)
            except FetchError as error:
                raise _bad(source, str(error)) from None
            held.grow(len(data))  # what the request itself has brought is counted with its body
        else:
            data = source.encoded.encode("ascii", "replace")
            if len(data) > 4 * (self._max_size // 3 + 1):
                raise _bad(source, f"has more than {self._max_size} bytes (--max-media-size)")
        form = f"{source.detail == 'low'} {bool(source.encoded)}"
        if len(data) <= INLINE:
            key = self._key(space, form, data)
        else:
            key = await self.lanes.run(min(SHORT, len(data) >> 10), partial(self._key, space, form, data))
        if (item := self.cache.find(key)) is not None:
            self.cache.put(key, item, name)
            return item
        item = await self._decoded(source, data)
        self.cache.put(key, item, name)
        return item

    def _key(self, space: str, form: str, data: bytes) -> bytes:
        key = blake2b(f"{len(space)} {space} {form} ".encode("utf-8", "replace"), key=self._secret, digest_size=32)
        key.update(data)
        return key.digest()

    async def _decoded(self, source: Source, data: bytes) -> MediaItem:
        if not self._can_decode:
            raise _bad(source, "cannot be read: this server has no Pillow (pip install pillow)")
        decode = partial(self.processes.decode, data, is_base64=bool(source.encoded), detail=source.detail)
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            # Long work, however small the file is: so one thread stays for keys.
            item = await self.lanes.run(SHORT + 1 + len(data) // BYTES, decode)
        except ValueError as error:
            self.num_failures += 1
            raise _bad(source, f"cannot be read: {error}") from None
        except DecoderError as error:
            self.num_failures += 1
            raise _bad(source, f"{error}: send another file of it") from None
        self.decode_seconds.observe(loop.time() - start)
        return item

    def close(self) -> None:
        self.processes.close()
        self.lanes.close()
        self._fetcher.close()


def _bad(source: Source, what: str) -> ApiError:
    return bad_request(f"The picture '{source.where}' {what}.", source.where, "invalid_image")
