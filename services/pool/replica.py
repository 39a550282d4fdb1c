"""Hold one replica of a pool, its process and actor, and call it until a deadline.

A call to a replica of several ranks goes to all of them. Rank 0's reply is returned; an error of
any rank is raised.
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
    """Report that the replica of a call is lost."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ReplicaTimeout(Exception):
    """Report a missing reply. Not a TimeoutError, which an actor may raise itself."""


@dataclass(eq=False)
class Replica:
    """Hold one process in a slot of a pool. Its replacement is a `Replica` of the next generation.

    `actor` is the actor's handle, or that of rank 0; `others` are the handles of the other ranks.
    `told` holds the newest version it received, by topic; `catching_up` is the task that sends
    missed updates. `begun` and `beaten` are the start and the last heartbeat (monotonic seconds).
    `calls` are the calls in flight; when it dies, `ended` is set and they are cancelled.
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
        """Return the newest cartridge version that it received; -1 for none."""
        return self.told.get("cartridge", -1)

    def end(self, reason: str) -> None:
        """Mark the replica dead and fail every call in flight with ReplicaLost."""
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
    """Call one replica and return its reply, until `deadline` (monotonic seconds).

    Raises ReplicaLost when it dies, ReplicaTimeout at the deadline, or the actor's exception.
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
    # Wait for all ranks, unless one dies: the error that matters may arrive last.
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
    """Hold the reply of a rank, or its error."""

    answer: Any = None
    error: Exception | None = None


async def _settled(call: Awaitable[Any]) -> CallOutcome:
    """Return the outcome. Raises ReplicaLost alone: once a rank is gone, others may never reply."""
    try:
        return CallOutcome(await call)
    except ReplicaLost:
        raise
    except Exception as error:
        return CallOutcome(error=error)


async def _call_rank(name: str, handle: Any, method: str, args: tuple[Any, ...]) -> Any:
    try:
        # A mesh known to be dead raises at the call, not in the await.
        return await getattr(handle, method).call_one(*args)
    except ActorError as error:
        cause = getattr(error, "exception", None)
        if not isinstance(cause, Exception):
            raise
        cause.add_note(f"raised by {name}.{method}")
        raise cause from error
    except SupervisionError as error:  # its process or its host is gone
        raise ReplicaLost(last_line(error)) from error


def last_line(error: BaseException) -> str:
    """Return an error's message without the remote traceback that Monarch puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
