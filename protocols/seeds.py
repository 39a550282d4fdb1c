"""Seeds from names."""

from __future__ import annotations

import hashlib


def stream_seed(name: str) -> int:
    """A 63-bit seed from a name: the same in every process (no `hash`)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
