"""The readiness probe's client, against a control plane that serves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trustme
from fake_run_control import served

from forge_run.commands.health_check import main
from protocols.spec.services import ControlSpec


def test_a_control_plane_serves_and_then_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as here:
        assert main([here.address]) == 0
    assert main([here.address]) == 1
    assert capsys.readouterr().err == f"{here.address}: UNAVAILABLE\n"


def test_tls_and_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    pair.private_key_pem.write_to_path(tmp_path / "tls.key")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    monkeypatch.setenv("CONTROL_TOKEN", "s3cret-token")
    spec = ControlSpec(
        listen="localhost:0",
        token_env="CONTROL_TOKEN",
        tls_cert=str(tmp_path / "tls.crt"),
        tls_key=str(tmp_path / "tls.key"),
    )
    ca = str(tmp_path / "ca.crt")
    with served(spec) as here:
        assert main([here.address, ca, "CONTROL_TOKEN"]) == 0
        assert main([here.address, ca]) == 1  # kubelet's own probe would send no token either
    assert capsys.readouterr().err == f"{here.address}: UNAUTHENTICATED\n"


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert main([f"127.0.0.1:{held.getsockname()[1]}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
