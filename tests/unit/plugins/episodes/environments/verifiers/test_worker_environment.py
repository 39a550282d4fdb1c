"""The process that runs tasksets, code from outside, is given no secret of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cartridge_forge.plugins.episodes.environments.verifiers.worker_process import (
    KEY,
    VerifiersWorker,
)


def test_the_worker_gets_its_own_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "FORGE_CONTROL_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "sk-live-51Hx9c")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worker = VerifiersWorker(python=Path(sys.executable))
    given = worker._environment("mark")
    assert "sk-live-51Hx9c" not in given.values()
    assert (given[KEY], given["OMP_NUM_THREADS"]) == (worker.endpoint.key, "1")
