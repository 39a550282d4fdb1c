"""A first process that stood still while its run finished ends as the run did."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from small_run import command, latest, running


def test_a_client_that_was_stopped_for_the_run_s_end_says_how_it_ended(tmp_path: Path) -> None:
    sets = {"evaluate__arms": ["on_policy"], "train__steps": 4}
    with running(command(tmp_path, **sets), tmp_path) as run:
        run.wait_for("on_policy", 1)
        os.kill(run.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            results = latest(tmp_path) / "results.json"
            if results.is_file() and json.loads(results.read_text())["status"] == "finished":
                break
            time.sleep(0.2)
        time.sleep(50)  # longer than a message is kept, and than a status is waited for
        os.kill(run.process.pid, signal.SIGCONT)
        said, _ = run.process.communicate(timeout=120)
        assert run.process.returncode == 0, said
        run.wait_until_gone(60)
