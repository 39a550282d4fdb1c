"""The one file that binds the mesh spec to code: which actor a role is, and what it is built from.

The only caller of `spawn_procs`. Every replica gets a process mesh of its own: a mesh with a
failed actor takes no new ones, so replicas must not share one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monarch.actor import HostMesh, ProcMesh, this_host

from actors.doc_teacher import DocTeacherActor
from actors.generator import GeneratorActor
from actors.setup import BaseModel, bootstrap
from actors.trainer import TrainerActor
from actors.vllm_generator import VllmGeneratorActor
from learning.losses import DocKL
from learning.trainer import TrainerConfig
from protocols.errors import RunError
from protocols.learn_spec import LearnSpec
from protocols.spec import RoleSpec, RunSpec
from services.planes import OwnedPlane, open_plane
from services.pool import Pool, bounded, gather

ROLES: dict[str, type[Any]] = {
    "generator": GeneratorActor,
    "generator on vllm": VllmGeneratorActor,
    "doc_teacher": DocTeacherActor,
    "trainer": TrainerActor,
}


@dataclass
class Mesh:
    """A running mesh: pools and process ids by role, the tensor plane, and what must be stopped."""

    pools: dict[str, Pool] = field(default_factory=dict)
    plane: OwnedPlane | None = None
    procs: list[ProcMesh] = field(default_factory=list)
    pids: dict[str, list[int]] = field(default_factory=dict)

    async def stop(self) -> None:
        """Stop every process; a dead or silent one does not keep the others."""
        plane, self.plane = self.plane, None
        if plane is not None:
            await _quietly(plane.stop())
        procs, self.procs = self.procs, []
        await gather(_quietly(p.stop()) for p in procs)


async def spawn_mesh(
    spec: RunSpec, documents: Mapping[str, tuple[int, ...]], end_ids: frozenset[int], mesh: Mesh
) -> None:
    """Spawn the plane and every role of the spec into `mesh`, and wait until each is ready.

    Fills `mesh` as it goes, so that a failure half-way can still be cleaned up.
    Raises RunError that names the role and replica.
    """
    host = this_host()
    store = host.spawn_procs(per_host={"procs": 1}, name="store", bootstrap=bootstrap(1))
    mesh.procs.append(store)
    mesh.plane = await open_plane(spec.mesh.plane, store)
    for name, role in spec.mesh.roles.items():
        base = BaseModel(
            path=spec.learn.model.path,
            dtype=spec.learn.model.dtype,
            threads=role.threads,
            documents=documents,
            max_kv_bytes=spec.learn.teacher.max_kv_bytes,
            plane=mesh.plane,
        )
        actor = ROLES[actor_of(name, spec.learn)]
        arguments = role_arguments(name, spec.learn, base, end_ids)
        actors = [
            _spawn(host, mesh, name, replica, role, actor, arguments)
            for replica in range(role.replicas)
        ]
        mesh.pools[name] = Pool(name, actors, spec.mesh.call_timeout_s)

    async def ready(name: str, replica: int, actor: Any) -> None:
        what = f"{name}[{replica}] starting"
        pid = await bounded(actor.ready.call_one(), spec.mesh.spawn_timeout_s, what)
        mesh.pids[name][replica] = pid

    mesh.pids = {name: [0] * len(pool) for name, pool in mesh.pools.items()}
    await gather(
        ready(name, replica, actor)
        for name, pool in mesh.pools.items()
        for replica, actor in enumerate(pool.actors)
    )


def actor_of(name: str, learn: LearnSpec) -> str:
    """The key in ROLES of a role's actor: the generator's depends on its backend."""
    vllm = name == "generator" and learn.generator.backend == "vllm"
    return "generator on vllm" if vllm else name


def role_arguments(
    name: str, learn: LearnSpec, base: BaseModel, end_ids: frozenset[int]
) -> tuple[Any, ...]:
    """What a role's actor is constructed with."""
    if name == "generator":
        # The version being sampled and those that rollouts running ahead are pinned to.
        held = (base, end_ids, learn.train.staleness + 2)
        return (*held, learn.generator) if learn.generator.backend == "vllm" else held
    if name == "doc_teacher":
        top = None if learn.teacher.top_k == "full" else learn.teacher.top_k
        return (base, learn.train.row_tokens, top)
    assert name == "trainer", name
    return (base, trainer_config(learn))


def trainer_config(learn: LearnSpec) -> TrainerConfig:
    loss = learn.loss
    return TrainerConfig(
        tokens=learn.cartridge.tokens,
        frozen=learn.cartridge.frozen,
        lr=learn.train.lr,
        warmup_steps=learn.train.warmup_steps,
        clip=learn.train.clip,
        row_tokens=learn.train.row_tokens,
        staleness=learn.train.staleness,
        publish_dtype=learn.model.dtype,
        keep_checkpoints=learn.train.keep_checkpoints,
        loss=DocKL(loss.direction, loss.beta or 0.5, loss.form, loss.temperature),
    )


def _spawn(
    host: HostMesh,
    mesh: Mesh,
    name: str,
    replica: int,
    role: RoleSpec,
    actor: type[Any],
    arguments: tuple[Any, ...],
) -> Any:
    proc_name = f"{name.replace('_', '')}{replica}"  # Monarch's names take letters and digits only
    gpus = range(replica * role.gpus, (replica + 1) * role.gpus)
    procs = host.spawn_procs(
        per_host={"procs": role.procs}, name=proc_name, bootstrap=bootstrap(role.threads, gpus)
    )
    mesh.procs.append(procs)
    return procs.spawn(proc_name, actor, *arguments)


async def _quietly(ending: Any) -> None:
    """Await something that is being thrown away: whether it was still alive does not matter."""
    with contextlib.suppress(RunError):
        await bounded(ending, 3.0, "stopping")
