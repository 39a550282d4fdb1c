"""Write self-study rows: A asks about passages of the documents, B answers, row by row to a file.

    item -> passage (random chunk) -> A (seed of a kind) -> filters, dedup -> B -> filters -> row
                                      A (takes up the answer) -> filters -> B    a further round

Items are numbered, and every draw of an item depends on its document and number: an interrupted
file is continued with the same rows. A refused first turn is a row, too, with the reason. A
conversation whose answer or next turn cannot be used ends before it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from documents.chunks import Chunk, random_chunk
from documents.corpus import CorpusDocument
from documents.filters import ECHO_WORDS, DuplicateFilter, TextBounds, fault, normalised
from documents.seed_prompts import asking, asking_on, plain_next_turn, plain_turn
from documents.synthesis_rows import StudyRow, from_dict
from protocols.errors import DataError
from protocols.files import append_rows, iter_rows, json_lines, utc_text, write_atomically
from protocols.seeds import stream_seed
from protocols.spec.documents import SelfStudySpec
from protocols.teacher_replay import AgentMessage
from protocols.types import Sampling
from strategies.samplers.sampler import Sampler, SampleRequest, SampleResult

BATCH = 32  # items written together: a kill loses at most so many


@dataclass(frozen=True)
class SynthesisItem:
    """Name one row to be written: the `number`-th of a document."""

    part: CorpusDocument
    number: int

    @property
    def key(self) -> str:
        return f"{self.part.name}/{self.number:05}"


@dataclass(frozen=True)
class SynthesisPlan:
    """Hold what decides the rows of given parts; `model` names their writer, `answers` whether B
    answers. All draws depend on `seed`."""

    study: SelfStudySpec
    model: str
    seed: int
    answers: bool

    @property
    def config(self) -> str:
        """Return a hash of the plan: a file with rows of another plan is not continued."""
        plain = {**asdict(self), "study": self.study.model_dump(mode="json", exclude={"rows"})}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def bounds(self) -> TextBounds:
        return TextBounds(self.study.least_words, self.study.most_words, self.study.alike)


def items(parts: Sequence[CorpusDocument], each: int) -> list[SynthesisItem]:
    """Return items in turn over the documents, so that an incomplete file covers all of them."""
    return [SynthesisItem(part, number) for number in range(each) for part in parts]


def read_rows(path: Path) -> list[StudyRow]:
    """Return the rows of a file. Raises DataError for a file of another format."""
    return [from_dict(row, f"{path}:{i}") for i, row in enumerate(iter_rows(path), start=1)]


async def write_study(
    path: Path,
    parts: Sequence[CorpusDocument],
    plan: SynthesisPlan,
    sampler: Sampler,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> list[StudyRow]:
    """Return every row of the plan in order, including those that the file already has. Raises
    DataError for a file of another plan or of other texts, and any error of the sampler."""
    wanted = items(parts, plan.study.questions)
    rows = _begun(path, wanted, plan)
    doubles = DuplicateFilter(plan.study.alike)
    for row in rows:
        if row.kept or row.refused.startswith("answer"):
            doubles.found(row.messages[0].content)
    for start in range(len(rows), len(wanted), BATCH):
        tell(start, len(wanted))
        new = await _batch(wanted[start : start + BATCH], plan, sampler, doubles)
        append_rows(path, [row.as_dict() for row in new])
        rows += new
    tell(len(wanted), len(wanted))
    return rows


def _begun(path: Path, wanted: Sequence[SynthesisItem], plan: SynthesisPlan) -> list[StudyRow]:
    """Return the file's rows without an incomplete last batch, which is written again with its
    duplicates."""
    rows = read_rows(path)
    for row, item in zip(rows, wanted, strict=False):
        same = (row.key, row.sha256, row.config)
        if same != (item.key, item.part.document.sha256, plan.config):
            raise DataError(
                f"{path} has rows of other documents or of another configuration, from {row.key} "
                "on; move it away, or write to another place"
            )
    if len(rows) > len(wanted):
        raise DataError(f"{path} has more rows than are asked for; move it away")
    if len(rows) < len(wanted):
        rows = rows[: len(rows) // BATCH * BATCH]
    if path.exists():  # a torn last line goes too
        write_atomically(path, json_lines(row.as_dict() for row in rows))
    return rows


async def _batch(
    batch: Sequence[SynthesisItem], plan: SynthesisPlan, sampler: Sampler, doubles: DuplicateFilter
) -> list[StudyRow]:
    drafts = {draft.row.key: draft for draft in (_draft(item, plan) for item in batch)}
    asked = [(f"{key}/question", d.asking, d.row.question_seed) for key, d in drafts.items()]
    turns = await _turns(asked, plan, sampler)
    rows = {
        key: _turn(draft, turn, plan, doubles)
        for (key, draft), turn in zip(drafts.items(), turns, strict=True)
    }
    for rounds in range(1, plan.study.rounds):
        rows |= await _next_round([*rows.values()], rounds, drafts, plan, sampler)
    if plan.answers:
        rows |= await _answers([r for r in rows.values() if r.kept], drafts, plan, sampler)
    return list(rows.values())


async def _next_round(
    rows: Sequence[StudyRow], rounds: int, drafts: Mapping[str, DraftRow], plan: SynthesisPlan,
    sampler: Sampler,
) -> dict[str, StudyRow]:  # fmt: skip
    """Return the rows of `rounds` turns that go on, by key, after B's answer and A's next turn;
    those that end here have the reason in `tried`."""
    going = {r.key: r for r in rows if r.kept and len(r.history) == rounds - 1}
    answered = await _answers(list(going.values()), drafts, plan, sampler)
    ended = {
        key: replace(going[key], tried=(*going[key].tried, row.refused))
        for key, row in answered.items()
        if not row.kept
    }
    longer = {key: _longer(row, drafts[key]) for key, row in answered.items() if row.kept}
    asks = {
        key: asking_on(drafts[key].passage, row.history, random.Random(f"{row.question_seed}/seed"))
        for key, row in longer.items()
    }
    asked = [(f"{k}/question/{rounds + 1}", asks[k], longer[k].question_seed) for k in longer]
    turns = await _turns(asked, plan, sampler)
    for (key, row), turn in zip(longer.items(), turns, strict=True):
        text = turn.text.strip()
        why = fault(text, asks[key], turn.finish_reason == "stop", plan.bounds)
        if why is None:
            row = replace(row, question=text, question_tokens=turn.tokens, asker="model")
        elif plan.study.plain:
            rng = random.Random(f"{row.question_seed}/plain")
            plain = plain_next_turn(row.history[-1][1], rng)
            row = replace(row, question=plain, asker="plain", tried=(*row.tried, why))
        else:
            row = replace(going[key], tried=(*row.tried, why))
        longer[key] = row
    return ended | longer


def _longer(row: StudyRow, draft: DraftRow) -> StudyRow:
    """Return an answered row with its last round in the history, for a next turn to be written."""
    history = (*row.history, (row.question, row.answer))
    return replace(
        draft.row, history=history, tried=row.tried,
        question_seed=stream_seed(f"{draft.name}/question/{1 + len(history)}"),
        answer_seed=stream_seed(f"{draft.name}/answer/{1 + len(history)}"),
    )  # fmt: skip


async def _turns(
    asked: Sequence[tuple[str, str, int]], plan: SynthesisPlan, sampler: Sampler
) -> list[SampleResult]:
    """Return A's turns for (request id, prompt, seed)."""
    sampling = Sampling(plan.study.question_temperature, max_tokens=plan.study.question_tokens)
    requests = [
        SampleRequest(name, (AgentMessage("user", text),), sampling, seed)
        for name, text, seed in asked
    ]
    return await sampler(requests) if requests else []


