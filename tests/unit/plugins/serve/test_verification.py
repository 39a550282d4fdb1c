"""The document's word on an answer, from scores worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cartridge_forge.plugins.chat.wire.openai_chat import DraftInfo, VerifyInfo
from cartridge_forge.plugins.decoding.verified.cost import (
    H200,
    MachinePeaks,
    ServedLoad,
    best_draft,
    kept_tokens,
    pass_seconds,
)
from cartridge_forge.plugins.serve.engine.verification import (
    AcceptedShares,
    ServedDocument,
    VerifyPlan,
    checked,
    document_ref,
    header_of,
    scoring_request,
)
from cartridge_forge.protocols.spec.model import ShapeSpec
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


# Weights: 2 x 2 x (2 x 1 + 2 x 1) = 16 of attention, 3 x 2 x 3 = 18 of the MLP, 2 x 5 = 10 of the
# head: 44. A token's keys and values: 2 x 2 = 4.
TINY = ShapeSpec(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=3, vocab=5)
# Llama-3.2-3B: 3.2e9 weights in products, 114,688 bytes of KV a token.
THREE_B = ShapeSpec(
    layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128_256
)


def test_a_pass_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    load = ServedLoad(rows=3, documents=2, document=100, cartridge=10, row_tokens=20)
    # 3 x 4 tokens, each 2 x 44 + 4 x 1 x 2 x (100 + 20) = 1048 FLOPs: 12,576.
    flops_bound = MachinePeaks("slow", flops=1.0, bandwidth=1e9)
    assert pass_seconds(TINY, 2, flops_bound, load, 4, 100) == 12_576
    # 44 weights, 4 x (2 x 100 + 3 x 20) = 1,040 of KV: 1,084 numbers of 2 bytes.
    bytes_bound = MachinePeaks("far", flops=1e9, bandwidth=1.0)
    assert pass_seconds(TINY, 2, bytes_bound, load, 4, 100) == 2_168
    slow_start = replace(bytes_bound, pass_seconds=100.0)
    assert pass_seconds(TINY, 2, slow_start, load, 4, 100) == 2_268


def test_a_round_keeps_what_is_accepted_and_one_in_place_of_what_is_not() -> None:
    assert kept_tokens(1, 0.0) == 1.0  # the refused one is replaced
    assert kept_tokens(4, 0.5) == 1.875  # 1 + 1/2 + 1/4 + 1/8
    assert kept_tokens(8, 1.0) == 8.0


def test_the_best_draft_by_hand() -> None:
    # By bytes alone: the document's pass reads 44 + 4 x 1,000 = 4,044 numbers, the draft's
    # 44 + 4 x 10 = 84. With everything accepted 16 tokens take 16 x 84 + 4,044 = 5,388 for 64,704.
    peaks = MachinePeaks("far", flops=1e18, bandwidth=1.0)
    load = ServedLoad(rows=1, documents=1, document=1000, cartridge=10, row_tokens=0)
    sure = best_draft(TINY, 1, peaks, load, 1.0)
    assert (sure.block, sure.gain) == (16, pytest.approx(64_704 / 5_388))
    # Nothing accepted: a round of one costs 84 more than the document alone.
    never = best_draft(TINY, 1, peaks, load, 0.0)
    assert (never.block, never.gain) == (1, pytest.approx(4_044 / 4_128))
    assert sure.pays
    assert not never.pays


def test_it_pays_over_many_long_documents_and_not_for_a_row_or_a_shared_one() -> None:
    """64 streams of 12,000 tokens read 88 GB of KV a token against 6.4 GB of weights."""
    own_documents = ServedLoad(64, 64, 12_000, 512, 256)
    gains = {
        "own": best_draft(THREE_B, 2, H200, own_documents, 0.8).gain,
        "shared": best_draft(THREE_B, 2, H200, replace(own_documents, documents=1), 0.8).gain,
        "one": best_draft(THREE_B, 2, H200, ServedLoad(1, 1, 12_000, 512, 256), 0.8).gain,
    }
    assert gains["own"] > 2 > 1.2 > gains["one"]
    assert gains["shared"] < 1
    assert best_draft(THREE_B, 2, H200, own_documents, 0.95).gain > gains["own"]
