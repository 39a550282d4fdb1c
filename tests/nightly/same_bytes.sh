#!/usr/bin/env bash
# Compares what two trees compute, by bytes, on this machine.
#   tests/nightly/same_bytes.sh [BASE]
# Runs six steps of meshes/longhealth.yaml and two of meshes/three_channels.yaml (without external teachers) in
# the tree of commit BASE and in this one, in turns, both in this tree's .venv, and compares each run's
# metrics.jsonl. Exits 1 where a byte differs. No hash is kept: another processor computes other bits. A change
# that moves numbers on purpose names the new BASE here.
set -euo pipefail
base=${1:-fd5bb35b}
head=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'git -C "$head" worktree remove --force "$work/base" 2>/dev/null; rm -rf "$work"' EXIT
git -C "$head" worktree add --quiet --detach "$work/base" "$base"

run() {  # TREE MESH [--set ...]
  local tree=$1 mesh=$2 at; shift 2
  at=$([ "$tree" = base ] && echo "$work/base" || echo "$head")
  (cd "$at" && PYTHONPATH=$at "$head/.venv/bin/python" -c 'import sys; from forge_run.cli import forge_run; sys.exit(forge_run())' \
    "meshes/$mesh.yaml" --run-dir "$work/$tree" --set 'evaluate.arms=[on_policy]' --set evaluate.questions=8 "$@" \
    > "$work/$tree-$mesh.log" 2>&1) || { cat "$work/$tree-$mesh.log"; exit 1; }
}

differs=0
for mesh in longhealth three_channels; do
  sets=(--set train.steps=6)
  [ $mesh = three_channels ] && sets=(--set train.steps=2 --set replay=null --set objective.beta=0 --set roles.teacher_replay=null)
  for tree in base head; do run $tree $mesh "${sets[@]}"; done
  if cmp "$work/base/$mesh/latest/metrics.jsonl" "$work/head/$mesh/latest/metrics.jsonl"; then
    echo "$mesh: $(wc -l < "$work/head/$mesh/latest/metrics.jsonl") rows of metrics, equal to the byte with $base"
  else
    differs=1
  fi
done
exit $differs
