"""Addresses and interfaces of this host, as ranks on several hosts need them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import MutableMapping
from ipaddress import ip_address

from .handshake import is_loopback

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
