"""Read a text's questions behind whatever stands in for the text, and say what it is worth there.

    gap          share of the loss of the right answers, nats a token, that it closes between no
                 document and the whole document
    kl           KL(document || stand-in), nats a token, along the greedy answers that the model
                 with the document writes itself to the same questions
    agreement    share of the tokens of those answers at which both find one token likeliest

A stand-in is a `Reader`: it reads samples and returns the distribution at each response token, so
that a prefix, passages chosen by the question, and changed weights are measured alike.

Dimensions: L layers, H_kv key/value heads, D numbers of a head, T tokens of the text, P of a
prefix, N response tokens of all samples, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.teacher import document_kv, score_over
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sample, Sampling

Reader = Callable[[Sequence[Sample]], Tensor]  # samples -> log-probabilities [N, V], float32
OWN_TOKENS = 20  # of an answer that the model with the document writes
LEAST_GAP = 0.05  # nats a token: of a smaller gap a share says nothing


@dataclass(frozen=True)
class BenchQuestion:
    """Hold a question and its right answer as they are read behind the text and without it."""

    text: str
    with_text: Sample
    bare: Sample


@dataclass(frozen=True)
class BenchText:
    """Hold a text with its ids (the conversation's head, T tokens) and their KV
    [L, 2, H_kv, T, D], its questions, and what the model with and without the text makes of them:
    the `replies` that it writes with it, its log-probabilities there `taught` [N, V], and both
    losses in nats a token."""

    name: str
    text: str
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
        return [q.with_text for q in self.questions]


@dataclass(frozen=True)
class CompressionOutcome:
    """Hold what a stand-in is worth."""

    loss: float
    gap: float
    kl: float
    agreement: float


def tokens_of(samples: Sequence[Sample]) -> int:
    """Return the tokens of the longest sample."""
    return max(len(s.prompt_ids) + len(s.response_ids) for s in samples)


def prefix_reader(model: LanguageModel, kv: Tensor) -> Reader:
    """Return the reader behind one prefix [L, 2, H_kv, P, D]."""
    prefix = kv.to(model.dtype)
    return lambda samples: score_over(
        model, samples, {s.cartridge: prefix for s in samples}, tokens_of(samples)
    ).log_softmax(-1)


def answer_loss(reader: Reader, samples: Sequence[Sample]) -> float:
    """Return the mean over samples of their mean loss, nats a token."""
    logprobs = reader(samples)
    ids = torch.tensor([i for s in samples for i in s.response_ids], device=logprobs.device)
    read = logprobs.gather(1, ids[:, None])[:, 0]
    return fmean(-one.mean().item() for one in read.split([len(s.response_ids) for s in samples]))


def excerpt(tokenizer: Any, text: str, most: int) -> str:
    """Return the text's first `most` tokens."""
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: spans[most - 1][1]] if len(spans) > most else text


def read_text(
    model: LanguageModel, tokenizer: Any, name: str, text: str, pairs: Sequence[tuple[str, str]],
    most: int,
) -> BenchText:  # fmt: skip
    """Return a text with at most `most` of its (question, answer) pairs, evenly spaced. Raises
    DataError where the text does not help the model with them."""
    renderer = ChatRenderer(tokenizer, {name: text})
    count = min(most, len(pairs))
    read = tuple(
        _question(renderer, name, i, *pairs[len(pairs) * i // count]) for i in range(count)
    )
    ids, bare_ids = renderer.head(name), renderer.head(None)
    kv, bare_kv = document_kv(model, ids), document_kv(model, bare_ids)
    sampling = Sampling(0.0, max_tokens=OWN_TOKENS)
    requests = [
        GenerateRequest(q.with_text.id, q.with_text.prompt_ids, PrefixRef(name, 0), sampling, 0)
        for q in read
    ]
    answers = generate(model, requests, lambda _: kv, renderer.end_ids)
    replies = tuple(
        Sample(r.id, name, r.prompt_ids, a.token_ids, (), ())
        for r, a in zip(requests, answers, strict=True)
    )
    none = answer_loss(prefix_reader(model, bare_kv), [q.bare for q in read])
    document = answer_loss(prefix_reader(model, kv), [q.with_text for q in read])
    if none - document < LEAST_GAP:
        raise DataError(
            f"the model answers the questions about {name} no better with the text (loss "
            f"{document:.2f}) than without it ({none:.2f}): nothing can be compared there; take "
            "another model, or other questions"
        )
    taught = prefix_reader(model, kv)(replies)
    return BenchText(name, text, ids, kv, bare_kv, read, replies, taught, none, document)


def _question(
    renderer: ChatRenderer, name: str, number: int, question: str, answer: str
) -> BenchQuestion:
    """Return a question with its right answer in the model's chat template."""
    message, wording = (AgentMessage("user", question),), renderer.saying(answer)
    with_text, bare = (
        Sample(str(number), name, renderer.opening(about, message), wording, (), ())
        for about in (name, None)
    )
    return BenchQuestion(question, with_text, bare)


def outcome(text: BenchText, reader: Reader) -> CompressionOutcome:
    """Return what a stand-in for the text is worth, by its reader."""
    loss = answer_loss(reader, text.right)
    read = reader(text.replies)
    return CompressionOutcome(
        loss,
        (text.none_loss - loss) / (text.none_loss - text.document_loss),
        (text.taught.exp() * (text.taught - read)).sum(-1).mean().item(),
        (text.taught.argmax(-1) == read.argmax(-1)).float().mean().item(),
    )
