"""A process's first act: its share of the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cartridge_forge.actors import heartbeat
from cartridge_forge.actors.base import PLACE, RankPlace, bootstrap, share


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_a_process_sees_its_own_gpus_alone() -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    bootstrap(3, range(4, 6))()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")


def test_devices_are_counted_among_those_that_were_left() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,GPU-7f"
    bootstrap(1, range(1, 2))()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7f"


def test_without_gpus_the_devices_stay_as_they_are() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    bootstrap(1)()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_ranks_share_the_devices_of_all_in_order() -> None:
    assert [share((4, 5, 6, 7), rank, 2) for rank in (0, 1)] == [(4, 5), (6, 7)]
    assert list(share(range(6), 2, 3)) == [4, 5]
    assert share((), 1, 2) == ()


def test_a_rank_finds_its_place_and_one_that_is_alone_needs_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert RankPlace.here() == RankPlace(0, 1, "")
    RankPlace.here().left()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.environ[PLACE] = "2/3/meet-7"
    place = RankPlace.here()
    assert place == RankPlace(2, 3, f"file://{tmp_path}/meet-7")
    (tmp_path / "meet-7").write_text("they met")
    place.left()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("beating", "returncode"), [(False, -signal.SIGKILL), (True, 0)])
def test_a_remote_process_without_a_heartbeat_ends_itself(beating: bool, returncode: int) -> None:
    code = (
        "import sys, time; from cartridge_forge.actors import heartbeat; "
        "heartbeat.require_heartbeat(0.1); "
        f"{'heartbeat.HeartbeatActor(None); ' if beating else ''}"
        f"time.sleep({1 if beating else 600}); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (returncode, "lives\n" if beating else "")


def test_a_process_of_another_host_requires_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    required: list[bool] = []
    monkeypatch.setattr(heartbeat, "require_heartbeat", lambda: required.append(True))
    bootstrap(1)()
    assert required == []
    bootstrap(1, host="other")()
    assert required == [True]
