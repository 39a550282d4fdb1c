"""Start a run: spawn the controller, show its status, and end it on a signal.

    forge-run ---spawns---> ControllerActor ---spawns---> store, generators, teachers, trainer
        ^---- status (polled) ----'

The first Ctrl-C or SIGTERM asks the controller to stop. A second one, or a controller that takes
longer than STOP_SECONDS, has every process killed; the last checkpoint remains.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from forge_run.console import ConsoleDisplay, print_results
from protocols.errors import CheckpointError, ForgeError, RunError, SpecError
from protocols.secrets import LOCAL_KEY
from protocols.spec.hosts import HostsSpec
from protocols.spec.loading import load_resolved
from protocols.spec.mesh import RunSpec
from protocols.spec.services import HealthSpec
from protocols.spec.yaml_source import dump_yaml
from services.forkserver.client import bootstrap_command, fork_server
from services.hosts.handshake import host_and_port
from services.hosts.source import LINK_ENVIRONMENT
from services.proc_info import descendants
from services.run_directory import RunDirectory

UNFINISHED = "unfinished"  # `resume` value for the latest run, unless it finished
MAY_CHANGE = ("mesh.hosts", "mesh.roles.trainer.procs", "learn.train.shard_base")  # on resuming
POLL_SECONDS = 0.25
STOP_SECONDS = 6.0
END_SECONDS = 1.5  # STOP_SECONDS, twice this and the report fit in 10 s
STATUS_TIMEOUT = 30.0
OF_THE_MESH = (b"monarch", b"forkserver")  # in the command lines of its processes
ANYWHERE = ("192.0.2.1", 9)  # a documentation network: reached over the default route


def monarch_environment(health: HealthSpec, *, local: bool = True) -> dict[str, str]:
    """Return the environment that Monarch reads on import, in every process of the mesh.

    `services.pool.process` sees the end of a local process at once. Monarch's own polling takes
    processor time for every actor, so it is rare. Where an end was not seen, or a process is
    silent, Monarch waits for `health.dead_after_s` instead of 30 s: calls to a lost tensor store
    hang that long in the actors that made them. With other hosts than this one, not `local`, a
    message is kept for as long as its link may be down.
    """
    patience = f"{math.ceil(health.dead_after_s)}s"
    return {
        "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": patience,
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": patience,
        **({"HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "15s"} if local else LINK_ENVIRONMENT),
    }


def run(spec: RunSpec, *, run_dir: Path | None, resume: str | None) -> int:
    """Run to the end, or to a checkpoint when interrupted. Returns the exit code: 0 finished, 130 /
    143 stopped by SIGINT / SIGTERM. Raises ForgeError."""
    local = spec.mesh.hosts.kind == "local"
    os.environ.update(monarch_environment(spec.mesh.health, local=local))
    os.environ[LOCAL_KEY] = "local"
    caught = SignalFlag()
    console = Console()
    error: ForgeError | None = None
    cut_off = False
    with caught, fork_server() as ready, ConsoleDisplay(spec.mesh.name, console) as display:
        directory, resumed = open_directory(spec, run_dir, resume, display.line)
        display.line(f"run {directory.id}")
        try:
            cut_off = not _drive(spec, directory, resumed, display, caught, ready)
        except ForgeError as failure:
            error = failure
    from forge_run.report.page import write_report

    write_report(directory.path)
    results = directory.read_results()
    if results is not None:
        print_results(console, results, directory.path)
    if error is not None:
        raise error
    code = 128 + caught.first if caught.first else 0
    if cut_off:
        # Monarch's shutdown in a client whose mesh was killed may exit with 1.
        sys.stdout.flush()
        os._exit(code)
    return code


def open_directory(
    spec: RunSpec, run_dir: Path | None, resume: str | None, tell: Callable[[str], None]
) -> tuple[RunDirectory, bool]:
    """Return a new run directory and False, or the one to resume and True. A resumed run must have
    this spec, except for MAY_CHANGE: the hosts, which affect no result, and the trainer's ranks,
    which affect rounding only. Raises CheckpointError otherwise."""
    root = (run_dir or Path("runs")).absolute()
    if resume == UNFINISHED:
        resume = _unfinished(spec, root, tell)
    if resume is None:
        return RunDirectory.create(root, spec.mesh.name, dump_yaml(spec.as_dict())), False
    directory = RunDirectory.open(root, spec.mesh.name, resume or "latest")
    changed = _changed(directory, spec)
    if changed:
        raise CheckpointError(
            f"run {directory.id} was made with another spec; it differs in {', '.join(changed)}. "
            f"Resume with what is in {directory.spec}, or start anew without --resume"
        )
    directory.make_latest()
    return directory, True


def _unfinished(spec: RunSpec, root: Path, tell: Callable[[str], None]) -> str | None:
    """Return the latest run of this spec if unfinished, for a Job that restarts its pod."""
    try:
        latest = RunDirectory.open(root, spec.mesh.name)
    except CheckpointError:  # there is none yet
        return None
    if (latest.read_results() or {}).get("status") == "finished":
        return None
    changed = _changed(latest, spec)
    if changed:
        tell(f"run {latest.id} did not finish and is of another spec ({', '.join(changed)})")
        return None
    return latest.id


def _changed(directory: RunDirectory, spec: RunSpec) -> list[str]:
    before = load_resolved(directory.spec).as_dict()
    return [k for k in differences(before, spec.as_dict()) if not k.startswith(MAY_CHANGE)]


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the dotted keys at which two plain specs differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in sorted({*a, *b}):
            found += differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if a == b else [path]


class SignalFlag:
    """Record SIGINT and SIGTERM instead of ending the process. SIGINT is ignored while the mesh's
    processes are spawned, and they inherit that: a terminal's Ctrl-C reaches the whole process
    group, but only this process must handle it."""

    def __init__(self) -> None:
        self.first: int = 0
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalFlag:
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        return self

    def listen(self) -> None:
        """Handle SIGINT from now on; call it once the first process has started."""
        signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1


def _drive(
    spec: RunSpec,
    directory: RunDirectory,
    resume: bool,
    display: ConsoleDisplay,
    caught: SignalFlag,
    ready: Callable[[], None],
) -> bool:
    """Return False for a run that was cut off: then no part of Monarch may be used any more."""
    import monarch.actor as monarch

    from actors.base import bootstrap
    from services.planes.open import import_plane
    from services.roles import controller_variables
    from training.controller import ControllerActor

    # TorchStore's index is an actor of this process. Importing torch later, for the message that
    # spawns it, would hold up Monarch's threads for seconds, and the controller would seem dead.
    import_plane(spec.mesh.plane)
    if spec.mesh.hosts.kind != "local":  # the default transport reaches this host only
        monarch.enable_transport(f"tcp://{reached_at(spec.mesh.hosts)}:0")
    # The controller supervises the mesh; only its own death reaches this process, and the next
    # poll notices that too. The default hook raises KeyboardInterrupt here.
    monarch.unhandled_fault_hook = lambda failure: None
    ready()
    procs = monarch.this_host().spawn_procs(
        per_host={"procs": 1},
        name="controller",
        bootstrap=bootstrap(1, needed=controller_variables(spec)),
        bootstrap_command=bootstrap_command(),
    )
    cut_off = False
    try:
        controller = procs.spawn(
            "controller", ControllerActor, spec, str(directory.path), resume, os.getpid()
        )
        running = controller.run.call_one()
        status = _poll(controller, spec.mesh.spawn_timeout_s)
        caught.listen()
        asked: float | None = None
        untold = not resume and spec.learn.cartridge.start is not None
        while not status.done:
            display.update(status)
            if untold and directory.start.exists():
                untold = False
                _tell_fresh(directory, display)
            if caught.first and asked is None:
                asked = time.monotonic()
                controller.ask_to_stop.call_one().get(timeout=STATUS_TIMEOUT)
                import_module("forge_run.report.page")  # 1 to 2 s, while the step ends
            late = asked is not None and time.monotonic() - asked > STOP_SECONDS
            if late or caught.count > 1:
                display.line("stopping at once; the last checkpoint stands")
                cut_off = True
                kill_mesh()
                return False
            time.sleep(POLL_SECONDS)
            status = _poll(controller, STATUS_TIMEOUT)
        display.update(status)
        try:
            running.get(timeout=STATUS_TIMEOUT)
        except Exception as error:  # an ActorError around what the controller raised
            cause = getattr(error, "exception", error)
            raise cause if isinstance(cause, ForgeError) else RunError(str(cause)) from error
    finally:
        if not cut_off:
            _end(procs)
    return True


def _tell_fresh(directory: RunDirectory, display: ConsoleDisplay) -> None:
    """Tell which cartridges start by an initialization where others start from trained ones."""
    from registry.formats.run_checkpoint import read_start_record
    from registry.starting import told

    record = read_start_record(directory.start)
    for line in told({name: one for name, one in record.items() if "init" in one}):
        display.line(f"no trained cartridge to start from, so {line}")


def _poll(controller: Any, timeout_s: float) -> Any:
    try:
        return controller.status.call_one().get(timeout=timeout_s)
    except Exception as error:  # the controller is dead, or does not answer
        raise RunError(
            f"the controller does not answer ({type(error).__name__}); go on with --resume"
        ) from error


def kill_mesh() -> None:
    """Kill every descendant of this process that Monarch or the fork server started, with SIGKILL.
    Others stay: the shared memory's janitor waits for its owner's death, and then cleans up."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(mark in command for mark in OF_THE_MESH):
                os.kill(pid, signal.SIGKILL)


