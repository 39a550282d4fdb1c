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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import hash_of
from cartridge_forge.plugins.clinic.text import (
    Patient,
    is_held_out,
    load_patients,
    option_prompt,
    recite_prompt,
    sentences,
    unique_cue,
)
from cartridge_forge.plugins.documents.chunks import TokenizedText
from cartridge_forge.plugins.documents.corpus import read_parts, tokenised
from cartridge_forge.plugins.documents.filters import normalised
from cartridge_forge.plugins.documents.near_duplicates import LocatedText
from cartridge_forge.plugins.documents.seed_prompts import PLAIN, SENTENCE
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.study.agreement import split
from cartridge_forge.plugins.documents.study.longhealth import open_prompts, read_patients
from cartridge_forge.plugins.documents.study.material import require_questions
from cartridge_forge.plugins.documents.study.prompts import of_contexts, titled_messages
from cartridge_forge.plugins.documents.study.question_files import (
    UserQuestion,
    read_question_file,
    read_questions,
)
from cartridge_forge.plugins.documents.study.rows import context_titles, of_parts, studied_of
from cartridge_forge.plugins.documents.synthesis import model_name, read_rows
from cartridge_forge.plugins.episodes.spec.learn import EpisodesLearn
from cartridge_forge.plugins.episodes.task_sources.handbook import HandbookTasks, first_message
from cartridge_forge.plugins.episodes.task_sources.opening import open_tasks
from cartridge_forge.plugins.evaluate.own_text import FORMATS, FormatPrompt
from cartridge_forge.plugins.evaluate.spec import EvalSpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.layout import CartridgeLayout, layout_of
from cartridge_forge.protocols.step import NO_DOCUMENT, SEPARATOR
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.training.records import interleave, with_title

GENERAL = REPOSITORY / "configs" / "forgetting.json"
TEXTS = ("documents", "handbook")  # sources whose texts are no charts
CUE_WORDS = 3  # words of a passage that identify it
WORD_START = re.compile(r"\S")


Reader = Callable[
    [DocumentsLearn, RunDirectory, Any],
    "tuple[EvalSubjects, list[tuple[UserQuestion, str]] | None]",
]


@dataclass(frozen=True)
class QuestionReading:
    """Hold `answer_ids` after a prompt, with a prefix and without any. `about` names the contexts
    that the prompt is about, as one text (`learning.teacher.context_ids`)."""

    id: str
    about: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class EvalQuestion:
    """Hold a question as the model reads it, `about` as in `QuestionReading`. `right` is a reading
    of the right answer, None where it is unknown; `known` tells whether a response can be
    judged."""

    asked: UserQuestion
    about: str
    prompt_ids: tuple[int, ...]
    bare_ids: tuple[int, ...]
    right: QuestionReading | None
    known: bool = True


