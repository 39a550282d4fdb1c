"""Run a worker, a host of a mesh: `forge worker`.

    forge worker --tls DIR --address tls://10.0.0.2:26600                 others connect there
    forge worker --tls DIR --address tls://w2:26600@tls://0.0.0.0:26600   and it listens there
    forge worker --tls DIR          its name in DNS, $MONARCH_PORT; in a pod with $POD_IP and
                                    $POD_NAMESPACE the name that its IP has
    forge worker --address tcp://127.0.0.1:26600               this host alone

The worker serves Monarch at this address and, for each start, at another port that its worker info
reports (services.hosts.handshake, at the port after the address). A controller that was attached to
a worker cannot attach to one that was restarted at the same port (docs/adr/0009). The address
itself serves clients that do not read worker info, such as Kubernetes' probes.

The first SIGTERM (or Ctrl-C) drains the worker: its worker info reports it, controllers move their
replicas away, and it exits once it has no child process, at the latest after the grace. A second
signal ends it at once.

Whoever attaches to a worker runs code in it. So beyond loopback it talks by mutual TLS: others must
show a certificate of the authority in DIR (docs/adr/0018). `--insecure` has it listen for anyone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cartridge_forge.actors.base import BEATING
from cartridge_forge.plugins.cluster.hosts.handshake import (
    WorkerInfo,
    WorkerInfoServer,
    host_and_port,
)
from cartridge_forge.plugins.cluster.spec import pod_host
from cartridge_forge.plugins.host.private_sockets import remove, use_private_sockets
from cartridge_forge.plugins.host.tls import TlsIdentity, read_identity
from cartridge_forge.protocols.errors import ForgeError, RunError, SpecError
from cartridge_forge.protocols.spec.mesh import is_loopback_host, is_tls
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT, versions
from cartridge_forge.services.proc_info import children, descendants

PORT = 26600
GRACE_SECONDS = 25.0  # Kubernetes kills after 30
LOOK_SECONDS = 0.1
SETTLE_SECONDS = 0.5  # after Monarch's server listens, until its agent is there to attach to
KILL_SECONDS = 5.0  # for children to be gone after SIGKILL
START_LOOKS = 120  # one a second, that a child may be without its heartbeat actor


def address(name: str, port: int, scheme: str = "tcp") -> str:
    """Return the address that others connect to and the one to listen on, in Monarch's form:
    `"tcp://generator-0.generator-svc:26600@tcp://0.0.0.0:26600"`."""
    return f"{scheme}://{name}:{port}@{scheme}://0.0.0.0:{port}"


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


def work(
    at: str | None = None,
    grace_s: float = GRACE_SECONDS,
    tls: Path | None = None,
    *,
    insecure: bool = False,
) -> int:
    """Run a worker until a signal ends it; return the exit code once no child process is left.

    `at` is `"tls://called:port"` or `"tls://called:port@tls://listens:port"`, of plain TCP
    `"tcp://..."`. `tls` is the directory of the worker's certificate; `insecure` lets it listen
    without one beyond loopback. Raises RunError for an address that it cannot listen on, SpecError
    for a certificate that does not fit.
    """
    identity = None if tls is None else read_identity(tls, "--tls")
    scheme = "tcp" if identity is None else "tls"
    at = at or address(_own_name(), int(os.environ.get("MONARCH_PORT", PORT)), scheme)
    called, _, listens = at.partition("@")
    name, port = host_and_port(called)
    interface, own_port = host_and_port(listens or called)
    _require_secured(at, name, interface, identity, insecure=insecure)
    os.umask(0o077)  # as in the run's own process: the processes here write into its directory
    os.environ.update(LINK_ENVIRONMENT)  # read by Monarch when it is imported
    if identity is not None:
        os.environ.update(identity.environment())
    use_private_sockets()
    from monarch.actor import start_worker_loop_forever

    stop = StopSignals()
    if identity is None:
        _take(interface, own_port)
        fresh = _take(interface, 0)
        served = [f"tcp://{name}:{p}@tcp://{interface}:{p}" for p in (own_port, fresh)]
    else:
        listeners = (_listener(interface, own_port), _listener(interface, 0))
        fresh = listeners[1].getsockname()[1]
        # Monarch takes no second address for TLS, but a socket that listens already.
        served = [f"tls://{name}:fd{listener.detach()}" for listener in listeners]
    attach_at = f"{scheme}://{name}:{fresh}"
    incarnation, gpus = uuid.uuid4().hex, gpus_of_host()

    def tell() -> WorkerInfo:
        return WorkerInfo(versions(), incarnation, stop.signals > 0, attach_at, gpus)

    context = None if identity is None else identity.server_context
    info = WorkerInfoServer(interface, own_port + 1, tell, context)
    for listened in served:
        loop = start_worker_loop_forever(address=listened, ca="trust_all_connections")
        threading.Thread(target=_watch, args=(loop, stop), daemon=True).start()
    threading.Thread(target=_watch_starts, daemon=True).start()
    time.sleep(SETTLE_SECONDS)
    with info:
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
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def end_unreached(looks: Mapping[int, int], most: int = START_LOOKS) -> dict[int, int]:
    """Kill the children of this process that have had no heartbeat actor at `most` looks, this one
    included, and return the looks of the others by their ids.

    A host that is cut off while a process starts there never gets the rest of its start, and
    nothing else would end the process. Looks are counted, as no clock stops on a frozen host."""
    waiting = [pid for pid, name in children(os.getpid()).items() if name != BEATING]
    counts = {pid: looks.get(pid, 0) + 1 for pid in waiting}
    for pid in [pid for pid, count in counts.items() if count >= most]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        del counts[pid]
    return counts


def _watch_starts() -> NoReturn:
    looks: Mapping[int, int] = {}
    while True:
        time.sleep(1.0)
        looks = end_unreached(looks)


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
        remove()
        os._exit(1)


def _own_name() -> str:
    """Return the name at which others reach this host: a pod's, where its variables are set."""
    ip, namespace = os.environ.get("POD_IP"), os.environ.get("POD_NAMESPACE")
    return pod_host(ip, namespace) if ip and namespace else socket.getfqdn()


