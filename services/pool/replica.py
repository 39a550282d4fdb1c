"""One replica of a pool: a process and its actor, whether it lives, and calls that know.

A replica of several ranks is asked as one: every call goes to all of them, rank 0's answer counts,
and the error of any is the call's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from protocols.errors import RanksLostError
from protocols.records.status import ReplicaState, ReplicaStatus
from services.pool.health import HealthState, lost
from services.pool.process import ReplicaProcess


class ReplicaLost(Exception):
    """The replica that worked on a call is gone."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ReplicaTimeout(Exception):
    """No answer by the deadline. Not a TimeoutError: that is what an actor may raise itself."""


@dataclass(eq=False)
class Replica:
    """One process's life in a slot of a pool; who replaces it is another, of the next generation.

    `actor` is the actor's handle, or that of rank 0, and `others` are those of the other ranks.
    `told` holds the newest version that it was told, by topic; `catching_up` tells it what it
    missed. `begun` and `beaten` are when its start began and when it was last heard of (monotonic
    seconds). `calls` are the calls in flight, cancelled with `ended` set when it dies.
    """

    role: str
    slot: int
    generation: int = 0
    life: HealthState = field(default_factory=HealthState)
    process: ReplicaProcess | None = None
    actor: Any = None
    others: Sequence[Any] = ()
    actor_name: str = ""
    ongoing: int = 0
    memory_bytes: int = 0
    begun: float = field(default_factory=time.monotonic)
    beaten: float = field(default_factory=time.monotonic)
    told: dict[str, int] = field(default_factory=dict)
    catching_up: asyncio.Task[None] | None = None
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    ended: str = ""

    @property
    def name(self) -> str:
        return f"{self.role}[{self.slot}]"

    @property
    def state(self) -> ReplicaState:
        return self.life.state

    @property
    def version(self) -> int:
        """The newest cartridge version it was told; -1 for none."""
        return self.told.get("cartridge", -1)

    def end(self, reason: str) -> None:
        """It is dead: every call in flight fails with Lost now."""
        self.ended = self.ended or reason
        self.life = lost(self.life)
        for call in list(self.calls):
            call.cancel()

    def status(self) -> ReplicaStatus:
        process = self.process
        return ReplicaStatus(
            self.name, self.state, process.host if process else "", process.pid if process else 0,
            self.ongoing, self.version, self.memory_bytes,
        )  # fmt: skip


async def ask(replica: Replica, method: str, args: tuple[Any, ...], deadline: float) -> Any:
    """One call to one replica until `deadline` (monotonic seconds).

    Raises Lost when it dies, Silent, or what its actor raised.
    """
    if replica.ended:
        raise ReplicaLost(replica.ended)
    call = asyncio.ensure_future(_call(replica, method, args))
    replica.calls.add(call)
    try:
        await asyncio.wait({call}, timeout=max(0.0, deadline - time.monotonic()))
        if not call.done():
            raise ReplicaTimeout(f"{replica.name}.{method} did not answer in time")
        if call.cancelled():
            raise ReplicaLost(replica.ended)
        return call.result()
    finally:
        replica.calls.discard(call)
        if not call.done():
            call.cancel()


async def _call(replica: Replica, method: str, args: tuple[Any, ...]) -> Any:
    if not replica.others:
        return await _call_rank(replica.name, replica.actor, method, args)
    handles = (replica.actor, *replica.others)
    names = (f"{replica.name} rank {rank}" for rank in range(len(handles)))
    # All of them, for of several errors the one that counts may come last; but for a death.
    calls = [_settled(_call_rank(n, h, method, args)) for n, h in zip(names, handles, strict=True)]
    outcomes = await asyncio.gather(*calls)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, RanksLostError)), ReplicaLost(str(errors[0]))
        )
    return outcomes[0].answer


@dataclass(frozen=True)
class CallOutcome:
    """What came of a rank's call."""

    answer: Any = None
    error: Exception | None = None


async def _settled(call: Awaitable[Any]) -> CallOutcome:
    """What comes of it. Raises Lost alone: who waits for the other ranks of one that is gone may
    wait for ever."""
    try:
        return CallOutcome(await call)
    except ReplicaLost:
        raise
    except Exception as error:
        return CallOutcome(error=error)


async def _call_rank(name: str, handle: Any, method: str, args: tuple[Any, ...]) -> Any:
    try:
        # A mesh known to be dead refuses at the call, not in the await.
        return await getattr(handle, method).call_one(*args)
    except ActorError as error:
        cause = getattr(error, "exception", None)
        if not isinstance(cause, Exception):
            raise
        cause.add_note(f"raised by {name}.{method}")
        raise cause from error
    except SupervisionError as error:  # Monarch's word that its process or its host is gone
        raise ReplicaLost(last_line(error)) from error


def last_line(error: BaseException) -> str:
    """What went wrong, without the remote traceback that Monarch puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
