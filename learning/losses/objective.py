"""List the loss channels, and select those with a nonzero weight.

    total = sum over channels of  weight * total / denominator

A channel of weight 0 is not packed, checked or computed, so the step is bit for bit the step
without it. A channel without data contributes 0 and no gradient.
"""

from __future__ import annotations

from learning.losses.channel import LossChannel
from learning.losses.doc_kl import DocKL
from learning.losses.dpo import ReplayDPO
from learning.losses.grpo import GRPO
from learning.losses.sdpo import SDPO
from protocols.spec.objective import LossSpec, ObjectiveSpec

CHANNELS: dict[str, type[LossChannel]] = {
    "doc_kl": DocKL,
    "grpo": GRPO,
    "sdpo": SDPO,
    "replay_dpo": ReplayDPO,
}


def active_channels(objective: ObjectiveSpec, loss: LossSpec | None = None) -> list[LossChannel]:
    """Return the channels of nonzero weight, in the order of CHANNELS, before any warm-up
    (`LossChannel.at`)."""
    loss = loss or LossSpec()
    made = [channel.from_spec(objective, loss) for channel in CHANNELS.values()]
    return [channel for channel in made if channel.weight]
