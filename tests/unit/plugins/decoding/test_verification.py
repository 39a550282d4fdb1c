"""Verification of blocks: the exact rule against computed probabilities, the threshold by hand."""

import math

import pytest
import torch
from torch import Tensor

from cartridge_forge.learning.draws import draw, uniforms
from cartridge_forge.plugins.decoding.verified.rules import (
    LONGEST_BLOCK,
    Verdict,
    best_block,
    sampling_probabilities,
    verification_draws,
    verify_exact,
    verify_threshold,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling

DRAWS = 100_000
V = 4
# The second token's distribution depends on the first: rows are the first token.
TEACHER_FIRST = torch.tensor([0.5, 0.3, 0.2, 0.0])
STUDENT_FIRST = torch.tensor([0.1, 0.2, 0.3, 0.4])
TEACHER_NEXT = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.0, 0.9, 0.05, 0.05], [0.4, 0.3, 0.2, 0.1]]
)
STUDENT_NEXT = torch.tensor(
    [[0.1, 0.7, 0.1, 0.1], [0.4, 0.0, 0.3, 0.3], [0.5, 0.3, 0.2, 0.0], [0.4, 0.3, 0.2, 0.1]]
)


def pairs(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def none(places: int) -> Tensor:
    return torch.zeros(places, 2, dtype=torch.float64)


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Return the probability of so large a chi-square statistic."""
    possible = expected > 0
    assert int(observed[~possible].sum()) == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def two_tokens(sampling: Sampling, length: int) -> Tensor:
    """Return DRAWS texts [DRAWS, 2] that blocks of `length` tokens give."""
    random = torch.Generator().manual_seed(11)
    own = torch.rand(DRAWS, 2, generator=random, dtype=torch.float64)
    draws = torch.rand(DRAWS, 3, 2, generator=random, dtype=torch.float64)
    first_logits = STUDENT_FIRST.log().expand(DRAWS, V)
    first = draw(first_logits, own[:, 0], sampling)  # [DRAWS]
    proposed = first[:, None]
    student = first_logits[:, None]  # [DRAWS, length, V]
    teacher = [TEACHER_FIRST.log().expand(DRAWS, V), TEACHER_NEXT[first].log()]
    if length == 2:
        second = draw(STUDENT_NEXT[first].log(), own[:, 1], sampling)
        proposed = torch.stack([first, second], 1)
        student = torch.stack([first_logits, STUDENT_NEXT[first].log()], 1)
        teacher.append(torch.zeros(DRAWS, V))  # of the third token, which nobody looks at
    verdicts = verify_exact(
        torch.stack(teacher, 1).flatten(0, 1), student.flatten(0, 1), proposed.tolist(), sampling,
        draws[:, : length + 1].flatten(0, 1),
    )  # fmt: skip
    assert 0 < sum(v.accepted == length for v in verdicts) < DRAWS
    texts = []
    for block, verdict in zip(proposed.tolist(), verdicts, strict=True):
        assert verdict.token is not None
        texts.append([*block[: verdict.accepted], verdict.token][:2])
    short = [i for i, text in enumerate(texts) if len(text) == 1]
    firsts = torch.tensor([texts[i][0] for i in short])
    # The next block of those begins at the second place: one token, drawn by the student.
    seconds = draw(STUDENT_NEXT[firsts].log(), own[short, 1], sampling)
    read = torch.stack([TEACHER_NEXT[firsts].log(), torch.zeros(len(short), V)], 1)
    later = verify_exact(
        read.flatten(0, 1), STUDENT_NEXT[firsts].log(), seconds[:, None].tolist(), sampling,
        draws[short, 1:].flatten(0, 1),
    )  # fmt: skip
    for i, token, verdict in zip(short, seconds.tolist(), later, strict=True):
        assert verdict.token is not None
        texts[i].append(token if verdict.accepted else verdict.token)
    return torch.tensor(texts)


@pytest.mark.parametrize(
    ("sampling", "length"),
    [
        (Sampling(), 1),
        (Sampling(), 2),
        (Sampling(temperature=0.5, top_k=3), 2),
        (Sampling(temperature=2.0, top_p=0.8), 2),
        (Sampling(temperature=1.5, top_k=3, top_p=0.9), 1),
    ],
)
def test_two_tokens_by_the_exact_rule_are_distributed_as_the_teachers(
    sampling: Sampling, length: int
) -> None:
    """100,000 texts of two tokens against the product of the teacher's probabilities. A token of
    the block of one is followed by a further one, one of the block of two by the student's."""
    texts = two_tokens(sampling, length)
    observed = torch.bincount(texts[:, 0] * V + texts[:, 1], minlength=V * V).double()
    first = sampling_probabilities(TEACHER_FIRST.log()[None], sampling)[0]  # [V]
    expected = DRAWS * first[:, None] * sampling_probabilities(TEACHER_NEXT.log(), sampling)
    assert p_value(observed, expected.flatten()) > 0.01 / 5


def test_truncated_probabilities_by_hand() -> None:
    """0.5, 0.3, 0.2 at top_p 0.7: the third is behind a mass of 0.8, so 5/8 and 3/8 remain; at
    temperature 0.5 squares: 25, 9, 4 of 38."""
    logits = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    cases: list[tuple[Sampling, list[float]]] = [
        (Sampling(top_p=0.7), [0, 5 / 8, 3 / 8]),
        (Sampling(temperature=0.5), [4 / 38, 25 / 38, 9 / 38]),
        (Sampling(top_k=1), [0, 1, 0]),
        (Sampling(temperature=0), [0, 1, 0]),
    ]
    for sampling, expected in cases:
        probs = sampling_probabilities(logits, sampling)[0]
        torch.testing.assert_close(probs, torch.tensor(expected, dtype=torch.float64))


def test_the_share_accepted_is_the_overlap_of_both_distributions() -> None:
    """Sum of min(p, q) at the first place: 0.1 + 0.2 + 0.2 + 0 = 0.5, within 4 standard errors."""
    p, q = TEACHER_FIRST.log().expand(2 * DRAWS, V), STUDENT_FIRST.log().expand(DRAWS, V)
    own, draws = uniforms(3, DRAWS), verification_draws(3, 0, 2 * DRAWS)
    blocks = draw(q, own, Sampling())[:, None].tolist()
    accepted = sum(v.accepted for v in verify_exact(p, q, blocks, Sampling(), draws))
    assert abs(accepted / DRAWS - 0.5) < 4 * math.sqrt(0.25 / DRAWS)


def test_a_token_that_the_teacher_excludes_is_always_refused_and_never_drawn() -> None:
    """Token 3 has p = 0 and q = 0.4; p - q is positive at 0 and 1 alone: 0.4 and 0.1."""
    p, q = TEACHER_FIRST.log().expand(2, V), STUDENT_FIRST.log()[None]
    for accept, replace, token in ((0.0, 0.0, 0), (0.5, 0.79, 0), (0.999, 0.81, 1), (0, 0.9999, 1)):
        draws = pairs((accept, replace), (0, 0))
        assert verify_exact(p, q, [[3]], Sampling(), draws) == [Verdict(0, token)]


def test_a_draw_at_the_end_of_the_weights_is_a_token_that_has_some() -> None:
    """The largest number below 1 draws the last token with weight, 1, and not 2 or 3."""
    p = torch.tensor([[0.4, 0.6, 0.0, 0.0]]).log()
    largest = pairs((0.0, 1 - 2**-53))
    assert verify_exact(p, torch.zeros(0, V), [[]], Sampling(), largest) == [Verdict(0, 1)]


def test_equal_distributions_accept_everything_and_the_teacher_adds_a_token() -> None:
    """The uniform 0.5 of [0, 0.9, 0.05, 0.05] draws token 1."""
    logits = torch.stack([TEACHER_FIRST, TEACHER_NEXT[1], TEACHER_NEXT[2]]).log()
    draws = pairs((0.9999, 0.5), (0.9999, 0.5), (0.3, 0.5))
    assert verify_exact(logits, logits[:2], [[1, 2]], Sampling(), draws) == [Verdict(2, 1)]


def test_disjoint_distributions_refuse_everything() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).log().expand(2, V)
    q = torch.tensor([[0.0, 0.0, 0.5, 0.5]]).log()
    for token in (2, 3):
        draws = pairs((0.0, 0.6), (0.0, 0.0))
        assert verify_exact(p, q, [[token]], Sampling(), draws) == [Verdict(0, 1)]


