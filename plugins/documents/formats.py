"""Convert a file's bytes to texts, without IO: text and markup as they are, HTML, PDF, JSON, tables
of values, notebooks, and by `plugins.documents.readers.office` zipped documents.

Every reader raises DataError with the fault and its remedy; the caller adds the file's name.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cartridge_forge.plugins.documents.readers.html_text import html_text
from cartridge_forge.plugins.documents.readers.markdown_text import markdown_text
from cartridge_forge.plugins.documents.readers.office import (
    docx_text,
    epub_text,
    open_document_text,
    pptx_text,
    table_text,
    xlsx_text,
)
from cartridge_forge.plugins.documents.readers.pdf_text import pdf_text
from cartridge_forge.protocols.errors import DataError

# A UTF-32 mark begins with UTF-16's: the longer ones are checked first.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
UNICODE = frozenset({None, "utf-8", *(encoding for _, encoding in MARKS)})
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
CHARSET = re.compile(rb"<meta[^>]+charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
WIDENED = {"ascii": "cp1252", "iso8859-1": "cp1252"}  # by HTML's standard
CHARSET_BYTES = 1024  # in which a page names its encoding, by HTML's standard
MOST_CONTROLS = 0.01  # of the characters: a log has escape codes, a program has more
DELIMITERS = ",\t;|"  # of columns
SEPARATOR = re.compile(rf"sep=([{DELIMITERS}])\n", re.IGNORECASE)
SHOWN = ("text/markdown", "text/plain", "text")  # kinds of a notebook's output, best first
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # of colours on a terminal
BINARY = "is binary, no text; convert it to text, Markdown or PDF"


@dataclass(frozen=True)
class ReadOptions:
    """Set how files are read: the first of `text_fields` that a JSON object has is its text;
    `encoding` is for text that is not UTF-8 and has no byte order mark (None: refused)."""

    text_fields: tuple[str, ...] = ("text", "content", "body")
    encoding: str | None = "cp1252"


@dataclass(frozen=True)
class FileText:
    """Hold one text of a file: `record` counts from 1 in files with several texts, 0 in others.
    `fault` says why a record has none, "" where it has one."""

    text: str
    encoding: str
    record: int = 0
    fault: str = ""


Reader = Callable[[bytes, ReadOptions], list[FileText]]


def decode(data: bytes, fallback: str | None) -> tuple[str, str]:
    """Return (text with `\\n` line ends, encoding): by byte order mark, as UTF-8, or strictly as
    `fallback`. Raises DataError for bytes that are none of these."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return _strictly(data, encoding), encoding
    try:
        return _strictly(data, "utf-8"), "utf-8"
    except DataError:
        if fallback in (None, "utf-8"):
            raise
    return _strictly(data, fallback), fallback


