"""Convert a file's bytes to texts: text, Markdown, HTML, PDF, JSON and JSON lines, without IO.

Every reader raises DataError with the fault and its remedy; the caller adds the file's name.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from documents.html_text import html_text
from protocols.errors import DataError

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
BINARY = "is binary, no text; convert it to text, Markdown or PDF"


@dataclass(frozen=True)
class ReadOptions:
    """Set how files are read: the first of `text_fields` that a JSON object has is its text;
    `encoding` is for text that is not UTF-8 and has no byte order mark (None: refused)."""

    text_fields: tuple[str, ...] = ("text", "content", "body")
    encoding: str | None = "cp1252"


@dataclass(frozen=True)
class FileText:
    """Hold one text of a file: `record` counts from 1 in files with several texts, 0 in others."""

    text: str
    encoding: str
    record: int = 0


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
    """Return the text layer, pages separated by an empty line."""
    from pypdf import PasswordType, PdfReader  # 15 MB, for those alone who read one

    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        reader = PdfReader(io.BytesIO(data))
        locked = reader.is_encrypted and reader.decrypt("") == PasswordType.NOT_DECRYPTED
        if not locked:
            pages = [page.extract_text().strip() for page in reader.pages]
    except Exception as error:  # pypdf raises errors of any type for a damaged file
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"is no readable PDF ({what}); print it to PDF anew") from error
    if locked:
        raise DataError("is a PDF that asks for a password; remove it")
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise DataError("is a PDF without a text layer; run character recognition over it")
    return [FileText(text.replace("\r\n", "\n").replace("\r", "\n"), "pdf")]


def read_json(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return one text for an object with a text field or a string, or one for each item of a
    list."""
    text, encoding = decode(data, how.encoding)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({_first_line(error)}); name it .txt if it is text") from None
    if not isinstance(content, list):
        return [FileText(_text_of(content, "its object", how.text_fields), encoding)]
    return [
        FileText(_text_of(item, f"item {i}", how.text_fields), encoding, i)
        for i, item in enumerate(content, start=1)
    ]


def read_jsonl(data: bytes, how: ReadOptions) -> list[FileText]:
    """Return one text a line: an object with a text field, or a string. Empty lines are skipped."""
    text, encoding = decode(data, how.encoding)
    found = []
    # Not splitlines(): JSON strings may contain the other line ends that it splits at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"line {number} is not JSON ({_first_line(error)}); mend or delete the line"
            ) from None
        found.append(
            FileText(_text_of(content, f"line {number}", how.text_fields), encoding, number)
        )
    return found


Reader = Callable[[bytes, ReadOptions], list[FileText]]
READERS: Mapping[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".markdown": read_text,
    ".html": read_html,
    ".htm": read_html,
    ".pdf": read_pdf,
    ".json": read_json,
    ".jsonl": read_jsonl,
}


def _text_of(content: Any, where: str, fields: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        raise DataError(
            f"{where} is {type(content).__name__}; expected an object with a text field, or a text"
        )
    field = next((f for f in fields if f in content), None)
    if field is None:
        has = ", ".join(sorted(map(str, content))[:8]) or "nothing"
        raise DataError(
            f"{where} has none of the fields {', '.join(fields)}, but {has}; name the field that "
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
