"""Whether the server beside this process takes requests: `vserve doctor --health`, for the health check of a container.

Port, socket and TLS are found out: by what the server's process listens on, and by how it answers.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECONDS = 5.0  # for an answer
LONGEST = 1 << 20  # bytes of one that are read
PROC = Path("/proc")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_ACCEPTS = 0x10000  # a flag of one in /proc/net/unix
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Place:
    """Where a server listens: an address and a port, or the path of a Unix socket ("@name": an abstract one)."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def check(places: list[Place]) -> tuple[bool, str]:
    """(whether a server there takes requests, a line that says so, or why not)."""
    if not places:
        return False, "no vserve listens here: is it another user's process, or has it ended?"
    found = [_ask(place) for place in places]
    return next((one for one in found if one[0]), found[0])


def find() -> list[Place]:
    """Where the first server of this user listens; in a container there is one."""
    for pid in sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        if pid != os.getpid() and is_vserve(pid) and (places := listening(pid)):
            return places
    return []


def listening(pid: int) -> list[Place]:
    """What a process of this user's listens on."""
    inodes = set()
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # another user's, or gone
        return []
    return [place for inode, place in (*_tcp(pid, "tcp"), *_tcp(pid, "tcp6"), *_unix(pid)) if inode in inodes]


def is_vserve(pid: int) -> bool:
    """By what runs, not by what it is about: an editor may have a file of that name open, and a wrapper start one."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:6]
    except OSError:
        return False
    names = (word for word in words if word[:1] not in ("", "-") and not _PYTHON.fullmatch(os.path.basename(word)))
    program = next(names, "")
    return os.path.basename(program) == "vserve" or program.startswith("vserve.server")


def _tcp(pid: int, name: str) -> Iterator[tuple[str, Place]]:
    """(inode, place) of each that listens."""
    for line in _lines(pid, name):
        _, local, _, state, *rest = line.split()
        if state == _LISTENS:
            address, port = local.split(":")
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]  # the machine's order
            host = socket.inet_ntop(socket.AF_INET if name == "tcp" else socket.AF_INET6, b"".join(words))
            yield rest[5], Place(_ANYWHERE.get(host, host), int(port, 16))


def _unix(pid: int) -> Iterator[tuple[str, Place]]:
    for line in _lines(pid, "unix"):
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS:
            yield fields[6], Place(fields[7])


def _lines(pid: int, name: str) -> list[str]:
    try:
        return (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
    except OSError:
        return []


def _ask(place: Place) -> tuple[bool, str]:
    found = ask(place, "/readyz")
    if found.problem:
        return found.wants_certificate, found.problem
    ready = found.status == 200
    return ready, f"{place} is ready" if ready else f"{place} is not ready: {found.status} {found.text[:1000]}"


@dataclass(frozen=True)
class Reply:
    """What is said at a place, or why nothing is."""

    status: int = 0
    text: str = ""
    is_tls: bool = False
    problem: str = ""
    wants_certificate: bool = False

    def said(self, key: str) -> str:
        """A text of the answer's JSON object; "": it has none."""
        try:
            return str(json.loads(self.text).get(key) or "")
        except (ValueError, AttributeError):
            return ""


def ask(place: Place, path: str) -> Reply:
    problem = ""
    for context in (None, _any_certificate()):
        connection = _Connection(place, context)
        greeted = False
        try:
            connection.connect()
            greeted = context is not None
            connection.request("GET", path)
            response = connection.getresponse()
            return Reply(response.status, response.read(LONGEST).decode(errors="replace"), greeted)
        except TimeoutError:
            return Reply(problem=f"{place} does not answer within {SECONDS:g} s")
        except (OSError, http.client.HTTPException) as error:
            if greeted:  # TLS 1.3 asks for a client's certificate after the greeting, and hangs up without one
                problem = f"{place} speaks TLS, but only to clients with a certificate"
                return Reply(problem=problem, wants_certificate=True, is_tls=True)
            problem = problem or f"{place} does not answer: {error}"
        finally:
            connection.close()
    return Reply(problem=problem)


def _any_certificate() -> ssl.SSLContext:
    """It is this machine's own server, whatever its certificate says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _Connection(http.client.HTTPConnection):
    def __init__(self, place: Place, context: ssl.SSLContext | None) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self.place, self.context = place, context

    def connect(self) -> None:
        if self.place.port:
            self.sock = socket.create_connection((self.place.host, self.place.port), SECONDS)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(SECONDS)
            self.sock.connect(self.place.host.replace("@", "\0", 1) if self.place.host[0] == "@" else self.place.host)
        if self.context is not None:
            self.sock = self.context.wrap_socket(self.sock)
