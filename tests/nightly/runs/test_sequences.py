"""Any order of kills, stops, control calls, full disks, damage and resumes: the end is that of the
calm run, to the byte, and nothing is left behind.

The files alone are under many more orders in tests/unit/services/test_run_model.py. Here every
process is real, so an order takes most of a minute. FORGE_RUN_SEQUENCES is their number.

Another number of generators means other batches of decoding, whose sums are rounded otherwise: a
log-probability differs in its seventh digit. So after `scale` the same tokens are asked for, each
once, and not the same bytes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from chaos import HASTY, REPLACED, Eye, shared_memory, wait_until_freed
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from small_run import Finished, Running, command, latest, rows, running, same_outcome

from forge_run.commands.control_client import ControlClient, ControlTarget
from protocols.errors import ControlError
from services.control.endpoints import read_endpoints

SEQUENCES = int(os.environ.get("FORGE_RUN_SEQUENCES", "4"))
LIMIT_SECONDS = 300.0
STEPS = 12  # of both trained arms
Blow = Callable[[Running], None]


def signal_client(number: signal.Signals) -> Blow:
    return lambda run: run.process.send_signal(number)


def kill_controller(run: Running) -> None:
    os.kill(read_endpoints(latest(run.root)).pid, signal.SIGKILL)


def full_disk(run: Running) -> None:
    """Take all room, where the test has a disk of its own."""
    if not os.path.ismount(run.root):
        return
    with (run.root / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**12))


def kill_replica(role: str) -> Blow:
    def blow(run: Running) -> None:
        eye = Eye(run, 0.0)
        with suppress(ProcessLookupError, IndexError):
            os.kill(eye.replicas(role)[0].pid, signal.SIGKILL)
        eye.close()

    return blow


def control(act: Callable[[ControlClient], object]) -> Blow:
    def blow(run: Running) -> None:
        path = latest(run.root)
        # A run may end before it is asked, or while it answers.
        with (
            suppress(ControlError),
            ControlClient(ControlTarget(read_endpoints(path).control, path)) as client,
        ):
            act(client)

    return blow


def pause_and_resume(client: ControlClient) -> None:
    client.pause()
    client.resume()


BLOWS: Mapping[str, Blow] = {
    "client killed": signal_client(signal.SIGKILL),
    "stopped": signal_client(signal.SIGTERM),
    "hung up": signal_client(signal.SIGHUP),
    "controller killed": kill_controller,
    "disk full": full_disk,
    "paused and resumed": control(pause_and_resume),
    "checkpoint": control(lambda client: client.checkpoint()),
    "scaled to 3": control(lambda client: client.scale("generator", 3)),
    "scaled to 1": control(lambda client: client.scale("generator", 1)),
    **{f"{role} killed": kill_replica(role) for role in REPLACED},
}
ORDERS = st.lists(
    st.tuples(st.sampled_from(sorted(BLOWS)), st.integers(1, STEPS)), min_size=1, max_size=4
).map(lambda order: sorted(order, key=lambda act: act[1]))


def steps_done(root: Path) -> int:
    path = latest(root) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def damage(path: Path) -> None:
    """Cut the newest checkpoint's cartridge, unless it is the only one, and tear a log's end."""
    found = sorted((path / "checkpoints").glob("version-*"))
    if len(found) > 1:
        part = next(found[-1].glob("cartridge-*"))
        part.write_bytes(part.read_bytes()[:-1])
    with (path / "events.jsonl").open("ab") as log:
        log.write(b'{"time')


def play(root: Path, order: list[tuple[str, int]]) -> list[str]:
    """Run to the end, with each blow once so many steps are recorded; returns what happened."""
    told, left, extra = [], list(order), ()
    for _ in range(len(order) + 1):
        with running(command(root, *extra, **HASTY), root) as run:
            eye = Eye(run, float("inf"))
            while left:
                name, step = left[0]
                if not eye.wait(lambda step=step: steps_done(root) >= step, to_end=True):
                    break
                left.pop(0)
                told.append(f"step {steps_done(root)}: {name}")
                BLOWS[name](run)
                eye.idle(0.2)  # so that an end is seen before the next blow falls
            eye.close()
            said, _ = run.process.communicate(timeout=LIMIT_SECONDS)
            run.wait_until_gone(LIMIT_SECONDS)
        told.append(f"exit code {run.process.returncode}: {said[-300:]}")
        assert "Traceback" not in said, told
        if run.process.returncode == 0:
            return told
        (root / "filler").unlink(missing_ok=True)
        if latest(root).joinpath("events.jsonl").is_file():
            damage(latest(root))
        extra = ("--resume",)
    raise AssertionError("\n".join(told))


def same_tokens(path: Path, reference: Path) -> None:
    """Every rollout stands once, in order, with its tokens and their versions."""
    fields = ("arm", "step", "id", "response_ids", "versions")
    found, wanted = (
        [{k: row[k] for k in fields} for row in rows(p / "rollouts.jsonl")]
        for p in (path, reference)
    )
    assert found == wanted


@pytest.mark.timeout(SEQUENCES * 600)
@settings(
    max_examples=SEQUENCES,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(order=ORDERS)
def test_any_order_ends_as_the_calm_run(finished: Finished, order: list[tuple[str, int]]) -> None:
    before = shared_memory()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "disk"
        root.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(root)]
        mounted = os.getuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
        try:
            told = play(root, order)
            scaled = any("scaled" in line for line in told)
            (same_tokens if scaled else same_outcome)(latest(root), finished.path)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(root)], check=True)
    wait_until_freed(before)