def test_blocks_of_different_lengths_are_verified_together() -> None:
    """An empty block, one refused at its second place, one accepted: each as alone."""
    greedy = Sampling(temperature=0)
    best = [2, 0, 1, 3, 3, 0]
    teacher = torch.nn.functional.one_hot(torch.tensor(best), V).float()
    verdicts = verify_exact(teacher, torch.zeros(3, V), [[], [0, 2], [3]], greedy, none(6))
    assert verdicts == [Verdict(0, 2), Verdict(1, 1), Verdict(1, 0)]
    verdicts = verify_exact(teacher, torch.zeros(3, V), [[], [0, 1], [3]], greedy, none(6))
    assert verdicts == [Verdict(0, 2), Verdict(2, 3), Verdict(1, 0)]


def test_greedy_accepts_while_the_likeliest_token_is_equal() -> None:
    greedy = Sampling(temperature=0)
    teacher = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    student = torch.zeros(2, 3)

    def verdict(block: list[int], tie: float = 0.0) -> Verdict:
        return verify_exact(teacher, student, [block], greedy, none(3), tie)[0]

    assert verdict([1, 0]) == Verdict(2, 1, ties=1)
    assert verdict([1, 2]) == Verdict(1, 0)
    assert verdict([2, 0]) == Verdict(0, 1)
    # Within 1.5 the first place, 2 over 1, is a tie; the second, 3 over 0, is none.
    assert verdict([1, 2], tie=1.5) == Verdict(1, 0, ties=1)


