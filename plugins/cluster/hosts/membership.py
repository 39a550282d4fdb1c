"""Attach and leave hosts as their source reports workers.

    source.workers() --> worker info, same versions --> attach --> ProcessManager.join
                           ^                                                  |
                           +-- restarted <-- empty <-- ProcessManager.leave <-+
                                             once the worker drains, was restarted, or the source
                                             no longer has it

A worker that only does not answer stays attached, because a lost connection may come back;
heartbeats decide whether its processes are alive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from monarch.actor import HostMesh

from cartridge_forge.plugins.cluster.hosts.handshake import (
    WorkerInfo,
    WorkerUnreachable,
    ask_hello,
    host_and_port,
    require_same,
)
from cartridge_forge.protocols.errors import ForgeError, HostsEndedError, RunError
from cartridge_forge.protocols.spec.mesh import is_tls
from cartridge_forge.services.pool.hosts import HostSource, HostWorker
from cartridge_forge.services.pool.process import ProcessHost
from cartridge_forge.services.pool.process_manager import ProcessManager

POLL_SECONDS = 1.0  # between two queries of a worker's info
FIRST_SECONDS = 30.0  # for workers that are being started beside the run
CLOSE_SECONDS = 5.0  # for a source to give back what it made

Note = Callable[..., None]
Begin = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


@dataclass(eq=False)
class HostMember:
    """Hold a worker of the source. `removed` is set once the source no longer has it; `joined`
    resolves when the first attach succeeded or failed."""

    worker: HostWorker
    removed: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class HostMembership:
    """Keep `processes` on the workers of `source` whose versions are `needed`
    (services.hosts.handshake).

    `begin` starts background tasks; the run ends where one raises. `silent_s` is the time without
    an answer after which "host_lost" is noted.
    """

    def __init__(
        self,
        source: HostSource,
        processes: ProcessManager,
        needed: Mapping[str, str],
        silent_s: float,
        note: Note,
        begin: Begin,
    ) -> None:
        self._source, self._processes, self._needed = source, processes, needed
        self._silent_s, self._note, self._begin = silent_s, note, begin
        self._members: dict[tuple[str, str], HostMember] = {}
        self._order: list[str] = []

    async def open(self) -> None:
        """Attach the first workers of the source. Raises RunError when one cannot be attached."""
        answers = self._source.workers()
        first = await anext(answers)
        self._follow(first)
        members = list(self._members.values())
        failed = [
            error
            for error in await asyncio.gather(*(m.joined for m in members), return_exceptions=True)
            if error is not None
        ]
        if failed:
            await answers.aclose()
            raise failed[0]
        self._begin(self._keep_up(answers))

    def lacking(self) -> Sequence[str]:
        """Return what the source says of workers that are not there."""
        return self._source.lacking()

    async def close(self) -> None:
        """Give back the hosts that the source made for the run, after all processes have ended."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._source.close()
        except (ForgeError, TimeoutError) as error:
            why = str(error) or f"not within {CLOSE_SECONDS:g} s"
            self._note("failed", error="hosts", message=f"the hosts were not given back: {why}")

    async def _keep_up(self, answers: AsyncGenerator[tuple[HostWorker, ...]]) -> None:
        noted = ""
        while True:
            try:
                async for workers in answers:
                    noted = ""
                    self._follow(workers)
                return
            except HostsEndedError:
                raise
            except ForgeError as error:  # the run continues with its present hosts
                if str(error) != noted:
                    noted = str(error)
                    self._note("failed", error="hosts", message=noted)
            finally:
                await answers.aclose()
            await asyncio.sleep(POLL_SECONDS)
            answers = self._source.workers()

    def _follow(self, workers: tuple[HostWorker, ...]) -> None:
        # By address too: a replaced pod has the name of the one before.
        current = {(w.name, w.address): w for w in workers}
        for key in [key for key in self._members if key not in current]:
            self._members.pop(key).removed.set()
        for key, worker in current.items():
            if key not in self._members:
                self._members[key] = HostMember(worker)
                self._begin(self._attend(self._members[key]))
        self._order = [w.name for w in workers]
        self._processes.arrange(self._order)

    async def _attend(self, member: HostMember) -> None:
        """Follow one worker through all its restarts, for as long as the source has it."""
        worker, noted = member.worker, ""
        patience = time.monotonic() + FIRST_SECONDS
        while not member.removed.is_set():
            try:
                hello, host = await self._join(worker)
            except RunError as error:
                if isinstance(error, WorkerUnreachable) and time.monotonic() < patience:
                    await self._pause(member)
                    continue
                if not member.joined.done():
                    member.joined.set_exception(error)
                    member.joined.exception()  # mark as retrieved: `open` awaits the first only
                # Note an unreachable worker once, not every second.
                if str(error) != noted and not (noted and isinstance(error, WorkerUnreachable)):
                    noted = str(error)
                    self._note("host_refused", host=worker.name, reason=noted)
                await self._pause(member)
                continue
            noted = "away"
            self._processes.arrange(self._order)
            self._note("host_joined", host=worker.name, role=worker.role)
            if not member.joined.done():
                member.joined.set_result(None)
            event, reason = await self._stay(member, hello)
            start = time.monotonic()
            self._processes.leave(host)
            await self._processes.left(host)
            seconds = round(time.monotonic() - start, 3)
            self._note(event, host=worker.name, reason=reason, seconds=seconds)

    async def _join(self, worker: HostWorker) -> tuple[WorkerInfo | None, ProcessHost]:
        if worker.mesh is not None:  # attached already; its source reports its end
            return None, self._processes.join(worker, worker.mesh)
        hello = await ask_hello(worker.address)
        require_same(worker.address, hello.versions, self._needed)
        if hello.draining:
            raise WorkerUnreachable(f"the worker at {worker.address} is draining; start it again")
        mesh = await attach(attached_at(worker, hello))
        return hello, self._processes.join(replace(worker, gpus=hello.gpus), mesh)

    async def _stay(self, member: HostMember, hello: WorkerInfo | None) -> tuple[str, str]:
        """Wait until the worker is to be left; return the event to note and the reason."""
        address, name = member.worker.address, member.worker.name
        answered, silent = time.monotonic(), False
        while not member.removed.is_set():
            await self._pause(member)
            if hello is None:
                continue
            try:
                now = await ask_hello(address)
            except WorkerUnreachable as error:
                if not silent and time.monotonic() - answered > self._silent_s:
                    silent = True
                    self._note("host_lost", host=name, reason=str(error), seconds=0.0)
                continue
            answered = time.monotonic()
            if now.incarnation != hello.incarnation:
                return "host_lost", "it was started again"
            if now.draining:
                return "host_drained", "it was told to end"
            if silent:
                silent = False
                self._note("host_joined", host=name, role=member.worker.role)
        return "host_drained", "it is no longer there"

    async def _pause(self, member: HostMember) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(member.removed.wait(), POLL_SECONDS)


