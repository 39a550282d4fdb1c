"""Who a run is to a cluster, and where that is: tokens, kubeconfigs, servers that are not there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer
from kubernetes_scenarios import hosts, stand_in

from protocols.errors import RunError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with stand_in(tmp_path, monkeypatch) as found:
        yield found


def first_error(*sets: str) -> str:
    async def go() -> str:
        with pytest.raises(RunError) as caught:
            async with hosts(*sets) as seen:
                await seen.first()
        assert caught.value.__cause__ is None
        return str(caught.value)

    return asyncio.run(go())


def test_a_token_that_is_not_known(
    server: ApiServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("DEBUG")
    server.forget_tokens()
    said = first_error()
    assert said.startswith(f"the API server at {server.url} does not know our credentials (401)")
    assert "secret-" in (tmp_path / "controller.yaml").read_text(encoding="utf-8")
    assert "secret-" not in said + caplog.text
