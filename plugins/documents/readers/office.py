"""Read zipped documents: Word, PowerPoint, Excel, OpenDocument and EPUB.

    .xlsx                                    by openpyxl, sheet by sheet
    .docx, .pptx, .odt, .odp, .ods, .epub    their XML in reading order, as HTML

Tables are read as those of HTML: a row a line, cells apart by " | ". An archive is refused where it
unpacks to more than UNPACKED bytes, or where its XML defines entities.
"""

from __future__ import annotations

import io
import itertools
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime, time
from html import escape
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element, ParseError

from cartridge_forge.plugins.documents.readers.html_text import html_text
from cartridge_forge.protocols.errors import DataError

UNPACKED = 256 * 1024**2  # bytes of an archive's files
MEMBERS = 20_000
MOST_REPEATS = 10_000  # of a row or cell of OpenDocument
OLD_OFFICE = b"\xd0\xcf\x11\xe0"  # Office before 2007, and a newer document with a password
ENTITY = re.compile(rb"<\s*!\s*ENTITY", re.IGNORECASE)
CELL = " | "
SPACES = re.compile(r"[ \t\r\n]+")


# The HTML element for each element of a format, by local names; "" for one that is not shown.
WORD = {
    "p": "p", "br": "br", "cr": "br", "tbl": "table", "tr": "tr", "tc": "td", "del": "",
    "moveFrom": "", "Fallback": "",
}  # fmt: skip
PRESENTATION = {
    "p": "p", "br": "br", "tbl": "table", "tr": "tr", "tc": "td", "fld": "", "Fallback": "",
}  # fmt: skip
OPEN_DOCUMENT = {
    "p": "p", "h": "h2", "line-break": "br", "list": "ul", "list-item": "li", "table": "table",
    "table-row": "tr", "table-cell": "td",
    **dict.fromkeys(
        ("annotation", "note-citation", "tracked-changes", "forms", "title", "desc", "shapes"), ""
    ),
}  # fmt: skip
SIGNS = {"s": " ", "tab": " ", "noBreakHyphen": "-"}


def docx_text(data: bytes) -> str:
    """Return the text of a Word document as it reads with all changes accepted, its notes at its
    end. Raises DataError as `archive_of` does."""
    archive = archive_of(data)
    path = _main(archive, "document")
    texts = [_shown(_xml(archive, path), WORD)]
    for kind, notes in _related(archive, path).values():
        if kind.endswith(("/footnotes", "/endnotes")):
            texts.append(_shown(_xml(archive, notes), WORD))
    return "\n\n".join(filter(None, texts))


def xlsx_text(data: bytes) -> str:
    """Return the visible sheets of a workbook, each under its name; a formula is its last value.
    Raises DataError as `archive_of` does."""
    _main(archive_of(data), "workbook")
    import openpyxl  # for those alone who read one

    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
    sheets = []
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        sheet.reset_dimensions()  # a file may state fewer than it has
        table = table_text(map(_cell_text, row) for row in sheet.iter_rows(values_only=True))
        sheets += [f"{sheet.title}\n\n{table}"] if table else []
    return "\n\n".join(sheets)


def pptx_text(data: bytes) -> str:
    """Return the slides of a presentation in order, each with its notes. Raises DataError as
    `archive_of` does."""
    archive = archive_of(data)
    path = _main(archive, "presentation")
    presentation, slides = _xml(archive, path), _related(archive, path)
    texts_read = []
    for slide in (e for e in presentation.iter() if _name(e) == "sldId"):
        path = next((slides[v][1] for k, v in slide.attrib.items() if v in slides and "}" in k), "")
        if not path:
            continue
        texts_read.append(_shown(_xml(archive, path), PRESENTATION))
        for kind, notes in _related(archive, path).values():
            if kind.endswith("/notesSlide"):
                texts = _bodies(_xml(archive, notes))
                texts_read += [_shown(body, PRESENTATION) for body in texts]
    return "\n\n".join(filter(None, texts_read))


