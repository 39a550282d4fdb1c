"""A panel of teachers over a local provider, its verdicts and what it spent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from replay_setup import KEY, READ, a_spec, a_state, a_teacher, prices, right

from cartridge_forge.plugins.chat.messages import AgentTool, PanelVerdict, ReplayState
from cartridge_forge.plugins.replay.budget import SpendTotals, TeacherCall
from cartridge_forge.plugins.replay.clients import connect
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider
from cartridge_forge.plugins.replay.ledger import SpendLedger
from cartridge_forge.plugins.replay.panel import TeacherPanel, ask_teachers, limits_of
from cartridge_forge.plugins.replay.spec import ReplaySpec, ReplayTeacherSpec

MODELS = prices(a_spec(*(a_teacher(name, "http://127.0.0.1:1") for name in "abcde")))


@pytest.fixture
def provider() -> Iterator[FakeProvider]:
    """Yield a provider that answers right."""
    with FakeProvider(right, MODELS, key=KEY) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the ledger is."""
    return tmp_path / "ledger.jsonl"


def both(provider: FakeProvider, **other: Any) -> tuple[ReplayTeacherSpec, ReplayTeacherSpec]:
    """Return two teachers, one of each SDK."""
    return (
        a_teacher("a", provider.openai_url, **other),
        a_teacher("b", provider.url, "anthropic", **other),
    )


def judge(
    path: Path, spec: ReplaySpec, *states: ReplayState, online: bool = True, run: str = "run"
) -> list[PanelVerdict]:
    """The verdicts, asked for one after the other by one desk."""

    async def ask_all() -> list[PanelVerdict]:
        ledger = SpendLedger(path, limits_of(spec))
        clients = {t.name: connect(t) for t in spec.teachers} if online else {}
        desk = TeacherPanel(spec, ledger, run, clients)
        try:
            return [await ask_teachers(desk, state) for state in states]
        finally:
            await desk.close()

    return asyncio.run(ask_all())


def totals(path: Path, spec: ReplaySpec, run: str = "run") -> SpendTotals:
    """Return what a run has spent, as its ledger says."""
    ledger = SpendLedger(path, limits_of(spec))
    try:
        return ledger.totals(run)
    finally:
        ledger.close()


TYPED = AgentTool(
    "typed",
    "One argument of each type.",
    {
        "type": "object",
        "properties": {
            "i": {"type": "integer"},
            "n": {"type": "number"},
            "s": {"type": "string"},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"type": "object", "properties": {"i": {"type": "integer"}}},
        },
    },
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
TYPED_STATE = a_state(tools=(TYPED, READ))

SPEC = a_spec(a_teacher("a", "http://127.0.0.1:1"))
CALL = TeacherCall("k", "a", "run", 5_000)


def opened(path: Path) -> SpendLedger:
    """Return the ledger at a path."""
    return SpendLedger(path, limits_of(SPEC), lock_timeout_s=5.0)
