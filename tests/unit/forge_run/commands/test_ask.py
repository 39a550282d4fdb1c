"""Test the arguments of `forge ask` and `forge frontier`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.forge_run.commands.ask import marked, verdict_text
from cartridge_forge.forge_run.commands.frontier import command
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.protocols.errors import SpecError

ANSWER = " the surgeon is kingsley."


def token(text: str, instead: str, refused: bool) -> dict[str, Any]:
    return {
        "offset": ANSWER.find(text), "token": text, "document_token": instead, "refused": refused,
    }  # fmt: skip


def test_tokens_that_the_document_would_have_changed_are_marked() -> None:
    changed = [token(" surgeon", " doctor", False), token(" kingsley", " novak", True)]
    assert marked(ANSWER, changed, colours=False) == (
        " the [surgeon ?-> doctor] is [kingsley -> novak]."
    )
    assert marked(ANSWER, changed, colours=True) == (
        " the\x1b[33m surgeon\x1b[0m is\x1b[31m kingsley\x1b[0m."
    )
    ended = {**token(".", "", True), "token": "<end>", "offset": len(ANSWER)}
    assert marked(ANSWER, [ended], colours=True) == ANSWER  # an end token is no text
    assert marked(ANSWER, [token(".", "", True)], colours=False).endswith("kingsley[. -> the end]")


def test_a_verdict_is_one_sentence() -> None:
    choice = {"tokens": 20, "accepted": 0.9, "agreed": 0.85}
    assert verdict_text({"mode": "after", "below": 0.05, "choices": [choice]}) == (
        "the document accepts 90% of 20 tokens (probability 0.05 or more); 85% are its own "
        "likeliest"
    )
    draft = {"proposed": 16, "accepted": 11, "verifications": 4}
    assert verdict_text({"mode": "exact", "draft": draft}) == (
        "the document's own answer: of 16 tokens that the cartridge proposed it accepted 11, in 4 "
        "passes"
    )
    assert "without a draft" in verdict_text({"mode": "document"})
    empty = {"mode": "after", "below": 0.05, "choices": [{"tokens": 0}]}
    assert verdict_text(empty) == "there is no token that the document could accept"


MESHES = Path(__file__).parents[4] / "meshes"


def run_of(mesh: str, path: Path) -> Path:
    spec = load_spec(str(MESHES / mesh)).spec
    (path / "spec.yaml").write_text(dump_yaml(spec.as_dict()))
    return path


@pytest.mark.parametrize(
    ("mesh", "questions", "why"),
    [("three_channels.yaml", None, "has no option questions"), ("longhealth.yaml", 0, "got 0")],
)
def test_refusals(mesh: str, questions: int | None, why: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=why):
        command(run_of(mesh, tmp_path), arms=None, questions=questions, show=lambda line: None)