def open_document_text(data: bytes) -> str:
    """Return the text of an OpenDocument text, presentation or spreadsheet. Raises DataError as
    `archive_of` does."""
    archive = archive_of(data)
    if b"encryption-data" in _member(archive, "META-INF/manifest.xml", absent=b""):
        raise DataError("asks for a password; save it without one")
    content = _xml(archive, "content.xml")
    body = next((e for e in content if _name(e) == "body"), content)
    return _shown(body, OPEN_DOCUMENT, None)


def epub_text(data: bytes, decoded: Callable[[bytes], str]) -> str:
    """Return the chapters of a book in the order of its spine; `decoded` returns a page's text.
    Raises DataError as `archive_of` does, and for a protected book."""
    archive = archive_of(data)
    roots = _xml(archive, "META-INF/container.xml").iter()
    package = next((e.get("full-path", "") for e in roots if _name(e) == "rootfile"), "")
    book = _xml(archive, package)
    items = {e.get("id"): e.get("href", "") for e in book.iter() if _name(e) == "item"}
    locked = _locked(archive)
    pages = []
    for item in (e for e in book.iter() if _name(e) == "itemref"):
        href = items.get(item.get("idref"))
        if not href:
            continue
        path = posixpath.normpath(posixpath.join(posixpath.dirname(package), unquote(href)))
        if path in locked:
            raise DataError("is a protected book, whose text cannot be read; give one without DRM")
        pages.append(html_text(decoded(_member(archive, path)), titled=False))
    return "\n\n".join(filter(None, pages))


def archive_of(data: bytes) -> zipfile.ZipFile:
    """Return the archive of a file's bytes. Raises DataError for another file, one that is damaged,
    encrypted or unpacks to too much, and for XML that defines entities."""
    if data.startswith(OLD_OFFICE):
        raise DataError(
            "asks for a password, or is of Office before 2007; save it without one, in the new form"
        )
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise DataError(f"is damaged, no zip archive ({error}); save it anew") from None
    total = sum(member.file_size for member in members)
    if total > UNPACKED or len(members) > MEMBERS:
        raise DataError(
            f"unpacks to {total:,} bytes in {len(members):,} files, over {UNPACKED:,} and "
            f"{MEMBERS:,}; save its text alone"
        )
    for member in members:
        if member.filename.endswith((".xml", ".rels", ".opf", ".xhtml")) and ENTITY.search(
            _member(archive, member.filename)
        ):
            raise DataError(f"defines entities in {member.filename}; save it anew without them")
    return archive


