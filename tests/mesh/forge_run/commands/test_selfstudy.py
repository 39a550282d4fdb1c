"""`forge selfstudy`: rows by the model itself, and by an external one over its official client."""

import json
from pathlib import Path

import pytest

from cartridge_forge.forge_run.commands.selfstudy import command
from cartridge_forge.plugins.documents.synthesis import read_rows
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.spec import PriceSpec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec

ROOT = Path(__file__).parents[4]
SALT = ROOT / "tests" / "data" / "articles" / "salt.txt"
MESH = str(ROOT / "meshes" / "documents.yaml")
SMALL = (
    f"data.path={SALT}", "self_study.questions=4", "self_study.min_chunk=40",
    "self_study.max_chunk=60", "self_study.question_tokens=12", "self_study.answer_tokens=24",
    "self_study.top_k=3",
    "self_study.mix={question: 1, summarization: 1, recite: 0, continue: 0, cloze: 0}",
)  # fmt: skip


def test_the_model_itself_writes_rows_with_its_likeliest_tokens(tmp_path: Path) -> None:
    spec = load_spec(MESH, sets=SMALL).spec
    said: list[str] = []
    lines = command(spec, tmp_path / "out", said.append)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [row.key for row in rows] == [f"salt/{i:05}" for i in range(4)]
    answered = [row for row in rows if row.answer_ids]
    assert answered
    for row in answered:
        assert len(row.answer_ids) == len(row.teacher_ids) == row.answer_tokens
        # B is greedy: what it says is likeliest, and its log-probability that of the likeliest.
        assert [at[0] for at in row.teacher_ids] == list(row.answer_ids)
        assert [at[0] for at in row.teacher_logprobs] == pytest.approx(row.answer_logprobs)
        assert {len(at) for at in row.teacher_ids} == {3}
    told = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (told["rows"], told["model"]) == (4, rows[0].model)
    assert told["documents"]["documents"][0]["sha256"] == rows[0].sha256
    assert lines[-1].endswith("rows.jsonl")
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    command(spec, tmp_path / "out", said.append)
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before


def test_an_external_model_writes_them_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KEY", "local-key-1234")
    count = iter(range(10**6))

    def rule(asked: ProviderRequest) -> str:
        number = next(count)
        return f"number {number} of {number * 7} and {number * 13}"

    prices = {"tiny": PriceSpec(input=1.0, output=2.0)}
    with FakeProvider(rule, prices, key="local-key-1234") as provider:
        api = {
            "provider": "openai", "model": "tiny", "key_env": "LOCAL_KEY",
            "base_url": provider.openai_url,
        }  # fmt: skip
        spec = load_spec(MESH, sets=[*SMALL, f"self_study.api={json.dumps(api)}"]).spec
        command(spec, tmp_path / "out", lambda line: None)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert {row.model for row in rows} == {"openai:tiny"}
    assert all(row.kept and row.asker == "model" for row in rows)
    assert all(row.answer.startswith("number ") and row.answer_ids == () for row in rows)
    assert "local-key" not in (tmp_path / "out" / "rows.jsonl").read_text()


def test_a_mesh_on_other_data_has_no_self_study(tmp_path: Path) -> None:
    spec = load_spec(str(ROOT / "meshes" / "longhealth.yaml")).spec
    with pytest.raises(SpecError, match="mesh longhealth has no self_study"):
        command(spec, tmp_path, lambda line: None)
