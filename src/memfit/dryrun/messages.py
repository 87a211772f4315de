"""Messages between our own processes over a Unix socket: a length, then JSON, and perhaps a socket."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")


def send(channel: socket.socket, message: Any, passed: socket.socket | None = None) -> None:
    """Sends ``message``, and a copy of the socket ``passed``. Raises OSError when the other end has gone."""
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if passed is None:
        channel.sendall(header + data)
    else:
        socket.send_fds(channel, [header], [passed.fileno()])
        channel.sendall(data)


def receive(channel: socket.socket) -> Any:
    """The next message. Raises EOFError when the other end closed, TimeoutError at the socket's timeout."""
    return json.loads(_exactly(channel, _LENGTH.unpack(_exactly(channel, _LENGTH.size))[0]))


def receive_with_socket(channel: socket.socket) -> tuple[Any, socket.socket | None]:
    """The next message, and the socket that came with it."""
    header, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    if not header:
        raise EOFError
    header += _exactly(channel, _LENGTH.size - len(header))
    message = json.loads(_exactly(channel, _LENGTH.unpack(header)[0]))
    return message, socket.socket(fileno=descriptors[0]) if descriptors else None


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts, missing = [], count
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
