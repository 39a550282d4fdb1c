"""A user's documents in tokens: long ones split or refused, useless ones left out by name."""

import itertools
from pathlib import Path

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.corpus import TEMPLATE_TOKENS, longest, read_parts
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.loading import load_spec

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
