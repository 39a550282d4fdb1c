"""Another user of the host reaches nothing of a run or a worker: no socket of its processes, and
not its control plane."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from other_user import listeners, opened_by_nobody
from small_run import ROOT, command, running

from cartridge_forge.plugins.watch.commands.control import control_target
from cartridge_forge.plugins.watch.commands.control_client import ControlClient
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints
from cartridge_forge.protocols.wire import control_pb2 as pb
from cartridge_forge.protocols.wire.control_pb2_grpc import ControlStub
from cartridge_forge.services.proc_info import descendants


def closed_to_others(pids: list[int]) -> list[int]:
    """Check every Unix socket of the processes, and return their TCP ports."""
    unix, ports = listeners(pids)
    assert unix, "Monarch listens somewhere"
    assert [name for name in unix if name.startswith("@")] == []
    for name in unix:
        assert stat.S_IMODE(Path(name).parent.stat().st_mode) == 0o700, name
    if os.geteuid() == 0:
        assert opened_by_nobody(unix) == []
    return ports


def test_a_run_is_closed_to_other_users_and_leaves_no_socket(tmp_path: Path) -> None:
    sets = {"evaluate__arms": ["on_policy"], "train__steps": 500, "telemetry__metrics": None}
    words = command(tmp_path / "runs", **sets)
    short = Path("/tmp") / f"ou{os.getpid()}"
    short.mkdir(mode=0o700)
    before = os.environ.get("TMPDIR"), os.environ.get("XDG_RUNTIME_DIR")
    try:
        os.environ["TMPDIR"], _ = str(short), os.environ.pop("XDG_RUNTIME_DIR", None)
        with running(words, tmp_path / "runs") as run:
            path = run.wait_for("on_policy", 1)
            ports = closed_to_others([run.process.pid, *descendants(run.process.pid)])
            endpoints = read_endpoints(path)
            assert ports == [int(endpoints.control.rpartition(":")[2])]
            token = (path / "control.token").read_text().strip()
            assert stat.S_IMODE((path / "control.token").stat().st_mode) == 0o600
            with grpc.insecure_channel(endpoints.control) as channel:
                stub = ControlStub(channel)
                for metadata in ([], [("authorization", "Bearer " + token[::-1])]):
                    for call, request in (
                        (stub.Status, pb.StatusRequest()), (stub.Stop, pb.StopRequest()),
                    ):  # fmt: skip
                        with pytest.raises(grpc.RpcError) as refused:
                            call(request, timeout=20, metadata=metadata)
                        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with ControlClient(control_target(str(path), tmp_path, None, None, None)) as client:
                assert client.status()[0] == path.name
            run.stop()
        assert list(short.iterdir()) == []
    finally:
        for name, value in zip(("TMPDIR", "XDG_RUNTIME_DIR"), before, strict=True):
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    assert not (path / "control.token").exists()
    for file in path.rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes(), file


def test_a_worker_is_closed_to_other_users(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["worker", "--address", f"tcp://127.0.0.1:{port}"]
    code = f"import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge({words}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            assert "waits for controllers" in worker.stdout.readline()
            closed_to_others([worker.pid])
        finally:
            worker.terminate()
            worker.wait(timeout=60)