def table_text(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as lines with cells apart by " | ", without empty rows and cells at their end."""
    lines = (CELL.join(SPACES.sub(" ", cell).strip() for cell in row) for row in rows)
    return "\n".join(line for row in lines if (line := row.rstrip(" |")))


def _cell_text(value: Any) -> str:
    if isinstance(value, datetime) and value.time() == time():
        value = value.date()
    if isinstance(value, date | time):
        return value.isoformat(" ") if isinstance(value, datetime) else value.isoformat()
    if isinstance(value, float):
        return f"{value:.15g}"
    return "" if value is None else str(value)


def _member(archive: zipfile.ZipFile, name: str, absent: bytes | None = None) -> bytes:
    try:
        return archive.read(name)
    except KeyError:
        if absent is not None:
            return absent
        raise DataError(f"is damaged: it has no {name}; save it anew") from None
    except RuntimeError:
        raise DataError("asks for a password; save it without one") from None
    except Exception as error:  # zlib.error, EOFError, BadZipFile, NotImplementedError and others
        raise DataError(f"is damaged: {name} cannot be read ({error}); save it anew") from None


def _xml(archive: zipfile.ZipFile, name: str) -> Element:
    from defusedxml.ElementTree import fromstring

    try:
        root: Element = fromstring(_member(archive, name))
        return root
    except (ParseError, ValueError, LookupError) as error:  # defusedxml's are ValueErrors
        raise DataError(f"is damaged: {name} is no plain XML ({error}); save it anew") from None


def _main(archive: zipfile.ZipFile, root: str) -> str:
    """Return the path of an Office file's main part. Raises DataError unless it is of the kind that
    its root element says."""
    for kind, path in _related(archive, "").values():
        if kind.endswith("/officeDocument") and (_name(_xml(archive, path)) == root):
            return path
    raise DataError(f"is not of the kind that its name says, it holds no {root}; rename it")


def _related(archive: zipfile.ZipFile, path: str) -> dict[str, tuple[str, str]]:
    """Return {id: (kind, path)} of what a part of an Office file refers to."""
    folder, name = posixpath.split(path)
    file = posixpath.join(folder, "_rels", f"{name}.rels")
    if file not in archive.NameToInfo:
        return {}
    return {
        e.get("Id", ""): (
            e.get("Type", ""),
            posixpath.normpath(posixpath.join("/", folder, e.get("Target", ""))).lstrip("/"),
        )
        for e in _xml(archive, file)
    }


def _bodies(notes: Element) -> Iterator[Element]:
    """Yield the shapes of a page of notes that hold the notes, not the slide's number or date."""
    for shape in (e for e in notes.iter() if _name(e) == "sp"):
        if any(_name(e) == "ph" and e.get("type") == "body" for e in shape.iter()):
            yield shape


def _locked(archive: zipfile.ZipFile) -> set[str]:
    """Return the encrypted files of a book; fonts often are."""
    file = "META-INF/encryption.xml"
    if file not in archive.NameToInfo:
        return set()
    uris = (e.get("URI", "") for e in _xml(archive, file).iter() if _name(e) == "CipherReference")
    return {unquote(path) for path in uris}


def _shown(root: Element, tags: Mapping[str, str], texts: str | None = "t") -> str:
    """Return the text of an element, by HTML's elements for its own: that inside of `texts`, None:
    all."""
    parts: list[str] = []
    _as_html(root, tags, texts, parts)
    return html_text("".join(parts), flat_cells=True)


def _as_html(
    element: Element, tags: Mapping[str, str], texts: str | None, parts: list[str]
) -> None:
    tag = tags.get(name := _name(element))
    if tag == "p" and any(_name(e) == "numPr" for e in element.iterfind("*/*")):
        tag = "li"  # Word's lists are paragraphs
    if tag != "":
        parts.append(f"<{tag}>" if tag else SIGNS.get(name, ""))
        if texts in (None, name):
            parts.append(escape(element.text or ""))
        within = {**tags, "p": "dd"} if name == "list-item" else tags  # a line each
        for child in _children(element):
            _as_html(child, within, texts, parts)
        if tag and tag != "br":
            parts.append(f"</{tag}>")
    if texts is None:
        parts.append(escape(element.tail or ""))


def _children(element: Element) -> Iterator[Element]:
    """Yield the children of an element; equal rows and cells side by side of OpenDocument, which
    are stored once, as often as they stand. Empty ones at the end are left out."""
    children = [*element]
    while children and _repeats(children[-1]) > 1 and not any(children[-1].itertext()):
        children.pop()
    for child in children:
        empty_row = _name(child) == "table-row" and not any(child.itertext())
        yield from itertools.repeat(child, 1 if empty_row else _repeats(child))


def _repeats(element: Element) -> int:
    kind = {"table-row": "}number-rows-repeated", "table-cell": "}number-columns-repeated"}
    end = kind.get(_name(element), "}")
    counts = [int(value) for key, value in element.attrib.items() if key.endswith(end)]
    return min(counts[0], MOST_REPEATS) if counts else 1


def _name(element: Element) -> str:
    return str(element.tag).rpartition("}")[2]
