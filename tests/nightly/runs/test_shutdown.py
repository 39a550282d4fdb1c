"""Nothing of a run outlives its client, however that ends: no process, no memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from chaos import Eye, shared_memory, wait_until_freed
from small_run import command, running

GONE_SECONDS = 120.0
ONE_GENERATOR = {
    "roles.generator.replicas": 1,
    "train.steps": 1000,
    "evaluate.arms": ["on_policy"],
    "spares": 1,
}


@pytest.mark.parametrize(
    ("end", "plane"),
    [
        # With a replica that answers nobody, which must not keep the others. Without one
        # test_interrupted ends runs in each way.
        (signal.SIGINT, "torchstore"),
        (signal.SIGKILL, "torchstore"),
        (signal.SIGTERM, "shared_memory"),
        (signal.SIGKILL, "shared_memory"),
    ],
)
def test_nothing_outlives_the_client(end: signal.Signals, plane: str, tmp_path: Path) -> None:
    before = shared_memory()
    with running(command(tmp_path, plane=plane, **ONE_GENERATOR), tmp_path) as run:
        run.wait_for("on_policy", 2)
        eye = Eye(run, time.monotonic() + GONE_SECONDS)
        # Client, controller, three roles, a store or a janitor, and a warm spare.
        eye.wait(lambda: len(run.alive()) >= 7)
        os.kill(eye.replicas("doc_teacher")[0].pid, signal.SIGSTOP)
        time.sleep(0.5)
        if end is signal.SIGINT:
            os.killpg(run.process.pid, end)  # as a terminal does: the whole group
        else:
            run.process.send_signal(end)
        run.wait_until_gone(GONE_SECONDS)
        eye.close()
        assert run.process.wait(timeout=GONE_SECONDS) in (130, 143, -signal.SIGKILL)
    wait_until_freed(before)
