"""A cartridge's update is torch's Adam, to the bit, and imports no compiler."""

from __future__ import annotations

import subprocess
import sys

import torch

from learning.progress import CartridgeProgress, LearningRateSchedule

SHAPE = (2, 2, 1, 3, 4)
SCHEDULE = LearningRateSchedule(lr=0.1, warmup_steps=2, steps=5)
UPDATE = """
import sys, torch
from learning.progress import CartridgeProgress, LearningRateSchedule

parameter = torch.nn.Parameter(torch.zeros(4))
parameter.grad = torch.ones(4)
CartridgeProgress(parameter, LearningRateSchedule(0.1, 0, 5)).update(9.0)
assert parameter.tolist() != [0.0] * 4
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


def test_updates_are_those_of_torchs_optimizer() -> None:
    """Five of them, with a pause of the process after two: the moments go through `restart`."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=draw)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    progress, adam = CartridgeProgress(ours, SCHEDULE), torch.optim.Adam([theirs], lr=0.0)
    for step in range(5):
        ours.grad = torch.randn(SHAPE, generator=draw)
        theirs.grad = ours.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], 5.0)
        adam.param_groups[0]["lr"] = SCHEDULE.at(step)
        adam.step()
        assert progress.update(5.0) == norm.item()
        progress.steps += 1
        assert torch.equal(ours, theirs)
        assert progress.moments.keys() == adam.state[theirs].keys()
        for name, moment in adam.state[theirs].items():
            assert torch.equal(progress.moments[name], moment), name
        if step == 1:
            moments = progress.moments
            progress = CartridgeProgress(ours, SCHEDULE)
            progress.restart(SCHEDULE, since=2, steps=2, moments=moments)


def test_an_update_imports_no_compiler() -> None:
    """Making an object of `torch.optim.Adam` imports 900 modules of it."""
    told = subprocess.run(
        [sys.executable, "-c", UPDATE], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.split() == []
