"""Detect a stalled run, report which requests wait for which replicas, and write stack dumps.

run directory/stacks/20260726T101530.120Z/
├── controller.txt       this process's own threads and tasks
└── generator[0].txt     py-spy's dump of that process, or the reason for none and the remedy
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cartridge_forge.protocols.records.status import ReplicaState, RunStatus
from cartridge_forge.protocols.spec.services import WatchdogSpec
from cartridge_forge.services.pool.pool import Pool, RequestStatus
from cartridge_forge.services.run_log import RunLog

LOOK_SECONDS = 1.0  # between two looks at the run as a whole: sinks, watchdog
STACK_SECONDS = 10.0  # for the stacks of every process of a stalled run
NAMED = 8  # requests that a message names, the oldest first
ATTEMPTS = 8  # 2.5 s in all; of a process at work one reading in three was torn
TORN = "Failed to get stack traces"  # py-spy's error for stacks that changed while it read them
KILL_SECONDS = 1.0  # for py-spy to be gone after SIGKILL
PERMISSION = (
    "this process may not read that one's memory; run with CAP_SYS_PTRACE (docker run "
    "--cap-add=SYS_PTRACE, or securityContext.capabilities.add: [SYS_PTRACE]), or, for processes "
    "of the same user, set sysctl kernel.yama.ptrace_scope=0"
)


async def watch(
    status_now: Callable[[], RunStatus],
    show: Callable[..., None],
    recorder: RunLog,
    pools: Mapping[str, Pool],
    spec: WatchdogSpec,
    directory: Path,
    start_s: float = 0.0,
) -> None:
    """Send the run's status to the sinks once a second, and report when it makes no progress. While
    a replica starts it may be silent for `start_s`: an engine that compiles answers nothing."""
    now = time.monotonic()
    progress, stalled = ProgressClock(now), False
    last_work = work_seen(recorder, pools), ("", "")
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        status = status_now()
        recorder.status(status)
        now = time.monotonic()
        if (work := (work_seen(recorder, pools), (status.stage, status.phase))) != last_work:
            last_work = work
            progress.made(now)
            if stalled:
                stalled = False
                show(message="")
        (progress.pause if status.paused else progress.resume)(now)
        waiting = unanswered(pools)
        starting = any(request.method == "ready" for request in waiting)
        if not progress.stalled(now, max(spec.stall_s, start_s * starting)):
            continue
        message = who_waits(
            waiting,
            {role: sum(r.life.takes_requests for r in p.replicas) for role, p in pools.items()},
            now, silent_s=progress.silent_s(now), stage=status.stage, phase=status.phase,
        )  # fmt: skip
        stacks = await write_stacks(local_processes(pools), directory, STACK_SECONDS)
        recorder.event("stalled", message=message, stacks=[str(stacks)] if stacks else [])
        last_work = work_seen(recorder, pools), last_work[1]  # the event itself is no progress
        stalled = True
        show(message=message)


def work_seen(recorder: RunLog, pools: Mapping[str, Pool]) -> tuple[int, int]:
    """Return what changes with any progress: the requests that were answered, and the tokens that
    passed the models. A first answer may take minutes, and its tokens show that it comes."""
    processes = (r.process for pool in pools.values() for r in pool.replicas)
    return recorder.moved, sum(process.work for process in processes if process is not None)


def unanswered(pools: Mapping[str, Pool]) -> list[RequestStatus]:
    """Return the requests in flight, and the starts of replicas that have died."""
    requests: list[RequestStatus] = []
    for pool in pools.values():
        requests += pool.in_flight.values()
        for replica in pool.replicas:
            if replica.state is ReplicaState.DEAD:
                requests.append(RequestStatus("its start", "ready", replica.begun, replica.name, 1))
    return requests


def local_processes(pools: Mapping[str, Pool]) -> dict[str, int]:
    """Return name -> process id of this process and of the replicas on this host, for py-spy."""
    host = socket.gethostname()
    return {"controller": os.getpid()} | {
        f"{r.name}.{rank}" if rank else r.name: pid
        for pool in pools.values()
        for r in pool.replicas
        if r.process and r.process.host == host
        for rank, pid in enumerate(r.process.pids)
    }


class ProgressClock:
    """Measure the time since a run last made progress, in seconds of a monotonic clock, without
    paused time."""

    def __init__(self, now: float) -> None:
        self._moved = now
        self._paused: float | None = None
        self._reported = False

    def made(self, now: float) -> None:
        """Record progress: a request was answered, a token passed a model, a phase ended, or a
        replica came back."""
        self._moved = now
        self._reported = False
        if self._paused is not None:
            self._paused = now

    def pause(self, now: float) -> None:
        """Stop counting while the run is paused. A second call has no effect."""
        if self._paused is None:
            self._paused = now

    def resume(self, now: float) -> None:
        if self._paused is not None:
            self._moved += now - self._paused
            self._paused = None

    def silent_s(self, now: float) -> float:
        """Return the seconds without progress, paused time excluded."""
        return (now if self._paused is None else self._paused) - self._moved

    def stalled(self, now: float, stall_s: float) -> bool:
        """Return True once for each silence of `stall_s`; progress rearms it."""
        if self._reported or self._paused is not None or self.silent_s(now) < stall_s:
            return False
        self._reported = True
        return True


def who_waits(
    requests: Sequence[RequestStatus],
    in_service: Mapping[str, int],
    now: float,
    *,
    silent_s: float,
    stage: str,
    phase: str,
) -> str:
    """Return a one-line message of the waiting requests at `now` (monotonic seconds), oldest first.

    `in_service` counts the replicas of each role that take requests. For example "no progress for
    60 s in training on_policy, phase train: controller waits for trainer[0].step (request
    trainer/17, 61.2 s, attempt 1); 2 requests wait for a replica of generator, which has none in
    service".
    """
    oldest = sorted(requests, key=lambda r: r.begun)
    placed = [
        f"{r.replica}.{r.method} (request {r.id}, {now - r.begun:.1f} s, attempt {r.attempt})"
        for r in oldest
        if r.replica
    ]
    clauses = []
    if placed:
        more = [f"{len(placed) - NAMED} more"] if len(placed) > NAMED else []
        clauses.append("controller waits for " + ", ".join(placed[:NAMED] + more))
    for role, count in Counter(r.id.partition("/")[0] for r in oldest if not r.replica).items():
        wait = "1 request waits" if count == 1 else f"{count} requests wait"
        have = in_service.get(role, 0) or "none"
        clauses.append(f"{wait} for a replica of {role}, which has {have} in service")
    if not clauses:
        clauses.append("no request is in flight, so the controller itself is held up")
    position = ", ".join(filter(None, [stage, f"phase {phase}" if phase else ""]))
    return f"no progress for {silent_s:.0f} s in {position or 'the run'}: " + "; ".join(clauses)


async def write_stacks(pids: Mapping[str, int], directory: Path, timeout_s: float) -> Path | None:
    """Write the Python stacks of local processes to `directory`/stacks/<time>/<name>.txt, and
    return that folder, or None where none could be written.

    `pids` maps a name ("generator[0]", "controller") to its process on this host. Others than this
    one are read by py-spy concurrently, within `timeout_s` and a second. No process is paused, so
    a stopped or busy one can be read as well. Never raises for failures of a process, the disk or
    permissions: a file without stacks holds the reason and the remedy.
    """
    spy = find_py_spy()
    folder = directory / "stacks" / f"{f'{datetime.now(UTC):%Y%m%dT%H%M%S.%f}'[:-3]}Z"

    async def write(name: str, pid: int) -> bool:
        stacks = own_stacks() if pid == os.getpid() else await _dump(spy, pid, timeout_s)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.txt").write_text(stacks, encoding="utf-8")
            return True
        return False

    paths = await asyncio.gather(*(write(name, pid) for name, pid in pids.items()))
    return folder if any(paths) else None


def own_stacks() -> str:
    """Return the stacks of this process's threads and of the running loop's tasks, outermost first.

    py-spy, which reads without a pause, may miss the very thread that starts it, and no tool from
    outside sees what a task waits for.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"Process {os.getpid()}\n"]
    for ident, frame in sys._current_frames().items():
        lines += [f"Thread {ident} ({names.get(ident, 'not of Python')})\n"]
        lines += traceback.format_stack(frame)
    for task in asyncio.all_tasks():
        lines += [f"Task {task.get_name()}\n"]
        for frame in task.get_stack():
            lines += traceback.format_list(traceback.extract_stack(frame, 1))
    return "".join(lines)


