"""How many kept scores differ from SQuAD's own script."""

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.accuracy.rescored import rescore


def row(answer: str | None, expected: str | None, right: float | None = 1.0) -> dict[str, Any]:
    return {"answer": answer, "expected": expected, "right": right}


def test_scores_that_differ_are_counted(tmp_path: Path) -> None:
    rows = [
        row("1990\u20131995", "1990-1995"),  # exact and F1
        row("in 1990\u20131995", "1990-1995"),  # F1
        row("nine days", "nine"),
        row(None, "nine"),
        row("nine", None),
        row("nine", "nine", None),
    ]
    folder = tmp_path / "studies" / "real" / "seed-0"
    folder.mkdir(parents=True)
    for file in ("answers.jsonl.gz", "eval_answers.jsonl.gz"):
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (folder / file).write_bytes(gzip.compress(text.encode()))
    counts = {"answers": 6, "exact": 2, "f1": 4}
    assert rescore(tmp_path) == {"studies/real": counts, "all": counts}
