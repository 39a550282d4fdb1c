"""Judges whether two LaTeX answers mean the same, in a process of its own; imports nothing of ours.

    stdout   ready
    stdin    {"a": "0.5", "b": "\\\\frac{1}{2}", "seconds": 2.0}
    stdout   1                                                     0: not, or not to be told

A power tower such as 9^{9^{9^9}} is computed in C, where no exception of Python's arrives: so the
kernel ends this process once a question took its seconds of processor time (a machine that stalls
changes no verdict), and the asker starts another. The end of stdin is the end of this process.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

MOST_BYTES = 2 << 30


@lru_cache(maxsize=1024)
def _read(answer: str) -> tuple[Any, ...]:
    return tuple(parse(f"${answer}$", parsing_timeout=None))


def _same(a: str, b: str) -> bool:
    """Symmetric: math-verify takes "x = 3" for a gold 3, but not 3 for a gold "x = 3"."""
    left, right = list(_read(a)), list(_read(b))
    return any(
        verify(gold, said, timeout_seconds=None) for gold, said in ((left, right), (right, left))
    )


def main() -> None:
    logging.disable(logging.CRITICAL)  # its warnings of disabled timeouts: ours is below
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker's Ctrl-C ends stdin, and that ends us
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    _same(r"\frac{1}{2}", "x+1")  # makes the parser's tables, so that no question waits for them
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            verdict = _same(asked["a"], asked["b"])
        except Exception:  # whatever sympy makes of it, the answers are not known to be the same
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(verdict), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
