"""Test self-study: its spec, prompts, turns and rows."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.documents.corpus import CorpusDocument, tokenised
from cartridge_forge.plugins.documents.drafts import SynthesisPlan
from cartridge_forge.plugins.documents.reading import UserDocument
from cartridge_forge.plugins.documents.seed_prompts import (
    NEXT_SEEDS,
    PLAIN,
    SEEDS,
    asking,
    asking_on,
    plain_next_turn,
    plain_turn,
)
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS, SelfStudySpec
from cartridge_forge.plugins.documents.synthesis import (
    BATCH,
    items,
    model_name,
    read_rows,
    write_study,
)
from cartridge_forge.plugins.documents.synthesis_rows import (
    StudyRow,
    counts,
    from_dict,
    write_parquet,
)
from cartridge_forge.plugins.documents.text_turns import (
    BLANK,
    answers_in,
    question_fault,
    question_prompt,
    quizzed,
    text_turn,
)
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.strategies.samplers.sampler import Ability, SampleRequest, SampleResult
from cartridge_forge.protocols.errors import DataError, SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec

ROOT = Path(__file__).resolve().parents[4]
READER = str(ROOT / "models" / "clinic-reader")
STUDY = SelfStudySpec(questions=24, min_chunk=40, max_chunk=80, question_tokens=30, top_k=2)


class Scribe:
    """Says something else to every ask; `fails_at` is the call at which it dies."""

    abilities: frozenset[Ability] = frozenset({"top_logprobs"})

    def __init__(self, fails_at: int = 10**9) -> None:
        self.asks: list[SampleRequest] = []
        self._calls, self._fails_at = 0, fails_at

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        self._calls += 1
        if self._calls == self._fails_at:
            raise TimeoutError
        self.asks += asks
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: SampleRequest) -> SampleResult:
        number = int(ask.id.split("/")[1])
        text, reason = f"What about number {number} of {ask.id}, {ask.seed % 1000}?", "stop"
        if ask.id.endswith("question"):
            if number == 1:
                text = "too few"
            if number == 2:
                text = ask.messages[0].content.split("\n\n---")[0]  # echoes its passage
            if number == 3:
                reason = "length"
            if number == 4:
                text = "one and the same question of all documents"
        elif number == 5:
            text = ""
        top = (((" a", -0.1), (" b", -2.5)),) * 2 if ask.top_logprobs else ()
        return SampleResult(text, 2, 9, reason, "", (7, 8), (-0.1, -0.1), top, ((7, 9),) * len(top))


@pytest.fixture(scope="module")
def parts() -> list[CorpusDocument]:
    tokenizer = load_tokenizer(READER)
    found = []
    for name in ("kestrel.md", "salt.txt"):
        text = (ROOT / "tests" / "data" / "articles" / name).read_text()
        document = UserDocument(Path(name).stem, name, text, f"hash of {name}", "utf-8")
        tokens = tokenised(tokenizer, text)
        found.append(
            CorpusDocument(
                document.name, document.name, document, tokens.chunk(0, len(tokens)), text, tokens
            )
        )
    return found


def plan(**changes: object) -> SynthesisPlan:
    study = STUDY.model_copy(update=changes)
    return SynthesisPlan(study, "model@1", seed=3, answers=True)


def write(
    path: Path, parts: list[CorpusDocument], scribe: Scribe, how: SynthesisPlan
) -> list[StudyRow]:
    return asyncio.run(write_study(path, parts, how, scribe))


def timeless(rows: Sequence[StudyRow]) -> list[StudyRow]:
    return [replace(row, time="") for row in rows]


def test_every_row_has_its_provenance(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    path, scribe = tmp_path / "rows.jsonl", Scribe()
    rows = write(path, parts, scribe, plan())
    assert read_rows(path) == rows
    assert [row.key for row in rows[:4]] == ["kestrel/00000", "salt/00000", "kestrel/00001",
                                             "salt/00001"]  # fmt: skip
    assert len(rows) == 48
    for row in rows:
        part = next(p for p in parts if p.name == row.document)
        start, stop = row.chars
        passage = part.text[start:stop]
        assert row.tokens[1] - row.tokens[0] <= 80
        assert row.sha256 == part.document.sha256
        asked = next(a for a in scribe.asks if a.id == f"{row.key}/question")
        assert asked.messages[0].content.startswith(passage.strip())
        assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.6, 30)
        assert asked.seed == row.question_seed
        if row.kept:
            told = next(a for a in scribe.asks if a.id == f"{row.key}/answer")
            assert [m.content for m in told.messages] == [passage, row.question]
            assert (told.sampling.temperature, told.top_logprobs) == (0.0, 2)
            assert (row.answer_ids, row.teacher_ids) == ((7, 8), ((7, 9), (7, 9)))
            assert row.teacher_logprobs == ((-0.1, -2.5), (-0.1, -2.5))
    first = rows[0]
    assert (first.kind, first.asker, first.model, first.generator.split()[0]) == (
        "structuring", "model", "model@1", "cartridge-forge",
    )  # fmt: skip
    assert first.config == plan().config != plan(alike=0.7).config


def test_what_cannot_be_used_is_told_by_its_reason(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    rows = write(tmp_path / "a.jsonl", parts, Scribe(), plan())
    told = {row.key: (row.asker, row.tried, row.refused) for row in rows}
    for name in ("kestrel", "salt"):
        assert told[f"{name}/00001"] == ("plain", ("too_short",), "")
        assert told[f"{name}/00002"] == ("plain", ("echo",), "")
        assert told[f"{name}/00003"] == ("plain", ("no_end",), "")
        assert told[f"{name}/00005"] == ("model", (), "answer: empty")
    assert told["kestrel/00004"] == ("model", (), "")
    assert told["salt/00004"] == ("plain", ("double",), "")
    assert counts(rows) == {
        "rows": 48, "kept": 46, "plain": 7, "refused: answer: empty": 2, "tried: double": 1,
        "tried: echo": 2, "tried: no_end": 2, "tried: too_short": 2,
    }  # fmt: skip


def test_without_plain_turns_a_row_is_refused(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    rows = write(tmp_path / "a.jsonl", parts, Scribe(), plan(plain=False))
    assert [r.refused for r in rows if r.document == "salt"][:5] == [
        "", "too_short", "echo", "no_end", "double",
    ]  # fmt: skip


@pytest.mark.parametrize("torn", [False, True])
def test_what_was_begun_is_gone_on_with(
    tmp_path: Path, parts: list[CorpusDocument], torn: bool
) -> None:
    whole = write(tmp_path / "whole.jsonl", parts, Scribe(), plan())
    path = tmp_path / "rows.jsonl"
    with pytest.raises(TimeoutError):
        write(path, parts, Scribe(fails_at=4), plan())  # in the answers of the second batch
    assert len(read_rows(path)) == BATCH
    if torn:
        path.write_text(path.read_text() + '{"schema": 1, "key": "kest')
    scribe = Scribe()
    rows = write(path, parts, scribe, plan())
    assert timeless(rows) == timeless(whole) == timeless(read_rows(path))
    done = {item.key for item in items(parts, STUDY)[:BATCH]}
    assert not done & {ask.id.rpartition("/")[0] for ask in scribe.asks}
    scribe = Scribe()
    assert write(path, parts, scribe, plan()) == rows
    assert not scribe.asks


def test_rows_of_another_plan_are_not_gone_on_with(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, parts, Scribe(), plan())
    for other in (plan(min_chunk=41), replace(plan(), seed=4), replace(plan(), model="b")):
        with pytest.raises(DataError, match="rows of other documents or of another configuration"):
            write(path, parts, Scribe(), other)
    changed = replace(parts[0], document=replace(parts[0].document, sha256="else"))
    with pytest.raises(DataError, match="from kestrel/00000 on"):
        write(path, [changed, parts[1]], Scribe(), plan())


def test_rows_are_checked_when_they_are_read(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    rows = write(tmp_path / "a.jsonl", parts, Scribe(), plan())
    good = json.loads(json.dumps(rows[0].as_dict()))
    assert from_dict(good, "x") == rows[0]
    with pytest.raises(DataError, match="x:3 is no self-study row of schema 1"):
        from_dict({**good, "schema": 2}, "x:3")
    with pytest.raises(DataError, match=r"is no self-study row of schema 1 \(unknown: colour\)"):
        from_dict({**good, "colour": "red"}, "x")
    with pytest.raises(DataError, match=r"is no whole self-study row: .*'key'"):
        from_dict({k: v for k, v in good.items() if k != "key"}, "x")


def test_parquet_has_what_the_rows_have(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = write(tmp_path / "a.jsonl", parts, Scribe(), plan())
    write_parquet(rows, tmp_path / "rows.parquet")
    found = parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert len(found) == len(rows)
    assert found[0]["teacher_ids"] == [[7, 9], [7, 9]]
    assert found[0]["question"] == rows[0].question
    assert json.loads(found[0]["question_sampling"]) == {"temperature": 0.6, "max_tokens": 30}


def test_a_model_has_the_same_name_wherever_it_lies() -> None:
    name = model_name(READER)
    assert name.startswith("clinic-reader@")
    assert len(name) == len("clinic-reader@") + 12
    assert name != model_name(READER.replace("reader", "panel"))
    assert model_name("meta-llama/Llama-3.2-3B") == "meta-llama/Llama-3.2-3B"


class Talker:
    """Names the request in every text; `says` has other texts and finish reasons by request."""

    abilities: frozenset[Ability] = frozenset({"top_logprobs"})

    def __init__(self, says: Mapping[str, tuple[str, str]] | None = None) -> None:
        self.asks: dict[str, SampleRequest] = {}
        self._says = says or {}

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        assert asks
        self.asks |= {ask.id: ask for ask in asks}
        found = [self._says.get(ask.id, (f"Text of {ask.id} so far.", "stop")) for ask in asks]
        return [
            SampleResult(text, 2, 9, reason, "", (7, 8), (-0.1, -0.1)) for text, reason in found
        ]


def talk(
    path: Path, parts: list[CorpusDocument], talker: Talker, *, answers: bool, **changes: object
) -> list[StudyRow]:
    how = replace(plan(questions=2, **changes), answers=answers)
    return asyncio.run(write_study(path, parts, how, talker))


def test_a_conversation_goes_on_from_its_answers(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    talker = Talker()
    rows = talk(tmp_path / "rows.jsonl", parts[:1], talker, answers=True, rounds=3)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    row, key = rows[0], "kestrel/00000"
    assert row.history == (
        (f"Text of {key}/question so far.", f"Text of {key}/answer so far."),
        (f"Text of {key}/question/2 so far.", f"Text of {key}/answer/2 so far."),
    )
    assert (row.question, row.answer) == (
        f"Text of {key}/question/3 so far.", f"Text of {key}/answer/3 so far.",
    )  # fmt: skip
    said = [m.content for m in row.messages]
    assert said == [*row.history[0], *row.history[1], row.question]
    assert [m.role for m in row.messages] == ["user", "assistant", "user", "assistant", "user"]
    last = talker.asks[f"{key}/answer/3"]
    assert [m.role for m in last.messages] == ["system", *(m.role for m in row.messages)]
    assert [m.content for m in last.messages[1:]] == said
    asked = talker.asks[f"{key}/question/2"].messages[0].content
    start, stop = row.chars
    assert asked.startswith(parts[0].text[start:stop].strip())
    assert f"User: {said[0]}\n\nAssistant: {said[1]}" in asked
    seeds = [ask.seed for ask in talker.asks.values()]
    assert len(set(seeds)) == len(seeds) == 2 * 6  # two rows of three turns and three answers
    assert (row.question_seed, row.answer_seed) == (
        talker.asks[f"{key}/question/3"].seed, last.seed,
    )  # fmt: skip
    assert counts(rows) == {"rows": 2, "kept": 2, "plain": 0, "kept with 3 rounds": 2}


def test_one_round_asks_as_before(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    talker = Talker()
    rows = talk(tmp_path / "rows.jsonl", parts[:1], talker, answers=False, rounds=1)
    assert [row.history for row in rows] == [(), ()]
    assert sorted(talker.asks) == ["kestrel/00000/question", "kestrel/00001/question"]


def test_a_run_leaves_the_last_answer_to_the_student(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    talker = Talker()
    rows = talk(tmp_path / "rows.jsonl", parts[:1], talker, answers=False, rounds=2)
    assert {name.partition("/0000")[2][2:] for name in talker.asks} == {
        "question", "answer", "question/2",
    }  # fmt: skip
    assert [(len(row.history), row.answer, row.answer_ids) for row in rows] == [(1, "", ())] * 2


def test_what_cannot_go_on_ends_before(tmp_path: Path, parts: list[CorpusDocument]) -> None:
    says = {
        "kestrel/00000/answer": ("Birds and more bi", "length"),
        "kestrel/00001/question/2": ("too few", "stop"),
    }
    ended, plain = talk(tmp_path / "a.jsonl", parts[:1], Talker(says), answers=False, rounds=2)
    assert (ended.history, ended.question, ended.tried, ended.refused) == (
        (), "Text of kestrel/00000/question so far.", ("answer: no_end",), "",
    )  # fmt: skip
    assert (len(plain.history), plain.asker, plain.tried) == (1, "plain", ("too_short",))
    assert '"Text of kestrel/00001/' in plain.question  # of B's answer
    _, alone = talk(
        tmp_path / "b.jsonl", parts[:1], Talker(says), answers=True, rounds=2, plain=False
    )
    assert (alone.history, alone.tried, alone.asker) == ((), ("too_short",), "model")
    assert alone.answer == "Text of kestrel/00001/answer so far."


def test_an_interrupted_file_of_conversations_is_gone_on_with(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    how = plan(rounds=2)
    whole = write(tmp_path / "whole.jsonl", parts, Scribe(), how)
    assert {len(row.history) for row in whole} == {0, 1}
    path = tmp_path / "rows.jsonl"
    with pytest.raises(TimeoutError):
        write(path, parts, Scribe(fails_at=7), how)  # four calls a batch: in the second one
    assert len(read_rows(path)) == BATCH
    assert timeless(write(path, parts, Scribe(), how)) == timeless(whole)


def test_a_passage_from_the_middle_begins_with_what_it_is_about(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    talker, named = Talker(), replace(parts[0], about="kestrels, by A. Name")
    rows = talk(tmp_path / "rows.jsonl", [named], talker, answers=True, min_chunk=20, max_chunk=30)
    for row in rows:
        start, stop = row.chars
        passage = named.text[start:stop]
        assert start > 0
        read = f"kestrels, by A. Name\n{passage}"
        assert talker.asks[f"{row.key}/question"].messages[0].content.startswith(read.strip())
        assert talker.asks[f"{row.key}/answer"].messages[0].content == read


def test_the_documents_own_words_answer_without_a_model(
    tmp_path: Path, parts: list[CorpusDocument]
) -> None:
    """Weights 2 to 1 to 1: of eight rows of a document four recite, and A is asked for two."""
    mix = {"recite": 2.0, "cloze": 1.0, "quiz": 1.0}
    scribe = Scribe()
    rows = write(tmp_path / "rows.jsonl", parts[:1], scribe, plan(questions=8, mix=mix))
    assert [row.kind for row in rows] == ["recite", "cloze", "quiz", "recite"] * 2
    text = parts[0].text
    for row in rows:
        start, stop = row.chars
        assert row.answer in text[start:stop]
        assert (row.asker, row.answer_ids) == ("model" if row.kind == "quiz" else "plain", ())
        tokens = parts[0].tokens.chunk(*row.tokens)
        assert text[start:stop] in parts[0].tokens.text_of(tokens)
    asked = [ask.id for ask in scribe.asks]
    assert asked == ["kestrel/00002/question", "kestrel/00006/question"]
    assert [m.role for m in scribe.asks[0].messages] == ["user", "assistant"] * 4 + ["user"]
    assert len({row.question for row in rows}) == 8


def test_equal_weights_take_turns() -> None:
    study = SelfStudySpec()
    seeds = ["structuring", "summarization", "question", "use_case", "creative"]
    assert study.kinds(7) == [*seeds, *seeds[:2]]


PASSAGE = "Salt was made here. The road is still called the Grey Lane.\nIt climbs to Tollard."


def test_there_are_five_kinds_and_no_two_seeds_are_alike() -> None:
    assert set(SEEDS) == set(PLAIN) == set(SEED_KINDS)
    seeds = [seed for kind in SEEDS.values() for seed in kind]
    assert len(set(seeds)) == len(seeds) == 10


@pytest.mark.parametrize("kind", SEED_KINDS)
def test_a_sees_the_passage_and_a_seed_of_its_kind(kind: str) -> None:
    told = asking(PASSAGE, kind, random.Random("seeds"))
    assert told.startswith(PASSAGE)
    assert any(seed in told for seed in SEEDS[kind])
    assert told == asking(PASSAGE, kind, random.Random("seeds"))


@pytest.mark.parametrize("kind", SEED_KINDS)
def test_a_plain_turn_quotes_the_passage(kind: str) -> None:
    for seed in range(20):
        cue = plain_turn(PASSAGE, kind, random.Random(seed)).split('"')[1]
        assert cue
        assert cue in PASSAGE
    assert plain_turn("...", kind, random.Random(0))


def test_a_sees_the_conversation_and_takes_up_its_last_answer() -> None:
    history = (("Who made salt?", "Monks did."), ("Where?", "At Tollard."))
    told = asking_on(PASSAGE, history, random.Random("seeds"))
    passage, said, seed = told.split("\n\n---\n\n")
    assert passage == PASSAGE
    assert said == (
        "User: Who made salt?\n\nAssistant: Monks did.\n\nUser: Where?\n\nAssistant: At Tollard."
    )
    assert any(seed.startswith(one) for one in NEXT_SEEDS)
    drawn = {asking_on(PASSAGE, history, random.Random(i)) for i in range(40)}
    assert len(drawn) == len(NEXT_SEEDS) == 3


def test_a_plain_next_turn_quotes_the_answer() -> None:
    for seed in range(20):
        cue = plain_next_turn("Monks did. They sold it.", random.Random(seed)).split('"')[1]
        assert cue in ("Monks did.", "They sold it.")


ARTICLES = Path(__file__).resolve().parents[3] / "data" / "articles"
SENTENCE = "In 1874 the Harrow Salt Company sold 42% of its pans because of the railway."


@pytest.fixture(scope="module")
def text() -> str:
    return (ARTICLES / "kestrel.md").read_text()


@pytest.mark.parametrize("number", range(30))
def test_cue_and_answer_are_neighbours_in_the_text(text: str, number: int) -> None:
    recited = text_turn("recite", text, random.Random(number))
    assert recited is not None
    start, stop = recited.chars
    passage = text[start:stop]
    cue = passage[: -len(recited.answer)].strip()
    assert passage.endswith(recited.answer)
    assert cue in recited.turn
    assert 6 <= len(cue.split()) <= 14
    assert 16 <= len(recited.answer.split()) <= 40

    ended = text_turn("continue", text, random.Random(number))
    assert ended is not None
    sentence = text[slice(*ended.chars)]
    assert sentence.endswith(ended.answer)
    assert sentence[: -len(ended.answer)].strip() in ended.turn

    asked = text_turn("cloze", text, random.Random(number))
    assert asked is not None
    turn = asked.answer.join(asked.turn.rsplit(BLANK, 1))
    assert BLANK in asked.turn
    assert text[slice(*asked.chars)] in turn or '" in the text' in turn

    told = text_turn("paraphrase", text, random.Random(number))
    assert told is not None
    assert told.answer == ""


def test_numbers_names_and_parts_of_a_sentence_can_be_left_out() -> None:
    assert answers_in(SENTENCE) == [
        "1874", "Harrow Salt Company", "42% of its pans", "its pans because of the railway",
        "of the railway", "the railway",
    ]  # fmt: skip


def test_a_text_without_sentences_or_words_has_no_turn() -> None:
    rng = random.Random(0)
    for kind in ("recite", "continue", "cloze", "paraphrase"):
        assert text_turn(kind, "salt", rng) is None
    assert quizzed("salt", rng) is None


def test_a_text_without_spaces_is_cut_between_characters() -> None:
    found = text_turn("recite", "盐湖城的风景很美" * 20, random.Random(1))
    assert found is not None
    assert 16 <= len(found.answer) <= 40


def test_a_question_is_asked_for_and_checked() -> None:
    said = question_prompt(SENTENCE, "1874")
    assert [m.role for m in said] == ["user", "assistant"] * 4 + ["user"]
    assert said[-1].content.startswith(f"Text: {SENTENCE}\nAnswer: 1874\n")
    assert question_fault("When were the pans sold?", "1874") is None
    assert question_fault("The pans were sold.", "1874") == "no_question"
    assert question_fault("Why?\nBecause?", "1874") == "no_question"
    assert question_fault("What was sold in 1874?", "1874") == "answer_inside"


DOCUMENTS_SPEC_ROOT = Path(__file__).parents[4]
MESH = str(DOCUMENTS_SPEC_ROOT / "meshes" / "documents.yaml")
CLINIC = str(DOCUMENTS_SPEC_ROOT / "meshes" / "longhealth.yaml")


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
         "questions is read with data.source documents alone"),
        (("self_study.rounds=2",),
         r"rounds must leave room for rollout.max_tokens \(64\) in train.row_tokens \(512\): so "
         "many turns take up to 768 tokens"),
        (("self_study.rounds=0",), "rounds must be >= 1: got 0"),
        (("data.facts=3",), "facts is read with data.source clinic"),
        (("evaluate.sampled=true",), "must be left out with self_study"),
        (("self_study.question_tokens=450",),
         r"must be <= train.row_tokens \(512\) with rollout.max_tokens \(64\)"),
        (("self_study.max_chunk=100",), r"max_chunk must be >= min_chunk \(512\)"),
        (("self_study.mix={question: 0}",), "must give a kind a weight above 0"),
        (("self_study.mix={quizz: 1}",), "quizz"),
        (("self_study.scores=stored",), "scores is read with self_study.rows alone"),
        (("self_study.scores=stored", "self_study.rows=r", "teacher.top_k=full",
          "loss.temperature=2"), r"temperature must be 1 with a top-k teacher"),
        (("documents.encoding=klingon",), "must be an encoding that Python knows"),
        (("objective.w_doc=0", "train.warm_start={steps: 9}"),
         "warm_start is read with objective.w_doc alone"),
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
    with pytest.raises(SpecError, match=r"questions is read with data\.source documents"):
        loaded("data.questions=q.json", mesh=CLINIC)
    with pytest.raises(SpecError, match=r"source must be documents or longhealth with self_study"):
        loaded("self_study.questions=4", mesh=CLINIC)
    assert loaded("train.warm_start={steps: 5}", mesh=CLINIC).learn.train.warm_start


def test_longhealth_may_be_studied_and_the_published_setting_is() -> None:
    learn = loaded(mesh=str(DOCUMENTS_SPEC_ROOT / "meshes" / "longhealth_3b.yaml")).learn
    assert learn.self_study is not None
    assert (learn.data.source, learn.data.held_out, learn.data.patients) == ("longhealth", 1.0, 20)
    assert "<answer>" in learn.data.instruction
    three = learn.self_study.model_copy(update={"rounds": 3})
    assert three.prompt_tokens == 3 * 256 + 2 * 512
    with pytest.raises(SpecError, match=r"must be null but for patients without self_study"):
        loaded(
            "train.offline_texts=2", mesh=str(DOCUMENTS_SPEC_ROOT / "meshes" / "longhealth_3b.yaml")
        )
