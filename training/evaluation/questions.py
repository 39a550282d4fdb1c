"""Make the evaluation suite of `forge eval`: questions, passages, and probes for forgetting.

    questions   held out by the run, or from a file; the right answers as readings where known
    passages    windows of each document, to be read token by token
    probes      questions that no document of the run answers: another patient's chart in the
                prompt (clinic, LongHealth), or general ones (configs/forgetting.json)

A reading is a text of which an arm returns the log-probabilities. This module runs no model.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from documents.corpus import read_parts, tokenised
from documents.near_duplicates import LocatedText
from documents.seed_prompts import PLAIN, SENTENCE
from documents.synthesis import read_rows
from environments.clinic.longhealth import Patient, is_held_out, load_patients
from environments.clinic.prompts import (
    option_prompt,
    recite_prompt,
    sentences,
    unique_cue,
)
from environments.renderer import NO_DOCUMENT, ChatRenderer
from protocols.errors import DataError
from protocols.files import REPOSITORY
from protocols.spec.experiments import EvalSpec
from protocols.spec.learn import LearnSpec
from protocols.teacher_replay import AgentMessage
from services.run_directory import RunDirectory
from training.recipes.agreement import split
from training.recipes.documents import of_parts, studied_of
from training.recipes.longhealth import in_turns, read_patients
from training.recipes.question_files import UserQuestion, read_questions

GENERAL = REPOSITORY / "configs" / "forgetting.json"
CUE_WORDS = 3  # words of a passage that identify it
WORD_START = re.compile(r"\S")


@dataclass(frozen=True)
class QuestionReading:
    """Hold `answer_ids` after a prompt, with the prefix of `document` and without any."""

    id: str
    document: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class EvalQuestion:
    """Hold a question as the model reads it. `right` is a reading of the right answer, None where
    it is unknown; `known` tells whether a response can be judged."""

    asked: UserQuestion
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]
    right: QuestionReading | None
    known: bool = True


@dataclass(frozen=True)
class EvalSuite:
    """Hold all questions, passages and probes. `heads` are the documents' token ids by name,
    `texts` their words. `user_file` tells whether the questions come from a user's file."""

    source: str
    user_file: bool
    conversation: ChatRenderer
    texts: Mapping[str, str]
    heads: Mapping[str, tuple[int, ...]]
    end_ids: frozenset[int]
    items: tuple[EvalQuestion, ...]
    passages: tuple[QuestionReading, ...]
    probes: tuple[EvalQuestion, ...]

    @property
    def placed(self) -> list[LocatedText]:
        """Return the distinct questions without their options, to search for contamination."""
        found: dict[tuple[str, str], LocatedText] = {}
        for item in self.items:
            q = item.asked
            text = q.choice.text if q.choice else q.text
            place = f"{self.source}: {q.id}"
            found.setdefault((q.document, text), LocatedText(q.document, text, place))
        return list(found.values())


def set_paper(
    spec: EvalSpec, learn: LearnSpec, directory: RunDirectory, tokenizer: Any, asked: str | None
) -> EvalSuite:
    """Return the evaluation suite of a run; the file `asked` replaces its own questions.

    Raises DataError for data that changed since the run, or without any question.
    """
    if learn.data.source == "documents":
        texts, own = _of_documents(learn, directory, tokenizer, asked)
    elif learn.data.source in ("clinic", "longhealth"):
        texts, own = _of_patients(learn)
    else:
        raise DataError(
            f"run {directory.id} has no questions about documents (data.source "
            f"{learn.data.source}); forge eval is for clinic, longhealth and documents"
        )
    conversation = ChatRenderer(tokenizer, texts)
    source, file = "held-out questions", asked or learn.data.questions
    known = own is None or bool(own and (own[0].answers or own[0].choice))
    if file is not None:
        own = read_questions(file, texts, learn.data.instruction, unanswerable=True)
        own, source, known = in_turns(_by_document(own, texts)), Path(file).name, True
    if not own:
        raise DataError(
            f"run {directory.id} has no held-out question: raise data.held_out, or give a file "
            "with --asked"
        )
    items = tuple(_item(q, conversation, known) for q in own[: spec.questions])
    return EvalSuite(
        source=source,
        user_file=file is not None
        or (learn.data.path is not None and learn.data.source != "documents"),
        conversation=conversation,
        texts=texts,
        heads={
            **{name: conversation.head(name) for name in texts},
            NO_DOCUMENT: conversation.head(None),
        },
        end_ids=frozenset({tokenizer.eos_token_id}),
        items=items,
        passages=tuple(_passages(spec, learn, texts, conversation, tokenizer)),
        probes=tuple(_probes(spec, learn, list(texts), conversation)),
    )


