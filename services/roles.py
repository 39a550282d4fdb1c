"""Map the roles of a mesh spec to their arguments, and to what their processes need; the table of
plug-ins has their actors.

It imports no actor, and so no torch: the client reads it, and waits for the run in few megabytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.learn import LearnSpec, RoleFacts
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER, MODEL_ROLES, RoleSpec, RunSpec
from cartridge_forge.protocols.spec.services import StoredPlace
from cartridge_forge.services.run_directory import RunDirectory

ENGINE_GENERATOR = "engine_generator"  # vLLM in a run, either engine in a server
ALONE = ("trainer", "store")  # roles with exactly one replica


def actor_class(name: str) -> type[Any]:
    """Return the actor class of a role, imported now. Raises SpecError for a role that no plug-in
    adds."""
    actor: type[Any] = resolve("roles", name)
    return actor


def device_of(role: RoleSpec) -> str:
    """Return "cuda" or "cpu". `bootstrap` shows each process only its own GPUs."""
    return "cuda" if role.gpus else "cpu"


def actor_of(name: str, learn: LearnSpec) -> str:
    """Return the name of a role's actor in `protocols.plugins`: the generator's depends on its
    backend."""
    vllm = name == "generator" and learn.generator.backend == "vllm"
    return ENGINE_GENERATOR if vllm else name


def generator_evidence(learn: LearnSpec) -> frozenset[str]:
    """Return what the generators return to show the numbers that they decoded over: "fingerprint"
    (`Completion.served`), "logprobs", or neither."""
    return getattr(actor_class(actor_of("generator", learn)), "evidence", frozenset())


def with_room(name: str, role: RoleSpec, learn: LearnSpec) -> RoleSpec:
    """Return the role as a run needs it. It has room for every episode under way, where episodes
    run ahead of training: each then asks for itself, and must not wait for another's slow reply.
    Teachers that verify get the calls of one group of responses each."""
    together = learn.rollouts_together if learn.train.staleness else 0
    if name == "doc_teacher" and learn.rollout.verify is not None and role.replicas > 1:
        # The teacher that read a group's responses has their keys and values.
        return role.model_copy(update={"router": "session"})
    if name not in ("environment", "reward", "rsa_aggregator", "generator"):
        return role
    most = -(-together * (learn.train.staleness + 1) // role.replicas)
    return role.model_copy(update={"max_ongoing": max(role.max_ongoing, most)})


def role_arguments(
    name: str, spec: RunSpec, base: ModelSource, end_ids: frozenset[int], directory: RunDirectory
) -> tuple[Any, ...]:
    """Return the constructor arguments of a role's actor."""
    learn, url = spec.learn, spec.mesh.records.store
    stored = None
    if url is not None and name in writers_apart(spec):
        stored = StoredPlace(url, f"{spec.mesh.name}/{directory.id}")
    if name == "generator":
        # The version being sampled, and the versions that earlier rollouts are pinned to.
        reader_arguments = (base, end_ids, learn.train.staleness + 2)
        if learn.generator.backend != "vllm":
            return reader_arguments
        return (*reader_arguments, resolve("hooks", "engine_share")(spec))
    top = None if learn.teacher.top_k == "full" else learn.teacher.top_k
    if name == "doc_teacher":
        asks_document = learn.objective.asks_document
        return (
            base, learn.train.row_tokens, top, asks_document, spec.mesh.call_timeout_s,
            learn.teacher.student_top,
        )  # fmt: skip
    if name == HINTED_TEACHER:
        return (base, learn.train.row_tokens, top, learn.train.staleness + 2)
    if name != "trainer":
        replicas = dict(spec.roles)[name].replicas
        ledger = str(directory.ledger)
        facts = RoleFacts(replicas, spec.mesh.call_timeout_s, directory.id, ledger, stored)
        return learn.role_arguments(name, facts)
    # The heartbeat finds a silent rank; the call's timeout bounds a rank that hangs but answers.
    ranks = (learn.train.shard_base, spec.mesh.call_timeout_s)
    keeps_scores = spec.mesh.records.token_scores
    files = (str(directory.last_state), str(directory.start))
    return (base, learn, *files, *ranks, keeps_scores, stored, spec.divides_cartridges)


HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # what a model of the hub may need to be loaded
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
WRITERS = ("trainer", "teacher_replay")  # roles that write into the run directory


def role_variables(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """Return the environment variables that processes need beyond ordinary ones, by role, "" for
    spares: those of the hub where the model is one of the hub's, and of the external teachers."""
    variables = dict[str, tuple[str, ...]]()
    if not Path(spec.learn.model.path).is_dir():
        variables = dict.fromkeys(("", *MODEL_ROLES), (*HUB, *PROXIES))
    for role, names in spec.learn.role_secrets.items():
        variables[role] = (*names, *PROXIES)
    if spec.mesh.records.store is not None:
        for role in writers_apart(spec):
            variables[role] = (*variables.get(role, PROXIES), *resolve("hooks", "store_variables"))
    return variables


def writers_apart(spec: RunSpec) -> tuple[str, ...]:
    """Return the roles that write into the run directory and run on other hosts than the
    controller's."""
    if spec.mesh.hosts.kind == "local":
        return ()
    return tuple(name for name in WRITERS if name not in spec.learn.roles_here)


def last_state_here(spec: RunSpec) -> bool:
    """Return whether the trainer keeps its last state in the run directory, not in the store."""
    return spec.mesh.records.store is None or "trainer" not in writers_apart(spec)
