"""A run that stands still says who waits for whom, and keeps the stacks of every process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from small_run import Finished, command, latest, rows, running


def stalls(path: Path) -> list[dict[str, Any]]:
    """Those in training: 2 s without progress are nothing unusual while processes start."""
    events = [e for e in rows(path / "events.jsonl") if e["event"] == "stalled"]
    return [e for e in events if "in training on_policy" in e["message"]]


def test_a_stopped_trainer_is_named_with_stacks_and_the_run_goes_on(
    finished: Finished, tmp_path: Path
) -> None:
    words = command(tmp_path, health__dead_after_s=60, watchdog__stall_s=2)
    with running(words, tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        (pids,) = [e["pids"] for e in rows(path / "events.jsonl") if e.get("role") == "trainer"]
        os.kill(pids[0], signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while not (told := stalls(path)):
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.2)
        os.kill(pids[0], signal.SIGCONT)
        said, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, said
    message = told[0]["message"]
    assert message.startswith("no progress for ")
    assert "controller waits for trainer[0]." in message
    (folder,) = told[0]["stacks"]
    stacks = {p.stem: p.read_text() for p in Path(folder).iterdir()}
    assert set(stacks) == {
        "controller", "store[0]", "generator[0]", "generator[1]", "doc_teacher[0]", "trainer[0]",
    }  # fmt: skip
    assert "Thread" in stacks["controller"]
    same = ("metrics.jsonl", "rollouts.jsonl")
    assert all((path / n).read_bytes() == (finished.path / n).read_bytes() for n in same)
    assert latest(tmp_path) == path
