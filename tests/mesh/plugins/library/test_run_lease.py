"""Who may work in a run's directory: values by hand, other owners as files of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.host import run_lease
from cartridge_forge.plugins.host.run_lease import FILE, hold_lease
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.proc_info import began

HERE = began(os.getpid()).partition("/")[2]


def owner(run: Path, **fields: Any) -> None:
    """Another owner's lease, of a process of another machine if nothing else is said."""
    record = {"owner": "x", "host": "node-3", "pid": 7, "began": "8/1/other-boot", "beat": 3}
    (run / FILE).write_text(json.dumps(record | fields))


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / FILE).read_text())
    return found


@pytest.fixture
def said() -> list[str]:
    return []


def test_it_is_held_once_and_again_after_its_end(tmp_path: Path, said: list[str]) -> None:
    with hold_lease(tmp_path, said.append) as lease:
        assert lease.lost == ""
        assert record(tmp_path)["pid"] == os.getpid()
        with (
            pytest.raises(RunError, match=rf"run {tmp_path.name} is held by process {os.getpid()}"),
            hold_lease(tmp_path, said.append),
        ):
            pass
    assert record(tmp_path)["beat"] == -1
    with hold_lease(tmp_path, said.append):
        pass
    assert said == []


def test_of_two_that_come_at_once_one_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from cartridge_forge.plugins.host.run_lease import hold_lease\n"
        "from cartridge_forge.protocols.errors import RunError\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    with hold_lease(Path(sys.argv[1]), print):\n"
        "        print('held', flush=True); sys.stdin.readline()\n"
        "except RunError: print('refused', flush=True); sys.stdin.readline()\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for line in ("go\n", None, "end\n"):
        for process in both:
            assert process.stdin is not None
            assert process.stdout is not None
            if line is None:
                process.told = process.stdout.readline().strip()  # type: ignore[attr-defined]
            else:
                process.stdin.write(line)
                process.stdin.flush()
    assert sorted(p.told for p in both) == ["held", *["refused"] * 3]  # type: ignore[attr-defined]
    for process in both:
        process.communicate(timeout=60)


def test_a_dead_owner_of_this_machine_is_followed_at_once(tmp_path: Path, said: list[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner(tmp_path, pid=child.pid, began=began(child.pid), host="here")
    with pytest.raises(RunError, match=f"held by process {child.pid} on here"):
        hold_lease(tmp_path, said.append).__enter__()
    child.communicate(b"\n")
    with hold_lease(tmp_path, said.append):
        assert record(tmp_path)["pid"] == os.getpid()
    # Its number may belong to another process by now.
    owner(tmp_path, pid=os.getpid(), began=f"1/{HERE}")
    with hold_lease(tmp_path, said.append):
        pass
    assert said == []


def test_an_owner_elsewhere_is_refused_at_its_next_beat(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "STALE_SECONDS", 600.0)
    owner(tmp_path)
    looked = threading.Event()
    beat = threading.Thread(target=lambda: (looked.wait(), owner(tmp_path, beat=4)))
    beat.start()

    def tell(line: str) -> None:
        said.append(line)
        looked.set()

    with pytest.raises(RunError, match="held by process 7 on node-3"):
        hold_lease(tmp_path, tell).__enter__()
    beat.join()
    assert said == [
        f"run {tmp_path.name} was held by process 7 on node-3; it is taken over after 600 s "
        "without a heartbeat"
    ]


def test_an_owner_elsewhere_without_a_beat_is_taken_over_and_ends(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(run_lease, "BEAT_SECONDS", 0.05)
    with hold_lease(tmp_path, said.append) as first:
        owner(tmp_path)  # as another writes that saw no beat
        wait_for(lambda: first.lost)
    assert first.lost == f"the lease of run {tmp_path.name} is held by process 7 on node-3 now"
    assert record(tmp_path)["beat"] == 3, "it lets go of nothing of another's"
    with hold_lease(tmp_path, said.append):
        assert record(tmp_path)["pid"] == os.getpid()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_removed_directory_ends_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "BEAT_SECONDS", 0.05)
    run = tmp_path / "run"
    run.mkdir()
    with hold_lease(run, print) as lease:
        before = record(run)["beat"]
        wait_for(lambda: record(run)["beat"] > before)
        run.rename(tmp_path / "elsewhere")
        wait_for(lambda: lease.lost)
        assert lease.lost == f"the run directory {run} was removed or moved"
    assert not run.exists()


def test_a_lease_that_was_overwritten_by_more_bytes_is_read_again(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lease, "BEAT_SECONDS", 0.01)
    (tmp_path / FILE).write_bytes(b"\xff" * 600)
    with hold_lease(tmp_path, said.append) as lease:
        deadline = time.monotonic() + 60
        while record(tmp_path)["beat"] < 2:
            assert not lease.lost
            assert time.monotonic() < deadline
            time.sleep(0.01)
