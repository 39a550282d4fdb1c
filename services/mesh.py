"""Open the mesh of a run or a server: its service of replicas and its tensor plane.

    open_mesh        attaches hosts, starts no process
    spawn_roles      starts the tensor plane, then every role of the spec, until each is ready
    open_generators  starts generators alone, for a server

A tensor plane that is lost with its process is replaced, and every replica moves to the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from monarch.actor import this_host

from cartridge_forge.actors.base import ModelSource, NoPlane, bootstrap_command, warm_up
from cartridge_forge.learning.model.control_tokens import vocabulary_of
from cartridge_forge.learning.model.verdict import kept_verdict
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TraceSpan
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RoleSpec, RunSpec
from cartridge_forge.protocols.spec.model import ModelSpec
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.protocols.step import NOT_BEGUN, CartridgeSnapshot, Preparation, require_ids
from cartridge_forge.services.awake_clock import loop_time
from cartridge_forge.services.clients import TrainerClient, use_plane
from cartridge_forge.services.planes.open import OwnedPlane, PlaneRelays, import_plane, open_plane
from cartridge_forge.services.pool.hosts import HostSource, versions
from cartridge_forge.services.pool.lifecycle import Check, Note
from cartridge_forge.services.pool.pool import Pool, Replica
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.roles import (
    ENGINE_GENERATOR,
    WRITERS,
    actor_class,
    actor_of,
    device_of,
    role_arguments,
    role_variables,
    with_room,
)
from cartridge_forge.services.run_directory import RunDirectory

ANSWER_SECONDS = 2.0  # a heartbeat takes milliseconds


class Mesh:
    """Hold the service that keeps the replicas alive, and the tensor plane.

    `plane_life` is the number of the current plane, from 0. `refill` is awaited after a lost plane
    is replaced; it puts every tensor that is still needed into the new one.
    """

    def __init__(self, service: Service, spec: RunSpec, note: Note) -> None:
        self.service, self.pools = service, service.pools
        self.plane: OwnedPlane | None = None
        self.plane_life = -1
        self.refill: Callable[[], Awaitable[None]] | None = None
        self._lives = itertools.count()
        self._spec = spec.mesh
        self._timeout_s = spec.mesh.call_timeout_s
        self._store_plane: OwnedPlane | None = None
        self._telling = asyncio.Lock()
        self._told = itertools.count()
        self.relays: PlaneRelays | None = None
        if spec.mesh.relays:
            self.relays = resolve("hooks", "relays")(
                lambda: service.remote_hosts, spec.mesh.health, spec.mesh.spawn_timeout_s,
                self._tell_plane, note,
            )  # fmt: skip

    async def open_plane(self, store: Replica | None = None) -> None:
        """Open the plane in the store's process (TorchStore), and replace an earlier plane."""
        procs = store.process.procs if store is not None and store.process is not None else None
        previous, life = self._store_plane, next(self._lives)
        plane = await open_plane(self._spec.carrier, procs, self._timeout_s)
        if self.relays is not None and procs is not None:
            await self.relays.open_store(procs, self._spec.hosts)
        self._store_plane = plane
        await self._tell_plane()
        # Set last: a caller that fails with this `plane_life` already uses this plane.
        self.plane_life = life
        if previous is None:
            return
        with contextlib.suppress(PlaneError):  # its storage is gone; remove its list of keys
            await previous.stop()
        if self.refill is not None:
            await self.refill()

    async def _tell_plane(self) -> None:
        """Pass tensors over the present store and the present relays from now on."""
        if self._store_plane is None:
            return
        async with self._telling:
            plane = self._store_plane
            if self.relays is not None:
                plane = self.relays.relayed(plane, self._timeout_s)
            for role, pool in self.pools.items():
                if role in MODEL_ROLES:  # the others pass no tensors, and know no plane
                    # An update that refers to the lost plane fails; `refill` sends it again.
                    with contextlib.suppress(PlaneError):
                        await use_plane(pool, next(self._told), plane)
            self.plane = plane

    @property
    def preparation(self) -> Preparation:
        """Return how far the trainer has prepared its cartridges, as it last told."""
        replicas = self.pools["trainer"].replicas if "trainer" in self.pools else ()
        prepared = (r.process.prepared for r in replicas if r.process is not None)
        return next(prepared, NOT_BEGUN)

    async def keep(self, snapshot: CartridgeSnapshot) -> None:
        """Have the store's host hold a published version too, where relays hand it on. Raises
        PlaneError."""
        plane = self.plane
        if self.relays is not None and plane is not None:
            for packet in snapshot.packets.values():
                if self.relays.holds(packet.key):
                    await plane.get(packet)

    async def replaced(self, life: int, error: PlaneError) -> None:
        """Return once the plane with number `life` is lost and another is in service. Raise `error`
        when that plane is healthy, because the error then has another cause."""
        if "store" not in self.pools:  # shared memory is lost only with the host
            raise error
        deadline = loop_time() + self._timeout_s
        while loop_time() < deadline:
            serving = [r for r in self.pools["store"].replicas if r.life.takes_requests]
            if serving and self.plane_life > life:
                return
            if serving and await _answers(serving[0]):
                raise error
            await asyncio.sleep(0.1)
        raise error

    async def stop(self) -> None:
        """Stop every process. A dead or silent process does not delay the others."""
        plane, self.plane = self.plane, None
        if self.relays is not None:
            await self.relays.stop()
        if plane is not None:
            with contextlib.suppress(PlaneError, TimeoutError):
                await asyncio.wait_for(plane.stop(), 3.0)
        await self.service.stop()


