"""What a run's status and its failure say of hosts that it asked for and that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.training.controller import ControllerActor

LOST = "generator-1: NodeLost: its node is silent; delete the Node"


def controller(*lacking: str) -> Any:
    """One whose mesh is open, without a process of its own."""
    found: Any = object.__new__(ControllerActor)
    found._mesh = SimpleNamespace(pools={}, service=SimpleNamespace(lacking=lambda: lacking))
    found._status = RunStatus(message="paused")
    return found


def test_the_status_says_why_a_host_is_not_there() -> None:
    assert controller(LOST)._whole_status().message == f"paused; {LOST}"
    assert controller()._whole_status().message == "paused"


def test_a_failure_says_so_too() -> None:
    error = RunError("doc_teacher.score found no replica within 120 s")
    assert str(controller(LOST)._failure(error)) == f"{error}; {LOST}"
    assert controller()._failure(error) is error
