"""Read what another's server sends: JSON within bounds, and redirections within its origin.

`read_json` is the one way to make values of foreign JSON, and the functions below it the way to
take a value from it: each returns None for what does not fit, whatever its type. So an odd reply
costs the call that it answers, never the run.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

from cartridge_forge.protocols.errors import SpecError

MOST_BYTES = 32 << 20  # of one reply
MOST_DEPTH = 100  # of lists and objects inside each other: a reply of any API has less than 20
MOST_DIGITS = 308  # of a whole number: more do not fit a float
PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}


def read_json(content: bytes | str, most_bytes: int = MOST_BYTES) -> Any:
    """Return the values of a JSON text; null for a number that no float holds, NaN and infinities
    included. Raises ValueError for another text, one that is too large, and one that nests deeper
    than MOST_DEPTH."""
    if len(content) > most_bytes:
        raise ValueError(f"a reply of more than {most_bytes} bytes")
    try:
        value = json.loads(
            content, parse_constant=lambda name: None, parse_int=_whole, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(f"JSON that nests deeper than {MOST_DEPTH}") from None
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            part
            for outer in level
            if isinstance(outer, list | dict)
            for part in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise ValueError(f"JSON that nests deeper than {MOST_DEPTH}")


def _whole(digits: str) -> int | None:
    value = int(digits)  # raises ValueError for more than 4,300
    return value if len(digits) <= MOST_DIGITS else None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def value_of(value: Any, key: str) -> Any:
    """Return a field of an object; None where it is no object or has no such field."""
    return value.get(key) if isinstance(value, Mapping) else None


def items(value: Any) -> list[Any]:
    """Return a list; an empty one where it is none."""
    return value if isinstance(value, list) else []


def number(value: Any, least: float, most: float) -> float | None:
    """Return a number between two bounds as a float. True and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None
    return float(value)


def count(value: Any, most: int) -> int | None:
    """Return a whole number from 0 to `most`, which may be written as 3.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        return None
    return value


def stays(url: str, location: str) -> bool:
    """Return whether a redirection from `url` to `location`, which may be relative, keeps scheme,
    host and port: another origin is somebody else, who was not chosen."""
    try:
        return _origin(url) == _origin(urljoin(url, location))
    except ValueError:  # a port that is no number, say
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)


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
