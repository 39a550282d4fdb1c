"""Describe how far our computation of a model is from its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cartridge_forge.protocols.plugins import optional

BOUND = 1e-4  # nats, and of a moved key its part: what float32 rounds


@dataclass(frozen=True)
class ModelVerdict:
    """Describe how far our computation of a model is from its own forward pass.

    `nats` holds the largest difference of a log-probability in each way of computing, and `bound`
    the nats that are rounding. `refusal` is empty for a model that is computed right, and `unmoved`
    for one whose keys can be moved to other positions, as composed cartridges need; else each says
    why and what to do. `layers` of `of_layers` were computed.
    """

    model: str
    family: str = ""
    nats: Mapping[str, float] = field(default_factory=dict)
    bound: float = BOUND
    refusal: str = ""
    unmoved: str = ""
    layers: int = 0
    of_layers: int = 0
    seconds: float = 0.0


def kept_verdict(path: str) -> ModelVerdict | None:
    """Return the verdict that is kept on a model; None where there is none, or no model."""
    read = optional("hooks", "kept_verdict")
    verdict: ModelVerdict | None = None if read is None else read(path)
    return verdict
