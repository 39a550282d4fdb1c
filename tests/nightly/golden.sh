#!/usr/bin/env bash
# Compares this tree's run files with those of a base commit, byte by byte, and its seconds a step.
#   tests/nightly/golden.sh [BASE]
# Runs meshes/longhealth.yaml (seed 0, 30 steps) twice in each tree, in turn, and three_channels
# without external teachers once (its trainer on one thread: with two, no two runs are equal).
# Exits 1 where a file differs. Both use this tree's .venv.
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
    [ $turn = 2 ] || run "$at" "channels-$tree-1" meshes/three_channels.yaml --set train.steps=8 \
      --set replay=null --set objective.beta=0 --set roles.trainer.threads=1 --set 'evaluate.arms=[on_policy]'
  done
done

failed=0
for pair in longhealth:metrics.jsonl longhealth:rollouts.jsonl channels:metrics.jsonl channels:episodes.jsonl; do
  name=${pair%%:*} file=${pair#*:}
  if cmp "$work"/"$name"-base-1/*/latest/"$file" "$work"/"$name"-head-1/*/latest/"$file"; then
    echo "equal: $name $file $(sha256sum <"$work"/"$name"-head-1/*/latest/"$file" | cut -c1-16)"
  else
    failed=1
  fi
done
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
