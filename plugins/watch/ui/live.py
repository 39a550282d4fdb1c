"""Ask and steer a run that is going on, through its gRPC control plane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.watch.commands.control import control_target
from cartridge_forge.plugins.watch.commands.control_client import ControlClient
from cartridge_forge.plugins.watch.control.endpoints import is_running
from cartridge_forge.protocols.errors import DataError, ForgeError

STATUS_SECONDS = 1.0  # a status is asked for at most this often, however many pages are open
CONNECT_SECONDS = 2.0

_WITHOUT_ARGUMENTS: dict[str, tuple[Callable[[ControlClient], object], str]] = {
    "pause": (ControlClient.pause, "pausing after the step in progress"),
    "resume": (ControlClient.resume, "going on"),
    "stop": (ControlClient.stop, "stopping after the step in progress, with a checkpoint"),
}
ACTIONS = (*_WITHOUT_ARGUMENTS, "checkpoint", "scale")


class LiveRun:
    """Reach the control plane of one run. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._asked, self._status = float("-inf"), None

    @property
    def running(self) -> bool:
        return is_running(self._path)

    def status(self) -> dict[str, Any] | None:
        """Return the `RunStatus` as plain values, None for a run that has ended or does not
        answer."""
        if not self.running:
            return None
        with self._lock:
            if time.monotonic() - self._asked >= STATUS_SECONDS:
                self._status = self._ask()
                self._asked = time.monotonic()
            return self._status

    def steer(self, action: str, arguments: Mapping[str, Any]) -> str:
        """Carry out one of ACTIONS and return what was done. Raises DataError for another one,
        ControlError where the run refuses or cannot be reached."""
        with self._client() as client:
            if action in _WITHOUT_ARGUMENTS:
                call, message = _WITHOUT_ARGUMENTS[action]
                call(client)
                return message
            if action == "checkpoint":
                return f"wrote checkpoint {client.checkpoint()}"
            if action != "scale":
                raise DataError(f"action must be one of {', '.join(ACTIONS)}: got {action[:40]!r}")
            role, replicas = arguments.get("role"), arguments.get("replicas")
            if not isinstance(role, str):
                raise DataError("scale needs role, a text, and replicas, a whole number")
            pool = client.scale(role, replicas)  # type: ignore[arg-type]  # which checks it
            return f"{pool.role}: {pool.target} wanted, {len(pool.replicas)} now"

    def _ask(self) -> Any:
        try:
            with self._client() as client:
                return asdict(client.status()[1])
        except ForgeError:  # it ended meanwhile, or hangs; the page shows its files all the same
            return None

    def _client(self) -> ControlClient:
        target = control_target(str(self._path), self._path.parent, None, None, None)
        return ControlClient(target, connect_seconds=CONNECT_SECONDS)
