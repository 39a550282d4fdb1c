"""Keep one relay process on each remote host, which gets published tensors once for all readers
there (services.planes.relay).

It takes no replica's place. It ends with the last process of a host that is left. One that dies, or
is silent for as long as a replica may be, is replaced, without what it held; both are noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, endpoint

from cartridge_forge.plugins.cluster.hosts.handshake import host_and_port, reached_at
from cartridge_forge.plugins.cluster.relays.relay import AT, Relay, RelayPlace, RelayServer
from cartridge_forge.plugins.cluster.relays.relayed import RelayedPlane
from cartridge_forge.plugins.host.directories import MemoryDirectory
from cartridge_forge.protocols.errors import ForgeError, PlaneError
from cartridge_forge.protocols.spec.mesh import HostsSpec, is_tls
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.planes.open import OwnedPlane
from cartridge_forge.services.pool.hosts import finish
from cartridge_forge.services.pool.lifecycle import Note
from cartridge_forge.services.pool.process import ALONE, ProcessHost, ReplicaProcess

RETRY_SECONDS = 5.0  # after a start that failed
Changed = Callable[[], Awaitable[None]]
_count = itertools.count()


class RelayActor(Actor):
    """Run the relay of a host that others call `name`, with TLS if `secured`."""

    def __init__(self, host: str, name: str, secured: bool) -> None:
        self._host, self._name, self._secured = host, name, secured
        self._directory: MemoryDirectory | None = None  # held: it goes with its owner

    @endpoint
    async def start(self) -> RelayPlace:
        """Return where it listens. Raises PlaneError where it cannot."""
        from cartridge_forge.plugins.host.tls import (
            environment_identity,  # a tenth of a second
        )

        identity = environment_identity() if self._secured else None
        directory = self._directory = await MemoryDirectory.start()
        context = None if identity is None else identity.server_context
        server = RelayServer(Relay(directory.root), listened_at(self._name), context)
        scheme = "tls" if self._secured else "tcp"
        address = f"{scheme}://{self._name}:{server.port}"
        return RelayPlace(self._host, address, str(directory.root))


def listened_at(name: str) -> str:
    """Return this host's address of that name; every address where the name is another's, as of a
    container that is reached by forwarded ports."""
    try:
        address = str(socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
            trial.bind((address, 0))
    except OSError:
        return "0.0.0.0"
    return address


async def start_relay(procs: Any, host: str, name: str, *, secured: bool) -> RelayPlace:
    """Start a relay in a process, and return its place. Raises PlaneError."""
    try:
        actor = procs.spawn(f"relay{next(_count)}", RelayActor, host, name, secured)
        relay_place: RelayPlace = await finish(actor.start.call_one())
    except Exception as error:  # Monarch's and the actor's own
        raise PlaneError(f"no relay started on {host or 'this host'}: {error!r:.300}") from error
    return relay_place


@dataclass(eq=False)
class HostRelay:
    """Hold a host's relay: its process, and its `place` once it listens."""

    process: ReplicaProcess
    place: RelayPlace | None = None
    gone: bool = False


