"""Keep the raw results of published figures, and check the pages against them.

python -m studies check                        tables that differ from their records
python -m studies write                        write those tables anew
python -m studies list STUDY                   what a study's archive has
python -m studies keep SWEEP.yaml [--set ...]  the sweep's finished runs, from runs/
python -m studies restore SWEEP.yaml [--set ...]
                                               and back, so that `forge sweep` goes on
python -m studies collect RUN --as STUDY/NAME --command "forge-run MESH.yaml"
python -m studies add STUDY RECORD.json...     records of benchmarks
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cartridge_forge.protocols.errors import ForgeError
from studies import archive, sweeps
from studies.archive import KeptRun
from studies.tables import pages


def main() -> int:
    """Run one of the commands, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m studies")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="list tables that differ from their records")
    verbs.add_parser("write", help="write the recorded tables anew")
    contents = verbs.add_parser("list", help="list what a study's archive has")
    contents.add_argument("study")
    for verb, action in (("keep", "keep"), ("restore", "bring back")):
        of_sweep = verbs.add_parser(verb, help=f"{action} the finished runs of a sweep")
        of_sweep.add_argument("sweep", type=Path)
        of_sweep.add_argument("--run-dir", type=Path, default=Path("runs"))
        of_sweep.add_argument("--set", action="append", default=[], dest="sets")
    collect = verbs.add_parser("collect", help="keep what a finished run measured")
    collect.add_argument("run", type=Path)
    collect.add_argument("--as", dest="name", required=True, metavar="STUDY/NAME")
    collect.add_argument("--command", required=True, help="how the run was made")
    add = verbs.add_parser("add", help="keep records of benchmarks")
    add.add_argument("study")
    add.add_argument("records", type=Path, nargs="+")
    try:
        return _execute(parser.parse_args())
    except ForgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _execute(options: argparse.Namespace) -> int:
    if options.verb == "check":
        faults = [fault for one in pages.recorded() for fault in pages.differing(one)]
        faults += pages.unmarked()
        print("\n".join(faults) or "every recorded table is that of its record")
        return 1 if faults else 0
    if options.verb == "write":
        print("\n".join(pages.write()) or "nothing to write")
    elif options.verb == "list":
        for name, data in archive.members(options.study).items():
            print(f"{len(data):>9,}  {name}")
    elif options.verb == "collect":
        study, _, name = options.name.partition("/")
        run = KeptRun(name, "", 0, {}, options.command, options.run.resolve().name)
        print(archive.keep(study, [(run, options.run)]))
    elif options.verb == "add":
        files = {path.name: path.read_bytes() for path in options.records}
        print(archive.pack(options.study, archive.members(options.study) | files))
    else:
        act = sweeps.keep if options.verb == "keep" else sweeps.restore
        names = act(options.sweep, options.run_dir, sets=options.sets)
        print("\n".join(names) or "nothing new")
    return 0


if __name__ == "__main__":
    sys.exit(main())
