"""External models: the official SDKs against real servers on loopback."""

from typing import Any

import pytest
from rooms.strategies.api_endpoint_setup import KEY, anthropic_at, asks, openai_at, say

from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, FaultRates
from cartridge_forge.protocols.errors import RunError


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KEY", KEY)


@pytest.mark.parametrize("at", [openai_at, anthropic_at])
def test_what_never_answers_ends_in_time(at: Any, provider: FakeProvider) -> None:
    provider.faults = FaultRates(stall=1.0)
    try:
        with pytest.raises(RunError, match="q/0 to tiny: timeout at attempt 2 of 2"):
            say(at(provider.url, timeout_s=0.3, attempts=2), asks())
    finally:
        provider.faults = FaultRates()
