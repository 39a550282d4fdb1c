"""Scores of steps, by hand: four numbers that are four."""

import asyncio
from collections.abc import Sequence
from math import exp, log

import pytest
from scripted_sampler import Scripted, Word

from cartridge_forge.plugins.strategies.catalog import parse, run
from cartridge_forge.plugins.strategies.problem import Judge, StrategyProblem
from cartridge_forge.plugins.strategies.samplers.sampler import ABILITIES, SampleResult
from cartridge_forge.plugins.strategies.scorers import (
    NOTHING,
    ScorerName,
    entropy,
    gap,
    perplexity,
    scorer,
    sequence_logprob,
    token_judge,
)
from cartridge_forge.plugins.strategies.steps import StepPath
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage

ASKED = (AgentMessage("system", "be brief"), AgentMessage("user", "what is it?"))


def step(*places: Sequence[float], text: str = "a b") -> SampleResult:
    """A step whose places have these likeliest probabilities, the first of each drawn."""
    tops = tuple(tuple((str(i), log(p)) for i, p in enumerate(place)) for place in places)
    return SampleResult(
        text, len(places), 0, "until", logprobs=tuple(t[0][1] for t in tops), top_logprobs=tops
    )


def question(judge: Judge | None = None) -> StrategyProblem:
    return StrategyProblem(ASKED, "general", 1, Sampling(), judge=judge)


def scores(name: ScorerName, *paths: StepPath, judge: Judge | None = None) -> list[float]:
    async def score() -> list[float]:
        return await scorer(name, question(judge)).score(paths)

    return asyncio.run(score())


def test_the_four_numbers_of_a_step() -> None:
    said = step((0.5, 0.5), (0.8, 0.1))
    assert sequence_logprob(said) == pytest.approx(log(0.5) + log(0.8))
    assert perplexity(said) == pytest.approx(-exp(-(log(0.5) + log(0.8)) / 2))
    # The second place leaves a tenth to tokens that are not told.
    second = -(0.8 * log(0.8) + 2 * 0.1 * log(0.1))
    assert entropy(said) == pytest.approx(-(log(2) + second) / 2)
    assert gap(said) == pytest.approx((0.0 + 0.7) / 2)
    even = step((0.5, 0.5), (0.5, 0.5))
    found = [measure(even) for measure in (sequence_logprob, perplexity, entropy, gap)]
    assert found == pytest.approx([-1.386294, -2.0, -0.693147, 0.0], abs=1e-6)


def test_each_measure_ranks_in_its_own_way() -> None:
    long = step((0.9, 0.05), (0.9, 0.05), (0.9, 0.05))
    short = step((0.75, 0.25))
    torn = step((0.7,))  # the rest is spread over tokens that are not told
    paths = [StepPath((long,)), StepPath((short,)), StepPath((torn,))]
    assert [
        max(range(3), key=scores(name, *paths).__getitem__)
        for name in ("sequence_logprob", "perplexity", "gap")
    ] == [1, 0, 0]
    assert scores("entropy", *paths)[0] > scores("entropy", *paths)[1]
    # Sure of what it is not: the drawn token is the unlikely one.
    odd = SampleResult("a", 1, 0, "until", logprobs=(log(0.1),), top_logprobs=((("b", log(0.9)),),))
    assert scores("gap", StepPath((odd,))) == pytest.approx([0.9])
    assert scores("sequence_logprob", StepPath((odd,))) == [log(0.1)]


def test_a_step_without_tokens_is_worse_than_any() -> None:
    nothing = StepPath((SampleResult("", 0, 0, "until"),))
    names: tuple[ScorerName, ...] = ("sequence_logprob", "perplexity", "entropy", "gap")
    assert [scores(n, nothing) for n in names] == [[NOTHING]] * 4
    silent = StepPath((SampleResult("a", 1, 0, "until"),))
    for name in names:
        with pytest.raises(RunError, match=f"scorer {name}: the backend .* told none"):
            scores(name, silent)
    # So long as probabilities are floats, perplexity is no worse.
    hopeless = SampleResult("a", 1, 0, "until", logprobs=(-5000.0,))
    assert scores("perplexity", StepPath((hopeless,))) == [pytest.approx(NOTHING)]


def test_a_process_reward_model_reads_the_question_and_the_steps() -> None:
    read: list[str] = []

    async def judge(texts: Sequence[str]) -> list[float]:
        read.extend(texts)
        return [0.25, 0.75]

    first = step((0.5,), text="one\n\n")
    paths = [StepPath((first, step((0.5,), text="two "))), StepPath((first,))]
    assert scores("process_reward", *paths, judge=judge) == [0.25, 0.75]
    assert read == ["what is it?\n\none\n\ntwo\n\n", "what is it?\n\none\n\n"]


def test_a_token_judge_weighs_plus_against_minus() -> None:
    places = [
        ((" +", log(0.5)), ("+", log(0.1)), ("-", log(0.2))),
        (("-", log(0.9)), ("so", log(0.05))),
        (("so", log(0.9)),),
    ]
    sampler = Scripted(lambda ask: [Word("+", -1.0, places[int(ask.id[-1])])])
    judge = token_judge(sampler)

    async def judged() -> list[float]:
        return list(await judge(["a", "b", "c"]))

    found = asyncio.run(judged())
    assert found == pytest.approx([0.6 / 0.8, 0.0, 0.5])
    (asks,) = sampler.calls
    assert [a.messages[-1].content for a in asks] == ["a", "b", "c"]
    assert {(a.sampling.max_tokens, a.sampling.temperature) for a in asks} == {(1, 0.0)}


def test_what_a_scorer_lacks_is_told_before_anything_is_sampled() -> None:
    for name, ability in [("perplexity", "logprobs"), ("gap", "top_logprobs")]:
        sampler = Scripted(lambda ask: [], ABILITIES - {ability})
        strategy = parse("beam_search", {"scorer": name})
        with pytest.raises(DataError, match=f"beam_search needs .* {ability}"):
            asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=1, max_tokens=9))
    strategy = parse("best_of_n", {"scorer": "process_reward"})
    with pytest.raises(DataError, match="process_reward: got no judge"):
        asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=1, max_tokens=9))
    blind = Scripted(lambda ask: [], frozenset({"seed"}))
    with pytest.raises(DataError, match=r"process reward model needs .* top_logprobs"):
        asyncio.run(run(strategy, sampler, ASKED, form="rg", seed=1, max_tokens=9, judge=blind))
    assert sampler.calls == blind.calls == []
