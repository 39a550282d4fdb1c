"""One step of a run between two populations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from cartridge_forge.plugins.strategies.answers.extract import extract
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape, draw_parents
from cartridge_forge.plugins.strategies.rsa.populations import aggregate
from cartridge_forge.plugins.strategies.rsa.prompts import aggregation_prompt, opening_prompt
from cartridge_forge.plugins.strategies.rsa.records import (
    AggregationInput,
    JudgedCandidate,
    JudgedPopulation,
    RSAProblem,
)
from cartridge_forge.protocols.errors import DataError

SHAPE = RSAShape(M=1, N=3, K=2, T=2)
PROBLEM = RSAProblem("sum/1", "primer", "1/4 + 1/4?")
TEXTS = (r"it is \boxed{3}", r"it is \boxed{0.5}", r"\boxed{\frac{1}{2}}")


async def judge(problem: RSAProblem, texts: Sequence[str]) -> list[JudgedCandidate]:
    assert problem == PROBLEM
    return [JudgedCandidate(extract(text, "math"), float("3" not in text)) for text in texts]


def step(number: int, texts: tuple[str, ...] = ()) -> JudgedPopulation:
    standing = AggregationInput("run/0", "rsa/7", PROBLEM, number, texts)
    return asyncio.run(aggregate(standing, SHAPE, "math", judge))


def test_a_run_from_its_first_prompts_to_its_last_judgement() -> None:
    first = step(0)
    assert first == JudgedPopulation(
        (), None, (opening_prompt(PROBLEM.question, "math"),) * 3, ((),) * 3
    )
    second = step(1, TEXTS)
    assert [c.answer for c in second.candidates] == ["3", "0.5", r"\frac{1}{2}"]
    assert [c.score for c in second.candidates] == [0.0, 1.0, 1.0]
    assert second.chosen == 1  # two that are equal outvote one
    assert second.parents == draw_parents(SHAPE, 1, "rsa/7")
    assert second.prompts == tuple(
        aggregation_prompt(PROBLEM.question, [TEXTS[p] for p in own], "math")
        for own in second.parents
    )
    last = step(2, TEXTS)
    assert (last.candidates, last.chosen) == (second.candidates, 1)
    assert (last.prompts, last.parents) == ((), ())
    assert step(2, ("hm", "hm", "hm")).chosen is None


@pytest.mark.parametrize(("number", "texts"), [(0, TEXTS), (1, ()), (2, TEXTS[:2]), (3, TEXTS)])
def test_a_standing_of_another_shape_is_refused(number: int, texts: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="run/0 stands before population"):
        step(number, texts)
