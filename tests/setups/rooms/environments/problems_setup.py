"""A set of problems, used and closed in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cartridge_forge.plugins.episodes.environments.problems import ProblemSet, open_problems
from cartridge_forge.plugins.episodes.spec.problems import ProblemsSpec

T = TypeVar("T")


def tagged(text: str) -> str | None:
    """Return the answer of a text that begins with its tag."""
    return text.removeprefix("answer ") if text.startswith("answer ") else None


def over(spec: ProblemsSpec, use: Callable[[ProblemSet], Awaitable[T]]) -> T:
    """Return what `use` makes of the set, within two minutes."""

    async def bounded() -> T:
        problems = open_problems(spec, tagged)
        try:
            return await asyncio.wait_for(use(problems), 120)
        finally:
            await problems.close()

    return asyncio.run(bounded())
