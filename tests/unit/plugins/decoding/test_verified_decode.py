"""Drafted answers are the document's own: to the token, or in distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from serving_setup import model
from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.draws import DecodeState, new_row
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.decoding.verified.decode import VerifiedBatch, VerifiedRow, check_draft
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import ResponseGrammar
from cartridge_forge.protocols.step import (
    Completion,
    Draft,
    GenerateRequest,
    PrefixRef,
    Sampling,
    StopCondition,
)

END = frozenset({2})
TIE = 1e-4  # between log-probabilities: passes of other shapes round otherwise


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple(
        torch.randint(6, 1400, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    )


@cache
def kv(seed: int, tokens: int) -> Tensor:
    return document_kv(model(), (1, *ids(seed, tokens - 1)))


@cache
def untrained(tokens: int) -> Tensor:
    """Return a cartridge of noise."""
    layers, heads, size = model().kv_shape
    noise = torch.Generator().manual_seed(3)
    return torch.randn((layers, 2, heads, tokens, size), generator=noise)


DOCUMENTS = {"short": (1, 40), "long": (2, 700), "same": (3, 300)}
DRAFTS = {
    "first": lambda name: kv(*DOCUMENTS[name])[..., :30, :].contiguous(),
    "long": lambda name: kv(9, 600),
    "noise": lambda name: untrained(48),
    "document": lambda name: kv(*DOCUMENTS[name]),
}


def request(number: int, document: str, **more: object) -> GenerateRequest:
    sampling = more.pop("sampling", Sampling(temperature=0.0, max_tokens=16 + number % 5))
    return GenerateRequest(
        f"r{number}", ids(100 + number, 1 + number % 7), PrefixRef(f"document/{document}", 0),
        sampling, number, **more,  # type: ignore[arg-type]  # of a test's own words
    )  # fmt: skip


def alone(requests: Sequence[GenerateRequest]) -> list[Completion]:
    return generate(
        model(), requests, lambda ref: kv(*DOCUMENTS[ref.name.partition("/")[2]]), END,
        lambda tokens: " ".join(map(str, tokens)),
    )  # fmt: skip


def row(one: GenerateRequest, draft: str, block: int = 4) -> VerifiedRow:
    document = one.prefix.name.partition("/")[2]
    state = new_row(one, model().vocabulary, lambda tokens: " ".join(map(str, tokens)))
    return VerifiedRow(state, block, kv(*DOCUMENTS[document]), DRAFTS[draft](document))


def drafted(rows: Sequence[VerifiedRow], parts: int = 1) -> list[Completion]:
    """Decode rows that join in so many parts, a step apart."""
    batch = VerifiedBatch(model(), END)
    for part in range(parts):
        batch.add(rows[part::parts])
        batch.step()
    while batch.live:
        batch.step()
    return [one.completion() for one in rows]


def tied(one: GenerateRequest, ours: Completion, theirs: Completion) -> bool:
    """Whether two greedy answers part at two tokens that the document finds as likely."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    (first, second, *_) = theirs.top_logprobs[at]
    return first[1] - second[1] <= TIE


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_answers_are_those_of_the_document_alone(draft: str) -> None:
    requests = [
        request(number, document, top_logprobs=2)
        for number, document in enumerate([*DOCUMENTS] * 12)
    ]
    rows = [row(one, draft, 1 + number % 8) for number, one in enumerate(requests)]
    ties = 0
    for one, ours, theirs in zip(requests, drafted(rows, 3), alone(requests), strict=True):
        if ours.token_ids != theirs.token_ids:
            assert tied(one, ours, theirs), (ours.token_ids, theirs.token_ids)
            ties += 1
            continue
        assert ours.finish_reason == theirs.finish_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TIE)
        assert [[t for t, _ in at] for at in ours.top_logprobs] == [
            [t for t, _ in at] for at in theirs.top_logprobs
        ]
    assert ties <= 1


