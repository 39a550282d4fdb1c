"""One uninterrupted small run, shared by the tests that look at it or compare with it."""

from __future__ import annotations

import pytest
from small_run import Finished, command, latest, run_to_end


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    root = tmp_path_factory.mktemp("finished")
    process = run_to_end(command(root))
    assert process.returncode == 0, process.stdout + process.stderr
    return Finished(process, latest(root))
