"""Call a function on input from outside in a process of its own, with limits of time and memory.

    read = "cartridge_forge.plugins.documents.reading_process:read"
    with LimitedProcess(read, ProcessLimits()) as process:
        texts = process.call({"suffix": ".pdf"}, data)

Requests and replies are JSON and bytes over a socket, no pickle. The process starts at the first
call, serves further ones, and is replaced after one that broke a limit. It has no secret of the
environment, and can write no file but for a function that is given more by `file_bytes`.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.files import IMPORT_FOLDER
from cartridge_forge.protocols.secrets import confined

# Of a start: a hundred times what it takes on an idle core. An end is seen at once, so the limit is
# for a process that hangs. A start that failed is tried once more, since the machine may have been
# out of memory, or starved by others.
START_SECONDS, STARTS = 300.0, 2
END_SECONDS = 30.0  # from the end of a process's socket to its own
SHARE = 6  # a file's numbers are held as read, as joined and as copied, each perhaps in float32
READY, REPLY = b"ready", 64 * 1024**2


@dataclass(frozen=True)
class ProcessLimits:
    """Bound one call: seconds of processor time and by the clock, bytes of memory beyond what the
    process has after its imports, of a file that it writes, and of its reply."""

    cpu_s: float = 20.0
    wall_s: float = 120.0
    memory: int = 1024**3
    file_bytes: int = 0
    reply_bytes: int = REPLY


class BrokenLimitError(DataError):
    """Report input that takes more than a limit allows: "takes ...; leave it out". `late` says that
    it took too long, `status` is the exit status of a process that ended, None where unknown."""

    late: bool = False
    status: int | None = None


class LimitedProcess:
    """Hold the process that calls `function`, "module:name" of (request, data) -> JSON. `what`
    and `remedy` word the error of a call that takes too much. It may import the modules in `paths`
    too."""

    def __init__(
        self, function: str, limits: ProcessLimits, what: str = "to read",
        remedy: str = "leave it out", paths: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._function, self._limits, self._what, self._remedy = function, limits, what, remedy
        self._paths = tuple(paths)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._killed = False  # by `kill`, while it started

    def __enter__(self) -> LimitedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def call(
        self,
        request: Mapping[str, Any],
        data: bytes = b"",
        size: int = 0,
        wall_s: float | None = None,
    ) -> Any:
        """Return the function's result; `size` bytes of a file allow SHARE times as much memory
        more, `wall_s` is this call's own limit. Raises DataError as the function does,
        BrokenLimitError where it breaks a limit, and RunError where the process does not start."""
        limits = self._limits
        patience = wall_s or limits.wall_s
        with self._lock:
            channel = self._channel or self._started()
            try:
                channel.send_bytes(json.dumps([request, size]).encode())
                channel.send_bytes(data)
                if not channel.poll(patience):
                    late = BrokenLimitError(
                        f"takes longer than {patience:g} s {self._what}; {self._remedy}"
                    )
                    late.late = True
                    raise late
                reply = json.loads(channel.recv_bytes(limits.reply_bytes))
            except BrokenLimitError:
                self.end()
                raise
            except (OSError, EOFError, ValueError) as error:
                broken = BrokenLimitError(
                    f"takes more than {limits.cpu_s:g} s of processor time or {limits.memory:,} "
                    f"bytes of memory {self._what}, or holds too much; {self._remedy}"
                )
                is_closed = isinstance(error, EOFError | ConnectionError)
                broken.status = self._status() if is_closed else None
                self.end()
                raise broken from error
        if "error" in reply:
            raise DataError(reply["error"])
        return reply["result"]

    def kill(self) -> None:
        """Kill the process, if it runs; a call in another thread then raises BrokenLimitError."""
        self._killed, process = True, self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # of its own session, with its children
                os.killpg(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """End the process and what it started, if it runs."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _status(self) -> int | None:
        """Return the exit status of a process that has closed its end, None where it runs on."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_SECONDS)
        return None

    def _started(self) -> Connection:
        self._killed, why = False, ""
        for _ in range(STARTS):
            channel = self._start()
            if not channel.poll(START_SECONDS):
                why = f"it was not ready after {START_SECONDS:g} s"
            else:
                with contextlib.suppress(OSError, EOFError):
                    if channel.recv_bytes() == READY:
                        return channel
                why = f"it ended with {self._status()}"
            self.end()
            if self._killed:
                break
        raise RunError(f"the process for {self._function} did not start: {why}; run `make install`")

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "cartridge_forge.plugins.host.limited_process",
                    str(theirs.fileno()), self._function, json.dumps(vars(self._limits)),
                ],
                env={
                    **confined(os.environ),
                    "PYTHONPATH": os.pathsep.join([str(IMPORT_FOLDER), *self._paths]),
                },
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._channel = ours
        return ours


def _limit(limits: ProcessLimits, memory: int) -> None:
    """Give this process so much more processor time, and `memory` bytes in all."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.RLIM_INFINITY))
    used = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) + limits.cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (used, resource.RLIM_INFINITY))


def main(descriptor: str, function: str, limits_text: str) -> None:
    """Serve calls until the other end of the socket closes."""
    limits = ProcessLimits(**json.loads(limits_text))
    channel = Connection(int(descriptor))
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)
    status = Path("/proc/self/status").read_text()
    data_kb = int(
        next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]
    )
    for kind, most in (
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    channel.send_bytes(READY)
    while True:
        try:
            (request, size), data = json.loads(channel.recv_bytes()), channel.recv_bytes()
        except EOFError:
            return
        _limit(limits, data_kb * 1024 + limits.memory + SHARE * size)
        try:
            reply = {"result": called(request, data)}
        except DataError as error:
            reply = {"error": str(error)}
        del data
        channel.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