@dataclass(frozen=True)
class EvalSubjects:
    """Hold what a suite is about: the contexts' `texts` and the `titles` that prompts about them
    begin with, by context; the documents' `hash_of`, by document; and the cartridges' `layout`."""

    conversation: ChatRenderer
    layout: CartridgeLayout
    texts: Mapping[str, str]
    titles: Mapping[str, str]
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class EvalSuite:
    """Hold all questions, passages and probes, and what they are about. `heads` are the contexts'
    token ids by name. `user_file` tells whether the questions come from a user's file, `notes` how
    many of it are left out."""

    source: str
    user_file: bool
    about: EvalSubjects
    heads: Mapping[str, tuple[int, ...]]
    end_ids: frozenset[int]
    items: tuple[EvalQuestion, ...]
    passages: tuple[QuestionReading, ...]
    probes: tuple[EvalQuestion, ...]
    formats: tuple[tuple[FormatPrompt, EvalQuestion], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def abouts(self) -> dict[str, str]:
        """Return everything that a question or reading is about, with its document."""
        questions = (*self.items, *self.probes, *(question for _, question in self.formats))
        named = [*(i.about for i in questions), *(r.about for r in self.passages)]
        owners = self.about.layout.documents
        return {about: owners[about.split(SEPARATOR)[0]] for about in named}

    @property
    def ambiguous(self) -> frozenset[tuple[str, str]]:
        """Return the (document, id) of questions whose words, title included, are asked about
        several documents of one cartridge that answer otherwise."""
        groups: dict[tuple[str, str], list[UserQuestion]] = {}
        for item in self.items:
            q, context = item.asked, item.about.split(SEPARATOR)[0]
            text = normalised(with_title(self.about.titles, context, q.fact))
            groups.setdefault((self.about.layout.cartridge_of(q.document), text), []).append(q)
        return frozenset(
            (q.document, q.id)
            for group in groups.values()
            if len({q.document for q in group}) > 1 and len({q.expected for q in group}) > 1
            for q in group
        )

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
    spec: EvalSpec,
    learn: DocumentsLearn,
    directory: RunDirectory,
    tokenizer: Any,
    asked: str | None,
) -> EvalSuite:
    """Return the evaluation suite of a run; the file `asked` replaces its own questions.

    Raises DataError for data that changed since the run, or without any question.
    """
    readers: Mapping[str, Reader] = {
        "documents": partial(_documents, asked=asked), "handbook": _handbooks,
        "clinic": _patients, "longhealth": _patients,
    }  # fmt: skip
    if learn.data.source not in readers:
        raise DataError(
            f"run {directory.id} has no questions about documents (data.source "
            f"{learn.data.source}); forge eval is for clinic, longhealth, documents and handbook"
        )
    about, user_questions = readers[learn.data.source](learn, directory, tokenizer)
    source, file = "held-out questions", asked or learn.data.questions
    notes: tuple[str, ...] = ()
    known = user_questions is None or bool(
        user_questions and (user_questions[0][0].answers or user_questions[0][0].choice)
    )
    if file is not None:
        owners, words = about.layout.documents, learn.data.instruction
        read = read_question_file(file, about.texts, words, owners, unanswerable=True)
        require_questions(read.questions, file, tokenizer)
        by_context = [[q for q in read.questions if q.document == name] for name in about.texts]
        user_questions = [
            (replace(q, document=owners[q.document]), q.document) for q in interleave(by_context)
        ]
        source, known, notes = Path(file).name, True, read.notes
    if not user_questions:
        raise DataError(
            f"run {directory.id} has no held-out question: raise data.held_out, or give a file "
            "with --asked"
        )
    return EvalSuite(
        source=source,
        user_file=file is not None
        or (learn.data.path is not None and learn.data.source not in TEXTS),
        about=about,
        heads={
            **{name: about.conversation.head(name) for name in about.texts},
            NO_DOCUMENT: about.conversation.head(None),
        },
        end_ids=about.conversation.end_ids,
        items=tuple(_item(q, of, about, known) for q, of in user_questions[: spec.questions]),
        passages=tuple(_passages(spec, learn, about, tokenizer)),
        probes=tuple(_probes(spec, learn, about)),
        formats=tuple(_formats(about)) if spec.formats and learn.data.source in TEXTS else (),
        notes=notes,
    )


