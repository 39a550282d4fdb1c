"""The plan of a run on a user's documents: its numbers by hand, and what it refuses."""

from pathlib import Path

import pytest

from forge_run.plan import plan
from forge_run.plan_documents import require_documents
from protocols.errors import DataError
from protocols.spec_loading import load_spec

ROOT = Path(__file__).parents[2]
ARTICLES = ROOT / "tests" / "documents" / "articles"


def planned(*sets: str) -> dict[str, dict[str, tuple[str, ...]]]:
    loaded = load_spec(str(ROOT / "meshes" / "documents.yaml"), sets=sets)
    return {s.title: {row[0]: row[1:] for row in s.rows} for s in plan(loaded.spec, loaded.place)}


def test_tokens_passages_and_costs_are_shown() -> None:
    api = "{provider: openai, model: m, prices: {input: 1.0, output: 4.0}}"
    found = planned(
        f"data.path={ARTICLES}", "self_study.questions=10", "self_study.min_chunk=100",
        "self_study.max_chunk=100", f"self_study.api={api}", "self_study.answer_tokens=200",
        'train.warm_start={"steps": 7, "plateau": 3}',
    )  # fmt: skip
    documents = found["3 documents, 2,248 tokens, a cartridge each"]
    assert documents["kestrel"][:3] == ("kestrel.md", "785", "0 to 1,566")
    assert documents["coast.lighthouse"][0] == "coast/lighthouse.txt"
    assert documents["salt"][-1] == "10 of 100 to 100"
    study = {name: text for name, (text,) in found["self-study"].items()}
    assert study["turns"].startswith("10 a document, 30 in all: structuring, ")
    assert study["A"] == "reads about 5,700 tokens, writes at most 3,840"  # 30 * (100 + 90)
    assert study["B"].endswith("reads about 6,840 tokens, writes at most 6,000")
    # (5,700 + 6,840) * $1 + (3,840 + 6,000) * $4 = $0.0519 a million
    assert study["written by"] == "m (openai) for `forge selfstudy`: at most $0.05"
    assert found["memory"]["cartridge"][0].endswith("for each of 3")
    assert found["memory"]["document"][0].startswith("about 749 tokens")
    assert found["budget"]["steps"] == (
        "60, on policy, after 7 of them on the teacher's text, sooner on a plateau of 3",
    )
    assert "cannot run here yet" not in found


def test_without_documents_the_plan_says_so() -> None:
    (why,) = planned()["cannot run here yet"]
    assert "there are no documents" in why
    assert "add --set data.path=FOLDER" in why


def test_a_model_that_is_not_at_hand_leaves_an_estimate(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "a.txt").write_text("word " * 80)
    found = planned(f"data.path={tmp_path / 'a.txt'}", f"model={model}")
    assert found["1 documents"]["tokens"][0].startswith("about 100: the model's tokenizer is not")


def test_what_is_odd_is_said_before_a_run_starts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text((ARTICLES / "salt.txt").read_text())
    (tmp_path / "empty.txt").write_text("")
    mesh = str(ROOT / "meshes" / "documents.yaml")
    spec = load_spec(mesh, sets=[f"data.path={tmp_path}"]).spec.learn
    assert require_documents(spec) == ["left out: empty.txt is empty"]
    asked = load_spec(mesh, sets=[f"data.path={tmp_path}", "data.questions=none.json"]).spec.learn
    with pytest.raises(DataError, match=r"cannot read .*none.json: No such file"):
        require_documents(asked)


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    reader = ROOT / "models" / "clinic-reader"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((reader / name).read_bytes())
    with pytest.raises(DataError, match="has no chat template"):
        planned(f"data.path={ARTICLES}", f"model={tmp_path}")
