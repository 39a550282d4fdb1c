"""Explain a key of a spec file: `forge explain KEY`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cartridge_forge.plugins.spec_files.keys import (
    SpecFile,
    SpecKey,
    near_keys,
    spec_files,
    spec_keys,
)
from cartridge_forge.plugins.statistics.formatting import TableSection, facts
from cartridge_forge.protocols.errors import SpecError

HEADS = ("key", "type", "default", "meaning")


def command(*, key: str) -> tuple[TableSection, ...]:
    """Return the entry of a key, such as `train.lr`; of a section with a row for each of its keys;
    of a last name alone, all keys of that name. Raises SpecError for an unknown key."""
    every = [known for file in spec_files() for known in _written(file)]
    found = [known for known in every if known.key == key]
    found = found or [known for known in every if known.key.endswith(f".{key}")]
    if not found:
        near = near_keys(key, every)
        hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "see the sections: "
        sections = ", ".join(dict.fromkeys(k.key for k in every if "." not in k.key))
        raise SpecError(f"there is no key {key}; {hint if near else hint + sections}")
    return tuple(section for known in found for section in _entry(known))


def _written(file: SpecFile) -> Iterator[SpecKey]:
    """Yield every key as a file has it: `roles.trainer.threads`."""
    for known in spec_keys(file):
        for key in known.written:
            yield replace(known, key=key, names=None)


def _entry(known: SpecKey) -> list[TableSection]:
    where = f"{known.file.what}, {known.file.files}"
    about = [
        ("type", known.type),
        ("default", known.default),
        ("meaning", known.meaning),
        ("in", where),
    ]
    if known.section is None:
        return [facts(known.key, about)]
    below = [k for k in _written(known.file) if k.key.rpartition(".")[0] == known.key]
    rows = tuple((k.key, k.type, k.default, k.meaning) for k in below)
    return [facts(known.key, about), TableSection("its keys", HEADS, rows)]
