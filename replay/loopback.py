"""A server on loopback, in a thread of its own, on a port that the system picks."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from types import TracebackType
from typing import Any, Literal, Self

import uvicorn

from protocols.errors import RunError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0


class Loopback:
    """An ASGI application, served inside its `with`; it may be entered once."""

    def __init__(self, app: Any, name: str, ws: Literal["none", "websockets-sansio"]) -> None:
        self._title = name
        self._socket = socket.socket()
        config = uvicorn.Config(
            app, lifespan="off", ws=ws, http="h11", log_config=None, access_log=False,
            log_level=logging.CRITICAL + 1, timeout_graceful_shutdown=1, interface="asgi3",
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def __enter__(self) -> Self:
        """Serves, once this returns. Raises RunError."""
        self._socket.bind(("127.0.0.1", 0))
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._uvicorn.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RunError(f"the {self._title} did not start; is loopback there?")
            time.sleep(0.005)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        self._socket.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _serve(self) -> None:
        asyncio.run(self._uvicorn.serve(sockets=[self._socket]))
