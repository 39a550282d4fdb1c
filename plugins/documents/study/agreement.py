"""Hold out self-study questions, and measure agreement with the teacher's answers to them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.rollouts import hash_of, mean_nll
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.statistics.intervals import (
    AT_LEAST_ZERO,
    SHARE,
    mean_interval,
    wilson_interval,
)
from cartridge_forge.plugins.statistics.results import Agreement
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.records.run_files import MeasuredAccuracy
from cartridge_forge.protocols.step import Completion
from cartridge_forge.training.records import interleave


@dataclass(frozen=True)
class StudyQuestion:
    """Hold a self-study question: `messages` end with it. `answer_ids` is the answer of model B,
    if any; `teacher_ids` and `teacher_logprobs` are B's likeliest tokens at each place, if
    known."""

    key: str
    document: str
    kind: str
    messages: tuple[AgentMessage, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    teacher_ids: tuple[tuple[int, ...], ...] = ()
    teacher_logprobs: tuple[tuple[float, ...], ...] = ()

    @property
    def text(self) -> str:
        """Return the words of the whole conversation, which are the question's alone without
        earlier rounds."""
        return "\n".join(m.content for m in self.messages)


@dataclass(frozen=True)
class HeldOutQuestion:
    """Hold a held-out question with the teacher's answer: `logprobs` and `likeliest` are the
    teacher's log-probability and likeliest token at each place of the answer."""

    studied: StudyQuestion
    bare_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[int, ...]


def split(
    studied: Iterable[StudyQuestion], share: float
) -> tuple[dict[str, list[StudyQuestion]], list[StudyQuestion]]:
    """Return (training questions by document, held-out questions with the documents in turn).

    Of every document the `share` of questions whose words hash lowest is held out, rounded up, but
    not all. So the order of rows and other documents never change the split.
    """
    by_document: dict[str, list[StudyQuestion]] = {}
    for s in studied:
        by_document.setdefault(s.document, []).append(s)
    training, held_out = {}, []
    for name, pool in sorted(by_document.items()):
        ranked = sorted(pool, key=lambda s: hashlib.sha256(f"{name}\n{s.text}".encode()).digest())
        count = min(len(ranked) - 1, math.ceil(share * len(ranked)))
        held_out.append(ranked[:count])
        kept = {s.key for s in ranked[:count]}
        training[name] = [s for s in pool if s.key not in kept]
    return training, interleave(held_out)


def compared(
    exams: Sequence[HeldOutQuestion], completions: Sequence[Completion]
) -> tuple[list[float], list[float]]:
    """Return for each question KL(T || S), nats a token, and the share of tokens at which teacher
    and student have the same likeliest token."""
    kl, same = [], []
    for exam, c in zip(exams, completions, strict=True):
        n = len(exam.answer_ids)
        read, likeliest = c.prompt_logprobs[-n:], c.prompt_likeliest[-n:]
        kl.append(math.fsum(t - s for t, s in zip(exam.logprobs, read, strict=True)) / n)
        same.append(sum(a == b for a, b in zip(exam.likeliest, likeliest, strict=True)) / n)
    return kl, same


def agreement(
    exams: Sequence[HeldOutQuestion], completions: Sequence[Completion]
) -> MeasuredAccuracy:
    """Return the mean KL(T || S), nats a token, and the share of tokens at which both have the same
    likeliest token; intervals are of the mean over questions, by Student's t."""
    kl, same = compared(exams, completions)
    tokens = sum(len(exam.answer_ids) for exam in exams)
    top1, of_kl = fmean(same), fmean(kl)
    low, high = mean_interval(same, SHARE) or (0.0, 1.0)
    kl_low, kl_high = mean_interval(kl, AT_LEAST_ZERO) or (of_kl, of_kl)
    return MeasuredAccuracy(
        accuracy=top1,
        ci95=[low, high],
        n=len(exams),
        parse_failures=0,
        agreement=Agreement(kl=of_kl, kl_ci95=[kl_low, kl_high], top1=top1, tokens=tokens),
    )


def answered(asked: Sequence[UserQuestion], responses: Sequence[str]) -> MeasuredAccuracy:
    """Return the share of questions answered correctly (by option, or SQuAD's exact match) with its
    Wilson interval, and the mean F1."""
    scores = [q.scores(r) for q, r in zip(asked, responses, strict=True)]
    right = sum(exact == 1.0 for exact, _, _ in scores)
    low, high = wilson_interval(right, len(scores))
    return MeasuredAccuracy(
        accuracy=right / len(scores),
        ci95=[low, high],
        n=len(scores),
        parse_failures=sum(not gave for _, _, gave in scores),
        f1=fmean(score for _, score, _ in scores),
    )


def teachers_answer(
    exam: HeldOutQuestion,
    read: Completion,
    hashes: Mapping[str, str],
    decode: Callable[[Sequence[int]], str],
) -> Answer:
    """Return the record of a held-out question whose expected answer is the teacher's own, which an
    arm read. `hashes` has each document's `hash_of`."""
    s = exam.studied
    return Answer(
        id=s.key, fact=s.text, document=s.document, document_hash=hashes[s.document],
        question_hash=hash_of(s.text, *map(str, exam.answer_ids)),
        expected=decode(exam.answer_ids), nll=mean_nll(read, len(exam.answer_ids)),
    )  # fmt: skip


def users_answer(
    q: UserQuestion, completion: Completion, text: str, nll: float | None, hashes: Mapping[str, str]
) -> Answer:
    """Return the record of an arm's answer to a user's question."""
    return Answer(
        id=q.id, fact=q.fact, document=q.document, document_hash=hashes[q.document],
        question_hash=hash_of(q.text, *q.answers, q.choice.correct if q.choice else ""),
        text=text, answer=q.read(text), expected=q.expected, right=q.scores(text)[0], nll=nll,
        tokens=len(completion.token_ids),
    )  # fmt: skip
