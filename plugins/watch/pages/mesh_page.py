"""Answer what the page of the mesh shows: roles, replicas, hosts, restarts, memory and stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.errors import DataError

MOST_CHANGES = 100
STACK_BYTES = 256 * 1024
CHANGES = (
    "role_ready", "replica_lost", "replica_back", "replica_moved", "host_joined", "host_drained",
    "host_lost", "host_refused", "relay_lost", "relay_back", "scaled", "engine", "stalled",
    "sink_failed",
)  # fmt: skip


def mesh(view: RunView, status: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the roles of a run as they were asked for, its replicas now (of a run that has ended:
    as they started), and what happened to them, the newest first."""
    view.refresh()
    events = view.events.rows
    spec = view.spec
    changes = [event for event in events if event["event"] in CHANGES]
    lost = Counter(event["role"] for event in changes if event["event"] == "replica_lost")
    started = {event["role"]: event for event in changes if event["event"] == "role_ready"}
    roles = []
    role_specs = {} if spec is None else dict(spec.roles)
    for name in dict.fromkeys([*role_specs, *started]):
        role_spec, ready = role_specs.get(name), started.get(name, {})
        roles.append(
            {
                "role": name,
                "replicas": ready.get("replicas", role_spec.replicas if role_spec else None),
                "pids": ready.get("pids", []), "seconds": ready.get("seconds"),
                "procs": role_spec.procs if role_spec else 1,
                "threads": role_spec.threads if role_spec else None,
                "gpus": role_spec.gpus if role_spec else 0, "lost": lost.get(name, 0),
            }
        )  # fmt: skip
    stacks = (view.run.path / "stacks").glob("*")
    return {
        "roles": roles, "pools": [] if status is None else status["pools"],
        "plane": None if spec is None else spec.mesh.carrier,
        "hosts": None if spec is None else spec.mesh.hosts.kind,
        "changes": changes[: -MOST_CHANGES - 1 : -1],
        "stacks": sorted(file.name for file in stacks if file.is_file()),
    }  # fmt: skip


def stack_file(view: RunView, name: str) -> dict[str, Any]:
    """Return the text of one file of stacks, its first STACK_BYTES. Raises DataError for a file
    that is not there."""
    if name not in mesh(view, None)["stacks"]:
        raise DataError(f"run {view.run.id} has no stacks {name[:60]!r}; load the page again")
    with (view.run.path / "stacks" / name).open("rb") as file:
        return {"name": name, "text": file.read(STACK_BYTES).decode(errors="replace")}
