"""Find the network interface by which ranks meet."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from cartridge_forge.protocols.errors import DataError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_to(host: str) -> str:
    """Return the network interface by which this host reaches `host`, which may be itself: ranks
    connect there, and not where a host name happens to lead. Raises DataError without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:  # sends nothing
            one.connect((host, 9))
            address = one.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # an interface without an IPv4 address
                    reply = fcntl.ioctl(one.fileno(), SIOCGIFADDR, request)
                    if socket.inet_ntoa(reply[20:24]) == address:
                        return name
    except OSError as error:
        raise DataError(f"this host does not reach {host}, where the ranks meet: {error}") from None
    raise DataError(
        f"no interface of this host has the address {address}, by which it reaches {host}"
    )
