"""Start a run: spawn the controller, show its status, and end it on a signal.

    forge-run ---spawns---> ControllerActor ---spawns---> store, generators, teachers, trainer
        ^---- status (polled) ----'

The first Ctrl-C, SIGTERM or SIGHUP asks the controller to stop. A second one, or a controller that
takes longer than `--grace`, has every process killed, and it is told where the run goes on. A
controller that died, and a lease that another command has taken, end the run at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from cartridge_forge.forge_run.forkserver.client import fork_server
from cartridge_forge.forge_run.opening import OpenRun, opened
from cartridge_forge.forge_run.preflight import processor_demand, require_descriptors
from cartridge_forge.forge_run.resuming import is_finished, sizes_of
from cartridge_forge.plugins.cluster.hosts.handshake import reached_at
from cartridge_forge.plugins.host.private_sockets import remove, use_private_sockets
from cartridge_forge.plugins.host.tls import read_identity
from cartridge_forge.plugins.watch.console import ConsoleDisplay, print_results
from cartridge_forge.protocols.errors import ForgeError, RunError, SpecError
from cartridge_forge.protocols.plugins import module_of
from cartridge_forge.protocols.secrets import LOCAL_KEY
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, HostsSpec, RunSpec, is_loopback_host
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.planes.open import PLANE_IMPORTS
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT
from cartridge_forge.services.pool.sizes import PoolSize
from cartridge_forge.services.proc_info import descendants, has_ended
from cartridge_forge.services.roles import HUB, PROXIES
from cartridge_forge.services.run_directory import (
    ResumePoint,
    RunDirectory,
    newest_checkpoint,
    resume_point,
    storage_error,
)

ENGINE = "cartridge_forge.plugins.decoding.engine"
POLL_SECONDS = 0.5  # between two looks at signals, and at whether the controller lives
STATUS_SECONDS = 1.0  # between two statuses: each takes both processes 2 ms
STATUS_TIMEOUT = 30.0
BUSY_SHARE = 0.1  # of the time in which the controller wants a processor counts as silence
STILL_SECONDS = 2.0  # at most, of one poll: in the rest this process was stopped
LOCAL_ENVIRONMENT = {
    # Their clocks go on while all processes are stopped (a closed lid, a paused container).
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "24h",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "24h",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "36500d",
}
OF_THE_MESH = (b"monarch", b"forkserver")  # in the command lines of its processes


def monarch_environment(health: HealthSpec, *, local: bool = True) -> dict[str, str]:
    """Return the environment that Monarch reads on import, in every process of the mesh.

    `services.pool.process` sees the end of a local process at once, and so do the actors that wait
    for a local tensor store. Monarch's own polling takes processor time for every actor, so it is
    rare. Where an end was not seen, or a process is silent, Monarch waits for `health.dead_after_s`
    instead of 30 s. With other hosts than this one, not `local`, it polls more often, and a message
    is kept for as long as its link may be down.

    Monarch ends a process whose owner's last call has expired by the host's clock: every one, where
    that clock is set forward. Local processes end with their parents anyway, so none expires.

    Its log, one file in the temporary directory for all runs of a user, gets errors alone, unless
    MONARCH_FILE_LOG says otherwise: nobody rotates it.
    """
    patience = f"{math.ceil(health.dead_after_s)}s"
    return {
        "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "20s" if local else "5s",
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": patience,
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": patience,
        "MONARCH_FILE_LOG": os.environ.get("MONARCH_FILE_LOG", "error"),
        **(LOCAL_ENVIRONMENT if local else LINK_ENVIRONMENT),
    }


def prepare_process(health: HealthSpec) -> None:
    """Prepare this process to own a mesh on this host: its descriptors, Monarch's environment, and
    sockets that are closed to other users. Call it before Monarch is imported. Raises RunError."""
    require_descriptors()
    os.environ.update(monarch_environment(health))
    use_private_sockets()


@contextlib.contextmanager
def generator_processes(spec: RunSpec) -> Iterator[None]:
    """Prepare this process to own generators of a run's model on this host: they are forked from a
    server that has imported their modules, for Monarch gives up a process that is silent while it
    imports them. Call it in the main thread, before Monarch is imported."""
    prepare_process(spec.mesh.health)
    shared = spec.learn.generator.backend == "torch" and not spec.mesh.roles["generator"].gpus
    model = (spec.learn.model.path, spec.learn.model.dtype) if shared else None
    with fork_server([ENGINE], model) as ready:
        ready()
        yield


def run(
    spec: RunSpec,
    *,
    run_dir: Path | None,
    resume: str | None,
    grace_s: float,
    sized: Collection[str] = (),
) -> int:
    """Run to the end, or to a checkpoint when interrupted, `grace_s` later at most. `sized` are the
    roles whose replicas the command line gives. Returns the exit code: 0 finished, 129 / 130 / 143
    stopped by SIGHUP / SIGINT / SIGTERM. Raises ForgeError."""
    local = spec.mesh.hosts.kind == "local"
    require_descriptors()
    os.environ.update(monarch_environment(spec.mesh.health, local=local))
    os.environ[LOCAL_KEY] = "local"
    warnings: list[str] = []
    listen = prepare_links(spec.mesh.hosts, warnings.append)
    caught = SignalFlag()
    console = Console()
    error: ForgeError | None = None
    cut_off: str | None = None
    with contextlib.ExitStack() as stack:
        with (
            caught,
            _forks(spec) as ready,
            ConsoleDisplay(spec.mesh.name, console) as display,
        ):
            run = stack.enter_context(opened(spec, run_dir, resume, display.line))
            directory = run.directory
            display.line(f"run {directory.id}")
            for warning in warnings:
                display.line(warning)
            reopened = run.resumed and not run.finished
            sizes = sizes_of(directory, spec, resume, sized) if reopened else ()
            for size in sizes:
                display.line(str(size))
            try:
                if run.finished:
                    display.line("it has finished: nothing is left to do, and nothing is changed")
                else:
                    cut_off = _drive(spec, run, sizes, display, caught, ready, listen, grace_s)
            except OSError as unusable:
                error = storage_error(unusable, directory.path)
            except ForgeError as failure:
                error = failure
            if cut_off is not None and not run.lost():
                display.line(f"--resume {directory.id} goes on {_point(spec, directory)}")
        if cut_off:
            error = RunError(cut_off)
        if directory.path.is_dir():
            _tell_results(directory, console, report=not run.finished)
        unstored = run.end()
        error = error or unstored
    code = 128 + caught.first if caught.first else 0
    if cut_off is not None:  # the error was printed when it was seen
        leave(error.exit_code if error is not None else code)
    if error is not None:
        raise error
    return code


def _point(spec: RunSpec, directory: RunDirectory) -> ResumePoint:
    """Return where a run goes on that was cut off."""
    from cartridge_forge.services.roles import last_state_here

    newest = newest_checkpoint(directory)
    return resume_point(directory, newest) if last_state_here(spec) else ResumePoint(newest)


def _tell_results(directory: RunDirectory, console: Console, *, report: bool) -> None:
    """Write the `report` and print the results, as far as the run's files allow."""
    from cartridge_forge.plugins.watch.pages.export import write_report

    try:
        if report:
            write_report(directory.path)
        results = directory.read_results()
        if results is not None:
            print_results(console, results, directory.path)
    except (OSError, ForgeError) as unusable:
        print(f"the report was not written: {unusable}", file=sys.stderr)
    except Exception as odd:  # rows that no version wrote, say: the run's own end is told first
        print(f"the report was not written: {odd!r}", file=sys.stderr)


