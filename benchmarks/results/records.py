"""Read and write the raw results that are kept beside this file, one folder for each.

longhealth/
├── source.json       the command, the run, its outcome and spec's name
├── spec.yaml         the resolved spec, with paths relative to the repository
├── results.json      as the run wrote it; frontier.json and eval.json likewise, where it has them
├── metrics.jsonl.gz  one row a step
└── answers.jsonl.gz  one row a question and arm
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocols.errors import SpecError
from protocols.files import REPOSITORY, iter_rows, json_lines, write_atomically

HOME = Path(__file__).parent
WHOLE = ("results.json", "frontier.json", "eval.json")
ROWS = ("metrics.jsonl", "answers.jsonl", "frontier_answers.jsonl", "eval_answers.jsonl")
MOST_BYTES = 12_000_000  # all records together


def collect(run: Path, name: str, command: str, home: Path = HOME) -> Path:
    """Copy what a run measured into `home`/`name`, and return that folder; a record of that name is
    replaced. `command` is how the run was made. Raises SpecError for a run that did not finish."""
    if not (run / "results.json").is_file() or not (run / "answers.jsonl").is_file():
        raise SpecError(f"{run} has no results.json and answers.jsonl: name a finished run")
    status = json.loads((run / "results.json").read_text())["status"]
    if status != "finished":
        raise SpecError(f"{run} is {status}: only finished runs are kept")
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in ("spec.yaml", *WHOLE):
        if (run / file).is_file():
            text = (run / file).read_text().replace(f"{REPOSITORY}/", "")
            write_atomically(folder / file, text)
    source = {"command": command, "run": run.resolve().name}
    write_atomically(folder / "source.json", json.dumps(source, indent=1) + "\n")
    for file in ROWS:
        if (run / file).is_file():
            rows_text = json_lines(iter_rows(run / file)).encode()
            # Without a time in the header, equal rows are equal files.
            (folder / f"{file}.gz").write_bytes(gzip.compress(rows_text, 9, mtime=0))
    return folder


def rows(name: str, file: str, home: Path = HOME) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record: `rows("longhealth", "answers.jsonl")`."""
    with gzip.open(home / name / f"{file}.gz", "rt", encoding="utf-8") as text:
        yield from map(json.loads, text)


def whole(name: str, file: str, home: Path = HOME) -> Mapping[str, Any]:
    """Return a JSON file of a record."""
    found: dict[str, Any] = json.loads((home / name / file).read_text())
    return found
