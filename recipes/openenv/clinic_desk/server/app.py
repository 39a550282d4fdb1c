"""Serve the clinic desk: `uvicorn clinic_desk.server.app:app`, or `server --port 8000`."""

from __future__ import annotations

import argparse

import uvicorn
from openenv.core.env_server.http_server import create_app

from cartridge_forge.plugins.environments.openenv.desk_env import DeskEnvironment
from recipes.openenv.clinic_desk.models import DeskAction, DeskObservation, DeskState

MAX_SESSIONS = 256

app = create_app(
    DeskEnvironment,
    DeskAction,
    DeskObservation,
    env_name="clinic_desk",
    max_concurrent_envs=MAX_SESSIONS,
    state_cls=DeskState,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the clinic desk.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
