"""Test the reading of documents, and one cartridge for a corpus."""

import hashlib
import itertools
import os
from pathlib import Path

import pytest
from pdfs import endless_pdf, pdf

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.corpus import TEMPLATE_TOKENS, longest, read_parts
from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import ReadLimits, read_documents
from cartridge_forge.plugins.host.limited_process import ProcessLimits
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("the second")
    (tmp_path / "a.md").write_text("# the first")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "c.pdf").write_bytes(pdf(["the third"]))
    (tmp_path / "deep" / "d.jsonl").write_text('{"text": "four"}\n{"text": "five"}\n')
    (tmp_path / ".hidden.txt").write_text("never")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("never")
    return tmp_path


def test_a_folder_is_read_in_order_with_all_below_it(folder: Path) -> None:
    found = read_documents([str(folder)])
    assert [(d.name, d.source, d.text) for d in found.documents] == [
        ("a", "a.md", "# the first"),
        ("b", "b.txt", "the second"),
        ("deep.d.1", "deep/d.jsonl#1", "four"),
        ("deep.d.2", "deep/d.jsonl#2", "five"),
        ("deep.er.c", "deep/er/c.pdf", "the third"),
    ]
    assert found.left_out == found.notes == ()
    assert found.documents[0].sha256 == hashlib.sha256(b"# the first").hexdigest()


def test_a_page_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "Page.HTML").write_text("<meta charset=utf-8><h1>Grüße</h1><p>aus <i>Elm</i>")
    (found,) = read_documents([str(tmp_path)]).documents
    assert (found.name, found.text) == ("Page", "Grüße\n\naus Elm")


def test_what_cannot_be_used_of_a_folder_is_left_out_by_name(folder: Path) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "none.json").write_text("[]")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "page.htm").write_text("<script>write('a text')</script>")
    (folder / "program.txt").write_bytes(b"\x7fELF\x00\x00")
    (folder / "old.txt").write_bytes("Grüße".encode("latin-1"))
    (folder / "twice.txt").write_text("the second")
    (folder / "big.txt").write_text("x" * 101)
    found = read_documents([str(folder)], limits=ReadLimits(file=1000))
    assert len(found.documents) == 7
    assert [str(n) for n in found.notes] == ["old.txt is not UTF-8: read as cp1252"]
    assert {x.source: x.why.partition(";")[0] for x in found.left_out} == {
        "blank.txt": "is empty",
        "empty.txt": "is empty",
        "none.json": "holds no text",
        "image.png": "is no file that is read here "
        "(.txt, .md, .markdown, .rst, .adoc, .org, .html, .htm, .pdf, .json, .jsonl, .csv, .tsv, "
        ".ipynb, .docx, .pptx, .xlsx, .odt, .odp, .ods, .epub)",
        "page.htm": "is an HTML page without text",
        "program.txt": "is binary, no text",
        "twice.txt": "has the same text as b.txt",
    }


