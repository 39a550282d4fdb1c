"""Where a run is reached while it runs: `endpoints.json` in its directory.

    {"control": "127.0.0.1:41233", "metrics": "http://127.0.0.1:42345/metrics", "pid": 1234}

The controller writes it and removes it at the end. A controller that is killed leaves it behind,
so a reader trusts it no further than the process, and a client no further than the connection.
The token that a control plane may ask for stays in the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from protocols.errors import ControlError, SpecError
from protocols.files import write_atomically
from protocols.spec.services import LOOPBACK
from services.run_directory import LATEST, RunDirectory

FILE = "endpoints.json"


@dataclass(frozen=True)
class Endpoints:
    """`control` is the control plane's host:port, `metrics` the URL of Prometheus' metrics or None
    for a run without, `pid` the controller's process."""

    control: str
    metrics: str | None
    pid: int


def write_endpoints(run: Path, endpoints: Endpoints) -> None:
    """Whole or not at all, and for this user alone: who can steer the run is its own business."""
    write_atomically(run / FILE, json.dumps(asdict(endpoints)) + "\n", mode=0o600)


def remove_endpoints(run: Path) -> None:
    """Called as the run ends; a file that is gone already is no error."""
    (run / FILE).unlink(missing_ok=True)


def read_endpoints(run: Path) -> Endpoints:
    """Where the run is reached. Raises ControlError for a run that has ended or was killed."""
    try:
        found = json.loads((run / FILE).read_bytes())
        endpoints = Endpoints(str(found["control"]), found["metrics"], int(found["pid"]))
    except FileNotFoundError:
        raise not_running(run, "it has ended, or has not come up yet") from None
    except OSError as error:
        raise ControlError(f"cannot read {run / FILE}: {error.strerror}; check its owner") from None
    except (ValueError, KeyError, TypeError):
        raise ControlError(
            f"{run / FILE} must hold control, metrics and pid: got something else; name the run's "
            "address with --address"
        ) from None
    # Only of a process on this host can we say that it is gone.
    if is_loopback(endpoints.control) and not _is_alive(endpoints.pid):
        raise not_running(run, f"its controller, process {endpoints.pid}, is gone")
    return endpoints


def not_running(run: Path, why: str) -> ControlError:
    """The error for a run that cannot be steered, with what can be done with it instead."""
    results = RunDirectory(run).read_results()
    if results is not None and results.get("status") == "finished":
        return ControlError(f"run {run.name} is not running: it has finished; see {run}")
    return ControlError(
        f"run {run.name} is not running: {why}; resume it with "
        f"forge-run MESH.yaml --resume {run.name}"
    )


def find_run(root: Path, which: str) -> Path:
    """The directory of a run named by its path or its id. Raises ControlError for none such."""
    for candidate in (Path(which), root / which, *(home / which for home in _folders(root))):
        if (candidate / "spec.yaml").is_file():
            return candidate.resolve()
    raise ControlError(
        f"there is no run {which}: expected the path of a run's directory or an id under {root}; "
        "name the directory that holds runs with --run-dir"
    )


def find_running(root: Path) -> Path:
    """The run under `root` that was started last and still runs. Raises ControlError for none."""
    newest: ControlError | None = None
    runs = [run for home in _folders(root) for run in _folders(home) if run.name != LATEST]
    for run in sorted(runs, key=lambda run: run.name, reverse=True):  # an id starts with its time
        if not (run / FILE).exists():
            continue
        try:
            read_endpoints(run)
        except ControlError as error:
            newest = newest or error
        else:
            return run.resolve()
    raise newest or ControlError(
        f"no run is running under {root}; start one with forge run MESH.yaml, or name the "
        "directory that holds runs with --run-dir"
    )


def is_loopback(address: str) -> bool:
    """`is_loopback("127.0.0.1:41233")` is true."""
    return address.rpartition(":")[0] in LOOPBACK


def read_token(variable: str) -> str:
    """The bearer token in an environment variable, for the control plane and its clients alike.

    Raises SpecError for none, or one that gRPC cannot carry; the message does not hold it.
    """
    token = os.environ.get(variable, "")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise SpecError(
            f"the environment variable {variable} must hold the control plane's token, printable "
            f"ASCII without spaces: it {'holds something else' if token else 'is not set'}; "
            f"export {variable}"
        )
    return token


def _folders(path: Path) -> Iterator[Path]:
    return (child for child in path.glob("*") if child.is_dir())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: alive
        return True
    return True
