"""Report the external teachers: their votes and what they cost.

Reads votes.jsonl (states, verdicts with every vote, pairs) and teachers.jsonl (the ledger) row by
row, and keeps counts and a few verdicts as an audit trail. What happened to states and pairs
afterwards is counted in metrics.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cartridge_forge.plugins.chat.messages import NANO
from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import number, percent
from cartridge_forge.plugins.watch.report.template import Block, Row, shortened

AUDITED = 2  # pairs shown of the first and of the last
LAST_MESSAGES = 4  # of a state
# The keys "teachers/..." of a row's episodes that are not in votes.jsonl.
LATER = {
    "trained": "pairs trained on",
    "given_up": "pairs too old to train on",
    "unsayable": "pairs that the student has no words for",
    "too_late": "states whose verdict came too late",
    "unanswered": "states lost with their replica",
}


@dataclass
class TeacherTally:
    """Count one teacher's votes over the verdicts of a run."""

    asked: int = 0
    valid: int = 0
    abstained: Counter[str] = field(default_factory=Counter)
    judged: int = 0  # valid votes on verdicts with a majority
    agreed: int = 0  # those that voted for it
    latency_s: float = 0.0  # of the valid votes, together


def teachers(votes: Iterable[Row], ledger: Iterable[Row], metrics: Iterable[Row]) -> list[Block]:
    """Return votes and costs by teacher; nothing where no teacher was asked."""
    tallies: dict[str, TeacherTally] = {}
    reasons: Counter[str] = Counter()
    because: Counter[str] = Counter()
    first: list[tuple[Row, Row | None]] = []
    last: list[tuple[Row, Row | None]] = []
    state: Row | None = None  # the last one: a verdict's state precedes it
    for row in votes:
        if row["record"] == "state":
            state = row
        elif row["record"] == "verdict":
            reasons[row["reason"]] += 1
            because[row["asked_because"]] += 1
            _count(row, tallies)
            if row["reason"] == "pair":
                met = state if state and state["state_hash"] == row["state_hash"] else None
                (first if len(first) < AUDITED else last).append((row, met))
                del last[:-AUDITED]
    spent = _spent(ledger)
    if not reasons and not spent:
        return []
    blocks = _by_teacher(tallies, spent)
    if reasons:
        blocks += [*_by_reason(reasons, because), *_afterwards(metrics)]
    if first:
        blocks += [("heading", "Some of the pairs"), *(_audit(*pair) for pair in first + last)]
    return blocks


def _count(verdict: Row, tallies: dict[str, TeacherTally]) -> None:
    majority = _majority(verdict["counts"])
    for vote in verdict["votes"]:
        tally = tallies.setdefault(vote["teacher"], TeacherTally())
        tally.asked += 1
        if vote["canonical"] is None:
            # "unparseable: no JSON" is of the kind "unparseable"
            tally.abstained[vote["error"].partition(":")[0]] += 1
            continue
        tally.valid += 1
        tally.latency_s += vote["latency_s"]
        tally.judged += majority is not None
        tally.agreed += vote["canonical"] == majority


def _majority(counts: Sequence[Sequence[object]]) -> object:
    """Return the action with two votes or more, and more than any other; None without one."""
    (action, most), *lower = counts or [(None, 0)]
    unique = all(n != most for _, n in lower)
    return action if int(str(most)) > 1 and unique else None


def _spent(ledger: Iterable[Row]) -> dict[str, int]:
    """Return settled nanodollars by teacher; of two settlements of an attempt the first counts."""
    spent: dict[str, int] = {}
    settled: set[str] = set()
    for row in ledger:
        if row["kind"] == "settled" and row["attempt"] not in settled:
            settled.add(row["attempt"])
            spent[row["teacher"]] = spent.get(row["teacher"], 0) + row["nanodollars"]
    return spent


def _by_teacher(tallies: dict[str, TeacherTally], spent: dict[str, int]) -> list[Block]:
    heads = (
        "teacher", "asked", "valid", "abstained", "with the majority", "dollars", "mean latency"
    )  # fmt: skip
    lines = []
    for name in sorted(tallies.keys() | spent.keys()):
        tally = tallies.get(name, TeacherTally())
        why = ", ".join(f"{reason} {n:,}" for reason, n in sorted(tally.abstained.items()))
        paid = spent.get(name)
        lines.append(
            (
                name, f"{tally.asked:,}", f"{tally.valid:,}", why or "0",
                percent(tally.agreed / tally.judged if tally.judged else None),
                number(None if paid is None else paid / NANO, ".4f"),
                f"{tally.latency_s / tally.valid:.2f} s" if tally.valid else "-",
            )
        )  # fmt: skip
    note = (
        "A majority is one action of two teachers or more, and of more than any other. Dollars "
        "are the ledger's, with calls that no verdict waited for; latency is of valid votes."
    )
    total = f"{sum(spent.values()) / NANO:.4f} dollars together."
    return [
        ("soft", f"{note} {total}"),
        ("table", TableSection("Votes by teacher", heads, tuple(lines))),
    ]


def _by_reason(reasons: Counter[str], because: Counter[str]) -> list[Block]:
    total = reasons.total()
    lines = tuple((name, f"{n:,}", percent(n / total)) for name, n in reasons.most_common())
    causes = ", ".join(f"{why or 'not at all'} {n:,}" for why, n in because.most_common())
    return [
        ("heading", "Verdicts"),
        ("soft", f"Asked because: {causes}."),
        ("table", TableSection("Verdicts by reason", ("verdict", "states", "share"), lines)),
    ]


def _afterwards(metrics: Iterable[Row]) -> list[Block]:
    """Return what votes.jsonl lacks: states without a verdict, and the outcome of pairs."""
    met: Counter[str] = Counter()
    for row in metrics:
        met.update({kind: row.get("episodes", {}).get(f"teachers/{kind}", 0) for kind in LATER})
    ends = "; ".join(f"{meaning} {met[kind]:,}" for kind, meaning in LATER.items() if met[kind])
    return [("soft", f"{ends}.")] if ends else []


def _audit(verdict: Row, state: Row | None) -> Block:
    valid = sum(n for _, n in verdict["counts"])
    head = (
        f"{verdict['arm']}, step {verdict['step']}: {verdict['trace_id']}, turn {verdict['turn']}, "
        f"{verdict['counts'][0][1]} of {valid} votes, {verdict['asked_because']}"
    )
    messages = [] if state is None else state["messages"][-LAST_MESSAGES:]
    texts = [
        *((message["role"], message["content"]) for message in messages),
        ("chosen", verdict["chosen"]), ("rejected", verdict["rejected"]),
        *((v["teacher"], v["canonical"] or f"abstains: {v['error']}") for v in verdict["votes"]),
    ]  # fmt: skip
    return "talk", (head, [(speaker, shortened(text)) for speaker, text in texts])