class HostRelays:
    """Keep the relays of `hosts()`. `changed` is awaited after some came or went; `note(event,
    **facts)` is called for one that is lost, and for the next on its host."""

    def __init__(
        self,
        hosts: Callable[[], Sequence[ProcessHost]],
        health: HealthSpec,
        start_timeout_s: float,
        changed: Changed,
        note: Note,
    ) -> None:
        self._hosts, self._health, self._changed, self._note = hosts, health, changed, note
        self._start_timeout_s = start_timeout_s
        self._told: tuple[RelayPlace, ...] = ()
        self._store: tuple[RelayPlace, ...] = ()  # of the store's host
        self._telling = asyncio.Lock()
        self._failed_at: dict[ProcessHost, float] = {}
        self._lost_at: dict[ProcessHost, float] = {}
        self._relays: dict[ProcessHost, HostRelay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def places(self) -> tuple[RelayPlace, ...]:
        """Return the places of the relays that listen, in the order of their starts."""
        return tuple(r.place for r in self._relays.values() if r.place is not None)

    async def open_store(self, procs: Any, hosts: HostsSpec) -> None:
        """Start the relay of the store's host in the store's process `procs`. It is the last of
        every chain: what it holds outlives every worker, as the store does. Raises PlaneError."""
        name, secured = reached_at(hosts), hosts.tls is not None
        self._store = (await start_relay(procs, "", name, secured=secured),)

    def relayed(self, store: OwnedPlane, timeout_s: float) -> RelayedPlane:
        """Return the plane over a store and the present relays."""
        return RelayedPlane(store, (*self.places, *self._store), timeout_s)

    def holds(self, key: str) -> bool:
        """Return whether a key was put on a host, not into the store."""
        return AT in key

    async def open(self) -> None:
        """Start a relay on every host, and keep them from now on. A host on which none starts is
        used without."""
        await asyncio.gather(*(self._start(host) for host in self._lacking()))
        await self._tell()
        self._keeping = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End every relay."""
        tasks = [*self._tasks, *([self._keeping] if self._keeping is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = [self._end(host, relay) for host, relay in self._relays.items()]
        await asyncio.gather(*ends, return_exceptions=True)

    def _lacking(self) -> Sequence[ProcessHost]:
        """Return the hosts that may have a relay, at their worker's address, and have none."""
        return [
            host
            for host in self._hosts()
            if host.worker.address
            and host.well
            and host not in self._relays
            and time.monotonic() - self._failed_at.get(host, -math.inf) > RETRY_SECONDS
        ]

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._health.heartbeat_s)
            hosts = self._hosts()
            for host, relay in list(self._relays.items()):
                unused = host not in hosts and not host.processes
                silent = relay.process.silent_s > self._health.dead_after_s
                ended = relay.process.ended_pid()
                lost = (silent or bool(ended)) and relay.place is not None
                if lost and not unused and not relay.gone:
                    self._tell_lost(host, ended)
                if unused or lost:
                    self._begin(self._end(host, relay))
            for host in self._lacking():
                self._begin(self._start(host))
            if self._told != self.places and not self._telling.locked():
                self._begin(self._tell())

    async def _start(self, host: ProcessHost) -> None:
        name = f"relayx{next(_count)}"
        alone_s = ALONE * self._health.dead_after_s
        relay: HostRelay | None = None
        try:
            process = host.spawn_beside(name, 1, (), 1, alone_s, ())
            relay = self._relays[host] = HostRelay(process)
            async with asyncio.timeout(self._start_timeout_s):
                await process.beat()
                host.beside.append(process)  # from now on asked for heartbeats with the others
                name = host_and_port(host.worker.address)[0]
                secured = is_tls(host.worker.address)
                relay.place = await start_relay(process.procs, host.label, name, secured=secured)
            if (lost_at := self._lost_at.pop(host, None)) is not None:
                seconds = round(time.monotonic() - lost_at, 3)
                self._note("relay_back", host=host.label, seconds=seconds)
        except Exception:  # it is tried again: readers there ask other relays meanwhile
            self._failed_at[host] = time.monotonic()
            if relay is not None:
                await self._end(host, relay)

    def _tell_lost(self, host: ProcessHost, ended: int) -> None:
        self._lost_at[host] = time.monotonic()
        silent = f"it was silent for {self._health.dead_after_s:g} s"
        reason = f"its process {ended} has ended" if ended else silent
        self._note("relay_lost", host=host.label, reason=reason)

    async def _end(self, host: ProcessHost, relay: HostRelay) -> None:
        if relay.gone:
            return
        relay.gone = True
        if self._relays.get(host) is relay:
            del self._relays[host]
        if relay.process in host.beside:
            host.beside.remove(relay.process)
        await relay.process.end()

    async def _tell(self) -> None:
        async with self._telling:
            places = self.places
            with contextlib.suppress(ForgeError):  # told again at the next heartbeat
                await self._changed()
                self._told = places

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
