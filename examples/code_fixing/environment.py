"""A code-fixing environment: one line of a function is wrong, and tests say so.

    user   def f(a, b):                 student   return a + b
               return a - b
           f(7, 2) gives 5, wanted the sum 9.
    tool   f(7, 2) gives 14, wanted the sum 9.

The student's line runs in a sandbox (`sandbox.py`). The reward is 1 once all tests pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sandbox import called  # type: ignore[import-not-found]  # beside this file

BODIES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "return a + b": ("sum", lambda a, b: a + b),
    "return a - b": ("difference", lambda a, b: a - b),
    "return a * b": ("product", lambda a, b: a * b),
    "return max(a, b)": ("larger", max),
    "return min(a, b)": ("smaller", min),
}
TESTS = 3
NUMBERS = range(2, 10)


class Bug:
    """Hold a function with a wrong line, and what its tests want."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"bug/{seed}")
        while True:
            self.wrong, self.right = rng.sample(list(BODIES), 2)
            self.calls = [(rng.choice(NUMBERS), rng.choice(NUMBERS)) for _ in range(TESTS)]
            self.wanted = [BODIES[self.right][1](*c) for c in self.calls]
            same_results = [
                b for b in BODIES if [BODIES[b][1](*c) for c in self.calls] == self.wanted
            ]
            results = [BODIES[self.wrong][1](*c) for c in self.calls]
            # The first test tells the bug, and the tests together allow one line only.
            if same_results == [self.right] and results[0] != self.wanted[0]:
                self.given = results
                return

    def failure(self, results: list[object]) -> str:
        """Return the first test that fails; "" if all pass."""
        for (a, b), result, wanted in zip(self.calls, results, self.wanted, strict=False):
            if result != wanted:
                what = BODIES[self.right][0]
                return f"f({a}, {b}) gives {str(result)[:20]}, wanted the {what} {wanted}."
        return "" if len(results) == TESTS else "it has no result."

    @property
    def opening(self) -> str:
        return f"def f(a, b):\n    {self.wrong}\n{self.failure(list(self.given))}"


class CodeFixing:
    """Let a student replace the line, `most` times."""

    def __init__(self, most: int = 2) -> None:
        self._most = most

    def reset(self, seed: int) -> str:
        self._bug, self._left = Bug(seed), self._most
        return self._bug.opening

    def step(self, text: str) -> tuple[str, float, bool]:
        line = " ".join(text.split())
        self._left -= 1
        reply = called(f"def f(a, b):\n    {line}\n", "f", self._bug.calls)
        if "error" in reply:
            return f"{reply['error'].partition(':')[0]}.", 0.0, not self._left
        failure = self._bug.failure(reply["results"])
        if not failure:
            return "all tests pass.", 1.0, True
        return failure, 0.0, not self._left