def test_a_draft_of_the_document_itself_is_accepted_and_noise_is_not() -> None:
    requests = [request(number, "same") for number in range(8)]
    whole, noise = ([row(r, draft, 4) for r in requests] for draft in ("document", "noise"))
    answers = drafted(whole)
    assert [c.token_ids for c in answers] == [c.token_ids for c in drafted(noise)]
    for one in whole:
        assert one.accepted == len(one.state.tokens)
        assert one.verifications == -(-len(one.state.tokens) // 4)
    assert sum(r.accepted for r in noise) < sum(r.proposed for r in noise)
    assert all(c.proposed >= c.accepted and c.verifications for c in answers)


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=20), Sampling(0.7, 0.9, 40, 20)])
def test_a_seed_gives_the_same_tokens_whatever_is_proposed_at_a_time(sampling: Sampling) -> None:
    requests = [request(n, "long", sampling=sampling) for n in range(6)]
    answers = [
        [c.token_ids for c in drafted([row(r, "first", block) for r in requests], parts)]
        for block, parts in ((1, 1), (3, 2), (8, 3), (16, 1))
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize("draft", ["first", "noise"])
def test_sampled_answers_are_distributed_as_the_documents(draft: str) -> None:
    """The first two tokens of 4,000 answers against the probabilities of all 16 pairs that top_k 4
    leaves, computed from the document's own logits."""
    sampling = Sampling(temperature=3.0, top_k=4, max_tokens=2)
    prompt, document = ids(55, 5), kv(*DOCUMENTS["same"])

    def probabilities(text: tuple[int, ...]) -> dict[int, float]:
        probe = GenerateRequest(
            "p", text, PrefixRef("document/same", 0), Sampling(0.0, max_tokens=1), 0,
            top_logprobs=4,
        )  # fmt: skip
        (one,) = alone([probe])
        weights = [(t, torch.tensor(lp / 3.0).exp().item()) for t, lp in one.top_logprobs[0]]
        return {t: w / sum(w for _, w in weights) for t, w in weights}

    first = probabilities(prompt)
    joint = {(a, b): first[a] * p for a in first for b, p in probabilities((*prompt, a)).items()}
    count = 4000
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, 1000):
        rows = [
            VerifiedRow(
                DecodeState(
                    one := GenerateRequest(
                        f"s{n}", prompt, PrefixRef("document/same", 0), sampling, n, logprobs=False
                    ),
                    one.prefix, new_row(one, model().vocabulary, None).uniforms,
                ),
                2, document, DRAFTS[draft]("same"),
            )
            for n in range(start, start + 1000)
        ]  # fmt: skip
        counts.update(tuple(c.token_ids) for c in drafted(rows))
    ended = {pair for pair in counts if len(pair) < 2}
    assert not ended
    assert set(counts) <= set(joint)
    expected = {pair: share * count for pair, share in joint.items()}
    pairs = [pair for pair in joint if expected[pair] >= 5]
    rare = [pair for pair in joint if expected[pair] < 5]
    cells = [([pair], expected[pair]) for pair in pairs]
    cells.append((rare, sum(expected[pair] for pair in rare)))
    seen = [sum(counts[pair] for pair in members) for members, _ in cells]
    statistic = sum(
        (n - mean) ** 2 / mean for n, (_, mean) in zip(seen, cells, strict=True) if mean
    )
    freedom = torch.tensor((len(cells) - 1 - (not rare)) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    assert len(pairs) >= 8
    assert p_value > 0.01


def test_stops_lengths_and_cancelled_rows_end_where_the_document_alone_does() -> None:
    requests = [
        request(number, "same", sampling=Sampling(0.0, max_tokens=12)) for number in range(4)
    ]
    (answer, *_) = alone(requests)
    until = StopCondition(strings=(f" {answer.token_ids[5]} {answer.token_ids[6]}",))
    stopped = request(0, "same", sampling=Sampling(0.0, max_tokens=12), until=until)
    (theirs,), (ours,) = alone([stopped]), drafted([row(stopped, "first", 8)])
    assert (ours.token_ids, ours.finish_reason, ours.ended_by) == (
        theirs.token_ids, "until", theirs.ended_by,
    )  # fmt: skip
    batch, rows = VerifiedBatch(model(), END), [row(one, "first", 3) for one in requests]
    batch.add(rows)
    rows[1].state.reason = "cancelled"
    while batch.live:
        batch.step()
    assert rows[1].completion().token_ids == ()
    assert rows[2].completion().token_ids == alone(requests)[2].token_ids


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (
            {"draft": Draft(PrefixRef("cartridge/a", 1), 0)},
            "draft.block 0; give it a number from 1",
        ),
        ({"draft": Draft(PrefixRef("cartridge/a", 1), 17)}, "draft.block 17"),
        ({"prompt_logprobs": True}, "prompt_logprobs and a draft"),
        ({"grammar": ResponseGrammar("regex", "a")}, "grammar and a draft"),
    ],
)
def test_what_cannot_be_verified_is_refused(more: dict[str, object], match: str) -> None:
    draft = Draft(PrefixRef("cartridge/a", 1), 4)
    with pytest.raises(DataError, match=match):
        check_draft(request(1, "same", **{"draft": draft, **more}))
