"""The tiny clerk: what its corpus shows, and what the shipped model makes of it."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import pytest
from rooms.environments.clinic_setup import Parts, episodes

from models.pretrain.clerk_tasks import GUESSING, INFORMED, ErrorRates
from models.pretrain.measure import measure_clerk
from models.pretrain.reader_tasks import TaughtMessage


def counted(drawn: list[list[TaughtMessage]]) -> tuple[Counter[str], int, int]:
    """Mistakes by kind; the calls at which any could happen; those before the note was read.

    None can right after a mistake, or in a call that is not taught.
    """
    found: Counter[str] = Counter()
    free = unread = 0
    for said in drawn:
        calls = [s for s in said if s.role == "assistant"]
        before = ["", *(c.kind for c in calls)]
        read = False
        for call, last in zip(calls, before, strict=False):
            if call.kind and last not in GUESSING:
                free += 1
                unread += not read
                found[call.kind] += call.kind in GUESSING
            read = read or call.kind == "read"
    return found, free, unread


@pytest.mark.parametrize(("known", "rates"), [(False, GUESSING), (True, INFORMED)])
def test_mistakes_come_at_their_rates(known: bool, rates: ErrorRates) -> None:
    found, free, unread = counted(episodes(f"rates/{known}", known, False, 3000))
    for name, rate in rates.items():
        chances = unread if name in ("blind_answer", "wrong_note") else free
        deviation = (chances * rate * (1 - rate)) ** 0.5
        assert abs(found[name] - chances * rate) < 4 * deviation, name
    assert min(found[name] for name in rates) > 0


def test_the_shipped_clerk_needs_the_handbook_and_follows_hints(clerk: Parts) -> None:
    """Broad bounds: of 60 cases, the deviation of a share is up to 6 points."""
    model, tokenizer = clerk
    shares = measure_clerk(model, tokenizer, Namespace(cases=60, fields=12, seed=1_000_003))
    assert 0.1 <= shares["none"] <= 0.5
    assert shares["none"] < shares["cut"] < shares["handbook"]
    assert shares["handbook"] >= 0.85
    assert shares["hinted"] >= 0.85
