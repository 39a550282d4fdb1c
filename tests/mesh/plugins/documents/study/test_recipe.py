"""The course on a user's documents, over the real tiny model in this process."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv
from cartridge_forge.plugins.documents.study.material import read_material
from cartridge_forge.plugins.documents.study.recipe import DocumentsRecipe
from cartridge_forge.plugins.documents.synthesis import read_rows
from cartridge_forge.plugins.evaluate.questions import set_paper
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.records.answers import Answer, KeepAnswers
from cartridge_forge.protocols.records.run_files import MeasuredAccuracy
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef
from cartridge_forge.services.clients import Replied
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.records import rollout_from

ROOT = Path(__file__).resolve().parents[5]

ARTICLES = ROOT / "tests" / "data" / "articles"

READER = str(ROOT / "models" / "clinic-reader")

TOKENIZER, MODEL = load_tokenizer(READER), load_model(READER)

SMALL = (
    "self_study.questions=6", "self_study.min_chunk=60", "self_study.max_chunk=90",
    "self_study.question_tokens=16", "rollout.prompts=4", "rollout.max_tokens=10",
    "evaluate.max_tokens=8", "data.held_out=0.3", "train.warm_start=null", "rollout.temperature=1",
    "self_study.mix={structuring: 1, summarization: 1, question: 1, use_case: 1, creative: 1}",
)  # fmt: skip


class House:
    """The course with generators over the model itself; documents' first tokens are cartridges."""

    def __init__(self, folder: Path, *sets: str, path: Path = ARTICLES) -> None:
        self.spec: LearnSpec = load_spec(
            str(ROOT / "meshes" / "documents.yaml"), sets=[f"data.path={path}", *SMALL, *sets]
        ).spec.learn
        self.directory = RunDirectory(folder)
        self.course = DocumentsRecipe(
            self.spec, *read_material(self.spec, TOKENIZER), TOKENIZER, self.directory
        )
        self.requests: list[GenerateRequest] = []
        self._documents = DocumentKVCache(
            partial(document_kv, MODEL), self.course.documents, 1 << 30
        )

    async def generate(
        self, requests: Sequence[GenerateRequest], came: Replied = None, /
    ) -> list[Completion]:
        self.requests += requests
        done = generate(MODEL, requests, self._prefix, self.course.end_ids)
        if came is not None:
            came(done)
        return done

    def _prefix(self, ref: PrefixRef) -> Any:
        kind, name = ref.name.split("/")
        kv = self._documents.get(name)
        return kv[:, :, :, : self.spec.cartridge.tokens] if kind == "cartridge" else kv

    def measure(
        self, prefix: str, most: int | None = None, keep: KeepAnswers | None = None
    ) -> MeasuredAccuracy:
        return asyncio.run(
            self.course.measure(
                prefix, prefix, 0, most=most, sampled=False, generate=self.generate, keep=keep
            )
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("run"))


def test_prompts_are_questions_that_are_not_held_out(house: House) -> None:
    house.measure("none")
    rows = {row.key: row for row in read_rows(house.directory.selfstudy)}
    assert len(rows) == 18
    held_out = {e.studied.text for e in house.course._exam.questions}
    assert len(held_out) >= 3
    asked: list[str] = []
    for step in range(6):
        rollout = asyncio.run(house.course.sample(step, 5, house.generate))
        assert [p.document for p in rollout.prompts] == [
            ["coast.lighthouse", "kestrel", "salt"][(4 * step + i) % 3] for i in range(4)
        ]
        assert {p.request.prefix.version for p in rollout.prompts} == {5}
        for sample in rollout.samples:
            assert set(sample.versions) == {5}
            text = TOKENIZER.decode(sample.prompt_ids)
            asked.append(text.split("<|user|>")[1].split("<|end|>")[0].strip())
    texts = {row.question for row in rows.values()}
    assert set(asked) <= texts - held_out
    pool = [s for s in house.course._training["salt"]]
    salt = [text for i, text in enumerate(asked) if i % 3 == 2]
    assert sorted(salt[: len(pool)]) == sorted(s.text for s in pool)  # each once a round
    again = asyncio.run(house.course.sample(2, 5, house.generate))
    assert [s.prompt_ids for s in again.samples] == [
        s.prompt_ids for s in asyncio.run(house.course.sample(2, 5, house.generate)).samples
    ]


