"""PDF files by hand: a page for each text, in Helvetica."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf(pages: Sequence[str]) -> bytes:
    streams = [f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() for text in pages]
    return _pdf([b"<< /Length %d >>\nstream\n%s\nendstream" % (len(s), s) for s in streams])


def endless_pdf() -> bytes:
    """A page of a million texts, which compress to some kilobytes and take minutes to lay out."""
    packed = zlib.compress(b"BT (a) Tj ET\n" * 1_000_000, 9)
    head = b"<< /Length %d /Filter /FlateDecode >>" % len(packed)
    return _pdf([b"%s\nstream\n%s\nendstream" % (head, packed)])


def _pdf(pages: Sequence[bytes]) -> bytes:
    count = len(pages)
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(count))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, page in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(page)
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\n" % (
        size, table, size,
    ) + b"startxref\n%d\n%%%%EOF\n" % len(out)  # fmt: skip
