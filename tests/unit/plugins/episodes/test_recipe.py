"""The course at clinic desks, over a scripted student and a desk without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from episode_setup import replayed

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.episodes import EnvironmentReply, EnvironmentRequest, Observation
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.clinic.desk import (
    TOOLS,
    ShiftState,
    call_text,
    draw_case,
    draw_desk,
    draw_shift,
    reply_in_shift,
)
from cartridge_forge.plugins.episodes.recipe import ToolEpisodesRecipe
from cartridge_forge.plugins.episodes.task_sources.environment import DeskTasks
from cartridge_forge.plugins.replay.clinic_teachers import next_call
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import RunError, SpecError
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest, TrainStepOutput, hinted
from cartridge_forge.training.records import Rollout, StepRecord, StepTimes, is_offline

tokenizer_at = cache(load_tokenizer)

MESH = Path(__file__).resolve().parents[4] / "meshes" / "three_channels.yaml"
QUIET = (
    "replay=null", "objective.beta=0", "episodes.tasks=3", "episodes.group=2", "data.patients=2",
)  # fmt: skip
TIMES = StepTimes(0, 0, 0, 0, 0, 0, 0)


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
    """What a desk of several cases says, by the pure world."""
    given = move.task.arguments
    desk = draw_desk(given["desk_seed"], given["desk"], given["fields"])
    cases = draw_shift(desk, given["seed"], given["cases"])
    before, shift = ShiftState(), ShiftState()
    for text in move.actions:
        before = shift
        shift = reply_in_shift(cases, shift, text, given["max_turns"] // given["cases"])
    reply = shift.reply
    if reply is None:
        return Observation((AgentMessage("user", cases[0].question),), TOOLS)
    messages = [AgentMessage("tool", reply.text)]
    if reply.question:
        messages.append(AgentMessage("user", reply.question))
    decides = reply.done and before.right == before.ended
    return Observation(
        tuple(messages), (), reply.done, reply.reward, reply.error_kind, reply.hint_key,
        reply.hint_facts, expected=cases[before.ended].value if decides else None,
        new_conversation=bool(reply.question),
    )  # fmt: skip


class Environment:
    """The pool of desks; every call after `until` is lost."""

    def __init__(self, until: int = 1000) -> None:
        self.calls, self._until = 0, until

    async def split(self, items: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        answers: list[Any] = await work(items)
        return answers

    async def route(self, method: str, moves: Sequence[EnvironmentRequest]) -> EnvironmentReply:
        self.calls += 1
        if self.calls > self._until:
            raise RunError("environment.move was lost 5 times with the replica that worked on it")
        return EnvironmentReply(0.1, tuple(said(move) for move in moves))


class Clerk:
    """A student that knows the handbook, or never finds anything."""

    def __init__(self, learn: LearnSpec, able: bool = True) -> None:
        self.tokenizer = tokenizer_at(learn.model.path)
        self.desks = {
            d.id: d.document
            for d in (draw_desk(learn.data.seed, i, learn.data.facts or 0) for i in (1, 2))
        }
        self.able = able
        self.requests: list[GenerateRequest] = []
        self.calls: list[list[str]] = []
        self.whole = set[bool]()

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: None = None, *, whole: bool = False
    ) -> list[Completion]:
        self.requests += requests
        self.calls.append([r.id for r in requests])
        self.whole.add(whole)
        return [self.answer(r) for r in requests]

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


def course(
    learn: LearnSpec, environment: Environment | None = None, generators: int = 1
) -> ToolEpisodesRecipe:
    pools = {
        "environment": environment or Environment(), "generator": SimpleNamespace(target=generators)
    }  # fmt: skip
    mesh = SimpleNamespace(pools=pools)
    tokenizer = tokenizer_at(learn.model.path)
    return ToolEpisodesRecipe(learn, DeskTasks(learn), tokenizer, mesh)  # type: ignore[arg-type]


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
    assert len(rollout.samples) == 18
    assert [e.group for e in rollout.episodes] == [
        f"on_policy/1/{task}" for task in range(3) for _ in range(2)
    ]
    assert {r.prefix.version for r in clerk.requests} == {7}
    # Desks take turns, over all steps.
    assert [e.task.document for e in rollout.episodes][::2] == ["desk_01", "desk_02", "desk_01"]
    later = sample(course(learn), clerk, step=1)
    assert [e.task.document for e in later.episodes][::2] == ["desk_02", "desk_01", "desk_02"]


def test_each_generator_has_a_wave_and_the_episodes_are_the_same() -> None:
    learn = spec()
    together, clerk = sample(course(learn), one := Clerk(learn)), Clerk(learn)
    rollout = sample(course(learn, generators=2), clerk)
    assert rollout.episodes == together.episodes
    assert ([len(c) for c in one.calls], one.whole) == ([6] * 3, {False})
    assert ([len(c) for c in clerk.calls], clerk.whole) == ([3] * 6, {True})
    names = [e.task.id for e in rollout.episodes]
    first = [[f"{name}/{t}" for name in names[::2]] for t in range(3)]
    assert [c for c in clerk.calls if c[0].startswith(names[0])] == first


def test_over_vllm_each_episode_moves_alone_and_groups_are_scored_whole() -> None:
    """The members of a group end in any order; a teacher reads them together, in theirs."""
    embedded, learn = spec(), spec("generator.backend=vllm")
    told: list[list[str]] = []
    clerk = Clerk(learn)
    rollout = asyncio.run(
        course(learn).sample(0, 7, clerk, lambda role, some: told.append([s.id for s in some]))
    )
    assert rollout.episodes == sample(course(embedded), Clerk(embedded)).episodes
    assert [len(c) for c in clerk.calls] == [1] * 18
    groups = [[f"on_policy/1/{task}/{m}" for m in range(2)] for task in range(3)]
    assert sorted(ids for ids in told if ids) == groups


def test_openings_are_asked_for_beforehand_and_once() -> None:
    learn = spec()

    async def go(prepared: int | None) -> tuple[Rollout, int, int]:
        environment = Environment()
        cases = course(learn, environment)
        if prepared is not None:
            cases.prepare(prepared)
            await asyncio.sleep(0)
        before = environment.calls
        rollout = await cases.sample(1, 7, Clerk(learn))
        await cases.close()
        return rollout, before, environment.calls

    plain, prepared, other = (asyncio.run(go(step)) for step in (None, 1, 2))
    assert plain[0].episodes == prepared[0].episodes == other[0].episodes
    assert [calls for _, *calls in (plain, prepared, other)] == [[0, 4], [1, 4], [1, 5]]


SHIFT = ("episodes.cases=2", "episodes.max_turns=6")


def test_every_case_of_a_shift_is_a_sequence_with_the_shift_s_reward() -> None:
    learn = spec(*SHIFT)
    cases, clerk = course(learn), Clerk(learn)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout) == {"count": 6, "errored": 0, "turns": 36, "reward": 1.0}
    assert [[t.branch for t in e.turns] for e in rollout.episodes] == [[0, 0, 0, 1, 1, 1]] * 6
    lesson = asyncio.run(cases.train_batch(rollout, 7))
    assert [r.reward for r in lesson.rl] == [1.0] * 12
    longest = max(len(r.sample.prompt_ids) for r in lesson.rl)
    assert longest == max(len(e.turns[0].context_ids) for e in rollout.episodes)


def test_errors_of_every_case_of_a_lost_shift_have_hints() -> None:
    learn = spec(*SHIFT)
    cases, clerk = course(learn), Clerk(learn, able=False)
    rollout = sample(cases, clerk)
    assert facts(cases, rollout)["error/missing_record"] == 36
    lesson = asyncio.run(cases.train_batch(rollout, 7))
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
    lesson = asyncio.run(cases.train_batch(rollout, 7))
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
    lesson = asyncio.run(cases.train_batch(rollout, 7))
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


def test_every_answer_is_kept_with_its_question() -> None:
    learn = spec("evaluate.questions=5")
    kept: dict[str, list[Answer]] = {"able": [], "not": []}
    for arm, able in (("able", True), ("not", False)):
        cases, clerk = course(learn), Clerk(learn, able)
        measured = asyncio.run(
            cases.measure(
                arm, "cartridge", 3, most=None, sampled=False, generate=clerk,
                keep=kept[arm].extend,
            )
        )  # fmt: skip
        assert measured["accuracy"] == sum(a.right or 0.0 for a in kept[arm]) / 5
    able, other = kept["able"], kept["not"]
    assert [a.id for a in able] == [f"exam/{learn.train.seed}/{i}" for i in range(5)]
    assert [a.document for a in able[:3]] == ["desk_01", "desk_02", "desk_01"]
    assert all(a.answer == a.expected and a.answer in str(a.text) for a in able)
    assert {(a.right, a.reward, a.nll) for a in able} == {(1.0, 1.0, None)}
    assert all(a.fact.startswith("what is the ") for a in able)
    for one, two in zip(able, other, strict=True):
        same = ("id", "fact", "document", "document_hash", "question_hash")
        assert [getattr(one, n) for n in same] == [getattr(two, n) for n in same]
    assert {(a.answer, a.right, a.reward) for a in other} == {(None, 0.0, 0.0)}
    assert all(a.tokens > 0 for a in able)


@pytest.mark.parametrize(
    "sets",
    [
        (), ("objective.w_doc=0",), ("objective.alpha=0",), ("objective.sdpo.hints=feedback",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("able", [True, False])
def test_what_is_handed_over_is_what_the_lesson_has(sets: tuple[str, ...], able: bool) -> None:
    learn = spec(*sets)
    cases, clerk = course(learn), Clerk(learn, able)
    told: dict[str, list[Any]] = {"doc_teacher": [], "sdpo_teacher": []}

    def ended(role: str, samples: Sequence[Any]) -> None:
        told[role] += samples

    rollout = asyncio.run(cases.sample(0, 7, clerk, ended))
    lesson = asyncio.run(cases.train_batch(rollout, 7))
    assert told == {
        "doc_teacher": list(lesson.doc),
        "sdpo_teacher": hinted(lesson.turns, lesson.rl),
    }
    assert bool(told["sdpo_teacher"]) == (not able and "objective.alpha=0" not in sets)


@pytest.mark.parametrize("source", ["sibling", "model"])
def test_hints_that_need_the_whole_step_are_scored_with_the_lesson(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clerk who finds nothing has no sibling; as the writer it says what is no help."""
    learn = spec(f"objective.sdpo.hints={source}")
    cases, clerk = course(learn), Clerk(learn, able=False)
    told: list[str] = []
    rollout = asyncio.run(cases.sample(0, 7, clerk, lambda role, samples: told.append(role)))
    assert set(told) == {"doc_teacher"}
    lesson = asyncio.run(cases.train_batch(rollout, 7))
    found = facts(cases, rollout)
    assert len(rollout.hints) == 30
    if source == "sibling":
        assert (lesson.turns, found["no_hint/no_sibling"]) == ((), 30)
        return
    assert len(lesson.turns) == 30
    assert not any(key.startswith("no_hint") for key in found)
    assert {h.text.strip() for h in rollout.hints} == {"find nothing in urology."}
    asked = [r for r in clerk.requests if r.id.startswith("hint/")]
    assert {r.prefix.name for r in asked} == {"document/desk_01", "document/desk_02"}
    assert len(asked) == 30