def find_py_spy() -> str | None:
    """Return the path of py-spy beside this interpreter, else on PATH; None where there is none."""
    scripts = os.path.dirname(sys.executable)
    return shutil.which("py-spy", path=scripts) or shutil.which("py-spy")


async def _dump(spy: str | None, pid: int, timeout_s: float) -> str:
    """Return the stacks, or a line with the reason for their absence."""
    if pid <= 0:
        return "it has no process\n"
    if spy is None:
        return f"py-spy is neither beside {sys.executable} nor on PATH; pip install py-spy\n"
    try:
        async with asyncio.timeout(timeout_s):
            for attempt in range(ATTEMPTS):
                code, out, complaint = await _run_py_spy(spy, pid)
                if code == 0:
                    return out
                if TORN not in complaint:
                    break
                await asyncio.sleep(0.01 * 2**attempt)
    except TimeoutError:
        return f"py-spy did not read process {pid} within {timeout_s:g} s\n"
    except OSError as error:
        return f"{spy} could not be run: {error}; pip install py-spy\n"
    return _reason(pid, complaint) + "\n"


async def _run_py_spy(spy: str, pid: int) -> tuple[int | None, str, str]:
    """Return py-spy's exit status, stdout and stderr. Kills it when cancelled."""
    # Read without pausing: a pause delays a healthy process, is refused for a stopped one, and
    # outlasts a py-spy that is killed for taking too long.
    command = (spy, "dump", "--nonblocking", "--pid", str(pid))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILL_SECONDS)
    return process.returncode, out.decode(errors="replace"), complaint.decode(errors="replace")


def _reason(pid: int, complaint: str) -> str:
    """Return py-spy's error in one line, with the remedy."""
    lines = complaint.partition("Stack backtrace:")[0].split("\n")
    output = " ".join(line.strip() for line in lines if line.strip())
    if not os.path.exists(f"/proc/{pid}") and os.path.isdir("/proc/self"):
        return f"there is no process {pid}"
    if "permission denied" in output.lower() or "not permitted" in output.lower():
        return f"{PERMISSION}. py-spy said: {output}"
    return f"py-spy could not read process {pid}: {output or 'it said nothing'}"
