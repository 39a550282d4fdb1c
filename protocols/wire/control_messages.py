"""Convert a run's status to messages of control.proto and back; a round trip keeps it equal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from cartridge_forge.protocols.records.status import (
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    RunStatus,
)
from cartridge_forge.protocols.wire import control_pb2 as pb

CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
RUN_KEY = "forge-run"  # the metadata key by which a client names its run

_STATES = {pb.ReplicaState.Value(f"REPLICA_STATE_{s.name}"): s for s in ReplicaState}


def run_message(status: RunStatus) -> pb.RunStatus:
    """Return the message of a run's status; a field that is None is left unset."""
    return pb.RunStatus(**asdict(status, dict_factory=_values))


def pool_message(pool: PoolStatus) -> pb.PoolStatus:
    """Return the message of a pool's status."""
    return pb.PoolStatus(**asdict(pool, dict_factory=_values))


def run_status(message: pb.RunStatus) -> RunStatus:
    """Return the status in a message; an optional field that is unset is None."""
    pools = tuple(pool_status(pool) for pool in message.pools)
    phase_seconds = dict(message.phase_seconds)
    return RunStatus(**_fields(message) | {"phase_seconds": phase_seconds, "pools": pools})


def pool_status(message: pb.PoolStatus) -> PoolStatus:
    """Return the pool's status in a message."""
    # DEAD for a state that only a newer server knows: nothing may rely on that replica.
    replicas = tuple(
        ReplicaStatus(**_fields(r) | {"state": _STATES.get(r.state, ReplicaState.DEAD)})
        for r in message.replicas
    )
    return PoolStatus(**_fields(message) | {"replicas": replicas})


def _values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {k: f"REPLICA_STATE_{v.name}" if k == "state" else v for k, v in pairs}


def _fields(message: Message) -> dict[str, Any]:
    return {
        field.name: getattr(message, field.name)
        if not field.has_presence or message.HasField(field.name)
        else None
        for field in message.DESCRIPTOR.fields
    }
