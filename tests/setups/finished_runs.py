"""Uninterrupted small runs, shared by the tests that look at them or compare with them."""

from __future__ import annotations

import pytest
from small_run import STALE, Finished, command, latest, run_to_end


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("finished")
    process = run_to_end(command(root))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(process, latest(root))


@pytest.fixture(scope="session")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One of the on-policy arm alone, whose rollouts run a step ahead."""
    root = tmp_path_factory.mktemp("stale")
    process = run_to_end(command(root, **STALE))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(process, latest(root))
