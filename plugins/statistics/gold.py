"""Compare arms by the gold answers: their negative log-probability, and the share of the gap
between no document and the whole document that an arm closes.

A weak model answers few questions exactly, with the document in context too. How likely it holds
the right answer still tells what it knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from cartridge_forge.plugins.statistics.intervals import resamples
from cartridge_forge.plugins.statistics.results import GoldArm, GoldResults
from cartridge_forge.protocols.records.answers import AnswerRow
from cartridge_forge.protocols.records.run_files import ARMS

RESAMPLES, SEED = 2000, 0
MOST_SHOWN = 20  # questions shown side by side
LEAST_GAP = 0.05  # nats a token: of a smaller gap a share says nothing


def gold_results(rows: Iterable[AnswerRow]) -> GoldResults | None:
    """Return the results of the greedy answers of a run; None where no question has a gold answer.

    `closed` is (none - arm) / (none - document). Its interval is that of the middle 95% of
    resamples of the documents, and of the questions in each; the arms are paired by question.
    """
    by_arm = _paired(rows)
    common = set.intersection(*(set(answers) for answers in by_arm.values())) if by_arm else set()
    if not common:
        return None
    order = sorted(common)
    documents, facts = clusters([next(iter(by_arm.values()))[key] for key in order])
    lost = {arm: [_nll(answers[key]) for key in order] for arm, answers in by_arm.items()}
    drawn: Sequence[tuple[int, ...]] = ()
    if "none" in lost and "document" in lost:
        drawn = resamples(documents, facts, RESAMPLES, SEED).drawn

    def closed(arm: str, which: Sequence[int]) -> float | None:
        none, arm_loss, document_loss = (
            fmean(lost[a][i] for i in which) for a in ("none", arm, "document")
        )
        return (
            (none - arm_loss) / (none - document_loss) if none - document_loss > LEAST_GAP else None
        )

    arms = {}
    for arm, values in lost.items():
        share = closed(arm, range(len(order))) if drawn else None
        ci95 = None
        if share is not None:
            closed_shares = sorted(s for d in drawn if (s := closed(arm, d)) is not None)
            ci95 = [
                closed_shares[int(len(closed_shares) * 0.025)],
                closed_shares[int(len(closed_shares) * 0.975)],
            ]
        arms[arm] = GoldArm(nll=fmean(values), closed=share, ci95=ci95)
    return GoldResults(n=len(order), documents=len(set(documents)), arms=arms)


def side_by_side(
    rows: Iterable[AnswerRow],
) -> tuple[list[str], list[tuple[str, str, dict[str, str]]]]:
    """Return the arms, and of the first MOST_SHOWN questions with a gold answer: the question, the
    answer, and each arm's text by arm."""
    by_arm = _paired(rows)
    examples: dict[tuple[str, str, str, str], tuple[str, str, dict[str, str]]] = {}
    for arm, answers in by_arm.items():
        for key, row in answers.items():
            if key in examples or len(examples) < MOST_SHOWN:
                example = examples.setdefault(key, (row["fact"], row["expected"] or "", {}))
                example[2][arm] = row["text"] or ""
    return list(by_arm), list(examples.values())


def _paired(rows: Iterable[AnswerRow]) -> dict[str, dict[tuple[str, str, str, str], AnswerRow]]:
    """Return by arm, in their order, the greedy answers to questions with a gold answer."""
    by_arm: dict[str, dict[tuple[str, str, str, str], AnswerRow]] = {}
    for row in rows:
        if row["right"] is not None and row["nll"] is not None and not row["sampled"]:
            by_arm.setdefault(row["arm"], {})[pairing_key(row)] = row
    order = {arm: at for at, arm in enumerate(ARMS)}
    return dict(sorted(by_arm.items(), key=lambda pair: order.get(pair[0], len(order))))


def _nll(row: AnswerRow) -> float:
    assert row["nll"] is not None, "rows without one were left out"
    return row["nll"]


def pairing_key(row: AnswerRow) -> tuple[str, str, str, str]:
    """Return what identifies a question over arms and runs."""
    return row["document"], row["document_hash"], row["id"], row["question_hash"]


def clusters(rows: Iterable[AnswerRow]) -> tuple[list[str], list[str]]:
    """Return the document and the fact of every row, as names that are unique over runs."""
    documents, facts = [], []
    for row in rows:
        document = f"{row['document']}/{row['document_hash']}"
        documents.append(document)
        facts.append(f"{document}/{row['fact']}")
    return documents, facts
