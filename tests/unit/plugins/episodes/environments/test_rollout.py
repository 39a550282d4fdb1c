"""Test episodes: actions, turns, failures, problems and their files."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import (
    LOST,
    RIGHT,
    TEMPLATES,
    Desk,
    Students,
    conversation,
    episode_of,
    seen_at_desk,
    task,
)
from hypothesis import given
from hypothesis import strategies as st
from rooms.environments.clinic_setup import over

from cartridge_forge.plugins.chat.episodes import (
    EnvironmentRequest,
    Episode,
    Observation,
    RewardOutcome,
    Task,
    Turn,
    TurnHint,
)
from cartridge_forge.plugins.chat.messages import (
    Action,
    AgentMessage,
    OptionAction,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.clinic.text import PatientQuestion
from cartridge_forge.plugins.environments import opening
from cartridge_forge.plugins.environments.action_parsing import DESK, JSON
from cartridge_forge.plugins.environments.episode_files import (
    all_failed,
    commonest_reason,
    from_row,
    not_judged,
    reason,
    to_row,
)
from cartridge_forge.plugins.environments.problems import clinic_problem
from cartridge_forge.plugins.environments.rollout import over_cartridge, run_episodes
from cartridge_forge.plugins.environments.spec import EnvironmentSpec, ProblemsSpec
from cartridge_forge.plugins.strategies.rsa.populations import JudgedCandidate
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.ports import refused
from cartridge_forge.protocols.step import BARE, Completion, GenerateRequest, PrefixRef, Sampling

TALK = conversation()


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def script(member: int, turn: int) -> str:
    return (RIGHT, LOST)[member % 2][turn]


def run(
    desk: Desk, students: Any, tasks: Sequence[Task] = (task(),), **settings: Any
) -> list[Episode]:
    usual: dict[str, Any] = {
        "group_size": 2, "sampling": Sampling(), "prefix": over_cartridge(3), "seed_of": seed_of,
        "max_context": 500, "max_turns": 3,
    }  # fmt: skip
    return asyncio.run(run_episodes(tasks, students, desk, TALK, **usual | settings))


def test_one_call_of_each_port_a_turn() -> None:
    desk, students = Desk(), Students(TALK, script)
    tasks = (task("desk/12/0"), task("desk/12/1"))
    right, lost, *others = run(desk, students, tasks)
    assert [len(batch) for batch in students.batches] == [4, 4, 4]
    assert [len(batch) for batch in desk.batches] == [4, 4, 4, 4]
    assert desk.batches[0][1] == EnvironmentRequest(replace(tasks[0], id="desk/12/0/1"))
    assert [a.strip() for a in desk.batches[2][1].actions] == list(LOST[:2])
    request = students.batches[1][2]
    assert request.id == "desk/12/1/0/1"
    assert request.prefix == PrefixRef("cartridge/desk_01", 3)
    assert request.seed == seed_of("desk/12/1/0/1")
    assert request.prompt_ids == others[0].turns[1].context_ids
    assert (right.reward, right.error_kind, len(right.turns)) == (1.0, "", 3)
    assert (lost.reward, lost.group, lost.task.id) == (0.0, "desk/12/0", "desk/12/0/1")
    kinds = ["missing_record", "unknown_tool", ""]
    assert [t.observation.error_kind for t in lost.turns] == kinds
    assert lost == episode_of(LOST)


def test_an_episode_does_not_hang_on_those_beside_it() -> None:
    together = run(Desk(), Students(TALK, script), (task("a"), task("b")))
    alone = run(Desk(), Students(TALK, script), (task("b"),))
    assert together[2:] == alone
    assert together == run(Desk(), Students(TALK, script), (task("a"), task("b")))
    assert run(Desk(), Students(TALK, script), ()) == []


def test_those_that_ended_are_not_asked_again() -> None:
    students = Students(TALK, lambda m, t: "answer weber." if m else RIGHT[t])
    desk = Desk()
    run(desk, students)
    assert [len(batch) for batch in students.batches] == [2, 1, 1]
    assert [len(batch) for batch in desk.batches] == [2, 2, 1, 1]


def test_a_world_that_dies_costs_the_reward() -> None:
    def dies(actions: Sequence[str]) -> Observation:
        lost = actions and actions[-1].strip() == "look note 17."
        return Observation(error="environment_died: gone") if lost else seen_at_desk(actions)

    right, lost = run(Desk(dies), Students(TALK, script))
    assert right.reward == 1.0
    assert (lost.reward, lost.error_kind, len(lost.turns)) == (None, "environment_died", 2)

    students = Students(TALK, script)
    dead, _ = run(Desk(lambda _: Observation(error="environment_died")), students)
    assert (dead.reward, dead.error_kind, dead.turns) == (None, "environment_died", ())
    assert students.batches == []


def test_no_verdict_and_full_contexts() -> None:
    (early, _) = run(Desk(), Students(TALK, script), max_turns=2)
    assert (early.reward, early.error_kind, len(early.turns)) == (None, "no_verdict", 2)
    second = len(early.turns[1].context_ids)
    (whole, _) = run(Desk(), Students(TALK, script), max_turns=2, max_context=second)
    assert whole == early
    (full, _) = run(Desk(), Students(TALK, script), max_context=second - 1)
    assert (full.reward, full.error_kind, len(full.turns)) == (None, "context_full", 1)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_end_without_a_finite_reward_is_no_verdict(reward: float | None) -> None:
    def ends(actions: Sequence[str]) -> Observation:
        return Observation(done=True, reward=reward) if actions else seen_at_desk(())

    episode, _ = run(Desk(ends), Students(TALK, script))
    assert (episode.reward, episode.error_kind) == (None, "no_verdict")


def test_a_refused_request_ends_the_run() -> None:
    async def refuses(requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [refused(r, "no version 3") for r in requests]

    with pytest.raises(PublishError, match=r"desk/12/0/0/0: no version 3"):
        run(Desk(), refuses)


def test_evaluation_may_read_the_document_or_none() -> None:
    students = Students(TALK, script)
    run(Desk(), students, prefix=lambda _: BARE)
    question = episode_of(RIGHT).opening
    assert students.batches[0][0].prefix == PrefixRef("document/none", 0)
    assert students.batches[0][0].prompt_ids == TALK.opening(None, question.messages)


def test_episodes_are_handed_over_in_the_turn_that_ends_them() -> None:
    told: list[list[Episode]] = []

    async def ended(episodes: Sequence[Episode]) -> None:
        told.append(list(episodes))

    students = Students(TALK, lambda m, t: "answer weber." if m == 1 else RIGHT[t])
    episodes = run(Desk(), students, group_size=3, ended=ended)
    assert told == [[episodes[1]], [], [episodes[0], episodes[2]]]
    # One that is still on after the last turn ends by that.
    told.clear()
    (cut,) = run(Desk(), Students(TALK, script), group_size=1, max_turns=1, ended=ended)
    assert (cut.error_kind, told) == ("no_verdict", [[], [cut]])


FIND = ToolAction("find", {"field": "surgeon", "department": "cardiology"})
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def test_the_desks_words() -> None:
    assert DESK.parse("find surgeon in cardiology.") == FIND
    assert DESK.say(FIND) == "find surgeon in cardiology."
    assert DESK.say(DESK.parse(" read  note 17")) == "read note 17."
    with pytest.raises(DataError, match="expresses tool calls only"):
        DESK.say(OptionAction("B"))


@given(tool=st.text(max_size=8), arguments=st.dictionaries(st.text(max_size=5), plain, max_size=3))
def test_json_calls_come_back_equal(tool: str, arguments: dict[str, object]) -> None:
    call = ToolAction(tool, arguments)
    assert JSON.parse(JSON.say(call)) == call
    assert JSON.parse(f"<think>{{}}</think>I call {JSON.say(call)} now.") == call


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"tool": "find", "arguments": {}}', ToolAction("find", {})),
        ('{"x": 1} {"tool": "a", "arguments": {"n": 2}}', ToolAction("a", {"n": 2})),
        ('<think>{"tool": "a", "arguments": {}}</think> weber ', TextAction("weber")),
    ],
)
def test_what_json_calls(text: str, action: Action) -> None:
    assert JSON.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        '{"tool": "a", "arguments": {"n": NaN}}',
        '{"tool": "a", "arguments": {"n": 1e999}}',
        '{"tool": "a", "arguments": [1]}',
        '{"tool": 3, "arguments": {}}',
        "{{{",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert JSON.parse(text) == TextAction(text)


@given(st.text())
def test_any_words_are_some_action(text: str) -> None:
    assert isinstance(JSON.parse(text), ToolAction | TextAction)
    assert isinstance(DESK.parse(text), ToolAction)


def test_deep_nesting_is_no_call() -> None:
    assert isinstance(JSON.parse('{"a":' + "[" * 100_000), TextAction)


def test_choices_and_texts_are_said_as_they_are() -> None:
    assert (JSON.say(OptionAction("B")), JSON.say(TextAction("weber"))) == ("B", "weber")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", [RIGHT, LOST])
def test_episodes_at_the_desk_too(name: str, said: tuple[str, ...]) -> None:
    episode = replace(episode_of(said, name), flags=("copied",))
    assert from_row(json.loads(json.dumps(to_row(episode, "on_policy", 12)))) == episode


def test_a_row_by_hand() -> None:
    seen = Observation(
        (AgentMessage("tool", "note 17."),), error_kind="missing_record", hint_key="where"
    )
    turns = (
        Turn((4, 5), (7, 2), (-0.1, -0.7), (3, 3), "find", seen, 0, "length"),
        Turn((4, 5, 7, 2, 40, 5), (9,), (-0.2,), (4,), "read", seen),
        Turn((4, 5), (9, 2), (-0.2, -0.3), (4, 4), "read", Observation(done=True, reward=1.0), 1),
    )
    episode = Episode(task(), "desk/12", Observation(), turns, Sampling(), 1.0, "", ("copied",))
    row = to_row(episode, "on_policy", 12)
    head = {k: row[k] for k in ("schema", "record", "arm", "step", "group", "reward", "flags")}
    assert head == {
        "schema": 1, "record": "episode", "arm": "on_policy", "step": 12, "group": "desk/12",
        "reward": 1.0, "flags": ["copied"],
    }  # fmt: skip
    assert row["branches"] == [[4, 5, 7, 2, 40, 5, 9], [4, 5, 9, 2]]
    spans = [(t["branch"], t["start"], t["stop"]) for t in row["turns"]]
    assert spans == [(0, 2, 4), (0, 6, 7), (1, 2, 4)]
    assert row["turns"][0]["sampler_logprobs"] == [-0.1, -0.7]
    assert row["turns"][0]["versions"] == [3, 3]
    assert row["turns"][0]["observation"]["hint_key"] == "where"


def test_the_hints_of_failed_turns_are_kept_beside_them() -> None:
    episode = episode_of(LOST)
    hints = [
        TurnHint("desk/12/0/1", 0, "the handbook says surgeon cardiology."),
        TurnHint("desk/12/0/1", 1, "it is weber.", "leaks_answer"),
    ]
    row = json.loads(json.dumps(to_row(episode, "on_policy", 12, hints)))
    found = [(t.get("hint"), t.get("no_hint")) for t in row["turns"]]
    assert found == [
        ("the handbook says surgeon cardiology.", ""),
        ("it is weber.", "leaks_answer"),
        (None, None),
    ]
    assert from_row(row) == episode


GOOD: dict[str, Any] = to_row(episode_of(RIGHT), "on_policy", 12)


@pytest.mark.parametrize(
    "row",
    [
        {},
        GOOD | {"schema": 2},
        GOOD | {"record": "pair"},
        GOOD | {"turns": [{}]},
        GOOD | {"branches": []},
        {k: v for k, v in GOOD.items() if k != "task"},
    ],
)
def test_other_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a row of an episode, schema 1, was expected: got another"):
        from_row(row)


RAISED = Observation(done=True, error="environment_refused: ValueError: too late (guess.py:12)")


def ended(kind: str, *seen: Observation, reward: float | None = None, **more: object) -> Episode:
    turns = tuple(Turn((1,), (2,), (-0.5,), (0,), "up", o) for o in seen)
    return Episode(
        Task("t/0", "rules", {}), "t/0", Observation(), turns, Sampling(), reward, kind, **more
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("episode", "told"),
    [
        (ended("environment_refused", Observation(), RAISED), RAISED.error),
        (
            ended("reward_failed", Observation(done=True), rewards={
                "brief": RewardOutcome(1.0),
                "right": RewardOutcome(None, "rewards.py:7: ZeroDivisionError: by zero", True),
            }),
            "reward_failed: right: rewards.py:7: ZeroDivisionError: by zero",
        ),
        (
            ended("no_verdict", Observation(
                (AgentMessage("tool", "write one JSON object"),), error_kind="bad_action"
            )),
            "no_verdict after bad_action: write one JSON object",
        ),
        (ended("context_full"), "context_full: its context exceeds episodes.max_context"),
        (ended("environment_unheard_of"), "environment_unheard_of"),
    ],
)  # fmt: skip
def test_the_reason_names_its_place(episode: Episode, told: str) -> None:
    assert reason(episode) == told


def test_an_opening_that_fails_is_the_reason() -> None:
    died = Observation(done=True, error="environment_died: no answer within 5 s")
    episode = Episode(Task("t", "d", {}), "t", died, (), Sampling(), None, "environment_died")
    assert reason(episode) == died.error


@pytest.mark.parametrize(
    "episodes",
    [(), (ended("context_full"), ended("", Observation(done=True), reward=0.0))],
)
def test_one_reward_is_enough(episodes: Sequence[Episode]) -> None:
    assert all_failed(episodes) is None


def test_the_commonest_reason_is_told() -> None:
    raised = ended("environment_refused", RAISED)
    assert all_failed([raised, ended("context_full"), raised]) == (
        "none of 3 episodes has a reward; 2 of them: environment_refused: ValueError: too late "
        "(guess.py:12); forge env check MESH plays a few"
    )


def test_a_failure_of_the_environment_or_a_reward_judges_nobody() -> None:
    kinds = ["environment_died", "", "reward_failed", "context_full", "no_verdict"]
    episodes = [ended(kind) for kind in kinds]
    assert not_judged(episodes) == [episodes[0], episodes[2]]
    assert commonest_reason([episodes[0], episodes[2], episodes[2]]) == "2 of them: reward_failed"


class Counting:
    """Count the moves under way."""

    def __init__(self, *_: object) -> None:
        self.under_way = self.most = 0

    async def move(self, move: EnvironmentRequest) -> Observation:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return Observation(done=True, reward=float(move.task.id))


@pytest.mark.parametrize(("at_once", "most"), [(2, 2), (9, 6)])
def test_moves_beyond_the_bound_wait_and_are_answered(
    at_once: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Counting()
    monkeypatch.setattr(opening, "environment_of", lambda *_: environment)
    several = opening.SeveralEnvironments((EnvironmentSpec(kind="desk"),), 8, at_once)

    async def burst() -> list[Observation]:
        tasks = [EnvironmentRequest(Task(str(i), "d", {}), ()) for i in range(6)]
        return await asyncio.gather(*map(several.move, tasks))

    assert [o.reward for o in asyncio.run(burst())] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert environment.most == most


QUESTION = PatientQuestion(
    "patient_01/7", "patient_01", "what is the ecg?",
    ("ulcer", "edema", "cyst", "polyp", "murmur"), "cyst",
)  # fmt: skip


def test_a_letter_and_its_options_text_are_one_answer() -> None:
    problem = clinic_problem(QUESTION, "be brief")
    assert problem.question.endswith("e) murmur\nbe brief")
    texts = ["the answer is cyst.", "the answer is c.", "the answer is edema.", "hm"]
    judged = over(ProblemsSpec(), lambda p: p.judge(problem, texts))
    assert judged == [
        JudgedCandidate("cyst", 1.0), JudgedCandidate("cyst", 1.0), JudgedCandidate("edema", 0.0),
        JudgedCandidate(None, 0.0),
    ]  # fmt: skip
