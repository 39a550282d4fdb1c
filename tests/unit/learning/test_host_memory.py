"""Work on large tensors by several threads gives what one thread gives."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from learning import ranks as host_memory
from learning.checkpoint import Checkpoint, LastState, part_name, read_checkpoint, write_checkpoint
from learning.ranks import map_large, to_host


def test_a_tensor_of_the_host_is_itself() -> None:
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    assert to_host(x).data_ptr() == x.data_ptr()
    assert not to_host(x).requires_grad
    turned = to_host(x.T)
    assert turned.is_contiguous()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_large_items_are_worked_on_at_once_and_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(3)))
    meet = threading.Barrier(3)  # passes only if three threads are there together

    def work(item: int) -> int:
        meet.wait(timeout=30)
        return item * item

    assert map_large(work, range(6), host_memory.PARALLEL_BYTES) == [0, 1, 4, 9, 16, 25]
    here = threading.get_ident()
    small = host_memory.PARALLEL_BYTES - 1
    assert map_large(lambda _: threading.get_ident(), range(2), small) == [here, here]


def test_an_error_is_raised_once_nobody_works_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(2)))
    ended = []

    def work(item: int) -> None:
        if item == 0:
            raise OSError(28, "no space")
        ended.append(item)

    with pytest.raises(OSError, match="no space"):
        map_large(work, range(4), host_memory.PARALLEL_BYTES)
    assert set(ended) <= {1, 2, 3}
    assert threading.active_count() == len(threading.enumerate())
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


def test_a_state_and_a_checkpoint_do_not_depend_on_the_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = torch.Generator().manual_seed(0)
    parts = {
        part_name("cartridge", i, 3): {"trainable": torch.randn(4, 5 + i, generator=draws)}
        for i in range(6)
    }
    names = [f"p{i}" for i in range(6)]
    of_each = {name: {"since": 3} for name in names}
    facts = {"names": names, "version": 3, "position": {}, "cartridges": of_each}
    state = Checkpoint(facts, parts)
    found = {}
    for threads, limit in (("one", 10**9), ("many", 0)):
        monkeypatch.setattr(host_memory, "PARALLEL_BYTES", limit)
        folder = tmp_path / threads
        folder.mkdir()
        LastState(folder / "last").write(state)
        write_checkpoint(folder, "version-000003", state, keep=1)
        read = read_checkpoint(folder / "version-000003")
        assert all(torch.equal(read.parts[p]["trainable"], parts[p]["trainable"]) for p in parts)
        files = [f for f in folder.rglob("*") if f.is_file()]
        found[threads] = {str(f.relative_to(folder)): f.read_bytes() for f in files}
    assert len(found["one"]) == 2 * 6 + 2
    assert found["one"] == found["many"]
