"""What bytes say: encodings, PDF, JSON, JSON lines, and every refusal's words."""

import json
import re
from html import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdfs import pdf

from cartridge_forge.plugins.documents.formats import (
    ReadOptions,
    decode,
    read_html,
    read_json,
    read_jsonl,
    read_notebook,
    read_pdf,
    read_table,
    read_text,
)
from cartridge_forge.plugins.documents.readers.html_text import html_text
from cartridge_forge.protocols.errors import DataError

WORDS = "Größe: 3 µm, naïve café \U0001f600\n"


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (WORDS.encode(), "utf-8"),
        (b"\xef\xbb\xbf" + WORDS.encode(), "utf-8-sig"),
        (b"\xff\xfe" + WORDS.encode("utf-16-le"), "utf-16"),
        (b"\xfe\xff" + WORDS.encode("utf-16-be"), "utf-16"),
        (b"\xff\xfe\x00\x00" + WORDS.encode("utf-32-le"), "utf-32"),
    ],
)
def test_a_byte_order_mark_decides_and_utf_8_needs_none(data: bytes, encoding: str) -> None:
    assert decode(data, None) == (WORDS, encoding)


def test_another_encoding_is_tried_only_where_utf_8_fails() -> None:
    assert decode("Größe".encode("latin-1"), "cp1252") == ("Größe", "cp1252")
    assert decode("Größe".encode(), "cp1252") == ("Größe", "utf-8")
    with pytest.raises(DataError, match="is not utf-8: byte 0xf6 at 2; convert it to UTF-8"):
        decode("Größe".encode("latin-1"), None)
    with pytest.raises(DataError, match="is not cp1252: byte 0x81 at 0"):
        decode(b"\x81\xff", "cp1252")


def test_utf_16_without_a_mark_is_read_when_it_is_named() -> None:
    data = "plain words".encode("utf-16-le")
    assert decode(data, "utf-16-le") == ("plain words", "utf-16-le")
    with pytest.raises(DataError, match="is binary"):
        decode(data, "cp1252")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_every_text_in_every_marked_encoding_is_read_again(text: str) -> None:
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        data = text.encode(encoding)
        if encoding == "utf-8" and text[0] == "\ufeff":
            continue  # it is a mark there
        assert decode(data, None)[0] == text


def test_line_ends_are_one_kind() -> None:
    assert decode(b"a\r\nb\rc\n", None)[0] == "a\nb\nc\n"


@pytest.mark.parametrize("data", [b"\x7fELF\x00\x01", b"\x89PNG\r\n\x1a\n\x00\x00", b"ab\x00cd"])
def test_binary_files_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="is binary, no text; convert it"):
        read_text(data, ReadOptions())


def test_a_few_control_codes_are_text() -> None:
    assert decode(b"\x1b[31m" + b"x" * 200, None)[0] == "\x1b[31m" + "x" * 200


PAGE = """<!DOCTYPE html><html><head><title>Tides &amp; ports</title>
<style>p { color: red }</style><script>if (a < b) { show("<p>no</p>") }</script></head><body>
<nav><ul><li>Home</li></ul></nav>
<h1>The harbour
of Elm</h1><p>It was dug in <b>17</b>04.<br>  By hand&nbsp;&mdash; so they say.
<p>Fees:<table><tr><th>boat</th><th>fee</th></tr><tr><td></td><td>none</td></tr>
<tr><td>barge</td> <td><i>4</i> marks</td></tr></table>
<ul><li>one</li><li>two<ul><li>three</ul></ul><pre>
  for x:
    y</pre>after<form><select><option>red</select><button>Send</button></form>
<!-- <p>gone</p> --><noscript>Turn it on</noscript><svg><text>art</text></svg> end
</body></html>"""
SHOWN = """The harbour of Elm

It was dug in 1704.
By hand\u00a0\u2014 so they say.

Fees:

boat | fee
 | none
barge | 4 marks

one
two

three

  for x:
    y

after end"""


def test_a_page_is_what_a_browser_shows() -> None:
    (text,) = read_html(PAGE.encode(), ReadOptions())
    assert (text.text, text.encoding) == (SHOWN, "utf-8")


def test_a_page_without_a_first_heading_begins_with_its_title() -> None:
    page = b"<title> Tides\n&amp; ports</title><h2>Spring</h2>High water."
    assert read_html(page, ReadOptions())[0].text == "Tides & ports\n\nSpring\n\nHigh water."


