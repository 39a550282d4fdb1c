"""Explain a key of a spec file: `forge explain KEY`."""

from __future__ import annotations

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.formatting import TableSection, facts
from cartridge_forge.protocols.spec.keys import FILES, SpecKey, keys_of, near_keys, spec_keys

HEADS = ("key", "type", "default", "meaning")


def command(*, key: str) -> tuple[TableSection, ...]:
    """Return the entry of a key, such as `train.lr`; of a section with a row for each of its keys;
    of a last name alone, all keys of that name. Raises SpecError for an unknown key."""
    every = [spec_key for file in FILES for spec_key in spec_keys(file)]
    matches = [spec_key for spec_key in every if spec_key.key == key]
    matches = matches or [spec_key for spec_key in every if spec_key.key.endswith(f".{key}")]
    if not matches:
        suggestions = near_keys(key, every)
        hint = (
            f"did you mean {' or '.join(dict.fromkeys(suggestions))}?"
            if suggestions
            else "see the sections: "
        )
        sections = ", ".join(dict.fromkeys(k.key for k in every if "." not in k.key))
        raise SpecError(f"there is no key {key}; {hint if suggestions else hint + sections}")
    return tuple(section for spec_key in matches for section in _entry(spec_key))


def _entry(spec_key: SpecKey) -> list[TableSection]:
    where = f"{spec_key.file.what}, {spec_key.file.files}"
    about = [
        ("type", spec_key.type),
        ("default", spec_key.default),
        ("meaning", _meaning(spec_key)),
        ("in", where),
    ]
    if spec_key.section is None:
        return [facts(spec_key.key, about)]
    names = {f"{spec_key.key}.{name}" for name, _ in keys_of(spec_key.section)}
    below = [k for k in spec_keys(spec_key.file) if k.key in names]
    rows = tuple((k.key, k.type, k.default, _meaning(k)) for k in below)
    return [facts(spec_key.key, about), TableSection("its keys", HEADS, rows)]


def _meaning(spec_key: SpecKey) -> str:
    return " ".join((spec_key.field.description or "").split())
