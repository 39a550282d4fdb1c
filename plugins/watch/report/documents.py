"""Report a run on a user's documents: each arm's agreement with the teacher, the documents read,
and the origin of the questions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from cartridge_forge.plugins.documents.synthesis_rows import few_turns
from cartridge_forge.plugins.statistics.formatting import Rows, TableSection
from cartridge_forge.plugins.watch.console import number, percent
from cartridge_forge.plugins.watch.report.template import Block, Row, shortened
from cartridge_forge.protocols.files import iter_rows
from cartridge_forge.protocols.records.run_files import ARMS
from cartridge_forge.services.run_directory import RunDirectory

AGREED = (
    "Answers that the teacher sampled to held-out questions of self-study, read by each arm: KL is "
    "the mean of log T - log S over an answer's tokens, in nats: an estimate of KL(T || S); "
    "agreement is the share of tokens at which both hold the same token likeliest. Both are means "
    "over questions, with their intervals. The row document is the teacher itself."
)
ASKED_HEADS = ("seed", "asked by the model", "asked plainly", "refused")
EXAMPLES = 3  # of each kind of self-study
HEADS = ("arm", "KL to the teacher", "95% CI", "agreement", "tokens", "F1")


def documents(file: Path, arms: Row, rows: Iterable[Row]) -> list[Block]:
    """Return tables of documents.json and the `rows` of selfstudy.jsonl; nothing for other data."""
    if not file.is_file():
        return []
    content = json.loads(file.read_bytes())
    heads = ("document", "from", "tokens", "characters", "SHA-256")
    read = TableSection("Documents", heads, tuple(map(_read, content["documents"])))
    blocks: list[Block] = [("table", read)]
    remarks = [*(f"left out: {x}" for x in content["left_out"]), *content["notes"]]
    doubles = RunDirectory(file.parent).contamination
    if doubles.is_file():
        count = sum(1 for _ in iter_rows(doubles))
        remarks.append(f"{count} training prompts double evaluation questions: {doubles.name}")
    if remarks:
        blocks.append(("list", remarks))
    if agreed := _agreement(arms):
        blocks += [("soft", AGREED), ("table", TableSection("Agreement", HEADS, agreed))]
    row_list = list(rows)
    if questions := _questions(row_list):
        blocks.append(("table", TableSection("Questions", ASKED_HEADS, questions)))
        if few := few_turns((row["document"], row["kind"], row["refused"]) for row in row_list):
            blocks.append(("list", few))
        blocks.append(("folded", ("Examples of every kind", _examples(row_list))))
    return blocks


def _read(document: Row) -> tuple[str, ...]:
    first, last = document["chars"]
    return (
        document["name"], document["source"], f"{document['tokens']:,}", f"{first:,} to {last:,}",
        document["sha256"][:16],
    )  # fmt: skip


def _agreement(arms: Row) -> Rows:
    return tuple(
        (
            arm, number(a["kl"], ".4f"), "{:.4f} to {:.4f}".format(*a["kl_ci95"]),
            percent(a["top1"]), f"{a['tokens']:,}", percent(arms[arm].get("f1")),
        )
        for arm in dict.fromkeys((*ARMS, *arms))
        if arm in arms and (a := arms[arm].get("agreement"))
    )  # fmt: skip


def _examples(rows: Iterable[Row]) -> list[Block]:
    """Return the first EXAMPLES used turns of each kind, with their answers where they are
    given."""
    by_kind: dict[str, list[Block]] = {}
    for row in rows:
        of_kind = by_kind.setdefault(row["kind"], [])
        if not row["refused"] and len(of_kind) < EXAMPLES:
            texts = [("asked", shortened(row["question"]))]
            if row["answer"]:
                texts.append(("answer", shortened(row["answer"])))
            of_kind.append(("talk", (f"{row['kind']}: {row['document']}", texts)))
    return [block for _, of_kind in sorted(by_kind.items()) for block in of_kind]


def _questions(rows: Iterable[Row]) -> Rows:
    kinds: dict[str, list[int]] = {}
    for row in rows:
        counted = kinds.setdefault(row["kind"], [0, 0, 0])
        which = 2 if row["refused"] else 1 if row["asker"] == "plain" else 0
        counted[which] += 1
    return tuple((kind, *map(str, counted)) for kind, counted in sorted(kinds.items()))
