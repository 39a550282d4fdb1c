"""Monarch workers behind the cluster's API are attached to, and again where one was replaced."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT

SCENARIO = Path(__file__).parents[4] / "scenarios/kubernetes_attach.py"


def test_pods_are_workers() -> None:
    done = subprocess.run(
        [sys.executable, str(SCENARIO)],
        env={**os.environ, **LINK_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["names"] == ["generator-0", "docteacher-0", "trainer-0"]
    assert report["told"] == report["started"]
    assert report["again"]
