"""What may be said about a user's documents, and what is refused and why."""

from pathlib import Path

import pytest

from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.loading import load_spec
from cartridge_forge.protocols.spec.mesh import RunSpec

ROOT = Path(__file__).parents[4]
MESH = str(ROOT / "meshes" / "documents.yaml")
CLINIC = str(ROOT / "meshes" / "longhealth.yaml")


def loaded(*sets: str, mesh: str = MESH) -> RunSpec:
    return load_spec(mesh, sets=sets).spec


def test_the_shipped_mesh_has_its_roles_and_reads_back_equal() -> None:
    spec = loaded("data.path=x", 'train.warm_start={"steps": 5}')
    assert [name for name, _ in spec.roles] == ["generator", "doc_teacher", "trainer"]
    assert RunSpec.model_validate(spec.as_dict()) == spec
    assert spec.learn.self_study is not None


def test_paths_start_where_they_were_written() -> None:
    here = Path.cwd()
    spec = loaded(
        "data.path=[notes, /a/b.txt]", "data.questions=q.json", "self_study.rows=r/rows.jsonl"
    ).learn
    assert spec.data.path == f"{here}/notes:/a/b.txt"
    assert spec.data.questions == f"{here}/q.json"
    assert spec.self_study is not None
    assert spec.self_study.rows == f"{here}/r/rows.jsonl"
    one = loaded("data.path=some:thing.json", mesh=CLINIC).learn
    assert one.data.path == f"{here}/some:thing.json"  # LongHealth's is one path


API = '{"provider": "openai", "model": "m"}'


def test_an_api_has_its_providers_usual_places() -> None:
    study = loaded("data.path=x", f"self_study.api={API}").learn.self_study
    assert study is not None
    assert study.api is not None
    assert study.api.base_url == "https://api.openai.com/v1"
    assert study.api.key_env == "OPENAI_API_KEY"


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (("self_study=null",), r"self_study must be given with data.source documents"),
        (("data.source=clinic", "data.path=null", "data.facts=3", "data.notes=1"),
         r"source must be documents or longhealth with self_study"),
        (("data.source=longhealth", "data.questions=q.json"),
         "questions must be left out but with data.source documents"),
        (("self_study.rounds=2",),
         r"rounds must leave room for rollout.max_tokens \(64\) in train.row_tokens \(512\): so "
         "many turns take up to 768 tokens"),
        (("self_study.rounds=0",), "rounds must be >= 1: got 0"),
        (("data.facts=3",), "facts must be left out with data.source documents"),
        (("evaluate.sampled=true",), "must be left out with self_study"),
        (("self_study.question_tokens=450",),
         r"must be <= train.row_tokens \(512\) with rollout.max_tokens \(64\)"),
        (("self_study.max_chunk=100",), r"max_chunk must be >= min_chunk \(512\)"),
        (("self_study.mix={question: 0}",), "must give a kind a weight above 0"),
        (("self_study.mix={quizz: 1}",), "quizz"),
        (("self_study.scores=stored",), r"scores must be read without rows: .* self_study.rows"),
        (("self_study.scores=stored", "self_study.rows=r", "teacher.top_k=full",
          "loss.temperature=2"), r"temperature must be 1 with a top-k teacher"),
        (("documents.encoding=klingon",), "must be an encoding that Python knows"),
        (("objective.w_doc=0",), "warm_start must be left out without objective.w_doc"),
        (('self_study.api={provider: openai, model: m, key_env: "sk-12 34"}',),
         "must be the name of an environment variable"),
        (('self_study.api={provider: openai, model: m, base_url: "https://u:p@h/v1"}',),
         "must hold no user, password or query"),
    ],
)  # fmt: skip
def test_what_is_refused(sets: tuple[str, ...], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        loaded("data.path=x", *sets)


def test_questions_and_self_study_are_about_documents_alone() -> None:
    with pytest.raises(SpecError, match=r"must be left out but with data.source documents"):
        loaded("data.questions=q.json", mesh=CLINIC)
    with pytest.raises(SpecError, match=r"source must be documents or longhealth with self_study"):
        loaded("self_study.questions=4", mesh=CLINIC)
    assert loaded("train.warm_start={steps: 5}", mesh=CLINIC).learn.train.warm_start


def test_longhealth_may_be_studied_and_the_published_setting_is() -> None:
    learn = loaded(mesh=str(ROOT / "meshes" / "longhealth_3b.yaml")).learn
    assert learn.self_study is not None
    assert (learn.data.source, learn.data.held_out, learn.data.patients) == ("longhealth", 1.0, 20)
    assert "<answer>" in learn.data.instruction
    three = learn.self_study.model_copy(update={"rounds": 3})
    assert three.prompt_tokens == 3 * 256 + 2 * 512
    with pytest.raises(SpecError, match=r"must be null but for patients without self_study"):
        loaded("train.offline_texts=2", mesh=str(ROOT / "meshes" / "longhealth_3b.yaml"))
