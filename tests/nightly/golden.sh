#!/usr/bin/env bash
# Compares this tree's run files with those of a base commit, value by value, and its seconds a step.
#   tests/nightly/golden.sh [BASE]
# Runs meshes/longhealth.yaml (seed 0, 30 steps) twice in each tree, in turn, and three_channels
# without external teachers once (its trainer on one thread: with two, no two runs are equal).
# Defaults that changed since the base are set back in this tree's run of three_channels. Every value
# that the base wrote must be there, equal to the last digit; fields that are new may stand beside.
# Exits 1 where one differs. Both use this tree's .venv.
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
then=() # what this tree needs to train as the base did
for turn in 1 2; do
  for tree in base head; do
    at=$([ $tree = base ] && echo "$work/base" || echo "$head")
    run "$at" "longhealth-$tree-$turn" meshes/longhealth.yaml --set train.steps=30 \
      --set 'evaluate.arms=[on_policy]'
    [ $tree = base ] || then=(--set objective.balance=none --set objective.sdpo.token_clip=0.05 \
      --set objective.grpo.zero_variance=keep)
    [ $turn = 2 ] || run "$at" "channels-$tree-1" meshes/three_channels.yaml --set train.steps=8 \
      --set replay=null --set objective.beta=0 --set roles.trainer.threads=1 \
      --set 'evaluate.arms=[on_policy]' "${then[@]}"
  done
done

failed=0
"$python" - "$work" <<'PY' || failed=1
import json, sys
from pathlib import Path

REPLACED = {"clipped", "negative"}  # facts of sdpo's clip; now gradient_removed

def missing(base: object, head: object, at: str) -> list[str]:
    """Return the places at which `head` lacks a value of `base`."""
    if isinstance(base, dict) and isinstance(head, dict):
        keys = [k for k in base if not (at.endswith("sdpo") and k in REPLACED)]
        return [p for k in keys for p in missing(base[k], head.get(k), f"{at}.{k}")]
    if isinstance(base, list) and isinstance(head, list) and len(base) == len(head):
        return [p for i, (b, h) in enumerate(zip(base, head)) for p in missing(b, h, f"{at}[{i}]")]
    return [] if base == head else [at]

def rows(tree: str, name: str, file: str) -> list[object]:
    found = next(Path(sys.argv[1]).glob(f"{name}-{tree}-1/*/latest")) / file
    return [json.loads(line) for line in found.read_text().splitlines()]

wrong = 0
for name, file in (
    ("longhealth", "metrics.jsonl"), ("longhealth", "rollouts.jsonl"),
    ("channels", "metrics.jsonl"), ("channels", "episodes.jsonl"),
):
    base, head = rows("base", name, file), rows("head", name, file)
    places = missing(base, head, file) if base else [f"{file}: no rows"]
    wrong += bool(places)
    print(f"{name} {file}: " + (f"differs at {places[:5]}" if places else f"{len(base)} rows equal"))
sys.exit(1 if wrong else 0)
PY
"$python" - "$work" <<'PY'
import json, statistics, sys
from pathlib import Path

def median(tree: str) -> float:
    seconds = []
    for run in Path(sys.argv[1]).glob(f"longhealth-{tree}-*"):
        for line in next(run.glob("*/latest")).joinpath("events.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row.get("event") == "step" and row["step"] > 3:
                seconds.append(row["seconds"]["step"])
    return statistics.median(seconds)

base, head = median("base"), median("head")
print(f"median seconds a step: base {base:.3f}, this tree {head:.3f}, ratio {head / base:.3f}")
PY
exit $failed