def with_scores(house: House, path: Path, k: int) -> Path:
    """The house's rows with an answer of two tokens, and k of its teacher's at each."""
    house.measure("none")
    ids, logprobs = tuple(range(5, 5 + k)), tuple(-1.0 - i for i in range(k))
    rows = [
        replace(
            r, answer="x", answer_ids=(9, 2), teacher_ids=(ids, (i, *ids[1:])),
            teacher_logprobs=(logprobs,) * 2,
        )
        for i, r in enumerate(read_rows(house.directory.selfstudy), start=100)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r.as_dict()) + "\n" for r in rows))
    return path


def test_what_b_said_of_its_answers_goes_with_them(tmp_path: Path, house: House) -> None:
    path = with_scores(house, tmp_path / "rows.jsonl", 3)
    rows = {r.question: r for r in read_rows(path)}
    (tmp_path / "run").mkdir()
    other = House(tmp_path / "run", f"self_study.rows={path}", "self_study.scores=stored")
    (rollout,) = asyncio.run(other.course.offline(0, other.generate))
    lesson = asyncio.run(other.course.train_batch(rollout, 0))
    assert [s.sample for s in lesson.doc_stored] == list(range(len(lesson.doc)))
    for sample, stored in zip(lesson.doc, lesson.doc_stored, strict=True):
        (row,) = [r for q, r in rows.items() if q in TOKENIZER.decode(sample.prompt_ids)]
        assert (stored.ids, stored.logprobs) == (row.teacher_ids, row.teacher_logprobs)
    on_policy = asyncio.run(other.course.sample(0, 0, other.generate))
    assert asyncio.run(other.course.train_batch(on_policy, 0)).doc_stored == ()


def test_a_users_questions_decide_the_accuracy(tmp_path: Path) -> None:
    context = (ARTICLES / "salt.txt").read_text().split("\n\n")[1]
    qas = [{"question": "What did they live on?", "answers": [{"text": "salt"}]}]
    path = tmp_path / "squad.json"
    path.write_text(
        json.dumps({"data": [{"title": "x", "paragraphs": [{"context": context, "qas": qas}]}]})
    )
    kept: list[Answer] = []
    measured = House(tmp_path, f"data.questions={path}").measure("document", keep=kept.extend)
    *studied, asked = kept
    assert {a.right for a in studied} == {None}
    assert (asked.right, asked.expected) == (measured["accuracy"], "salt")
    assert asked.nll is not None
    assert asked.nll > 0.0
    assert measured["n"] == 1
    assert measured["accuracy"] in (0.0, 1.0)
    assert 0.0 <= measured["f1"] <= 1.0
    assert measured["agreement"]["top1"] == 1.0


