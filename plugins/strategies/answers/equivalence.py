r"""Compare mathematical answers: 0.5, \frac{1}{2}, 1/2, 50\% and 5\times10^{-1} are equal.

    same text, but for spacing and $   -> equal
    both numbers, or lists of numbers  -> by value, rounded; expressions are evaluated by the judge
    else                               -> math-verify, in a separate process  (`math_judge`)

Values are rounded to DIGITS decimals, smaller ones to as many significant digits, so that equality
of numbers is an equivalence: \sqrt2 and 1.414214 are equal, and 6.67e-11 and 1.38e-23 are not. A
percentage is its value: 50\% is 0.5 and not 50. (1, 2), [1, 2] and \{1, 2\} differ; braces hold a
set, and so does a list without brackets. An equation x = 3 is its value 3. Signs and words of
currencies do not count.

Plain numbers need no judge; only its process imports sympy. A pair that the judge cannot settle in
time is not equal. An answer that it cannot even evaluate (a power tower) equals none and is tried
once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)

# Of the processor, so that a stalled machine changes no verdict; a comparison takes milliseconds.
SECONDS = 2.0
LONGEST_S = 60.0  # wall time
MOST_BYTES = 2 << 30
LONGEST = 300  # characters; longer answers are not compared by value
PRECISION = 2000  # digits: of LONGEST characters and an exponent of three digits on either side
DIGITS = 6

_NUMBER = re.compile(
    r"([+-]?)(?:(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?)"
    r"(?:e([+-]?\d{1,3})|(?:\\times|\\cdot|\*|x)10\^\{?([+-]?\d{1,3})\}?)?(%?)",
    re.IGNORECASE,
)
_POWER = re.compile(r"([+-]?)10\^\{?([+-]?\d{1,3})\}?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{(\d+)\}\{(\d+)\}|\\frac(\d)(\d)|(\d+)/(\d+))")
_MIXED = re.compile(r"([+-]?)(\d+)\\frac(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))")
_SPACING = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|\b(?:US)?\\?\$|\\?\$|[€£]"
    r"|\s+(?![A-Za-z])|(?<![A-Za-z])\s+"  # the space in "\pi r" parts two names
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\{([^{}]*)\}")
_OR = re.compile(r",?\s*\\(?:text|mathrm)\{\s*(?:or|and)\s*\}")  # between solutions
_MONEY = re.compile(r"(?<=\d)(?:US)?(?:dollars?|euros?|USD|EUR)$", re.IGNORECASE)
_PERCENT = re.compile(r"(?<=\d)percent$", re.IGNORECASE)
_INFINITY = re.compile(r"([+-]?)\\infty")
_LIST = re.compile(r"(\(|\[|\\?\{)(.*?)(\)|\]|\\?\})", re.DOTALL)
_SIGNS = str.maketrans({"\u2212": "-", "\u00d7": r"\times", "\u00b7": r"\cdot", "\u22c5": r"\cdot",
                        "\u221e": r"\infty", "\u222a": r"\cup"})  # fmt: skip
Value = Fraction | tuple["Value | str", ...]


def same_math(a: str, b: str) -> bool:
    """Return whether two answers, as LaTeX or plain text, are equal. Blocks for `SECONDS` or a
    little more. Raises RunError if the judge's process cannot start."""
    a, b = _plain(a), _plain(b)
    if a == b:
        return True
    if max(len(a), len(b)) > LONGEST or not a or not b:
        return False
    first, right = _value(a), _value(b)
    if first is not None and right is not None:
        return first == right
    # Equal numbers are one text to the judge, and so equal the same others.
    a, b = (str(v) if isinstance(v, Fraction) else t for v, t in ((first, a), (right, b)))
    return _evaluated(a) is not None and _evaluated(b) is not None and _judged(*sorted((a, b)))


def need_judge(answers: Iterable[str]) -> bool:
    """Return whether comparing these answers may call the judge, which is slow."""
    plain = {_plain(a) for a in answers}
    return len(plain) > 1 and any(_number(a) is None for a in plain)


def plain_math(answer: str) -> str:
    r"""Return an equal answer in digits, as programs read it: "28080" of "28,080", `\$28{,}080.00`
    and `2.808\times10^{4}`. What is no such number loses its spacing, currency and `\text{}`
    alone: a fraction stays one, and nothing is computed."""
    text = _plain(answer)
    if (number := _digits(text)) is None:
        return text
    with localcontext(prec=PRECISION):  # exact: the divisor is a power of ten
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


