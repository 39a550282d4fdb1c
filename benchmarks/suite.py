"""All benchmarks one after the other, then the comparison with the baseline: `make bench`.

    python -m benchmarks.suite [--quick] [--only pools step_3b] [--out runs/bench]

Each runs in a process of its own, so that none finds another's heap or threads. Exits with 1 when
one of them fails or a ratio has regressed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baseline import judge
from protocols.errors import ForgeError
from protocols.files import REPOSITORY


@dataclass(frozen=True)
class Benchmark:
    """A module of this folder, the seconds after which it is given up, and words for it alone."""

    name: str
    limit_s: float
    words: tuple[str, ...] = ()


SUITE = (
    Benchmark("step", 400),
    Benchmark("losses", 400),
    Benchmark("attention", 400),
    Benchmark("step_3b", 300, ("--shape", "tiny", "--device", "cpu")),
    Benchmark("tensor_plane", 500),
    Benchmark("generation", 500),
    Benchmark("pools", 200),
    Benchmark("orchestration", 300),
    Benchmark("rsa_batching", 200),
)


def run(benchmark: Benchmark, directory: Path, quick: bool) -> bool:
    """Run one; whether it ended well within its time."""
    out = directory / f"{benchmark.name}.json"
    out.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *benchmark.words]
    words += ["--out", str(out), *(["--quick"] if quick else [])]
    print(f"\n== {benchmark.name}", flush=True)
    begun = time.perf_counter()
    try:
        code = subprocess.run(words, timeout=benchmark.limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"FAILED  {benchmark.name} did not end within {benchmark.limit_s:g} s")
        return False
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    if code:
        print(f"FAILED  {benchmark.name} ended with {code}")
    return code == 0


def main() -> None:
    names = [benchmark.name for benchmark in SUITE]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    chosen = [benchmark for benchmark in SUITE if benchmark.name in options.only]
    ended = [run(benchmark, options.out, options.quick) for benchmark in chosen]
    print("\n== against benchmarks/baseline.json")
    try:
        passed = judge(options.out, options.quick, frozenset(options.only))
    except ForgeError as error:
        sys.exit(str(error))
    sys.exit(0 if passed and all(ended) else 1)


if __name__ == "__main__":
    main()