def attached_at(worker: HostWorker, hello: WorkerInfo) -> str:
    """Return the address to attach to. Raises RunError for a worker with TLS that goes by another
    name: Monarch compares the names."""
    (reached, _), (host, port) = host_and_port(worker.address), host_and_port(hello.address)
    if not is_tls(worker.address):
        # By the host just reached: the worker's own name may not be in DNS yet.
        return f"tcp://{reached}:{port}"
    if reached.lower() != host.lower() or not is_tls(hello.address):
        raise RunError(
            f"the worker at {worker.address} goes by {hello.address}; name it in hosts.addresses "
            "as its --address does"
        )
    return hello.address


async def attach(worker: str, timeout_s: float = 30.0) -> HostMesh:
    """Return the mesh of the worker at `tls://host:port`. Raises RunError when it is silent."""
    from monarch.actor import attach_to_workers  # imported late: it reads the environment

    mesh = attach_to_workers(ca="trust_all_connections", workers=[worker])
    try:
        async with asyncio.timeout(timeout_s):
            await mesh.initialized
    except Exception as error:  # however it fails, the remedy is the same
        raise RunError(
            f"the worker at {worker} was not attached within {timeout_s:g} s ({error!r:.200}); "
            "check that it runs the same Monarch version and is reached from here"
        ) from error
    return mesh
