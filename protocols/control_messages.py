"""A run's status as messages of control.proto, and back. The two are equal after a round trip."""

from __future__ import annotations

from protocols import control_pb2 as pb
from protocols.status import PoolStatus, ReplicaState, ReplicaStatus, RunStatus

CONTROL = pb.DESCRIPTOR.services_by_name["Control"].full_name
RUN_KEY = "forge-run"  # the metadata key in which a client names the run that it means

_STATES = {
    ReplicaState.HEALTHY: pb.REPLICA_STATE_HEALTHY,
    ReplicaState.SUSPECT: pb.REPLICA_STATE_SUSPECT,
    ReplicaState.DRAINING: pb.REPLICA_STATE_DRAINING,
    ReplicaState.DEAD: pb.REPLICA_STATE_DEAD,
}
# DEAD for a state of a newer server: its replica, whatever it is, is not one to count on.
_STATE_OF = {number: state for state, number in _STATES.items()}


def run_message(status: RunStatus) -> pb.RunStatus:
    return pb.RunStatus(
        stage=status.stage,
        arm=status.arm,
        step=status.step,
        steps=status.steps,
        kl=status.kl,
        accuracy=status.accuracy,
        version=status.version,
        tokens_per_second=status.tokens_per_second,
        phase=status.phase,
        phase_seconds=status.phase_seconds,
        seconds_left=status.seconds_left,
        message=status.message,
        paused=status.paused,
        pools=[pool_message(pool) for pool in status.pools],
        done=status.done,
        error=status.error,
        reward=status.reward,
    )


def run_status(message: pb.RunStatus) -> RunStatus:
    return RunStatus(
        stage=message.stage,
        arm=message.arm,
        step=message.step,
        steps=message.steps,
        kl=message.kl if message.HasField("kl") else None,
        accuracy=message.accuracy if message.HasField("accuracy") else None,
        version=message.version,
        tokens_per_second=(
            message.tokens_per_second if message.HasField("tokens_per_second") else None
        ),
        phase=message.phase,
        phase_seconds=dict(message.phase_seconds),
        seconds_left=message.seconds_left if message.HasField("seconds_left") else None,
        message=message.message,
        paused=message.paused,
        pools=tuple(pool_status(pool) for pool in message.pools),
        done=message.done,
        error=message.error if message.HasField("error") else None,
        reward=message.reward if message.HasField("reward") else None,
    )


def pool_message(pool: PoolStatus) -> pb.PoolStatus:
    return pb.PoolStatus(
        role=pool.role,
        target=pool.target,
        waiting=pool.waiting,
        replicas=[_replica_message(replica) for replica in pool.replicas],
        requests=pool.requests,
        failures=pool.failures,
        retries=pool.retries,
        restarts=pool.restarts,
    )


def pool_status(message: pb.PoolStatus) -> PoolStatus:
    return PoolStatus(
        role=message.role,
        target=message.target,
        waiting=message.waiting,
        replicas=tuple(_replica_status(replica) for replica in message.replicas),
        requests=message.requests,
        failures=message.failures,
        retries=message.retries,
        restarts=message.restarts,
    )


def _replica_message(replica: ReplicaStatus) -> pb.ReplicaStatus:
    return pb.ReplicaStatus(
        name=replica.name,
        state=_STATES[replica.state],
        host=replica.host,
        pid=replica.pid,
        ongoing=replica.ongoing,
        version=replica.version,
        memory_bytes=replica.memory_bytes,
    )


def _replica_status(message: pb.ReplicaStatus) -> ReplicaStatus:
    return ReplicaStatus(
        name=message.name,
        state=_STATE_OF.get(message.state, ReplicaState.DEAD),
        host=message.host,
        pid=message.pid,
        ongoing=message.ongoing,
        version=message.version,
        memory_bytes=message.memory_bytes,
    )
