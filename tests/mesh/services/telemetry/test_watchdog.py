"""The watchdog: its clock and its message by hand, and stacks of real processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host

from services.telemetry.watchdog import (
    StackFile,
    write_stacks,
)

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


def written(pids: dict[str, int], directory: Path, timeout_s: float = SECONDS) -> list[StackFile]:
    return asyncio.run(write_stacks(pids, directory, timeout_s))


def gone_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


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
    files = written(pids, tmp_path)

    assert [f.name for f in files] == list(pids)
    (folder,) = (tmp_path / "stacks").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}\.\d{3}Z", folder.name)
    assert [f.path for f in files] == [folder / f"{name}.txt" for name in pids]
    text = {name: (folder / f"{name}.txt").read_text() for name in pids}
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
    assert [f.fault for f in files] == ["", "", "", f"there is no process {gone}",
                                        "it has no process"]  # fmt: skip
    # Looking changed nothing: the stopped one is stopped, the others are not.
    states = [Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in list(pids.values())[:3]]
    assert states == ["S", "R", "T"]


LOOKER = """
import asyncio, ctypes, os, pathlib, sys
from services.telemetry.watchdog import write_stacks
if os.geteuid() == 0:
    assert ctypes.CDLL(None).prctl(24, 19) == 0  # drop CAP_SYS_PTRACE, for what is executed
(file,) = asyncio.run(write_stacks({"trainer[0]": int(sys.argv[1])}, pathlib.Path(sys.argv[2]), 20))
print(file.path.read_text(), end="")
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
    files = written({f"generator[{i}]": os.getpid() for i in range(4)}, tmp_path, 1.0)
    assert [f.fault for f in files] == [f"py-spy did not read process {os.getpid()} within 1 s"] * 4
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

    async def scenario() -> list[StackFile]:
        mesh = this_host().spawn_procs(per_host={"gpus": 1})
        stuck = mesh.spawn("stuck", Stuck)
        pid = await stuck.ready.call_one()
        stuck.hang.broadcast()
        async with asyncio.timeout(60):
            while not hangs.exists():  # noqa: ASYNC110  # of another process there is no event
                await asyncio.sleep(0.02)
        files = await write_stacks({"generator[0]": pid, "controller": os.getpid()}, tmp_path, 20)
        os.kill(pid, signal.SIGKILL)
        return files

    replica, controller = asyncio.run(scenario())
    assert (replica.fault, controller.fault) == ("", "")
    assert replica.path is not None
    assert controller.path is not None
    assert re.search(r"waiting_in_an_endpoint \(.*test_watchdog.py:\d+\)", replica.path.read_text())
    assert "    test_a_replica_shows_where_its_endpoint_hangs (" in controller.path.read_text()
