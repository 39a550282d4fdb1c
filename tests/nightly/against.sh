#!/usr/bin/env bash
# Compares the main job's speed in this tree with that of a base commit, both in this tree's .venv.
#   tests/nightly/against.sh [BASE]
# Runs meshes/longhealth.yaml (seed 0, 30 steps plain on policy from the first tokens, as it was at
# 9fc9f6f) twice in each tree, in turn, and prints medians: seconds a step, trained tokens a second,
# seconds to the first finished step and processor seconds of the whole run. Read the ratios: machines
# differ.
set -euo pipefail
base=${1:-9fc9f6f}
head=$(cd "$(dirname "$0")/../.." && pwd)
python=$head/.venv/bin/python
work=$(mktemp -d)
trap 'git -C "$head" worktree remove --force "$work/base" 2>/dev/null; rm -rf "$work"' EXIT
git -C "$head" worktree add --quiet --detach "$work/base" "$base"

for turn in 1 2; do
  for tree in base head; do
    at=$([ $tree = base ] && echo "$work/base" || echo "$head")
    name=$tree-$turn
    (cd "$at" && PYTHONPATH=$at "$python" - "$work/$name" <<'PY'
import json, resource, subprocess, sys
from pathlib import Path

# A tree whose job is no longer plain on policy is told to be.
plain = ("cartridge.init=first_tokens", "rollout.verify=null", "train.warm_start=null",
         "train.minibatches=1")
sets = plain if "verify:" in Path("configs/longhealth.yaml").read_text() else ()
run = subprocess.run(
    [sys.executable, "-c", "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())",
     "meshes/longhealth.yaml", "--set", "train.steps=30", "--set", "evaluate.arms=[on_policy]",
     "--run-dir", sys.argv[1], *(word for one in sets for word in ("--set", one))],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
)
if run.returncode:
    sys.exit(run.stdout)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1] + ".json", "w") as out:
    json.dump(used.ru_utime + used.ru_stime, out)
PY
    )
  done
done

"$python" - "$work" <<'PY'
import json, statistics, sys
from datetime import datetime
from pathlib import Path

WHAT = ("seconds a step", "trained tokens a second", "seconds to the first step",
        "processor seconds")


def figures(tree: str) -> list[float]:
    """Return the medians over a tree's runs, in the order of WHAT."""
    steps, rates, first, burnt = [], [], [], []
    for run in Path(sys.argv[1]).glob(f"{tree}-*/*/latest"):
        rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        done = [row for row in rows if row["event"] == "step"]
        begun = datetime.fromisoformat(rows[0]["time"])
        first.append((datetime.fromisoformat(done[0]["time"]) - begun).total_seconds())
        steps += [row["seconds"]["step"] for row in done if row["step"] > 3]
        trained = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        tokens = {row["step"]: row["tokens"] for row in trained}
        rates += [tokens[r["step"]] / r["seconds"]["step"] for r in done if r["step"] > 3]
    burnt = [json.loads(p.read_text()) for p in Path(sys.argv[1]).glob(f"{tree}-*.json")]
    return [statistics.median(column) for column in (steps, rates, first, burnt)]


for what, base, head in zip(WHAT, figures("base"), figures("head"), strict=True):
    print(f"{what:26} base {base:8.3f}   this tree {head:8.3f}   ratio {head / base:.3f}")
PY
