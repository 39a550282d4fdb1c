"""Report the loss channels of a run with episodes, from metrics.jsonl and results.json.

    rewards       mean reward and the errors that turns met
    channels      the last step's losses, and the cosines of their gradients
    aggregation   the accuracy of each population of recursive self-aggregation, and the gain

A run without episodes has none of them. The page Run draws the same over the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cartridge_forge.plugins.statistics.formatting import TableSection
from cartridge_forge.plugins.watch.console import number, percent
from cartridge_forge.plugins.watch.report.template import Block, Row
from cartridge_forge.protocols.records.run_files import ARMS, TRAINED_ARMS

ERROR = "error/"  # key prefix in a row's episodes: turns that met that kind
BALANCE = ("coefficient", "share")  # of a channel whose gradient is balanced with the others'
# Keys of a channel that have columns; its other keys are facts.
OWN_COLUMNS = ("weight", "value", "count", "grad_norm", "mean_grad_norm", *BALANCE)
HEADS = ("channel", "weight", "value", "denominator", "facts")


def rewards(metrics: Sequence[Row]) -> list[Block]:
    """Return mean rewards and errors in words; nothing without episodes."""
    rows = [row for row in metrics if row.get("episodes")]
    if not rows:
        return []
    lines = [
        f"mean reward of a step's episodes, {arm}: {note}" for arm, note in _reward_notes(rows)
    ]
    if met := _errors(rows):
        turns = sum(row["episodes"]["turns"] for row in rows)
        notes = "; ".join(f"{kind}: {n:,} of {turns:,} turns" for kind, n in met)
        lines.append(f"turns that met an error: {notes}")
    if lines:
        return [("list", lines)]
    # Every environment failed before its first observation.
    episodes = sum(row["episodes"]["count"] for row in rows)
    return [("text", f"None of {episodes:,} episodes could be judged.")]


def channels(metrics: Sequence[Row]) -> list[Block]:
    """Return tables of each arm's last step; nothing without channels. The page Run draws them."""
    rows = [row for row in metrics if row.get("channels")]
    names = list(dict.fromkeys(name for row in rows for name in row["channels"]))
    return list(_tables(rows, names))


def _tables(rows: Sequence[Row], names: Sequence[str]) -> Iterable[Block]:
    """Yield the channels of each arm's last step, and its last comparison of their gradients."""
    for arm in TRAINED_ARMS:
        of_arm = [row for row in rows if row["arm"] == arm]
        if not of_arm:
            continue
        last = of_arm[-1]
        normed = [row for row in of_arm if _norms(row)]
        compared = [row for row in normed if row.get("cosines")] or normed
        at = f"{arm}, step {last['step']}"
        lines = tuple(_cells(name, last["channels"].get(name)) for name in names)
        yield "heading", at
        yield "table", TableSection(f"Channels, {at}", HEADS, lines)
        if compared:
            table = _gradients(arm, compared[-1])
            yield "soft", f"{table.title}."
            yield "table", table


def _norms(row: Row) -> dict[str, float]:
    """Return the norm of each channel's gradient, if the step compared them."""
    channels = row["channels"].items()
    return {name: facts["grad_norm"] for name, facts in channels if "grad_norm" in facts}


def _cells(name: str, facts: Row | None) -> tuple[str, ...]:
    if facts is None:
        return (name, *["-"] * 4)
    value = facts["value"] if facts["count"] else None
    fact_texts = [f"{key} {fact:.3g}" for key, fact in facts.items() if key not in OWN_COLUMNS]
    return (
        name, f"{facts['weight']:g}", number(value, ".4f"), number(facts["count"], ","),
        ", ".join(fact_texts) or "-",
    )  # fmt: skip


def _gradients(arm: str, row: Row) -> TableSection:
    """Return norms and cosines of one step, a row for each channel that had a gradient, with
    coefficients and shares where the channels were balanced."""
    norms, cosines = _norms(row), row.get("cosines") or {}
    balanced = [key for key in BALANCE if any(key in row["channels"][name] for name in norms)]
    lines = []
    for one in norms:
        of_one = [cosines.get(f"{one}/{other}", cosines.get(f"{other}/{one}")) for other in norms]
        cells = [number(cosine, "+.2f") for cosine in of_one]
        facts = [number(row["channels"][one].get(key), ".3g") for key in balanced]
        lines.append((one, number(norms[one], ".3g"), *facts, *cells))
    heads = ("channel", "norm", *balanced, *(f"cosine to {name}" for name in norms))
    return TableSection(f"Gradients of {arm}, step {row['step']}", heads, tuple(lines))


def _errors(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Return the kinds of error with the turns that met them, the most frequent first."""
    met: Counter[str] = Counter()
    for row in rows:
        counts = row["episodes"].items()
        met.update({k.removeprefix(ERROR): n for k, n in counts if k.startswith(ERROR)})
    return sorted(met.items(), key=lambda item: (-item[1], item[0]))


def _reward_notes(rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    """Yield each arm that has rewards, with the first and the last, and its episodes."""
    for arm in TRAINED_ARMS:
        of_arm = [row["episodes"] for row in rows if row["arm"] == arm]
        points = [e["reward"] for e in of_arm if e.get("reward") is not None]
        if points:
            count, errored = (sum(e[key] for e in of_arm) for key in ("count", "errored"))
            ends = f"{points[0]:.3f} to {points[-1]:.3f} in {len(of_arm)} steps"
            yield arm, f"{ends}, {count:,} episodes, of which {errored:,} errored"


def aggregation(results: Row) -> list[Block]:
    """Return accuracy by population and the gain of training; nothing without populations."""
    arms = results.get("arms") or {}
    populations_of = {
        arm: arms[arm]["populations"] for arm in ARMS if (arms.get(arm) or {}).get("populations")
    }
    blocks: list[Block] = []
    if populations_of:
        steps = max(len(populations["accuracy"]) for populations in populations_of.values())
        heads = ("arm", *(f"population {t}" for t in range(steps)), "majority", "pass at n")
        lines = tuple(
            (arm, *map(percent, [*p["accuracy"], p["majority_vote"], p["pass_at_n"]]))
            for arm, p in populations_of.items()
        )
        name = "Accuracy of each population on held-out problems"
        blocks += [("soft", f"{name}."), ("table", TableSection(name, heads, lines))]
    if gain := results.get("aggregation"):
        blocks.append(("text", _gain_text(gain)))
    return blocks


def _gain_text(gain: Row) -> str:
    """Return the gain of training, in points of accuracy."""
    last, first, aggregation = (
        f"{100 * gain[key]:+.1f}" for key in ("last", "first", "aggregation")
    )
    share = "" if gain["share"] is None else f", {percent(gain['share'])} of it"
    return (
        f"Training moved the last population by {last} points of accuracy, and the first by "
        f"{first}: aggregation's part is {aggregation} points{share}."
    )
