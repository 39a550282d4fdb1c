"""Zipped documents: Word, PowerPoint, Excel, OpenDocument, EPUB, and what is refused of them."""

import datetime
import io
import zipfile
from collections.abc import Mapping

import openpyxl
import pytest

from cartridge_forge.plugins.documents.formats import READERS, ReadOptions
from cartridge_forge.plugins.documents.readers import office
from cartridge_forge.protocols.errors import DataError

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


def text_of(suffix: str, data: bytes) -> str:
    (found,) = READERS[suffix](data, ReadOptions())
    return found.text


def table(*rows: tuple[str, ...]) -> str:
    lines = (
        "<w:tr>" + "".join(f"<w:tc>{said(*cell.split('/'))}</w:tc>" for cell in row) + "</w:tr>"
        for row in rows
    )
    return f"<w:tbl>{''.join(lines)}</w:tbl>"


def test_word_is_read_in_order_with_tables_changes_controls_fields_and_notes() -> None:
    run = "<w:r><w:t>{}</w:t></w:r>".format
    body = (
        said("Fees.")
        + table(("boat", "fee"), ("barge", "4/marks"))
        + f"<w:p><w:ins>{run('new')}</w:ins><w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
        f"<w:r><w:tab/><w:t>so\u00adft</w:t><w:br/><w:t>line</w:t></w:r></w:p>"
        f"<w:sdt><w:sdtContent>{said('in a control')}</w:sdtContent></w:sdt>"
        f"<w:p><w:fldSimple w:instr='PAGE'>{run('a field')}</w:fldSimple>"
        f"<w:moveFrom>{run('moved')}</w:moveFrom></w:p>"
        "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>one</w:t></w:r></w:p>"
        "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>two</w:t></w:r></w:p>"
    )
    data = docx(body, footnotes=f"<w:footnote w:id='2'>{said('A note.')}</w:footnote>")
    assert text_of(".docx", data) == (
        "Fees.\n\nboat | fee\nbarge | 4 marks\n\nnew soft\nline\n\nin a control\n\na field\n\n"
        "one\ntwo\n\nA note."
    )


def test_slides_are_read_in_their_order_with_tables_and_notes() -> None:
    cell = "<a:tc><a:txBody>{}</a:txBody></a:tc>".format
    rows = f"<a:tbl><a:tr>{cell(shape('x'))}{cell(shape('y', 'z'))}</a:tr></a:tbl>"
    data = pptx(shape("First", "point"), shape("Second") + rows, notes="say this")
    assert text_of(".pptx", data) == "First\n\npoint\n\nsay this\n\nSecond\n\nx | y z"


@pytest.mark.parametrize("suffix", [".odt", ".odp"])
def test_open_document_is_read_without_its_comments(suffix: str) -> None:
    body = (
        "<office:text><text:tracked-changes><text:p>old</text:p></text:tracked-changes>"
        "<text:h>Head</text:h><text:p>One<text:s/>two<text:line-break/>"
        "<office:annotation><text:p>hm</text:p></office:annotation><text:span>three</text:span>."
        "</text:p><text:list><text:list-item><text:p>a</text:p></text:list-item><text:list-item>"
        "<text:p>b</text:p></text:list-item></text:list></office:text>"
    )
    assert text_of(suffix, open_document(body)) == "Head\n\nOne two\nthree.\n\na\nb"


def test_a_sheet_of_open_document_has_its_repeated_cells_and_rows() -> None:
    cell = "<table:table-cell{}><text:p>{}</text:p></table:table-cell>".format
    twice = " table:number-columns-repeated='2'"
    row = "<table:table-row{}>{}</table:table-row>".format
    body = "".join(
        (
            "<table:table>",
            row("", cell("", "a") + cell(twice, "b")),
            row(" table:number-rows-repeated='9999'", ""),
            row("", cell("", "1") + f"<table:table-cell{twice}/>" + cell("", "2")),
            row(
                " table:number-rows-repeated='2'",
                cell("", "3") + "<table:table-cell table:number-columns-repeated='16382'/>",
            ),
            row(" table:number-rows-repeated='1048572'", "<table:table-cell/>"),
            "</table:table>",
        )
    )
    assert text_of(".ods", open_document(body)) == "a | b | b\n1 |  |  | 2\n3\n3"


