"""Stop strings, which are never part of what is told, nor is what may be their beginning. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on up to the first stop string, however the text is cut into pieces.

    The stop that is complete first counts; of two that end at one place, the longer one. `cut` is
    where it begins, in characters from the start of the text; None while none was met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._told = 0
        self.cut: int | None = None

    def feed(self, text: str) -> str:
        """What may be told now."""
        if self.cut is not None:
            return ""
        held = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            _, at = min(found)
            self.cut = self._told + at
            self._held = ""
            return self._tell(held[:at])
        keep = max((_beginning(held, s) for s in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return self._tell(held[: len(held) - keep])

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return self._tell(held)

    def _tell(self, text: str) -> str:
        self._told += len(text)
        return text


def _beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins, and does not complete, the stop."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0
    )
