"""Evaluate and compare LaTeX answers in a separate process that imports nothing of this project.

    stdout   ready
    stdin    {"a": "x+1", "b": "1+x", "seconds": 2.0}
    stdout   =1                                                    =0: not equal, or unknown
    stdin    {"a": "\\\\sqrt{2}", "b": null, "seconds": 2.0}
    stdout   =1.41421356237309504880168872421                      = alone: no real number

A power tower such as 9^{9^{9^9}} is computed in C code, where Python exceptions do not arrive. The
kernel therefore ends this process once a question took `seconds` of processor time, and the parent
starts another. Processor time keeps a stalled machine from changing a verdict. The process also
ends when stdin ends.
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
from sympy import Eq, Expr, N, Symbol, nsimplify

MOST_BYTES = 2 << 30
DIGITS = 30  # of a number that has endlessly many
DECIMALS = 12  # to which math-verify rounds in what is no number itself


@lru_cache(maxsize=1024)
def _read(answer: str) -> tuple[Any, ...]:
    return tuple(parse(f"${answer}$", parsing_timeout=None))


def _same(a: str, b: str) -> bool:
    """Compare both ways: math-verify accepts "x = 3" for a gold 3, but not 3 for a gold "x = 3"."""
    left, right = list(_read(a)), list(_read(b))
    return any(
        verify(gold, said, float_rounding=DECIMALS, timeout_seconds=None)
        for gold, said in ((left, right), (right, left))
    )


def _number(answer: str) -> str:
    """Return the real number that an answer is, or an equation "x = ..." has; "" where it is
    none."""
    found = next(iter(_read(answer)), None)
    if isinstance(found, Eq) and isinstance(found.lhs, Symbol):
        found = found.rhs
    if not isinstance(found, Expr):
        return ""
    value = found.doit()
    if not value.is_number or not value.is_real or not value.is_finite:
        return ""
    exact = nsimplify(value, rational=True) if value.is_Float else value
    return str(exact) if exact.is_Rational else str(N(value, DIGITS))


def main() -> None:
    logging.disable(logging.CRITICAL)  # hides warnings of disabled timeouts; a timer replaces them
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    _same(r"\frac{1}{2}", "x+1")  # builds the parser's tables before the first question
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["seconds"])
        try:
            a, b = asked["a"], asked["b"]
            verdict = _number(a) if b is None else str(int(_same(a, b)))
        except Exception:  # sympy may raise anything; the answers are then not known to be equal
            verdict = "" if asked["b"] is None else "0"
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"={verdict}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
