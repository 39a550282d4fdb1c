"""Keep the words of texts beside the cartridges that stand for them, to route questions by.

    {"schema": 1, "terms": {"patient_01": [{"insulin": 3, "the": 41}, ...]}, "sha256": "9f86..."}

A list has one entry for each passage that a cartridge learned. The words' order is not kept, and no
number says what they mean. The file is JSON with a checksum of its own; a run has one for all its
cartridges, a version in a cartridge store one of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import write_atomically

SCHEMA = 1
MOST = 2**31  # of one term in a passage

TermCounts = Mapping[str, int]  # of a passage: how often it has each term
Passages = Sequence[TermCounts]


def write_terms(file: Path, terms: Mapping[str, Passages]) -> None:
    """Write the passages' terms by cartridge; the file is replaced whole."""
    plain = {name: [dict(counts) for counts in passages] for name, passages in terms.items()}
    content = {"schema": SCHEMA, "terms": plain, "sha256": _sha256(plain)}
    write_atomically(file, json.dumps(content, ensure_ascii=False, sort_keys=True) + "\n")


def read_terms(file: Path) -> dict[str, Passages]:
    """Return the passages' terms by cartridge, {} where there is no file. Raises DataError for a
    file that is not as it was written."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}, and this version reads {SCHEMA}")
        terms: dict[str, Passages] = content["terms"]
        if content["sha256"] != _sha256(terms):
            raise ValueError("it does not match its own checksum")
        for counts in chain.from_iterable(terms.values()):
            if not all(type(n) is int and 0 < n < MOST for n in counts.values()):
                raise ValueError("a count is no number from 1")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file} has no readable words ({error}); write them anew: forge cartridges words"
        ) from error
    return terms


def _sha256(terms: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(terms, sort_keys=True).encode()).hexdigest()
