"""Test what is refused of a verifiers worker."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cartridge_forge.plugins.episodes.environments.verifiers.worker_process import (
    KEY,
    VerifiersWorker,
)
from cartridge_forge.protocols.errors import RunError


def test_the_worker_gets_its_own_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "FORGE_CONTROL_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-live-51Hx9c")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker = VerifiersWorker(python=Path(sys.executable))
    given = worker._environment("mark")
    assert "sk-live-51Hx9c" not in given.values()
    assert (given[KEY], given["OMP_NUM_THREADS"]) == (worker.endpoint.key, "1")


def test_without_its_python_the_remedy_is_named() -> None:
    with pytest.raises(RunError, match="make install-verifiers"):
        VerifiersWorker(python=Path("nowhere"))