async def open_mesh(spec: RunSpec, note: Note, observe: Callable[[TraceSpan], None]) -> Mesh:
    """Return a mesh without any process, over the hosts of the spec.

    When the hosts are remote, the store runs on the controller's host. TorchStore's index is there
    too, so no worker's end loses its bytes. A `teacher_replay` role whose provider listens on this
    host's loopback also runs here.
    """
    mesh, model = spec.mesh, spec.learn.model
    import_plane(mesh.carrier)
    local = mesh.hosts.kind == "local"
    service = await Service.of(
        this_host() if local else host_source(spec),
        here={} if local else dict.fromkeys(roles_here(spec), this_host()),
        needed=versions(torchstore=mesh.carrier == "torchstore"),
        variables=role_variables(spec),
        health=mesh.health,
        spares=mesh.spares,
        warm=_imports(model, local),
        call_timeout_s=mesh.call_timeout_s,
        spawn_timeout_s=mesh.spawn_timeout_s,
        note=note,
        observe=observe,
    )
    return Mesh(service, spec, note)


def _imports(model: ModelSpec, local: bool) -> Callable[[], None] | None:
    """Return what a spare process imports beforehand; None where it is forked with the imports."""
    forked = local and bootstrap_command() is not None
    return None if forked else partial(warm_up, model.path, model.dtype)


def host_source(spec: RunSpec) -> HostSource:
    """Return the source of workers for `hosts.kind`, imported on use because each kind may need
    packages of its own. Raises SpecError that names a missing package."""
    source: HostSource = resolve("hosts", spec.mesh.hosts.kind)(spec)
    return source


def roles_here(spec: RunSpec) -> tuple[str, ...]:
    """Return the roles that run on the controller's host when other roles run on remote hosts."""
    return ("store", *spec.learn.roles_here)


