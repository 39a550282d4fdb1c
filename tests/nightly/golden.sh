#!/usr/bin/env bash
# Compares this tree's run files with those of a base commit, value by value, and its seconds a step.
#   tests/nightly/golden.sh [BASE]
# Runs meshes/longhealth.yaml (seed 0, 30 steps) twice in each tree, in turn. Every value that the
# base wrote must be there, equal to the last digit; fields that are new may stand beside. Exits 1
# where one differs. Both use this tree's .venv. Runs with more channels than doc_kl have other
# numbers since their losses were repaired (docs/log.md).
set -euo pipefail
base=${1:-9fc9f6f}
head=$(cd "$(dirname "$0")/../.." && pwd)
python=$head/.venv/bin/python
work=$(mktemp -d)
trap 'git -C "$head" worktree remove --force "$work/base" 2>/dev/null; rm -rf "$work"' EXIT
git -C "$head" worktree add --quiet --detach "$work/base" "$base"

run() { # tree, name of the result, arguments of forge-run
  local tree=$1 name=$2
  shift 2
  (cd "$tree" && PYTHONPATH=$tree "$python" -c \
    'import sys; from forge_run.cli import forge_run; sys.exit(forge_run())' \
    "$@" --run-dir "$work/$name" >"$work/$name.log" 2>&1) || { cat "$work/$name.log"; exit 1; }
}
for turn in 1 2; do
  for tree in base head; do
    at=$([ $tree = base ] && echo "$work/base" || echo "$head")
    run "$at" "longhealth-$tree-$turn" meshes/longhealth.yaml --set train.steps=30 \
      --set 'evaluate.arms=[on_policy]'
  done
done

failed=0
"$python" - "$work" <<'PY' || failed=1
import json, sys
from pathlib import Path

def missing(base: object, head: object, at: str) -> list[str]:
    """Return the places at which `head` lacks a value of `base`."""
    if isinstance(base, dict) and isinstance(head, dict):
        return [p for k in base for p in missing(base[k], head.get(k), f"{at}.{k}")]
    if isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        return [p for i, (b, h) in enumerate(zip(base, head)) for p in missing(b, h, f"{at}[{i}]")]
    return [] if base == head else [at]

def rows(tree: str, file: str) -> list[object]:
    found = next(Path(sys.argv[1]).glob(f"longhealth-{tree}-1/*/latest")) / file
    return [json.loads(line) for line in found.read_text().splitlines()]

wrong = 0
for file in ("metrics.jsonl", "rollouts.jsonl"):
    base, head = rows("base", file), rows("head", file)
    places = missing(base, head, file) if base else [f"{file}: no rows"]
    wrong += bool(places)
    print(f"{file}: " + (f"differs at {places[:5]}" if places else f"{len(base)} rows equal"))
sys.exit(1 if wrong else 0)
PY
"$python" - "$work" <<'PY'
import json, statistics, sys
from pathlib import Path

def median(tree: str) -> float:
    seconds = []
    for run in Path(sys.argv[1]).glob(f"longhealth-{tree}-*/*/latest"):
        for line in (run / "events.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row.get("event") == "step" and row["step"] > 3:
                seconds.append(row["seconds"]["step"])
    return statistics.median(seconds)

base, head = median("base"), median("head")
print(f"median seconds a step: base {base:.3f}, this tree {head:.3f}, ratio {head / base:.3f}")
PY
exit $failed
