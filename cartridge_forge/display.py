"""Show tables in a notebook as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def page(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a titled HTML table; every text is escaped. Empty `heads` show no head."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads) if any(heads) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    caption = f"<caption><b>{escape(title)}</b></caption>"
    return f"<table>{caption}{f'<tr>{head}</tr>' if head else ''}{body}</table>"
