"""Hand published tensors on from host to host: one relay a host gets each once over the network.

    relay 0 (where it was put) ---> relay 1 ---> relay 2 ---> ...      each for its host's readers

Each is asked for a key by its host's readers, and by the relay behind it in the chain; it then asks
the one before it. Bytes pass on in chunks as they arrive, so that a chain of n takes one transfer
and n - 1 chunks, not n transfers. A relay before it that breaks off, or says nothing for
`SILENT_SECONDS`, is replaced by the one before that, from the byte where it ended; at last by those
behind it that have the whole.

A connection carries one question, a line of JSON, and the frames of its answer. Beyond loopback it
is of mutual TLS wherever the mesh's other connections are (docs/adr/0018).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from typing import Any, BinaryIO, NamedTuple

from cartridge_forge.plugins.cluster.relays.relay_wire import (
    CHUNK_BYTES,
    QUESTION_BYTES,
    SILENT_SECONDS,
    connected,
    data_frames,
    fail,
    say_done,
    say_waiting,
    send_json,
)
from cartridge_forge.plugins.host.directories import file_of, keys_in
from cartridge_forge.plugins.host.tls_listener import MutualTlsRequests
from cartridge_forge.protocols.errors import ForgeError, PlaneError

WAITING_SECONDS = SILENT_SECONDS / 4  # between two frames of one who waits
AT = "@"  # between a key and the name of the host where it was put
_count = itertools.count()


class RelayPlace(NamedTuple):
    """Tell where a host's relay is: `RelayPlace("10.0.0.2:26600", "tls://10.0.0.2:41007",
    "/dev/shm/cartridge-forge-77-x")`; the store's own host is named ""."""

    host: str
    address: str
    root: str


class KeyRequest(NamedTuple):
    """Hold a question for the `size` bytes of a key, from byte `offset` on, within `seconds`.

    `route` are the addresses of the relays before the one asked, the first that where the key was
    put; `behind` those after it. `place` is the asker's place in the chain: a relay never waits for
    one at its own place or behind it, so no two wait for each other.
    """

    key: str
    size: int
    offset: int
    place: int
    route: Sequence[str] = ()
    behind: Sequence[str] = ()
    seconds: float = 60.0


class RelayTransfer:
    """Hold a key's file on this host while it arrives: `received` of its bytes can be read."""

    def __init__(self, path: Path, place: int, size: int, received: int = 0) -> None:
        self.path, self.place, self.size, self.received = path, place, size, received
        self.done = received == size
        self.fault = ""
        self.cancelled = False
        self._changed = threading.Condition()

    def arrived(self, size: int) -> None:
        with self._changed:
            self.received += size
            self._changed.notify_all()

    def ended(self, fault: str = "") -> None:
        with self._changed:
            self.fault, self.done = fault, not fault
            self._changed.notify_all()

    def wait(self, beyond: int, seconds: float) -> bool:
        """Wait until more than `beyond` bytes are there, or it has ended; return whether so."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.received > beyond or self.done or bool(self.fault), seconds
            )


class Relay:
    """Serve the keys of the directory `root` of this host, and get those that it lacks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._transfers: dict[str, RelayTransfer] = {}
        self._changing = threading.Lock()

    def find(self, request: KeyRequest) -> RelayTransfer:
        """Return the key's transfer, which begins where the key is neither here nor on its way.
        Raises PlaneError where the asker must not wait for it, or the key has other bytes."""
        path = file_of(self.root, request.key)
        with self._changing:
            if path.exists():
                if (size := path.stat().st_size) != request.size:
                    raise PlaneError(f"{request.key!r} has {size} bytes, not {request.size}")
                return RelayTransfer(path, 0, size, size)
            under_way = self._transfers.get(request.key)
            if under_way is not None and not under_way.fault:
                if under_way.place >= request.place:
                    raise PlaneError(f"{request.key!r} is on its way to a later place here")
                return under_way
            if not (request.route or request.behind):
                raise PlaneError(f"{request.key!r} is not here")
            index = len(request.route)
            path = self.root / f"{os.getpid()}-relay-{next(_count)}"
            new = self._transfers[request.key] = RelayTransfer(path, index, request.size)
        threading.Thread(target=self._get, args=(new, request), daemon=True).start()
        return new

    def delete(self, key: str) -> bool:
        """Delete a key, also one that is on its way; return whether it was here."""
        with self._changing:
            if (under_way := self._transfers.get(key)) is not None:
                under_way.cancelled = True
            try:
                file_of(self.root, key).unlink()
            except FileNotFoundError:
                return under_way is not None
            return True

    def _get(self, transfer: RelayTransfer, request: KeyRequest) -> None:
        deadline, why = time.monotonic() + request.seconds, ["nobody to ask"]
        try:
            with open(transfer.path, "xb", buffering=0) as file:
                upstream = [(address, request.route[:i]) for i, address in enumerate(request.route)]
                for address, route in (*reversed(upstream), *((a, ()) for a in request.behind)):
                    remaining_s = deadline - time.monotonic()
                    question = KeyRequest(
                        request.key,
                        request.size,
                        transfer.received,
                        transfer.place,
                        route,
                        (),
                        remaining_s,
                    )
                    try:
                        receive(address, question, file.write, transfer.arrived)
                    except (OSError, ForgeError) as error:
                        why.append(f"{address}: {error}")
                    if transfer.received == transfer.size or remaining_s <= 0 or transfer.cancelled:
                        break
            fault = self._keep(transfer, request.key, "; ".join(why[1:] or why))
        except Exception as error:  # a full file system, a wrong address: who waits is told
            fault = f"{request.key!r} cannot be kept under {self.root}: {error}"
        with self._changing:
            self._transfers.pop(request.key, None)
        transfer.path.unlink(missing_ok=True)
        transfer.ended(fault)

    def _keep(self, transfer: RelayTransfer, key: str, why: str) -> str:
        """Give what has arrived its key's name. Returns why not, "" for done."""
        if transfer.received < transfer.size:
            return f"{key!r} was got from no host ({why})"
        with self._changing:
            if transfer.cancelled:
                return f"{key!r} was deleted"
            with suppress(FileExistsError):
                os.link(transfer.path, file_of(self.root, key))
        return ""


def receive(
    address: str,
    request: KeyRequest,
    write: Callable[[memoryview], object],
    arrived: Callable[[int], None] = lambda size: None,
) -> None:
    """Ask a relay for the bytes of a key, and `write` them in order. Raises OSError for a relay
    that is gone or silent, PlaneError for one that cannot give them or a late one."""
    deadline = time.monotonic() + request.seconds
    with connected(address, {"get": request._asdict()}) as connection:
        for chunk in data_frames(connection):
            if len(chunk):
                write(chunk)
                arrived(len(chunk))
            elif time.monotonic() > deadline:
                raise PlaneError(f"{request.key!r} did not arrive within {request.seconds:.0f} s")


class RelayServer:
    """Serve a relay on `host`, at a port of its own, until this process ends. `context` makes the
    settings of mutual TLS (`plugins.host.tls`); None for plain TCP. Raises PlaneError
    where it cannot listen."""

    def __init__(self, relay: Relay, host: str, context: Callable[[], Any] | None = None) -> None:
        class RelayHandler(StreamRequestHandler):
            timeout = SILENT_SECONDS
            disable_nagle_algorithm = True

            def handle(self) -> None:
                answer(relay, self.rfile, self.connection)

        class RelayListener(MutualTlsRequests, TCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            most_connections = 1024

        try:
            listener = RelayListener((host.strip("[]"), 0), RelayHandler)
        except OSError as error:
            raise PlaneError(f"a relay cannot listen on {host}: {error.strerror}") from error
        listener.context = context
        self.port: int = listener.server_address[1]
        threading.Thread(target=listener.serve_forever, daemon=True).start()


def answer(relay: Relay, read: BufferedIOBase, to: socket.socket) -> None:
    """Answer one question. A failure of the relay's own is told; one of the connection ends it."""
    line = read.readline(QUESTION_BYTES)
    try:
        message = json.loads(line)
        if "get" in message:
            return _send(relay, KeyRequest(**message["get"]), to)
        if "delete" in message:
            reply: Any = relay.delete(str(message["delete"]))
        else:
            reply = keys_in(relay.root, str(message["keys"]))
    except (PlaneError, ValueError, TypeError, KeyError, FileNotFoundError) as error:
        return fail(to, f"{error}")
    send_json(to, reply)


def _send(relay: Relay, request: KeyRequest, to: socket.socket) -> None:
    transfer = relay.find(request)
    sent, reported = request.offset, time.monotonic()
    file: BinaryIO | None = None
    try:
        while not (transfer.done and sent == transfer.size):
            transfer.wait(sent, WAITING_SECONDS)
            if transfer.fault:
                return fail(to, transfer.fault)
            if transfer.received <= sent:  # less where the asker has more than this host
                if time.monotonic() - reported >= WAITING_SECONDS:
                    say_waiting(to)
                    reported = time.monotonic()
                continue
            file = file or _opened(transfer, file_of(relay.root, request.key))
            size = min(transfer.received - sent, CHUNK_BYTES)
            to.sendall(size.to_bytes(4, "big"))
            to.sendfile(file, sent, size)
            sent, reported = sent + size, time.monotonic()
        say_done(to)
    finally:
        if file is not None:
            file.close()


def _opened(transfer: RelayTransfer, path: Path) -> BinaryIO:
    try:
        return open(transfer.path, "rb", buffering=0)
    except FileNotFoundError:  # it has arrived, and has its key's name now
        return open(path, "rb", buffering=0)
