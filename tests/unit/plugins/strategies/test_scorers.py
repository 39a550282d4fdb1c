"""Test the catalog of strategies, their scorers, detectors and the process of a reward model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from scripted_sampler import Scripted, Word, words
from strategy_setup import ASKED, VARIANTS, by_hand, probability, reward_model, solve
from transformers import LlamaForSequenceClassification

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.strategies.answers.extract import FORMS, Form
from cartridge_forge.plugins.strategies.catalog import STRATEGIES, parse, run
from cartridge_forge.plugins.strategies.deepconf import DeepConf
from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.judges.reward_process import score
from cartridge_forge.plugins.strategies.problem import Judge, StrategyCost, StrategyProblem
from cartridge_forge.plugins.strategies.rsa.prompts import (
    ATTEMPT_WORDS,
    PROMPT_WORDS,
    aggregation_prompt,
)
from cartridge_forge.plugins.strategies.samplers.sampler import ABILITIES, SampleResult
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenBudget
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
from cartridge_forge.plugins.strategies.search import BeamSearch
from cartridge_forge.plugins.strategies.steps import StepPath, StepSampler
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.step import Sampling

SCORERS_ASKED = (AgentMessage("system", "be brief"), AgentMessage("user", "what is it?"))


def step(*places: Sequence[float], text: str = "a b") -> SampleResult:
    """A step whose places have these likeliest probabilities, the first of each drawn."""
    tops = tuple(tuple((str(i), log(p)) for i, p in enumerate(place)) for place in places)
    return SampleResult(
        text, len(places), 0, "until", logprobs=tuple(t[0][1] for t in tops), top_logprobs=tops
    )


def question(judge: Judge | None = None) -> StrategyProblem:
    return StrategyProblem(SCORERS_ASKED, "general", 1, Sampling(), judge=judge)


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

    async def scores_of() -> list[float]:
        return list(await judge(["a", "b", "c"]))

    found = asyncio.run(scores_of())
    assert found == pytest.approx([0.6 / 0.8, 0.0, 0.5])
    (asks,) = sampler.calls
    assert [a.messages[-1].content for a in asks] == ["a", "b", "c"]
    assert {(a.sampling.max_tokens, a.sampling.temperature) for a in asks} == {(1, 0.0)}


def test_what_a_scorer_lacks_is_told_before_anything_is_sampled() -> None:
    for name, ability in [("perplexity", "logprobs"), ("gap", "top_logprobs")]:
        sampler = Scripted(lambda ask: [], ABILITIES - {ability})
        strategy = parse("beam_search", {"scorer": name})
        with pytest.raises(DataError, match=f"beam_search needs .* {ability}"):
            asyncio.run(run(strategy, sampler, SCORERS_ASKED, form="rg", seed=1, max_tokens=9))
    strategy = parse("best_of_n", {"scorer": "process_reward"})
    with pytest.raises(DataError, match="process_reward: got no judge"):
        asyncio.run(run(strategy, sampler, SCORERS_ASKED, form="rg", seed=1, max_tokens=9))
    blind = Scripted(lambda ask: [], frozenset({"seed"}))
    with pytest.raises(DataError, match=r"process reward model needs .* top_logprobs"):
        asyncio.run(
            run(strategy, sampler, SCORERS_ASKED, form="rg", seed=1, max_tokens=9, judge=blind)
        )
    assert sampler.calls == blind.calls == []


DETECTORS_ASKED = (AgentMessage("user", "why?"),)


def steps_of(
    text: str, detector: Detector, *, form: Form = "general", most: int = 100
) -> list[StepPath]:
    """The paths that sampling step by step comes to, on a model that says this text."""
    said = words(text)

    def goes_on(ask: object) -> list[object]:
        done = ask.begun.token_ids  # type: ignore[attr-defined]
        assert tuple(w.id for w in said[: len(done)]) == done
        return said[len(done) :]  # type: ignore[return-value]

    question = StrategyProblem(DETECTORS_ASKED, form, 1, Sampling(max_tokens=most))
    stepper = StepSampler(TokenBudget(Scripted(goes_on)), question, detector)  # type: ignore[arg-type]
    paths = [StepPath()]
    while paths[-1].state == "on":
        ((longer,),) = asyncio.run(stepper.sample([paths[-1]], 1, "step"))
        paths.append(longer)
    assert paths[-1].token_ids == tuple(w.id for w in said[: paths[-1].tokens])
    assert text.startswith(paths[-1].text)
    return paths[1:]


def said(paths: list[StepPath]) -> list[str]:
    return [p.steps[-1].text for p in paths]


def test_structured_steps_end_with_their_pattern() -> None:
    paths = steps_of("one two\n\nthree\n\nfour", Detector())
    assert said(paths) == ["one two\n\n", "three\n\n", "four"]
    assert [p.state for p in paths] == ["on", "on", "done"]
    assert [p.finish_reason for p in paths] == ["until", "until", "stop"]


def test_steps_have_fewest_and_most_tokens() -> None:
    # "one" and the newlines are two tokens: with three a step, they end none.
    assert said(steps_of("one\n\ntwo three\n\nfour", Detector(min_tokens=3))) == [
        "one\n\ntwo", " three\n\nfour", "",
    ]  # fmt: skip
    cut = steps_of("one two three four five", Detector(max_tokens=2))
    assert said(cut) == ["one two", " three four", " five"]
    assert [p.finish_reason for p in cut] == ["length", "length", "stop"]


def test_the_response_limit_is_over_all_steps() -> None:
    paths = steps_of("one two three four five", Detector(max_tokens=2), most=3)
    assert said(paths) == ["one two", " three"]
    assert (paths[-1].state, paths[-1].finish_reason) == ("done", "length")


@pytest.mark.parametrize(
    ("form", "text", "state", "reason"),
    [
        ("math", "so \\boxed{4} . more", "done", "until"),
        ("math", "so \\boxed{} . more", "empty", "until"),
        ("rg", "<answer>4</answer> more", "done", "until"),
        ("rg", "<answer></answer> more", "empty", "until"),
        ("clinic", "the answer is 41.5 gram. more", "done", "until"),
        ("clinic", "the answer is . more", "empty", "until"),
        ("clinic", "the answer is 41.5. more", "done", "until"),
        ("clinic", "the answer is 41.5", "done", "stop"),
        ("clinic", "the answer is", "done", "stop"),  # a genuine end is never dropped
        ("general", "answer: 4\nmore", "done", "until"),
        ("rg", "<answer></answer>", "empty", "until"),
    ],
)
def test_answers_end_the_response(form: Form, text: str, state: str, reason: str) -> None:
    (path,) = steps_of(text, Detector(), form=form)
    assert (path.state, path.finish_reason) == (state, reason)


def test_a_pattern_without_a_group_has_its_answer_behind_it() -> None:
    detector = Detector(answer_patterns=("answer:",))
    (path,) = steps_of("the answer: 4", detector)
    assert (path.text, path.state) == ("the answer:", "empty")
    # With more tokens a step, there is something behind the pattern.
    (path,) = steps_of("the answer: 4 5", detector.model_copy(update={"min_tokens": 3}))
    assert (path.text, path.state) == ("the answer: 4", "done")


def test_thinking_steps_end_before_their_marker() -> None:
    text = (
        "Let me see what it is.\n\nWait, that is so wrong. But not quite\n"
        "so be it.</think> the answer is here. So it is\n\n42"
    )
    paths = steps_of(text.replace("</think>", " </think>"), Detector(kind="thinking"))
    # "so wrong" is no new thought: the marker begins a sentence. The answer is one step.
    assert said(paths) == [
        "Let me see what it is.",
        "\n\nWait, that is so wrong.",
        " But not quite",
        "\nso be it. </think>",
        " the answer is here. So it is\n\n42",
    ]
    assert [p.state for p in paths] == ["on", "on", "on", "on", "done"]


def test_an_answer_pattern_inside_thinking_is_not_the_answer() -> None:
    paths = steps_of(
        "\\boxed{3} is it. Wait no </think> \\boxed{4}", Detector(kind="thinking"), form="math"
    )
    assert [p.state for p in paths] == ["on", "on", "done"]


@pytest.mark.parametrize(
    ("options", "words_of_it"),
    [
        ({"step_patterns": ["("]}, "detector.step_patterns: must be regular expressions"),
        ({"answer_patterns": ["x*"]}, "must match some text"),
        ({"min_tokens": 9, "max_tokens": 8}, r"detector.max_tokens: must be >= min_tokens \(9\)"),
        ({"markers": []}, "detector.markers"),
        ({"kind": "semantic"}, "'structured' or 'thinking', got 'semantic'"),
    ],
)
def test_bad_detectors_are_told(options: dict[str, object], words_of_it: str) -> None:
    with pytest.raises(DataError, match=words_of_it):
        parse("best_of_n", {"detector": options})


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_advertised_strategy_can_be_instantiated(name: str) -> None:
    strategy = parse(name)
    assert type(strategy) is STRATEGIES[name]
    assert strategy == parse(name, {})
    assert hash(strategy) == hash(parse(name))
    with pytest.raises((ValueError, dataclasses.FrozenInstanceError)):
        strategy.anything = 1  # type: ignore[attr-defined]


def test_options_are_read_as_json_has_them() -> None:
    strategy = parse(
        "beam_search",
        {"beams": 3, "aggregate": "min", "detector": {"step_patterns": [r"\n"], "min_tokens": 2}},
    )
    assert isinstance(strategy, BeamSearch)
    assert (strategy.beams, strategy.candidates, strategy.aggregate) == (3, 4, "min")
    assert strategy.detector.step_patterns == (r"\n",)
    assert parse("deepconf", {"keep_fraction": 1}) == DeepConf(keep_fraction=1.0)


@pytest.mark.parametrize(
    ("name", "options", "words_of_it"),
    [
        ("best_of_m", {}, r"got 'best_of_m'; expected .*; did you mean best_of_n\?"),
        ("x", {}, "expected one of chain_of_thought, self_consistency"),
        ("best_of_n", {"candidates": 0}, "best_of_n: option candidates: .* equal to 1, got 0"),
        ("best_of_n", {"candidates": "4"}, "option candidates: .* valid integer, got '4'"),
        ("best_of_n", {"n": 4}, "option n: there is none of this name; remove it"),
        ("deepconf", {"keep_fraction": 90}, "option keep_fraction: .* equal to 1, got 90"),
        (
            "deepconf",
            {"mode": "online", "traces": 16},
            r"option warmup: must be < traces \(16\); lower it, .* got 16",
        ),
        ("deepconf", {"measure": "median"}, "option measure: .* 'lowest_group'"),
        ("beam_search", {"aggregate": "product"}, "option scorer: must be gap or process_reward"),
        ("adaptive_scaling", {"alpha": 1.0}, "option alpha: .* less than 1"),
        ("beam_search", {"detector": {"min": 1}}, "option detector.min: there is none"),
    ],
)
def test_mistakes_are_told(name: str, options: dict[str, object], words_of_it: str) -> None:
    with pytest.raises(DataError, match=words_of_it):
        parse(name, options)


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=[name for name, _ in VARIANTS])
def test_no_strategy_samples_more_than_its_cost(variant: int) -> None:
    name, options = VARIANTS[variant]
    cost = parse(name, options).cost()
    for seed in range(5):
        _, sampler = solve(variant, seed)
        assert max(map(len, sampler.calls)) <= cost.sequences
        assert sum(map(len, sampler.calls)) <= cost.responses
        asks = [ask for call in sampler.calls for ask in call]
        read = [words_of(ask.messages) + len(ask.begun.token_ids) for ask in asks]
        assert max(read) <= words_of(ASKED) + cost.again * 30 + cost.words


def words_of(messages: Sequence[AgentMessage]) -> int:
    return sum(len(m.content.split()) for m in messages)


@pytest.mark.parametrize("task", FORMS)
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_the_words_around_attempts_are_no_more_than_told(task: Form, count: int) -> None:
    prompt = aggregation_prompt("", [""] * count, task)
    assert len(prompt) <= PROMPT_WORDS + ATTEMPT_WORDS * count


@pytest.mark.parametrize(
    ("name", "options", "cost"),
    [
        ("chain_of_thought", {}, (1, 1)),
        ("self_consistency", {"samples": 7}, (7, 7)),
        ("part_vote", {"samples": 7}, (7, 7)),
        ("deepconf", {"traces": 9}, (9, 9)),
        ("deepconf", {"mode": "online", "traces": 9, "warmup": 3}, (6, 9)),
        ("deepconf", {"mode": "online", "traces": 9, "warmup": 3, "consensus": True}, (6, 9)),
        ("best_of_n", {"candidates": 4, "max_steps": 3}, (4, 16, 1)),
        ("beam_search", {"beams": 2, "candidates": 4, "max_steps": 3}, (8, 32, 1)),
        ("phi_decoding", {"beams": 2, "rollouts": 3, "max_steps": 4}, (6, 48, 1)),
        ("adaptive_scaling", {"candidates": 4, "max_steps": 3}, (4, 16, 1)),
        ("rsa", {"M": 2, "N": 4, "K": 3, "T": 3}, (8, 24, 3, 712)),
        ("rsa", {"M": 2, "N": 4, "T": 1}, (8, 8)),
    ],
)
def test_the_cost_by_hand(name: str, options: dict[str, Any], cost: tuple[int, ...]) -> None:
    assert parse(name, options).cost() == StrategyCost(*cost)


# What judged_text writes: the question, then the steps, each with a blank line behind it.
TEXTS = [
    "what is it\n\ngood good\n\n",
    "what is it\n\ngood\n\nbad bad good\n\n",
    "x\n\ngood bad\n\n",
]


def scores_of(path: Path, *texts: str, **more: Any) -> list[float]:
    request = {"path": str(path), "separator": "\n", "positive": 1, "threads": 1, "steps": "\n\n"}
    return score(request | more, json.dumps(texts).encode())


def test_p_of_positive_at_the_last_separator(tmp_path: Path) -> None:
    path = reward_model(tmp_path)
    wanted = [probability(2, 0, 4, 2), probability(2, 2, 4, 3), probability(1, 1, 2, 2)]
    assert scores_of(path, *TEXTS) == pytest.approx(wanted, abs=1e-6)
    assert scores_of(path, *TEXTS)[2] == pytest.approx(0.5)
    assert scores_of(path, *TEXTS, positive=0) == pytest.approx([1 - p for p in wanted], abs=1e-6)
    alone = [scores_of(path, text)[0] for text in TEXTS]
    assert scores_of(path, *TEXTS, *TEXTS) == pytest.approx([*alone, *alone], abs=1e-7)
    assert scores_of(path) == []


def test_a_sequence_classifier_with_one_label(tmp_path: Path) -> None:
    path = reward_model(tmp_path, LlamaForSequenceClassification, labels=1)
    up, _ = by_hand(2, 0, 4, 2)
    assert scores_of(path, TEXTS[0]) == pytest.approx([1 / (1 + math.exp(-up))], abs=1e-6)


def test_what_is_no_reward_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read as a reward model"):
        scores_of(tmp_path / "nothing")
    reader = Path(__file__).parents[4] / "models/clinic-reader"
    with pytest.raises(DataError, match=r"no classifier .* LlamaForCausalLM"):
        scores_of(reader)
    path = reward_model(tmp_path)
    with pytest.raises(DataError, match=r"labels 0 to 1"):
        scores_of(path, positive=2)
    with pytest.raises(DataError, match=r"has 67 tokens, and the reward model reads 64"):
        scores_of(path, "good " * 65 + "\n\n")
    with pytest.raises(DataError, match=r"no token for separator ' '"):
        scores_of(path, "good\n\n", separator=" ")
