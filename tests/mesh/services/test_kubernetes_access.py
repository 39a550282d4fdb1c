"""Who a run is to a cluster, and where that is: tokens, kubeconfigs, servers that are not there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import ApiServer
from kubernetes_scenarios import BASE, CONTROLLER, hosts, stand_in

from cartridge_forge.plugins.cluster.checks.schemas import definitions
from cartridge_forge.protocols.errors import RunError


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


def test_a_server_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer
) -> None:
    monkeypatch.setattr("cartridge_forge.plugins.cluster.hosts.kubernetes_client.PATIENCE_S", 0.5)
    path = server.kubeconfig(tmp_path / "other", CONTROLLER, server="https://127.0.0.1:1")
    monkeypatch.setenv("KUBECONFIG", str(path))
    said = first_error()
    assert said.startswith("the API server at https://127.0.0.1:1 is not reached (")
    assert "Connection refused" in said


def test_a_server_of_another_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer
) -> None:
    monkeypatch.setattr("cartridge_forge.plugins.cluster.hosts.kubernetes_client.PATIENCE_S", 0.5)
    with ApiServer(BASE, definitions()) as other:
        path = server.kubeconfig(tmp_path / "other", CONTROLLER, server=other.url)
        monkeypatch.setenv("KUBECONFIG", str(path))
        assert "certificate verify failed" in first_error()


BAD_TOKEN = "users: [{name: me, user: {token: 'secret-1}}]"


@pytest.mark.parametrize(
    ("text", "context", "said"),
    [
        (None, "null", "no cluster is configured: "),
        ("", "null", "no cluster is configured: "),
        (BAD_TOKEN, "null", "the kubeconfig cannot be read (ScannerError); check it with"),
        ("[1, 2]", "null", "the kubeconfig cannot be read ("),
        ("{}", "null", "no cluster is configured: "),
        ("good", "prod", "Expected object with name prod in"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used(
    text: str | None,
    context: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: ApiServer,
) -> None:
    if text != "good":
        path = tmp_path / "config"
        monkeypatch.setenv("KUBECONFIG", str(path))
        if text is not None:
            path.write_text(text, encoding="utf-8")
    found = first_error(f"hosts={{kind: kubernetes, kubernetes: {{context: {context}}}}}")
    assert said in found
    assert "secret" not in found
    assert "kubectl config" in found


def test_in_a_pod_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    said = first_error()
    assert said.startswith("no cluster is configured: Service token file does not exist.")
