"""Replicas in forked processes: what they share, who sees them end, and that none is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

SCENARIO = str(Path(__file__).parents[3] / "scenarios" / "forks_scenario.py")
TIMEOUT = 240


def test_a_death_is_seen_without_polling_and_the_next_process_starts_anyhow() -> None:
    done = subprocess.run(
        [sys.executable, SCENARIO, "deaths"], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    first, second, third = told["processes"]
    assert told["lost"] == [f"its process {p['pid']} has ended" for p in (first, second)]
    assert told["reports"] == 0, "of Monarch's supervision"
    # Forked of one server, with its imports; without a server as Monarch starts them.
    assert second["parent"] == first["parent"] != third["parent"]
    assert [p["transformers"] for p in (first, second, third)] == [True, True, False]
    assert [p["threads"] for p in (first, second, third)] == [2, 2, 2]


def test_all_end_with_the_client() -> None:
    with subprocess.Popen(
        [sys.executable, SCENARIO, "wait"], stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        lines = iter(client.stdout.readline, "")
        pids = json.loads(next(line for line in lines if line.startswith("[")))
        assert len(pids) == 3, "the fork server, a stand-in and a replica"
        ends = [os.pidfd_open(pid) for pid in pids]
        client.send_signal(signal.SIGKILL)
        poll = select.poll()
        for end in ends:
            poll.register(end, select.POLLIN)
        for _ in ends:
            ((ended, _),) = poll.poll(1000 * TIMEOUT)[:1]
            poll.unregister(ended)
            os.close(ended)
