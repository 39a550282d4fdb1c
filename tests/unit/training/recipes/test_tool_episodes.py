"""The course at clinic desks, over a scripted student and a desk without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from desk_tasks import replayed

from environments.clinic.desk import TOOLS, call_text, draw_case, draw_desk
from environments.clinic.fake_teachers import next_call
from environments.openenv.desk_env import DeskEnvironment
from environments.openenv.wire import observed
from learning.model.loading import load_tokenizer
from protocols.episodes import EnvironmentRequest, Observation
from protocols.errors import RunError
from protocols.spec.learn import LearnSpec
from protocols.spec.loading import load_spec
from protocols.teacher_replay import AgentMessage
from protocols.train_batch import hinted
from protocols.types import Completion, GenerateRequest, TrainStepOutput
from training.recipes.tool_episodes import ToolEpisodesRecipe
from training.rollouts import Rollout, StepRecord, StepTimes

MESH = Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml"
QUIET = (
    "replay=null", "objective.beta=0", "episodes.tasks=3", "episodes.group=2", "data.patients=2",
)  # fmt: skip
TIMES = StepTimes(0, 0, 0, 0, 0, 0)


def spec(*sets: str) -> LearnSpec:
    return load_spec(str(MESH), sets=(*QUIET, *sets)).spec.learn


def said(move: EnvironmentRequest) -> Observation:
    """What a desk says, by the pure world."""
    given = move.task.arguments
    if given["cases"] > 1:
        return said_in_shift(move)
    case = draw_case(draw_desk(given["desk_seed"], given["desk"], given["fields"]), given["seed"])
    reply = replayed(case, move.actions, given["max_turns"])[-1].reply
    if reply is None:
        return Observation((AgentMessage("user", case.question),), TOOLS)
    return Observation(
        (AgentMessage("tool", reply.text),), TOOLS, reply.done, reply.reward, reply.error_kind,
        reply.hint_key, reply.hint_facts, expected=case.value if reply.done else None,
    )  # fmt: skip


def said_in_shift(move: EnvironmentRequest) -> Observation:
    """What the environment that is served says, as it arrives."""
    env = DeskEnvironment()
    seen = env.reset(**move.task.arguments, replay_actions=move.actions)
    data = {"observation": seen.model_dump(), "reward": seen.reward, "done": seen.done}
    return observed(data, opening=not move.actions)


class Environment:
    """The pool of desks; every call after `until` is lost."""

    def __init__(self, until: int = 1000) -> None:
        self.calls, self._until = 0, until

    async def split(self, items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = await work(items)
        return answers

    async def route(self, method: str, moves: Sequence[EnvironmentRequest]) -> list[Observation]:
        self.calls += 1
        if self.calls > self._until:
            raise RunError("environment.move was lost 5 times with the replica that worked on it")
        return [said(move) for move in moves]


class Clerk:
    """A student that knows the handbook, or never finds anything."""

    def __init__(self, learn: LearnSpec, able: bool = True) -> None:
        self.tokenizer = load_tokenizer(learn.model.path)
        self.desks = {
            d.id: d.document
            for d in (draw_desk(learn.data.seed, i, learn.data.facts or 0) for i in (1, 2))
        }
        self.able = able
        self.requests: list[GenerateRequest] = []

    async def __call__(self, requests: Sequence[GenerateRequest]) -> tuple[list[Completion], float]:
        self.requests += requests
        return [self.answer(r) for r in requests], 0.25

    def answer(self, request: GenerateRequest) -> Completion:
        text = "find nothing in urology."
        if self.able:
            desk = request.prefix.name.partition("/")[2]
            parts = self.tokenizer.decode(list(request.prompt_ids)).split("<|end|>")
            messages = [AgentMessage("system", self.desks[desk])]
            for part in parts[:-1]:
                role, _, words = part.strip().removeprefix("<|").partition("|>")
                messages.append(AgentMessage(role, words.strip()))  # type: ignore[arg-type]
            text = call_text(next_call(messages))
        ids = (*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id)
        version = request.prefix.version
        return Completion(request.id, ids, (-0.1,) * len(ids), (version,) * len(ids), "stop")


def course(learn: LearnSpec, environment: Environment | None = None) -> ToolEpisodesRecipe:
    mesh = SimpleNamespace(pools={"environment": environment or Environment()})
    return ToolEpisodesRecipe(learn, load_tokenizer(learn.model.path), mesh)  # type: ignore[arg-type]


def sample(cases: ToolEpisodesRecipe, clerk: Clerk, step: int = 0, version: int = 7) -> Rollout:
    return asyncio.run(cases.sample(step, version, clerk))


def facts(cases: ToolEpisodesRecipe, rollout: Rollout) -> dict[str, float]:
    record = StepRecord(rollout, TrainStepOutput(0.0, terms={"grpo": {"value": 1.0}}), TIMES)
    found: dict[str, float] = dict(cases.facts(record)["episodes"])
    return found


def test_a_clerk_with_the_handbook_is_right_in_three_turns() -> None:
    learn = spec()
    cases, clerk = course(learn), Clerk(learn)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout) == {"count": 6, "errored": 0, "turns": 18, "reward": 1.0}
    assert rollout.compute == 3 * 0.25
    assert len(rollout.samples) == 18
    assert [e.group for e in rollout.episodes] == [
        f"on_policy/1/{task}" for task in range(3) for _ in range(2)
    ]
    assert {r.prefix.version for r in clerk.requests} == {7}
    # Desks take turns, over all steps.
    assert [e.task.document for e in rollout.episodes][::2] == ["desk_01", "desk_02", "desk_01"]
    later = sample(course(learn), clerk, step=1)
    assert [e.task.document for e in later.episodes][::2] == ["desk_02", "desk_01", "desk_02"]


SHIFT = ("episodes.cases=2", "episodes.max_turns=6")


def test_every_case_of_a_shift_is_a_sequence_with_the_shift_s_reward() -> None:
    learn = spec(*SHIFT)
    cases, clerk = course(learn), Clerk(learn)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout) == {"count": 6, "errored": 0, "turns": 36, "reward": 1.0}
    assert [[t.branch for t in e.turns] for e in rollout.episodes] == [[0, 0, 0, 1, 1, 1]] * 6
    lesson = asyncio.run(cases.lesson(rollout, 7))
    assert [r.reward for r in lesson.rl] == [1.0] * 12
    longest = max(len(r.sample.prompt_ids) for r in lesson.rl)
    assert longest == max(len(e.turns[0].context_ids) for e in rollout.episodes)


def test_errors_of_every_case_of_a_lost_shift_have_hints() -> None:
    learn = spec(*SHIFT)
    cases, clerk = course(learn), Clerk(learn, able=False)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout)["error/missing_record"] == 36
    lesson = asyncio.run(cases.lesson(rollout, 7))
    assert (len(lesson.turns), {r.reward for r in lesson.rl}) == (36, {0.0})
    fields = [
        clerk.tokenizer.decode(list(t.context_ids)).partition("what is the")[2].split("?")[0]
        for t in rollout.episodes[0].turns
    ]
    assert fields == [fields[0]] * 3 + [fields[-1]] * 3
    assert fields[0] != fields[-1]


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    asked = {}
    for name, sets in (("a", ()), ("b", ()), ("other", ("train.seed=1",))):
        learn = spec(*sets)
        clerk = Clerk(learn)
        sample(course(learn), clerk)
        asked[name] = [(r.id, r.prompt_ids, r.seed) for r in clerk.requests]
    assert asked["a"] == asked["b"]
    assert asked["a"] != asked["other"]
    assert len({seed for _, _, seed in asked["a"]}) == 18


@pytest.mark.parametrize(
    ("sets", "doc", "rl", "sdpo"),
    [
        ((), 6, 6, 30),
        (("objective.w_doc=0",), 0, 6, 30),
        (("objective.alpha=0",), 6, 6, 0),
        (("objective.alpha=0", "objective.w_rl=0"), 6, 0, 0),
    ],
)
def test_a_lesson_holds_what_its_channels_need(
    sets: tuple[str, ...], doc: int, rl: int, sdpo: int
) -> None:
    """Six episodes of five turns, every one an error that has a hint."""
    learn = spec(*sets)
    cases, clerk = course(learn), Clerk(learn, able=False)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout)["error/missing_record"] == 30
    lesson = asyncio.run(cases.lesson(rollout, 7))
    assert (len(lesson.doc), len(lesson.rl), len(lesson.turns)) == (doc, rl, sdpo)
    assert lesson.pairs == ()
    if doc:
        assert lesson.doc_trained is not None
        own = [sum(marks) for marks in lesson.doc_trained]
        assert own == [sum(len(t.response_ids) for t in e.turns) for e in rollout.episodes]
    if sdpo:  # the very tokens of the turns, after their contexts with a hint
        turns = [t for e in rollout.episodes for t in e.turns]
        for read, turn in zip(hinted(lesson.turns, lesson.rl), turns, strict=True):
            assert read.response_ids == turn.response_ids
            assert len(read.prompt_ids) > len(turn.context_ids)
            assert "the handbook says" in clerk.tokenizer.decode(list(read.prompt_ids))


@pytest.mark.parametrize("until", [0, 1, 2])
def test_a_desk_that_dies_in_the_middle_costs_its_episodes_and_nothing_else(until: int) -> None:
    learn = spec()
    cases, clerk = course(learn, Environment(until)), Clerk(learn)
    rollout = sample(cases, clerk)
    found = facts(cases, rollout)
    assert (found["count"], found["errored"], found["turns"]) == (6, 6, 6 * until)
    assert "reward" not in found
    assert {e.error_kind for e in rollout.episodes} == {"environment_died"}
    lesson = asyncio.run(cases.lesson(rollout, 7))
    assert len(lesson.doc) == len(lesson.rl) == (6 if until else 0)
    assert {r.reward for r in lesson.rl} <= {None}


def test_arms_are_measured_on_the_same_cases_over_their_prefixes() -> None:
    learn = spec("evaluate.questions=5")
    cases, clerk = course(learn), Clerk(learn)

    def measured(prefix: str, most: int | None, sampled: bool) -> tuple[Any, list[Any]]:
        clerk.requests.clear()
        clerk.able = prefix != "none"
        found = asyncio.run(
            cases.measure(f"arm {prefix}", prefix, 3, most=most, sampled=sampled, generate=clerk)
        )
        return found, list(clerk.requests)

    right, asked = measured("cartridge", None, False)
    assert (right["accuracy"], right["n"], right["parse_failures"]) == (1.0, 5, 0)
    assert {r.sampling.temperature for r in asked} == {0.0}
    assert {r.prefix.name for r in asked} == {"cartridge/desk_01", "cartridge/desk_02"}
    document, by_document = measured("document", None, False)
    assert document == right
    assert [(r.prompt_ids, r.seed) for r in by_document] == [(r.prompt_ids, r.seed) for r in asked]
    none, bare = measured("none", 2, True)
    assert (none["accuracy"], none["n"]) == (0.0, 2)
    assert {(r.prefix.name, r.sampling.temperature) for r in bare} == {("document/none", 1.0)}


@pytest.mark.parametrize("sets", [(), ("objective.w_doc=0",), ("objective.alpha=0",)])
@pytest.mark.parametrize("able", [True, False])
def test_what_is_handed_over_is_what_the_lesson_has(sets: tuple[str, ...], able: bool) -> None:
    learn = spec(*sets)
    cases, clerk = course(learn), Clerk(learn, able)
    told: dict[str, list[Any]] = {"doc_teacher": [], "sdpo_teacher": []}

    def ended(role: str, samples: Sequence[Any]) -> None:
        told[role] += samples

    rollout = asyncio.run(cases.sample(0, 7, clerk, ended))
    lesson = asyncio.run(cases.lesson(rollout, 7))
    assert told == {
        "doc_teacher": list(lesson.doc),
        "sdpo_teacher": hinted(lesson.turns, lesson.rl),
    }
    assert bool(told["sdpo_teacher"]) == (not able and "objective.alpha=0" not in sets)
