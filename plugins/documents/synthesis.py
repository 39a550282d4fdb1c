"""Write self-study rows: A asks about passages of the documents, B answers, row by row to a file.

    item -> passage (random chunk) -> A (seed of a kind) -> filters, dedup -> B -> filters -> row
                                      A (takes up the answer) -> filters -> B    a further round
         -> words of the text (documents.text_turns) -> a fixed turn, or A's question -> row

Items are numbered, and every draw of an item depends on its document and number: an interrupted
file is continued with the same rows. A refused first turn is a row, too, with the reason. A
conversation whose answer or next turn cannot be used ends before it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.corpus import CorpusDocument
from cartridge_forge.plugins.documents.drafts import (
    DraftRow,
    SynthesisItem,
    SynthesisPlan,
    draft_of,
)
from cartridge_forge.plugins.documents.filters import ECHO_WORDS, DuplicateFilter, fault, normalised
from cartridge_forge.plugins.documents.seed_prompts import asking_on, plain_next_turn
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS, SelfStudySpec
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow, from_dict
from cartridge_forge.plugins.documents.text_turns import (
    TURNS,
    question_fault,
)
from cartridge_forge.plugins.strategies.samplers.sampler import Sampler, SampleRequest, SampleResult
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import (
    append_rows,
    iter_rows,
    json_lines,
    utc_text,
    write_atomically,
)
from cartridge_forge.protocols.step import Sampling, stream_seed

BATCH = 32  # items written together: a kill loses at most so many


def items(parts: Sequence[CorpusDocument], study: SelfStudySpec) -> list[SynthesisItem]:
    """Return items in turn over the documents, so that an incomplete file covers all of them."""
    kinds = enumerate(study.kinds(study.questions))
    return [SynthesisItem(part, number, kind) for number, kind in kinds for part in parts]


class Doubles:
    """Find turns that double an earlier one: the same words, or of those that A writes, nearly.
    Turns about one sentence that lack other words of it are not alike."""

    def __init__(self, alike: float) -> None:
        self._written, self._of_text = DuplicateFilter(alike), DuplicateFilter(1.0)

    def found(self, kind: str, text: str) -> str | None:
        return (self._of_text if kind in TURNS else self._written).found(text)


def planned_turns(
    parts: Sequence[CorpusDocument], plan: SynthesisPlan
) -> Iterator[tuple[str, str, str]]:
    """Yield (document, kind, reason why it is not used, or "") of every turn that no model writes,
    and of those of quiz, for which A may find no words."""
    doubles = Doubles(plan.study.alike)
    for item in items(parts, plan.study):
        if item.kind not in SEED_KINDS:
            row = draft_of(item, plan).row
            if item.kind in TURNS:
                row = _given(row, doubles)
            yield item.part.name, item.kind, row.refused


def read_rows(path: Path) -> list[StudyRow]:
    """Return the rows of a file. Raises DataError for a file of another format."""
    return [from_dict(row, f"{path}:{i}") for i, row in enumerate(iter_rows(path), start=1)]


async def write_study(
    path: Path,
    parts: Sequence[CorpusDocument],
    plan: SynthesisPlan,
    sampler: Sampler,
    tell: Callable[[int, int], None] = lambda count, total: None,
) -> list[StudyRow]:
    """Return every row of the plan in order, including those that the file already has. Raises
    DataError for a file of another plan or of other texts, and any error of the sampler."""
    wanted = items(parts, plan.study)
    rows = _begun(path, wanted, plan)
    doubles = Doubles(plan.study.alike)
    for row in rows:
        if row.kept or row.refused.startswith(("answer", "no_gain")):
            doubles.found(row.kind, row.messages[0].content)
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
        identity = (row.key, row.sha256, row.config)
        if identity != (item.key, item.part.document.sha256, plan.config):
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
    batch: Sequence[SynthesisItem], plan: SynthesisPlan, sampler: Sampler, doubles: Doubles
) -> list[StudyRow]:
    drafts = {draft.row.key: draft for draft in (draft_of(item, plan) for item in batch)}
    questions = {key: draft for key, draft in drafts.items() if draft.asking}
    turns = await _turns(
        [(f"{key}/question", d.asking, d.row.question_seed) for key, d in questions.items()],
        plan, sampler,
    )  # fmt: skip
    rows_written = {
        key: _turn(draft, turn, plan, doubles)
        for (key, draft), turn in zip(questions.items(), turns, strict=True)
    }
    rows = {
        key: rows_written.get(key) or _given(draft.row, doubles) for key, draft in drafts.items()
    }
    for rounds in range(1, plan.study.rounds):
        rows |= await _next_round([*rows.values()], rounds, drafts, plan, sampler)
    if plan.answers:
        lacking = [r for r in rows.values() if r.kept and not r.answer]
        rows |= await _answers(lacking, drafts, plan, sampler)
    return list(rows.values())


async def _next_round(
    rows: Sequence[StudyRow], rounds: int, drafts: Mapping[str, DraftRow], plan: SynthesisPlan,
    sampler: Sampler,
) -> dict[str, StudyRow]:  # fmt: skip
    """Return the rows of `rounds` turns that go on, by key, after B's answer and A's next turn;
    those that end here have the reason in `tried`."""
    going = {
        r.key: r for r in rows if r.kept and r.kind in SEED_KINDS and len(r.history) == rounds - 1
    }
    answered = await _answers(list(going.values()), drafts, plan, sampler)
    ended = {
        key: replace(going[key], tried=(*going[key].tried, row.refused))
        for key, row in answered.items()
        if not row.kept
    }
    longer = {key: _longer(row, drafts[key]) for key, row in answered.items() if row.kept}
    prompts = {
        key: asking_on(drafts[key].passage, row.history, random.Random(f"{row.question_seed}/seed"))
        for key, row in longer.items()
    }
    continuing = [
        (f"{k}/question/{rounds + 1}", (AgentMessage("user", prompts[k]),), longer[k].question_seed)
        for k in longer
    ]
    turns = await _turns(continuing, plan, sampler)
    for (key, row), turn in zip(longer.items(), turns, strict=True):
        text = turn.text.strip()
        why = fault(text, prompts[key], turn.finish_reason == "stop", plan.bounds)
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
    prompts: Sequence[tuple[str, tuple[AgentMessage, ...], int]], plan: SynthesisPlan,
    sampler: Sampler,
) -> list[SampleResult]:  # fmt: skip
    """Return A's turns for (request id, conversation, seed)."""
    sampling = Sampling(plan.study.question_temperature, max_tokens=plan.study.question_tokens)
    requests = [SampleRequest(name, messages, sampling, seed) for name, messages, seed in prompts]
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


def _turn(draft: DraftRow, turn: SampleResult, plan: SynthesisPlan, doubles: Doubles) -> StudyRow:
    text, kind = turn.text.strip(), draft.row.kind
    why = fault(text, draft.asking[-1].content, turn.finish_reason == "stop", plan.bounds)
    if why is None and kind == "quiz":
        why = question_fault(text, draft.row.answer)
    why = why or doubles.found(kind, text)
    row = replace(draft.row, question=text, question_tokens=turn.tokens)
    if why is None:
        return row
    if not plan.study.plain or not draft.plain:
        return replace(row, refused=why)
    row = replace(row, asker="plain", question=draft.plain, tried=(why,))
    return replace(row, refused=doubles.found(kind, draft.plain) or "")


def _given(row: StudyRow, doubles: Doubles) -> StudyRow:
    """Return the row of a turn that no model wrote, refused where it doubles an earlier one."""
    return row if row.refused else replace(row, refused=doubles.found(row.kind, row.question) or "")


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
