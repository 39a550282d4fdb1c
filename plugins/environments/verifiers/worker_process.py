"""Start and supervise the process that plays tasksets of `verifiers`, with a Python of its own.

    async with VerifiersWorker(paths=[Path("tasksets")]) as worker:
        tasks = await worker.tasks("gsm8k", most=100)

The process starts at the first request, and again after it died. Its $HOME is a temporary folder,
so that it installs nothing into the user's (set HF_HOME to keep what tasksets download).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from cartridge_forge.plugins.chat.episodes import Task
from cartridge_forge.plugins.chat.wire.foreign import count, read_json, value_of
from cartridge_forge.plugins.environments.verifiers.chat_endpoint import ChatEndpoint
from cartridge_forge.plugins.host.limited_process import START_SECONDS, STARTS
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.secrets import confined
from cartridge_forge.protocols.step import NO_DOCUMENT

PYTHON = REPOSITORY / ".venv-verifiers" / "bin" / "python"
WORKER = Path(__file__).with_name("worker_main.py")
KEY = "FORGE_CHAT_API_KEY"
MARK = "FORGE_VERIFIERS"  # in the environment of the worker and of its descendants
END_TIMEOUT_S = 10.0
PING_S = 5.0
GRACE_S = 15.0  # beyond a rollout's deadline, which the worker keeps itself
MAX_LINE_BYTES = 1 << 24
LAST_WORDS_BYTES = 2000


@dataclass(frozen=True)
class VerifiersOutcome:
    """Carry the reward and metrics of one episode. Without a reward, `error` begins with
    "environment_died" (deadline passed, or process lost) or "environment_refused" (verifiers or the
    taskset raised); `error` is empty for a taskset that gives no reward."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


