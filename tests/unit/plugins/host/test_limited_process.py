"""A process with limits is waited for until it is ready, and started once more where it was not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cartridge_forge.plugins.host import limited_process
from cartridge_forge.plugins.host.directories import owned_directory
from cartridge_forge.plugins.host.limited_process import LimitedProcess, ProcessLimits
from cartridge_forge.protocols.errors import RunError

MODULE = """
import os, signal
from pathlib import Path

starts = Path(__file__).with_name("starts")
with starts.open("a") as file:
    file.write("s")
{at_import}

def double(request, data):
    return 2 * request["number"]
"""
DIES = "os._exit(7)"
DIES_ONCE = "if starts.read_text() == 's': os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "signal.pause()"


def process_of(folder: Path, at_import: str) -> LimitedProcess:
    (folder / "doubling.py").write_text(MODULE.format(at_import=at_import))
    return LimitedProcess("doubling:double", ProcessLimits(), paths=[str(folder)])


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text()) if file.exists() else 0


def test_a_start_that_failed_is_tried_once_more(tmp_path: Path) -> None:
    with process_of(tmp_path, DIES_ONCE) as process:
        assert [process.call({"number": n}) for n in (3, 4)] == [6, 8]
    assert starts(tmp_path) == 2


def test_a_process_that_ends_at_each_start_is_told_with_its_status(tmp_path: Path) -> None:
    why = r"doubling:double did not start: it ended with 7; run `make install`"
    with process_of(tmp_path, DIES) as process, pytest.raises(RunError, match=why):
        process.call({"number": 3})
    assert starts(tmp_path) == 2


def test_one_that_is_not_ready_in_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_process, "START_SECONDS", 0.05)
    why = r"it was not ready after 0\.05 s"
    with process_of(tmp_path, HANGS) as process, pytest.raises(RunError, match=why):
        process.call({"number": 3})


def test_one_that_is_killed_while_it_starts_is_not_started_again(tmp_path: Path) -> None:
    def kill() -> None:
        while not starts(tmp_path):
            time.sleep(0.01)
        process.kill()

    with process_of(tmp_path, HANGS) as process:
        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(RunError, match="it ended with -9"):
            process.call({"number": 3})
        killer.join()
    assert starts(tmp_path) == 1


def test_only_directories_of_dead_owners_are_removed(tmp_path: Path) -> None:
    living, lock = owned_directory(str(tmp_path), "forge-sockets")
    dead, dead_lock = owned_directory(str(tmp_path), "forge-sockets")
    (dead / "socket").write_text("")
    os.close(dead_lock)
    others = [
        tmp_path / name
        for name in (
            "forge-sockets", "forge-sockets-notes", "forge-sockets-12-notes",
            "forge-sockets-x-abcdefgh", "forge-sockets-12-abcdefghi",
            "cartridge-forge-12-abcdefgh", "cartridge-forge-ht5ar37n",
        )
    ]  # fmt: skip
    for folder in others:
        folder.mkdir()
        (folder / "kept").write_text("")
    made, made_lock = owned_directory(str(tmp_path), "forge-sockets")
    assert not dead.exists()
    assert {*tmp_path.iterdir()} == {living, made, *others}
    assert all((folder / "kept").is_file() for folder in others)
    assert made.stat().st_mode & 0o777 == 0o700
    assert made.name.startswith(f"forge-sockets-{os.getpid()}-")
    for descriptor in (lock, made_lock):
        os.close(descriptor)
