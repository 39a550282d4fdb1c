"""A user's documents in tokens: long ones split or refused, useless ones left out by name."""

from pathlib import Path

import pytest

from documents.corpus import read_parts
from learning.model.loading import load_tokenizer
from protocols.errors import DataError
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec

ROOT = Path(__file__).resolve().parents[3]

MESH = str(ROOT / "meshes" / "documents.yaml")

TOKENIZER = load_tokenizer(str(ROOT / "models" / "clinic-reader"))


def learn(path: Path | str, *sets: str) -> LearnSpec:
    return load_spec(MESH, sets=[f"data.path={path}", *sets]).spec.learn


def test_five_megabytes_are_refused_by_their_parts(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("The ships came in at night, one by one.\n" * 125_000)
    with pytest.raises(DataError, match=r"holds \d+ documents .*data.patients allows 32"):
        read_parts(learn(tmp_path), TOKENIZER)
