"""Test preferences between actions, and writers of hints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import HANDBOOK, LOST, RIGHT, conversation, episode_of

from cartridge_forge.plugins.chat.episodes import Episode, TurnHint
from cartridge_forge.plugins.chat.messages import (
    AgentMessage,
    PanelVerdict,
    ReplayState,
    TeacherVote,
    ToolAction,
)
from cartridge_forge.plugins.clinic.desk import HINTS
from cartridge_forge.plugins.environments.action_parsing import DESK
from cartridge_forge.plugins.environments.training_signals import replay_states
from cartridge_forge.plugins.episodes.hint_writers import HintWriter
from cartridge_forge.plugins.episodes.preferences import AskedState, PreferenceQueue
from cartridge_forge.plugins.episodes.spec.objective import SdpoSpec
from cartridge_forge.plugins.replay.actions import canonical
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.spec import (
    DpoSpec,
    GateSpec,
    PriceSpec,
    ReplaySpec,
    ReplayTeacherSpec,
)
from cartridge_forge.plugins.replay.voting import decide
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PreferencePair,
    ReferenceOutput,
)

BETTER = ToolAction("find", {"field": "surgeon", "department": "cardiology"})
SPEC = ReplaySpec(
    teachers=tuple(
        ReplayTeacherSpec(name=n, provider="openai", model=n, prices=PriceSpec(input=1, output=1))
        for n in ("a", "b")
    ),
    gate=GateSpec(everywhere=True),
    cap=1.0,
)

INITIAL = 5

Answer = Callable[[ReplayState], Coroutine[Any, Any, PanelVerdict]]


def vote(state: ReplayState, teacher: str) -> TeacherVote:
    return TeacherVote(
        state_hash(state), teacher, "k", "", canonical(BETTER, state), None, 0, 0.0, 1, ""
    )


async def agreed(state: ReplayState) -> PanelVerdict:
    return decide(state, [vote(state, "a"), vote(state, "b")], 2)


async def silent(state: ReplayState) -> PanelVerdict:
    await asyncio.Event().wait()
    raise AssertionError


async def lost(state: ReplayState) -> PanelVerdict:
    raise RunError("teacher_replay.vote was lost 5 times")


class Pools:
    """Of the teachers one answer; references of -2 and -3, of the SDPO teacher at the version asked
    for, of the trainer at the arm's first one, INITIAL."""

    def __init__(self, answer: Answer = agreed) -> None:
        self.answer = answer
        self.asked: list[ReplayState] = []
        self.referred: list[tuple[list[str], int]] = []
        self.role = ""

    def __getitem__(self, role: str) -> Pools:
        self.role = role
        return self

    async def route(self, method: str, *args: Any) -> Any:
        if method == "vote":
            self.asked.append(args[0])
            return await self.answer(args[0])
        pairs: Sequence[PreferencePair] = args[0]
        version = INITIAL if self.role == "trainer" else args[1]
        self.referred.append(([p.id for p in pairs], version))
        known = {"ref_chosen": -2.0, "ref_rejected": -3.0, "ref_version": version}
        return ReferenceOutput(0.0, tuple(replace(p, **known) for p in pairs))


def preferences(pools: Pools, **dpo: Any) -> PreferenceQueue:
    return PreferenceQueue(pools, SPEC, DpoSpec(**dpo), conversation(), DESK)  # type: ignore[arg-type]


