"""Tell what the processes of a spec's roles need, and which of them write into the run directory.

It imports no actor, and so no torch: the client reads it, and waits for the run in few megabytes.
"""

from __future__ import annotations

import os
from pathlib import Path

from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.mesh import MODEL_ROLES, RunSpec

HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # what a model of the hub may need to be loaded
SINKS = ("WANDB_", "OTEL_")
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


def controller_variables(spec: RunSpec) -> tuple[str, ...] | None:
    """Return the environment variables that the controller needs beyond ordinary ones; None for all
    of them: a Slurm job inherits the controller's, and a cluster's credentials may be anywhere."""
    mesh = spec.mesh
    if mesh.hosts.kind in ("kubernetes", "slurm"):
        return None
    token = [mesh.control.token_env] if mesh.control.token_env else []
    sinks = [name for name in os.environ if name.startswith(SINKS)] if mesh.telemetry.sinks else []
    return (*token, *sinks, *HUB, *PROXIES)