def test_greedy_blocks_write_what_the_teacher_writes_token_by_token() -> None:
    """A teacher and a student whose next token is a fixed random function of the last one."""
    random = torch.Generator().manual_seed(5)
    teacher = torch.randn(50, 50, generator=random)
    alone = [0]
    while len(alone) < 40:
        alone.append(int(teacher[alone[-1]].argmax()))
    student = teacher.clone()
    student[alone[-3]] *= -1  # the student is wrong after one of the tokens
    text, refused, accepted = [0], 0, 0
    while len(text) < 40:
        proposed: list[int] = []
        while len(proposed) < 5:
            proposed.append(int(student[[*text, *proposed][-1]].argmax()))
        read = [text[-1], *proposed]
        (verdict,) = verify_exact(
            teacher[read], student[read[:-1]], [proposed], Sampling(temperature=0), none(6)
        )
        assert verdict.token is not None
        text += [*proposed[: verdict.accepted], verdict.token]
        refused += verdict.accepted < 5
        accepted += verdict.accepted
    assert text[:40] == alone
    assert refused
    assert accepted


def test_the_threshold_refuses_the_first_token_below_it() -> None:
    """Probabilities 0.5, 0.04, 0.01: the second is below 0.05 and the uniform 0.6 draws token 1 of
    [0.5, 0.3, 0.16, 0.04]; the third is never judged."""
    rows = [[0.5, 0.3, 0.1, 0.1], [0.5, 0.3, 0.16, 0.04], [0.97, 0.01, 0.01, 0.01], [0.25] * 4]
    teacher, draws = torch.tensor(rows).log(), pairs((0, 0), (0, 0.6), (0, 0), (0, 0))

    def verdict(block: list[int], below: float) -> Verdict:
        return verify_threshold(teacher, [block], below, Sampling(), draws)[0]

    assert verdict([0, 3, 1], 0.05) == Verdict(1, 1)
    assert verdict([0, 3, 1], 0.03) == Verdict(2, 0)  # 0.04 is not below it, 0.01 is
    assert verdict([0, 3, 1], 0.005) == Verdict(3)
    assert verdict([3, 3, 1], 0.5) == Verdict(0, 0)
    two = verify_threshold(teacher[[0, 0, 1]], [[], [1]], 0.5, Sampling(), none(3))
    assert two == [Verdict(0), Verdict(0, 0)]


