"""The document's word on an answer, from scores worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.chat.wire.openai_chat import DraftInfo, VerifyInfo
from cartridge_forge.plugins.serve.engine.verification import (
    AcceptedShares,
    ServedDocument,
    VerifyPlan,
    checked,
    document_ref,
    header_of,
    scoring_request,
)
from cartridge_forge.protocols.step import (
    Completion,
    Draft,
    GenerateRequest,
    PrefixRef,
    Sampling,
)

WORDS = {1: "the", 2: " ward", 3: " is", 4: " urology", 5: ""}
DOCUMENT = ServedDocument((7, 8), document_ref((7, 8)))


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[id] for id in ids)


def scores(*places: tuple[float, int, float]) -> Completion:
    """Of a prompt of two tokens and a response: probability, likeliest token, its probability."""
    of_prompt = (0.5, 9, 0.5)
    rows = [of_prompt, *places]
    return Completion(
        "r/after", (9,), (), (0,), "length", tuple(math.log(p) for p, _, _ in rows),
        prompt_likeliest=tuple(t for _, t, _ in rows),
        prompt_top_logprobs=tuple(((t, math.log(p)),) for _, t, p in rows),
    )  # fmt: skip


def test_tokens_are_refused_below_the_threshold_and_told_where_another_is_likelier() -> None:
    scored = scores((0.9, 1, 0.9), (0.4, 3, 0.5), (0.01, 4, 0.8), (0.05, 4, 0.9), (0.6, 5, 0.6))
    choice = checked(2, (1, 2, 3, 4, 5), scored, 0.05, decode, WORDS.__getitem__)
    assert choice.plain() == {
        "index": 2, "tokens": 5, "accepted": 0.8, "agreed": 0.6, "first_refused": 2,
        "changed": [
            {"index": 1, "offset": 3, "token": " ward", "probability": pytest.approx(0.4),
             "document_token": " is", "document_probability": pytest.approx(0.5),
             "refused": False},
            {"index": 2, "offset": 8, "token": " is", "probability": pytest.approx(0.01),
             "document_token": " urology", "document_probability": pytest.approx(0.8),
             "refused": True},
        ],
    }  # fmt: skip


def test_an_answer_of_no_token_has_no_share() -> None:
    choice = checked(0, (), scores(), 0.05, decode, WORDS.__getitem__)
    assert (choice.tokens, choice.accepted, choice.agreed, choice.changed) == (0, None, None, [])
    info = VerifyInfo(mode="after", document_tokens=2, below=0.05, choices=[choice])
    assert header_of(VerifyPlan("after", ("a", 1), DOCUMENT), info) == "after"


def test_the_header_weighs_choices_by_their_tokens() -> None:
    plan = VerifyPlan("after", ("a", 1), DOCUMENT)
    one = checked(0, (1, 2), scores((0.9, 1, 0.9), (0.01, 3, 0.9)), 0.05, decode, WORDS.get)  # type: ignore[arg-type]  # all are there
    two = checked(1, (1,) * 6, scores(*[(0.9, 1, 0.9)] * 6), 0.05, decode, WORDS.get)  # type: ignore[arg-type]  # all are there
    info = VerifyInfo(mode="after", document_tokens=2, below=0.05, choices=[one, two])
    assert header_of(plan, info) == "after; below=0.05; tokens=8; accepted=0.875; agreed=0.875"
    assert header_of(plan, None) == "after"
    draft = DraftInfo(block=8, proposed=16, accepted=11, verifications=2)
    exact = VerifyInfo(mode="exact", document_tokens=2, draft=draft)
    drafted = VerifyPlan("exact", ("a", 1), DOCUMENT, Draft(PrefixRef("cartridge/a", 1), 8))
    assert header_of(drafted, exact) == "exact; proposed=16; accepted=11"


def test_a_response_is_read_behind_its_prompt_over_the_document() -> None:
    call = GenerateRequest("r/0", (3, 4), PrefixRef("cartridge/a", 1), Sampling(), 5)
    scoring = scoring_request(call, (1, 2), DOCUMENT)
    assert scoring.prompt_ids == (3, 4, 1, 2)
    assert (scoring.prefix, scoring.document_ids) == (document_ref((7, 8)), (7, 8))
    assert scoring.prefix.name.startswith("document/sha256-")
    assert scoring.prefix != document_ref((7, 9))


def test_the_share_accepted_begins_with_a_guess_and_follows_what_is_verified() -> None:
    shares = AcceptedShares()
    assert shares.get(("a", 1)) == pytest.approx(0.7)
    shares.add(("a", 1), 32, 32)
    assert shares.get(("a", 1)) == pytest.approx((32 + 0.7 * 32) / 64)
    for _ in range(100):
        shares.add(("a", 1), 0, 100)
    assert shares.get(("a", 1)) < 0.05
    assert shares.get(("a", 2)) == pytest.approx(0.7)
