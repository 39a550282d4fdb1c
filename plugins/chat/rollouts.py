"""Count, name and hash what recipes record of a step and of its answers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from cartridge_forge.protocols.step import SEPARATOR, Completion


def refill_counts(wanted: int, sampled: int, used: int) -> dict[str, int]:
    """Return what refilling did in a step that wanted so many tasks: tasks dropped, because their
    rewards do not vary; tasks sampled in further rounds; and tasks that are still missing."""
    return {
        "refill/dropped": sampled - used,
        "refill/sampled": sampled - wanted,
        "refill/missing": max(0, wanted - used),
    }


def contexts_of(about: str) -> tuple[str, ...]:
    """Return the contexts that are read as one text of this name."""
    return tuple(about.split(SEPARATOR))


def drawn_steps(names: Sequence[str], per_step: int, steps: int) -> dict[str, int]:
    """Return in how many of `steps` each name is drawn, where names take turns, `each` a step."""
    drawn = Counter(
        name
        for step in range(steps)
        for name in {names[(step * per_step + i) % len(names)] for i in range(per_step)}
    )
    return {name: drawn[name] for name in names}


HASH_DIGITS = 12


def hash_of(*texts: str) -> str:
    """Return the first HASH_DIGITS hexadecimal digits of the SHA-256 of texts."""
    joined = "\x00".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.sha256(joined).hexdigest()[:HASH_DIGITS]


def mean_nll(completion: Completion, tokens: int) -> float | None:
    """Return the mean negative log-probability of a prompt's last `tokens` tokens, in nats; None
    where the completion has no log-probabilities of them."""
    read = completion.prompt_logprobs[-tokens:] if tokens else ()
    return -sum(read) / tokens if read and len(read) == tokens else None
