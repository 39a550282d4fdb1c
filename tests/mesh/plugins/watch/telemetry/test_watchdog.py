"""Test the watchdog, and how a stall is told."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host

from cartridge_forge.plugins.watch.telemetry import watchdog
from cartridge_forge.plugins.watch.telemetry.watchdog import (
    ProgressClock,
    find_py_spy,
    who_waits,
    write_stacks,
)
from cartridge_forge.protocols.records.status import ReplicaState, RunStatus
from cartridge_forge.protocols.spec.services import WatchdogSpec
from cartridge_forge.services.pool.health import HealthState
from cartridge_forge.services.pool.pool import RequestStatus

SECONDS = 20.0  # for a dump, which takes 0.02 s on a quiet machine


Start = Callable[..., int]

# A sibling may look too where Yama is set to let parents alone look.
CHILD = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, any
if "--undumpable" in sys.argv:
    libc.prctl(4, 0)  # PR_SET_DUMPABLE

def waiting_for_godot():
    print("ready", flush=True)
    while True:
        time.sleep(60)

def counting_sheep():
    print("ready", flush=True)
    n = 0
    while True:
        n += 1

globals()[sys.argv[1]]()
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that is in the named function when this returns its id."""
    children: list[subprocess.Popen[bytes]] = []

    def begin(*args: str) -> int:
        child = subprocess.Popen([sys.executable, "-c", CHILD, *args], stdout=subprocess.PIPE)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child.pid

    yield begin
    for child in children:
        child.kill()
        child.communicate()


def written(pids: dict[str, int], directory: Path, timeout_s: float = SECONDS) -> dict[str, str]:
    """Name -> text of the file."""
    folder = asyncio.run(write_stacks(pids, directory, timeout_s))
    assert folder is not None
    return {path.stem: path.read_text() for path in folder.iterdir()}


def gone_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


MINUTE = 60.0


moves = st.sampled_from(["made", "pause", "resume", "look"])


NOW = 1000.0


def request(name: str, method: str, seconds: float, replica: str, attempt: int) -> RequestStatus:
    return RequestStatus(name, method, NOW - seconds, replica, attempt)


def told(requests: list[RequestStatus], **in_service: int) -> str:
    return who_waits(
        requests, in_service, NOW, silent_s=60.2, stage="training on_policy", phase="train"
    )


START = "no progress for 60 s in training on_policy, phase train: "


def test_idle_busy_stopped_and_missing_processes(start: Start, tmp_path: Path) -> None:
    stopped, gone = start("waiting_for_godot"), gone_pid()
    os.kill(stopped, signal.SIGSTOP)
    pids = {
        "generator[0]": start("waiting_for_godot"),
        "generator[1]": start("counting_sheep"),
        "teacher[0]": stopped,
        "trainer[0]": gone,
        "trainer[1]": 0,
    }
    text = written(pids, tmp_path)

    assert text.keys() == pids.keys()
    (folder,) = (tmp_path / "stacks").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}\.\d{3}Z", folder.name)
    for name, function in [
        ("generator[0]", "waiting_for_godot"),
        ("generator[1]", "counting_sheep"),
        ("teacher[0]", "waiting_for_godot"),
    ]:
        assert f"Process {pids[name]}: " in text[name]
        # The frame, not the command line, which names it too.
        assert re.search(rf"^    {function} \(<string>:\d+\)$", text[name], re.MULTILINE)
    assert text["trainer[0]"] == f"there is no process {gone}\n"
    assert text["trainer[1]"] == "it has no process\n"
    # Looking changed nothing: the stopped one is stopped, the others are not.
    states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in list(pids.values())[:3]]
    assert states == ["S", "R", "T"]


LOOKER = """
import asyncio, ctypes, os, pathlib, sys
from cartridge_forge.plugins.watch.telemetry.watchdog import write_stacks
if os.geteuid() == 0:
    assert ctypes.CDLL(None).prctl(24, 19) == 0  # drop CAP_SYS_PTRACE, for what is executed
folder = asyncio.run(write_stacks({"trainer[0]": int(sys.argv[1])}, pathlib.Path(sys.argv[2]), 20))
print((folder / "trainer[0].txt").read_text(), end="")
"""