async def _answers(
    rows: Sequence[StudyRow], drafts: Mapping[str, DraftRow], plan: SynthesisPlan, sampler: Sampler
) -> dict[str, StudyRow]:
    """Return the rows by key with B's answer to their last turn."""
    study = plan.study
    sampling = Sampling(study.answer_temperature, max_tokens=study.answer_tokens)
    top = study.top_k if "top_logprobs" in sampler.abilities else 0
    requests = [
        SampleRequest(
            f"{row.key}/answer" + (f"/{1 + len(row.history)}" if row.history else ""),
            (AgentMessage("system", drafts[row.key].passage), *row.messages),
            sampling,
            row.answer_seed,
            top_logprobs=top,
        )
        for row in rows
    ]
    answers = await sampler(requests) if requests else []
    return {
        row.key: _answered(row, drafts[row.key], answer, plan)
        for row, answer in zip(rows, answers, strict=True)
    }


@dataclass(frozen=True)
class DraftRow:
    """Hold what A's first turn is made of; `name` is that of the item's random draws."""

    row: StudyRow
    name: str
    passage: str
    asking: str
    plain: str


def passage_of(
    part: CorpusDocument, number: int, study: SelfStudySpec, seed: int
) -> tuple[Chunk, random.Random, str]:
    """Return the passage of an item, the generator of its other draws, and that generator's
    name."""
    name = f"selfstudy/{seed}/{part.name}/{part.document.sha256}/{number}"
    rng = random.Random(name)
    return random_chunk(part.tokens, study.min_chunk, study.max_chunk, rng), rng, name


