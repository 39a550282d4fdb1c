"""The fake provider: its faults come at their rates, and its rules err at theirs."""

from collections import Counter

import pytest

from cartridge_forge.plugins.replay.fake_provider.app import (
    FaultRates,
    ProviderRequest,
    sometimes_right,
    uniform,
)


def test_rates_are_met_and_do_not_depend_on_order() -> None:
    faults = FaultRates(rate_limit=0.1, stall=0.05, cut_off=0.05, refuse=0.2, seed=3)
    drawn = [faults.drawn(str(i)) for i in range(20_000)]
    shares = {name: n / len(drawn) for name, n in Counter(drawn).items()}
    # Five standard deviations of a share of 20,000 are at most 0.018.
    expected = {"": 0.6, "rate_limit": 0.1, "stall": 0.05, "cut_off": 0.05, "refuse": 0.2}
    assert shares == pytest.approx(expected, abs=0.018)
    assert drawn[:50] == [faults.drawn(str(i)) for i in range(50)]
    assert drawn[:50] != [FaultRates(refuse=0.2, seed=4).drawn(str(i)) for i in range(50)]


def test_a_rule_that_is_right_at_a_set_rate() -> None:
    def asked(i: int, model: str) -> ProviderRequest:
        return ProviderRequest(model, "s", str(i))

    mostly = sometimes_right(lambda _: "right", lambda _: "wrong", 0.8, seed=1)
    said = [mostly(asked(i, "a")) for i in range(5000)]
    assert said.count("right") / 5000 == pytest.approx(0.8, abs=0.03)
    other = [mostly(asked(i, "b")) for i in range(5000)]
    both = sum(x == y == "wrong" for x, y in zip(said, other, strict=True))
    assert both / 5000 == pytest.approx(0.04, abs=0.015)  # models err each for itself
    assert 0 <= uniform(0, "x") < 1
