"""Directories of runs, and one that answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fake_run_control import Served, served

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.plugins.watch.control.endpoints import Endpoints, write_endpoints
from cartridge_forge.services.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[4]


def new_run(root: Path, minute: int = 0, mesh: str = "tiny", sets: tuple[str, ...] = ()) -> Path:
    """A run's directory, begun at a minute of one hour; no process belongs to it."""
    spec = load_spec(str(REPOSITORY / "meshes/longhealth.yaml"), sets=sets).spec
    began = datetime(2026, 7, 26, 10, minute, tzinfo=UTC)
    return RunDirectory.create(root, mesh, dump_yaml(spec.as_dict()), began).path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that a user stands in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[tuple[Path, Served]]:
    """A run under runs/ that answers."""
    path = new_run(home / "runs", 30)
    with served(run=path.name) as here:
        write_endpoints(path, Endpoints(here.address, None, os.getpid()))
        yield path, here