def questions(step: int) -> list[AskedState]:
    """The first state of an episode that went wrong; of each step another one."""
    state, context, response = replay_states([episode_of(LOST)], DESK)[0]
    messages = (AgentMessage("system", f"{HANDBOOK} {step}."), *state.messages)
    shown = replace(state, trace_id=f"{step}", messages=messages)
    return [AskedState(step, "desk_01", shown, context, response)]


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_pairs_join_after_the_lag_and_stay_for_their_uses() -> None:
    async def scenario() -> None:
        pools = Pools()
        p = preferences(pools, lag=2, uses=2, pairs=8, reference="first_use")
        p.ask(questions(0))
        await soon()
        joined = []
        for step in range(1, 6):
            joined.append([pair.ref_version for pair in await p.due(step, version=10 + step)])
        # Asked at step 0: at 1 too early, at 2 with references of version 12, at 3 once more.
        assert joined == [[], [12], [12], [], []]
        assert pools.referred == [(["0/0"], 12)]
        assert p.counted() == {"pair": 1, "trained": 1}
        assert not p.counted()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("dpo", "versions", "referred"),
    [
        ({}, [[5], [5], [5]], [(["0/0"], 5)]),
        ({"reference": "first_use"}, [[11], [11], [11]], [(["0/0"], 11)]),
        (
            {"reference": "first_use", "max_reference_age": 1},
            [[11], [11], [13]],
            [(["0/0"], 11), (["0/0"], 13)],
        ),
        ({"variant": "simpo"}, [[-1], [-1], [-1]], []),
    ],
    ids=["initial", "first_use", "too_old", "none_needed"],
)
def test_a_pair_is_compared_with_its_reference(
    dpo: dict[str, Any], versions: list[list[int]], referred: list[tuple[list[str], int]]
) -> None:
    async def scenario() -> None:
        pools = Pools()
        p = preferences(pools, uses=3, **dpo)
        p.ask(questions(0))
        await soon()
        joined = [[x.ref_version for x in await p.due(s, version=10 + s)] for s in (1, 2, 3)]
        assert (joined, pools.referred) == (versions, referred)

    asyncio.run(scenario())


def test_states_that_say_the_same_are_asked_once_and_no_more_than_wanted() -> None:
    async def scenario() -> None:
        pools = Pools()
        p = preferences(pools, states=3)
        same = questions(0)
        p.ask([*same, *same, *(q for step in range(1, 5) for q in questions(step))])
        await soon()
        assert [s.trace_id for s in pools.asked] == ["0", "1", "2"]

    asyncio.run(scenario())


def test_the_least_confident_states_are_asked_about() -> None:
    async def scenario() -> None:
        pools = Pools()
        p = preferences(pools, states=2)
        sure = [
            replace(q, state=replace(q.state, confidence=confidence))
            for step, confidence in enumerate((0.9, 0.1, 0.8, 0.2))
            for q in questions(step)
        ]
        p.ask(sure)
        await soon()
        assert [s.confidence for s in pools.asked] == [0.1, 0.2]

    asyncio.run(scenario())


@pytest.mark.parametrize(("answer", "why"), [(silent, "too_late"), (lost, "unanswered")])
def test_teachers_that_do_not_answer_hold_nobody_up(answer: Answer, why: str) -> None:
    async def scenario() -> None:
        p = preferences(Pools(answer), max_age=3)
        p.ask(questions(0))
        for step in range(1, 6):
            async with asyncio.timeout(1.0):
                assert await p.due(step, step) == []
            await soon()
        assert p.counts[why] == 1
        await p.close()

    asyncio.run(scenario())


def test_what_is_under_way_survives_a_checkpoint() -> None:
    """Silent teachers' states are asked again, pairs keep their references and their uses."""

    async def scenario() -> None:
        pools = Pools()
        p = preferences(pools, uses=3)
        p.ask(questions(0))
        await soon()
        (before,) = await p.due(1, 7)
        pools.answer = silent
        p.ask(questions(1))
        saved = json.loads(json.dumps(p.saved()))
        await p.close()

        later = Pools()
        again = preferences(later, uses=3)
        again.restore(saved)
        await soon()
        assert [s.trace_id for s in later.asked] == ["1"]
        first, second = await again.due(2, 8)
        assert first == before
        assert (second.id, second.ref_version) == ("1/0", INITIAL)
        assert again.counts["trained"] == 2

    asyncio.run(scenario())


