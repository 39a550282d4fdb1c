"""The readiness probe's client, against a control plane that serves."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fake_run_control import served

from cartridge_forge.forge_run.commands.health_check import main
from cartridge_forge.plugins.cluster.tls.certificates import certificates
from cartridge_forge.protocols.spec.services import ControlSpec


def test_a_control_plane_serves_and_then_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as here:
        assert main([here.address]) == 0
    assert main([here.address]) == 1
    assert capsys.readouterr().err == f"{here.address}: UNAVAILABLE\n"


def test_mutual_tls_and_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [own] = certificates(tmp_path / "mesh", [("localhost",)])
    [foreign] = certificates(tmp_path / "foreign", [("localhost",)])
    monkeypatch.setenv("CONTROL_TOKEN", "s3cret-token")
    spec = ControlSpec(
        listen="localhost:0",
        token_env="CONTROL_TOKEN",
        tls_ca=str(own / "ca.crt"),
        tls_cert=str(own / "tls.crt"),
        tls_key=str(own / "tls.key"),
    )
    with served(spec) as here:
        assert main([here.address, str(own), "CONTROL_TOKEN"]) == 0
        assert main([here.address, str(own)]) == 1  # kubelet's own probe would send no token either
        assert capsys.readouterr().err == f"{here.address}: UNAUTHENTICATED\n"
        assert main([here.address, str(foreign), "CONTROL_TOKEN"]) == 1
        assert capsys.readouterr().err == f"{here.address}: UNAVAILABLE\n"
        assert main([here.address, str(tmp_path), "CONTROL_TOKEN"]) == 1
        assert f"DIR: cannot read {tmp_path / 'ca.crt'}" in capsys.readouterr().err


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert main([f"127.0.0.1:{held.getsockname()[1]}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
