"""The tables of the study "on policy", from records of two documents made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms.kept_runs import HandmadeArchive

from studies import archive
from studies.tables.recorded import document_arms, document_comparisons, document_outcomes

ARMS = {
    "document": "document", "untrained": "cold", "offline": "cold, offline",
    "on_policy": "cold, on policy",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the cold runs with forward KL. On policy 3 and 4 of 4 are right, offline 2 and 2; their
    passages have perplexity e and e**2 on policy, e**0.5 and e**0.5 offline."""
    monkeypatch.setattr(archive, "HOME", tmp_path)
    document_outcomes.cache_clear()
    study = HandmadeArchive("on_policy")
    right = {300: {"on_policy": 3, "offline": 2}, 301: {"on_policy": 4, "offline": 2}}
    nats = {300: {"on_policy": 1.0, "offline": 0.5}, 301: {"on_policy": 2.0, "offline": 0.5}}
    for seed, counts in right.items():
        answers = [
            {"arm": arm, "sampled": sampled, "right": float(i < counts.get(arm, 0))}
            for arm in ARMS
            for sampled in (False, True)
            for i in range(4)
        ]
        kinds = {"on_policy": "hybrid"} if seed == 301 else {}  # as after a warm start
        measured = [
            {"kind": kinds.get(arm, arm), "passages": {"value": math.exp(value), "tokens": 100}}
            for arm, value in nats[seed].items()
        ]
        study.add(
            "sweep", seed, ARMS, {"answers": answers}, eval={"rows": measured},
            spec={"learn": {"loss": {"direction": "forward"}}},
        )  # fmt: skip
    study.pack()
    yield
    document_outcomes.cache_clear()


def test_arms_have_both_outcomes_by_document() -> None:
    """75% and 100%: 87.5 -+ 158.8, cut to 0 to 100. Nats 1 and 2: 1.5 -+ 12.706 * 0.5."""
    _, body = document_arms("on_policy", "sweep")
    rows = {row[0]: row[1:] for row in body}
    assert list(rows) == ["document", "cold", "cold, offline", "cold, on policy"]
    assert rows["cold, on policy"] == [
        "forward", "2", "87.5", "0.0 to 100.0", "1.50", "-4.85 to 7.85",
    ]  # fmt: skip
    assert rows["cold, offline"] == ["forward", "2", "50.0", "50.0 to 50.0", "0.50", "0.50 to 0.50"]
    assert rows["cold"][-2:] == ["", ""]


def test_the_claim_is_decided_over_documents() -> None:
    """Differences 25 and 50 points: t is 37.5 / 12.5 = 3 at one degree of freedom, so p is
    1 - 2 atan(3) / pi = 0.205; 0.5 and 1.5 nats: t is 2 and p 0.295. By Holm the first doubles and
    the second is at least that."""
    _, body = document_comparisons("on_policy", "sweep", "primary")
    arms = ["cold, on policy over cold, offline", "forward"]
    assert body == [
        [*arms, "right, points", "2", "+37.5", "-121.3 to +196.3", "0.410"],
        [*arms, "nats a token", "2", "+1.00", "-5.35 to +7.35", "0.410"],
    ]
    _, others = document_comparisons("on_policy", "sweep", "secondary")
    assert len(others) == 12
    assert all(row[3:] == ["0", "", "", "1.000"] for row in others)