def test_the_record_has_every_hint(tmp_path: Path) -> None:
    learn = spec("objective.sdpo.hints=feedback")
    cases, clerk = course(learn), Clerk(learn, able=False)
    rows: list[dict[str, Any]] = []
    directory: Any = SimpleNamespace(append_episodes=rows.extend)
    cases.record(sample(cases, clerk), "on_policy", 1, directory)
    turns = [turn for row in rows for turn in row["turns"]]
    assert len(turns) == 30
    assert all(turn["hint"] == turn["observation"]["messages"][0]["content"] for turn in turns)
    assert {turn["no_hint"] for turn in turns} == {""}


class Uneven(Clerk):
    """Knows the handbook in every other episode of the tasks 1, 3 and 5, and in all of task 0."""

    def answer(self, request: GenerateRequest) -> Completion:
        task, member = map(int, request.id.split("/")[2:4])
        self.able = task == 0 or (task % 2 == 1 and member == 0)
        return super().answer(request)


@pytest.mark.parametrize(
    ("sets", "tasks", "told"),
    [
        ((), 3, None),
        (("objective.grpo.refill=1",), 5, {"dropped": 3, "sampled": 2, "missing": 1}),
        (("objective.grpo.refill=4",), 6, {"dropped": 3, "sampled": 3, "missing": 0}),
        (("objective.grpo.refill=4", "objective.w_rl=0"), 3, None),
    ],
)
def test_further_tasks_take_the_place_of_those_without_variance(
    sets: tuple[str, ...], tasks: int, told: dict[str, int] | None
) -> None:
    """Task 0 is solved by all and 2 by none, as is 4, of the first refill."""
    learn = spec(*sets)
    cases, clerk = course(learn), Uneven(learn)
    heard: list[Any] = []

    def ended(role: str, samples: Sequence[Any]) -> None:
        heard.extend(samples if role == "doc_teacher" else ())

    rollout = asyncio.run(cases.sample(0, 7, clerk, ended))
    assert [e.group for e in rollout.episodes] == [
        f"on_policy/1/{task}" for task in range(tasks) for _ in range(2)
    ]
    assert len({r.id for r in clerk.requests}) == len({r.seed for r in clerk.requests})
    counts = {
        k.removeprefix("refill/"): v for k, v in facts(cases, rollout).items() if "refill" in k
    }
    assert counts == (told or {})
    # All episodes are read by the teachers; GRPO itself drops the groups.
    lesson = asyncio.run(cases.train_batch(rollout, 7))
    assert sorted(s.id for s in heard) == sorted(s.id for s in lesson.doc)
    assert len(lesson.doc) == 2 * tasks
    again = Uneven(learn)
    assert asyncio.run(course(learn).sample(0, 7, again)).episodes == rollout.episodes
    # The first tasks are those of a run without refills.
    if learn.objective.w_rl and told:
        plain = Uneven(learn)
        assert asyncio.run(course(spec()).sample(0, 7, plain)).episodes == rollout.episodes[:6]


