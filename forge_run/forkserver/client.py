"""Start and stop the fork server of a command."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cartridge_forge.actors.base import FORK_SERVER, QUIET
from cartridge_forge.protocols.secrets import confined

START_SECONDS = 300.0  # for the imports, on a host that has other work
STAND_IN = str(Path(__file__).with_name("stand_in.py"))


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str] = (), model: tuple[str, str] | None = None
) -> Iterator[Callable[[], None]]:
    """Run a fork server for the local processes that Monarch starts meanwhile. It also imports
    `modules`, and reads a `model` (path, dtype) whose memory the processes then share.

    Yields a function to call before the first start: it returns once the server has imported
    everything. Monarch's patience with a starting process is for a start. Without a server, after
    a failed import too, processes start as Monarch starts them.

    Call it in the main thread, since the server ends with the thread that started it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "cartridge_forge.forge_run.forkserver.server"]
    with ours:
        with theirs:
            server = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), json.dumps([modules, model])],
                pass_fds=[theirs.fileno()],
                # One thread until a role sets its number: OpenMP reads this when it is loaded.
                env={**confined(os.environ), **QUIET, "OMP_NUM_THREADS": "1"},
                # A signal to the owner's group is for the owner, which stops the run in order.
                process_group=0,
            )
        ours.set_inheritable(True)  # for the stand-ins, which Monarch starts
        os.environ[FORK_SERVER] = f"{os.getpid()}:{ours.fileno()}:{STAND_IN}"

        def ready() -> None:
            ours.settimeout(START_SECONDS)
            try:
                ours.recv(1)  # nothing where the server has ended
            except TimeoutError:
                server.kill()
            ours.settimeout(None)

        try:
            yield ready
        finally:
            del os.environ[FORK_SERVER]
            server.kill()
            server.wait()