def _strictly(data: bytes, encoding: str) -> str:
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        if b"\0" in data:
            raise DataError(BINARY) from None
        raise DataError(
            f"is not {encoding}: byte {data[error.start]:#04x} at {error.start}; convert it to "
            "UTF-8, or name its encoding by documents.encoding"
        ) from None
    controls = CONTROLS.findall(text)
    if "\0" in controls or len(controls) > MOST_CONTROLS * len(text):
        raise DataError(BINARY)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_text(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return the file's text."""
    return [FileText(*decode(data, how.encoding))]


def read_markdown(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return what a reader sees of a page, as Markdown: no badges and no tags of images."""
    text, encoding = decode(data, how.encoding)
    prose = markdown_text(text)
    if text.strip() and not prose.strip():
        raise DataError("is a page of images without text; write what they show, or leave it out")
    return [FileText(prose, encoding)]


def read_html(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return what a browser shows of a page. One that is not UTF-8 is read in the encoding that it
    names, else in `how.encoding`."""
    page, encoding = decode(data, _named_encoding(data) or how.encoding)
    text = html_text(page)
    if not text:
        raise DataError(
            "is an HTML page without text; if a script writes its text, print the page to PDF"
        )
    return [FileText(text, encoding)]


def _named_encoding(data: bytes) -> str | None:
    """Return the encoding that an HTML page names, as browsers take it. None for those of Unicode,
    which `decode` tries or knows by their mark, and for an unknown one."""
    named = CHARSET.search(data[:CHARSET_BYTES])
    try:
        encoding = "utf-8" if named is None else codecs.lookup(named[1].decode()).name
        " ".encode(encoding)
    except (LookupError, UnicodeError):  # the first also of a codec that is none of texts
        return None
    return None if encoding.startswith("utf") else WIDENED.get(encoding, encoding)


def read_pdf(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return the text layer."""
    return [FileText(pdf_text(data), "pdf")]


def read_json(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return one text for an object with a text field or a string, or one for each item of a list;
    an item without a text has the fault."""
    text, encoding = decode(data, how.encoding)
    content = _json_of(text, "name it .txt if it is text")
    if not isinstance(content, list):
        return [FileText(_text_of(content, "its object", how.text_fields), encoding)]
    return _usable(
        _record(item, encoding, f"item {i}", i, how) for i, item in enumerate(content, start=1)
    )


def read_jsonl(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return one text a line: an object with a text field, or a string. Empty lines are skipped,
    and a line that cannot be used has the fault."""
    lines: Sequence[tuple[str, str] | bytes]
    # Split at "\n", not by splitlines(): JSON strings may contain the other line ends.
    if any(data.startswith(mark) for mark, _ in MARKS):
        text, encoding = decode(data, how.encoding)
        lines = [(line, encoding) for line in text.split("\n")]
    else:  # one that is not UTF-8 says nothing of the others
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        where = f"line {number}"
        try:
            text, encoding = line if isinstance(line, tuple) else decode(line, how.encoding)
            if text.strip():
                content = _json_of(text, "mend or delete the line")
                records.append(_record(content, encoding, where, number, how))
        except DataError as error:
            records.append(FileText("", "", number, f"{where} {error}"))
    return _usable(records)


def read_table(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return a file of comma-separated values, or of values apart by tabs, semicolons or bars, as a
    table."""
    text, encoding = decode(data, how.encoding)
    csv.field_size_limit(len(text) + 1)
    try:
        named = SEPARATOR.match(text)  # Excel's first line, which is none of the table
        sign = named[1] if named else _delimiter(text)
        body = io.StringIO(text[named.end() if named else 0 :], newline="")
        rows = [*csv.reader(body, delimiter=sign, skipinitialspace=True)]
    except csv.Error as error:
        raise DataError(f"is no table of values ({error}); name it .txt if it is text") from None
    return [FileText(table_text(rows), encoding)]


def _delimiter(text: str) -> str:
    """Return the sign that gives the most columns in most of the first rows."""

    def columns(sign: str) -> tuple[int, int]:
        lines = itertools.islice(csv.reader(io.StringIO(text, newline=""), delimiter=sign), 100)
        counts = Counter(len(row) for row in lines if row)
        ((most, often),) = counts.most_common(1) or [(1, 0)]
        return (often, most) if most > 1 else (0, 0)

    return max(DELIMITERS, key=columns)


def read_notebook(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return the cells of a Jupyter notebook in order, with the text that code gave."""
    text, encoding = decode(data, how.encoding)
    book = _json_of(text, "save the notebook anew")
    try:
        sheets = book.get("worksheets", [book])  # before version 4
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        parts = [part for cell in cells for part in _cell_parts(cell)]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"is no Jupyter notebook ({error}); save it anew") from None
    return [FileText("\n\n".join(part.strip("\n") for part in parts if part.strip()), encoding)]


def _cell_parts(cell: Mapping[str, Any]) -> Iterator[str]:
    source = _lines_of(cell.get("source", cell.get("input", "")))
    yield markdown_text(source) if cell.get("cell_type") == "markdown" else source
    for output in cell.get("outputs", ()):
        data = output.get("data", output)
        if output.get("output_type") != "error":
            values = (data[kind] for kind in SHOWN if kind in data)
            yield ESCAPES.sub("", _lines_of(next(values, "")))


def _lines_of(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _office(convert: Callable[[bytes], str]) -> Reader:
    """Return the reader of a zipped format. Its library may raise errors of any type for a damaged
    file."""

    def read(data: bytes, how: ReadOptions) -> list[FileText]:
        try:
            return [FileText(convert(data), "utf-8")]
        except (DataError, MemoryError):
            raise
        except Exception as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"is damaged ({what}); save it anew") from error

    return read


def read_epub(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return the chapters of a book."""
    read = _office(lambda data: epub_text(data, lambda page: decode(page, how.encoding)[0]))
    return read(data, how)


READERS: Mapping[str, Reader] = {
    ".txt": read_text,
    ".md": read_markdown,
    ".markdown": read_markdown,
    ".rst": read_text,
    ".adoc": read_text,
    ".org": read_text,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".json": read_json,
    ".jsonl": read_jsonl,
    ".csv": read_table,
    ".tsv": read_table,
    ".ipynb": read_notebook,
    ".docx": _office(docx_text),
    ".pptx": _office(pptx_text),
    ".xlsx": _office(xlsx_text),
    ".odt": _office(open_document_text),
    ".odp": _office(open_document_text),
    ".ods": _office(open_document_text),
    ".epub": read_epub,
}


def _record(content: Any, encoding: str, where: str, number: int, how: ReadOptions) -> FileText:
    """Return the text of a record, or its fault."""
    try:
        return FileText(_text_of(content, where, how.text_fields), encoding, number)
    except DataError as error:
        return FileText("", "", number, str(error))


def _usable(records: Iterable[FileText]) -> list[FileText]:
    """Return the records. Raises DataError with the first's fault where all have one."""
    usable = [*records]
    if usable and all(record.fault for record in usable):
        raise DataError(usable[0].fault)
    return usable


def _json_of(text: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({_first_line(error)}); {remedy}") from None


def _text_of(content: Any, where: str, fields: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        raise DataError(
            f"{where} is {type(content).__name__}; expected an object with a text field, or a text"
        )
    field = next((f for f in fields if f in content), None)
    if field is None:
        keys = ", ".join(sorted(map(str, content))[:8]) or "nothing"
        raise DataError(
            f"{where} has none of the fields {', '.join(fields)}, but {keys}; name the field that "
            "holds its text by documents.text_fields"
        )
    if not isinstance(content[field], str):
        raise DataError(
            f"{where}: {field} is {type(content[field]).__name__}, no text; name another field by "
            "documents.text_fields"
        )
    return str(content[field])


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
