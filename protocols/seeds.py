"""Derive seeds from names."""

from __future__ import annotations

import hashlib


def stream_seed(name: str) -> int:
    """Return a 63-bit seed from a name, equal in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