def _forks(spec: RunSpec) -> AbstractContextManager[Callable[[], None]]:
    """Return the run's fork server. It reads the model for the roles that compute on this host."""
    model, roles = spec.learn.model, [role for name, role in spec.roles if name in MODEL_ROLES]
    is_local = spec.mesh.hosts.kind == "local" and not all(role.gpus for role in roles)
    weights = spec.learn.objective.weights
    channels = [module_of("channels", name) for name, weight in weights.items() if weight]
    modules = [*PLANE_IMPORTS[spec.mesh.carrier], *channels]
    return fork_server(modules, (model.path, model.dtype) if is_local else None)


class SignalFlag:
    """Record SIGINT, SIGTERM and SIGHUP instead of ending the process. SIGINT is ignored while the
    mesh's processes are spawned, and they inherit that: a terminal's Ctrl-C reaches the whole
    process group, but only this process must handle it. A SIGHUP that is ignored, by nohup, stays
    so."""

    def __init__(self) -> None:
        self.first: int = 0
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalFlag:
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._note)
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
    run: OpenRun,
    sizes: Sequence[PoolSize],
    display: ConsoleDisplay,
    caught: SignalFlag,
    ready: Callable[[], None],
    listen: str | None,
    grace_s: float,
) -> str | None:
    """Return None for a run that ended in order, else why it was cut off, which is printed, "" for
    a user's wish. The mesh is killed at the end: no part of Monarch may be used any more. `listen`
    is where other hosts reach this one."""
    use_private_sockets()
    import monarch.actor as monarch

    from cartridge_forge.actors.base import bootstrap, bootstrap_command
    from cartridge_forge.training.controller import ControllerActor

    directory, resume = run.directory, run.resumed
    if listen is not None:  # the default transport reaches this host only
        monarch.enable_transport(listen)
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
    cut_off: str | None = None
    try:
        controller = procs.spawn(
            "controller", ControllerActor, spec, str(directory.path), resume, os.getpid(), sizes
        )
        running = controller.run.call_one()
        patience = spec.mesh.spawn_timeout_s
        pid = _answer(controller.process.call_one(), patience, run.lost)
        caught.listen()
        asked_at: float | None = None
        status_number = 0
        untold = not resume and spec.learn.cartridge.start is not None

        def lost() -> str:
            if has_ended(pid):
                return f"the controller died; go on with --resume {directory.id}"
            return run.lost()

        def tell() -> None:
            nonlocal status_number
            status, notes = _answer(controller.status.choose(), STATUS_TIMEOUT, lost, pid)
            for line in notes[status_number:]:
                display.line(line)
            status_number = len(notes)
            display.update(status)

        due = 0.0
        while not _is_over(running):
            if why := lost():
                raise MeshLost(why)
            if time.monotonic() >= due:
                tell()
                due = time.monotonic() + STATUS_SECONDS
            if untold and directory.start.exists():
                untold = False
                _tell_fresh(directory, display)
            if caught.first and asked_at is None:
                asked_at = time.monotonic()
                _answer(controller.ask_to_stop.choose(), STATUS_TIMEOUT, lost, pid)
                for name in (
                    "cartridge_forge.plugins.watch.pages.export",
                    "cartridge_forge.learning.checkpoint",
                ):
                    import_module(name)  # 1 to 2 s, while the step ends
            late = asked_at is not None and time.monotonic() - asked_at > grace_s
            if late or caught.count > 1:
                display.line("stopping at once")
                cut_off = ""
                break
            time.sleep(POLL_SECONDS)
        else:
            tell()
            running.get(timeout=STATUS_TIMEOUT)
    except MeshLost as loss:
        if is_finished(directory):  # while this process stood still, and its links ran out
            return None
        cut_off = str(loss)
        # At once: to end the rest and to write the report takes seconds, more on a busy host.
        print(f"error: {cut_off}", file=sys.stderr, flush=True)
    except Exception as error:  # an ActorError around what the controller raised
        if is_finished(directory):
            return None
        cause = getattr(error, "exception", error)
        raise cause if isinstance(cause, ForgeError) else RunError(str(cause)) from error
    finally:
        kill_mesh()  # after a run's end only the controller's process is left
    return cut_off


