"""Where steps end, held against the sampler that ends them there."""

import asyncio

import pytest
from scripted_sampler import Scripted, words

from cartridge_forge.plugins.strategies.answers.extract import Form
from cartridge_forge.plugins.strategies.catalog import parse
from cartridge_forge.plugins.strategies.detectors import Detector
from cartridge_forge.plugins.strategies.problem import StrategyProblem
from cartridge_forge.plugins.strategies.samplers.token_budget import TokenBudget
from cartridge_forge.plugins.strategies.steps import StepPath, StepSampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling
from cartridge_forge.protocols.teacher_replay import AgentMessage

ASKED = (AgentMessage("user", "why?"),)


def steps_of(
    text: str, detector: Detector, *, form: Form = "general", most: int = 100
) -> list[StepPath]:
    """The paths that sampling step by step comes to, on a model that says this text."""
    said = words(text)

    def goes_on(ask: object) -> list[object]:
        done = ask.begun.token_ids  # type: ignore[attr-defined]
        assert tuple(w.id for w in said[: len(done)]) == done
        return said[len(done) :]  # type: ignore[return-value]

    question = StrategyProblem(ASKED, form, 1, Sampling(max_tokens=most))
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