def test_where_looking_is_not_permitted_the_file_says_what_to_do(
    start: Start, tmp_path: Path
) -> None:
    pid = start("waiting_for_godot", "--undumpable")
    looked = subprocess.run(
        [sys.executable, "-c", LOOKER, str(pid), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert looked.stdout.startswith("this process may not read that one's memory; run with CAP_SYS")
    assert "sysctl kernel.yama.ptrace_scope=0" in looked.stdout
    assert "Permission denied" in looked.stdout
    assert len(looked.stdout.splitlines()) == 1


def fake_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    spy = tmp_path / "bin" / "py-spy"
    spy.parent.mkdir()
    spy.write_text(script)
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(spy.with_name("python")))
    return spy


def test_a_py_spy_that_hangs_is_ended_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    fake_py_spy(tmp_path, monkeypatch, f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 6000\n")
    text = written({f"generator[{i}]": os.getppid() for i in range(4)}, tmp_path, 1.0)
    fault = f"py-spy did not read process {os.getppid()} within 1 s\n"
    assert text == {f"generator[{i}]": fault for i in range(4)}
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


class Stuck(Actor):
    @endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def hang(self) -> None:
        waiting_in_an_endpoint()


def waiting_in_an_endpoint() -> None:
    Path(os.environ["FORGE_HANGS"]).touch()
    time.sleep(600)


def test_a_replica_shows_where_its_endpoint_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("FORGE_HANGS", str(hangs))

    async def scenario() -> Path | None:
        mesh = this_host().spawn_procs(per_host={"gpus": 1})
        stuck = mesh.spawn("stuck", Stuck)
        pid = await stuck.ready.call_one()
        stuck.hang.broadcast()
        async with asyncio.timeout(60):
            while not hangs.exists():  # noqa: ASYNC110  # of another process there is no event
                await asyncio.sleep(0.02)
        folder = await write_stacks({"generator[0]": pid}, tmp_path, SECONDS)
        os.kill(pid, signal.SIGKILL)
        return folder

    folder = asyncio.run(scenario())
    assert folder is not None
    replica = (folder / "generator[0].txt").read_text()
    assert re.search(r"waiting_in_an_endpoint \(.*test_watchdog.py:\d+\)", replica)


async def waits_for_a_future(reached: asyncio.Event) -> None:
    reached.set()
    await asyncio.get_running_loop().create_future()


def test_the_controller_shows_its_threads_and_what_its_tasks_wait_for(tmp_path: Path) -> None:
    async def scenario() -> Path | None:
        reached = asyncio.Event()
        task = asyncio.create_task(waits_for_a_future(reached), name="publish")
        await reached.wait()
        folder = await write_stacks({"controller": os.getpid()}, tmp_path, SECONDS)
        task.cancel()
        return folder

    folder = asyncio.run(scenario())
    assert folder is not None
    text = (folder / "controller.txt").read_text()
    assert text.startswith(f"Process {os.getpid()}\nThread ")
    here = test_the_controller_shows_its_threads_and_what_its_tasks_wait_for.__name__
    assert re.search(rf", in {here}$", text, re.MULTILINE)
    assert re.search(
        r"^Task publish\n  File .*, in waits_for_a_future\n    await", text, re.MULTILINE
    )


def test_a_stall_is_told_once_and_again_after_progress() -> None:
    progress = ProgressClock(100.0)
    assert [progress.stalled(t, MINUTE) for t in (100.0, 159.9)] == [False, False]
    assert [progress.stalled(t, MINUTE) for t in (160.0, 161.0, 999.0)] == [True, False, False]
    progress.made(1000.0)
    assert [progress.stalled(t, MINUTE) for t in (1059.9, 1060.0, 1061.0)] == [False, True, False]


def test_paused_time_does_not_count() -> None:
    progress = ProgressClock(0.0)
    progress.pause(50.0)
    progress.pause(55.0)
    assert progress.silent_s(5000.0) == 50.0
    assert not progress.stalled(5000.0, MINUTE)
    progress.resume(5000.0)
    progress.resume(5001.0)
    assert not progress.stalled(5009.9, MINUTE)
    assert progress.stalled(5010.0, MINUTE)


def test_what_ends_during_a_pause_is_progress() -> None:
    progress = ProgressClock(0.0)
    progress.pause(50.0)
    progress.made(70.0)
    progress.resume(100.0)
    assert progress.silent_s(130.0) == 30.0


def test_a_run_that_stands_still_while_paused_is_not_stalled() -> None:
    progress = ProgressClock(0.0)
    progress.pause(61.0)  # it had been silent for longer, and nobody had looked
    assert not progress.stalled(90.0, MINUTE)
    progress.resume(100.0)
    assert progress.stalled(100.0, MINUTE)


@given(st.lists(st.tuples(moves, st.integers(0, 50)), max_size=40))
def test_silence_is_the_running_time_since_the_last_progress(
    happened: list[tuple[str, int]],
) -> None:
    """Counted again second by second."""
    progress, now, running, silent, told = ProgressClock(0), 0, True, 0, 0
    for move, wait in happened:
        silent += wait if running else 0
        now += wait
        if move == "made":
            progress.made(now)
            silent = told = 0
        elif move == "look":
            expected = running and silent >= 60 and not told
            assert progress.stalled(now, MINUTE) is expected
            told += expected
        else:
            getattr(progress, move)(now)
            running = move == "resume"
        assert progress.silent_s(now) == silent


def test_who_waits_for_whom() -> None:
    requests = [
        request("generator/31", "generate", 4.0, "", 2),
        request("trainer/17", "step", 61.24, "trainer[0]", 1),
        request("generator/30", "generate", 5.0, "", 1),
    ]
    assert told(requests, generator=0, trainer=1) == START + (
        "controller waits for trainer[0].step (request trainer/17, 61.2 s, attempt 1); "
        "2 requests wait for a replica of generator, which has none in service"
    )


def test_the_oldest_come_first_of_those_placed_and_of_those_waiting() -> None:
    requests = [
        request("generator/3", "generate", 1.0, "", 1),
        request("teacher/9", "score", 70.0, "", 3),
        request("generator/1", "generate", 2.0, "generator[1]", 1),
        request("generator/2", "generate", 80.0, "generator[0]", 2),
    ]
    assert told(requests, generator=2) == START + (
        "controller waits for generator[0].generate (request generator/2, 80.0 s, attempt 2), "
        "generator[1].generate (request generator/1, 2.0 s, attempt 1); "
        "1 request waits for a replica of teacher, which has none in service; "
        "1 request waits for a replica of generator, which has 2 in service"
    )


def test_a_long_list_is_cut() -> None:
    requests = [request(f"g/{i}", "generate", 100.0 - i, "g[0]", 1) for i in range(11)]
    message = told(requests, g=1)
    assert re.findall(r"request (g/\d+),", message) == [f"g/{i}" for i in range(8)]
    assert message.endswith("(request g/7, 93.0 s, attempt 1), 3 more")
    assert told(requests[:8], g=1).endswith("(request g/7, 93.0 s, attempt 1)")


def test_nothing_in_flight_and_no_phase() -> None:
    assert who_waits([], {}, NOW, silent_s=61, stage="starting", phase="") == (
        "no progress for 61 s in starting: no request is in flight, so the controller itself is "
        "held up"
    )


def test_a_process_that_is_no_python_is_a_fault(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        (fault,) = written({"generator[0]": child.pid}, tmp_path).values()
    finally:
        child.kill()
        child.wait()
    assert fault.startswith(f"py-spy could not read process {child.pid}: Error: ")
    assert fault.count("\n") == 1


def test_two_stalls_have_a_folder_each(start: Start, tmp_path: Path) -> None:
    pid = start("waiting_for_godot")
    for _ in range(2):
        assert "waiting_for_godot" in written({"generator[0]": pid}, tmp_path)["generator[0]"]
        time.sleep(0.01)
    assert len(list((tmp_path / "stacks").iterdir())) == 2


def test_without_py_spy_the_file_says_what_to_do(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start("waiting_for_godot")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert written({"trainer[0]": pid}, tmp_path)["trainer[0]"] == (
        f"py-spy is neither beside {tmp_path}/bin/python nor on PATH; pip install py-spy\n"
    )


def test_py_spy_is_taken_beside_the_interpreter_else_from_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = fake_py_spy(tmp_path, monkeypatch, "#!/bin/sh\n")
    assert find_py_spy() == str(spy)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", f"/nowhere:{spy.parent}")
    assert find_py_spy() == str(spy)


def test_stacks_that_change_while_they_are_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """py-spy's own words for it, three times."""
    tries = tmp_path / "tries"
    fake_py_spy(
        tmp_path, monkeypatch,
        f"#!/bin/sh\necho x >> {tries}\n"
        f"[ $(wc -l < {tries}) -gt 3 ] && echo 'Thread 1' && exit 0\n"
        "echo 'Error: Failed to get stack traces' >&2; exit 1\n",
    )  # fmt: skip
    assert written({"trainer[0]": os.getppid()}, tmp_path) == {"trainer[0]": "Thread 1\n"}
    assert tries.read_text().split() == ["x"] * 4


def test_a_py_spy_that_cannot_run_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = fake_py_spy(tmp_path, monkeypatch, "#!/nowhere/sh\n")
    (fault,) = written({"trainer[0]": os.getppid()}, tmp_path).values()
    assert fault.startswith(f"{spy} could not be run: ")


def test_a_directory_that_cannot_be_written_is_no_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "stacks").write_text("in the way")
    pids = {"trainer[0]": start("waiting_for_godot")}
    assert asyncio.run(write_stacks(pids, tmp_path, SECONDS)) is None


class Log:
    """Counts as a RunLog does, and keeps the events."""

    def __init__(self) -> None:
        self.moved = 0
        self.told: list[str] = []
        self.came = asyncio.Event()

    def status(self, status: RunStatus) -> None:
        pass

    def event(self, name: str, **facts: Any) -> None:
        self.moved += 1
        self.told.append(name)
        self.came.set()


async def tells_of_a_stall(log: Log, watching: asyncio.Task[None]) -> None:
    async with asyncio.timeout(60):
        await log.came.wait()
    assert log.told == ["stalled"]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_a_slow_first_answer_is_no_stall_and_silence_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "local_processes", lambda pools: {})
    process = SimpleNamespace(work=0)
    replica = SimpleNamespace(
        process=process, life=HealthState(ReplicaState.HEALTHY), state=ReplicaState.HEALTHY
    )
    pools: Any = {"generator": SimpleNamespace(replicas=[replica], in_flight={})}
    log: Any = Log()

    async def run() -> None:
        watching = asyncio.create_task(
            watchdog.watch(
                lambda: RunStatus(stage="here", phase="rollout"), lambda **shown: None, log, pools,
                WatchdogSpec(stall_s=0.5), tmp_path,
            )
        )  # fmt: skip
        for _ in range(100):  # a second of a call that nobody has answered yet
            process.work += 17
            await asyncio.sleep(0.01)
        assert log.told == []
        await tells_of_a_stall(log, watching)

    asyncio.run(run())


def test_a_replica_that_starts_may_be_silent_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that compiles answers nothing for minutes: its start has a time-out of its own, and
    half of it is no stall."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "local_processes", lambda pools: {})
    life = HealthState(ReplicaState.HEALTHY)
    replica = SimpleNamespace(process=SimpleNamespace(work=0), life=life, state=life.state)
    start = RequestStatus("its start", "ready", 0.0, "generator[0]", 1)
    pool = SimpleNamespace(replicas=[replica], in_flight={"start": start})
    log: Any = Log()

    async def run() -> None:
        watching = asyncio.create_task(
            watchdog.watch(
                lambda: RunStatus(stage="starting the mesh"), lambda **shown: None, log,
                {"generator": cast(Any, pool)}, WatchdogSpec(stall_s=0.1), tmp_path, start_s=60.0,
            )
        )  # fmt: skip
        await asyncio.sleep(0.5)
        assert log.told == []
        pool.in_flight.clear()  # it has started; the silence is now the run's own
        await tells_of_a_stall(log, watching)

    asyncio.run(run())
