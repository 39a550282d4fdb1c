"""Start and stop the fork server of a command, and tell Monarch how its processes start."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from actors.base import QUIET

if TYPE_CHECKING:  # Monarch reads its environment when it is imported
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

CHANNEL = "FORGE_FORK_SERVER"  # environment variable: the owner's id, and its end of the socket
STAND_IN = str(Path(__file__).with_name("stand_in.py"))


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Run a fork server for the local processes that Monarch starts meanwhile.

    Call it in the main thread, since the server ends with the thread that started it. Without
    pidfds, which Linux alone has, processes start as Monarch starts them.
    """
    if not hasattr(os, "pidfd_open"):
        yield
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "services.forkserver.server"]
    with ours:
        with theirs:
            server = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                # One thread until a role sets its number: OpenMP reads this when it is loaded.
                env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
            )
        ours.set_inheritable(True)  # for the stand-ins, which Monarch starts
        os.environ[CHANNEL] = f"{os.getpid()}:{ours.fileno()}"
        try:
            yield
        finally:
            del os.environ[CHANNEL]
            server.kill()
            server.wait()


def bootstrap_command() -> BootstrapCommand | None:
    """Return the command by which Monarch starts a local process from the fork server; None without
    a server, for Monarch's own."""
    channel = os.environ.get(CHANNEL)
    if channel is None:
        return None
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand

    return BootstrapCommand(sys.executable, None, ["-I", "-S", STAND_IN, channel], {})
