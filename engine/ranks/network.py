"""Addresses and interfaces of this host, as ranks on several hosts need them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import MutableMapping

from .handshake import is_loopback

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SIOCGIFADDR = 0x8915


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


def rendezvous(address: str) -> str:
    """Where ranks meet on this host, which others reach by `address`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def advice() -> str:
    """For ranks that do not find each other."""
    chosen = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in VARIABLES)
    return (
        f"the hosts must reach each other on all ports by the interface in use ({chosen}): name another by --host-ip, "
        "or by these variables; NCCL_DEBUG=INFO tells more"
    )