def test_a_checkpoint_of_an_older_run_has_unanimous_pairs() -> None:
    async def scenario() -> None:
        p = preferences(Pools(), uses=3)
        p.ask(questions(0))
        await soon()
        (pair,) = await p.due(1, 7)
        saved = json.loads(json.dumps(p.saved()))
        await p.close()
        for held in saved["held"]:
            del held["pair"]["chosen_share"], held["pair"]["rejected_share"]
        again = preferences(Pools(), uses=3)
        again.restore(saved)
        assert await again.due(2, 8) == [pair]
        assert (pair.chosen_share, pair.rejected_share) == (1.0, 0.0)

    asyncio.run(scenario())


def test_what_teachers_said_is_told_once() -> None:
    async def scenario() -> None:
        p = preferences(Pools())
        p.ask(questions(0))
        await soon()
        await p.due(1, 1)
        told = p.told()
        assert [row["record"] for row in told] == ["state", "verdict", "pair"]
        assert [v["teacher"] for v in told[1]["votes"]] == ["a", "b"]
        assert p.told() == []

    asyncio.run(scenario())


TALK = conversation()
EPISODES = [episode_of(LOST)]  # turns 0 and 1 meet errors; its answer is weber


class Generator:
    """Writes these texts in turn, or hangs."""

    def __init__(self, *texts: str, hangs: bool = False) -> None:
        self.texts, self.hangs = texts, hangs
        self.requests: list[GenerateRequest] = []

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: Any = None
    ) -> list[Completion]:
        self.requests += requests
        if self.hangs:
            await asyncio.sleep(3600)
        done = []
        for request, text in zip(requests, self.texts, strict=True):
            ids = TALK.saying(text)
            done.append(Completion(request.id, ids, (-0.1,) * len(ids), (0,) * len(ids), "stop"))
        return done


class Teachers:
    """The pool of external teachers: one hint, its reason, or the loss of the call."""

    def __init__(self, hint: tuple[str, str] | None) -> None:
        self.hint = hint
        self.asked: list[tuple[Any, ...]] = []

    async def route(self, method: str, *args: Any) -> tuple[str, str]:
        assert method == "hint"
        self.asked.append(args)
        if self.hint is None:
            raise RunError("teacher_replay.hint was lost 5 times with its replica")
        return self.hint


def written(
    spec: SdpoSpec,
    generate: Any = None,
    episodes: Sequence[Episode] = EPISODES,
    teachers: Any = None,
    row_tokens: int = 256,
) -> list[TurnHint]:
    pools: Any = {"teacher_replay": teachers}
    writer = HintWriter(spec, HINTS, TALK, {"desk_01": HANDBOOK}, pools, row_tokens)
    return asyncio.run(writer.write(episodes, 7, generate))


def hints(*texts: tuple[str, str]) -> list[TurnHint]:
    return [TurnHint("desk/12/0/1", t, *text) for t, text in enumerate(texts)]


def test_templates_and_feedback_need_no_call_and_are_known_at_once() -> None:
    writer = HintWriter(SdpoSpec(hints="feedback"), HINTS, TALK, {}, {}, 256)
    told = hints(("no surgeon in urology.", ""), ("no such tool.", ""))
    assert writer.at_once(EPISODES) == told
    assert written(SdpoSpec(hints="feedback")) == told
    by_template = hints(
        ("the handbook says surgeon cardiology.", ""), ("the tools are find read answer.", "")
    )
    assert written(SdpoSpec()) == by_template
    writer = HintWriter(SdpoSpec(hints="sibling"), HINTS, TALK, {}, {}, 256)
    assert writer.at_once(EPISODES) is None


def test_siblings_are_the_steps_own_episodes() -> None:
    right = replace(episode_of(RIGHT), task=replace(EPISODES[0].task, id="desk/12/0/2"))
    spec = SdpoSpec(hints="sibling")
    found = written(spec, episodes=[*EPISODES, right])
    assert [(h.turn, h.why) for h in found] == [(0, ""), (1, "")]
    assert found[0].text.startswith("assistant: find surgeon in cardiology.\ntool: note 17.")
    assert written(spec) == hints(("", "no_sibling"), ("", "no_sibling"))
    unreached = SdpoSpec(hints="sibling", sibling_reward=2.0)
    assert written(unreached, episodes=[*EPISODES, right]) == written(spec)


