"""A run on a file of LongHealth's schema: the model asks its own questions, in two rounds."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, command, latest, rows, run_to_end

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.documents.study.material import read_material
from cartridge_forge.plugins.documents.study.recipe import DocumentsRecipe
from cartridge_forge.plugins.documents.synthesis import read_rows
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.services.run_directory import RunDirectory

STEPS, PROMPTS = 3, 6
STUDY = {
    "questions": 6, "rounds": 2, "min_chunk": 24, "max_chunk": 60, "question_tokens": 24,
    "answer_tokens": 40,
}  # fmt: skip
TOKENIZER = load_tokenizer(str(ROOT / "models" / "clinic-reader"))


@pytest.fixture(scope="module")
def chart_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "benchmark.json"
    path.write_text(json.dumps(generate_clinic(3, 2, 12, 3)))
    return path


@pytest.fixture(scope="module")
def run(chart_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    sets: dict[str, Any] = {
        "data.source": "longhealth", "data.path": str(chart_file), "data.facts": None,
        "data.notes": None, "data.held_out": 0.5, "self_study": STUDY, "train.steps": STEPS,
        "rollout.prompts": PROMPTS, "rollout.max_tokens": 16, "evaluate.sampled": False,
        "evaluate.arms": ["document", "on_policy"], "evaluate.probe_every": 0,
    }  # fmt: skip
    done = run_to_end(command(home, **sets))
    assert done.returncode == 0, done.stderr
    return latest(home)


def held_out(chart_file: Path) -> set[tuple[str, str]]:
    """(patient, question) whose digest begins below 8, a half of all."""
    found = set()
    for patient, record in json.loads(chart_file.read_text()).items():
        for q in record["questions"]:
            digest = hashlib.sha256(f"{patient}\n{q['question']}".encode()).hexdigest()
            if digest[0] < "8":
                found.add((patient, q["question"]))
    return found


def test_rows_are_conversations_about_the_charts(run: Path) -> None:
    studied = read_rows(run / "selfstudy.jsonl")
    assert [r.key for r in studied] == [
        f"patient_0{p}/0000{i}" for i in range(6) for p in (1, 2)
    ]  # fmt: skip
    assert {r.kind for r in studied} == {
        "structuring", "summarization", "question", "use_case", "creative",
    }  # fmt: skip
    longer = [r for r in studied if r.kept and r.history]
    assert len(longer) >= 6  # the others end where the reader said nothing usable
    for row in longer:
        assert [m.role for m in row.messages] == ["user", "assistant", "user"]
        assert all(m.content.strip() for m in row.messages)
        assert row.answer_ids == ()  # the last answer is the student's


def test_prompts_are_the_rows_conversations_and_answers_the_students(run: Path) -> None:
    charts = json.loads((run / "documents.json").read_text())["documents"]
    assert [c["name"] for c in charts] == ["patient_01", "patient_02"]
    talk = ChatRenderer(TOKENIZER, {"patient_01": "x", "patient_02": "x"})
    asked = {
        talk.opening(row.document, row.messages)
        for row in read_rows(run / "selfstudy.jsonl")
        if row.kept
    }
    sampled = rows(run / "rollouts.jsonl")
    assert len(sampled) == STEPS * PROMPTS
    assert {tuple(r["prompt_ids"]) for r in sampled} <= asked
    for r in sampled:  # strict: the version that the step trains, on every token
        assert set(r["versions"]) == {r["step"] - 1}
    conversations = [talk.texts_of(r["prompt_ids"]) for r in sampled]
    assert {len(texts) for texts in conversations} >= {3}


def test_held_out_questions_are_asked_by_the_evaluation_alone(run: Path, chart_file: Path) -> None:
    kept = rows(run / "answers.jsonl")
    out = held_out(chart_file)
    for arm in ("document", "on_policy"):
        found = {(a["document"], a["fact"]) for a in kept if a["arm"] == arm}
        assert found <= out
        assert len(found) == min(8, len(out))
    words = {question.rstrip("?") for _, question in out}
    for row in read_rows(run / "selfstudy.jsonl"):
        said = " ".join(m.content for m in row.messages)
        assert not [w for w in words if w in said]
    for r in rows(run / "rollouts.jsonl"):
        assert not [w for w in words if w in TOKENIZER.decode(r["prompt_ids"])]
    results = json.loads((run / "results.json").read_text())
    assert results["status"] == "finished"
    assert "agreement" not in results["arms"]["document"]
    assert not (run / "contamination.jsonl").exists()


async def nothing(requests: Sequence[GenerateRequest], replied: Any = None, /) -> list[Completion]:
    raise AssertionError("a run that is refused samples nothing")


@pytest.mark.parametrize(
    ("where", "form", "kind"),
    [("question", 0, "exact"), ("history", 0, "exact"), ("question", 1, "exact"),
     ("answer", 1, "exact"), ("reworded", 0, "near")],
)  # fmt: skip
def test_rows_with_a_held_out_question_end_a_run_before_it_trains(
    run: Path, chart_file: Path, tmp_path: Path, where: str, form: int, kind: str
) -> None:
    study = read_rows(run / "selfstudy.jsonl")
    path = tmp_path / "rows.jsonl"
    sets = [
        "data.source=longhealth", f"data.path={chart_file}", "data.patients=2", "data.facts=null",
        "data.notes=null", "data.held_out=0.5", "evaluate.sampled=false", "evaluate.alike=0.6",
        f"self_study={json.dumps({**STUDY, 'rows': str(path)})}",
    ]  # fmt: skip
    spec = load_spec(str(ROOT / "meshes" / "longhealth.yaml"), sets=sets).spec.learn
    parts, asked = read_material(spec, TOKENIZER)
    leak = asked[0].forms[form]
    victim = next(i for i, r in enumerate(study) if r.kept and r.document == asked[0].document)
    study[victim] = leaking(study[victim], where, leak)
    path.write_text("".join(json.dumps(row.as_dict()) + "\n" for row in study))
    recipe = DocumentsRecipe(spec, parts, asked, TOKENIZER, RunDirectory(tmp_path))
    with pytest.raises(DataError, match=r"double evaluation questions") as error:
        asyncio.run(recipe.sample(0, 0, nothing))
    assert f"data.path: {asked[0].id}" in str(error.value)
    found = [json.loads(x) for x in (tmp_path / "contamination.jsonl").read_text().splitlines()]
    assert (found[0]["kind"], found[0]["training"]["document"]) == (kind, asked[0].document)


def leaking(row: StudyRow, where: str, words: str) -> StudyRow:
    if where == "history":
        return replace(row, history=((words.upper(), "I do not know"),))
    if where == "answer":
        return replace(row, history=(("What may I ask?", words),))
    return replace(row, question=f"{words} now" if where == "reworded" else words)
