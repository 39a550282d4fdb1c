"""Measure a machine's rates, on a clock that moves by one second a reading."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.plugins.evaluate.calibration import MachineRates, measure_rates

READER = Path(__file__).parents[3] / "models" / "clinic-reader"


def test_rates_are_tokens_over_seconds() -> None:
    """The trial reads 32 tokens in a second, so a part of 2 s reads 64; a third of 2 s of 64 trains
    42; four rows write six tokens each. Every one takes a second here."""
    ticks = count()
    found = measure_rates(load_model(str(READER)), 4, 8, clock=lambda: float(next(ticks)))
    assert found == MachineRates(forward=64.0, backward=42.0, decode=24.0)
    assert next(ticks) == 8  # four measurements, two readings each


def test_a_slow_machine_is_measured_by_few_tokens() -> None:
    ticks = count(step=1000)
    found = measure_rates(load_model(str(READER)), 1, 8, clock=lambda: float(next(ticks)))
    assert found == MachineRates(forward=0.032, backward=0.032, decode=0.006)