def _tell_fresh(directory: RunDirectory, display: ConsoleDisplay) -> None:
    """Tell which cartridges start by an initialization where others start from trained ones."""
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_start_record
    from cartridge_forge.plugins.library.starts.trained import start_lines

    record = read_start_record(directory.start)
    for line in start_lines({name: one for name, one in record.items() if "init" in one}):
        display.line(f"no trained cartridge to start from, so {line}")


class MeshLost(Exception):
    """Report that the controller, or the right to the run's directory, is lost."""


def _answer(future: Any, timeout_s: float, lost: Callable[[], str], pid: int = 0) -> Any:
    """Return the controller's answer. Raises MeshLost where `lost` says why none will come, or for
    none in `timeout_s`, without the time that this process itself stood still. The time in which
    the controller `pid` ran, or waited for a processor of a busy host, counts a tenth."""
    patience, polled, demand = timeout_s, time.monotonic(), processor_demand(pid)
    while True:
        try:
            return future.get(timeout=POLL_SECONDS)
        except Exception as error:  # no answer yet, or the controller is dead
            if why := lost():
                raise MeshLost(why) from error
            now, demanded = time.monotonic(), processor_demand(pid)
            elapsed = min(now - polled, STILL_SECONDS)
            busy = min(max(demanded - demand, 0.0), elapsed)
            patience -= elapsed - busy * (1 - BUSY_SHARE)
            polled, demand = now, demanded
            if not isinstance(error, TimeoutError) or patience < 0:
                raise MeshLost(
                    f"the controller does not answer ({type(error).__name__}); go on with --resume"
                ) from error