@pytest.mark.parametrize(
    ("page", "text", "encoding"),
    [
        ("<p>naïve", "naïve", "utf-8"),
        ("<meta charset=iso-8859-2><p>Łódź", "Łódź", "iso8859-2"),
        ("<meta http-equiv=x content='text/html; charset=Shift_JIS'><p>港", "港", "shift_jis"),
        ("<meta charset=utf-8><p>naïve", "naïve", "cp1252"),  # it names another than it has
        ("<meta charset=utf-16le><p>naïve", "naïve", "cp1252"),
        ("<meta charset='ISO-8859-1'><p>\u201cso\u201d", "\u201cso\u201d", "cp1252"),
        ("<meta charset=klingon><p>naïve", "naïve", "cp1252"),
        ("<meta charset=rot13><p>naïve", "naïve", "cp1252"),
    ],
)
def test_the_encoding_of_a_page(page: str, text: str, encoding: str) -> None:
    (found,) = read_html(page.encode(encoding), ReadOptions())
    assert (found.text, found.encoding) == (text, encoding)


def test_pages_that_cannot_be_read() -> None:
    with pytest.raises(DataError, match="is an HTML page without text"):
        read_html(b"<body><div id=app></div><script src=app.js></script>", ReadOptions())
    with pytest.raises(DataError, match="binary"):
        read_html(b"<p>\0\xff\xfe", ReadOptions())


@given(st.lists(st.text(alphabet="ab<>&;'\" \t\n\u00a0é-", max_size=12), max_size=5))
def test_paragraphs_come_out_as_they_went_in(texts: list[str]) -> None:
    """Apart from blanks that follow each other, and empty paragraphs."""
    page = "".join(f"<p>{escape(text)}</p>" for text in texts)
    shown = (re.sub("[ \t\n]+", " ", text).strip(" ") for text in texts)
    assert html_text(page) == "\n\n".join(text for text in shown if text)


def test_a_hidden_table_or_heading_leaves_nothing() -> None:
    page = "<title>Fees</title><p>a<nav><h1>Menu</h1><table><tr><td>1<td>2</table></nav>b"
    assert html_text(page) == "Fees\n\nab"


def test_a_pdf_is_read_page_by_page() -> None:
    (text,) = read_pdf(pdf(["The first page.", "The second."]), ReadOptions())
    assert (text.text, text.encoding) == ("The first page.\n\nThe second.", "pdf")


def test_pdfs_that_cannot_be_read() -> None:
    with pytest.raises(DataError, match="without a text layer; run character recognition"):
        read_pdf(pdf([""]), ReadOptions())
    with pytest.raises(DataError, match="is no readable PDF"):
        read_pdf(b"%PDF-1.4\nnothing more", ReadOptions())
    with pytest.raises(DataError, match="is no readable PDF"):
        read_pdf(pdf(["words"])[:120], ReadOptions())


def test_json_of_every_shape() -> None:
    one = {"title": "t", "content": "words"}
    assert [t.text for t in read_json(json.dumps(one).encode(), ReadOptions())] == ["words"]
    several = [{"text": "a", "body": "not this"}, "b"]
    found = read_json(json.dumps(several).encode(), ReadOptions())
    assert [(t.text, t.record) for t in found] == [("a", 1), ("b", 2)]
    assert read_json(b"[]", ReadOptions()) == []


