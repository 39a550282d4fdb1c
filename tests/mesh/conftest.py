"""One fork server for the tests of a session that start processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cartridge_forge.forge_run.forkserver.client import fork_server


@pytest.fixture(scope="session", autouse=True)
def _forks(_no_process_left: None) -> Iterator[None]:
    with fork_server() as ready:
        ready()
        yield
