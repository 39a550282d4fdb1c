"""Compute a replica's health by pure transitions over the state of one process.

    start:  DEAD --refit--> HEALTHY <--silence, heartbeat--> SUSPECT --silence--> DEAD, final
            any --drain--> DRAINING --silence or loss--> DEAD, final

Any other transition changes nothing. In whatever order heartbeats, refits and losses arrive, a
process that was given up or is draining never takes requests again. A replacement is a new
`HealthState`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.services import HealthSpec

IN_SERVICE = (ReplicaState.HEALTHY, ReplicaState.SUSPECT)


@dataclass(frozen=True)
class HealthState:
    """Hold the state of one process of a replica, and whether it is final.

    `HealthState()` is a starting process: DEAD, but not `over`.
    """

    state: ReplicaState = ReplicaState.DEAD
    over: bool = False

    @property
    def takes_requests(self) -> bool:
        return self.state is ReplicaState.HEALTHY


def refitted(life: HealthState) -> HealthState:
    """Return the state after all missed updates were sent: a starting process becomes HEALTHY."""
    starting = life.state is ReplicaState.DEAD and not life.over
    return HealthState(ReplicaState.HEALTHY) if starting else life


def silent(life: HealthState, silent_s: float, spec: HealthSpec) -> HealthState:
    """Return the state `silent_s` seconds after the last heartbeat; 0 is a heartbeat.

    A starting process is unchanged: the start's own timeout bounds it.
    """
    if silent_s >= spec.dead_after_s and life.state is not ReplicaState.DEAD:
        return lost(life)
    if life.state not in IN_SERVICE:
        return life
    doubted = silent_s >= spec.suspect_after_s
    return HealthState(ReplicaState.SUSPECT if doubted else ReplicaState.HEALTHY)


def drained(life: HealthState) -> HealthState:
    """Return the state of a process that finishes its requests and takes no new ones."""
    return life if life.over else HealthState(ReplicaState.DRAINING)


def lost(life: HealthState) -> HealthState:
    """Return the final state of a process that died or was given up."""
    return HealthState(ReplicaState.DEAD, over=True)


class ReplicaLost(Exception):
    """Report that the replica of a call is lost. `suspect` is set where its engine died in a step
    that was over this call, which may be the cause."""

    def __init__(self, reason: str, suspect: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.suspect = reason, suspect


class EngineLost(ReplicaLost):
    """Report that the replica is lost because its engine died. Its process still replies."""


class ReplicaTimeout(Exception):
    """Report a missing reply. Not a TimeoutError, which an actor may raise itself."""


def last_line(error: BaseException) -> str:
    """Return an error's message without the remote traceback that Monarch puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
