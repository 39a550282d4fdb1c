"""The report's section on a user's own documents: how near each arm is to the teacher, what was
read, and how the questions came about."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from forge_run.display import number, percent
from forge_run.page import Row, section
from protocols.files import iter_rows
from protocols.records import ARMS
from services.rundir import RunDirectory

AGREED = (
    "Answers that the teacher sampled to held-out questions of self-study, read by each arm: KL is "
    "the mean of log T - log S over an answer's tokens, in nats: an estimate of KL(T || S); "
    "agreement is the share of tokens at which both hold the same token likeliest. Both are means "
    "over questions, with their intervals. The row document is the teacher itself."
)
HEADS = ("arm", "KL to the teacher", "95% CI", "agreement", "tokens", "F1")


def documents(file: Path, arms: Row, rows: Iterable[Row]) -> str:
    """ "" for a run on other data; `rows` are those of selfstudy.jsonl."""
    if not file.is_file():
        return ""
    told = json.loads(file.read_bytes())
    heads = ("document", "from", "tokens", "characters", "SHA-256")
    parts = [_table(heads, map(_read, told["documents"]))]
    remarks = [*(f"left out: {x}" for x in told["left_out"]), *told["notes"]]
    doubles = RunDirectory(file.parent).contamination
    if doubles.is_file():
        count = sum(1 for _ in iter_rows(doubles))
        remarks.append(f"{count} training prompts double evaluation questions: {doubles.name}")
    if remarks:
        items = "".join(f"<li>{escape(x)}</li>" for x in remarks)
        parts.append(f"<ul>{items}</ul>")
    parts += filter(None, [_agreement(arms), _questions(rows)])
    return section("Documents", "\n".join(parts))


def _read(document: Row) -> tuple[str, ...]:
    first, last = document["chars"]
    return (
        document["name"], document["source"], f"{document['tokens']:,}", f"{first:,} to {last:,}",
        document["sha256"][:16],
    )  # fmt: skip


def _agreement(arms: Row) -> str:
    found = [
        (
            arm, number(a["kl"], ".4f"), _bounds(a["kl_ci95"]), percent(a["top1"]),
            f"{a['tokens']:,}", percent(arms[arm]["f1"]) if "f1" in arms[arm] else "-",
        )
        for arm in ARMS
        if arm in arms and (a := arms[arm].get("agreement"))
    ]  # fmt: skip
    return f'<p class="soft">{AGREED}</p>{_table(HEADS, found)}' if found else ""


def _bounds(bounds: list[float]) -> str:
    return f"{bounds[0]:.4f} to {bounds[1]:.4f}"


def _questions(rows: Iterable[Row]) -> str:
    kinds: dict[str, list[int]] = {}
    for row in rows:
        counted = kinds.setdefault(row["kind"], [0, 0, 0])
        which = 2 if row["refused"] else 1 if row["asker"] == "plain" else 0
        counted[which] += 1
    found = [(kind, *map(str, counted)) for kind, counted in sorted(kinds.items())]
    heads = ("seed", "asked by the model", "asked plainly", "refused")
    return _table(heads, found) if found else ""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    ths = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    trs = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>\n"
        for first, *rest in rows
    )
    label = escape(heads[0])
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>
<thead><tr>{ths}</tr></thead>
<tbody>
{trs}</tbody>
</table></div>"""
