"""Hold how far the training of one cartridge has come: its optimizer, schedule and counts.

Every cartridge of a bank has these of its own. A step that has no loss-bearing token for a
cartridge changes none of them, so what a cartridge becomes does not depend on the others of a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from learning.losses.balance import GradientBalance


@dataclass(frozen=True)
class LearningRateSchedule:
    """Compute the learning rate over `steps`: linear warm-up, then cosine down to a tenth of the
    peak."""

    lr: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """Return the learning rate of 0-based `step`."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        rest = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / rest)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class HeldProgress:
    """Hold copies of what one optimizer update changes."""

    numbers: Tensor
    moments: Mapping[str, Tensor]
    balance: Mapping[str, Any]


def tensor_rms(kv: Tensor) -> Tensor:
    """Return the root mean square of each layer's keys and of its values, [L, 2, 1, 1, 1], of a
    cartridge [L, 2, H_kv, P, D]."""
    return kv.detach().square().mean(dim=(2, 3, 4), keepdim=True).sqrt()


class CartridgeProgress:
    """Train one parameter with Adam of its own, without weight decay.

    steps    steps of the arm that trained the cartridge
    since    the version that last changed its numbers
    balance  of the channels' gradients; None where the weights are taken as they are
    scale    what the learning rate is multiplied by, broadcast over the parameter; None: nothing
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        schedule: LearningRateSchedule,
        balance: GradientBalance | None = None,
        scale: Tensor | None = None,
    ) -> None:
        self.parameter, self.schedule, self.balance = parameter, schedule, balance
        self._scale = scale
        self.since, self.steps = -1, 0
        self._moments: dict[str, Tensor] = {}

    @property
    def lr(self) -> float:
        """Return the learning rate of the cartridge's next step."""
        return self.schedule.at(self.steps)

    @property
    def moments(self) -> dict[str, Tensor]:
        """Return Adam's tensors by name; none before the first update."""
        return self._moments

    def restart(
        self,
        schedule: LearningRateSchedule,
        since: int,
        steps: int = 0,
        moments: Mapping[str, Tensor] | None = None,
        balance: Mapping[str, Any] | None = None,
    ) -> None:
        """Stand at these counts, moments (copied) and means of the balance; by default at the start
        of an arm. The parameter is not changed."""
        self.schedule, self.since, self.steps = schedule, since, steps
        self._moments = {
            # The count of updates stays on the host, wherever the moments are.
            name: t.clone() if name == "step" else t.to(self.parameter, copy=True)
            for name, t in (moments or {}).items()
        }
        if self.balance is not None:
            self.balance.restore(balance or {})

    def update(self, clip: float) -> float:
        """Clip the parameter's gradient to the norm `clip` and make one update; return the norm
        before."""
        norm = torch.nn.utils.clip_grad_norm_([self.parameter], clip)
        if self._scale is None:
            self._adam()
            return norm.item()
        before = self.parameter.detach().clone()
        self._adam()
        with torch.no_grad():  # Adam's step is proportional to its rate, without weight decay
            self.parameter.copy_(before.addcmul(self.parameter - before, self._scale))
        return norm.item()

    @torch.no_grad()
    def _adam(self) -> None:
        """Make one step of Adam, by the function that `torch.optim.Adam` calls. An object of that
        class imports torch's compiler when it is made: 900 modules that nothing else here needs."""
        parameter, held = self.parameter, self._moments
        if not held:
            held["step"] = torch.tensor(0.0)
            held |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        assert parameter.grad is not None
        adam(
            [parameter], [parameter.grad], [held["exp_avg"]], [held["exp_avg_sq"]], [],
            [held["step"]], lr=self.lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def hold(self) -> HeldProgress:
        """Return copies of what an update changes."""
        return HeldProgress(
            self.parameter.detach().clone(),
            {name: tensor.clone() for name, tensor in self.moments.items()},
            {} if self.balance is None else self.balance.state(),
        )

    def take_back(self, held: HeldProgress) -> None:
        """Return to what `hold` copied."""
        with torch.no_grad():
            self.parameter.copy_(held.numbers)
        self.parameter.grad = None
        self._moments = dict(held.moments)
        if self.balance is not None:
            self.balance.restore(held.balance)
