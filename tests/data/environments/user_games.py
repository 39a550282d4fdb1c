"""Environments as users write them, well and badly, for tests of kind python."""

from __future__ import annotations

import os
import random
import time
from typing import Any


class Guess:
    """Guess a number from 1 to `most` in a few turns: the reward is 1 if it is found."""

    def __init__(self, most: int = 9) -> None:
        self._most = most

    def reset(self, seed: int) -> str:
        self._wanted = random.Random(seed).randint(1, self._most)
        return f"guess a number from 1 to {self._most}."

    def step(self, text: str) -> tuple[str, float, bool]:
        said = int(text)
        if said == self._wanted:
            return "right.", 1.0, True
        return ("too low." if said < self._wanted else "too high."), 0.0, False


class Gym:
    """Return what Gymnasium's environments return, with a reward in every step."""

    def reset(self, seed: int, start: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        self._at = start
        return {"at": start, "of": 3}, {"error_kind": ""}

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._at += action["by"]
        return {"at": self._at, "of": 3}, 0.25, False, self._at >= 3, {"expected": 3}


class Later:
    """Answer in coroutines, with tools, as a mapping."""

    tools = ({"name": "add", "description": "sum", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    }},)  # fmt: skip

    async def reset(self, seed: int, **_: Any) -> dict[str, Any]:
        return {"observation": "what is 2 + 3?", "done": False}

    async def step(self, call: dict[str, Any]) -> dict[str, Any]:
        total = call["arguments"]["a"] + call["arguments"]["b"]
        return {"observation": str(total), "reward": float(total == 5), "done": True}


class Unseeded(Guess):
    """Draw its number from the clock: a replay differs."""

    def reset(self, seed: int) -> str:
        return f"it is {time.perf_counter_ns()}."


class Faulty:
    """Do what the text says, none of which an environment should."""

    def reset(self, seed: int) -> str:
        return "go on."

    def step(self, text: str) -> tuple[Any, ...]:
        if text == "raise":
            raise ValueError("no such move")
        if text == "exit":
            raise SystemExit(3)
        if text == "die":
            os._exit(4)
        if text == "sleep":
            time.sleep(3600)
        if text == "spin":
            while True:
                pass
        if text == "fill":
            return "x" * (1 << 31), 0.0, False
        if text == "one":
            return ("only",)
        return f"{text}.", 0.0, False


class Stepless:
    def reset(self, seed: int) -> str:
        return "go on."


def breaks(**_: Any) -> None:
    raise RuntimeError("no licence")


class Lenient(Guess):
    """Guess as before, where a text that is no number is a wrong guess."""

    def step(self, text: str) -> tuple[str, float, bool]:
        return super().step(text) if text.isdigit() else ("a number!", 0.0, False)


class Alike:
    """Say the same to every seed, reward nothing, and be long about it."""

    def reset(self, seed: int) -> str:
        return "go on. " * 50

    def step(self, text: str) -> tuple[str, float, bool]:
        return "no.", 0.0, True


class Lucky:
    """Reward by the clock, which a replay does not repeat."""

    def reset(self, seed: int) -> str:
        return f"try your luck {seed}."

    def step(self, text: str) -> tuple[str, float, bool]:
        return "done.", time.perf_counter(), True
