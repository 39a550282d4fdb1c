"""Test environments: problems, their check, and episodes' files."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from episode_setup import task
from hypothesis import given
from hypothesis import strategies as st
from rooms.environments.clinic_setup import over

from cartridge_forge.plugins.chat.episodes import Episode, Observation, Task, Turn
from cartridge_forge.plugins.chat.messages import AgentMessage, AgentTool
from cartridge_forge.plugins.environments.checking import (
    CheckPlan,
    check_environment,
    drawn_value,
    findings_of,
)
from cartridge_forge.plugins.environments.checking import PlayedEpisode as Played
from cartridge_forge.plugins.environments.episode_files import from_row, to_row
from cartridge_forge.plugins.environments.problems import ProblemSet, open_problems
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, ProblemsSpec
from cartridge_forge.plugins.environments.verifiers.worker_process import PYTHON
from cartridge_forge.plugins.strategies.answers.extract import Form, extract, plain_answer
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedCandidate,
    JudgedPopulation,
    RSAProblem,
    aggregate,
    measure,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling

TASKSETS = Path(__file__).resolve().parents[4] / "data/tasksets"


async def gym(
    problems: ProblemSet, numbers: Sequence[int], texts: Sequence[str]
) -> tuple[list[RSAProblem], list[JudgedCandidate]]:
    drawn = await problems.draw(numbers, "primer")
    return drawn, await problems.judge(drawn[0], texts)


def test_reasoning_gym_draws_by_seed_and_judges_by_its_own_score() -> None:
    """`9**9**9**9` never ends: it costs its own worker, and the next answer asks another."""
    texts = ["answer 9**9**9**9", "no", "answer 1", "answer 94*4 - 61 - 6"]
    spec = ProblemsSpec(kind="reasoning_gym", name="countdown", seed=1, timeout_s=3.0)
    drawn, judged = over(spec, partial(gym, numbers=(0, 1), texts=texts))
    again, _ = over(spec, partial(gym, numbers=(0, 1), texts=[]))
    assert drawn == again
    assert drawn[0].question.startswith("Calculate 309 using all of these numbers: 6, 61, 94, 4.")
    assert [p.id for p in drawn] == ["countdown/0", "countdown/1"]
    assert drawn[0].question != drawn[1].question
    assert [c.answer for c in judged] == ["9**9**9**9", None, "1", "94*4 - 61 - 6"]
    assert [c.score for c in judged[:2]] == [0.0, 0.0]
    assert judged[2].score is not None
    assert judged[2].score < 1.0
    assert judged[3].score == 1.0


@pytest.mark.parametrize(
    ("task", "spellings", "wrong"),
    [
        ("gsm_symbolic", ("28,080", "28080", r"\$28{,}080.00", r"2.808\times10^{4}"), "28081"),
        ("lcm", ("2,646", "2646", "2646.0", r"\text{2646}"), "26460"),
        ("gcd", ("3.0", "3", "$3", "0.3e1"), "30"),
        ("leg_counting", ("500.", "500", "500.0", "50000%"), "5000"),
    ],
)
def test_spellings_that_the_vote_joins_score_alike(
    task: str, spellings: tuple[str, ...], wrong: str
) -> None:
    """The answers were worked out by hand; the task's own score of the wrong one is above 0."""
    form: Form = "math"
    spec = ProblemsSpec(kind="reasoning_gym", name=task, seed=0, timeout_s=20.0)
    shape = RSAShape(M=1, N=len(spellings) + 1, K=1, T=1)

    async def use() -> list[JudgedPopulation]:
        problems = open_problems(
            spec, partial(extract, form=form), partial(plain_answer, form=form)
        )
        try:
            (problem,) = await problems.draw([0], "primer")
            return [
                await aggregate(
                    AggregationInput("r", "r", problem, 1, tuple(rf"\boxed{{{a}}}" for a in order)),
                    shape, form, problems.judge,
                )
                for order in ((*spellings, wrong), (wrong, *reversed(spellings)))
            ]  # fmt: skip
        finally:
            await problems.close()

    for population in asyncio.run(use()):
        scores = {c.answer: c.score or 0.0 for c in population.candidates}
        assert {scores[answer] for answer in spellings} == {1.0}
        assert 0.0 < scores[wrong] < 1.0
        assert measure([*scores.values()], population.chosen)["majority_vote"] == 1.0


