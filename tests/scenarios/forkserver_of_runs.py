"""Start many short runs from one process that has imported everything: a start costs 3 s less of
each core.

    with warm_runs() as start, start(words, root) as run: ...     # as small_run.running

What is forked is what is imported, `forge_run` and the run's own fork server. All other processes
start as in any run. This file's name stands in the command line of every forked process, where
`forge_run.launch.kill_mesh` looks for it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from small_run import ROOT, Running

MODULES = (
    "cartridge_forge.forge_run.cli", "cartridge_forge.forge_run.launch",
    "cartridge_forge.plugins.watch.pages.export", "torch.distributed.checkpoint",
    "matplotlib.figure", "matplotlib.backends.backend_svg", "grpc", "openai.resources.chat",
)  # fmt: skip
NUMBER = struct.Struct("i")
Start = Callable[[Sequence[str], Path], AbstractContextManager[Running]]


class ForkedClient:
    """The part of Popen that tests use, of a process that the warm one forked."""

    def __init__(
        self, channel: socket.socket, words: Sequence[str], mark: str, said: IO[str]
    ) -> None:
        self.returncode: int | None = None
        self._said = said
        self._status, theirs = os.pipe()
        request = json.dumps([list(words), {**os.environ, **dict([mark.split("=")])}]).encode()
        with tempfile.TemporaryFile() as file:
            file.write(request)
            file.flush()
            socket.send_fds(channel, [b"r"], [file.fileno(), self._said.fileno(), theirs])
        os.close(theirs)
        (self.pid,) = NUMBER.unpack(os.read(self._status, NUMBER.size))

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            status = os.read(self._status, NUMBER.size)
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(NUMBER.unpack(status)[0])
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, None]:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired("forge-run", timeout, self._output())
        return self._output(), None

    def _output(self) -> str:
        self._said.seek(0)
        return self._said.read()


class ForkedRun(Running):
    """A run whose first process was forked: the forks that have no mark are of its session."""

    def alive(self) -> list[int]:
        found = super().alive()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                state, _, _, session = (
                    process.joinpath("stat").read_text().rsplit(")")[1].split()[:4]
                )
                if int(session) == self.process.pid and state != "Z":
                    found.append(int(process.name))
        return found


@contextmanager
def warm_runs(models: Sequence[Path] = ()) -> Iterator[Start]:
    """Run the warm process; yields how to start a run from it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    warm = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), *map(str, models)], cwd=ROOT,
        pass_fds=[theirs.fileno()],
    )  # fmt: skip
    theirs.close()
    assert ours.recv(1), "the warm process has ended"

    @contextmanager
    def start(words: Sequence[str], root: Path) -> Iterator[Running]:
        mark = f"FORGE_TEST_RUN={uuid.uuid4().hex}"
        with tempfile.TemporaryFile("w+") as said:
            process: Any = ForkedClient(ours, words, mark, said)
            run = ForkedRun(process, root, mark)
            try:
                yield run
            finally:
                run.kill()

    try:
        with ours:
            yield start
    finally:
        warm.kill()
        warm.wait()


# -- in the warm process ------------------------------------------------------------------------


def serve(channel: socket.socket) -> tuple[list[str], dict[str, str], int] | None:
    """Fork for each request; in the fork, which leads a session, return its command line, its
    environment and where it writes to. A process between waits for it and tells its exit status."""
    while True:
        _, received, _, _ = socket.recv_fds(channel, 1, 3)
        if not received:
            return None
        if os.fork():
            for descriptor in received:
                os.close(descriptor)
            continue
        channel.close()
        request, said, status = received
        with os.fdopen(request, "rb") as file:
            file.seek(0)
            words, environment = json.loads(file.read())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not (pid := os.fork()):
            os.close(status)
            os.setsid()
            return words, environment, said
        os.write(status, NUMBER.pack(pid))
        os.write(status, NUMBER.pack(os.waitpid(pid, 0)[1]))
        os._exit(0)


class ForkedServer:
    """The part of Popen that `forge_run.forkserver.client` uses: the server's main, in a fork."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str],
        process_group: int,
    ) -> None:  # fmt: skip
        from cartridge_forge.forge_run.forkserver import server

        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            kept = max(pass_fds)
            os.closerange(3, kept)
            os.closerange(kept + 1, 1024)
            take_over(env)
            sys.argv = list(command[2:])
            server.main()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def take_over(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    from cartridge_forge.forge_run.forkserver import client, server

    server.preload([*MODULES, *server.PRELOAD])
    for model in sys.argv[2:]:
        server.preload((), (model, "float32"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    channel.send(b"r")
    given = serve(channel)
    if given is None:
        os._exit(0)
    words, environment, said = given
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, descriptor in enumerate((nothing, said, said)):
        os.dup2(descriptor, stream)
    os.close(nothing)
    os.close(said)
    take_over(environment)
    client.subprocess = SimpleNamespace(Popen=ForkedServer)  # type: ignore[attr-defined]
    sys.argv = ["forge-run", *words]
    sys.exit(import_module("cartridge_forge.forge_run.cli").forge_run())


if __name__ == "__main__":
    main()
