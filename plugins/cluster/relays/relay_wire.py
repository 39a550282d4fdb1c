"""Frame what relays tell each other: four bytes of a length, then so many bytes.

1 .. CHUNK_BYTES   data
0                  the sender waits for data itself, and lives
DONE               the sender has sent everything
FAILED             a text follows, framed as data: why it sends no more
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cartridge_forge.plugins.cluster.hosts.handshake import client_context, host_and_port
from cartridge_forge.protocols.errors import PlaneError

# Each host adds the time of one chunk to a chain: 2 ms at 1 Gbit/s.
CHUNK_BYTES = 256 * 1024
QUESTION_BYTES = 1 << 20  # the addresses of 10,000 relays
# A relay sends at least one frame in a quarter of it: a host without any is unreachable or stopped.
SILENT_SECONDS = 4.0
DONE, FAILED = 0xFFFFFFFE, 0xFFFFFFFF


@contextmanager
def connected(address: str, question: Mapping[str, Any]) -> Iterator[socket.socket]:
    """Ask a relay at `tls://host:port` (or `tcp://`) a question, and yield the connection that has
    its answer. Raises OSError for one that is not there, RunError without a certificate."""
    host, port = host_and_port(address)
    name, secured = host.strip("[]"), client_context(address)
    with socket.create_connection((name, port), SILENT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talks = secured.wrap_socket(connection, server_hostname=name) if secured else connection
        with talks:
            talks.sendall(json.dumps(question).encode() + b"\n")
            yield talks


def data_frames(connection: socket.socket) -> Iterator[memoryview]:
    """Yield the data of an answer in order, valid until the next; an empty one for a sender that
    waits. Raises PlaneError for an answer that failed, OSError for one that broke off."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while True:
        size = _length(connection)
        if size == DONE:
            return
        if size == FAILED:
            size = min(_length(connection), CHUNK_BYTES)
            raise PlaneError(bytes(_filled(connection, buffer[:size])).decode(errors="replace"))
        if size > CHUNK_BYTES:
            raise PlaneError(f"a frame of {size} bytes; is that a relay?")
        yield _filled(connection, buffer[:size])


def ask(address: str, question: Mapping[str, Any]) -> Any:
    """Return the JSON of an answer. Raises OSError and PlaneError as `data_frames` does."""
    with connected(address, question) as talks:
        return json.loads(b"".join(bytes(frame) for frame in data_frames(talks)))


def send_json(to: socket.socket, reply: Any) -> None:
    """Send a reply of any length, and that it is everything."""
    body = json.dumps(reply).encode()
    for start in range(0, len(body), CHUNK_BYTES):
        part = body[start : start + CHUNK_BYTES]
        to.sendall(len(part).to_bytes(4, "big") + part)
    say_done(to)


def say_waiting(to: socket.socket) -> None:
    to.sendall(bytes(4))


def say_done(to: socket.socket) -> None:
    to.sendall(DONE.to_bytes(4, "big"))


def fail(to: socket.socket, why: str) -> None:
    """Send that no more will come, and why."""
    text = why.encode()[:CHUNK_BYTES]
    to.sendall(FAILED.to_bytes(4, "big") + len(text).to_bytes(4, "big") + text)


def _length(connection: socket.socket) -> int:
    return int.from_bytes(_filled(connection, memoryview(bytearray(4))), "big")


def _filled(connection: socket.socket, into: memoryview) -> memoryview:
    got = 0
    while got < len(into):
        size = connection.recv_into(into[got:])
        if not size:
            raise ConnectionResetError("it broke off")
        got += size
    return into
