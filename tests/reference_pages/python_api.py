"""Write the page of the package `cartridge_forge`: what is public, with signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass

import cartridge_forge
from reference_pages.markdown import page

ABOUT = """
Everything that semantic versioning covers. [Python](../how-to/python.md) shows how to use it.
Importing the package imports no torch.
"""


def python_page() -> str:
    """Return the page, a heading for each public name."""
    parts = [part for name in cartridge_forge.__all__ for part in _name(name)]
    return page("Python package", ABOUT, *parts)


def _name(name: str) -> Iterator[str]:
    found = getattr(cartridge_forge, name)
    yield f"## {name}"
    if issubclass(found, Exception):
        yield f"An exception, below `{found.__mro__[1].__name__}`."
    else:
        yield f"    {name}{_signature(found)}"
    yield _doc(found)
    for member, value in vars(found).items():
        call = value.__func__ if isinstance(value, classmethod) else value
        if member.startswith("_") or issubclass(found, Exception):
            continue
        if isinstance(value, property):
            yield f"### {name}.{member}\n\nA property. {_doc(value)}"
        elif inspect.isfunction(call):
            yield f"### {name}.{member}\n\n    {name}.{member}{_signature(call)}\n\n{_doc(call)}"


def _signature(found: object) -> str:
    """Return the signature as it is written, without `self` or `cls`; of a dataclass its fields."""
    if isinstance(found, type) and is_dataclass(found):
        shown = [
            f"{f.name}: {f.type}" + ("" if f.default is MISSING else f" = {f.default!r}")
            for f in fields(found)
        ]
        return f"({', '.join(shown)})"
    signature = inspect.signature(found)  # type: ignore[arg-type]
    kept = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    return str(signature.replace(parameters=kept)).replace("'", "")


def _doc(found: object) -> str:
    return inspect.getdoc(found) or ""
