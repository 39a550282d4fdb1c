"""Real verifiers in a process of its own: rewards, errors, deadlines, and a worker that dies."""

from pathlib import Path

import pytest

from cartridge_forge.plugins.episodes.environments.verifiers.worker_process import VerifiersWorker
from cartridge_forge.protocols.errors import RunError


def test_without_its_python_the_remedy_is_named() -> None:
    with pytest.raises(RunError, match="make install-verifiers"):
        VerifiersWorker(python=Path("nowhere"))
