"""Read the text layer of a PDF, and join the words that its lines break.

Whether a hyphen at the end of a line is the word's own cannot be seen, so the document decides:

    exam-/ple       example          "example" stands elsewhere, or "exam" and "ple" are no words
    well-/known     well-known       "well-known" stands elsewhere, or "well" and "known" do and
                                     "wellknown" does not
    Jean-/Paul      Jean-Paul        before a capital or a digit, and in a compound, it stays
"""

from __future__ import annotations

import io
import logging
from collections.abc import Set

import regex

from cartridge_forge.protocols.errors import DataError

BROKEN = regex.compile(
    r"(?<![\p{L}\p{M}\p{N}'\u2019-])"
    r"([\p{L}\p{M}\p{N}'\u2019]*(?:-[\p{L}\p{M}\p{N}'\u2019]+)*[\p{L}\p{M}\p{N}])"  # before
    r"[-\u2010][ \t]*\n\s*"
    r"([\p{L}\p{M}\p{N}]+)"
)
SOFT_BREAK = regex.compile(r"\xad[ \t]*\n[ \t]*|\xad")
SUSPENDED = frozenset({"and", "or", "und", "oder"})  # short- and long-term
WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+(?:[-\u2010][\p{L}\p{M}\p{N}]+)*")


def pdf_text(data: bytes) -> str:
    """Return the text layer, pages separated by an empty line, words joined over the ends of lines.
    Raises DataError for a file without text, a damaged one and one with a password."""
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
    return joined_words(text.replace("\r\n", "\n").replace("\r", "\n"))


def joined_words(text: str) -> str:
    """Return the text with every word whole that a hyphen divides at the end of a line, and without
    soft hyphens."""
    text = SOFT_BREAK.sub("", text)
    # Words at the ends of lines say nothing: each is cut, or may be.
    vocabulary = {
        word.lower().replace("\u2010", "-") for word in WORD.findall(BROKEN.sub(" ", text))
    }
    while True:  # a word may go over three lines
        fresh = BROKEN.sub(lambda broken: _joined(broken[1], broken[2], vocabulary), text)
        if fresh == text:
            return text
        text = fresh


def _joined(first: str, second: str, vocabulary: Set[str]) -> str:
    """Return the word of two parts that a hyphen and the end of a line divide."""
    *compound, last = first.split("-")
    apart = f"{first}-{second}"
    if not second[0].islower() or last.isdigit() or min(len(last), len(second)) == 1:
        return apart  # words are not divided behind or before one letter
    if {(first + second).lower(), (last + second).lower()} & vocabulary:
        return first + second
    if second in SUSPENDED:
        return f"{first}- {second}"
    parts = {last.lower(), second.lower()} <= vocabulary
    return apart if compound or parts or apart.lower() in vocabulary else first + second
