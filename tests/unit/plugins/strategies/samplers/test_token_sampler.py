"""Asks in exact tokens, with the shipped model's tokenizer and a generator that is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.strategies.samplers.sampler import (
    ABILITIES,
    PartialResponse,
    SampleRequest,
)
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)
from cartridge_forge.protocols.streams import refused
from cartridge_forge.protocols.teacher_replay import AgentMessage
from cartridge_forge.training.renderer import ChatRenderer

MODEL = Path(__file__).parents[5] / "models" / "clinic-reader"
PREFIX = PrefixRef("cartridge/p", 3)
DOCUMENT = "chart of anna weber. note 1: surgery, 14 march. sodium 41 mmol."


@pytest.fixture(scope="module")
def conversation() -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(MODEL)), {"p": DOCUMENT})


class Scripted:
    def __init__(self, conversation: ChatRenderer, *says: str) -> None:
        self.says, self.conversation = says, conversation
        self.requests: list[GenerateRequest] = []

    async def __call__(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.requests += requests
        found = []
        for r, words in zip(requests, self.says, strict=True):
            ids = self.conversation.ids_of(words)
            tops = tuple(((i, -0.5), (0, -2.0)) for i in ids)
            found.append(
                Completion(r.id, ids, (-0.5,) * len(ids), (3,) * len(ids), "until",
                           ended_by=".", top_logprobs=tops, dropped=2)
            )  # fmt: skip
        return found


def ask(*begun: PartialResponse) -> SampleRequest:
    return SampleRequest(
        "q/0", (AgentMessage("user", "what is the sodium?"),), Sampling(max_tokens=9), 5,
        *(begun or (PartialResponse(),)), StopCondition(strings=(".",)), 2,
    )  # fmt: skip


def test_an_ask_is_the_opening_after_the_document_s_head(conversation: ChatRenderer) -> None:
    generate = Scripted(conversation, "the chart says sodium 41 mmol.")
    sampler = TokenSampler(generate, conversation, "p", PREFIX)
    (answer,) = asyncio.run(sampler([ask()]))
    (r,) = generate.requests
    assert r == GenerateRequest(
        "q/0", conversation.opening("p", (AgentMessage("user", "what is the sodium?"),)), PREFIX,
        Sampling(max_tokens=9), 5, top_logprobs=2, until=StopCondition(strings=(".",)),
    )  # fmt: skip
    assert answer.text == conversation.decode(answer.token_ids)
    assert answer.text.strip() == "the chart says sodium 41 mmol."
    assert (answer.tokens, answer.prompt_tokens) == (len(answer.token_ids) + 2, len(r.prompt_ids))
    assert answer.top_logprobs[0][0] == (conversation.decode(answer.token_ids[:1]), -0.5)
    assert sampler.abilities == ABILITIES


def test_a_response_goes_on_from_its_own_ids_and_words_after_them(
    conversation: ChatRenderer,
) -> None:
    first = conversation.ids_of("the chart says")
    text = conversation.decode(first)
    generate = Scripted(conversation, " 41 mmol.")
    sampler = TokenSampler(generate, conversation, "p", PREFIX)
    asyncio.run(sampler([ask(PartialResponse(f"{text} sodium", first))]))
    (r,) = generate.requests
    opening = conversation.opening("p", (AgentMessage("user", "what is the sodium?"),))
    assert r.prompt_ids == (*opening, *first, *conversation.ids_of(" sodium"))
    assert r.first_draw == len(first) + 1


def test_words_that_are_not_the_ids_are_refused(conversation: ChatRenderer) -> None:
    sampler = TokenSampler(Scripted(conversation, "x"), conversation, "p", PREFIX)
    with pytest.raises(DataError, match="give the text of the ids"):
        asyncio.run(
            sampler([ask(PartialResponse("another", conversation.ids_of("the chart says")))])
        )


def test_a_prefix_that_nobody_holds_is_told(conversation: ChatRenderer) -> None:
    async def none(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [refused(r, "cartridge p version 3 is not held here") for r in requests]

    with pytest.raises(PublishError, match="q/0: cartridge p version 3"):
        asyncio.run(TokenSampler(none, conversation, "p", PREFIX)([ask()]))
