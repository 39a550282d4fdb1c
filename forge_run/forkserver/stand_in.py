"""Stand in for a forked process: Monarch starts, watches and signals this one.

`python -I -S stand_in.py OWNER:DESCRIPTOR` hands its streams, environment and working directory to
the fork server over the socket that it inherits from the process OWNER. It ends as the forked
process ends. Without a server it becomes Monarch's own bootstrap. It imports nothing of ours, to
start in a few milliseconds.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def forked(channel: int) -> int | None:
    """Return the exit status of a process that the server forked, None where it forked none."""
    ours, theirs = socket.socketpair()
    request = os.memfd_create("request")
    with os.fdopen(request, "w") as file, ours, socket.socket(fileno=channel) as server:
        json.dump([dict(os.environ), os.getcwd()], file)
        file.flush()
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda got, _: ours.send(bytes([got])))
        socket.send_fds(server, [b"r"], [0, 1, 2, request, theirs.fileno()])
        theirs.close()
        server.close()
        if not ours.recv(1):
            return None
        status = ours.recv(4)
        return struct.unpack("i", status)[0] if status else signal.SIGKILL


def main() -> None:
    """End as a forked process ends, or become an unforked one."""
    owner, channel = map(int, sys.argv[1].split(":"))
    status = None
    if os.getppid() == owner:  # elsewhere the descriptor is another file
        with contextlib.suppress(OSError):  # no server reads
            status = forked(channel)
    if status is None:  # what handles signals here does not outlast this
        os.execv(sys.executable, [sys.executable, "-m", "monarch._src.actor.bootstrap_main"])
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    killed_by = os.WTERMSIG(status)
    if killed_by in SIGNALS:
        signal.signal(killed_by, signal.SIG_DFL)
    os.kill(os.getpid(), killed_by)
    os._exit(128 + killed_by)  # for a signal that Python ignores


main()