def test_an_unknown_task_is_named() -> None:
    spec = ProblemsSpec(kind="reasoning_gym", name="chain_sums")
    with pytest.raises(DataError, match=r"cannot draw chain_sums 0: .*; name one of its tasks"):
        over(spec, lambda p: p.draw([0], "primer"))


def taskset(name: str) -> ProblemsSpec:
    arguments = {"numbers": [4, 7, 11]}
    return ProblemsSpec(
        kind="verifiers", name=name, folder=str(TASKSETS), arguments=arguments, most=3,
        timeout_s=60.0,
    )  # fmt: skip


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_verifiers_rewards_each_text_as_an_episode_of_one_turn() -> None:
    async def use(problems: ProblemSet) -> tuple[list[RSAProblem], list[JudgedCandidate]]:
        drawn = await problems.draw([1, 2], "primer")
        with pytest.raises(DataError, match="has 3 problems: got number 3; lower"):
            await problems.draw([3], "primer")
        return drawn, await problems.judge(drawn[0], ["answer 8", "9", "answer 9"])

    drawn, judged = over(taskset("forge_sums"), use)
    assert [p.question for p in drawn] == ["after 7?", "after 11?"]
    assert judged == [
        JudgedCandidate("8", 1.0),
        JudgedCandidate(None, 0.0),
        JudgedCandidate("9", 0.0),
    ]


@pytest.mark.skipif(not PYTHON.exists(), reason="make install-verifiers")
def test_a_taskset_that_goes_on_asking_cannot_judge() -> None:
    """It sends a second turn, which no candidate has."""
    drawn, judged = over(
        taskset("forge_numbers"), partial(gym, numbers=[0], texts=["answer 5", "6"])
    )
    assert drawn[0].question == "after 4?"
    assert [c.score for c in judged] == [None, None]
    assert {c.error.partition(":")[0] for c in judged} == {"environment_refused"}


FOLDER = str(Path(__file__).parents[4] / "data" / "environments")


def found(factory: str, plan: CheckPlan, **keys: Any) -> tuple[list[tuple[bool, str]], list[Any]]:
    spec = EnvironmentSpec(
        kind="python", factory=f"user_games:{factory}", folder=FOLDER, processes=1, **keys
    )
    check = asyncio.run(check_environment(spec, plan))
    return [(f.fault, f.what) for f in check.findings], list(check.episodes)


def test_an_environment_that_a_script_can_solve_has_little_against_it() -> None:
    plan = CheckPlan(tasks=2, turns=9, script=tuple(str(n) for n in range(1, 10)))
    alike = (False, "the 2 tasks open alike")
    assert found("Lenient", plan)[0] == [
        (True, "all 2 rewards are 1"),
        (False, "2 of 4 episodes have no reward after 9 turns"), alike,
    ]  # fmt: skip
    findings, episodes = found("Lenient", plan, returns="last")
    assert findings == [alike]
    assert [e.agent for e in episodes] == ["scripted", "random"] * 2
    wanted = [random.Random(seed).randint(1, 9) for seed in (0, 2)]
    assert [len(e.actions) for e in episodes[::2]] == wanted
    assert [e.reward for e in episodes[::2]] == [1.0, 1.0]


def test_equal_rewards_equal_openings_and_long_texts_are_found() -> None:
    plan = CheckPlan(tasks=2, max_context=40, count=lambda text: len(text.split()))
    assert found("Alike", plan)[0] == [
        (True, "4 of 4 episodes are longer than 40 tokens, the longest about 104"),
        (False, "all 4 rewards are 0"),
        (False, "the 2 tasks open alike"),
    ]


def test_a_reward_that_a_replay_does_not_repeat_is_found() -> None:
    (finding,) = found("Lucky", CheckPlan(tasks=2))[0]
    assert finding == (
        True, "4 of 4 episodes differ when they are played again, the first after 1 actions",
    )  # fmt: skip


def test_a_class_that_cannot_be_made_is_the_only_finding() -> None:
    findings, episodes = found("breaks", CheckPlan())
    assert episodes == []
    assert "RuntimeError: no licence" in findings[0][1]


