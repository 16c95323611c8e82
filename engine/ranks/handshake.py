"""How a node is let in: both ends prove that they know the secret, and what is installed and asked for is compared.

Nothing is encrypted, as between NCCL's ranks: nodes belong on a network of their own. The proofs keep strangers from
posing as a node or as the engine: ranks do what the engine says, and see every prompt. A node proves first, to the
address it was told of; who dials in and has proved nothing gets no proof, by which the secret could be guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..link.connection import LENGTH
from ..options.config import EngineConfig, flag

PATIENCE = 10.0  # seconds for the other end's next word
NONCE = 16  # bytes
SHORTEST_SECRET = 16  # characters
STRETCH = 100_000  # rounds that each guess at a secret takes
LONGEST = 1 << 18  # bytes of a message by somebody who has proved nothing yet
# Options that may differ from host to host, or that the engine's process has filled in for itself; and secrets.
OWN = frozenset((
    "node_rank", "host_ip", "master_addr", "cpu_threads", "backlog_steps", "kv_events_config",
    "distributed_timeout_seconds",
))  # fmt: skip


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Of a node, or, where `rank` is above 0, of a rank that it is about to start."""

    proof: bytes
    nonce: bytes
    node: int
    rank: int = 0
    facts: dict[str, str] = {}  # see facts()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    proof: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    message: str
    proof: bytes


class Stranger(ConnectionError):
    """The other end does not know the secret, or does not speak this protocol."""


def dial(
    address: tuple[str, int], secret: str, hello: Hello, host_ip: str | None = None, patience: float = PATIENCE
) -> socket.socket:
    """A connection that was let in. Raises OSError when nobody is there, ConfigError when it was refused, Stranger."""
    source = (host_ip, 0) if host_ip else None
    sock = socket.create_connection(address, patience, source_address=source)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = receive(sock, Challenge)
        mine = msgspec.structs.replace(hello, nonce=secrets.token_bytes(NONCE))
        said = transcript(challenge.nonce, mine)
        send(sock, msgspec.structs.replace(mine, proof=proof(secret, b"node", said)))
        answer = receive(sock, Welcome | Refusal)
        refused = answer.message if isinstance(answer, Refusal) else None
        if not hmac.compare_digest(answer.proof, proof(secret, b"engine", said, refused)):
            raise Stranger("it does not know the secret")
        if refused is not None:
            raise ConfigError(refused)
        sock.settimeout(None)
        return sock
    except BaseException:
        sock.close()
        raise


@dataclasses.dataclass(frozen=True)
class Guest:
    """Who has dialled in and knows the secret, and waits for an answer. Its methods raise OSError."""

    sock: socket.socket
    hello: Hello
    _secret: str
    _said: bytes

    def admit(self) -> None:
        send(self.sock, Welcome(proof(self._secret, b"engine", self._said)))
        self.sock.settimeout(None)

    def refuse(self, message: str) -> None:
        send(self.sock, Refusal(message, proof(self._secret, b"engine", self._said, message)))


def meet(sock: socket.socket, secret: str) -> Guest:
    """Raises OSError, Stranger among them."""
    sock.settimeout(PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    nonce = secrets.token_bytes(NONCE)
    send(sock, Challenge(nonce))
    hello: Hello = receive(sock, Hello)
    guest = Guest(sock, hello, secret, transcript(nonce, hello))
    if not hmac.compare_digest(hello.proof, proof(secret, b"node", guest._said)):
        send(sock, Refusal("", b""))  # it says itself what to look at
        raise Stranger("it does not know the secret (VSERVE_CLUSTER_SECRET)")
    return guest


def proof(secret: str, role: bytes, said: bytes, refusal: str | None = None) -> bytes:
    """That who says this now, as `role`, knows the secret; `refusal`: what an engine says beside it."""
    return hmac.digest(_key(secret), msgspec.msgpack.encode((role, said, refusal)), "sha256")


@functools.lru_cache(maxsize=4)
def _key(secret: str) -> bytes:
    """Who has heard a proof can try secrets against it: as slowly as this is."""
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"nodes of vserve", STRETCH)


def transcript(challenge: bytes, hello: Hello) -> bytes:
    """What both ends have said, with a nonce of each: all proofs are about it, so that none can be used again, nor for
    another node by somebody in between."""
    return msgspec.msgpack.encode((challenge, hello.nonce, hello.node, hello.rank, digest(hello.facts)))


def send(sock: socket.socket, message: Any) -> None:
    frame = msgspec.msgpack.encode([message])
    sock.sendall(LENGTH.pack(len(frame)) + frame)


