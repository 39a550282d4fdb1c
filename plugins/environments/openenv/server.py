"""Serve the clinic desk with OpenEnv's HTTP server on loopback, in a thread or as a process.

with LocalEnvironment() as server:
    ...  OpenEnvClient(server.url)  ...

python -m cartridge_forge.plugins.environments.openenv.server --port 8000
"""

from __future__ import annotations

import argparse

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app

from cartridge_forge.plugins.environments.openenv.desk_env import (
    DeskAction,
    DeskEnvironment,
    DeskObservation,
    DeskState,
)
from cartridge_forge.plugins.replay.fake_provider.server import LoopbackServer

MAX_SESSIONS = 1024


def desk_app() -> FastAPI:
    return create_fastapi_app(
        DeskEnvironment,
        DeskAction,
        DeskObservation,
        max_concurrent_envs=MAX_SESSIONS,
        env_name="desk",
        state_cls=DeskState,
    )


class LocalEnvironment(LoopbackServer):
    """Run the server in a thread of this process."""

    def __init__(self) -> None:
        super().__init__(desk_app(), "local environment", ws="websockets-sansio")


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the clinic desk on loopback.")
    parser.add_argument("--port", type=int, required=True, help="0: one that the system picks")
    port = parser.parse_args().port
    uvicorn.run(desk_app(), host="127.0.0.1", port=port, ws="websockets-sansio", lifespan="off")


if __name__ == "__main__":
    main()