def _plain(answer: str) -> str:
    text = re.sub(r"\\[dt]frac", r"\\frac", answer.translate(_SIGNS))
    text = re.sub(r"(?<![\d.,])(\d+)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}", text)
    text = _OR.sub(",", text)
    if wrapped := _WRAPPED.fullmatch(text.strip()):
        text = wrapped[1]
    text = _SPACING.sub("", text).replace(r"\%", "%").replace("{,}", ",").rstrip(".")
    return _MONEY.sub("", _PERCENT.sub("%", text))


def _value(text: str) -> Value | None:
    """Return what an answer is equal by: a rounded number, or of a list its brackets and values, of
    a set in order; None for another."""
    if (number := _number(text)) is not None:
        return _rounded(number)
    if infinity := _INFINITY.fullmatch(text):
        return (infinity[1].strip("+"), "infinity")
    if r"\cup" in text:
        return _set([_value(part) for part in text.split(r"\cup")], "union")
    if "," in text and len(parts := _parts(text)) > 1:  # solutions, in any order
        return _set([_value(part) for part in parts])
    if (listed := _LIST.fullmatch(text)) and "," in listed[2]:
        values = [_value(part) for part in _parts(listed[2])]
        if listed[1].endswith("{"):
            return _set(values)
        present = [v for v in values if v is not None]
        return (listed[1], *present, listed[3]) if len(present) == len(values) else None
    evaluated = _evaluated(text)
    return _rounded(Fraction(evaluated)) if evaluated else None


def _set(values: list[Value | None], kind: str = "set") -> Value | None:
    """Return what a set is equal by: its kind and its values in order, None where one has none."""
    present = {v for v in values if v is not None}
    return (kind, *sorted(present, key=repr)) if None not in values else None


def _parts(text: str) -> list[str]:
    """Return the items of a list, whose commas inside of brackets part none."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _number(text: str) -> Fraction | None:
    """Return the exact number, or None. An exponent has at most three digits: 1e999999999 has too
    many to write."""
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        top, bottom = (int(p) for p in parts if p is not None)
        return (-1 if sign == "-" else 1) * Fraction(top, bottom) if bottom else None
    if match := _MIXED.fullmatch(text):  # 2 1/3
        sign, digits, *parts = match.groups()
        top, bottom = (int(p) for p in parts if p is not None)
        return (
            (-1 if sign == "-" else 1) * (int(digits) + Fraction(top, bottom)) if bottom else None
        )
    if match := _POWER.fullmatch(text):
        return (-1 if match[1] == "-" else 1) * Fraction(10) ** int(match[2])
    return _digits(text)


def _digits(text: str) -> Fraction | None:
    """Return the exact number that is written in digits, with an exponent and a percent sign or
    without, or None."""
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST else None
    if not match or not (match[2] or match[3]):
        return None
    digits, decimals = (match[2] or "0").replace(",", ""), match[3] or ""
    number = Fraction(int(digits + decimals), 10 ** len(decimals)) * Fraction(10) ** int(
        match[4] or match[5] or 0
    )
    return (-1 if match[1] == "-" else 1) * number / (100 if match[6] else 1)


def _rounded(number: Fraction) -> Fraction:
    """Return a number rounded to DIGITS decimals, or to as many significant digits where that is
    finer."""
    if number == 0:
        return number
    exponent = (Decimal(number.numerator) / Decimal(number.denominator)).adjusted()
    return round(number, max(DIGITS, DIGITS - 1 - exponent))


@lru_cache(maxsize=4096)
def _evaluated(answer: str) -> str | None:
    """Return the number that an answer is, as `Fraction` reads it, "" where it is none; None where
    that took the judge too much."""
    return _ask(answer)


@lru_cache(maxsize=4096)
def _judged(a: str, b: str) -> bool:
    return _ask(a, b) == "1"


def _ask(a: str, b: str | None = None) -> str | None:
    """Return the judge's verdict; None if that took too much time or memory."""
    try:
        return str(_judge.call({"a": a, "b": b}))
    except BrokenLimitError:
        return None


_judge = LimitedProcess(
    "cartridge_forge.plugins.strategies.answers.math_judge:judge",
    ProcessLimits(cpu_s=SECONDS, wall_s=LONGEST_S, memory=MOST_BYTES),
)


def end_judge() -> None:
    """End the judge's process, if it runs; the next question starts another."""
    _judge.end()
