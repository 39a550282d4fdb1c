"""A model as a judge, over the teachers' client, budget and ledger."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from replay_setup import KEY, KEY_ENV, a_spec, a_teacher

from cartridge_forge.plugins.chat.messages import AgentMessage, ReplayState, TextAction
from cartridge_forge.plugins.replay.clients import connect
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, ProviderRequest
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import TeacherPanel, limits_of, score_of_teacher
from cartridge_forge.plugins.replay.prompts import EPISODE_INSTRUCTIONS

STATE = ReplayState(
    "t/0", 1, (AgentMessage("user", "2 + 2"), AgentMessage("assistant", "4")), (), TextAction("4")
)


def said(request: ProviderRequest) -> str:
    assert request.system == EPISODE_INSTRUCTIONS
    number = "0.75" if "A right answer: 4" in request.user else "2"
    return json.dumps({"kind": "text", "tool": "", "arguments": "", "answer": number})


def test_a_judge_gives_a_number_once_for_its_money(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)

    async def asked(url: str) -> list[tuple[float | None, str]]:
        teacher = a_teacher("judge", f"{url}/v1")
        spec = a_spec(teacher, quorum=1)
        panel = TeacherPanel(
            spec, SpendLedger(tmp_path / "ledger.jsonl", limits_of(spec)), "run-1",
            {"judge": connect(teacher)},
        )  # fmt: skip
        try:
            return [
                await score_of_teacher(
                    panel, teacher, STATE, "Is it right?", reference, time.monotonic() + 30
                )
                for reference in ("4", "4", "5")
            ]
        finally:
            await panel.close()

    prices = {"model-judge": a_teacher("judge", "http://x").prices}
    with FakeProvider(said, prices) as provider:
        found = asyncio.run(asked(provider.url))
        calls = len(provider.served)
    assert found[:2] == [(0.75, ""), (0.75, "")]  # the second from the ledger
    assert found[2] == (None, "unparseable: no number from 0 to 1")
    assert calls == 2
