"""Exact verified text of the tiny reader is drawn from its distribution over the document.

Of five fixed prompts behind a chart, 100,000 responses of two tokens each are made by the machinery
of verified rollouts: a short cartridge proposes, the document's teacher verifies. Joint counts are
compared with the product of the probabilities that the reader's own forward passes over the
document give, by a chi-square test.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any, cast

import pytest
import torch
from rooms.training.rsa_runs import learn, tasks
from rooms.training.verified_room import Room
from small_run import ROOT
from torch import Tensor

from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv, score_over
from cartridge_forge.plugins.documents.study.verified import opened
from cartridge_forge.protocols.step import (
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    stream_seed,
)
from cartridge_forge.training.records import StudyPrompt

pytestmark = [pytest.mark.timeout(7200)]

DRAWS, BATCH = 100_000, 2_000  # of each prompt, and of one rollout
# Of those prompts that the reader was trained on it knows the answer's first words: these it
# continues in many ways, and the cartridge, which has 24 of the chart's 126 tokens, in others.
PROMPTS = ("the patient", "<|end|>", "catheter and", "the dose of", "the patient is")
LEAST_EXPECTED = 5.0  # cells with less are joined
READER = str(ROOT / "models" / "clinic-reader")
CARTRIDGE, DOCUMENT = PrefixRef("cartridge/p", 1), PrefixRef("document/p", 0)


def joint(model: Any, kv: Tensor, prompt: tuple[int, ...], ends: frozenset[int]) -> Tensor:
    """The probabilities [V, V] of two tokens; of a first one that ends a response, [V, 0] has the
    whole."""
    tokens = model.tokens
    first = [Sample("s", "p", prompt, (0,), (), ())]
    begin = score_over(model, first, {"p": kv}, 4096)[0, :tokens].double().softmax(-1)
    rows = []
    for start in range(0, tokens, 100):
        texts = [
            Sample(f"{t}", "p", prompt, (t, 0), (), ())
            for t in range(start, min(start + 100, tokens))
        ]
        logits = score_over(model, texts, {"p": kv}, 4096)[1::2, :tokens]
        rows.append(logits.double().softmax(-1))
    after = torch.cat(rows)
    ended = torch.zeros(tokens, dtype=torch.double)
    ended[0] = 1.0
    for end in ends:
        after[end] = ended
    return begin[:, None] * after


def p_value(counts: Counter[tuple[int, ...]], probabilities: Tensor) -> tuple[float, int]:
    """The chi-square test of joint counts, rare cells joined; the p-value and the cells."""
    draws = counts.total()
    expected = probabilities * draws
    cells = (expected >= LEAST_EXPECTED).nonzero().tolist()
    wanted = [float(expected[a, b]) for a, b in cells]
    seen = [float(counts[a, b]) for a, b in cells]
    wanted.append(draws - sum(wanted))
    seen.append(draws - sum(seen))
    if wanted[-1] < LEAST_EXPECTED:  # the rest of all joins the least of the others
        rest_wanted, rest_seen = wanted.pop(), seen.pop()
        least = wanted.index(min(wanted))
        wanted[least] += rest_wanted
        seen[least] += rest_seen
    e, o = torch.tensor(wanted, dtype=torch.double), torch.tensor(seen, dtype=torch.double)
    statistic = ((o - e) ** 2 / e).sum()
    freedom = torch.tensor((len(e) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2)), len(e)


def test_two_tokens_of_exact_text_are_drawn_as_the_document_draws_them() -> None:
    model, tokenizer = load_model(READER).eval(), load_tokenizer(READER)
    plain = learn(seed=5).model_dump(exclude_defaults=True)
    plain["rollout"]["verify"] = {"rule": "exact", "block": 2}
    spec = type(learn()).model_validate(plain)
    about = tasks(tokenizer, spec)
    document = document_kv(model, about.documents["patient_01"])
    prefixes = {CARTRIDGE: document[..., :24, :].contiguous(), DOCUMENT: document}
    outcomes: dict[str, tuple[float, int, float]] = {}
    for text in PROMPTS:
        prompt = tuple(tokenizer(text, add_special_tokens=False).input_ids)
        room = Room(model, prefixes, DOCUMENT, about.end_ids)
        sampling = opened(spec, cast("Any", room), about.end_ids)
        assert sampling is not None
        counts: Counter[tuple[int, ...]] = Counter()
        accepted = judged = 0.0
        for start in range(0, DRAWS, BATCH):
            batch = [
                StudyPrompt(
                    "patient_01", "recite",
                    GenerateRequest(
                        f"{text}/{draw}", prompt, CARTRIDGE, Sampling(max_tokens=2),
                        stream_seed(f"{text}/{draw}"),
                    ),
                    "p", ("patient_01",), text,
                )
                for draw in range(start, min(start + BATCH, DRAWS))
            ]  # fmt: skip
            rollout = asyncio.run(
                sampling.rollout(0, batch, room.generate, lambda role, samples: None)
            )
            counts.update((*s.response_ids, 0)[:2] for s in rollout.samples)
            accepted += rollout.verified["accepted"]
            judged += rollout.verified["judged"]
        p, cells = p_value(counts, joint(model, document, prompt, about.end_ids))
        outcomes[text] = (p, cells, accepted / judged)
        sys.stdout.write(f"{text!r}: p {p:.4f}, {cells} cells, {accepted / judged:.3f} accepted\n")
        sys.stdout.flush()
    # Bonferroni's correction for five prompts.
    assert min(p for p, _, _ in outcomes.values()) > 0.01 / len(PROMPTS), outcomes
    # The test is of distributions that differ, over many outcomes.
    assert max(share for _, _, share in outcomes.values()) < 0.9, outcomes
    assert min(cells for _, cells, _ in outcomes.values()) > 20, outcomes