def test_the_teacher_agrees_with_itself_and_others_less(house: House) -> None:
    arms = {prefix: house.measure(prefix) for prefix in ("none", "cartridge", "document")}
    of = {name: arm["agreement"] for name, arm in arms.items()}
    assert of["document"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert of["document"]["top1"] == arms["document"]["accuracy"] == 1.0
    assert of["none"]["kl"] > 0.1
    assert of["cartridge"]["kl"] > 0.1
    assert arms["none"]["accuracy"] == of["none"]["top1"] < 1.0
    assert of["none"]["tokens"] == of["document"]["tokens"] <= 8 * arms["none"]["n"]
    assert house.measure("none", most=1)["n"] == 1


def test_losses_of_the_teachers_answers_differ_by_the_divergence(house: House) -> None:
    """Mean over questions of NLL without the document minus NLL with it is the KL of the arm."""
    kept: dict[str, list[Answer]] = {"none": [], "document": []}
    arms = {p: house.measure(p, keep=found.extend) for p, found in kept.items()}
    pairs = list(zip(kept["none"], kept["document"], strict=True))
    assert all(a.id == b.id and a.question_hash == b.question_hash for a, b in pairs)
    gap = sum((a.nll or 0.0) - (b.nll or 0.0) for a, b in pairs) / len(pairs)
    assert gap == pytest.approx(arms["none"]["agreement"]["kl"], rel=1e-4)


def test_a_teachers_answers_are_those_it_samples(house: House) -> None:
    house.measure("none")
    told = {r.id: r for r in house.requests if r.id.startswith("teacher/")}
    exam = house.course._exam.questions[0]
    request = told[f"teacher/{exam.studied.key}"]
    assert request.sampling.temperature == 1.0
    assert request.prefix == PrefixRef(f"document/{exam.studied.document}", 0)
    (again,) = asyncio.run(house.generate([request]))
    assert again.token_ids == exam.answer_ids
    assert again.logprobs == pytest.approx(exam.logprobs, abs=1e-4)


def test_offline_text_is_the_teachers(house: House) -> None:
    (rollout,) = asyncio.run(house.course.offline(1, house.generate))
    assert rollout.step == 1
    assert {p.request.prefix.name.split("/")[0] for p in rollout.prompts} == {"document"}
    assert all(v == -1 for s in rollout.samples for v in s.versions)
    assert house.course.repeated(rollout) == set()  # written anew in each step
    on_policy = asyncio.run(house.course.sample(1, 0, house.generate))
    assert [s.prompt_ids for s in rollout.samples] == [s.prompt_ids for s in on_policy.samples]


def test_rows_that_were_written_before_are_asked_and_their_answers_trained_on(
    tmp_path: Path, house: House
) -> None:
    house.measure("none")
    rows = read_rows(house.directory.selfstudy)
    answer = " antibiotic drug"
    ids = (*TOKENIZER(answer, add_special_tokens=False).input_ids, TOKENIZER.eos_token_id)
    written = [replace(r, answer=answer, answer_ids=(9, 9)) for r in rows]
    written = [replace(r, model="another") if r.document == "salt" else r for r in written]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r.as_dict()) + "\n" for r in written))
    (tmp_path / "run").mkdir()
    other = House(tmp_path / "run", f"self_study.rows={path}")
    (rollout,) = asyncio.run(other.course.offline(0, other.generate))
    assert not other.requests  # nothing is generated
    # 160 steps of 4 draw each of three documents' few rows again and again; 2 steps do not.
    assert other.course.repeated(rollout) == {s.id for s in rollout.samples}
    once = House(
        tmp_path / "run", f"self_study.rows={path}", "train.steps=2", "train.warmup_steps=1"
    )
    (first,) = asyncio.run(once.course.offline(0, once.generate))
    assert once.course.repeated(first) == set()
    whole = House(tmp_path / "run", f"self_study.rows={path}", "teacher.top_k=full")
    (first,) = asyncio.run(whole.course.offline(0, whole.generate))
    assert whole.course.repeated(first) == set()
    for sample in rollout.samples:
        assert sample.response_ids == (ids if sample.cartridge == "salt" else (9, 9))
    assert not other.directory.selfstudy.exists()
    (tmp_path / "salt.txt").write_text("quite another text " * 300)
    (tmp_path / "other").mkdir()
    elsewhere = House(tmp_path / "other", f"self_study.rows={path}", path=tmp_path / "salt.txt")
    with pytest.raises(DataError, match="which is none of the run's documents"):
        elsewhere.measure("none")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "another"}, "12 of 12 rows to train on have no answer with log-probabilities"),
        ({"teacher_ids": ((-1, -1), (-1, -1))}, "12 of 12 rows"),
        ({"teacher_ids": (), "teacher_logprobs": ()}, "12 of 12 rows"),
    ],
)
def test_rows_that_say_nothing_of_this_models_tokens_are_refused(
    tmp_path: Path, house: House, change: dict[str, Any], told: str
) -> None:
    path = with_scores(house, tmp_path / "rows.jsonl", 2)
    rows = [replace(r, **change) for r in read_rows(path)]
    path.write_text("".join(json.dumps(r.as_dict()) + "\n" for r in rows))
    (tmp_path / "run").mkdir()
    other = House(tmp_path / "run", f"self_study.rows={path}", "self_study.scores=stored")
    with pytest.raises(DataError, match=told):
        other.measure("none")


def test_rows_with_special_tokens_are_refused_and_counted(tmp_path: Path, house: House) -> None:
    path = with_scores(house, tmp_path / "rows.jsonl", 2)
    first, second, *others = read_rows(path)
    odd = [replace(first, question="who? <|end|>"), replace(second, answer="<|user|>x"), *others]
    path.write_text("".join(json.dumps(r.as_dict()) + "\n" for r in odd))
    (tmp_path / "run").mkdir()
    other = House(tmp_path / "run", f"self_study.rows={path}")
    with pytest.raises(DataError, match=r"2 rows of .*rows.jsonl have one of the model's special"):
        other.measure("none")


