"""Keep the raw results of published figures, and check the docs against them.

    python -m benchmarks.results collect RUN --as NAME --command "forge-run MESH.yaml"
    python -m benchmarks.results keep SWEEP.yaml [--set KEY=VALUE]    finished runs, from runs/
    python -m benchmarks.results restore SWEEP.yaml [--set KEY=VALUE] and back, so that
                                                   `forge sweep` with the same --set goes on
    python -m benchmarks.results check
    python -m benchmarks.results write

`check` lists every table whose numbers differ from its record; `write` writes those tables anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results import records, sweeps, tables
from protocols.errors import ForgeError


def main() -> int:
    """Run one of the commands, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results")
    verbs = parser.add_subparsers(dest="verb", required=True)
    collect = verbs.add_parser("collect", help="keep what a finished run measured")
    collect.add_argument("run", type=Path)
    collect.add_argument("--as", dest="name", required=True)
    collect.add_argument("--command", required=True, help="how the run was made")
    for verb, what in (("keep", "record"), ("restore", "bring back")):
        of_sweep = verbs.add_parser(verb, help=f"{what} the finished runs of a sweep")
        of_sweep.add_argument("sweep", type=Path)
        of_sweep.add_argument("--run-dir", type=Path, default=Path("runs"))
        of_sweep.add_argument("--set", action="append", default=[], dest="sets")
    verbs.add_parser("check", help="list tables that differ from their records")
    verbs.add_parser("write", help="write the recorded tables anew")
    asked = parser.parse_args()
    try:
        return _done(asked)
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _done(asked: argparse.Namespace) -> int:
    if asked.verb == "collect":
        print(records.collect(asked.run, asked.name, asked.command))
        return 0
    if asked.verb in ("keep", "restore"):
        act = sweeps.keep if asked.verb == "keep" else sweeps.restore
        found = act(asked.sweep, asked.run_dir, sets=asked.sets)
        print("\n".join(map(str, found)) or "nothing new")
        return 0
    if asked.verb == "write":
        print("\n".join(tables.write()) or "nothing to write")
        return 0
    faults = tables.faults()
    print("\n".join(faults) or "every recorded table is that of its record")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