def test_a_turn_that_its_limit_cut_is_told_to_grpo() -> None:
    class Wordy(Clerk):
        def answer(self, request: GenerateRequest) -> Completion:
            said = super().answer(request)
            cut = request.id.endswith("/1/0")  # the first turn of every task's second episode
            return replace(said, finish_reason="length") if cut else said

    learn = spec("objective.grpo.overlong=filter")
    rollout = sample(course(learn), Wordy(learn))
    lesson = asyncio.run(course(learn).train_batch(rollout, 7))
    assert [r.truncated for r in lesson.rl] == [False, True] * 3
    assert all(r.longest_turn for r in lesson.rl)


def test_the_buffer_of_overlong_turns_fits_a_turn() -> None:
    with pytest.raises(SpecError, match=r"overlong_buffer must be <= rollout.max_tokens \(16\)"):
        spec("objective.grpo.overlong=shape", "objective.grpo.overlong_buffer=17")


def test_the_document_teacher_plays_the_same_cases_and_trains_doc_kl_alone() -> None:
    learn = spec()
    cases, clerk = course(learn), Clerk(learn, able=False)
    ours = sample(cases, clerk, step=4)
    clerk.able = True
    asked = len(clerk.requests)
    (theirs,) = asyncio.run(cases.offline(4, clerk))
    assert {r.prefix.name for r in clerk.requests[asked:]} == {
        "document/desk_01", "document/desk_02",
    }  # fmt: skip
    assert theirs.step == 4
    assert [e.task.arguments for e in theirs.episodes] == [e.task.arguments for e in ours.episodes]
    assert [e.opening for e in theirs.episodes] == [e.opening for e in ours.episodes]
    assert theirs.episodes[0].task.id == "offline/5/0/0"
    assert {e.reward for e in theirs.episodes} == {1.0}
    assert {v for s in theirs.samples for v in s.versions} == {-1}
    assert is_offline(theirs)
    assert not is_offline(ours)
    lesson = asyncio.run(cases.train_batch(theirs, 7))
    assert (lesson.rl, lesson.turns, lesson.pairs) == ((), (), ())
    assert [s.cartridge for s in lesson.doc] == [e.task.document for e in theirs.episodes]
    assert {v for s in lesson.doc for v in s.versions} == {-1}
    # Its own tokens bear the loss, as many as the budget counts; what tools said does not.
    assert sum(map(sum, lesson.doc_marks)) == sum(len(s.response_ids) for s in theirs.samples)
    for marks, s, e in zip(lesson.doc_marks, lesson.doc, theirs.episodes, strict=True):
        own = [i for i, mine in zip(s.response_ids, marks, strict=True) if mine]
        assert own == [i for turn in e.turns for i in turn.response_ids]
        assert not all(marks)


def test_a_desk_that_was_dead_all_along_is_no_text_of_the_teacher() -> None:
    learn = spec()
    rollout = sample(course(learn, Environment(0)), Clerk(learn))
    assert rollout.samples == []
    assert not is_offline(rollout)