class VerifiersWorker:
    """List and play tasks in the worker process. `paths` are folders that tasksets are imported
    from, besides installed packages; `timeout_s` bounds each rollout and each list of tasks."""

    def __init__(
        self, paths: Sequence[Path] = (), timeout_s: float = 300.0, python: Path = PYTHON
    ) -> None:
        """Raises RunError if `python` does not exist."""
        if not python.exists():
            raise RunError(f"verifiers is not installed in {python}: make install-verifiers")
        self.endpoint = ChatEndpoint()
        self._paths = [path.resolve() for path in paths]
        self._timeout_s, self._python = timeout_s, python
        self._home = Path()  # set while it is entered
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._serial = 0

    async def __aenter__(self) -> VerifiersWorker:
        self._home = Path(tempfile.mkdtemp(prefix="verifiers-"))
        self.endpoint.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._end()
        finally:
            await asyncio.to_thread(self.endpoint.__exit__, kind, error, trace)
            shutil.rmtree(self._home, ignore_errors=True)

    async def tasks(
        self,
        taskset: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        most: int,
        document: str = NO_DOCUMENT,
    ) -> list[Task]:
        """Return the first `most` tasks of a taskset: `Task("gsm8k/0", ...)`. `arguments` are those
        of the taskset's config. Raises DataError if it cannot be loaded."""
        plain = {"taskset": taskset, "arguments": dict(arguments or {})}
        try:
            reply = await self._ask({"ask": "tasks", "most": most, **plain}, self._timeout_s)
        except WorkerDied as error:
            reply = {"error": str(error)}
        if "error" in reply:
            raise DataError(
                f"the taskset {taskset} of verifiers cannot be loaded: {reply['error']}; "
                "install it into .venv-verifiers, or name the folder that it is in"
            )
        rows = reply["result"]["tasks"]
        return [Task(f"{taskset}/{r['index']}", document, {**plain, **r}) for r in rows]

    async def check(self) -> None:
        """Kill the worker, which fails all waiting requests, if it does not answer a ping."""
        with contextlib.suppress(WorkerDied):
            await self._ask({"ask": "ping"}, PING_S)

    async def play(self, task: Task, url: str, timeout_s: float | None = None) -> VerifiersOutcome:
        """Return the outcome of one rollout with the model under `url`, a failed one included.
        `timeout_s` replaces the worker's own for it."""
        most = self._timeout_s if timeout_s is None else timeout_s
        wanted = {k: task.arguments[k] for k in ("taskset", "arguments", "index")}
        request = {"ask": "play", "url": url, "timeout_s": most, **wanted}
        try:
            reply = await self._ask(request, most + GRACE_S)
        except WorkerDied as error:
            return VerifiersOutcome(None, error=f"environment_died: {error}"[:500])
        if "error" in reply:
            kind = "environment_died" if reply["late"] else "environment_refused"
            return VerifiersOutcome(None, error=f"{kind}: {reply['error']}"[:500])
        reward, metrics = reply["result"]["reward"], reply["result"]["metrics"]
        judged = reward is not None and math.isfinite(reward)
        return VerifiersOutcome(float(reward) if judged else None, metrics)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Return the worker's reply. On a timeout kills the worker, which fails all waiting
        requests. Raises WorkerDied."""
        async with self._starting:
            process = await self._started()
        self._serial += 1
        number = self._serial
        reply = self._asked[number] = asyncio.get_running_loop().create_future()
        assert process.stdin is not None
        try:
            process.stdin.write(f"{json.dumps({'id': number, **request})}\n".encode())
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            _kill(process)
            raise WorkerDied(f"no answer within {timeout_s:g} s") from None
        finally:
            self._asked.pop(number, None)

    async def _started(self) -> Process:
        """Return the process, ready for requests."""
        for _ in range(STARTS):
            if self._process is None or self._reading is None or self._reading.done():
                await self._start()
            assert self._process is not None
            assert self._reading is not None
            ready = asyncio.create_task(self._ready.wait())
            try:
                await asyncio.wait(
                    {ready, self._reading}, timeout=START_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
            finally:
                ready.cancel()
            if self._ready.is_set():
                return self._process
            await self._end()
        raise WorkerDied(f"it did not start: {self._last_words()}")

    async def _start(self) -> None:
        mark = secrets.token_hex(16)
        self._ready.clear()
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                self._python, "-P", WORKER, stdin=PIPE, stdout=PIPE, stderr=log,
                env=self._environment(mark), cwd=self._home, start_new_session=True,
                limit=MAX_LINE_BYTES,
            )  # fmt: skip
        finally:
            os.close(log)
        self._reading = asyncio.create_task(self._read(process, mark))

    async def _read(self, process: Process, mark: str) -> None:
        """Dispatch the worker's replies; when they end, kill all that it started."""
        assert process.stdout is not None
        why = ""
        try:
            while line := await process.stdout.readline():
                reply = read_json(line, MAX_LINE_BYTES)
                number = count(value_of(reply, "id"), sys.maxsize)
                if value_of(reply, "ready"):
                    self._ready.set()
                elif (waits := self._asked.get(number or 0)) and not waits.done():
                    waits.set_result(reply)
        except ValueError as error:  # too long, or not JSON
            why = f"it said what cannot be read: {error}; "
        finally:
            _kill(process)
            await process.wait()
            _kill_marked(mark)
            died = WorkerDied(f"{why}it ended with {process.returncode}: {self._last_words()}")
            for waits in self._asked.values():
                if not waits.done():
                    waits.set_exception(died)

    async def _end(self) -> None:
        """End the process and all that it started: by closing its stdin, else by force."""
        process, reading = self._process, self._reading
        self._process = self._reading = None
        if process is None or reading is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait({reading}, timeout=END_TIMEOUT_S)
        _kill(process)
        await reading

    def _environment(self, mark: str) -> dict[str, str]:
        """Return the ordinary variables of this process's environment, without paths outside the
        worker's home: tasksets are code from outside, and get no secret but `endpoint.key`."""
        inherited = {k: v for k, v in confined(os.environ).items() if not k.startswith("XDG_")}
        direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        direct = f"{direct},127.0.0.1" if direct else "127.0.0.1"
        return {
            **inherited,
            "NO_PROXY": direct,
            "no_proxy": direct,  # clients that read both prefer this one
            "HOME": str(self._home),
            "PYTHONPATH": os.pathsep.join(map(str, self._paths)),
            KEY: self.endpoint.key,
            MARK: mark,
        }

    @property
    def _log(self) -> Path:
        return self._home / "worker.log"

    def _last_words(self) -> str:
        output = self._log.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace")
        return output.strip().rpartition("\n")[2] or "no last words"


class WorkerDied(Exception):
    """Signal that the worker ended or was killed after a timeout."""


def _kill(process: Process) -> None:
    """Kill the worker's session, if it still runs; its children may have sessions of their own."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _kill_marked(mark: str) -> None:
    """Kill all descendants of a worker; runtimes and tools have sessions of their own."""
    entry = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
