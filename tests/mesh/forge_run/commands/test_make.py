"""`forge make` from a folder to an answer: plan, run, library, `forge ask` with --beside;
and mistakes, answered before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import ROOT

from cartridge_forge.forge_run.cli import forge

pytestmark = [pytest.mark.timeout(900)]

READER = ROOT / "models" / "clinic-reader"
SMALL = (
    "self_study.questions=6", "self_study.min_chunk=100", "self_study.max_chunk=300",
    "self_study.question_tokens=40", "rollout.prompts=6", "rollout.max_tokens=12",
    "train.steps=2", "train.warmup_steps=0", "train.checkpoint_every=1", "train.row_tokens=256",
    "evaluate.questions=2", "evaluate.max_tokens=8", "spares=0",
)  # fmt: skip


def test_a_folder_becomes_a_cartridge_that_answers(tmp_path: Path) -> None:
    texts = tmp_path / "tales"
    texts.mkdir()
    article = (ROOT / "tests" / "data" / "articles" / "salt.txt").read_text()
    (texts / "salt.txt").write_text(article)
    serve = (ROOT / "meshes" / "serve.yaml").read_text()
    serve = serve.replace("../library", str(tmp_path / "library"))
    (tmp_path / "serve.yaml").write_text(serve.replace("../models", str(ROOT / "models")))

    def forge(*words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
        return subprocess.run(
            [sys.executable, "-c", code, *words, "--serve", str(tmp_path / "serve.yaml")],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip

    sets = [word for one in SMALL for word in ("--set", one)]
    first = forge("make", str(texts), "--model", str(READER), "--tokens", "24", "--now")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == "tales@1: 24 tokens"
    assert "cartridge 1 of 1, salt: in closed form, without training" in first.stderr
    assert "usable now" in first.stderr
    at_once = forge("ask", "tales", "what is salt?", "--max-tokens", "6")
    assert at_once.returncode == 0, at_once.stderr
    made = forge("make", str(texts), "--model", str(READER), "--tokens", "24", *sets)
    assert made.returncode == 0, made.stderr
    assert "tales@2: 24 tokens\n" in made.stdout, "in closed form, and trained from there"
    assert "one cartridge of 24 tokens" in made.stderr
    assert "a usable cartridge exists: forge ask DOCUMENT QUESTION --run" in made.stderr
    assert "tales@3: 24 tokens" in made.stdout
    asked = forge("ask", "tales", "what is salt?", "--max-tokens", "6", "--beside", "--json")
    assert asked.returncode == 0, asked.stderr
    arms = {one["arm"]: one for one in json.loads(asked.stdout)}
    assert list(arms) == ["none", "cartridge", "document"]
    assert [arms[a]["prefix_tokens"] for a in ("none", "cartridge")] == [0, 24]
    assert arms["document"]["prefix_tokens"] > 100
    alone = forge("ask", "tales", "what is salt?", "--max-tokens", "6")
    assert alone.stdout.strip() == arms["cartridge"]["answer"].strip()
    (texts / "salt.txt").write_text(article + " And more.")
    changed = forge("ask", "tales", "what is salt?", "--beside")
    assert (changed.returncode, "have changed since" in changed.stderr) == (2, True)


def test_mistakes_are_told_with_their_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The harbour keeps nine boats.")
    for words, said in (
        (["missing"], "there is no file or folder"),
        (["empty"], "no document in"),
        (["texts"], "no model 'smollm2-135m'"),
        (["texts"], "add it with forge models add smollm2-135m"),
        (["texts", "--minutes", "0"], "--minutes must be > 0 and --ratio > 1: got 0 and None"),
        (["texts", "--ratio", "1"], "got 20 and 1.0"),
        (["texts", "--now", "--dry-run"], "--now trains nothing"),
        (["texts", "--name", "my book"], "'my book' is no cartridge's name"),
    ):
        assert forge(["make", str(tmp_path / words[0]), *words[1:]]) == 2
        assert said in capsys.readouterr().err


def test_a_mistake_is_answered_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from cartridge_forge.forge_run.cli import forge; "
        "forge(['make', sys.argv[1]]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
