"""Bind the socket of a server before it starts: a taken address is told at once."""

from __future__ import annotations

import socket

from cartridge_forge.protocols.errors import SpecError


def listen(address: str, key: str) -> socket.socket:
    """Return a socket bound to host:port. Raises SpecError, which names `key`, where it is
    taken."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without, a token waits 40 ms for the receipt of what was sent before:
    # asyncio sets it only where a socket names its protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host.strip("[]"), int(port)))
    except OSError as error:
        listener.close()
        raise SpecError(
            f"{key}: cannot listen on {address}: {error.strerror}; choose another port, or "
            "127.0.0.1:0 for any free one"
        ) from error
    return listener