def first_tokens_of(paper: EvalSuite, tokens: int, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return each document cut so that its prompt, chat template included, has at most `tokens`
    tokens: what fits into a cartridge's budget.

    Raises DataError where the template alone is longer.
    """
    found = {}
    for name, text in paper.texts.items():
        cut = tokenised(tokenizer, text)
        low, high = 0, min(tokens, len(cut))  # the most tokens of the text that fit
        while low < high:
            middle = (low + high + 1) // 2
            head = _head(tokenizer, cut.text_of(cut.chunk(0, middle)))
            low, high = (middle, high) if len(head) <= tokens else (low, middle - 1)
        if low == 0:
            raise DataError(
                f"the chat template alone has more than {tokens} tokens: no document fits into a "
                "prompt of that budget; leave the arm truncated out with --arms"
            )
        found[name] = _head(tokenizer, cut.text_of(cut.chunk(0, low)))
    return found


def _head(tokenizer: Any, text: str) -> tuple[int, ...]:
    return ChatRenderer(tokenizer, {"cut": text}).head("cut")


def _item(asked: UserQuestion, conversation: ChatRenderer, known: bool = True) -> EvalQuestion:
    ids, bare = (conversation.opening(d, asked.messages) for d in (asked.document, None))
    words = asked.wording
    if not words:
        return EvalQuestion(asked, ids, bare, None, known)
    right = QuestionReading(asked.id, asked.document, ids, bare, conversation.saying(words))
    return EvalQuestion(asked, ids, bare, right, known)


def _opening(conversation: ChatRenderer, document: str | None, text: str) -> tuple[int, ...]:
    return conversation.opening(document, (AgentMessage("user", text),))


def _by_document(
    asked: Sequence[UserQuestion], texts: Mapping[str, str]
) -> list[list[UserQuestion]]:
    return [[q for q in asked if q.document == name] for name in texts]


# -- the run's own questions ------------------------------------------------------------------


def _of_patients(learn: LearnSpec) -> tuple[dict[str, str], list[UserQuestion]]:
    patients = read_patients(learn.data)
    # All held-out questions, not only the first few that the run itself measured.
    every = [
        [_choice(q, learn) for q in p.questions if is_held_out(q, learn.data.held_out)]
        for p in sorted(patients, key=lambda p: p.id)
    ]
    return {p.id: p.document for p in patients}, in_turns(every)


def _choice(question: Any, learn: LearnSpec) -> UserQuestion:
    text = option_prompt(question.text, question.options, learn.data.instruction)
    return UserQuestion(question.id, question.patient, text, choice=question)


def _of_documents(
    learn: LearnSpec, directory: RunDirectory, tokenizer: Any, asked: str | None
) -> tuple[dict[str, str], list[UserQuestion] | None]:
    """Return the documents and the self-study questions that the run held out."""
    parts = read_parts(learn, tokenizer)
    require_same_documents(parts.as_dict()["documents"], directory)
    if asked or learn.data.questions:
        return parts.texts, None
    assert learn.self_study is not None
    file = Path(learn.self_study.rows or directory.selfstudy)
    conversation = ChatRenderer(tokenizer, parts.texts)
    rows = of_parts(read_rows(file), parts, str(file))
    studied = [s for r in rows if r.kept and (s := studied_of(r, learn, conversation)) is not None]
    _, held_out = split(studied, learn.data.held_out)
    return parts.texts, [
        UserQuestion(s.key, s.document, s.messages[-1].content, before=s.messages[:-1])
        for s in held_out
    ]


def require_same_documents(now: Sequence[Mapping[str, Any]], directory: RunDirectory) -> None:
    """Raise DataError where a run read other documents."""
    before = json.loads(directory.documents.read_bytes())["documents"]
    if before != list(now):
        raise DataError(
            f"the documents changed since run {directory.id} ({directory.documents}); bring them "
            "back to evaluate it"
        )


# -- passages and probes ----------------------------------------------------------------------


def _passages(
    spec: EvalSpec,
    learn: LearnSpec,
    texts: Mapping[str, str],
    conversation: ChatRenderer,
    tokenizer: Any,
) -> list[QuestionReading]:
    """Return windows of each document that begin with a sentence, drawn by its name, each as the
    answer to a turn that quotes its first words."""
    found = []
    for name, text in texts.items():
        cut = tokenised(tokenizer, text)
        last = max(0, len(cut) - spec.passage_tokens)
        rng = random.Random(f"passages/{spec.seed}/{name}")
        pool = _sentence_starts(text, [cut.chunk(i, i + 1).start_char for i in range(last + 1)])
        for number, first in enumerate(rng.sample(pool, min(spec.passages, len(pool)))):
            stop = min(len(cut), first + spec.passage_tokens)
            words = cut.text_of(cut.chunk(first, stop)).strip()
            (sentence, *_) = sentences(words)
            cue = unique_cue(text, sentence) or " ".join(sentence.split()[:CUE_WORDS])
            turn = PLAIN["question"][1].format(cue=cue)
            if learn.data.source != "documents":
                turn = recite_prompt(cue)
            found.append(
                QuestionReading(
                    f"{name}/passage/{number}", name, _opening(conversation, name, turn),
                    # Without an end token, because the document continues.
                    _opening(conversation, None, turn), conversation.saying(words)[:-1],
                )
            )  # fmt: skip
    return found


def _sentence_starts(text: str, places: Sequence[int]) -> list[int]:
    """Return which of these tokens, given by their first characters, begin a sentence; or the first
    token, if none does. A token may include the space before its word."""
    starts = {0, *(m.end() for m in SENTENCE.finditer(text))}
    words = [word.start() if (word := WORD_START.search(text, at)) else at for at in places]
    return [i for i, at in enumerate(words) if at in starts] or [0]


def _probes(
    spec: EvalSpec, learn: LearnSpec, names: Sequence[str], conversation: ChatRenderer
) -> list[EvalQuestion]:
    """Return the probes; each is asked over the cartridge of one document, in turn."""
    if not spec.probes:
        return []
    others = [] if learn.data.source == "documents" else _others(learn)
    if others:
        # The chart is in the user's turn, to test whether the model can still read one there.
        asked = in_turns(
            [
                [replace(_choice(q, learn), text=f"{p.document} {_choice(q, learn).text}")
                 for q in p.questions]
                for p in others
            ]
        )  # fmt: skip
    else:
        asked = read_questions(str(GENERAL), {"general": ""}, "")
    found = []
    for i, question in enumerate(asked[: spec.probes]):
        over = names[i % len(names)]
        found.append(_item(replace(question, document=over), conversation))
    return found


def _others(learn: LearnSpec) -> list[Patient]:
    """Return patients outside the run: of another clinic, or later ones of the file."""
    data = learn.data
    if data.path is not None:
        return load_patients(data.path)[data.patients :]
    return read_patients(data.model_copy(update={"seed": data.seed + 1}))