def _draft(item: SynthesisItem, plan: SynthesisPlan) -> DraftRow:
    part, study = item.part, plan.study
    chunk, rng, name = passage_of(part, item.number, study, plan.seed)
    kind = study.kinds[item.number % len(study.kinds)]
    passage = part.tokens.text_of(chunk)
    # A passage from the middle does not say whom or what it is about.
    read = f"{part.about}\n{passage}" if part.about and chunk.start else passage
    first = part.chunk.start_char
    row = StudyRow(
        key=item.key, document=part.name, source=part.document.source,
        sha256=part.document.sha256, tokens=(chunk.start, chunk.stop),
        chars=(first + chunk.start_char, first + chunk.stop_char), kind=kind, asker="model",
        question="", question_seed=stream_seed(f"{name}/question"),
        question_sampling={
            "temperature": study.question_temperature, "max_tokens": study.question_tokens,
        },
        answer_seed=stream_seed(f"{name}/answer"),
        answer_sampling={
            "temperature": study.answer_temperature, "max_tokens": study.answer_tokens,
        },
        model=plan.model, config=plan.config, generator=_generator(), time=utc_text(),
    )  # fmt: skip
    ask, plain = asking(read, kind, rng), plain_turn(passage, kind, rng)
    return DraftRow(row, name, read, ask, plain)


def _turn(
    draft: DraftRow, turn: SampleResult, plan: SynthesisPlan, doubles: DuplicateFilter
) -> StudyRow:
    text = turn.text.strip()
    why = fault(text, draft.asking, turn.finish_reason == "stop", plan.bounds)
    why = why or doubles.found(text)
    row = replace(draft.row, question=text, question_tokens=turn.tokens)
    if why is None:
        return row
    if not plan.study.plain:
        return replace(row, refused=why)
    row = replace(row, asker="plain", question=draft.plain, tried=(why,))
    return replace(row, refused=doubles.found(draft.plain) or "")


def _answered(
    row: StudyRow, draft: DraftRow, answer: SampleResult, plan: SynthesisPlan
) -> StudyRow:
    text = answer.text.strip()
    # An answer may quote its passage; a short one may repeat words of the question ("the second").
    long = len(text.split()) >= ECHO_WORDS or normalised(text) == normalised(row.question)
    bounds = replace(plan.bounds, least_words=1)
    why = fault(text, row.question if long else "", answer.finish_reason == "stop", bounds)
    return replace(
        row,
        answer=text,
        answer_ids=answer.token_ids,
        answer_logprobs=answer.logprobs,
        answer_tokens=answer.tokens,
        finish_reason=answer.finish_reason,
        teacher_ids=answer.top_token_ids,
        teacher_texts=tuple(tuple(t for t, _ in at) for at in answer.top_logprobs),
        teacher_logprobs=tuple(tuple(lp for _, lp in at) for at in answer.top_logprobs),
        refused="" if why is None else f"answer: {why}",
        time=utc_text(),
    )


def model_name(path: str) -> str:
    """Return `clinic-reader@9f86d081884c`: a model's directory name and a hash of its config and
    tokenizer, independent of its path; a hub id is returned unchanged."""
    files = [Path(path) / name for name in ("config.json", "tokenizer.json")]
    if not files[0].is_file():
        return path
    digest = hashlib.sha256(b"".join(f.read_bytes() for f in files if f.is_file()))
    return f"{Path(path).name}@{digest.hexdigest()[:12]}"


def _generator() -> str:
    try:
        return f"cartridge-forge {version('cartridge-forge')}"
    except PackageNotFoundError:
        return "cartridge-forge"
