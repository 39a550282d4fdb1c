"""Rules of logits, against values worked by hand and against transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from cartridge_forge.learning.draws import draw, leave_likely, penalise
from cartridge_forge.plugins.decoding.stopping import UNFINISHED, StopChecker, StopMatch, TokenText
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import LogitRules
from cartridge_forge.protocols.step import Sampling, StopCondition

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


def decode(ids: Sequence[int]) -> str:
    """Tokens are bytes, as in the rarest words of a byte-level tokenizer."""
    return bytes(ids).decode("utf-8", errors="replace")


def fed(until: StopCondition, text: str, top: Sequence[float] = (-1.0,)) -> StopMatch | None:
    stopper = StopChecker(until, decode)
    for token in text.encode():
        if cut := stopper.add(token, top):
            return cut
    return None


@given(st.text())
def test_text_comes_in_whole_characters_and_adds_up(text: str) -> None:
    said = TokenText(decode)
    pieces = [said.add(token) for token in text.encode()]
    if UNFINISHED not in text:
        assert all(UNFINISHED not in piece for piece in pieces)
        assert said.text == "".join(pieces) == text
        assert said.ends[-1:] == ([len(text)] if text else [])
    assert "".join(pieces) + said.rest() == text


def test_half_a_character_is_held_back_until_the_end() -> None:
    said = TokenText(decode)
    assert [said.add(token) for token in "aé€".encode()[:-1]] == ["a", "", "é", "", ""]
    assert said.ends == [1, 1, 2, 2, 2]
    assert (said.rest(), said.text) == (UNFINISHED, f"aé{UNFINISHED}")


@pytest.mark.parametrize(
    ("until", "text", "cut"),
    [
        (StopCondition(strings=("\n\n",)), "one\n\ntwo", StopMatch(5, "\n\n")),
        (StopCondition(strings=("zz", "wo")), "one two", StopMatch(7, "wo")),
        (StopCondition(strings=("x",)), "one", None),
        # Nothing is looked at before `after` tokens; what stood there then counts at once.
        (StopCondition(strings=(".",), after=6), "a. b. c", StopMatch(6, ".")),
        (
            StopCondition(patterns=(r"answer: \d+ ",)),
            "the answer: 42 or",
            StopMatch(15, r"answer: \d+ "),
        ),
        # Before a match: its first token goes too, and so does all behind.
        (StopCondition(patterns=("wait",), before=True), "so. wait, no", StopMatch(4, "wait")),
        (
            StopCondition(strings=("wait",), before=True, after=5),
            "so. wait, no wait",
            StopMatch(13, "wait"),
        ),
        # What would leave nothing is passed over.
        (StopCondition(strings=("wait",), before=True), "wait. ok", None),
        (StopCondition(strings=("é",), before=True), "aéb", StopMatch(1, "é")),
    ],
)
def test_ends_by_hand(until: StopCondition, text: str, cut: StopMatch | None) -> None:
    assert fed(until, text) == cut


def test_confidence_ends_at_the_first_full_window_below_the_floor() -> None:
    """Means of 2: 4, 2, 1, .5: the floor of 2 is not below 2."""
    stopper = StopChecker(StopCondition(window=2, floor=2.0, top=2), decode)
    confidences = [4.0, 4.0, 0.0, 2.0, 9.0]
    cuts = [stopper.add(97, (-c + 0.5, -c - 0.5, -99.0)) for c in confidences]
    assert cuts == [None, None, None, StopMatch(4, "confidence"), None]


def test_a_wrong_pattern_is_named() -> None:
    with pytest.raises(DataError, match=r"until\.patterns holds no regular expression"):
        StopChecker(StopCondition(patterns=("(",)), decode)
