"""Read a text's questions behind whatever stands in for the text, and say what it is worth there.

    gap          share of the loss of the right answers, nats a token, that it closes between no
                 document and the whole document
    kl           KL(document || stand-in), nats a token, along the greedy answers that the model
                 with the document writes itself to the same questions
    agreement    share of the tokens of those answers at which both find one token likeliest
    f1           of the answers that are written greedily behind it, over the words of the best
                 accepted answer
    refusals     what declines in those answers; right for a question that the text does not answer

A stand-in is a `Reader`: a prefix, passages chosen by the question, and changed weights are
measured alike. Where some questions are unanswerable, all are asked with `INSTRUCTION`, and `gap`
and `f1` are those of the answerable ones.

Dimensions: L layers, H_kv key/value heads, D numbers of a head, T tokens of the text, P of a
prefix, N response tokens of all samples, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.teacher import document_kv, score_over
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.study.question_files import UserQuestion
from cartridge_forge.plugins.strategies.answers.declines import declines
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

OWN_TOKENS = 20  # of an answer that is written
LEAST_GAP = 0.05  # nats a token: of a smaller gap a share says nothing
REFUSAL = "The text does not say."
INSTRUCTION = f"Answer in a few words. If the text does not tell the answer, write: {REFUSAL}"


@dataclass(frozen=True)
class Reader:
    """Read and write behind a stand-in: `read` returns the log-probabilities [N, V] (float32) at
    samples' response tokens, `write` the ids of greedy answers to samples' prompts, of at most
    OWN_TOKENS each, up to one of the ending ids that it is given."""

    read: Callable[[Sequence[Sample]], Tensor]
    write: Callable[[Sequence[Sample], frozenset[int]], list[tuple[int, ...]]]


@dataclass(frozen=True)
class BenchQuestion:
    """Hold a question, the `messages` that ask it, and its right answer, or the refusal, as they
    are read behind the text and without it."""

    question: UserQuestion
    messages: tuple[AgentMessage, ...]
    with_text: Sample
    bare: Sample

    @property
    def answerable(self) -> bool:
        """Return whether the text answers the question."""
        return self.question.wording is not None


@dataclass(frozen=True)
class BenchText:
    """Hold a text with its ids (the conversation's head, T tokens) and their KV
    [L, 2, H_kv, T, D], its questions, and what the model with and without the text makes of them:
    the `replies` that it writes with it, its log-probabilities there `taught` [N, V], and both
    losses in nats a token, over the answerable questions."""

    name: str
    text: str
    renderer: ChatRenderer
    ids: tuple[int, ...]
    kv: Tensor
    bare_kv: Tensor
    questions: tuple[BenchQuestion, ...]
    replies: tuple[Sample, ...]
    taught: Tensor
    none_loss: float
    document_loss: float

    @property
    def right(self) -> list[Sample]:
        """Return the right answers after their questions, as read behind the text."""
        return [q.with_text for q in self.questions if q.answerable]


@dataclass(frozen=True)
class BenchAnswer:
    """Hold what is made of a question: the `loss` of its right answer, or of the refusal, in nats a
    token; the `text` of the written answer; its `f1`, None for an unanswerable question; and
    whether it declines."""

    id: str
    kind: str
    loss: float
    f1: float | None
    declines: bool
    text: str


@dataclass(frozen=True)
class CompressionOutcome:
    """Hold what a stand-in is worth; `answers` only where it has written them."""

    loss: float
    gap: float
    kl: float
    agreement: float
    f1: float | None = None
    answers: tuple[BenchAnswer, ...] = ()


def tokens_of(samples: Sequence[Sample]) -> int:
    """Return the tokens of the longest sample."""
    return max(len(s.prompt_ids) + len(s.response_ids) for s in samples)


def routed_reader(
    model: LanguageModel, prefixes: Mapping[str, Tensor], route: Callable[[Sample], Sample]
) -> Reader:
    """Return the reader of each sample as `route` gives it, behind the prefix [L, 2, H_kv, P, D] of
    the name that is then its `cartridge`."""
    kvs = {name: kv.to(model.dtype) for name, kv in prefixes.items()}

    def read(samples: Sequence[Sample]) -> Tensor:
        routed = [route(s) for s in samples]
        return score_over(model, routed, kvs, tokens_of(routed)).log_softmax(-1)

    def write(samples: Sequence[Sample], end_ids: frozenset[int]) -> list[tuple[int, ...]]:
        sampling = Sampling(0.0, max_tokens=OWN_TOKENS)
        requests = [
            GenerateRequest(s.id, s.prompt_ids, PrefixRef(s.cartridge, 0), sampling, 0)
            for s in map(route, samples)
        ]
        answers = generate(model, requests, lambda ref: kvs[ref.name], end_ids)
        return [answer.token_ids for answer in answers]

    return Reader(read, write)


def prefix_reader(model: LanguageModel, kv: Tensor) -> Reader:
    """Return the reader behind one prefix [L, 2, H_kv, P, D]."""
    return routed_reader(model, {"": kv}, lambda sample: replace(sample, cartridge=""))


def answer_losses(reader: Reader, samples: Sequence[Sample]) -> list[float]:
    """Return each sample's mean loss, nats a token."""
    logprobs = reader.read(samples)
    ids = torch.tensor([i for s in samples for i in s.response_ids], device=logprobs.device)
    read = logprobs.gather(1, ids[:, None])[:, 0]
    return [-one.mean().item() for one in read.split([len(s.response_ids) for s in samples])]


def excerpt(tokenizer: Any, text: str, most: int) -> str:
    """Return the text's first `most` tokens."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: spans[most - 1][1]] if len(spans) > most else text


def read_text(
    model: LanguageModel, tokenizer: Any, name: str, text: str, questions: Sequence[UserQuestion],
    most: int,
) -> BenchText:  # fmt: skip
    """Return a text with at most `most` of its questions, evenly spaced. Raises DataError where the
    text does not help the model with them."""
    renderer = ChatRenderer(tokenizer, {name: text})
    count = min(most, len(questions))
    instruction = INSTRUCTION if any(q.wording is None for q in questions) else ""
    read = tuple(
        _question(renderer, name, questions[len(questions) * i // count], instruction)
        for i in range(count)
    )
    right = [q for q in read if q.answerable]
    if not right:
        raise DataError(f"{name} has no question that can be answered: nothing can be compared")
    ids, bare_ids = renderer.head(name), renderer.head(None)
    kv, bare_kv = document_kv(model, ids), document_kv(model, bare_ids)
    reader = prefix_reader(model, kv)
    answers = reader.write([q.with_text for q in read], renderer.end_ids)
    replies = tuple(
        replace(q.with_text, response_ids=ids_of_answer)
        for q, ids_of_answer in zip(read, answers, strict=True)
    )
    none = fmean(answer_losses(prefix_reader(model, bare_kv), [q.bare for q in right]))
    document = fmean(answer_losses(reader, [q.with_text for q in right]))
    if none - document < LEAST_GAP:
        raise DataError(
            f"the model answers the questions about {name} no better with the text (loss "
            f"{document:.2f}) than without it ({none:.2f}): nothing can be compared there; take "
            "another model, or other questions"
        )
    taught = reader.read(replies)
    return BenchText(name, text, renderer, ids, kv, bare_kv, read, replies, taught, none, document)


def _question(
    renderer: ChatRenderer, name: str, question: UserQuestion, instruction: str
) -> BenchQuestion:
    """Return a question with its right answer, or the refusal, in the model's chat template."""
    words = f"{question.text}\n{instruction}".strip()
    *earlier, _ = question.messages
    messages = (*earlier, AgentMessage("user", words))
    wording = renderer.saying(question.wording or REFUSAL)
    with_text, bare = (
        Sample(question.id, name, renderer.opening(about, messages), wording, (), ())
        for about in (name, None)
    )
    return BenchQuestion(question, messages, with_text, bare)


def outcome(text: BenchText, reader: Reader, *, answered: bool = False) -> CompressionOutcome:
    """Return what a stand-in for the text is worth, by its reader; where `answered`, with its
    answers to the questions."""
    losses = answer_losses(reader, [q.with_text for q in text.questions])
    loss = fmean(x for x, q in zip(losses, text.questions, strict=True) if q.answerable)
    read = reader.read(text.replies)
    answers = _written_answers(text, reader, losses) if answered else ()
    scores = [a.f1 for a in answers if a.f1 is not None]
    return CompressionOutcome(
        loss,
        (text.none_loss - loss) / (text.none_loss - text.document_loss),
        (text.taught.exp() * (text.taught - read)).sum(-1).mean().item(),
        (text.taught.argmax(-1) == read.argmax(-1)).float().mean().item(),
        fmean(scores) if scores else None,
        answers,
    )


def _written_answers(
    text: BenchText, reader: Reader, losses: Sequence[float]
) -> tuple[BenchAnswer, ...]:
    """Return the answers that are written greedily behind a stand-in."""
    ids = reader.write([q.with_text for q in text.questions], text.renderer.end_ids)
    answers = []
    for q, loss, token_ids in zip(text.questions, losses, ids, strict=True):
        words = text.renderer.decode(token_ids).strip()
        score = q.question.words(words)[1] if q.answerable else None
        refused = declines(words, q.question.text)
        answers.append(BenchAnswer(q.question.id, q.question.kind, loss, score, refused, words))
    return tuple(answers)