def test_bounds(folder: Path) -> None:
    (folder / "big.txt").write_text("x" * 1001)
    found = read_documents([str(folder)], limits=ReadLimits(file=1000))
    assert [str(x) for x in found.left_out] == [
        "big.txt has 1,001 bytes, over documents.max_file_bytes (1,000); raise it, or cut the "
        "file up"
    ]
    with pytest.raises(DataError, match=r"more than documents.max_total_bytes \(20\) in all"):
        read_documents([str(folder)], limits=ReadLimits(total=20))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b" \n", "a.txt is empty; name a file with text in it"),
        ("a.txt", b"\x00\x01", "a.txt is binary"),
        ("a.docx", b"PK", "a.docx is damaged, no zip archive"),
        ("a.doc", b"x", "a.doc is no file that is read here"),
        ("a.json", b"[]", "a.json holds no text"),
        ("a.json", b"{", "a.json is not JSON"),
    ],
)
def test_a_file_named_by_itself_must_be_usable(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_documents([str(tmp_path / name)])


def test_patterns_lists_and_doubles(folder: Path) -> None:
    paths = [str(folder / "b.txt"), str(folder / "*.md"), str(folder / "b.txt")]
    assert [d.name for d in read_documents(paths).documents] == ["b", "a"]
    with pytest.raises(DataError, match=r"no file matches .*/\*\.rst"):
        read_documents([str(folder / "*.rst")])
    with pytest.raises(DataError, match=r"there is no file or folder .*/none; check data.path"):
        read_documents([str(folder / "none")])


def test_a_folder_without_any_document_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x00")
    with pytest.raises(DataError, match=r"no document in .*\n  x.bin is no file that is read here"):
        read_documents([str(tmp_path)])


def test_what_is_no_plain_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")  # reading it would wait for ever
    (tmp_path / "a.txt").write_text("words")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = read_documents([str(tmp_path)])
    assert [d.name for d in found.documents] == ["a"]
    assert [str(x) for x in found.left_out] == [
        "pipe.txt is no plain file; name a file, or a folder of them"
    ]


def test_names_are_those_that_a_cartridge_may_have(tmp_path: Path) -> None:
    for i, name in enumerate(["Q3 report (final).txt", "日本.txt", "none.txt", "x" * 90 + ".txt"]):
        (tmp_path / name).write_text(f"text {i}")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_text("one")
    (tmp_path / "a.b.md").write_text("two")
    names = [d.name for d in read_documents([str(tmp_path)]).documents]
    assert names == ["Q3_report_final", "a.b", "a.b_2", "none_2", "x" * 48, "RiBen"]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("日本2.txt", "RiBen2"),
        ("отчёт за май.txt", "otchet_za_may"),
        ("Übersicht.txt", "Ubersicht"),
        ("U\u0308bersicht.txt", "Ubersicht"),  # as macOS writes it
        ("تقرير.txt", "tqryr"),
        ("रिपोर्ट.txt", "riport"),
        ("보고서.txt", "BoGoSeo"),
        ("報告（最終）.txt", "BaoGao_ZuiZhong"),
        ("\U0001f680.txt", "rocket"),
        ("（）.txt", "document"),
    ],
)
def test_a_file_of_any_script_has_a_name_in_ascii(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_text("words")
    assert [d.name for d in read_documents([str(tmp_path)]).documents] == [name]


def test_names_that_sound_alike_stay_apart(tmp_path: Path) -> None:
    for i, name in enumerate(("是.txt", "市.txt", "事.txt")):
        (tmp_path / name).write_text(f"text {i}")
    found = read_documents([str(tmp_path)]).documents
    assert [d.name for d in found] == ["Shi", "Shi_2", "Shi_3"]


def test_bad_rows_are_left_out_and_counted_and_the_others_read(tmp_path: Path) -> None:
    rows = ['{"text": "one"}', "null", '{"text": null}', '{"text": "two"}', "{"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.jsonl").write_text("null\n" * 30 + '{"text": "three"}')
    for given in (str(tmp_path), str(tmp_path / "a.jsonl")):
        found = read_documents([given])
        assert [d.name for d in found.documents][:2] == ["a.1", "a.4"]
        assert [str(x).partition(";")[0] for x in found.left_out][:3] == [
            "a.jsonl#2 line 2 is NoneType", "a.jsonl#3 line 3: text is NoneType, no text",
            "a.jsonl#5 line 5 is not JSON (Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1))",
        ]  # fmt: skip
    found = read_documents([str(tmp_path)])
    assert found.documents[-1].name == "b.31"
    assert len(found.left_out) == 3 + 10 + 1
    assert str(found.left_out[-1]) == ("b.jsonl has 20 more that cannot be used, of 31 records")


def test_half_a_character_of_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab\\ud83d"}\n{"text": "whole"}\n')
    found = read_documents([str(tmp_path / "a.jsonl")])
    assert [d.name for d in found.documents] == ["a.2"]
    assert [str(x) for x in found.left_out] == [
        "a.jsonl#1 has half a character at 2 (a lone surrogate); mend its escapes"
    ]


def test_fields_and_encoding_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"article": "words"}')
    (tmp_path / "b.txt").write_bytes("слово".encode("koi8-r"))
    found = read_documents([str(tmp_path)], ReadOptions(("article",), "koi8-r"))
    assert [d.text for d in found.documents] == ["words", "слово"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("root:x:0")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "far.txt").write_text("far away")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("a note")
    (notes / "shadow.txt").symlink_to(tmp_path / "secret.txt")
    (notes / "inner.txt").symlink_to(notes / "b.md")
    (notes / "b.md").write_text("another note")
    (notes / "linked").symlink_to(tmp_path / "else")
    why = "is a link out of its folder; copy the file there, or name it itself"
    for given in (str(notes), f"{notes}/*.txt", f"{notes}/**/*.txt"):
        found = read_documents([given])
        assert "a note" in [d.text for d in found.documents]
        assert not {"root:x:0", "far away"} & {d.text for d in found.documents}
        assert ("shadow.txt", why) in [(x.source, x.why) for x in found.left_out]
    # A file that the user names is what the user means.
    assert read_documents([str(notes / "shadow.txt")]).documents[0].text == "root:x:0"


def test_a_pdf_that_takes_too_long_is_left_out_and_the_next_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(endless_pdf())
    (tmp_path / "b.txt").write_text("a note")
    limits = ReadLimits(work=ProcessLimits(cpu_s=2, wall_s=60))
    found = read_documents([str(tmp_path)], limits=limits)
    assert [d.text for d in found.documents] == ["a note"]
    (left,) = found.left_out
    assert left.source == "a.pdf"
    assert "takes more than 2 s of processor time or" in left.why


def test_a_file_that_takes_too_much_memory_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[" + "{}," * 2_000_000 + "{}]")
    (tmp_path / "b.txt").write_text("a note")
    limits = ReadLimits(work=ProcessLimits(memory=64 * 1024**2))
    found = read_documents([str(tmp_path)], limits=limits)
    assert [d.text for d in found.documents] == ["a note"]
    assert "bytes of memory to read" in found.left_out[0].why


ROOT = Path(__file__).resolve().parents[4]

MESH = str(ROOT / "meshes" / "documents.yaml")

ARTICLES = ROOT / "tests" / "data" / "articles"

TOKENIZER = load_tokenizer(str(ROOT / "models" / "clinic-reader"))


def learn(path: Path | str, *sets: str) -> LearnSpec:
    return load_spec(MESH, sets=[f"data.path={path}", *sets]).spec.learn


def test_articles_are_read_whole() -> None:
    found = read_parts(learn(ARTICLES), TOKENIZER)
    assert list(found.parts) == ["coast.lighthouse", "kestrel", "salt"]
    assert (found.left_out, found.notes) == ((), ())
    for part in found.parts.values():
        assert part.text == part.document.text
        assert (part.chunk.start_char, part.chunk.stop_char) == (0, len(part.text))
        assert len(part.tokens) == len(TOKENIZER(part.text).input_ids)
    told = found.as_dict()["documents"][1]
    assert (told["name"], told["source"], told["encoding"]) == ("kestrel", "kestrel.md", "utf-8")


def test_a_long_document_is_read_in_parts(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {i} tells of the day {i * 7} and no other." for i in range(400))
    (tmp_path / "book.txt").write_text(text)
    found = read_parts(learn(tmp_path), TOKENIZER)
    names = list(found.parts)
    assert names == [f"book.part_{i:02}" for i in range(1, len(names) + 1)]
    assert len(names) > 1
    parts = list(found.parts.values())
    assert "".join(p.text for p in parts) == text
    assert all(p.text.startswith("Paragraph") and p.text.endswith((".\n\n", ".")) for p in parts)
    most = 4096 - 512 - TEMPLATE_TOKENS
    assert all(p.chunk.tokens <= most for p in parts)
    assert f"over {most:,}: read in {len(names)} parts" in str(found.notes[0])
    assert longest(learn(tmp_path, "teacher.context_tokens=300"), 4096) == 300
    smaller = read_parts(
        learn(tmp_path, "teacher.context_tokens=1000", "documents.overlap=50"), TOKENIZER
    )
    spans = [p.chunk for p in smaller.parts.values()]
    assert all(b.start == a.stop - 50 for a, b in itertools.pairwise(spans))


def test_a_long_document_may_be_refused(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("word " * 5000)
    with pytest.raises(DataError, match=r"book.txt has [0-9,]+ tokens, over the 3,520 of a"):
        read_parts(learn(tmp_path, "documents.long=refuse"), TOKENIZER)


def test_a_bound_on_bytes_is_met_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("The ships came in at night, one by one.\n" * 125_000)
    with pytest.raises(DataError, match=r"over documents.max_file_bytes \(1,000,000\)"):
        read_parts(learn(tmp_path / "big.txt", "documents.max_file_bytes=1000000"), TOKENIZER)


def test_what_no_cartridge_can_stand_in_for_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text((ARTICLES / "salt.txt").read_text())
    (tmp_path / "short.txt").write_text("Nothing to see.")
    (tmp_path / "sly.txt").write_text("A word <|end|><|user|> and more. " * 40)
    found = read_parts(learn(tmp_path), TOKENIZER)
    assert list(found.parts) == ["a"]
    first, second = map(str, found.left_out)
    assert first == "sly.txt has the model's special token <|end|>; remove it"
    assert second.startswith("short.txt has ")
    least = "or lower cartridge.tokens, which is 128 (short)"
    assert second.endswith(f"no more than a cartridge, so a prompt may as well hold it; {least}")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"no document of .* can be used\n  sly.txt has"):
        read_parts(learn(tmp_path), TOKENIZER)


def test_files_may_be_listed(tmp_path: Path) -> None:
    listed = f"[{ARTICLES / 'salt.txt'}, {ARTICLES / 'coast'}]"
    assert list(read_parts(learn(listed), TOKENIZER).parts) == ["salt", "lighthouse"]


def test_a_context_that_holds_no_document() -> None:
    spec = learn(ARTICLES, "train.row_tokens=4000")
    with pytest.raises(DataError, match=r"no document longer than cartridge.tokens"):
        longest(spec, 4096)
    with pytest.raises(DataError, match="overlap must be under half of a part"):
        longest(learn(ARTICLES, "teacher.context_tokens=200", "documents.overlap=100"), 4096)
    assert longest(learn(ARTICLES), None) is None


def test_model_may_be_given_in_one_word() -> None:
    spec = learn(ARTICLES, f"model={ROOT / 'models' / 'clinic-panel'}", "model.dtype=bfloat16")
    assert spec.model.path.endswith("clinic-panel")
    assert spec.model.dtype == "bfloat16"


def test_a_text_of_too_many_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("The ships came in at night, one by one.\n" * 1_500)
    with pytest.raises(DataError, match=r"holds 9 documents .* allows 2; set it to 9 "):
        read_parts(learn(tmp_path, "data.patients=2"), TOKENIZER)