def test_the_threshold_is_of_temperature_1_and_the_draw_of_the_sampling() -> None:
    """Token 3 has 0.04 at temperature 1 and is refused at 0.05, though at temperature 10 it has
    0.21; top_k 1 draws the likeliest, whatever the uniform."""
    teacher = torch.tensor([[0.5, 0.3, 0.16, 0.04]]).log().expand(2, V)
    draws = pairs((0, 0.99), (0, 0))
    hot, top = Sampling(temperature=10.0), Sampling(top_k=1)
    assert verify_threshold(teacher, [[3]], 0.05, hot, draws) == [Verdict(0, 3)]
    assert verify_threshold(teacher, [[3]], 0.05, top, draws) == [Verdict(0, 0)]


def test_a_token_that_the_student_could_not_have_drawn_is_an_error() -> None:
    p = TEACHER_FIRST.log().expand(2, V)
    with pytest.raises(DataError, match="token 3 of a block has probability 0"):
        verify_exact(p, p[:1], [[3]], Sampling(), none(2))


def test_logits_that_do_not_fit_the_blocks_are_an_error() -> None:
    with pytest.raises(DataError, match=r"blocks of \[1\] tokens have 3 rows of logits"):
        verify_threshold(torch.zeros(3, V), [[1]], 0.05, Sampling(), none(2))
    with pytest.raises(DataError, match="a block has the token id 4 at 0"):
        verify_threshold(torch.zeros(2, V), [[4]], 0.05, Sampling(), none(2))
    with pytest.raises(DataError, match="over one vocabulary"):
        verify_exact(torch.zeros(2, V), torch.zeros(1, 3), [[1]], Sampling(), none(2))


def test_the_draws_of_a_place_do_not_depend_on_the_blocks() -> None:
    whole = verification_draws(7, 0, 9)
    assert torch.equal(torch.cat([verification_draws(7, 0, 4), verification_draws(7, 4, 5)]), whole)
    assert not torch.equal(verification_draws(8, 0, 9), whole)
    assert not torch.isin(uniforms(7, 9), whole).any()


@pytest.mark.parametrize(
    ("accepted", "ratio", "further", "length"),
    [
        (0.0, 1.0, False, 1),  # what follows the first token is always dropped
        (1.0, 1.0, False, LONGEST_BLOCK),
        (1.0, 0.0, True, 1),  # free verification: 2/1, 3/2, 4/3
        (0.5, 1.0, False, 1),  # 1/2, 1.5/3, 1.75/4: the shorter of equal ones
        (0.5, 1.0, True, 1),  # 1.5/2, 1.75/3
        (0.8, 10.0, False, 7),  # 6: 3.689/16 = 0.2306, 7: 3.951/17 = 0.2324, 8: 4.161/18 = 0.2312
    ],
)
def test_the_best_block(accepted: float, ratio: float, further: bool, length: int) -> None:
    assert best_block(accepted, ratio, further) == length


def test_the_best_block_grows_with_the_share_accepted_and_the_cost_of_a_verification() -> None:
    assert best_block(0.9, 10.0, False) > 7 > best_block(0.6, 10.0, False)
    assert best_block(0.8, 20.0, False) > 7 > best_block(0.8, 2.0, False)
