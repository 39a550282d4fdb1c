"""Rules of logits, against values worked by hand and against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from cartridge_forge.learning.draws import draw, leave_likely, penalise
from cartridge_forge.protocols.logit_rules import LogitRules
from cartridge_forge.protocols.step import Sampling

LOGITS = (2.0, -1.0, 0.5, 3.0, 0.0)
PROMPT, RESPONSE = (0, 1), (3, 3, 2)


def changed(rules: LogitRules, prompt: tuple[int, ...] = PROMPT) -> list[float]:
    logits = torch.tensor(LOGITS)
    penalise(logits, rules, prompt, RESPONSE)
    return logits.tolist()


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (LogitRules(), LOGITS),
        (LogitRules(bias=((4, 100.0), (0, -100.0))), (-98.0, -1.0, 0.5, 3.0, 100.0)),
        # Tokens 0, 1, 2, 3 were read or sampled: halved above 0, doubled below.
        (LogitRules(repetition_penalty=2.0), (1.0, -2.0, 0.25, 1.5, 0.0)),
        # Token 3 was sampled twice, token 2 once; the prompt does not count.
        (LogitRules(frequency_penalty=0.5), (2.0, -1.0, 0.0, 2.0, 0.0)),
        (LogitRules(presence_penalty=0.5), (2.0, -1.0, 0.0, 2.5, 0.0)),
        (LogitRules(frequency_penalty=-0.5, presence_penalty=1.0), (2.0, -1.0, 0.0, 3.0, 0.0)),
        # Bias first: token 2 is above 0 with it or without, token 1 only with it.
        (
            LogitRules(bias=((1, 2.0),), repetition_penalty=2.0, presence_penalty=0.25),
            (1.0, 0.5, 0.0, 1.25, 0.0),
        ),
    ],
)
def test_bias_and_penalties_by_hand(rules: LogitRules, expected: tuple[float, ...]) -> None:
    assert changed(rules) == pytest.approx(expected)


def test_ids_without_a_logit_are_left_alone() -> None:
    rules = LogitRules(bias=((9, 5.0),), repetition_penalty=2.0)
    assert changed(rules, prompt=(9,)) == pytest.approx((2.0, -1.0, 0.25, 1.5, 0.0))


@pytest.mark.parametrize(
    ("min_p", "temperature", "left"),
    [
        # Probabilities 8/16, 4/16, 2/16, 1/16, 1/16: shares of the likeliest 1, 1/2, 1/4, 1/8, 1/8.
        (0.0, 1.0, {0, 1, 2, 3, 4}),
        (0.2, 1.0, {0, 1, 2}),
        (0.3, 1.0, {0, 1}),
        (1.0, 1.0, {0}),
        # At temperature 2 the shares are their roots: 0.71, 0.5, 0.35, 0.35.
        (0.3, 2.0, {0, 1, 2, 3, 4}),
        (0.4, 2.0, {0, 1, 2}),
        (0.9, 0.0, {0, 1, 2, 3, 4}),
    ],
)
def test_min_p_by_hand(min_p: float, temperature: float, left: set[int]) -> None:
    logits = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).log()
    leave_likely(logits, LogitRules(min_p=min_p), temperature)
    assert {i for i, value in enumerate(logits.tolist()) if value > -math.inf} == left


def test_min_p_goes_before_top_p() -> None:
    """Of 8, 4, 2, 1, 1 in 16 min_p 0.2 leaves 8, 4, 2; top_p 0.6 of these 14 leaves 8 and 4,
    drawn as 2 to 1. Of all 16, 0.6 would leave the same, and 0.85 a third token."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]]).log()
    leave_likely(logits[0], LogitRules(min_p=0.2), 1.0)

    def drawn(top_p: float, *uniforms: float) -> list[int]:
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        return draw(logits.expand(len(uniforms), -1), numbers, Sampling(top_p=top_p)).tolist()

    assert drawn(0.6, 0.66, 0.67, 0.999) == [0, 1, 1]
    assert drawn(0.85, 0.999) == [1]  # 12 of 14 are more than 0.85; of 16 they would not be
    assert drawn(1.0, 0.57, 0.58, 0.85, 0.86, 0.999) == [0, 1, 1, 2, 2]


@given(
    seed=st.integers(0, 10_000),
    penalty=st.floats(0.25, 4.0),
    min_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.3, 3.0),
)
def test_penalties_and_min_p_are_those_of_transformers(
    seed: int, penalty: float, min_p: float, temperature: float
) -> None:
    stream = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(20, generator=stream)
    ids = torch.randint(20, (9,), generator=stream).tolist()

    mine = logits.clone()
    penalise(mine, LogitRules(repetition_penalty=penalty), ids[:4], ids[4:])
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[None].clone())
    assert torch.equal(mine, theirs[0])

    leave_likely(mine, LogitRules(min_p=min_p), temperature)
    shares = (theirs[0] / temperature).softmax(-1)
    if ((shares / shares.max() - min_p).abs() > 1e-5).all():  # else rounding decides
        kept: Tensor = MinPLogitsWarper(min_p)(torch.tensor([ids]), theirs / temperature)
        assert torch.equal(mine.isinf(), kept[0].isinf())