def an_episode(*seen: Observation, seconds: float = 0.1) -> Played:
    return Played(
        "random", Task("t/0", "x", {}), ("a",) * (len(seen) - 1), seen, (seconds,) * len(seen), seen
    )


OPENING = Observation((AgentMessage("user", "go."),))
OPEN = Observation((AgentMessage("tool", "no."),))
BAD = Observation((AgentMessage("tool", "no JSON object"),), error_kind="bad_action")
END = Observation(done=True, reward=0.5)


@pytest.mark.parametrize(
    ("keys", "episode", "what"),
    [({}, an_episode(OPENING, OPEN), "no reward arrived in 1 episodes of at most 8 turns"),
     ({}, an_episode(Observation(done=True, error="environment_died: gone")),
      "1 of 1 episodes ended as environment_died: gone"),
     ({"action": "json"}, an_episode(OPENING, BAD, BAD),
      "none of 2 actions fits its schema: no JSON object"),
     ({"action": "tool"}, an_episode(OPENING, END), "it offers no tools"),
     ({}, an_episode(OPENING, END, seconds=9.0), "a move takes 9 s, and up to 9 s of the 30 s"),
     ({}, an_episode(Observation((AgentMessage("user", " "),)), END), "an opening is empty")],
)  # fmt: skip
def test_what_an_episode_shows(keys: dict[str, Any], episode: Played, what: str) -> None:
    spec = EnvironmentSpec(kind="python", factory="x:A", **keys)
    assert any(f.what.startswith(what) for f in findings_of(spec, CheckPlan(), [episode]))


def test_values_are_drawn_from_a_schema() -> None:
    schema = {
        "type": "object",
        "$defs": {"Move": {"enum": ["up", "down"]}},
        "properties": {
            "move": {"$ref": "#/$defs/Move"}, "row": {"type": "integer", "minimum": 3,
            "maximum": 4}, "note": {"type": "string"}, "on": {"const": True},
            "some": {"type": "array", "items": {"type": "boolean"}},
            "metadata": {"type": "object"},
        },
    }  # fmt: skip
    rng = random.Random(0)
    values = [drawn_value(schema, ["word"], rng) for _ in range(40)]
    assert {v["move"] for v in values} == {"up", "down"}
    assert {v["row"] for v in values} == {3, 4}
    assert all(v["note"] == "word" and v["on"] is True for v in values)
    assert all(isinstance(v["some"][0], bool) and "metadata" not in v for v in values)


ids = st.lists(st.integers(0, 9), max_size=4).map(tuple)

texts = st.text(max_size=6)

observations = st.builds(
    Observation,
    messages=st.lists(st.builds(AgentMessage, st.sampled_from(["user", "tool"]), texts)).map(tuple),
    tools=st.lists(st.builds(AgentTool, texts, texts, st.dictionaries(texts, texts))).map(tuple),
    done=st.booleans(),
    reward=st.none() | st.floats(-2, 2),
    error_kind=texts,
    hint_facts=st.dictionaries(texts, texts),
    error=texts,
    expected=st.none() | texts,
)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 4))):
        context, branch = draw(ids), 0
        if turns:
            last = turns[-1]
            grows = draw(st.booleans())
            context = (*last.context_ids, *last.response_ids, *context) if grows else context
            branch = last.branch + (not grows)
        response = draw(ids)
        logprobs = tuple(draw(st.floats(-9, 0)) for _ in response)
        versions = tuple(draw(st.integers(0, 9)) for _ in response)
        turns.append(
            Turn(context, response, logprobs, versions, draw(texts), draw(observations), branch)
        )
    reward = draw(st.none() | st.floats(-2, 2))
    kind = "no_verdict" if reward is None else ""
    return Episode(
        task(), draw(texts), draw(observations), tuple(turns), Sampling(max_tokens=7), reward,
        kind, tuple(draw(st.lists(texts, max_size=2))),
    )  # fmt: skip


@given(episodes())
def test_what_is_written_is_read_back_equal(episode: Episode) -> None:
    row = json.loads(json.dumps(to_row(episode, "on_policy", 12), allow_nan=False))
    assert from_row(row) == episode
