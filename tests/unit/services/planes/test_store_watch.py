"""A wait for a store ends when its process does."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
from collections.abc import Iterator

import pytest

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.services.planes.torchstore import StoreWatch, TorchStorePlane
from cartridge_forge.services.proc_info import began

LONG = 60.0  # seconds that no test waits


@pytest.fixture
def store() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def watch_of(process: subprocess.Popen[bytes]) -> StoreWatch:
    return StoreWatch(process.pid, began(process.pid))


async def wait(watch: StoreWatch, seconds: float = LONG) -> None:
    async with watch.bounded(seconds):
        await asyncio.sleep(2 * LONG)


def test_all_waits_end_with_the_process(store: subprocess.Popen[bytes]) -> None:
    watch = watch_of(store)

    async def run() -> None:
        waits = [asyncio.create_task(wait(watch)) for _ in range(3)]
        await asyncio.sleep(0.01)
        async with watch.bounded(LONG):
            pass  # one that is answered ends no other
        assert not any(one.done() for one in waits)
        store.kill()
        for one in waits:
            with pytest.raises(TimeoutError):
                await one

    asyncio.run(run())
    assert watch.ended
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))


def test_a_wait_has_its_own_limit_and_any_loop_may_wait(store: subprocess.Popen[bytes]) -> None:
    watch = watch_of(store)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(wait(watch, 0.01))
    assert not watch.ended
    store.kill()
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_another_process_notices_too(store: subprocess.Popen[bytes]) -> None:
    watch = pickle.loads(pickle.dumps(watch_of(store)))  # noqa: S301  our own bytes
    store.kill()
    store.wait()  # its id is free
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_another_process_with_its_id_is_not_the_store(store: subprocess.Popen[bytes]) -> None:
    ticks, _, host = began(store.pid).partition("/")
    watch = StoreWatch(store.pid, f"{int(ticks) - 1}/{host}")
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch))
    assert watch.ended


def test_a_process_of_another_host_is_not_watched(store: subprocess.Popen[bytes]) -> None:
    watch = StoreWatch(store.pid, began(store.pid) + "elsewhere")
    store.kill()
    store.wait()
    with pytest.raises(TimeoutError):
        asyncio.run(wait(watch, 0.05))
    assert not watch.ended, "its wait ended by its limit"


def test_a_wait_that_has_run_out_is_left_alone_when_the_process_ends(
    store: subprocess.Popen[bytes],
) -> None:
    watch = watch_of(store)
    faults: list[object] = []

    async def wait_out() -> None:
        async with watch.bounded(0.01):
            try:
                await asyncio.sleep(LONG)
            except asyncio.CancelledError:
                store.kill()
                store.wait()
                await asyncio.sleep(0.01)  # the loop's reader sees it
                raise

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        for _ in range(2):  # the second begins after the end
            with pytest.raises(TimeoutError):
                await wait_out()

    asyncio.run(run())
    assert not faults


def test_an_error_of_a_store_that_has_ended_says_so(store: subprocess.Popen[bytes]) -> None:
    """Monarch's report of the ended process may come before the loop has looked at the process."""

    async def run() -> None:
        watch = watch_of(store)
        plane = TorchStorePlane(None, LONG, watch)

        async def work() -> None:
            raise RuntimeError("timeout waiting for message from proc mesh agent")

        with pytest.raises(PlaneError, match=r"put of 'b' failed: .*timeout waiting"):
            await plane._bounded("put", "b", work())
        store.kill()
        store.wait()
        with pytest.raises(PlaneError, match=r"put of 'b' failed: the store's process has ended"):
            await plane._bounded("put", "b", work())

    asyncio.run(run())
