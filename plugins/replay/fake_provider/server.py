"""Run an ASGI application on loopback, in a thread of its own, on a free port."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from typing import Literal, Self

import uvicorn
from starlette.types import ASGIApp

from cartridge_forge.plugins.host.limited_process import START_SECONDS
from cartridge_forge.protocols.errors import RunError

STOP_TIMEOUT_S = 20.0


class LoopbackServer:
    """Serve an ASGI application inside its `with`, at `url`; it may be entered once."""

    def __init__(
        self, app: ASGIApp, name: str, ws: Literal["none", "websockets-sansio"] = "none"
    ) -> None:
        self._name = name
        self._uvicorn = uvicorn.Server(uvicorn.Config(
            app, lifespan="off", ws=ws, http="h11", log_config=None, access_log=False,
            log_level=logging.CRITICAL + 1, timeout_graceful_shutdown=1, interface="asgi3",
        ))  # fmt: skip

    def __enter__(self) -> Self:
        """Return once requests are answered. Raises RunError where the server does not start."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        serve = self._uvicorn.serve(sockets=[self._socket])
        self._thread = threading.Thread(
            target=asyncio.run, args=(serve,), name=self._name, daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._uvicorn.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RunError(f"the {self._name} did not start; is loopback there?")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(STOP_TIMEOUT_S)
        self._socket.close()
