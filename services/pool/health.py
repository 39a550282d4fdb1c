"""A replica's health: pure transitions over one process's life.

    start:  DEAD --refit--> HEALTHY <--silence, heartbeat--> SUSPECT --silence--> DEAD, for good
            any --drain--> DRAINING --silence or loss--> DEAD, for good

What is not drawn changes nothing. So whatever order heartbeats, refits and losses arrive in, a
process that was given up or is being drained takes no request again; a replacement is a new
`HealthState`.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.records.status import ReplicaState
from protocols.spec.services import HealthSpec

IN_SERVICE = (ReplicaState.HEALTHY, ReplicaState.SUSPECT)


@dataclass(frozen=True)
class HealthState:
    """One process of a replica: its state, and whether that is its last.

    `HealthState()` is being started: DEAD, but not `over`.
    """

    state: ReplicaState = ReplicaState.DEAD
    over: bool = False

    @property
    def takes_requests(self) -> bool:
        return self.state is ReplicaState.HEALTHY


def judge(silent_s: float, spec: HealthSpec) -> ReplicaState:
    """HEALTHY, SUSPECT or DEAD by the seconds since a replica in service was last heard."""
    if silent_s < spec.suspect_after_s:
        return ReplicaState.HEALTHY
    return ReplicaState.SUSPECT if silent_s < spec.dead_after_s else ReplicaState.DEAD


def refitted(life: HealthState) -> HealthState:
    """It was told everything that the replicas beside it were told: a starting one goes to work."""
    starting = life.state is ReplicaState.DEAD and not life.over
    return HealthState(ReplicaState.HEALTHY) if starting else life


def silent(life: HealthState, silent_s: float, spec: HealthSpec) -> HealthState:
    """It was last heard `silent_s` seconds ago; 0 is a heartbeat.

    A starting process is left alone: how long it may take is its start's own timeout.
    """
    judged = judge(silent_s, spec)
    if judged is ReplicaState.DEAD and life.state is not ReplicaState.DEAD:
        return lost(life)
    return HealthState(judged) if life.state in IN_SERVICE else life


def drained(life: HealthState) -> HealthState:
    """It is to end what it has, and gets nothing new."""
    return life if life.over else HealthState(ReplicaState.DRAINING)


def lost(life: HealthState) -> HealthState:
    """Its process died, or was given up."""
    return HealthState(ReplicaState.DEAD, over=True)
