"""Draft self-study rows: which passage or words of a document a row is about, and what A is asked.

Every draw of an item depends on its document and number alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.chunks import Chunk, random_chunk
from cartridge_forge.plugins.documents.corpus import CorpusDocument
from cartridge_forge.plugins.documents.filters import TextBounds
from cartridge_forge.plugins.documents.seed_prompts import asking, plain_turn
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS, SelfStudySpec
from cartridge_forge.plugins.documents.synthesis_rows import StudyRow
from cartridge_forge.plugins.documents.text_turns import question_prompt, quizzed, text_turn
from cartridge_forge.protocols.files import utc_text
from cartridge_forge.protocols.step import stream_seed

AROUND = 1200  # characters of the text on each side of words that B is asked about


@dataclass(frozen=True)
class SynthesisItem:
    """Name one row to be written: the `number`-th of a document, of a kind."""

    part: CorpusDocument
    number: int
    kind: str

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


@dataclass(frozen=True)
class DraftRow:
    """Hold what A's first turn is made of; `name` is that of the item's random draws. Without
    `asking` the row has its turn, and A writes none; without `plain` there is none to fall back
    on."""

    row: StudyRow
    name: str
    passage: str
    asking: tuple[AgentMessage, ...]
    plain: str


def passage_of(
    part: CorpusDocument, number: int, study: SelfStudySpec, seed: int
) -> tuple[Chunk, random.Random, str]:
    """Return the passage of an item, the generator of its other draws, and that generator's
    name."""
    name = f"selfstudy/{seed}/{part.name}/{part.document.sha256}/{number}"
    rng = random.Random(name)
    return random_chunk(part.tokens, study.min_chunk, study.max_chunk, rng), rng, name


def draft_of(item: SynthesisItem, plan: SynthesisPlan) -> DraftRow:
    part, study = item.part, plan.study
    chunk, rng, name = passage_of(part, item.number, study, plan.seed)
    if item.kind not in SEED_KINDS:
        return _of_text(item, plan, rng, name)
    passage = part.tokens.text_of(chunk)
    # A passage from the middle does not say whom or what it is about.
    read = f"{part.about}\n{passage}" if part.about and chunk.start else passage
    ask, plain = asking(read, item.kind, rng), plain_turn(passage, item.kind, rng)
    return DraftRow(_row(item, plan, chunk, name), name, read, (AgentMessage("user", ask),), plain)


def _of_text(item: SynthesisItem, plan: SynthesisPlan, rng: random.Random, name: str) -> DraftRow:
    """Return the draft of a turn that the document's words answer, refused where it has none."""
    part, text = item.part, item.part.text
    quiz = item.kind == "quiz"
    turn = quizzed(text, rng) if quiz else text_turn(item.kind, text, rng)
    if turn is None:
        row = _row(item, plan, part.tokens.chunk(0, len(part.tokens)), name)
        return DraftRow(replace(row, asker="plain", refused="no_words"), name, text, (), "")
    row = _row(item, plan, part.tokens.around(*turn.chars), name)
    # Its answer is the model's with the text around it, where the text's words are none.
    context = text[max(0, turn.chars[0] - AROUND) : turn.chars[1] + AROUND]
    if quiz:
        asking = question_prompt(turn.turn, turn.answer)
        return DraftRow(replace(row, answer=turn.answer), name, context, asking, "")
    row = replace(row, asker="plain", question=turn.turn, answer=turn.answer)
    return DraftRow(row, name, context, (), "")


def _row(item: SynthesisItem, plan: SynthesisPlan, chunk: Chunk, name: str) -> StudyRow:
    part, study = item.part, plan.study
    first = part.chunk.start_char
    return StudyRow(
        key=item.key, document=part.name, source=part.document.source,
        sha256=part.document.sha256, tokens=(chunk.start, chunk.stop),
        chars=(first + chunk.start_char, first + chunk.stop_char), kind=item.kind, asker="model",
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


@cache  # of thousands of rows
def _generator() -> str:
    try:
        return f"cartridge-forge {version('cartridge-forge')}"
    except PackageNotFoundError:
        return "cartridge-forge"