def _is_over(running: Any) -> bool:
    """Return whether the controller's run has ended, in whatever way."""
    try:
        running.get(timeout=0)
    except TimeoutError:
        return False
    except Exception:  # raised again where the run's end is told
        return True
    return True


def kill_mesh() -> None:
    """Kill every descendant of this process that Monarch or the fork server started, with SIGKILL.
    Others stay: the shared memory's janitor waits for its owner's death, and then cleans up."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if any(mark in command for mark in OF_THE_MESH):
                os.kill(pid, signal.SIGKILL)


def leave(code: int) -> NoReturn:
    """End this process with the exit code `code`, past Monarch's own shutdown of a client. It waits
    for processes that are gone, and after some runs it ended the process with 1."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe that nobody reads any more
            stream.flush()
    remove()
    os._exit(code)


def prepare_links(hosts: HostsSpec, say: Callable[[str], None]) -> str | None:
    """Return the address at which Monarch is to listen for the workers, None where all roles are on
    this host, and set the variables by which Monarch and its processes find the certificate.

    `say` gets the warning of plain TCP. Raises SpecError for a certificate that does not fit, and
    for plain TCP beyond loopback that `hosts.insecure` does not allow.
    """
    if hosts.kind == "local":
        return None
    host = reached_at(hosts)
    if hosts.tls is not None:
        identity = read_identity(Path(hosts.tls), "hosts.tls")
        identity.require_name(host, "hosts.tls")
        os.environ.update(identity.environment())
        return f"tls://{host}:0"
    if not is_loopback_host(host):
        if not hosts.insecure:
            raise SpecError(
                f"hosts.tls: the workers reach this host at {host} by plain TCP, and whoever else "
                "does runs code here; set hosts.tls, or hosts.insecure on a network of the mesh's "
                "own"
            )
        say(
            f"WARNING: hosts.insecure: whoever reaches {host} or a worker on the mesh's ports runs "
            "code there"
        )
    return f"tcp://{host}:0"


SINKS = ("WANDB_", "OTEL_", "TRACKIO_")


def controller_variables(spec: RunSpec) -> tuple[str, ...] | None:
    """Return the environment variables that the controller needs beyond ordinary ones; None for all
    of them: a Slurm job inherits the controller's, and a cluster's credentials may be anywhere."""
    mesh = spec.mesh
    if mesh.hosts.kind in ("kubernetes", "slurm"):
        return None
    token = [mesh.control.token_env] if mesh.control.token_env else []
    sinks = [name for name in os.environ if name.startswith(SINKS)] if mesh.telemetry.sinks else []
    return (*token, *sinks, *HUB, *PROXIES)
