"""Serve a calculator as an OpenEnv environment with MCP tools (RFC 003):

    python -m examples.calculator.server --port 8011

The question is a product that the tiny student cannot compute. `calculate` tells a result, and
`submit` ends the episode; the reward is 1 if the submitted answer is right. The rubric rewards the
whole episode when it is done (RFC 004).
"""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

FACTOR = re.compile(r"\s*(\d{1,6})\s*\*\s*(\d{1,6})\s*")
MAX_SESSIONS = 512


class Question(Observation):
    """Carry the question, and what a tool replied."""

    text: str = ""


class CalculatorEnvironment(MCPEnvironment):
    """Ask for one product an episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("calculator")
        self._submitted: str | None = None
        self._state = State()
        self._factors = (0, 0)

        @tools.tool
        def calculate(expression: str) -> str:
            """Multiply two numbers, written as 12 * 34."""
            match = FACTOR.fullmatch(expression)
            if match is None:
                return "write two numbers with * between them."
            return str(int(match[1]) * int(match[2]))

        @tools.tool
        def submit(answer: str) -> str:
            """Give the answer and end the episode."""
            self._submitted = answer
            return "submitted."

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Question:
        rng = random.Random(seed)
        self._factors = (rng.randint(2, 9), rng.randint(2, 9))
        self._submitted, self._state = None, State(episode_id=episode_id)
        return Question(text="what is {} * {}?".format(*self._factors))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        return Question(text="call a tool.")

    async def step_async(
        self, action: Action, timeout_s: float | None = None, **more: Any
    ) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **more)
        self._state.step_count += isinstance(action, CallToolAction)
        if isinstance(observation, CallToolObservation) and self._submitted is not None:
            right = self._submitted.strip() == str(self._factors[0] * self._factors[1])
            return observation.model_copy(update={"done": True, "reward": float(right)})
        return observation

    @property
    def state(self) -> State:
        return self._state


def calculator_app() -> FastAPI:
    return create_fastapi_app(
        CalculatorEnvironment, CallToolAction, CallToolObservation,
        max_concurrent_envs=MAX_SESSIONS, env_name="calculator",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the calculator on loopback.")
    parser.add_argument("--port", type=int, default=8011)
    port = parser.parse_args().port
    uvicorn.run(
        calculator_app(), host="127.0.0.1", port=port, log_level="warning",
        ws="websockets-sansio",
    )  # fmt: skip


if __name__ == "__main__":
    main()
