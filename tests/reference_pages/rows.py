"""Write the page of the rows and results that a run's files hold."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass

from cartridge_forge.plugins.evaluate import records as evaluation
from cartridge_forge.plugins.statistics import results
from cartridge_forge.protocols.records import answers, run_files, status
from reference_pages.markdown import code, page, table

ABOUT = """
The classes behind the files of a run, with the types of their fields.
[Run directory](run_directory.md) says which file holds which, and what each field means.
"""


def rows_page() -> str:
    """Return the page, a heading for each record."""
    parts: list[str] = []
    for module in (run_files, results, answers, evaluation, status):
        for name, found in vars(module).items():
            own = isinstance(found, type) and found.__module__ == module.__name__
            if own and not name.startswith("_"):
                parts += _record(name, found)
    events = ", ".join(code(name) for name in typing.get_args(run_files.EventName))
    return page(
        "Records of a run", ABOUT, "## Events", f"Names in `events.jsonl`: {events}.", *parts
    )


def _record(name: str, found: type) -> Iterator[str]:
    if is_dataclass(found):
        held = [(f.name, str(f.type), _left_out(f)) for f in fields(found)]
    else:
        held = [(key, _type(kind), "") for key, kind in found.__annotations__.items()]
    if held:
        yield f"## {name}"
        yield inspect.getdoc(found) or ""
        yield table(("field", "type", "default"), ((code(n), code(t), d) for n, t, d in held))


def _left_out(field: typing.Any) -> str:
    if field.default is not MISSING:
        return code(repr(field.default))
    return "" if field.default_factory is MISSING else "empty"


def _type(annotation: object) -> str:
    """Return an annotation as it was written; those of a TypedDict are kept as references."""
    return str(getattr(annotation, "__forward_arg__", annotation))
