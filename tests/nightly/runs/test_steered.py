"""`forge`, the console script's own function, on a real run."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from chaos import REPLACED
from small_run import ROOT, command, rows, running

from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import drawn_token, read_endpoints
from cartridge_forge.protocols.errors import ControlError, DataError
from cartridge_forge.protocols.wire import control_pb2 as pb
from cartridge_forge.protocols.wire.control_pb2_grpc import ControlStub

FORGE = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
SECONDS = 180.0  # of patience


def words(root: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", FORGE, *arguments, "--run-dir", str(root)]


def forge(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        words(root, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def status(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(forge(root, "status", "--json"))
    return found


def generators(root: Path) -> list[str]:
    """Their states, as `forge status` shows them."""
    (pool,) = [p for p in status(root)["pools"] if p["role"] == "generator"]
    return [r["state"] for r in pool["replicas"]]


def wait_until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.1)


def test_a_run_is_steered_from_outside(tmp_path: Path) -> None:
    sets = {"train__steps": 5000, "evaluate__arms": ["on_policy"], "evaluate__probe_every": 0}
    with running(command(tmp_path, **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        # The chaos suite strikes whatever there is.
        assert {p["role"] for p in status(tmp_path)["pools"]} == set(REPLACED)
        events = subprocess.Popen(
            words(tmp_path, "events", "--follow"), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert generators(tmp_path) == ["healthy"] * 2

        assert forge(tmp_path, "scale", "generator", "4").startswith("generator: 4 wanted")
        assert len(generators(tmp_path)) == 4, "it shows at once"
        wait_until(lambda: generators(tmp_path) == ["healthy"] * 4)
        step = status(tmp_path)["step"]
        wait_until(lambda: status(tmp_path)["step"] > step)
        forge(tmp_path, "scale", "generator", "1")
        wait_until(lambda: generators(tmp_path) == ["healthy"])
        step = status(tmp_path)["step"]
        wait_until(lambda: status(tmp_path)["step"] > step)

        forge(tmp_path, "pause")
        wait_until(lambda: status(tmp_path)["paused"])
        held = status(tmp_path)["step"]
        time.sleep(1.5)  # several steps
        name = forge(tmp_path, "checkpoint").split()[-1]
        assert (path / "checkpoints" / name / "manifest.json").is_file()
        assert name == f"version-{held:06d}"
        assert status(tmp_path)["step"] == held
        assert len(rows(path / "metrics.jsonl")) == held
        forge(tmp_path, "resume")
        wait_until(lambda: status(tmp_path)["step"] > held)

        assert forge(tmp_path, "stop").startswith("stopping after the step in progress")
        said, _ = run.process.communicate(timeout=SECONDS)
        run.wait_until_gone(SECONDS)
    assert run.process.returncode == 0, said
    told, _ = events.communicate(timeout=SECONDS)
    assert events.returncode == 0
    seen = [json.loads(line) for line in told.splitlines()]
    assert [e["replicas"] for e in seen if e["event"] == "scaled"] == [4, 1]
    names = [e["event"] for e in seen]
    for name in ("paused", "resumed", "stopping", "checkpoint", "finished"):
        assert name in names
    assert json.loads((path / "results.json").read_text())["status"] == "stopped"


def test_followers_that_read_nothing_and_absurd_sizes_keep_nobody_from_stopping(
    tmp_path: Path,
) -> None:
    """64 followers, each over a connection of its own, of which half read nothing and half read one
    event a second; and numbers of replicas that no run has."""
    sets = {"train__steps": 5000, "evaluate__arms": ["on_policy"], "evaluate__probe_every": 0}
    with contextlib.ExitStack() as held, running(command(tmp_path, **sets), tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        address = read_endpoints(path).control
        drawn = drawn_token(path)
        assert drawn is not None
        token = [("authorization", f"Bearer {drawn.get_secret_value()}")]
        followers = []
        for _ in range(64):
            channel = held.enter_context(
                grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
            )
            asked = pb.EventsRequest(replay=2**32 - 1)
            followers.append(ControlStub(channel).Events(asked, metadata=token))
        for follower in followers[::2]:
            threading.Thread(target=read_slowly, args=(follower,), daemon=True).start()
        refused = 0
        for follower in followers[1::2]:  # those beyond the bound are told at once
            with contextlib.suppress(grpc.RpcError):
                next(follower)
                continue
            refused += follower.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 0 < refused <= 32

        with ControlClient(ControlTarget(address, path)) as client:
            for replicas in (10**9, 2**32 - 1):
                with pytest.raises(ControlError, match=r">= 1 and <= 64 \(control.max_replicas\)"):
                    client.scale("generator", replicas)
            for replicas in (0, -1, 10**30, math.nan):
                with pytest.raises(DataError, match=r">= 1 and <= control.max_replicas"):
                    client.scale("generator", replicas)  # type: ignore[arg-type]
            with pytest.raises(grpc.RpcError) as zero:
                client._stub.Scale(pb.ScaleRequest(role="generator", replicas=0), timeout=SECONDS)
            assert "replicas must be >= 1 and <= 64" in zero.value.details()
            step = client.status()[1].step or 0
            wait_until(lambda: (client.status()[1].step or 0) > step)
            client.stop()
        said, _ = run.process.communicate(timeout=SECONDS)
        run.wait_until_gone(SECONDS)
    assert run.process.returncode == 0, said
    assert json.loads((path / "results.json").read_text())["status"] == "stopped"


def read_slowly(follower: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        for _ in follower:
            time.sleep(1.0)
