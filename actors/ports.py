"""Call an actor over a port of its own, where a call that reaches nobody must end nobody.

Monarch 0.7 ends an actor whose endpoint call reaches an actor that has been stopped, also where the
caller handles failures: `_handle_undeliverable_message` is not asked about invalid references. A
message over a port can be dropped instead. Heartbeats go over ports, for the process that they ask
may be stopped by another at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from monarch.actor import Channel

_serving: set[asyncio.Future[None]] = set()  # asyncio itself keeps no task alive


class PortCall:
    """Call a method of an actor that has the endpoint `listen`, which opens the port at the first
    call. A call that cannot be delivered is never answered: bound it by a time limit."""

    def __init__(self, actor: Any, method: str, port: Any = None) -> None:
        self._actor, self._method, self._port = actor, method, port

    def __reduce__(self) -> tuple[Any, ...]:
        return PortCall, (self._actor, self._method, self._port)

    async def call_one(self, *values: Any) -> Any:
        """Return the reply. Raises what the method raises."""
        if self._port is None:
            self._port = await self._actor.listen.call_one(self._method)
        self._port.return_undeliverable = False  # not part of a pickled port
        reply, receiver = Channel[Any].open(once=True)
        self._port.send((values, reply))
        return await receiver.recv()


def open_port(answer: Callable[..., Awaitable[Any]]) -> Any:
    """Return a port whose calls `answer` serves, all at once, while this actor lives."""
    port, receiver = Channel[Any].open()
    _keep(_serve(receiver, answer))
    return port


async def _serve(receiver: Any, answer: Callable[..., Awaitable[Any]]) -> None:
    while True:
        values, reply = await receiver.recv()
        reply.return_undeliverable = False
        _keep(_reply(answer, values, reply))


async def _reply(answer: Callable[..., Awaitable[Any]], values: Any, reply: Any) -> None:
    try:
        reply.send(await answer(*values))
    except Exception as error:
        reply.exception(error)


def _keep(work: Any) -> None:
    task = asyncio.ensure_future(work)
    _serving.add(task)
    task.add_done_callback(_serving.discard)
