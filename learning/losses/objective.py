"""Open the loss channels with a nonzero weight.

    total = sum over channels of  weight * total / denominator

A channel of weight 0 is not even imported, so the step is bit for bit the step without it. A
channel without data contributes 0 and no gradient.
"""

from __future__ import annotations

from cartridge_forge.learning.losses.channel import LossChannel
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.objective import LossSpec, ObjectiveSpec


def active_channels(objective: ObjectiveSpec, loss: LossSpec | None = None) -> list[LossChannel]:
    """Return the channels of nonzero weight, in the order of `objective.weights`, before any
    warm-up (`LossChannel.at`). Raises SpecError for one whose plug-in is not installed."""
    loss = loss or LossSpec()
    return [
        resolve("channels", name).from_spec(objective, loss)
        for name, weight in objective.weights.items()
        if weight
    ]
