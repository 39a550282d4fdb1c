"""Import once what actors need, and fork a process for each request.

    forge-run ---starts---> fork server (imports, one thread) ---forks---> Monarch's bootstrap
        '---Monarch starts---> stand-in ---descriptors over an inherited socket---^
                                       <---exit status---

A forked process shares the server's pages, those of a loaded model too, and starts in a fraction
of a second. Only the forking thread lives on in a fork, so nothing here may start one. Monarch's
extension does when imported, and is therefore imported after the fork. The server ends with the
thread that started it, and the forked processes end with the server: the kernel kills them
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

# In order of need. None of them may import Monarch (`threads` is checked afterwards).
PRELOAD = (
    "numpy",
    "torch",
    "safetensors.torch",
    "transformers.tokenization_utils_tokenizers",
    "cartridge_forge.plugins.spec_files.loading",
    "cartridge_forge.learning.trainer",
    "cartridge_forge.learning.teacher",
    "cartridge_forge.plugins.objectives.policy_scores",
    "cartridge_forge.learning.decode",
    "cartridge_forge.learning.losses.channel",
    "cartridge_forge.plugins.chat.renderer",
)
PR_SET_PDEATHSIG = 1
READY = b"r"  # what the owner reads after the imports
FORKED = b"f"  # what a stand-in reads once its process exists; the exit status follows
STATUS = struct.Struct("i")  # as of `os.waitpid`
DESCRIPTORS = 5  # stdin, stdout, stderr, a file with the request, and the stand-in's socket


@dataclass(frozen=True)
class ForkedProcess:
    """Hold the id of a forked process, a descriptor that is readable once it has ended, and the
    socket of its stand-in."""

    pid: int
    ended: int
    stand_in: int


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, and exit if it has already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def threads() -> int:
    """Return how many threads this process has, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def preload(modules: Sequence[str], model: Sequence[str] = ()) -> None:
    """Import `modules`, read a `model` (path, dtype) ahead, and exempt all objects from garbage
    collection, which would copy the shared pages. Raises RuntimeError when one started a thread."""
    gc.disable()
    for module in modules:
        import_module(module)
        if threads() > 1:
            raise RuntimeError(f"importing {module} started a thread; take it out of PRELOAD")
    if model:
        from cartridge_forge.learning.model.loading import read_ahead

        with contextlib.suppress(Exception):  # an actor raises it where it is told
            read_ahead(*model)
        if threads() > 1:
            raise RuntimeError(f"reading the model {model[0]} started a thread")
    gc.freeze()
    gc.enable()


def serve(channel: socket.socket) -> Sequence[int] | None:
    """Fork a process for each request until every other end of `channel` is closed.

    Returns None then. In a forked process, returns the descriptors of its request: stdin, stdout,
    stderr and a file (`read_request`).
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    by_end: dict[int, ForkedProcess] = {}
    by_stand_in: dict[int, ForkedProcess] = {}
    while True:
        for ready, _ in poll.poll():
            if ready == channel.fileno():
                _, received, _, _ = socket.recv_fds(channel, 1, DESCRIPTORS)
                if not received:
                    return None
                *descriptors, stand_in = received
                server, pid = os.getpid(), os.fork()
                if pid == 0:
                    end_with_parent(server)
                    os.setpgid(0, 0)  # as Monarch does: a terminal's signals are for its owner
                    for inherited in (channel.detach(), stand_in, *by_end, *by_stand_in):
                        os.close(inherited)
                    return descriptors
                for descriptor in descriptors:
                    os.close(descriptor)
                forked = ForkedProcess(pid, os.pidfd_open(pid), stand_in)
                by_end[forked.ended] = by_stand_in[stand_in] = forked
                poll.register(forked.ended, select.POLLIN)
                poll.register(stand_in, select.POLLIN)
                _tell(forked, FORKED)
            elif ready in by_end:
                forked = by_end.pop(ready)
                _tell(forked, STATUS.pack(os.waitpid(forked.pid, 0)[1]))
                del by_stand_in[forked.stand_in]
                for descriptor in (forked.ended, forked.stand_in):
                    with contextlib.suppress(KeyError):  # a stand-in that is gone
                        poll.unregister(descriptor)
                    os.close(descriptor)
            elif ready in by_stand_in:
                _obey(by_stand_in[ready], poll)


def _tell(forked: ForkedProcess, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the stand-in was killed
        os.write(forked.stand_in, message)


def _obey(forked: ForkedProcess, poll: select.poll) -> None:
    """Pass on the signal that a stand-in got; kill the process of one that is gone."""
    status = b""
    with contextlib.suppress(OSError):
        status = os.read(forked.stand_in, 1)
    if not status:
        poll.unregister(forked.stand_in)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(forked.ended, status[0] if status else signal.SIGKILL)


def become(stdin: int, stdout: int, stderr: int, request: int) -> None:
    """Take over the streams, environment and working directory of the stand-in. Closes the
    descriptors."""
    for stream, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    with os.fdopen(request) as file:
        file.seek(0)
        environment, directory = json.load(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory  # as for `python -m`


def main() -> None:
    """Serve requests over the inherited socket, argument 1, for the process of argument 2, once the
    modules and the model of argument 3 (JSON) are there."""
    end_with_parent(int(sys.argv[2]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    modules, model = json.loads(sys.argv[3])
    preload([*PRELOAD, *modules], model)
    channel.send(READY)
    descriptors = serve(channel)
    if descriptors is None:
        os._exit(0)  # the libraries' own shutdown is for the forked processes
    become(*descriptors)
    multiprocessing.set_start_method("forkserver", force=True)  # as Monarch's own main
    from monarch._src.actor.bootstrap_main import invoke_main

    try:
        invoke_main()
    except SystemExit as ended:
        # Not further: preloaded libraries complain of what a fork cannot take down.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0)


if __name__ == "__main__":
    main()
