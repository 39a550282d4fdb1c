r"""Compare mathematical answers: 0.5, \frac{1}{2} and 1/2 are equal.

    same text, but for spacing      -> equal
    both plain numbers              -> by exact fractions
    else                            -> math-verify, in a separate process  (`math_judge`)

The first two rules settle most pairs; only the judge's process imports sympy. A pair that the judge
cannot settle in time is not equal. An answer that it cannot even compare with 1 (a power tower)
equals none and is tried once.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from protocols.errors import RunError
from protocols.limited_process import START_SECONDS, STARTS

SECONDS = (
    2.0  # of the processor; a comparison takes milliseconds, the first ones tenths of a second
)
LONGEST_S = 60.0  # wall time, for a stalled machine or a failed timer in the judge
LONGEST = 300  # characters; longer answers are not compared by value

_NUMBER = re.compile(r"([+-]?)(?:(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?)")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{(\d+)\}\{(\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")
_SPACING = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|\s+|\$")


def same_math(a: str, b: str) -> bool:
    """Return whether two answers, as LaTeX or plain text, are equal. Blocks for `SECONDS` or a
    little more. Raises RunError if the judge cannot start."""
    a, b = _plain(a), _plain(b)
    if a == b:
        return True
    if max(len(a), len(b)) > LONGEST or not a or not b:
        return False
    left, right = _number(a), _number(b)
    if left is not None and right is not None:
        return left == right
    return _comparable(a) and _comparable(b) and _judged(*sorted((a, b)))


def need_judge(answers: Iterable[str]) -> bool:
    """Return whether comparing these answers may call the judge, which is slow."""
    plain = {_plain(a) for a in answers}
    return len(plain) > 1 and any(_number(a) is None for a in plain)


def _plain(answer: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", answer)
    return _SPACING.sub("", text).rstrip(".")


def _number(text: str) -> Fraction | None:
    """Return the exact number, or None. Exponents are not read: 1e999999999 has too many digits."""
    if found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        top, bottom = (int(p) for p in parts if p is not None)
        return (-1 if sign == "-" else 1) * Fraction(top, bottom) if bottom else None
    found = _NUMBER.fullmatch(text)
    if not found or not (found[2] or found[3]):
        return None
    whole, rest = (found[2] or "0").replace(",", ""), found[3] or ""
    return (-1 if found[1] == "-" else 1) * Fraction(int(whole + rest), 10 ** len(rest))


@lru_cache(maxsize=4096)
def _comparable(answer: str) -> bool:
    return _number(answer) is not None or _judge.ask(answer, "1") is not None


@lru_cache(maxsize=4096)
def _judged(a: str, b: str) -> bool:
    return bool(_judge.ask(a, b))


class MathJudge:
    """Run math-verify in a process that starts at the first question, and again after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, a: str, b: str) -> bool | None:
        """Return whether the answers are equal; None if that took too much time or memory."""
        with self._lock:
            process = self._process or self._started()
            assert process.stdin is not None
            line = json.dumps({"a": a, "b": b, "seconds": SECONDS}) + "\n"
            try:
                process.stdin.write(line.encode())
                process.stdin.flush()
            except BrokenPipeError:
                said = b""
            else:
                said = _line(process, LONGEST_S)
            if not said:
                self.end()
                return None
            return said == b"1"

    def _started(self) -> subprocess.Popen[bytes]:
        for _ in range(STARTS):
            process = self._start()
            if _line(process, START_SECONDS) == b"ready":
                return process
            self.end()
        raise RunError("math-verify does not start, and answers cannot be compared without; "
                       "is it installed? run `make install`")  # fmt: skip

    def _start(self) -> subprocess.Popen[bytes]:
        # -I: files of this folder must not shadow other modules.
        program = [sys.executable, "-I", str(Path(__file__).with_name("math_judge.py"))]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        atexit.register(self.end)
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self.end)
        if process is not None:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the process's next line, or b"" at the timeout or when the process ended."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    return process.stdout.readline().strip() if poll.poll(seconds * 1000) else b""


_judge = MathJudge()


def end_judge() -> None:
    """End the judge's process, if it runs; the next question starts another."""
    _judge.end()
