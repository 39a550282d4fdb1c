"""The demo's teachers: what they call next, and that the official clients reach them."""

from __future__ import annotations

import json
import random

import pytest
from episode_setup import replayed

from cartridge_forge.plugins.chat.messages import AgentMessage, ReplayState, ToolAction
from cartridge_forge.plugins.clinic.desk import TOOLS, call_text, draw_case, draw_desk
from cartridge_forge.plugins.replay.actions import canonical
from cartridge_forge.plugins.replay.clinic_teachers import KEY_ENV, at, local_provider, next_call
from cartridge_forge.plugins.replay.fake_provider.app import ProviderRequest
from cartridge_forge.plugins.replay.prompts import read_answer, render
from cartridge_forge.plugins.replay.spec import LocalSpec, PriceSpec, ReplaySpec, ReplayTeacherSpec
from cartridge_forge.protocols.errors import DataError

PRICES = PriceSpec(input=1.0, output=1.0)
SPEC = ReplaySpec(
    teachers=(
        ReplayTeacherSpec(name="a", provider="anthropic", model="big", prices=PRICES),
        ReplayTeacherSpec(name="b", provider="openai", model="small", prices=PRICES),
    ),
    cap=1.0,
    local=LocalSpec(right=1.0),
)


def seen(handbook: str, question: str, *said: tuple[str, str]) -> tuple[AgentMessage, ...]:
    turns = [
        m
        for call, reply in said
        for m in (AgentMessage("assistant", call), AgentMessage("tool", reply))
    ]
    return (AgentMessage("system", handbook), AgentMessage("user", question), *turns)


@pytest.mark.parametrize("seed", range(20))
def test_a_good_clerk_ends_every_case_right_whatever_went_before(seed: int) -> None:
    desk = draw_desk(3, 1 + seed % 2, 12)
    case = draw_case(desk, seed)
    stumbles = ["look here", "find surgeon.", "read note 5.", "find sodium in urology."]
    texts = random.Random(seed).sample(stumbles, seed % 4)
    for _ in range(3):
        standings = replayed(case, texts, 20)[1:]
        said = [(t, s.reply.text) for t, s in zip(texts, standings, strict=True) if s.reply]
        texts.append(call_text(next_call(seen(desk.document, case.question, *said))))
    last = replayed(case, texts, 20)[-1].reply
    assert last is not None
    assert (last.done, last.reward) == (True, 1.0)


def test_what_is_no_case_of_a_desk_is_refused() -> None:
    for messages in ((), seen("surgeon urology.", "how are you?"), seen("", "what is the pulse?")):
        with pytest.raises(DataError, match="a clerk needs a handbook"):
            next_call(messages)


@pytest.mark.parametrize(("right", "agrees"), [(1.0, True), (0.0, False)])
def test_it_answers_what_a_teacher_is_shown(right: float, agrees: bool) -> None:
    state = ReplayState(
        "e/0", 1, seen("surgeon cardiology. sodium urology.", "what is the sodium?", ("x", "y")),
        TOOLS, ToolAction("x", {"words": ""}),
    )  # fmt: skip
    prompt = render(state)
    with local_provider(SPEC, LocalSpec(right=right)) as provider:
        said = provider.rule(ProviderRequest("small", prompt.system, prompt.user))
    found, why = read_answer(said, state)
    best = canonical(ToolAction("find", {"field": "sodium", "department": "urology"}), state)
    assert (found == best, why) == (agrees, "")
    assert json.loads(said)["kind"] == "tool"


def test_every_teacher_is_sent_to_the_provider_on_loopback() -> None:
    assert SPEC.local is not None
    with local_provider(SPEC, SPEC.local) as provider:
        here = at(SPEC, provider)
    assert [t.key_env for t in here.teachers] == [KEY_ENV] * 2
    assert all((t.base_url or "").startswith("http://127.0.0.1:") for t in here.teachers)
    assert [t.name for t in here.teachers] == ["a", "b"]