def test_rows_of_several_top_k_are_refused(tmp_path: Path, house: House) -> None:
    path = with_scores(house, tmp_path / "rows.jsonl", 2)
    more = with_scores(house, tmp_path / "more.jsonl", 3)
    path.write_text(
        "".join(path.read_text().splitlines(True)[::2] + more.read_text().splitlines(True)[1::2])
    )
    (tmp_path / "run").mkdir()
    other = House(tmp_path / "run", f"self_study.rows={path}", "self_study.scores=stored")
    with pytest.raises(DataError, match=r"rows keep \[2, 3\] log-probabilities a token"):
        other.measure("none")


def test_documents_that_changed_end_a_resumed_run(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text((ARTICLES / "salt.txt").read_text())
    House(tmp_path, path=folder)
    House(tmp_path, path=folder)  # the same ones are read again
    (folder / "a.txt").write_text((ARTICLES / "kestrel.md").read_text())
    with pytest.raises(CheckpointError, match="the documents changed since the run began"):
        House(tmp_path, path=folder)


def test_each_reply_is_handed_over_as_the_lesson_has_it(house: House) -> None:
    told: list[Any] = []

    def ended(role: str, samples: Sequence[Any]) -> None:
        assert role == "doc_teacher"
        told.extend(samples)

    rollout = asyncio.run(house.course.sample(3, 5, house.generate, ended))
    lesson = asyncio.run(house.course.train_batch(rollout, 5))
    assert told == list(lesson.doc) != []


def test_parts_survive_a_checkpoint(house: House) -> None:
    sampled = asyncio.run(house.course.sample(3, 5, house.generate))
    names = [s.id for s in sampled.samples]
    rollout = replace(sampled, parts=((names[0], names[2]), (names[1],)))
    assert rollout_from(json.loads(json.dumps(asdict(rollout)))) == rollout


def test_questions_of_the_user_that_self_study_asks_end_the_run_before_training(
    house: House, tmp_path: Path
) -> None:
    house.measure("none")
    (trained, *_) = house.course._training["salt"]
    qas = [{"id": "leak", "question": trained.text, "answers": [{"text": "salt"}]}]
    asked = {"data": [{"title": "salt", "paragraphs": [{"context": "", "qas": qas}]}]}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    sets = (
        f"data.questions={tmp_path / 'asked.json'}",
        f"self_study.rows={house.directory.selfstudy}",
    )
    for rule, name in ((None, "strict"), ("warn", "told")):
        (tmp_path / name).mkdir()
        leaking = House(
            tmp_path / name, *sets, *([f"evaluate.contamination={rule}"] if rule else [])
        )
        if rule is None:
            with pytest.raises(DataError, match=r"self-study: salt/.* of data\.questions: leak"):
                asyncio.run(leaking.course.sample(0, 0, leaking.generate))
            assert leaking.requests == []
        else:
            assert leaking.measure("none", most=1)["n"] == 1
        (row,) = map(json.loads, leaking.directory.contamination.read_text().splitlines())
        assert (row["kind"], row["training"]["text"]) == ("exact", trained.text)
    assert not house.directory.contamination.exists()


def test_a_conversation_is_trained_measured_and_evaluated_with_all_its_turns(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, "self_study.rounds=2", "self_study.answer_tokens=40")
    house.measure("none")
    rows = {row.key: row for row in read_rows(house.directory.selfstudy)}
    exams = house.course._exam.questions
    assert any(len(e.studied.messages) == 3 for e in exams)
    for exam in exams:
        assert exam.studied.messages == rows[exam.studied.key].messages
        text = TOKENIZER.decode(exam.studied.prompt_ids)
        assert text.count("<|user|>") == 1 + len(rows[exam.studied.key].history)
        assert len(exam.studied.prompt_ids) == len(exam.bare_ids)
    suite = set_paper(EvalSpec(probes=0), house.spec, house.directory, TOKENIZER, None)
    assert {i.asked.id: i.prompt_ids for i in suite.items} == {
        e.studied.key: e.studied.prompt_ids for e in exams
    }
    assert not suite.user_file
    rollout = asyncio.run(house.course.sample(0, 0, house.generate))
    asked = {
        house.course._conversation.opening(row.document, row.messages) for row in rows.values()
    }
    assert {s.prompt_ids for s in rollout.samples} <= asked
