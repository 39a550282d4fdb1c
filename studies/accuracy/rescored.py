"""Count the scores of the kept answers that differ from SQuAD's own script.

    python -m studies.accuracy.rescored    prints rescored.json of studies/performance

Every answer that was scored against words is scored twice, by SQuAD's script, whose signs are
ASCII's (as transformers has it), and by `plugins.strategies.answers.squad`, whose signs are
Unicode's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cartridge_forge.plugins.strategies.answers.squad import squad_scores
from studies import archive

FILES = ("answers.jsonl", "eval_answers.jsonl")


def rescore(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the number of answers scored against words, and of those whose exact match or F1
    differ."""
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    counts = Counter(answers=0, exact=0, f1=0)
    for row in rows:
        if row["right"] is None or not row["expected"] or row["answer"] is None:
            continue
        exact, f1 = squad_scores(row["answer"], (row["expected"],))
        counts["answers"] += 1
        counts["exact"] += exact != compute_exact(row["expected"], row["answer"])
        counts["f1"] += abs(f1 - compute_f1(row["expected"], row["answer"])) > 1e-9
    return counts


def main() -> None:
    """Print the counts of every study, and of all together."""
    studies: dict[str, dict[str, int]] = {}
    total: Counter[str] = Counter()
    for path in sorted(archive.HOME.glob("*/results.zip")):
        study = path.parent.name
        counts: Counter[str] = Counter()
        for run in archive.runs(study):
            for file in FILES:
                if archive.has_member(study, f"{run.name}/{file}"):
                    counts.update(rescore(archive.rows(study, f"{run.name}/{file}")))
        if counts["answers"]:
            studies[study] = dict(counts)
            total.update(counts)
    print(json.dumps(studies | {"all": dict(total)}, indent=1))


if __name__ == "__main__":
    main()
