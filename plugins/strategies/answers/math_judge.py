"""Evaluate and compare LaTeX answers in a process of its own (`plugins.host.limited_process`): a
power tower such as 9^{9^{9^9}} is computed in C code, where Python exceptions do not arrive."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from sympy import Eq, Expr, N, Symbol, nsimplify

DIGITS = 30  # of a number that has endlessly many
DECIMALS = 12  # to which math-verify rounds in what is no number itself


@lru_cache(maxsize=1024)
def _read(answer: str) -> tuple[Any, ...]:
    return tuple(parse(f"${answer}$", parsing_timeout=None))


def _same(a: str, b: str) -> bool:
    """Compare both ways: math-verify accepts "x = 3" for a gold 3, but not 3 for a gold "x = 3"."""
    first, right = list(_read(a)), list(_read(b))
    return any(
        verify(gold, answer, float_rounding=DECIMALS, timeout_seconds=None)
        for gold, answer in ((first, right), (right, first))
    )


def _number(answer: str) -> str:
    """Return the real number that an answer is, or an equation "x = ..." has; "" where it is
    none."""
    expression = next(iter(_read(answer)), None)
    if isinstance(expression, Eq) and isinstance(expression.lhs, Symbol):
        expression = expression.rhs
    if not isinstance(expression, Expr):
        return ""
    value = expression.doit()
    if not value.is_number or not value.is_real or not value.is_finite:
        return ""
    exact = nsimplify(value, rational=True) if value.is_Float else value
    return str(exact) if exact.is_Rational else str(N(value, DIGITS))


def judge(request: Mapping[str, Any], data: bytes) -> str:
    """Return "1" where the answers `a` and `b` are equal, else "0"; without `b` the number that `a`
    is: "1.41421356237309504880168872421" of "\\sqrt{2}", "" of no real number."""
    a, b = request["a"], request["b"]
    try:
        return _number(a) if b is None else str(int(_same(a, b)))
    except Exception:  # sympy may raise anything; the answers are then not known to be equal
        return "" if b is None else "0"


logging.disable(logging.CRITICAL)  # of disabled timeouts, which the process's limits replace
_same(r"\frac{1}{2}", "x+1")  # builds the parser's tables before the first question
