"""The servers of this user on this machine: where they listen, what they serve, how they are."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field

from . import health
from .health import PROC, Place

_READY, _LOADING, _SILENT = "ready", "loading", "does not answer"


@dataclass
class Server:
    """One `vserve` with all its processes."""

    pid: int  # of the first process, which ends the others
    places: list[Place]
    state: str = _SILENT
    models: list[str] = field(default_factory=list)  # names, the first one's own first
    named: list[str] = field(default_factory=list)  # the model of its command line, where there is one
    scheme: str = "http"
    memory: int = 0  # bytes of all its processes; what they share counts for each
    started: float = 0.0  # seconds since the epoch

    @property
    def uses(self) -> set[str]:
        """Names of models that it may have files of."""
        return {*self.models, *self.named}

    @property
    def port(self) -> int:
        return self.places[0].port

    @property
    def address(self) -> str:
        place = self.places[0]
        return f"{self.scheme}://{place}" if place.port else f"unix:{place.host}"


def find() -> list[Server]:
    """In the order of their process ids."""
    parents = _parents()
    mine = {pid for pid in parents if pid != os.getpid() and health.is_vserve(pid)}
    found = []
    for pid in sorted(mine):
        if parents[pid] in mine and health.listening(parents[pid]):
            continue  # one of another's processes; `vserve run`, which starts one, does not listen
        if places := health.listening(pid):
            found.append(_asked(Server(pid, places), parents))
    return found


def _asked(server: Server, parents: dict[int, int]) -> Server:
    for place in server.places:
        ready = health.ask(place, "/readyz")
        if ready.status not in (200, 503):
            continue
        server.places = [place]
        server.state = _READY if ready.status == 200 else ready.said("phase") or ready.said("status") or _LOADING
        server.scheme = "https" if ready.is_tls else "http"
        listed = health.ask(place, "/v1/models") if ready.status == 200 else None
        if listed is not None and listed.status == 200:
            server.models = _listed(listed.text)
        break
    server.named = _named(server.pid)
    server.models = server.models or server.named
    family = _descendants(server.pid, parents)
    server.memory = sum(map(_resident, family))
    server.started = _started(server.pid)
    return server


def _listed(text: str) -> list[str]:
    """The names in what /v1/models says."""
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def is_zombie(pid: int) -> bool:
    """It has ended, and nobody has asked how."""
    return _read(pid, "stat").rpartition(")")[2].split()[:1] == ["Z"]


def _named(pid: int) -> list[str]:
    """The model that its command line names, of a server that tells nobody without a key."""
    words = _read(pid, "cmdline").split("\0")
    at = next(
        (i for i, word in enumerate(words) if os.path.basename(word) == "vserve" or word.startswith("vserve.server")),
        len(words),
    )
    rest = [word for word in words[at + 1 :] if word and word != "serve"]
    if not rest:
        return ["demo"]
    return [] if rest[0].startswith("-") else [rest[0]]


def _parents() -> dict[int, int]:
    """Process → its parent, of all that this user may look at."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _read(int(entry.name), "stat")):
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def _descendants(pid: int, parents: dict[int, int]) -> set[int]:
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return family


def _resident(pid: int) -> int:
    fields = _read(pid, "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _started(pid: int) -> float:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    uptime = float((PROC / "uptime").read_text().split()[0])
    ticks = int(fields[19]) if len(fields) > 19 else 0
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_bytes().decode(errors="replace")
    except OSError:
        return ""