def receive(sock: socket.socket, kind: Any) -> Any:
    """Reads not a byte more than one message: what follows is for others. Raises OSError."""
    deadline = time.monotonic() + PATIENCE  # for all of it: who sends a byte now and then is not waited for
    (size,) = LENGTH.unpack(_exactly(sock, LENGTH.size, deadline))
    if size > LONGEST:
        raise Stranger("it does not speak as nodes do")
    try:
        (message,) = msgspec.msgpack.decode(_exactly(sock, size, deadline), type=list[kind])
    except (msgspec.MsgspecError, ValueError):
        raise Stranger("it does not speak as nodes of this version do") from None
    return message


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("it has hung up")
        data += part
    return data


# ---- what must be the same ----


def versions() -> dict[str, str]:
    """Of what computes."""
    from ... import __version__

    found = {"vserve": __version__, "its code": _code()}
    for name in ("torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def facts(config: EngineConfig) -> dict[str, str]:
    """Versions and options by name, and a digest of the model's config.json; no secrets."""
    found = versions()
    for spec in dataclasses.fields(config):
        if spec.name not in OWN and not spec.metadata["secret"]:
            found[flag(spec.name)] = json.dumps(getattr(config, spec.name))  # lists of messages are tuples here
    described = Path(config.hf_config_path or config.model).expanduser() / "config.json"
    if described.is_file():
        found["the model's config.json"] = hashlib.sha256(described.read_bytes()).hexdigest()[:12]
    return found


def difference(mine: Mapping[str, str], other: Mapping[str, str], who: str) -> str | None:
    """In one line; None where both are the same. `who`: the other."""
    if digest(mine) == digest(other):
        return None
    name = next(name for name in [*mine, *other] if mine.get(name) != other.get(name))
    theirs, ours = other.get(name, "none"), mine.get(name, "none")
    remedy = "start the same command on every node" if name.startswith("--") else "install and set the same on both"
    return f"{who} has {name} {theirs}, and node 0 has {ours}: {remedy}"


def digest(facts: Mapping[str, str]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(sorted(facts.items()))).hexdigest()


def _code() -> str:
    """Of all that the ranks of an engine run alike."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    for room in ("engine", "kernels"):
        for source in sorted((root / room).rglob("*.py")):
            found.update(source.relative_to(root).as_posix().encode() + source.read_bytes())
    return found.hexdigest()[:12]


def check_secret(config: EngineConfig) -> None:
    """Raises ConfigError where strangers could dial in."""
    length = len(config.cluster_secret or "")
    if config.nnodes == 1 or length >= SHORTEST_SECRET or is_loopback(config.master_addr):
        return
    problem = f"{length} characters of VSERVE_CLUSTER_SECRET can be guessed" if length else "there is no secret"
    raise ConfigError(
        f"--nnodes {config.nnodes}: other hosts reach node 0 at {config.master_addr}, whoever is let in there sees "
        f"every prompt, and {problem}: set VSERVE_CLUSTER_SECRET to the same random text on all nodes, "
        f"{SHORTEST_SECRET} characters or more (openssl rand -hex 32)"
    )


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915
BACKLOG = 4096  # ranks that may knock before rank 0 is ready


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address; None where it cannot be told."""
    try:
        import fcntl

        wanted = socket.inet_aton(socket.gethostbyname(address))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                try:
                    told = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no such address
                    continue
                if told[20:24] == wanted:
                    return name
    except (OSError, ImportError):
        pass
    return None


def use_interface(environment: MutableMapping[str, str], address: str) -> None:
    """NCCL and gloo choose an interface by themselves, and it may lead nowhere: name the one with this address, unless
    somebody has named one. Ranks of one host are told elsewhere (parallel/group.py)."""
    if not is_loopback(address) and (name := interface_of(address)) is not None:
        for variable in VARIABLES:
            environment.setdefault(variable, name)


def rendezvous(address: str) -> tuple[str, socket.socket]:
    """Where ranks meet on this host, which others reach by `address`, and the socket that listens there: whoever keeps
    it open keeps the port from others until rank 0 has it.

    It has no secret (as little as what ranks tell each other later), so it listens at this address alone where that is
    a number; what a name means here need not be what it means elsewhere."""
    if not (found := _listening(address)):
        found = _listening("::" if ":" in address else "")
        assert found is not None
    port = found.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}", found


def _listening(host: str) -> socket.socket | None:
    """At a free port. None where `host` is no address of this machine's."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if host:
            ip_address(host)
        sock.bind((host, 0))
        sock.listen(BACKLOG)
        return sock
    except (OSError, ValueError):
        sock.close()
        if not host.strip(":"):
            raise
        return None


def advice() -> str:
    """For ranks that do not find each other."""
    chosen = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in VARIABLES)
    return (
        f"the hosts must reach each other on all ports by the interface in use ({chosen}): name another by --host-ip, "
        "or by these variables; NCCL_DEBUG=INFO tells more"
    )
