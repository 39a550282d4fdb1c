"""Where hints come from: the generator, an external teacher, siblings; and what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_setup import HANDBOOK, LOST, RIGHT, conversation, episode_of

from cartridge_forge.plugins.clinic.desk import HINTS
from cartridge_forge.plugins.episodes.hint_writers import HintWriter
from cartridge_forge.plugins.episodes.spec.objective import SdpoSpec
from cartridge_forge.protocols.episodes import Episode, TurnHint
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.protocols.teacher_replay import ReplayState

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
