"""Compare the ratios of a run of the benchmarks with those that are checked in.

    python -m benchmarks.baseline runs/bench [--quick] [--update]

`baseline.json` says of each ratio what it was, which way is better, and by what factor it may be
worse: `{"ratio": 1.3, "better": "lower", "within": 2}` is a regression from 2.6 on. A ratio that
was not measured is one too, unless the run was a quick one, which measures fewer. `--update` takes
the ratios of the run and keeps the rest; a ratio that is new needs its line written by hand, for
nobody but its author knows which way is better.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.record import read
from protocols.errors import DataError, ForgeError

BASELINE = Path(__file__).with_name("baseline.json")
Ratios = Mapping[str, Mapping[str, float]]  # by benchmark, then by name


@dataclass(frozen=True)
class Expected:
    """A ratio as it was. `within` is the factor by which it may be worse."""

    ratio: float
    better: Literal["lower", "higher"]
    within: float

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher") or self.ratio <= 0 or self.within < 1:
            raise DataError(
                'a baseline is {"ratio": > 0, "better": "lower" or "higher", "within": >= 1}: '
                f"got {self}"
            )


@dataclass(frozen=True)
class Finding:
    """One ratio beside what it was; `worse` is the factor, below 1 for a better one. None: it was
    not measured."""

    benchmark: str
    name: str
    expected: Expected
    ratio: float | None
    worse: float | None

    @property
    def regressed(self) -> bool:
        return self.worse is None or self.worse > self.expected.within

    def line(self) -> str:
        was, within = f"{self.expected.ratio:.3g}", f"{self.expected.within:g}"
        if self.ratio is None or self.worse is None:
            return f"NOT MEASURED  {self.benchmark}: {self.name} (was {was})"
        verdict = "REGRESSION  " if self.regressed else "ok          "
        return (
            f"{verdict}  {self.benchmark}: {self.name}  {self.ratio:.3g} (was {was}, "
            f"{self.expected.better} is better: {self.worse:.2f}x worse, allowed {within}x)"
        )


def compare(
    measured: Ratios, baseline: Mapping[str, Mapping[str, Expected]], quick: bool = False
) -> list[Finding]:
    """Every ratio of the baseline, in its order. A quick run's gaps are left out."""
    findings = []
    for benchmark, names in baseline.items():
        for name, expected in names.items():
            ratio = measured.get(benchmark, {}).get(name)
            if ratio is None:
                if not quick:
                    findings.append(Finding(benchmark, name, expected, None, None))
                continue
            more = ratio / expected.ratio
            worse = more if expected.better == "lower" else 1 / more
            findings.append(Finding(benchmark, name, expected, ratio, worse))
    return findings


def unknown(
    measured: Ratios, baseline: Mapping[str, Mapping[str, Expected]]
) -> list[tuple[str, str]]:
    """Ratios that no baseline speaks of: (benchmark, name)."""
    return [
        (benchmark, name)
        for benchmark, ratios in measured.items()
        for name in ratios
        if name not in baseline.get(benchmark, {})
    ]


def updated(
    measured: Ratios, baseline: Mapping[str, Mapping[str, Expected]]
) -> dict[str, dict[str, Expected]]:
    """The baseline with the ratios that were measured."""
    return {
        benchmark: {
            name: replace(e, ratio=measured.get(benchmark, {}).get(name, e.ratio))
            for name, e in names.items()
        }
        for benchmark, names in baseline.items()
    }


def read_baseline(path: Path = BASELINE) -> dict[str, dict[str, Expected]]:
    """Raises DataError for a file that is no baseline."""
    try:
        found = json.loads(path.read_text())
        return {
            benchmark: {name: Expected(**e) for name, e in names.items()}
            for benchmark, names in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no baseline: {error}; see benchmarks/baseline.py") from error


def write_baseline(baseline: Mapping[str, Mapping[str, Expected]], path: Path = BASELINE) -> None:
    """One line a ratio, so that a change of one is a change of one line."""
    blocks = []
    for benchmark, names in baseline.items():
        lines = [f"  {json.dumps(n)}: {json.dumps(asdict(e))}" for n, e in names.items()]
        blocks.append(f" {json.dumps(benchmark)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def measured_in(directory: Path) -> dict[str, dict[str, float]]:
    """The ratios of every record in a directory."""
    records = [read(path) for path in sorted(directory.glob("*.json"))]
    return {record["benchmark"]: record["ratios"] for record in records}


def judge(directory: Path, quick: bool, only: frozenset[str] | None = None) -> bool:
    """Print the comparison; whether nothing regressed. `only` these benchmarks were run."""
    baseline = read_baseline()
    measured = measured_in(directory)
    if only is not None:
        baseline = {b: names for b, names in baseline.items() if b in only}
        measured = {b: ratios for b, ratios in measured.items() if b in only}
    findings = compare(measured, baseline, quick)
    for finding in findings:
        print(finding.line())
    for benchmark, name in unknown(measured, baseline):
        print(f"no baseline   {benchmark}: {name}  {measured[benchmark][name]:.3g}")
    regressed = sum(finding.regressed for finding in findings)
    print(f"{len(findings)} ratios compared, {regressed} regressed")
    return regressed == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quick", action="store_true", help="what is missing was not asked for")
    parser.add_argument("--update", action="store_true", help="write the ratios into the baseline")
    options = parser.parse_args()
    try:
        if options.update:
            write_baseline(updated(measured_in(options.directory), read_baseline()))
        passed = judge(options.directory, options.quick)
    except ForgeError as error:
        sys.exit(str(error))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
