"""Read Kubernetes' quantities: `"500m"` is a half, `"2Gi"` is 2147483648."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from deploy.checks.constraints import QUANTITY

_POWERS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    **{letter: Decimal(1000) ** (i + 1) for i, letter in enumerate("kMGTPE")},
    **{f"{letter}i": Decimal(1024) ** (i + 1) for i, letter in enumerate("KMGTPE")},
}  # fmt: skip


def quantity(text: Any) -> Decimal | None:
    """Return the number that a quantity means; None for what is no quantity."""
    word = str(text)
    if isinstance(text, bool) or not re.fullmatch(QUANTITY, word):
        return None
    found = re.fullmatch(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+|[a-zA-Z]*)", word)
    assert found is not None, "of the form just matched"
    number, suffix = found.groups()
    if suffix in _POWERS:
        return Decimal(number) * _POWERS[suffix]
    return Decimal(f"{number}{suffix}")
