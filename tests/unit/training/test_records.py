"""How far an evaluation is: told at each reply, and to whoever listens already."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef, Sampling
from cartridge_forge.services.clients import Replied
from cartridge_forge.training.records import counted


async def in_two_replies(
    requests: Sequence[GenerateRequest], replied: Replied = None, /, *, whole: bool = False
) -> list[Completion]:
    made = [Completion(r.id, (2,), (0.0,), (1,), "stop") for r in requests]
    assert replied is not None
    replied(made[:2])
    replied(made[2:])
    return made


def test_answers_are_counted_as_they_come() -> None:
    asked = [
        GenerateRequest(f"e/{i}", (4,), PrefixRef("document/a", 0), Sampling(), i) for i in range(3)
    ]
    told: list[tuple[int, int]] = []
    heard: list[str] = []

    def listens(completions: Sequence[Completion]) -> None:
        heard.extend(one.request_id for one in completions)

    generate = counted(in_two_replies, lambda done, whole: told.append((done, whole)))
    made = asyncio.run(generate(asked, listens))
    assert told == [(2, 3), (3, 3)]
    assert heard == [one.request_id for one in made] == ["e/0", "e/1", "e/2"]
