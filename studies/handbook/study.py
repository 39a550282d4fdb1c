"""Run the study "handbook" and tell it: rules over 1, 4 and 12 turns, by how the text is made.

    python -m studies.handbook.study [--run-dir DIR] [--table] [--sweep FILE]

It is the sweep of this folder, which goes on where it was, and then the table. `--table` runs
nothing. `--sweep` takes another file with the same arms, on seeds from 900: a smoke test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.experiments.sweep import planned
from cartridge_forge.forge_run.experiments.trials import read_runs
from cartridge_forge.plugins.evaluate.spec import SweepSpec
from cartridge_forge.plugins.spec_files.loading import load_file
from cartridge_forge.plugins.statistics.formatting import TableSection, markdown_table
from cartridge_forge.plugins.statistics.intervals import SHARE_DIFFERENCE, mean_interval
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.run_directory import RunDirectory

SWEEP = Path(__file__).with_name("sweep.yaml")
RULES = ("all", "department")  # the outcomes: every rule, and the one that needs the handbook
PLAIN = "plain on policy"
COMPARED = (("verified", "offline"), (PLAIN, "offline"), ("verified", PLAIN))
Shares = Mapping[str, Mapping[str, Mapping[str, float]]]  # arm -> rule -> turns -> share


def shares_of(arms: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return of each arm, by its name in the sweep, the share of tasks that obey a rule, by rule
    and turns."""
    return {
        names[arm]: {
            rule: {turns: cell["obeyed"] for turns, cell in by_turns.items()}
            for rule, by_turns in result["rules"].items()
        }
        for arm, result in arms.items()
        if arm in names
    }


def lines_of(units: Sequence[Shares]) -> list[list[str]]:
    """Return a line for each rule and number of turns: the arms' means over handbooks, then the
    registered differences, paired by handbook, with Student's 95% intervals."""
    body = []
    for rule in RULES:
        for turns in sorted(units[0]["offline"][rule], key=int):
            values = {arm: [unit[arm][rule][turns] for unit in units] for arm in units[0]}
            cells = [f"{fmean(values[arm]):.3f}" for arm in values]
            for arm, other in COMPARED:
                gains = [a - b for a, b in zip(values[arm], values[other], strict=True)]
                interval = mean_interval(gains, SHARE_DIFFERENCE)
                ends = "" if interval is None else f" ({interval[0]:+.3f} to {interval[1]:+.3f})"
                cells.append(f"{fmean(gains):+.3f}{ends}")
            body.append([rule, turns, *cells])
    return body


def read_units(path: Path, root: Path) -> list[Shares]:
    """Return the shares of every handbook of a sweep. Raises RunError where a run is not
    finished."""
    spec = load_file(SweepSpec, path)
    plan = planned(spec, str((path.parent / spec.mesh).resolve()))
    runs = read_runs(root / f"sweep-{spec.name}" / "sweep.json")
    units: dict[int, dict[str, Any]] = {}
    for trial in plan:
        if trial.name not in runs:
            raise RunError(f"{trial.title} is not finished; run the study on")
        directory = RunDirectory(root / trial.spec.mesh.name / runs[trial.name])
        results = directory.read_results() or {}
        units.setdefault(trial.seed, {}).update(shares_of(results["arms"], dict(trial.arms)))
    return list(units.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    parser.add_argument("--sweep", type=Path, default=SWEEP, help="default: the registered one")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    if not options.table:
        words = ["sweep", str(options.sweep), "--run-dir", str(options.run_dir)]
        if code := forge(words):
            return code
    units = read_units(options.sweep, options.run_dir.absolute())
    heads = ("rule", "turns", *units[0], *(f"{a} over {b}" for a, b in COMPARED))
    rows = tuple(map(tuple, lines_of(units)))
    print(markdown_table(TableSection("rules", heads, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
