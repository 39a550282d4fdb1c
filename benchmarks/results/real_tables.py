"""Make the tables of a real model's right answers. The texts of the real articles are no part of
the repository: what is kept of each of their runs is what its results.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results import records
from forge_run.console import duration, interval, percent

HOME = Path(__file__).parent
ARMS = ("none", "untrained", "on_policy", "document")


def articles(record: str) -> tuple[Sequence[str], list[list[str]]]:
    """Return the losses of each article's right answers arm by arm, nats a token, and the share of
    the gap that its cartridge closed."""
    heads = [
        "article", "tokens", "questions", "none", "untrained", "cartridge", "document",
        "gap closed (95%)", "untrained closes", "trained tokens", "whole run",
    ]  # fmt: skip
    kept = json.loads((HOME / f"{record}.json").read_text())["articles"]
    body = [_article(name, one) for name, one in kept.items()]
    means = (
        percent(fmean(one["gold"]["arms"][arm]["closed"] for one in kept.values()))
        for arm in ("on_policy", "untrained")
    )
    closed, before = means
    blank = [""] * 6
    return heads, [*body, ["mean", *blank, f"**{closed}**", before, "", ""]]


def right_answers(record: str) -> tuple[Sequence[str], list[list[str]]]:
    """Return each arm's loss of the right answers of a kept run, nats a token, and the share of the
    gap that it closed."""
    kept = records.whole(record, "results.json", records.HOME)["gold"]
    heads = ["arm", "questions", "loss of the right answers", "gap closed", "95%"]
    body = [
        [arm, str(kept["n"]), f"{own['nll']:.2f}", percent(own["closed"]), interval(own["ci95"])]
        for arm in ARMS
        for own in [kept["arms"][arm]]
    ]
    return heads, body


def _article(name: str, one: Mapping[str, Any]) -> list[str]:
    found = one["gold"]["arms"]
    trained = found["on_policy"]
    return [
        name, f"{one['tokens']:,}", str(one["gold"]["n"]),
        *(f"{found[arm]['nll']:.2f}" for arm in ARMS),
        f"**{percent(trained['closed'])}** ({interval(trained['ci95'])})",
        percent(found["untrained"]["closed"]), f"{one['tokens_trained']:,}",
        duration(one["wall_seconds"]),
    ]  # fmt: skip
