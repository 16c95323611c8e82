"""Pictures that a URL names: from hosts with public addresses, or from the folder of --allowed-local-media-path.

A host is resolved once, and what is dialled is the address that was judged: a name that changes its mind in between
reaches nothing else. Each redirect is judged anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from ..lanes import TENANT
from ..options.media import MediaConfig

MAX_REDIRECTS = 3
AT_ONCE = 8  # fetches of one tenant; the others of a request wait for them
RESOLVERS = 64  # threads that ask for addresses, which may take long
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "vserve"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchError(Exception):
    """In words that go on with "it"."""


class Fetcher:
    def __init__(self, config: MediaConfig) -> None:
        self._domains = config.allowed_media_domains
        self._folder = config.allowed_local_media_path
        self._timeout = config.media_fetch_timeout
        self._max_size = config.max_media_size
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="resolve")
        # By tenant; one that fetches nothing has no entry.
        self._turns: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))
        self._num_waiting: defaultdict[int, int] = defaultdict(int)

    async def fetch(self, url: str) -> bytes:
        """Raises FetchError."""
        if url[:5].lower() == "file:":
            return await asyncio.to_thread(self._read_file, url)
        async with self._turn():
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._over_http(url)
            except TimeoutError:
                raise FetchError(f"did not come within {self._timeout:g} s (--media-fetch-timeout)") from None
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                raise FetchError(f"cannot be fetched ({type(error).__name__})") from None

    def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        tenant = TENANT.get()
        self._num_waiting[tenant] += 1
        try:
            async with self._turns[tenant]:
                yield
        finally:
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant], self._turns[tenant]

    # ---- http ----

    async def _over_http(self, url: str) -> bytes:
        where = httpx.URL(url)
        for _ in range(1 + MAX_REDIRECTS):
            found = await self._get(where)
            if isinstance(found, bytes):
                return found
            where = found
        raise FetchError(f"is behind more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """What is there, or where it is instead."""
        host = url.raw_host.decode("ascii")
        if url.scheme not in ("http", "https") or not host:
            raise FetchError("is behind a redirect to what is neither http:// nor https://")
        if url.userinfo:
            raise FetchError("is named by a URL with a name or password, which are not sent: leave them out")
        address = await self._address(host, url.port or (443 if url.scheme == "https" else 80))
        # The name is still what the host is asked for, and what its certificate must say.
        request = httpx.Request(
            "GET",
            url.copy_with(host=str(address)),
            headers={**_HEADERS, "host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": host, "timeout": httpx.Timeout(self._timeout).as_dict()},
        )
        # No proxy of the environment: it would resolve names itself.
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as client:
            response = await client.send(request, stream=True)
            try:
                if response.is_redirect and (location := response.headers.get("location")):
                    return url.join(location)
                return await self._body(response)
            finally:
                await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise FetchError(f"is not there: its host answers with status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise FetchError("comes compressed once more (content-encoding), which is not read")
        declared = response.headers.get("content-length", "0")
        received = bytearray()
        if not (declared.isdecimal() and int(declared) > self._max_size):
            async for piece in response.aiter_raw():
                received += piece
                if len(received) > self._max_size:
                    break
            else:
                return bytes(received)
        raise FetchError(f"has more than {self._max_size} bytes (--max-media-size)")

    async def _address(self, host: str, port: int) -> Address:
        """The one that is dialled."""
        if self._domains and not any(_is_of(host, domain) for domain in self._domains):
            raise FetchError("is on a host that --allowed-media-domains does not name: send it as a data URL")
        loop = asyncio.get_running_loop()
        try:
            literal = host.strip("[]")
            found = [str(ipaddress.ip_address(literal))]
        except ValueError:
            try:
                found = await loop.run_in_executor(self._resolvers, _resolve, host, port)
            except OSError:
                raise FetchError("is on a host whose name is not known") from None
        addresses = [ipaddress.ip_address(one) for one in found]
        # Whoever runs the server has named this very host: it may be one of their own.
        is_named = host.lower() in (domain.lower() for domain in self._domains)
        if not addresses or not (is_named or all(map(is_public, addresses))):
            raise FetchError(
                "is on a host without a public address: send it as a data URL, or have the host named in "
                "--allowed-media-domains"
            )
        return addresses[0]

    # ---- files ----

    def _read_file(self, url: str) -> bytes:
        if not self._folder:
            raise FetchError("is a file of the server, of which none may be named (--allowed-local-media-path)")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise FetchError("is a file of another host: write file:///path")
        # Whether a file is there outside of the folder is nothing to be told: one answer for both.
        refusal = FetchError("is no file in the folder of --allowed-local-media-path")
        try:
            path = os.path.realpath(unquote(parts.path, errors="strict"))
            if not Path(path).is_relative_to(os.path.realpath(self._folder)):
                raise refusal
            if not stat.S_ISREG(os.stat(path).st_mode):  # others may wait, or do something, when they are opened
                raise refusal
            with open(path, "rb", opener=_open) as file:
                data = file.read(self._max_size + 1)
        except (OSError, ValueError):
            raise refusal from None
        if len(data) > self._max_size:
            raise FetchError(f"has more than {self._max_size} bytes (--max-media-size)")
        return data


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _resolve(host: str, port: int) -> Sequence[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]


def is_public(address: Address) -> bool:
    """Whether an address is everybody's: no machine of this network, nor this one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(address.packed[-4:])
        if inner is not None and not is_public(inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


def _is_of(host: str, domain: str) -> bool:
    host, domain = host.lower().rstrip("."), domain.lower()
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
