"""Count the work of this process, so that a slow first answer is not taken for a stall.

The models add the tokens that pass each of their layers. The heartbeat beside an actor sends the
count, and the watchdog (services.telemetry.watchdog) looks only at whether it rises.
"""

_done = 0


def count(tokens: int) -> None:
    """Add the tokens that passed a layer, or were sampled."""
    global _done
    _done += tokens


def done() -> int:
    """Return the work of this process so far."""
    return _done
