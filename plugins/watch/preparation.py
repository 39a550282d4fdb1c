"""Show how far a start has prepared its cartridges, and the time that is left."""

from __future__ import annotations

from cartridge_forge.protocols.step import NOT_BEGUN, Preparation
from cartridge_forge.training.controller import STARTING

SHOWN_AFTER = 2.0  # seconds of preparation
LEAST_SHARE = 0.25  # of a cartridge, before which its reading is most of the time
WHOLE = 1e-6  # shares of a cartridge add up to one but for rounding


class PreparationProgress:
    """Follow the preparation of cartridges: how many are done, and the seconds that the others
    take at the rate so far, None before LEAST_SHARE of one is done. `is_event` is whether another
    cartridge was done since the last call of `moved`."""

    def __init__(self) -> None:
        self._latest = NOT_BEGUN
        self._first: tuple[float, float] | None = None  # when, and how many cartridges
        self.is_event = False
        self.seconds_left: float | None = None

    @property
    def cartridges(self) -> int:
        return int(self._latest.cartridges + WHOLE)

    @property
    def total(self) -> int:
        return self._latest.total

    def moved(self, latest: Preparation, now: float) -> bool:
        """Take the latest news at `now`, monotonic seconds. Returns whether there is progress to
        show: none in the first SHOWN_AFTER seconds, in which most starts end."""
        if self._first is None and latest.share < 1:
            self._first = now, latest.cartridges
        begins = self._latest is NOT_BEGUN
        if self._first is None or latest == self._latest or (begins and latest.share >= 1):
            return False
        start, count = self._first
        if now - start < SHOWN_AFTER:
            return False
        count_shown, self._latest = self.cartridges, latest
        prepared, remaining = latest.cartridges - count, latest.total - latest.cartridges
        has_rate = prepared + WHOLE >= LEAST_SHARE and now > start
        self.seconds_left = round(remaining * (now - start) / prepared, 1) if has_rate else None
        self.is_event = begins or self.cartridges > count_shown
        return True

    @property
    def stage(self) -> str:
        if self._latest.share >= 1:
            return STARTING
        return f"preparing cartridges, {self.cartridges} of {self.total} done"

    @property
    def phase(self) -> str:
        if self.seconds_left is None or self._latest.share >= 1:
            return ""
        seconds = self.seconds_left
        text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return f"about {text} left"
