#!/usr/bin/env bash
# Show that this tree computes what a base commit computes, to the byte.
#   tests/nightly/equal_runs.sh [BASE]
# Runs `longhealth` (6 steps, 3 of them on the teacher's text) and `three_channels` (2 steps, without external teachers) in each tree,
# in turns on one machine, and compares their metrics.jsonl. No hash is committed: one processor's
# bits are not another's. A change that means to change numbers names the new base in the Makefile.
set -euo pipefail
base=${1:?the commit to compare with}
head=$(cd "$(dirname "$0")/../.." && pwd)
python=$head/.venv/bin/python
work=$(mktemp -d)
trap 'git -C "$head" worktree remove --force "$work/tree" 2>/dev/null; rm -rf "$work"' EXIT
git -C "$head" worktree add --quiet --detach "$work/tree" "$base"

metrics() { # TREE NAME MESH ARGUMENTS...: run it; print the path of its metrics.jsonl
  local tree=$1 runs=$work/runs/$2
  local entry
  entry=$(sed -n 's/^forge-run = "\(.*\):forge_run"$/\1/p' "$tree/pyproject.toml")
  (cd "$tree" && PYTHONPATH=$tree "$python" -c \
    "import sys; from $entry import forge_run; sys.exit(forge_run())" \
    "${@:3}" --run-dir "$runs" >"$work/$2.log" 2>&1) || { cat "$work/$2.log" >&2; exit 1; }
  ls "$runs"/*/latest/metrics.jsonl
}

compare() { # NAME MESH ARGUMENTS...
  local before after
  before=$(metrics "$work/tree" "$1-base" "${@:2}")
  after=$(metrics "$head" "$1-head" "${@:2}")
  test -s "$before"
  cmp "$before" "$after"
  echo "$1: $(wc -l <"$after") rows, $(wc -c <"$after") equal bytes"
}

compare longhealth meshes/longhealth.yaml --set train.steps=6 --set train.warmup_steps=2 \
  --set 'train.warm_start={steps: 3}'
compare three_channels meshes/three_channels.yaml --set train.steps=2 --set train.warmup_steps=1 \
  --set replay=null --set objective.beta=0