def _end(procs: Any) -> None:
    """Stop the controller's process and this client's part of the mesh, END_SECONDS each. A process
    that does not stop in time, busy with its last call, dies with this process."""
    import monarch.actor as monarch

    for ending in (procs.stop, monarch.shutdown_context):
        with contextlib.suppress(Exception):
            ending().get(timeout=END_SECONDS)


def reached_at(hosts: HostsSpec) -> str:
    """Return this host's address: `hosts.reached_at`, else that of the route to the first worker,
    else of the default route. IPv6 addresses are in brackets. Raises SpecError for a name without
    an address, and where there is no such route."""
    named = hosts.reached_at
    try:
        if named is not None:
            return _bracketed(_address_of(named))
        if hosts.addresses:
            host, port = host_and_port(hosts.addresses[0])
            return _bracketed(_local_address(_address_of(host.strip("[]")), port))
        return _bracketed(_local_address(*ANYWHERE))
    except OSError as error:
        to = named or (hosts.addresses[0] if hosts.addresses else "anywhere")
        raise SpecError(
            f"hosts.reached_at: this host found no address for the workers ({to}: "
            f"{error.strerror}); set it to this host's address as the workers reach it"
        ) from error


def _address_of(name: str) -> str:
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0])


def _local_address(address: str, port: int) -> str:
    """Return the route's local address. Connecting a datagram socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
