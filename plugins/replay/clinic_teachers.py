"""Start a local provider with fake teachers that know the desk, for the default demo.

A fake teacher reads the handbook and the episode so far, as any teacher does, and answers with the
next call of a good clerk; at a set rate it answers with a wrong one. Asked for a hint, it writes
that call as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from cartridge_forge.plugins.chat.messages import AgentMessage, ToolAction
from cartridge_forge.plugins.clinic.desk import call_text
from cartridge_forge.plugins.clinic.vocabulary import DEPARTMENTS
from cartridge_forge.plugins.replay.fake_provider.app import (
    FakeProvider,
    FaultRates,
    ProviderRequest,
    sometimes_right,
)
from cartridge_forge.plugins.replay.prompts import HINT_INSTRUCTIONS
from cartridge_forge.plugins.replay.spec import LocalSpec, ReplayLearn, ReplaySpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.secrets import LOCAL_KEY
from cartridge_forge.protocols.spec.mesh import RunSpec

KEY_ENV = LOCAL_KEY

_TURN = re.compile(r"(?:^|\n\n)\[(system|user|assistant|tool)\]\n")
_ASKED = re.compile(r"what is the (\S+)\?")
_NOTE = re.compile(r"note (\d+)\.")


def local_provider(spec: ReplaySpec, local: LocalSpec) -> FakeProvider:
    """Return the provider of the spec's teachers, not started."""
    faults = FaultRates(
        rate_limit=local.rate_limit, server_error=local.server_error, latency_s=local.latency_s,
        seed=local.seed,
    )  # fmt: skip
    right = partial(_answer, right=True)
    rule = sometimes_right(right, partial(_answer, right=False), local.right, local.seed)
    return FakeProvider(rule, {t.model: t.prices for t in spec.teachers}, faults)


def at(spec: ReplaySpec, provider: FakeProvider) -> ReplaySpec:
    """Return the spec with every teacher's URL at the provider."""
    urls = {"openai": provider.openai_url, "anthropic": provider.url}
    teachers = [
        t.model_copy(update={"base_url": urls[t.provider], "key_env": KEY_ENV})
        for t in spec.teachers
    ]
    return spec.model_copy(update={"teachers": tuple(teachers)})


def next_call(messages: Sequence[AgentMessage]) -> ToolAction:
    """Return a good clerk's next call; `messages` begin with the handbook. Raises DataError if they
    are no case of the desk."""
    handbook = " ".join(m.content for m in messages if m.role == "system")
    field = next((f for m in messages if m.role == "user" for f in _ASKED.findall(m.content)), "")
    department = re.search(rf"(?:^|\. ){re.escape(field)} (\w+)\.", handbook)
    if not field or department is None:
        raise DataError("a clerk needs a handbook and a question about one of its fields")
    replies = [m.content for m in messages if m.role == "tool"]
    for text in reversed(replies):
        value = re.fullmatch(rf"{re.escape(field)} (.+)\.", text)
        if value:
            return ToolAction("answer", {"value": value[1]})
    for text in reversed(replies):
        note = _NOTE.fullmatch(text)
        if note:
            return ToolAction("read", {"note": int(note[1])})
    return ToolAction("find", {"field": field, "department": department[1]})


def _answer(request: ProviderRequest, right: bool) -> str:
    parts = _TURN.split(request.user)
    turns = zip(parts[1::2], parts[2::2], strict=True)
    messages = [
        AgentMessage(role, text)  # type: ignore[arg-type]  # the pattern matches only roles
        for role, text in turns
    ]
    try:
        call = next_call(messages)
    except DataError:
        return "I do not know."
    if not right:
        other = next(d for d in DEPARTMENTS if d != call.arguments.get("department"))
        call = ToolAction("find", {"field": "nothing", "department": other})
    if request.system.startswith(HINT_INSTRUCTIONS):
        return json.dumps({"kind": "text", "tool": "", "arguments": "", "answer": call_text(call)})
    arguments = json.dumps(dict(call.arguments))
    return json.dumps({"kind": "tool", "tool": call.tool, "arguments": arguments, "answer": ""})


@contextmanager
def local_teachers(spec: RunSpec) -> Iterator[RunSpec]:
    """Yield the spec with its external teachers at a local provider (`replay.local`), meanwhile."""
    replay = ReplayLearn.of(spec.learn).replay
    assert replay is not None
    assert replay.local is not None
    with local_provider(replay, replay.local) as provider:
        learn = spec.learn.model_copy(update={"replay": at(replay, provider)})
        yield spec.model_copy(update={"learn": learn})
