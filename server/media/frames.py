"""What the server and a decoding process say to each other over a socket: messages, each behind its length."""

from __future__ import annotations

import socket
import struct

import msgspec

from ...engine.link.media import MediaItem

LENGTH = struct.Struct("<Q")
READY = b"!"  # a process's first word


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A picture, whose bytes follow."""

    num_bytes: int
    is_base64: bool
    detail: str


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    item: MediaItem | None
    error: str = ""  # what is wrong with the picture, in words that go on with "it"


def send(sock: socket.socket, message: bytes, data: bytes = b"") -> None:
    """`data`: what follows the message, of a length that the message tells."""
    sock.sendall(LENGTH.pack(len(message)) + message)
    if data:
        sock.sendall(data)


def receive(sock: socket.socket) -> bytes:
    """The next message as it is encoded. Raises EOFError where the other end is gone."""
    return receive_bytes(sock, LENGTH.unpack(receive_bytes(sock, LENGTH.size))[0])


def receive_bytes(sock: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    view, at = memoryview(received), 0
    while at < count:
        if not (length := sock.recv_into(view[at:])):
            raise EOFError
        at += length
    return bytes(received)
