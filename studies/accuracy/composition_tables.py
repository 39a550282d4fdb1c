"""Tabulate the study of compositions: its arms, and the comparison as it was registered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from cartridge_forge.plugins.statistics.intervals import SHARE_DIFFERENCE, mean_interval
from studies.archive import document
from studies.tables.cells import Units, paired, points, shares

CONDITIONS = ("alone", "first", "last", "four", "eight")
PLAIN, COMPOSED = "alone", "beside others"
READERS = {"charts": "the charts' own KV, composed", "text": "the charts, read as one text"}
MOST_LOSS, MARGIN = 0.10, 0.03


def units(rows: list[Mapping[str, Any]], arm: str) -> dict[str, Units]:
    """Return an arm's share of right answers by condition and chart, and as `beside` the mean of
    `first` and `last`, as `loss` what is lost beside another."""
    signs: dict[tuple[str, Any], str] = {}
    for row in rows:
        if row["arm"] != arm or "question" not in row:
            continue
        for condition in CONDITIONS:
            key = condition, (row["set"], row["chart"])
            signs[key] = signs.get(key, "") + row[condition]
    outcomes: dict[str, Units] = {c: {} for c in (*CONDITIONS, "beside", "loss")}
    for (condition, chart), text in signs.items():
        outcomes[condition][chart] = text.count("1") / len(text)
    for chart, accuracy in outcomes["alone"].items():
        outcomes["beside"][chart] = fmean(outcomes[c][chart] for c in ("first", "last"))
        outcomes["loss"][chart] = accuracy - outcomes["beside"][chart]
    return outcomes


def arms_of(study: str, record: str) -> Iterator[tuple[str, dict[str, Units], str]]:
    """Yield each arm of a record with its units, and its trained tokens as text."""
    rows = document(study, f"{record}.json")["rows"]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        tokens = [row["tokens"] for row in rows if row["arm"] == arm and "tokens" in row]
        yield arm, units(rows, arm), f"{fmean(tokens):,.0f}" if tokens else "-"


def arms(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return each arm's right answers by condition, over its charts, and what is lost."""
    body = []
    for arm, of_arm, tokens in arms_of(study, record):
        cells = [f"{shares(of_arm[c].values())[0]}%" for c in CONDITIONS[1:]]
        accuracy, interval = shares(of_arm["alone"].values())
        loss, of_loss = points(-value for value in of_arm["loss"].values())
        body.append([
            READERS.get(arm, arm), str(len(of_arm["alone"])), f"{accuracy}% ({interval})", *cells,
            f"{loss} ({of_loss})", tokens,
        ])  # fmt: skip
    heads = ["arm", "charts", "alone", "[A, B]", "[B, A]", "among four", "among eight"]
    return [*heads, "beside another less alone, points", "trained tokens a set"], body


def decision(study: str, record: str) -> tuple[list[str], list[list[str]]]:
    """Return the registered comparison: loss beside another, and accuracy alone."""
    by_arm = {arm: of_arm for arm, of_arm, _ in arms_of(study, record)}
    plain, composed = by_arm[PLAIN], by_arm[COMPOSED]
    loss = list(composed["loss"].values())
    saved = paired(plain["loss"], composed["loss"])
    gained = paired(composed["alone"], plain["alone"])
    high = (mean_interval(loss, SHARE_DIFFERENCE) or (-math.inf, math.inf))[1]
    low = (mean_interval(gained, SHARE_DIFFERENCE) or (-math.inf, math.inf))[0]
    top = (mean_interval(gained, SHARE_DIFFERENCE) or (-math.inf, math.inf))[1]
    less = (mean_interval(saved, SHARE_DIFFERENCE) or (-math.inf, math.inf))[0] > 0
    missed = "reached by the mean alone" if fmean(loss) < MOST_LOSS else "missed"
    lower = "lower" if top < 0 else "open"
    body = [
        ["loss beside another, trained beside others", *points(loss),
         "reached" if high < MOST_LOSS else missed],
        ["loss of those trained alone less that", *points(saved), "less" if less else "open"],
        ["alone: trained beside others less trained alone", *points(gained),
         "no lower" if low > -MARGIN else lower],
    ]  # fmt: skip
    return ["what", "points", "95% interval", "by the rule"], body