def test_json_lines() -> None:
    data = b'{"text": "a\\u2028b"}\n\n"c"\r\n{"wiki": "d"}\n'
    found = read_jsonl(data, ReadOptions(text_fields=("text", "wiki")))
    assert [(t.text, t.record) for t in found] == [("a\u2028b", 1), ("c", 3), ("d", 4)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"titel": "b"}\nnull\n', "line 1 has none of the fields text, content, body, "
         "but titel; name the field that holds its text by documents.text_fields"),
        (b'\n{"tex', "line 2 is not JSON"),
        (b'{"text": ["a"]}\n', "line 1: text is list, no text"),
        (b"17\n", "line 1 is int; expected an object with a text field"),
    ],
)  # fmt: skip
def test_json_lines_that_cannot_be_read(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_jsonl(data, ReadOptions())


def test_json_nested_without_end_is_refused() -> None:
    with pytest.raises(DataError, match="is not JSON"):
        read_json(b"[" * 100_000, ReadOptions())


@pytest.mark.parametrize(
    ("values", "table"),
    [
        ('a,b\n1,"x, y"\n2,"two\nlines"\n', "a | b\n1 | x, y\n2 | two lines"),
        ("a;b\n1,5;2\n3,5;4\n", "a | b\n1,5 | 2\n3,5 | 4"),
        ("a\tb\n1\t2\n", "a | b\n1 | 2"),
        ("a|b\n1|2\n", "a | b\n1 | 2"),
        ("name,text\nx,\n,y\n\n,,\n", "name | text\nx\n | y"),
        ('a, b\n"x", "y, z"\n', "a | b\nx | y, z"),
        ("sep=;\nname;price\nx;1,5\n", "name | price\nx | 1,5"),
        ("one\ntwo\n", "one\ntwo"),
        ("", ""),
    ],
)
def test_values_are_read_as_a_table(values: str, table: str) -> None:
    assert [t.text for t in read_table(values.encode(), ReadOptions())] == [table]


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ("<tr><td>a</td><td></td><td>c</td></tr><tr><td>d</td></tr>", "a |  | c\nd"),
        ("<tr><td><p>a</p></td><td><p>b</p></td></tr><tr><td>c</td></tr>", "a | b\nc"),
        ("<tr><td><p>a</p><p>b</p></td><td>c</td></tr>", "a\n\nb\n\nc"),
        ("<tr><td>a<td>b<tr><td>c<td>", "a | b\nc"),
    ],
)
def test_rows_of_a_page_keep_their_columns(rows: str, shown: str) -> None:
    page = f"<p>before</p><table>{rows}</table><p>after</p>"
    (found,) = read_html(page.encode(), ReadOptions())
    assert found.text == f"before\n\n{shown}\n\nafter"


def test_a_long_value_is_read() -> None:
    (found,) = read_table(f'a,"{"x" * 200_000}"'.encode(), ReadOptions())
    assert len(found.text) == 200_004


def test_a_notebook_is_read_with_the_text_of_its_results() -> None:
    outputs = [
        {"output_type": "execute_result", "data": {"text/plain": ["2\n"], "image/png": "aaaa"}},
        {"output_type": "stream", "text": ["\x1b[31mred\x1b[0m\n"]},
        {
            "output_type": "display_data",
            "data": {"text/plain": ["<Markdown object>"], "text/markdown": ["**so**"]},
        },
        {"output_type": "error", "traceback": ["boo"]},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": "1 + 1", "outputs": outputs},
    ]
    shown = "# Title\nwords\n\n1 + 1\n\n2\n\nred\n\n**so**"
    (found,) = read_notebook(json.dumps({"cells": cells, "nbformat": 4}).encode(), ReadOptions())
    assert found.text == shown
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": "x = 1", "outputs": []}]}]}
    assert read_notebook(json.dumps(old).encode(), ReadOptions())[0].text == "x = 1"
    for bad in ("[]", "{}", '{"cells": [1]}', "no"):
        with pytest.raises(DataError, match=r"is no Jupyter notebook|is not JSON"):
            read_notebook(bad.encode(), ReadOptions())


def test_a_bad_record_alone_has_a_fault() -> None:
    data = b'{"text": "a"}\nnull\n{"text": 3}\n{"tex\n"\xff"\n{"text": "\xc3\xa9"}\n\n{"text": "z"}'
    found = read_jsonl(data, ReadOptions(encoding=None))
    assert [(t.record, t.text) for t in found if not t.fault] == [(1, "a"), (6, "é"), (8, "z")]
    assert [t.fault.partition(";")[0][:28] for t in found if t.fault] == [
        "line 2 is NoneType", "line 3: text is int, no text", "line 4 is not JSON (Untermin",
        "line 5 is not utf-8: byte 0x",
    ]  # fmt: skip
    assert [t.encoding for t in read_jsonl(data, ReadOptions()) if t.record in (1, 5)] == [
        "utf-8", "cp1252",
    ]  # fmt: skip
    items = read_json(b'["a", null, {"text": "b"}]', ReadOptions())
    assert [(t.record, t.text) for t in items if not t.fault] == [(1, "a"), (3, "b")]
    marked = '{"text": "é"}\nnull'.encode("utf-16")
    assert [t.text for t in read_jsonl(marked, ReadOptions()) if not t.fault] == ["é"]
