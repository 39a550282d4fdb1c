"""meshes/documents.yaml from the command line, cut down, over a folder with odd files in it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from pdfs import pdf
from small_run import ROOT, run_to_end

from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS

ARTICLES = ROOT / "tests" / "data" / "articles"


SMALL: dict[str, Any] = {
    "self_study.questions": 6,
    "self_study.mix": dict.fromkeys(SEED_KINDS, 1),
    "self_study.min_chunk": 100,
    "self_study.max_chunk": 300,
    "self_study.question_tokens": 40,
    "rollout.prompts": 21,
    "rollout.max_tokens": 16,
    "train.steps": 10,
    "cartridge.init": "first_tokens",  # ten steps at this rate leave the matched start
    "train.lr": 0.3,  # the tiny model's keys and values are large
    "train.lr_scale": "absolute",
    "train.warmup_steps": 1,
    "train.row_tokens": 256,
    "train.checkpoint_every": 2,
    "train.warm_start": {"steps": 3},
    "evaluate.questions": 12,
    "evaluate.probe_every": 0,
    "evaluate.max_tokens": 12,
    "roles.generator.replicas": 1,
    "roles.doc_teacher.threads": 1,
    "roles.trainer.threads": 1,
    "spares": 0,
}


def command(root: Path, folder: Path, *extra: str) -> list[str]:
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    mesh = str(ROOT / "meshes" / "documents.yaml")
    words = [sys.executable, "-c", code, mesh, "--run-dir", str(root), *extra]
    for key, value in {"data.path": str(folder), **SMALL}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def directory(root: Path) -> Path:
    return (root / "documents" / "latest").resolve()


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three articles, and what a user's folder has beside: a book, a PDF, an old encoding, and what
    nobody can read."""
    home = tmp_path_factory.mktemp("docs") / "folder"
    shutil.copytree(ARTICLES, home)
    story = (ARTICLES / "salt.txt").read_text()
    (home / "book.md").write_text("\n\n".join(f"Chapter {i}.\n\n{story}" for i in range(6)))
    (home / "old.txt").write_bytes(story.replace("salt", "Käse").encode("cp1252"))
    (home / "printed.pdf").write_bytes(pdf([f"Page {i} of the tale of salt. " * 9 for i in (1, 2)]))
    (home / "empty.txt").write_bytes(b"")
    (home / "program.txt").write_bytes(b"\x7fELF\x00\x01\x02" * 50)
    (home / "torn.jsonl").write_text('{"text": "whole"}\n{"text": "to')
    return home


@pytest.fixture(scope="module")
def over_documents(tmp_path_factory: pytest.TempPathFactory, odd_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("calm")
    process = run_to_end(command(root, odd_folder))
    assert process.returncode == 0, process.stdout + process.stderr
    for told in ("empty.txt is empty", "program.txt is binary", "torn.jsonl#2 line 2 is not JSON",
                 "old.txt is not UTF-8: read as cp1252", "book.md has"):  # fmt: skip
        assert told in process.stderr
    return directory(root)
