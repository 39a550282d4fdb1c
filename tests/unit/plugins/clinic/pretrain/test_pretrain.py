"""Training of the tiny models: the rates by time, and the rung of a step."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from models.pretrain.train import Curriculum, draw_rung, set_rates


@pytest.mark.parametrize(
    ("step", "left", "expected"),
    [
        (0, 1.0, 1 / 50),  # warm-up by steps
        (24, 0.9, 1 / 2),
        (49, 0.5, 1.0),
        (500, 0.4, 1.0),
        (500, 0.1, 1 / 4),  # cooling by time
        (24, 0.1, 1 / 8),
        (500, 0.0, 0.0),
    ],
)
def test_rates_warm_up_by_steps_and_cool_by_time(step: int, left: float, expected: float) -> None:
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (1.0, 0.1)]
    set_rates(list(optimizers), [2.0, 8.0], step, left, cooling=0.4)
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    assert rates == pytest.approx([2.0 * expected, 8.0 * expected])


def test_one_step_in_five_is_from_any_rung_so_far() -> None:
    rng = random.Random("rungs")
    drawn = Counter(draw_rung(rng, 3) for _ in range(4000))
    assert set(drawn) == {0, 1, 2, 3}
    assert abs(drawn[3] - 3400) < 100  # 0.8 + 0.2 / 4; one standard deviation is 23
    assert {draw_rung(rng, 0) for _ in range(20)} == {0}


def test_the_curriculum_climbs_at_its_mark_and_stops_at_the_top() -> None:
    climber = Curriculum(0, top=1)
    steps = 0
    while climber.rung == 0:
        climber.update(1.0)
        steps += 1
    # 1 - 0.95 ** n passes 0.85 at n = 37; the share then begins anew.
    assert (steps, climber.share) == (37, 0.6)
    for _ in range(100):
        climber.update(1.0)
    assert climber.rung == 1
