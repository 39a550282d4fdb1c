"""Run a worker, a host of a mesh: `forge worker` (`python -m services.hosts.worker`).

    forge worker --address tcp://10.0.0.2:26600                  others connect to it there
    forge worker --address tcp://w2:26600@tcp://0.0.0.0:26600    and it listens there
    forge worker                                                 its name in DNS, $MONARCH_PORT

The worker serves Monarch at this address and, for each start, at another port that its worker info
reports (services.hosts.handshake, at the port after the address). A controller that was attached to
a worker cannot attach to one that was restarted at the same port (docs/adr/0009). The address
itself serves clients that do not read worker info, such as Kubernetes' probes.

The first SIGTERM (or Ctrl-C) drains the worker: its worker info reports it, controllers move their
replicas away, and it exits once it has no child process, at the latest after the grace. A second
signal ends it at once. There is no TLS and no authentication between workers: only the mesh's own
pods or hosts may reach it (deploy/k8s has the network policy).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from protocols.errors import RunError
from services.hosts.handshake import WorkerInfo, WorkerInfoServer, host_and_port, versions
from services.hosts.source import LINK_ENVIRONMENT
from services.proc_info import descendants

PORT = 26600
GRACE_SECONDS = 25.0  # Kubernetes kills after 30
LOOK_SECONDS = 0.1
KILL_SECONDS = 5.0  # for children to be gone after SIGKILL


def address(name: str, port: int) -> str:
    """Return the address that others connect to and the one to listen on, in Monarch's form:
    `"tcp://generator-0.generator-svc:26600@tcp://0.0.0.0:26600"`."""
    return f"tcp://{name}:{port}@tcp://0.0.0.0:{port}"


class StopSignals:
    """Count SIGTERM and SIGINT: the first drains, the second ends. Made in the main thread.

    This is a polled count and no event: a handler runs inside the main thread, and would deadlock
    when it sets an event that this thread is about to wait for.
    """

    def __init__(self) -> None:
        self.signals = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1


def work(at: str | None = None, grace_s: float = GRACE_SECONDS) -> int:
    """Run a worker until a signal ends it; return the exit code once no child process is left.

    `at` is `"tcp://called:port"` or `"tcp://called:port@tcp://listens:port"`. Raises RunError for
    an address that it cannot listen on.
    """
    os.umask(0o077)  # as in the run's own process: the processes here write into its directory
    os.environ.update(LINK_ENVIRONMENT)  # read by Monarch when it is imported
    from monarch.actor import start_worker_loop_forever

    at = at or address(socket.getfqdn(), int(os.environ.get("MONARCH_PORT", PORT)))
    called, _, listens = at.partition("@")
    name, port = host_and_port(called)
    interface, own = host_and_port(listens or called)
    stop = StopSignals()
    _take(interface, own)
    fresh = _take(interface, 0)
    attach_at = f"tcp://{name}:{fresh}"
    incarnation = uuid.uuid4().hex

    def tell() -> WorkerInfo:
        return WorkerInfo(versions(), incarnation, stop.signals > 0, attach_at)

    with WorkerInfoServer(interface, own + 1, tell):
        addresses = (f"{called}@tcp://{interface}:{own}", f"{attach_at}@tcp://{interface}:{fresh}")
        for listened in addresses:
            loop = start_worker_loop_forever(address=listened, ca="trust_all_connections")
            threading.Thread(target=_watch, args=(loop, stop), daemon=True).start()
        sys.stdout.write(f"worker {name}:{port} waits for controllers\n")
        sys.stdout.flush()
        while not stop.signals:
            time.sleep(LOOK_SECONDS)
        deadline = time.monotonic() + grace_s
        while descendants(os.getpid()) and time.monotonic() < deadline and stop.signals < 2:
            time.sleep(LOOK_SECONDS)
        end_children()
    return 0


def end_children() -> None:
    """Send SIGKILL to every process below this one, until none is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _watch(loop: Any, stop: StopSignals) -> None:
    """End the worker when a Monarch server ends by itself."""
    why = ""
    try:
        loop.get()
    except Exception as error:  # any failure of Monarch's server
        why = f": {error}"
    if not stop.signals:
        sys.stderr.write(f"error: Monarch's server has ended{why}; start the worker again\n")
        sys.stderr.flush()
        end_children()
        os._exit(1)


def _take(interface: str, port: int) -> int:
    """Return a port that can be listened on: `port`, or any free one for 0. Monarch itself reports
    a port that it cannot have too late."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    try:
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((interface.strip("[]"), port))
            return int(trial.getsockname()[1])
    except OSError as error:
        raise RunError(
            f"a worker cannot listen on {interface}:{port} ({error.strerror}); is another worker "
            "there, or has this host no such address? Choose another with --address, as in "
            "tcp://its-name:port@tcp://0.0.0.0:port to listen on all it has"
        ) from error


def main(at: str | None = None, grace_s: float = GRACE_SECONDS) -> NoReturn:
    """Call `work`, print its error, and exit this process."""
    try:
        code = work(at, grace_s)
    except RunError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # Monarch's own exit would wait for attached controllers


if __name__ == "__main__":
    main()
