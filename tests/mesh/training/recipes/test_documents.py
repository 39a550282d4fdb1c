"""The course on a user's documents, over the real tiny model in this process."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from documents.corpus import read_parts
from documents.synthesis import read_rows
from learning.decoding.generate import generate
from learning.model.document_kv import DocumentKVCache
from learning.model.loading import document_kv, load_model, load_tokenizer
from protocols.records.run_files import MeasuredAccuracy
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec
from protocols.types import Completion, GenerateRequest, PrefixRef
from services.clients import Replied
from services.run_directory import RunDirectory
from training.recipes.documents import DocumentsRecipe

ROOT = Path(__file__).resolve().parents[4]

ARTICLES = ROOT / "tests" / "data" / "articles"

READER = str(ROOT / "models" / "clinic-reader")

TOKENIZER, MODEL = load_tokenizer(READER), load_model(READER)

SMALL = (
    "self_study.questions=6", "self_study.min_chunk=60", "self_study.max_chunk=90",
    "self_study.question_tokens=16", "rollout.prompts=4", "rollout.max_tokens=10",
    "evaluate.max_tokens=8", "data.held_out=0.3",
)  # fmt: skip


class House:
    """The course with generators over the model itself; documents' first tokens are cartridges."""

    def __init__(self, folder: Path, *sets: str, path: Path = ARTICLES) -> None:
        self.spec: LearnSpec = load_spec(
            str(ROOT / "meshes" / "documents.yaml"), sets=[f"data.path={path}", *SMALL, *sets]
        ).spec.learn
        self.directory = RunDirectory(folder)
        self.course = DocumentsRecipe(
            self.spec, read_parts(self.spec, TOKENIZER), TOKENIZER, self.directory
        )
        self.requests: list[GenerateRequest] = []
        self._documents = DocumentKVCache(
            partial(document_kv, MODEL), self.course.documents, 1 << 30
        )

    async def generate(
        self, requests: Sequence[GenerateRequest], came: Replied = None, /
    ) -> tuple[list[Completion], float]:
        self.requests += requests
        done = generate(MODEL, requests, self._prefix, self.course.end_ids)
        if came is not None:
            came(done)
        return done, 0.0

    def _prefix(self, ref: PrefixRef) -> Any:
        kind, name = ref.name.split("/")
        kv = self._documents.get(name)
        return kv[:, :, :, : self.spec.cartridge.tokens] if kind == "cartridge" else kv

    def measure(self, prefix: str, most: int | None = None) -> MeasuredAccuracy:
        return asyncio.run(
            self.course.measure(prefix, prefix, 0, most=most, sampled=False, generate=self.generate)
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("run"))


def test_prompts_are_questions_that_are_not_held_out(house: House) -> None:
    house.measure("none")
    rows = {row.key: row for row in read_rows(house.directory.selfstudy)}
    assert len(rows) == 18
    held_out = {e.studied.text for e in house.course._exams}
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
    lesson = asyncio.run(other.course.lesson(rollout, 0))
    assert [s.sample for s in lesson.doc_stored] == list(range(len(lesson.doc)))
    for sample, stored in zip(lesson.doc, lesson.doc_stored, strict=True):
        (row,) = [r for q, r in rows.items() if q in TOKENIZER.decode(sample.prompt_ids)]
        assert (stored.ids, stored.logprobs) == (row.teacher_ids, row.teacher_logprobs)
    on_policy = asyncio.run(other.course.sample(0, 0, other.generate))
    assert asyncio.run(other.course.lesson(on_policy, 0)).doc_stored == ()


def test_a_users_questions_decide_the_accuracy(tmp_path: Path) -> None:
    context = (ARTICLES / "salt.txt").read_text().split("\n\n")[1]
    qas = [{"question": "What did they live on?", "answers": [{"text": "salt"}]}]
    path = tmp_path / "squad.json"
    path.write_text(
        json.dumps({"data": [{"title": "x", "paragraphs": [{"context": context, "qas": qas}]}]})
    )
    measured = House(tmp_path, f"data.questions={path}").measure("document")
    assert measured["n"] == 1
    assert measured["accuracy"] in (0.0, 1.0)
    assert 0.0 <= measured["f1"] <= 1.0
    assert measured["agreement"]["top1"] == 1.0
