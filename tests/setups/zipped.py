"""Make small zipped documents by hand, as Word, PowerPoint, LibreOffice and makers of books do."""

import io
import zipfile
from collections.abc import Mapping

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PACKAGE = "http://schemas.openxmlformats.org/package/2006/relationships"
SLIDES = (
    'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main" '
    'xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main" '
    f'xmlns:r="{RELATIONS}"'
)
OPEN = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"'
)


def zipped(members: Mapping[str, str]) -> bytes:
    """Return an archive of these texts, compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file.getvalue()


def relations(**targets: str) -> str:
    """Return the XML of a part's relations, {id: "kind target"}."""
    told = "".join(
        '<Relationship Id="{}" Type="{}/{}" Target="{}"/>'.format(key, RELATIONS, *value.split())
        for key, value in targets.items()
    )
    return f'<Relationships xmlns="{PACKAGE}">{told}</Relationships>'


def docx(body: str, **parts: str) -> bytes:
    """Return a Word document of this body; `parts` are the bodies of word/NAME.xml."""
    return zipped(
        {
            "[Content_Types].xml": (
                '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
                '<Default Extension="xml" ContentType="application/xml"/></Types>'
            ),
            "_rels/.rels": relations(a="officeDocument word/document.xml"),
            "word/document.xml": f"<w:document {W}><w:body>{body}</w:body></w:document>",
            "word/_rels/document.xml.rels": relations(
                **{name: f"{name} {name}.xml" for name in parts}
            ),
            **{
                f"word/{name}.xml": f"<w:{name} {W}>{text}</w:{name}>"
                for name, text in parts.items()
            },
        }
    )


def said(*texts: str) -> str:
    """Return Word's paragraphs of these texts."""
    return "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in texts)


def pptx(*slides: str, notes: str = "") -> bytes:
    """Return a presentation whose file names run against the order of its slides; `notes` are the
    first slide's."""
    count = len(slides)
    shown = "".join(f'<p:sldId id="{256 + i}" r:id="r{i}"/>' for i in range(count))
    files = {f"r{i}": f"slide slides/slide{count - i}.xml" for i in range(count)}
    parts = {
        "_rels/.rels": relations(a="officeDocument ppt/presentation.xml"),
        "ppt/presentation.xml": (
            f"<p:presentation {SLIDES}><p:sldIdLst>{shown}</p:sldIdLst></p:presentation>"
        ),
        "ppt/_rels/presentation.xml.rels": relations(**files),
    }
    for i, slide in enumerate(slides):
        parts[f"ppt/slides/slide{count - i}.xml"] = (
            f"<p:sld {SLIDES}><p:cSld><p:spTree>{slide}</p:spTree></p:cSld></p:sld>"
        )
    if notes:
        parts[f"ppt/slides/_rels/slide{count}.xml.rels"] = relations(
            n="notesSlide ../notesSlides/notesSlide1.xml"
        )
        parts["ppt/notesSlides/notesSlide1.xml"] = (
            f'<p:notes {SLIDES}><p:sp><p:nvPr><p:ph type="sldNum"/></p:nvPr>{shape("7")}</p:sp>'
            f'<p:sp><p:nvPr><p:ph type="body"/></p:nvPr>{shape(notes)}</p:sp></p:notes>'
        )
    return zipped(parts)


def shape(*texts: str) -> str:
    """Return a slide's text box of these paragraphs."""
    return "".join(f"<a:p><a:r><a:t>{text}</a:t></a:r></a:p>" for text in texts)


def open_document(body: str) -> bytes:
    """Return an OpenDocument file of this body."""
    return zipped(
        {
            "META-INF/manifest.xml": "<manifest/>",
            "content.xml": (
                f"<office:document-content {OPEN}><office:body>{body}</office:body>"
                "</office:document-content>"
            ),
        }
    )


def epub(chapters: Mapping[str, str], spine: tuple[str, ...], locked: str = "") -> bytes:
    """Return a book of these pages by file name, read in the order of the spine."""
    items = "".join(
        f'<item id="i{i}" href="{name}" media-type="application/xhtml+xml"/>'
        for i, name in enumerate(chapters)
    )
    order = "".join(f'<itemref idref="i{[*chapters].index(name)}"/>' for name in spine)
    parts = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": (
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
        ),
        "OEBPS/book.opf": (
            f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest>'
            f"<spine>{order}</spine></package>"
        ),
    } | {f"OEBPS/{name.replace('%20', ' ')}": page for name, page in chapters.items()}
    if locked:
        parts["META-INF/encryption.xml"] = (
            '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
            f'<CipherReference URI="OEBPS/{locked}"/></encryption>'
        )
    return zipped(parts)
