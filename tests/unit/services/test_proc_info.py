"""Processor seconds of a family of processes, dead children included."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cartridge_forge.services.proc_info import CpuSeconds, cpu_seconds

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_childs_seconds_count_while_it_runs_and_once_it_is_waited_for() -> None:
    me = os.getpid()
    before = cpu_seconds(me, (me,))
    script = BURN + "print('burnt', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = cpu_seconds(me, (me, child.pid)).since(before)
        assert living.chosen >= 0.25, "it was chosen"
        assert living.all >= living.chosen - 1e-6
        child.communicate("\n")
    dead = cpu_seconds(me, (me,)).since(before)
    assert dead.all - dead.chosen >= 0.25, "of all, not of those chosen"


def test_the_share_is_of_all_seconds() -> None:
    assert CpuSeconds(3.0, 14.0).since(CpuSeconds(1.0, 4.0)).share == pytest.approx(0.2)
    assert CpuSeconds(0.0, 0.0).share == 0.0


def test_the_number_of_descriptors_is_raised_or_refused() -> None:
    code = (
        "import resource, sys; from cartridge_forge.services.proc_info import require_descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, int(sys.argv[1]))); "
        "require_descriptors(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def tried(hard: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(hard)], capture_output=True, text=True, check=False
        )

    assert tried(200).stdout == "200\n"
    refused = tried(48)
    assert refused.returncode != 0
    assert "this process may open 48 files and connections at a time, and needs 128; raise" in (
        refused.stderr
    )
