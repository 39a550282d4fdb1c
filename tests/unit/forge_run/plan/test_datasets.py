"""What a plan says of rows and rewards, and what is refused before a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cartridge_forge.forge_run.plan.datasets import require_dataset, row_notes, sections
from cartridge_forge.plugins.statistics.formatting import render
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.loading import load_spec

ROOT = Path(__file__).resolve().parents[4]


def spec(*sets: str) -> LearnSpec:
    mesh = ROOT / "examples" / "gsm8k_like" / "mesh.yaml"
    path = ROOT / "tests" / "data" / "sums.jsonl"
    return load_spec(str(mesh), sets=(f"data.path={path}", *sets)).spec.learn


def test_a_plan_counts_rows_and_names_rewards() -> None:
    learn, found = sections(spec())
    told = render(found, terminal=False)
    assert learn.data.patients == 1
    for line in (
        "answers     12 rows have one",
        "documents   1, of 12 rows",
        "columns     answer, document, page, prompt, question, target",
        "rewards:correct in ",
        "10 s, 2,048 MiB",
    ):
        assert line in told


def test_other_data_has_no_such_section() -> None:
    learn = load_spec(str(ROOT / "meshes" / "longhealth.yaml")).spec.learn
    assert sections(learn) == (learn, [])


def test_rows_without_documents_train_nothing_without_rewards() -> None:
    learn = spec(
        "episodes=null", "reward=[]", "objective.w_rl=0", "objective.w_doc=1",
        "data.rows.columns={prompt: question, answer: target}",
    )  # fmt: skip
    with pytest.raises(DataError, match=r"sums.jsonl:\d+: has no document \(12 rows have none\)"):
        require_dataset(learn)


def test_rows_longer_than_an_episodes_context_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sets = (
        f"data.path={file}", "data.rows.columns={prompt: question, answer: target}",
        f"model.path={ROOT / 'models' / 'clinic-reader'}",
    )  # fmt: skip

    def notes(questions: list[str]) -> list[str]:
        lines = (json.dumps({"question": text, "target": "1"}) for text in questions)
        file.write_text("\n".join(lines))
        return row_notes(spec(*sets))

    asked = [f"What is {n} and 1?" for n in range(30)]
    long = [f"{text} {'again and ' * 400}" for text in asked]
    told = " ".join(notes([*long[:3], *asked[3:]]))
    assert (
        "rows have prompts over episodes.max_context (96 tokens), the longest rows.jsonl:" in told
    )
    assert sum(map(int, re.findall(r"(\d+) of \d+ (?:training|held-out) rows", told))) == 3
    assert "their episodes end at once as context_full" in told
    _, found = sections(spec(*sets))
    assert "prompts of rows" in [one.title for one in found]
    assert notes(asked) == []
    with pytest.raises(DataError, match=r"none is left; raise episodes\.max_context"):
        notes(long)