def _require_secured(
    at: str, name: str, interface: str, identity: TlsIdentity | None, *, insecure: bool
) -> None:
    """Raise SpecError where the worker's address and its certificate do not fit, or where it would
    listen beyond loopback without one, unless `insecure`."""
    schemes = {is_tls(part) for part in at.split("@")}
    if identity is not None:
        if insecure:
            raise SpecError("--tls and --insecure exclude each other; leave one of them out")
        if schemes != {True}:
            raise SpecError(f"--address: {at} is plain TCP, and --tls is given; write it as tls://")
        identity.require_name(name, "--address")
    elif True in schemes:
        raise SpecError(
            f"--address: {at} is for TLS; add --tls DIR, a directory that `forge certs` made"
        )
    elif not is_loopback_host(interface):
        danger = f"whoever reaches {interface} on this worker's ports runs code on this host"
        if not insecure:
            raise SpecError(
                f"--address: {at} is plain TCP beyond loopback, and {danger}; make a certificate "
                "with `forge certs` and give --tls DIR and a tls:// address, or --insecure on a "
                "network that only the mesh reaches"
            )
        sys.stderr.write(f"WARNING: --insecure: {danger}\n")
        sys.stderr.flush()


def _take(interface: str, port: int) -> int:
    """Return a port that can be listened on: `port`, or any free one for 0. Monarch itself reports
    a port that it cannot have too late."""
    with _listener(interface, port) as trial:
        return int(trial.getsockname()[1])


def _listener(interface: str, port: int) -> socket.socket:
    """Return a socket that listens on `port`, or on any free one for 0. Raises RunError."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((interface.strip("[]"), port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise RunError(
            f"a worker cannot listen on {interface}:{port} ({error.strerror}); is another worker "
            "there, or has this host no such address? Choose another with --address, as in "
            "tls://its-name:port@tls://0.0.0.0:port to listen on all it has"
        ) from error
    return listener


def main(
    at: str | None = None,
    grace_s: float = GRACE_SECONDS,
    tls: Path | None = None,
    *,
    insecure: bool = False,
) -> NoReturn:
    """Call `work`, print its error, and exit this process."""
    try:
        code = work(at, grace_s, tls, insecure=insecure)
    except ForgeError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    sys.stdout.flush()
    remove()
    os._exit(code)  # Monarch's own exit would wait for attached controllers


def gpus_of_host() -> int:
    """Return how many NVIDIA GPUs this process may use, without importing torch."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    devices = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*"))
    return sum(name.isdecimal() for name in devices)
