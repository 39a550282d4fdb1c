"""A process's first act: its share of the host."""

from __future__ import annotations

import os

import pytest

from actors.setup import bootstrap


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_a_process_sees_its_own_gpus_alone() -> None:
    bootstrap(3, range(4, 6))()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")


def test_without_gpus_the_devices_stay_as_they_are() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "7"
    bootstrap(1)()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
