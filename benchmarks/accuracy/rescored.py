"""Count the scores of the kept answers that differ from SQuAD's own script.

    python -m benchmarks.accuracy.rescored    writes benchmarks/results/users/rescored.json

Every answer that was scored against words is scored twice, by SQuAD's script, whose signs are
ASCII's (as transformers has it), and by `strategies.answers.squad`, whose signs are Unicode's.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from benchmarks.results import records
from protocols.files import write_atomically
from strategies.answers.squad import squad_scores

RECORD = records.HOME / "users" / "rescored.json"
FILES = ("answers.jsonl", "eval_answers.jsonl")


def rescore(home: Path = records.HOME) -> dict[str, dict[str, int]]:
    """Return for each kept folder, and for all of them, the number of answers scored, and of those
    whose exact match or F1 differ."""
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    found: dict[str, Counter[str]] = {}
    for path in sorted(home.rglob("*answers.jsonl.gz")):
        folder = path.parent.relative_to(home)
        file = path.name.removesuffix(".gz")
        if file not in FILES:
            continue
        counts = found.setdefault("/".join(folder.parts[:2]), Counter(answers=0, exact=0, f1=0))
        for row in records.rows(str(folder), file, home):
            if row["right"] is None or not row["expected"] or row["answer"] is None:
                continue
            exact, f1 = squad_scores(row["answer"], (row["expected"],))
            counts["answers"] += 1
            counts["exact"] += exact != compute_exact(row["expected"], row["answer"])
            counts["f1"] += abs(f1 - compute_f1(row["expected"], row["answer"])) > 1e-9
    told = {name: dict(counts) for name, counts in found.items() if counts["answers"]}
    told["all"] = dict(sum(found.values(), Counter()))
    for key in ("answers", "exact", "f1"):
        told["all"].setdefault(key, 0)  # a sum of Counters leaves zeros out
    return told


def main() -> None:
    """Print the counts of every kept folder, and write them down."""
    found = rescore()
    for name, counts in found.items():
        print(f"{name}: " + ", ".join(f"{key} {n:,}" for key, n in counts.items()))
    write_atomically(RECORD, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
