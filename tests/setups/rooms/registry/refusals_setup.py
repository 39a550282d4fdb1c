"""What a reader makes of a damaged file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from format_setup import cartridge, same

from cartridge_forge.plugins.library.formats.cartridge_file import Provenance
from cartridge_forge.plugins.library.formats.convert import read
from cartridge_forge.protocols.errors import DataError

SMALL = cartridge(1, 1, 16, 2, dtype="bfloat16")
TEXTS = (".json", ".yaml")


def outcome(path: Path) -> str:
    """`refused`, `same`, or `bare`: whole numbers without what is known of them, as where the very
    word is damaged under which PEFT's file has our label."""
    try:
        again = read(path)
    except DataError:
        return "refused"
    bare = again.facts in (Provenance(), Provenance(base=SMALL.facts.base))
    assert same(replace(again, facts=SMALL.facts) if bare else again, SMALL)
    return "bare" if bare else "same"
