"""kill -9 of a teachers' replica, of the controller and of the whole run while calls are in flight:
no answer is paid twice where the provider knows idempotency keys, and elsewhere none but those that
a kill cut off."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, Running, running

from cartridge_forge.plugins.chat.messages import NANO
from cartridge_forge.plugins.replay.budget import INTERRUPTED
from cartridge_forge.plugins.replay.clinic_teachers import KEY_ENV, at, local_provider
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider, FaultRates
from cartridge_forge.plugins.replay.spec import LocalSpec
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.watch.commands.control_client import ControlClient, ControlTarget
from cartridge_forge.plugins.watch.control.endpoints import read_endpoints
from cartridge_forge.protocols.errors import ControlError

MESH = ROOT / "meshes/three_channels.yaml"
SPEC = load_spec(str(MESH)).spec.learn.replay
assert SPEC is not None
KILLS, CAP = 10, 50.0
PATIENCE_S = 300.0
SETS: dict[str, Any] = {
    "train.steps": 100_000, "train.warmup_steps": 1, "train.checkpoint_every": 5,
    "episodes.tasks": 2, "episodes.group": 3, "evaluate.arms": ["on_policy"],
    "evaluate.probe_every": 0, "evaluate.questions": 4, "roles.generator.replicas": 1,
    "roles.teacher_replay.replicas": 2, "roles.teacher_replay.restarts": 1000,
    "roles.trainer.threads": 1, "health.heartbeat_s": 0.3, "spares": 1,
    "replay.local": None, "replay.cap": CAP, "replay.gate": {"everywhere": True},
}  # fmt: skip
Row = dict[str, Any]


def command(root: Path, provider: FakeProvider, *extra: str) -> list[str]:
    teachers = [teacher.model_dump(mode="json") for teacher in at(SPEC, provider).teachers]
    code = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"
    words = [sys.executable, "-c", code, str(MESH), "--run-dir", str(root), *extra]
    for key, value in {**SETS, "replay.teachers": teachers}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    return words


def latest(root: Path) -> Path:
    return (root / "three_channels" / "latest").resolve()


def ledger(root: Path) -> list[Row]:
    """The whole rows: the last one may still be half written, or torn."""
    path = latest(root) / "teachers.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def in_flight(root: Path) -> int:
    each = Counter(row["attempt"] for row in ledger(root))
    return sum(count == 1 for count in each.values())


def wait_for_a_call(run: Running, more_than: int) -> None:
    """Until a call is in flight, after so many rows: a resumed run comes to new calls first."""
    deadline = time.monotonic() + PATIENCE_S
    while len(ledger(run.root)) <= more_than or not in_flight(run.root):
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < deadline, "no call was made"
        time.sleep(0.005)


def pids_of_teachers(run: Running) -> list[int]:
    path = latest(run.root)
    deadline = time.monotonic() + PATIENCE_S
    with ControlClient(ControlTarget(read_endpoints(path).control, path)) as client:
        while time.monotonic() < deadline:
            with suppress(ControlError):  # it starts
                pools = [p for p in client.status()[1].pools if p.role == "teacher_replay"]
                found = [r.pid for p in pools for r in p.replicas if r.state == "healthy"]
                if found:
                    return found
            time.sleep(0.1)
    raise AssertionError("no teacher came back")


def strike(run: Running, who: str, rng: random.Random) -> bool:
    """Kill; returns whether the run ends of it."""
    if who == "replica":
        victims = pids_of_teachers(run)
        wait_for_a_call(run, 0)
        time.sleep(rng.uniform(0, 0.2))
        with suppress(ProcessLookupError):  # it was replaced meanwhile
            os.kill(rng.choice(victims), signal.SIGKILL)
        return False
    time.sleep(rng.uniform(0, 0.2))
    if who == "controller":
        os.kill(read_endpoints(latest(run.root)).pid, signal.SIGKILL)
    else:
        for pid in run.alive():
            os.kill(pid, signal.SIGKILL)
    run.process.communicate(timeout=PATIENCE_S)
    run.wait_until_gone(PATIENCE_S)
    return True


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("honours_keys", [True, False])
def test_what_a_kill_cuts_off_alone_is_asked_again(
    honours_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, "sk-test-0123456789abcdef")
    rng, kills = random.Random(7), Counter[str]()
    provider = local_provider(SPEC, LocalSpec())
    provider.faults, provider._idempotent = FaultRates(latency_s=0.25), honours_keys
    with provider:
        extra: tuple[str, ...] = ()
        while kills.total() < KILLS:
            with running(command(tmp_path, provider, *extra), tmp_path) as run:
                before = len(ledger(tmp_path)) if extra else 0
                wait_for_a_call(run, before)
                while kills.total() < KILLS:
                    who = rng.choice(("replica", "replica", "controller", "all"))
                    before = len(ledger(tmp_path))
                    wait_for_a_call(run, before)
                    kills[who] += 1
                    if strike(run, who, rng):
                        break
                else:
                    run.process.send_signal(signal.SIGTERM)
                    run.process.communicate(timeout=PATIENCE_S)
            extra = ("--resume",)
        with running(command(tmp_path, provider, *extra), tmp_path) as run:  # settles the dead
            wait_for_a_call(run, len(ledger(tmp_path)))
            run.process.send_signal(signal.SIGTERM)
            run.process.communicate(timeout=PATIENCE_S)
            assert run.process.returncode == 128 + signal.SIGTERM
    rows = ledger(tmp_path)
    key_of = {row["attempt"]: row["key"] for row in rows if row["kind"] == "reserved"}
    cut = sum(row.get("outcome") == INTERRUPTED for row in rows)
    paid = Counter(key_of[call.attempt] for call in provider.served if call.nanodollars)
    twice = sum(count - 1 for count in paid.values())
    spent = sum(row["nanodollars"] for row in rows if row["kind"] == "settled")
    sys.stdout.write(
        f"{dict(kills)}: {len(paid)} answers, {cut} calls cut off, {twice} paid twice; "
        f"{provider.money()} nanodollars charged, {spent} in the ledger\n"
    )
    assert cut, "no kill fell into a call"
    assert twice == 0 if honours_keys else twice <= cut
    assert provider.money() <= spent <= CAP * NANO
    answered = Counter(row["key"] for row in rows if row.get("outcome") == "answered")
    assert set(answered.values()) == {1}
