"""A clock that is set an hour back or forward in the middle: nothing waits for it, and nothing
is lost. Every process is real, and asks for the time through a preloaded library that moves it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import serve_command
from small_run import Finished, command, latest, rows, running, same_outcome

ROOT = Path(__file__).resolve().parents[3]
HOUR = 3600
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler: no clock can be set"),
]
Clock = Callable[[int], None]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("clock") / "set_clock.so"
    source = ROOT / "tests/nightly/set_clock.c"
    words = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(built), str(source)]
    subprocess.run(words, check=True, timeout=60)
    return built


@pytest.fixture
def clock(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the clock of the processes that the test starts, in seconds from the true time."""
    file = tmp_path / "clock"
    file.write_bytes(bytes(8))
    monkeypatch.setenv("FORGE_TEST_CLOCK", str(file))
    monkeypatch.setenv("LD_PRELOAD", str(library))

    def set_to(seconds: int) -> None:
        with file.open("r+b") as opened:
            opened.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    return set_to


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_run_ends_as_the_calm_one(
    by: int, finished: Finished, clock: Clock, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    with running(command(root), root) as run:
        path = run.wait_for("on_policy", 2)
        clock(by)
        said, _ = run.process.communicate(timeout=300)
        assert run.process.returncode == 0, said
        run.wait_until_gone(60)
    same_outcome(latest(root), finished.path)
    events = rows(path / "events.jsonl")
    assert {e["event"] for e in events} == {
        e["event"] for e in rows(finished.path / "events.jsonl")
    }, "nothing stalled, and nobody was taken for dead"
    steps = [datetime.fromisoformat(e["time"]) for e in events]
    moved = max(abs((b - a).total_seconds()) for a, b in pairwise(steps))
    assert HOUR - 600 < moved < HOUR + 600, "the processes of the run saw the clock move"


# What a script needs: `moved(by)` sets its clock, and those of its children.
PROLOGUE = """
    import os, sys, time
    from pathlib import Path

    start = time.time() - time.monotonic()

    def moved(by):
        with open(os.environ["FORGE_TEST_CLOCK"], "r+b") as file:
            file.write(by.to_bytes(8, sys.byteorder, signed=True))
        assert abs(time.time() - time.monotonic() - start - by) < 60, "the clock does not move"
"""


def told(script: str, *arguments: object) -> list[str]:
    """What a script prints, run on the clock that can be set."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROLOGUE) + textwrap.dedent(script),
         *map(str, arguments)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


SECOND = """
    import sys
    from pathlib import Path
    from cartridge_forge.protocols.errors import RunError
    from cartridge_forge.plugins.host.run_lease import hold_lease

    try:
        with hold_lease(Path(sys.argv[1]), lambda line: None):
            print("let in")
    except RunError as error:
        print(error)
"""
LEASE = """
    import subprocess
    from cartridge_forge.plugins.host import run_lease

    run, where = Path(sys.argv[1]), sys.argv[2]
    if where == "elsewhere":  # an owner of another machine is judged by its beats alone
        true = run_lease.began
        run_lease.began = lambda pid: true(pid).partition("/")[0] + f"/{os.getpid()}/another boot"
    with run_lease.hold_lease(run, print) as lease:
        for by in (-3600, 3600, 0):
            moved(by)
            second = subprocess.run([sys.executable, "-c", sys.argv[3], str(run)], text=True,
                                    capture_output=True, check=True)
            print(second.stdout.strip())
        time.sleep(3 * run_lease.BEAT_SECONDS)
        print("lost:", lease.lost)
"""


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_no_second_owner_is_let_in_and_no_living_one_loses_its_lease(
    where: str, clock: Clock, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    *second, lost = told(LEASE, run, where, textwrap.dedent(SECOND))
    assert len(second) == 3
    assert all(line.startswith("run run is held by process ") for line in second)
    assert lost == "lost: "


LEDGER = """
    from replay_setup import a_spec, a_teacher
    from replay_worker import a_settlement
    from cartridge_forge.plugins.replay.budget import CallLater, CallNow, TeacherCall
    from cartridge_forge.plugins.replay.ledger import SpendLedger
    from cartridge_forge.plugins.replay.panel import limits_of

    path, by = Path(sys.argv[1]), int(sys.argv[2])
    spec = a_spec(a_teacher("a", "http://127.0.0.1:1", requests_per_minute=2))
    one, other = (SpendLedger(path, limits_of(spec)) for _ in range(2))
    for key in ("k1", "k2"):
        assert isinstance(one.admit(TeacherCall(key, "a", "run", 5)), CallNow)
    moved(by)
    for ledger in (one, other, SpendLedger(path, limits_of(spec))):
        later = ledger.admit(TeacherCall("k3", "a", "run", 5))
        print(later.seconds if isinstance(later, CallLater) else "now")
"""


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_rate_limit_waits_for_its_minute_and_no_longer(
    by: int, clock: Clock, tmp_path: Path
) -> None:
    one, other, new = told(LEDGER, tmp_path / "ledger.jsonl", by)
    assert 30 < float(one) <= 60
    assert 30 < float(other) <= 60
    # To a process that starts later, rows of an hour ago limit nothing; those of the future do.
    assert new == "now" if by > 0 else float(new) <= 60


@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_server_goes_on_and_its_quotas_return_as_before(
    by: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_CLOCK_TEST_KEY", "k" * 20)
    keys = "http.keys={ward: {env: FORGE_CLOCK_TEST_KEY, tokens_per_minute: 200}}"
    sets = ("roles.generator.replicas=1", "spares=0", "http.deadline_s=20", keys)
    with (
        serve_command(tmp_path, *sets) as (process, url, _),
        httpx2.Client(base_url=url, timeout=60) as client,  # one connection, kept
    ):

        def asked(tokens: int) -> httpx2.Response:
            return client.post(
                "/v1/completions",
                headers={"authorization": "Bearer " + "k" * 20},
                json={"model": "clinic-reader", "prompt": "Who?", "max_tokens": tokens},
            )

        assert asked(8).status_code == 200
        clock(by)
        assert abs(asked(8).json()["created"] - time.time() - by) < 600
        late = asked(190)
        for _ in range(30):
            if late.status_code == 429:
                break
            late = asked(190)
        assert late.status_code == 429, late.text
        assert 1 <= int(late.headers["retry-after"]) <= 60
        time.sleep(10.0)  # of supervision on the new time
        assert client.get("/health").status_code == 200
        assert asked(1).status_code == 200
        assert process.poll() is None


def stalls(path: Path) -> list[dict[str, Any]]:
    """Those in training: 2 s without progress are nothing unusual while processes start."""
    events = [e for e in rows(path / "events.jsonl") if e["event"] == "stalled"]
    return [e for e in events if "in training on_policy" in e["message"]]


def test_a_stopped_trainer_is_named_with_stacks_and_the_run_goes_on(
    finished: Finished, tmp_path: Path
) -> None:
    words = command(tmp_path, health__dead_after_s=60, watchdog__stall_s=2)
    with running(words, tmp_path) as run:
        path = run.wait_for("on_policy", 2)
        (pids,) = [e["pids"] for e in rows(path / "events.jsonl") if e.get("role") == "trainer"]
        os.kill(pids[0], signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while not (told := stalls(path)):
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.2)
        os.kill(pids[0], signal.SIGCONT)
        said, _ = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, said
    message = told[0]["message"]
    assert message.startswith("no progress for ")
    assert "controller waits for trainer[0]." in message
    (folder,) = told[0]["stacks"]
    stacks = {p.stem: p.read_text() for p in Path(folder).iterdir()}
    assert set(stacks) == {
        "controller", "store[0]", "generator[0]", "generator[1]", "doc_teacher[0]", "trainer[0]",
    }  # fmt: skip
    assert "Thread" in stacks["controller"]
    same = ("metrics.jsonl", "rollouts.jsonl")
    assert all((path / n).read_bytes() == (finished.path / n).read_bytes() for n in same)
    assert latest(tmp_path) == path
