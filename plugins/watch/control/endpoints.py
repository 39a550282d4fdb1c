"""Write and find `endpoints.json` in a run's directory: the addresses of a running run.

    {"control": "127.0.0.1:41233", "metrics": "http://127.0.0.1:42345/metrics", "pid": 1234}

The controller writes the file and removes it at the end. A killed controller leaves it behind, so
readers check that the process is alive. The token of a control plane stays in the environment;
where the spec names none, the controller draws one and writes it to `control.token` beside it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import SecretStr

from cartridge_forge.protocols.errors import ControlError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.protocols.secrets import read_secret
from cartridge_forge.protocols.spec.services import LOOPBACK
from cartridge_forge.services.proc_info import has_ended
from cartridge_forge.services.run_directory import LATEST, RunDirectory

FILE = "endpoints.json"
TOKEN_FILE = "control.token"


@dataclass(frozen=True)
class Endpoints:
    """Hold the control plane's host:port, the URL of Prometheus' metrics (None for a run without),
    and the controller's process id."""

    control: str
    metrics: str | None
    pid: int


def write_endpoints(run: Path, endpoints: Endpoints, token: SecretStr | None = None) -> None:
    """Write the file, and the drawn `token` if any, by rename, readable by this user alone, because
    they give access to the run."""
    if token is not None:
        write_atomically(run / TOKEN_FILE, token.get_secret_value() + "\n", mode=0o600)
    write_atomically(run / FILE, json.dumps(asdict(endpoints)) + "\n", mode=0o600)


def remove_endpoints(run: Path) -> None:
    """Remove the files as the run ends; a missing one is no error."""
    for name in (FILE, TOKEN_FILE):
        (run / name).unlink(missing_ok=True)


def read_endpoints(run: Path) -> Endpoints:
    """Return the run's endpoints. Raises ControlError for a run that has ended or was killed."""
    try:
        content = json.loads((run / FILE).read_bytes())
        endpoints = Endpoints(str(content["control"]), content["metrics"], int(content["pid"]))
    except FileNotFoundError:
        raise not_running(run, "it has ended, or has not come up yet") from None
    except OSError as error:
        raise ControlError(f"cannot read {run / FILE}: {error.strerror}; check its owner") from None
    except (ValueError, KeyError, TypeError):
        raise ControlError(
            f"{run / FILE} must hold control, metrics and pid: got something else; name the run's "
            "address with --address"
        ) from None
    # Only a process on this host can be seen to be gone.
    if is_loopback(endpoints.control) and has_ended(endpoints.pid):
        raise not_running(run, f"its controller, process {endpoints.pid}, is gone")
    return endpoints


def is_running(run: Path) -> bool:
    """Return whether the run can be steered: it has come up, and its controller lives."""
    try:
        read_endpoints(run)
    except ControlError:
        return False
    return True


def not_running(run: Path, why: str) -> ControlError:
    """Return the error for a run that is not running, with the remedy."""
    results = RunDirectory(run).read_results()
    if results is not None and results.get("status") == "finished":
        return ControlError(f"run {run.name} is not running: it has finished; see {run}")
    return ControlError(
        f"run {run.name} is not running: {why}; resume it with "
        f"forge-run MESH.yaml --resume {run.name}"
    )


def find_run(root: Path, which: str) -> Path:
    """Return the directory of a run given by path or id. Raises ControlError for none such."""
    for candidate in (Path(which), root / which, *(home / which for home in _folders(root))):
        if (candidate / "spec.yaml").is_file():
            return candidate.resolve()
    raise ControlError(
        f"there is no run {which}: expected the path of a run's directory or an id under {root}; "
        "name the directory that holds runs with --run-dir"
    )


def find_running(root: Path) -> Path:
    """Return the run under `root` that started last and still runs. Raises ControlError."""
    newest: ControlError | None = None
    for run in runs_under(root):
        if not (run / FILE).exists():
            continue
        try:
            read_endpoints(run)
        except ControlError as error:
            newest = newest or error
        else:
            return run.resolve()
    raise newest or ControlError(
        f"no run is running under {root}; list those that ended with forge runs, start one with "
        "forge run MESH.yaml, or name the directory that holds runs with --run-dir"
    )


def runs_under(root: Path) -> list[Path]:
    """Return the directories of all runs under `root`, as root/mesh/run, the last started first."""
    runs = [run for home in _folders(root) for run in _folders(home) if run.name != LATEST]
    return sorted(runs, key=lambda run: run.name, reverse=True)  # an id starts with its time


def is_loopback(address: str) -> bool:
    """Return whether an address is on loopback, as `"127.0.0.1:41233"` is."""
    return address.rpartition(":")[0] in LOOPBACK


def read_token(name: str) -> SecretStr:
    """Return the bearer token under this name, for the control plane and its clients.

    Raises SpecError for none, or one that gRPC cannot carry; the message does not contain it.
    """
    return read_secret("control.token_env", name, "the control plane's token")


def new_token() -> SecretStr:
    """Return a token for one start of a run, of 256 random bits."""
    return SecretStr(secrets.token_urlsafe(32))


def drawn_token(run: Path) -> SecretStr | None:
    """Return the token that the controller drew, None where it drew none. Raises ControlError for a
    file that this user may not read."""
    try:
        text = (run / TOKEN_FILE).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ControlError(
            f"cannot read {run / TOKEN_FILE}: {error}; the user who started the run may steer it"
        ) from None
    return SecretStr(text)


def _folders(path: Path) -> Iterator[Path]:
    return (child for child in path.glob("*") if child.is_dir())