@pytest.mark.parametrize(
    ("context", "prefix", "version"),
    [("document", "document/desk_01", 0), ("cartridge", "cartridge/desk_01", 7)],
)
def test_the_generator_reads_the_conversation_the_error_and_the_question(
    context: Any, prefix: str, version: int
) -> None:
    spec = SdpoSpec(hints="model", hint_context=context, hint_prompt="what next?", hint_tokens=9)
    generator = Generator("find surgeon in cardiology.", "answer WEBER.")
    found = written(spec, generator)
    assert found == hints(
        ("find surgeon in cardiology.", ""), ("answer WEBER.", "leaks_answer")
    )  # fmt: skip
    first, second = generator.requests
    assert (first.id, second.id) == ("hint/desk/12/0/1/0", "hint/desk/12/0/1/1")
    assert (first.prefix.name, first.prefix.version) == (prefix, version)
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.0, 9)
    # The student's next context, token for token, with the question before its generation prompt.
    following = EPISODES[0].turns[1].context_ids
    assert first.prompt_ids == TALK.with_hint(following, "what next?")
    assert second.prompt_ids == TALK.with_hint(EPISODES[0].turns[2].context_ids, "what next?")
    silent = Generator("a", "b")
    written(spec.model_copy(update={"hint_prompt": ""}), silent)
    assert silent.requests[0].prompt_ids == following


def test_what_a_generator_does_not_write_is_counted() -> None:
    spec = SdpoSpec(hints="model", hint_timeout_s=0.01)
    late = hints(("", "writer_timeout"), ("", "writer_timeout"))
    assert written(spec, Generator(hangs=True)) == late
    assert written(spec, Generator(" ", "b")) == hints(("", "no_hint"), ("b", ""))
    none = Generator()
    assert written(spec, none, row_tokens=64) == hints(("", "too_long"), ("", "too_long"))
    assert none.requests == []
    right = episode_of(RIGHT)
    assert written(spec, none, [right]) == []


def test_an_episode_that_broke_off_is_checked_by_its_tasks_answer() -> None:
    broken = episode_of(LOST[:1])
    assert broken.error_kind
    other = replace(episode_of(RIGHT), task=replace(broken.task, id="desk/12/0/2"))
    spec = SdpoSpec(hints="model")
    assert written(spec, Generator("weber."), [broken, other]) == hints(("weber.", "leaks_answer"))
    assert written(spec, Generator("weber."), [broken]) == hints(("weber.", ""))


def test_a_teacher_reads_the_document_and_the_conversation_up_to_the_error() -> None:
    teachers = Teachers(("ask cardiology.", ""))
    spec = SdpoSpec(hints="model", hint_writer="opus", hint_prompt="Hint?", hint_timeout_s=9.0)
    found = written(spec, teachers=teachers)
    assert found == hints(("ask cardiology.", ""), ("ask cardiology.", ""))
    name, state, asked, timeout_s = teachers.asked[0]
    assert (name, asked, timeout_s) == ("opus", "Hint?", 9.0)
    assert isinstance(state, ReplayState)
    assert [(m.role, m.content.strip()) for m in state.messages] == [
        ("system", HANDBOOK),
        ("user", "what is the surgeon?"),
        ("assistant", "find surgeon in urology."),
        ("tool", "no surgeon in urology."),
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("weber.", ""), ("weber.", "leaks_answer")),
        (("", "deadline"), ("", "writer_timeout")),
        (("", "timeout"), ("", "writer_timeout")),
        (("", "budget_run"), ("", "writer_failed")),
        (("", "unparseable: no hint"), ("", "writer_failed")),
        (None, ("", "writer_failed")),
    ],
)
def test_a_teacher_without_a_hint_costs_the_hint_alone(
    said: tuple[str, str] | None, expected: tuple[str, str]
) -> None:
    spec = SdpoSpec(hints="model", hint_writer="opus")
    assert written(spec, teachers=Teachers(said)) == hints(expected, expected)