def first_tokens_of(paper: EvalSuite, tokens: int, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return for each cartridge a prompt of its contexts, each cut after as many tokens, which has
    at most `tokens` tokens, chat template included: what fits into the cartridge's budget.

    Raises DataError where there is no room for any.
    """
    found = {}
    for name, contexts in paper.about.layout.contexts.items():
        whole = [tokenised(tokenizer, paper.about.texts[c]) for c in contexts]

        def cut(count: int, whole: Sequence[TokenizedText] = whole) -> tuple[int, ...]:
            parts = [t.text_of(t.chunk(0, min(count, len(t)))) for t in whole]
            return paper.about.conversation.over({"cut": "\n".join(parts)}).head("cut")

        low, high = 0, min(tokens, max(map(len, whole)))  # the most tokens of each that fit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(cut(middle)) <= tokens else (low, middle - 1)
        if low == 0:
            raise DataError(
                f"the chat template and a token of each context have more than {tokens} tokens: "
                "nothing fits into a prompt of that budget; leave the arm truncated out with --arms"
            )
        found[name] = cut(low)
    return found


def _item(asked: UserQuestion, of: str, about: EvalSubjects, known: bool = True) -> EvalQuestion:
    context = of.split(SEPARATOR)[0]
    said = titled_messages(about.titles, context, asked.messages)
    ids, bare = (about.conversation.opening(c, said) for c in (context, None))
    words = asked.wording
    if not words:
        return EvalQuestion(asked, of, ids, bare, None, known)
    right = QuestionReading(asked.id, of, ids, bare, about.conversation.saying(words))
    return EvalQuestion(asked, of, ids, bare, right, known)


def _opening(conversation: ChatRenderer, context: str | None, text: str) -> tuple[int, ...]:
    return conversation.opening(context, (AgentMessage("user", text),))


# -- the run's own questions, each with what it is about -----------------------------------------


def _patients(
    learn: DocumentsLearn, directory: RunDirectory, tokenizer: Any
) -> tuple[EvalSubjects, list[tuple[UserQuestion, str]]]:
    prompts = open_prompts(learn, tokenizer, directory.date)
    about = EvalSubjects(
        conversation=prompts.conversation,
        layout=prompts.layout,
        texts=prompts.texts,
        titles=of_contexts(prompts.titles, prompts.layout),
        hashes={name: hash_of(p.document) for name, p in prompts.patients.items()},
    )
    # All held-out questions, not only the first few that the run itself measured.
    every = [
        [
            (_choice(q, learn), SEPARATOR.join(prompts.contexts_of(p.id, p.places_of(q))))
            for q in p.questions
            if is_held_out(q, learn.data.held_out)
        ]
        for _, p in sorted(prompts.patients.items())
    ]
    return about, interleave(every)


def _choice(question: Any, learn: DocumentsLearn) -> UserQuestion:
    text = option_prompt(question.text, question.options, learn.data.instruction)
    return UserQuestion(question.id, question.patient, text, choice=question)


def _documents(
    learn: DocumentsLearn, directory: RunDirectory, tokenizer: Any, asked: str | None
) -> tuple[EvalSubjects, list[tuple[UserQuestion, str]] | None]:
    """Return the documents of a run and the self-study questions that it held out; None in place of
    those where a file has questions. Raises DataError where the run read other documents."""
    parts = read_parts(learn, tokenizer)
    require_same_documents(parts.as_dict()["documents"], directory)
    about = EvalSubjects(
        conversation=ChatRenderer(tokenizer, parts.texts, directory.date),
        layout=parts.layout,
        texts=parts.texts,
        titles=context_titles(learn, parts),
        hashes={parts.layout.documents[name]: h for name, h in parts.hashes.items()},
    )
    if asked or learn.data.questions:
        return about, None
    assert learn.self_study is not None
    file = Path(learn.self_study.rows or directory.selfstudy)
    rows = of_parts(read_rows(file), parts, str(file))
    model = model_name(learn.model.path)
    read = (studied_of(r, learn, about.conversation, about.titles, model) for r in rows if r.kept)
    _, held_out = split(filter(None, read), learn.data.held_out)
    owners = parts.layout.documents
    questions = [
        (
            UserQuestion(s.key, owners[s.document], s.messages[-1].content, before=s.messages[:-1]),
            s.document,
        )
        for s in held_out
    ]
    return about, questions


def _handbooks(
    learn: DocumentsLearn, directory: RunDirectory, tokenizer: Any
) -> tuple[EvalSubjects, list[tuple[UserQuestion, str]]]:
    """Return the handbooks of a run, and the first messages of their held-out tasks, whose answers
    the teacher alone knows. Raises CheckpointError for handbooks that changed since the run."""
    tasks = open_tasks(EpisodesLearn.of(learn), tokenizer, directory)
    assert isinstance(tasks, HandbookTasks)
    layout = layout_of(learn.cartridge, {name: name for name in tasks.texts})
    about = EvalSubjects(
        conversation=ChatRenderer(tokenizer, tasks.texts, directory.date),
        layout=layout,
        texts=tasks.texts,
        titles={},
        hashes={name: hash_of(text) for name, text in tasks.texts.items()},
    )
    openings = dict.fromkeys((task.document, first_message(task)) for task in tasks.held_out)
    return about, [
        (UserQuestion(f"{name}/{number}", name, text), name)
        for number, (name, text) in enumerate(openings)
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
    spec: EvalSpec, learn: DocumentsLearn, about: EvalSubjects, tokenizer: Any
) -> list[QuestionReading]:
    """Return windows of each context that begin with a sentence, drawn by its name, each as the
    answer to a turn that quotes its first words."""
    found, conversation = [], about.conversation
    for name, text in about.texts.items():
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
            if learn.data.source not in TEXTS:
                turn = recite_prompt(cue)
            turn = with_title(about.titles, name, turn)
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


def _probes(spec: EvalSpec, learn: DocumentsLearn, about: EvalSubjects) -> list[EvalQuestion]:
    """Return the probes; each is asked over the cartridge of one context, in turn."""
    if not spec.probes:
        return []
    patients = [] if learn.data.source in TEXTS else _others(learn)
    if patients:
        # The chart is in the user's turn, to test whether the model can still read one there.
        asked = interleave(
            [
                [replace(_choice(q, learn), text=f"{p.document} {_choice(q, learn).text}")
                 for q in p.questions]
                for p in patients
            ]
        )  # fmt: skip
    else:
        asked = read_questions(str(GENERAL), {"general": ""}, "")
    found, names = [], list(about.texts)
    plain = replace(about, titles={})  # they are about none of the documents
    for i, question in enumerate(asked[: spec.probes]):
        over = names[i % len(names)]
        document = about.layout.documents[over]
        found.append(_item(replace(question, document=document), over, plain))
    return found


def _formats(about: EvalSubjects) -> Iterator[tuple[FormatPrompt, EvalQuestion]]:
    """Yield the format prompts; each is asked over the cartridge of one context, in turn."""
    plain, names = replace(about, titles={}), list(about.texts)
    for i, prompt in enumerate(FORMATS):
        context = names[i % len(names)]
        question = UserQuestion(f"format/{prompt.id}", about.layout.documents[context], prompt.text)
        yield prompt, _item(question, context, plain, known=False)


def _others(learn: DocumentsLearn) -> list[Patient]:
    """Return patients outside the run: of another clinic, or later ones of the file."""
    data = learn.data
    if data.path is not None:
        return load_patients(data.path)[data.patients :]
    return read_patients(data.model_copy(update={"seed": data.seed + 1}))