async def spawn_roles(
    spec: RunSpec,
    documents: Mapping[str, tuple[int, ...]],
    cartridges: Mapping[str, tuple[str, ...]],
    end_ids: frozenset[int],
    mesh: Mesh,
    directory: RunDirectory,
) -> None:
    """Spawn the tensor plane and every role of the spec into `mesh`, and wait until each is ready.

    Raises RunError that names the role and replica, and DataError for a document with a token that
    the model does not have.
    """
    if (vocabulary := vocabulary_of(Path(spec.learn.model.path))) is not None:
        for name, ids in documents.items():
            require_ids(ids, vocabulary, f"document {name}")
    store = spec.mesh.carrier == "torchstore"
    local = spec.mesh.hosts.kind == "local"
    local_roles = () if local else roles_here(spec)
    variables = role_variables(spec)
    # A spare is one process, on no device, with the variables of most roles.
    roles = [
        role
        for name, role in spec.roles
        if not role.gpus
        and role.procs == 1
        and name not in local_roles
        and variables.get(name) == variables.get("")
    ]
    mesh.service.warm(
        [1] * (store and local) + [role.threads for role in roles for _ in range(role.replicas)]
    )
    if store:
        mesh.service.spawn(
            actor_class("store"), role="store", spec=RoleSpec(), prepare=mesh.open_plane
        )
        await mesh.service.ready()
    else:
        await mesh.open_plane()
    if mesh.relays is not None:
        await mesh.relays.open()
    assert mesh.plane is not None
    verdict = kept_verdict(spec.learn.model.path)  # made before the run started
    for name, role in spec.roles:
        base = ModelSource(
            path=spec.learn.model.path,
            dtype=spec.learn.model.dtype,
            threads=role.threads,
            documents=documents,
            cartridges=cartridges,
            max_kv_bytes=spec.learn.teacher.max_kv_bytes,
            plane=mesh.plane,
            host_kv_bytes=spec.learn.teacher.host_kv_bytes,
            device=device_of(role),
            kv_files=str(directory.document_kv) if _shares_kv(spec, role) else None,
            verdict=verdict,
        )
        mesh.service.spawn(
            actor_class(actor_of(name, spec.learn)),
            args=role_arguments(name, spec, base, end_ids, directory),
            role=name,
            spec=with_room(name, role, spec.learn),
            prepare=_recover if name == "trainer" else None,
            check=None if local or name in local_roles else _check(name, spec, directory),
        )
    await mesh.service.ready()
    mesh.service.keep_spares()


def _shares_kv(spec: RunSpec, role: RoleSpec) -> bool:
    """Return whether a role's processes read documents as single processes on the controller's
    host: ranks read together or not at all, and a copy from a disk gains a GPU nothing."""
    return spec.mesh.hosts.kind == "local" and role.procs == 1 and not role.gpus


def _check(name: str, spec: RunSpec, directory: RunDirectory) -> Check | None:
    """Return a check that another host has the files of the role, identical to this host's."""
    model = spec.learn.model.path
    read = [f"{model}/config.json"] if name in MODEL_ROLES and Path(model).is_dir() else []
    return partial(
        resolve("hooks", "same_files"),
        role=name,
        read=read,
        writable_paths=[str(directory.spec)]
        if name in WRITERS and not spec.mesh.records.store
        else [],
    )


async def _recover(replica: Replica) -> None:
    if replica.generation > 0:
        await TrainerClient.recover(replica)


async def _answers(store: Replica) -> bool:
    assert store.process is not None
    try:
        await asyncio.wait_for(store.process.beat(), ANSWER_SECONDS)
    except Exception:  # any failure: a healthy process answers
        return False
    return True


EVERY_VERSION = 2**31  # a server drops versions by name, not by age
SERVED_KV_BYTES = 2**20  # for the KV of the first token, where no other document is read


async def open_generators(
    model: ModelSpec,
    generator: GeneratorSpec,
    role: RoleSpec,
    documents: Mapping[str, tuple[int, ...]],
    end_ids: frozenset[int],
    *,
    health: HealthSpec,
    spawn_timeout_s: float,
    call_timeout_s: float,
    spares: int = 0,
    note: Note = lambda event, **facts: None,
    max_kv_bytes: int = SERVED_KV_BYTES,
) -> tuple[Service, Pool]:
    """Start generators for a server, in a service of this process, without waiting for them. Each
    keeps at most `max_kv_bytes` of documents' KV."""
    service = await Service.of(
        this_host(),
        health=health,
        spares=spares,
        warm=_imports(model, local=True),
        call_timeout_s=call_timeout_s,
        spawn_timeout_s=spawn_timeout_s,
        note=note,
    )
    service.warm([role.threads] * role.replicas)
    arguments = (model.path, model.dtype, role.threads, documents, max_kv_bytes, NoPlane())
    verdict = kept_verdict(model.path)
    base = ModelSource(*arguments, device=device_of(role), verdict=verdict)
    args = (base, end_ids, EVERY_VERSION, generator)
    return service, service.spawn(
        actor_class(ENGINE_GENERATOR), args=args, role="generator", spec=role
    )