def test_a_workbook_has_its_visible_sheets_under_their_names() -> None:
    book = openpyxl.Workbook()
    fees = book.active
    fees.title = "Fees"
    for row in (
        ["boat", "fee", "on"],
        ["barge", 4.5, datetime.datetime(2024, 3, 1)],
        [None, None, None],
        ["raft", 0.1 + 0.2, datetime.datetime(2024, 3, 1, 9, 30)],
    ):
        fees.append(row)
    hidden = book.create_sheet("Hidden")
    hidden.append(["secret"])
    hidden.sheet_state = "hidden"
    book.create_sheet("Empty")
    book.create_sheet("Ports").append(["Elm", 17])
    file = io.BytesIO()
    book.save(file)
    assert text_of(".xlsx", file.getvalue()) == (
        "Fees\n\nboat | fee | on\nbarge | 4.5 | 2024-03-01\nraft | 0.3 | 2024-03-01 09:30:00\n\n"
        "Ports\n\nElm | 17"
    )


PAGE = "<html><head><title>The book</title></head><body><h2>{}</h2><p>{}</p></body></html>".format


def test_a_book_is_read_along_its_spine() -> None:
    pages = {"b%20two.xhtml": PAGE("Two", "second"), "a.xhtml": PAGE("One", "first")}
    assert text_of(".epub", epub(pages, ("a.xhtml", "b%20two.xhtml"))) == (
        "One\n\nfirst\n\nTwo\n\nsecond"
    )
    with pytest.raises(DataError, match="is a protected book"):
        text_of(".epub", epub(pages, ("a.xhtml",), locked="a.xhtml"))
    assert text_of(".epub", epub(pages, ("a.xhtml",), locked="font.otf")) == "One\n\nfirst"


ZIPPED = (".docx", ".pptx", ".xlsx", ".odt", ".ods", ".odp", ".epub")
LAUGHS = "<!DOCTYPE x [<!ENTITY a 'ha'><!ENTITY b '&a;&a;&a;&a;'>]><x>&b;</x>"


@pytest.mark.parametrize("suffix", ZIPPED)
def test_damaged_locked_and_foreign_files_are_refused(suffix: str) -> None:
    whole = docx(said("words"))
    for data, why in (
        (b"PK", "is damaged, no zip archive"),
        (whole[:-30], "is damaged, no zip archive"),
        (b"\xd0\xcf\x11\xe0" + bytes(600), "asks for a password, or is of Office before 2007"),
        (zipped({"a.txt": "x"}), "is not of the kind that its name says|is damaged: it has no"),
    ):
        with pytest.raises(DataError, match=why):
            text_of(suffix, data)


@pytest.mark.parametrize("suffix", ZIPPED)
def test_xml_with_entities_is_refused(suffix: str) -> None:
    parts = {
        "_rels/.rels": relations(a="officeDocument x.xml"), "x.xml": LAUGHS,
        "content.xml": LAUGHS, "META-INF/container.xml": LAUGHS,
        "META-INF/manifest.xml": "<m/>",
    }  # fmt: skip
    with pytest.raises(DataError, match="defines entities"):
        text_of(suffix, zipped(parts))


def test_an_archive_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "UNPACKED", 1000)
    with pytest.raises(DataError, match=r"unpacks to [\d,]+ bytes in 5 files, over 1,000"):
        text_of(".docx", docx(said("w" * 1000), footnotes=""))


def test_a_member_with_a_password_is_refused() -> None:
    data = bytearray(docx(said("words")))
    # The first bit of a member's flags, in its directory entry and its own header, says encrypted.
    with zipfile.ZipFile(io.BytesIO(bytes(data))) as archive:
        start = archive.getinfo("word/document.xml").header_offset
    data[start + 6] |= 1
    entry = data.rfind(b"word/document.xml") - 46
    data[entry + 8] |= 1
    with pytest.raises(DataError, match="asks for a password"):
        text_of(".docx", bytes(data))
