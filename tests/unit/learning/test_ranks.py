"""Ranks meet by the right interface; passes run beside each other, and large tensors by threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock, current_thread
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, do, scene

from cartridge_forge.learning import ranks as cores
from cartridge_forge.learning import step
from cartridge_forge.learning.ranks import concurrently, passes_beside

if TYPE_CHECKING:
    from twins import Twin
import threading
from pathlib import Path

from cartridge_forge.learning import ranks as host_memory
from cartridge_forge.learning.checkpoint import (
    Checkpoint,
    LastState,
    part_name,
    read_checkpoint,
    write_checkpoint,
)
from cartridge_forge.learning.ranks import ALONE, ProcessGroup, map_large, to_host
from cartridge_forge.plugins.host.ranks import interface_to
from cartridge_forge.protocols.errors import DataError


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Give two threads, then those of before. An argument of this name would take its place."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def computing_threads(_: int) -> int:
    """Return torch's number of threads once it has computed: the first operation sets it."""
    torch.ones(cores.PARALLEL).neg()
    return torch.get_num_threads()


def test_results_come_in_the_order_of_the_items_and_two_run_at_a_time() -> None:
    met, lock, running, most = Barrier(2), Lock(), set[int](), list[int]()

    def work(item: int) -> int:
        with lock:
            running.add(item)
            most.append(len(running))
        met.wait(20)  # passes only if two run at a time
        time.sleep(0.01 * (item % 2))  # the first of two ends last
        with lock:
            running.discard(item)
        return item * item

    assert list(concurrently(work, range(6), 2)) == [0, 1, 4, 9, 16, 25]
    assert max(most) == 2


def test_each_pass_has_its_share_of_the_threads_and_others_keep_theirs() -> None:
    assert list(concurrently(computing_threads, range(4), 2)) == [1] * 4
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(computing_threads, 0).result() == 2
    torch.set_num_threads(6)
    assert list(concurrently(computing_threads, range(4), 2)) == [3] * 4
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize("graph", [False, True])
def test_a_pass_keeps_a_graph_where_its_caller_does(graph: bool) -> None:
    with torch.set_grad_enabled(graph):
        assert list(concurrently(lambda _: torch.is_grad_enabled(), range(2), 2)) == [graph] * 2


def test_one_pass_runs_in_the_caller() -> None:
    assert list(concurrently(lambda _: current_thread(), [0], 1)) == [current_thread()]


def test_an_error_comes_in_its_place_when_nothing_runs_any_more() -> None:
    started: list[int] = []
    ended: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        if item == 1:
            raise ValueError("the second")
        time.sleep(0.05)
        ended.append(item)
        return item

    found = concurrently(work, range(8), 2)
    assert next(found) == 0
    with pytest.raises(ValueError, match="the second"):
        next(found)
    assert sorted(ended) == [item for item in sorted(started) if item != 1]
    assert 7 not in started


@pytest.mark.parametrize(
    ("tokens", "threads", "passes"),
    [(256, 1, 1), (256, 2, 2), (256, 16, 4), (100, 16, 1), (128, 2, 2), (200, 4, 3)],
)
def test_passes_have_enough_tokens_and_a_thread_each(
    llama: Twin, tokens: int, threads: int, passes: int
) -> None:
    torch.set_num_threads(threads)
    assert passes_beside(llama.model, tokens) == passes


@pytest.mark.parametrize("compared", [False, True])
def test_a_step_of_passes_beside_is_that_of_the_same_micro_batches(
    llama: Twin, monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    """All four channels, to the bit: each pass has one thread in both, and results are added in
    the order of the micro-batches."""
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    ran: list[int] = []

    def noted(work: Any, parts: Any, passes: int) -> Any:
        ran.append(passes)
        return concurrently(work, parts, passes)

    monkeypatch.setattr("cartridge_forge.learning.step.concurrently", noted)
    found = []
    batch = scene(llama, bank_of(llama))
    for threads, micro_tokens in ((1, 20), (2, 40)):
        torch.set_num_threads(threads)
        done = do(llama, batch, ALL, micro_tokens=micro_tokens, compare_gradients=compared)
        found.append(done)
    one, two = found
    assert ran == [1, 2]
    assert one.gradient is not None
    assert two.gradient is not None
    assert torch.equal(two.gradient, one.gradient)
    assert torch.equal(two.trained, one.trained)
    assert two.result == one.result


def test_a_batch_that_is_not_divided_is_trained_in_passes_beside(
    llama: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four channels: as many passes as threads, and the sums of one pass but for rounding."""
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    ran: list[tuple[int, int]] = []

    def noted(work: Any, parts: Any, passes: int) -> Any:
        ran.append((len(parts), passes))
        return concurrently(work, parts, passes)

    monkeypatch.setattr("cartridge_forge.learning.step.concurrently", noted)
    batch, found = scene(llama, bank_of(llama)), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(do(llama, batch, ALL, micro_tokens=None))
    one, two = found
    assert ran == [(1, 1), (2, 2)]
    assert one.gradient is not None
    # float32 sums of other orders err by the largest of what they add, whatever is left of it.
    largest = float(one.gradient.abs().max())
    torch.testing.assert_close(two.gradient, one.gradient, rtol=0.0, atol=1e-4 * largest)
    assert two.result.tokens == one.result.tokens
    for name, term in one.result.terms.items():
        assert two.result.terms[name]["value"] == pytest.approx(term["value"], rel=1e-5, abs=1e-7)


def test_passes_share_the_logits_that_may_exist(
    llama: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    given: list[int | None] = []
    real = step.response_tokens

    def noted(*of: Any, **named: Any) -> Any:
        given.append(named["logit_bytes"])
        return real(*of, **named)

    monkeypatch.setattr(step, "response_tokens", noted)
    do(llama, scene(llama, bank_of(llama)), ALL, micro_tokens=40, logit_bytes=6000)
    assert set(given) == {3000}


def test_layers_that_run_again_are_not_computed_beside(
    llama: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are replaced in the model while a forward runs."""
    monkeypatch.setattr(cores, "LEAST_TOKENS", 10)
    ran: list[int] = []
    monkeypatch.setattr(
        "cartridge_forge.learning.step.concurrently",
        lambda work, parts, n: (ran.append(n), concurrently(work, parts, n))[1],
    )
    do(llama, scene(llama, bank_of(llama)), ALL, micro_tokens=40, recompute_layers=True)
    assert ran == [1]


def test_the_interface_that_leads_to_an_address() -> None:
    assert interface_to("127.0.0.1") == "lo"
    with pytest.raises(DataError, match=r"does not reach no-such-host\.invalid, where the ranks"):
        interface_to("no-such-host.invalid")


def test_copies_and_their_ranks_by_hand() -> None:
    """Six ranks that divide three copies by two: 0 and 1, 2 and 3, 4 and 5."""
    six = [ProcessGroup(rank, 6, tensor=2) for rank in range(6)]
    assert [(one.data_rank, one.data_world) for one in six] == [
        (0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3),
    ]  # fmt: skip
    assert (ALONE.data_rank, ALONE.data_world) == (0, 1)


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
