"""What share of a step is not model compute, in a short real run on this machine.

    python -m benchmarks.orchestration [--steps 20] [--quick]

Runs `forge-run meshes/longhealth.yaml`, shortened by overrides, without evaluation questions beyond
a few, and reads the run's own `results.json` and `events.jsonl`: orchestration is the step's wall
time less the seconds that actors spent computing. Its share depends on how long a step is; its
milliseconds say what a longer step would pay. `hidden` are the seconds that teachers computed
beside the rollout, which are in no phase.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, arguments, provenance, write

GOAL = 0.05  # of a step
ARM = "on_policy"
LIMIT_S = 280.0
CODE = "import sys; from forge_run.cli import forge_run; sys.exit(forge_run())"


def finished_run(mesh: str, steps: int, sets: Iterable[str], directory: str) -> Path:
    """Run `steps` steps and return the directory of the finished run."""
    chosen = [
        f"train.steps={steps}", "train.warmup_steps=2", "train.checkpoint_every=0",
        f'evaluate.arms=["{ARM}"]', "evaluate.questions=4", "evaluate.probe_every=0",
        "evaluate.sampled=false", *sets,
    ]  # fmt: skip
    words = [sys.executable, "-c", CODE, mesh, "--run-dir", directory]
    words += [word for each in chosen for word in ("--set", each)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(
            f"the run ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    (run,) = {path.parent.resolve() for path in Path(directory).glob("*/*/results.json")}
    return run


def step_seconds(events: Iterable[dict[str, Any]], arm: str) -> list[dict[str, float]]:
    """Return the seconds of every step of an arm but the first, which opens connections."""
    steps = [e for e in events if e.get("event") == "step" and e.get("arm") == arm]
    return [e["seconds"] | {"hidden": e["hidden"]} for e in steps[1:]]


def main() -> None:
    parser = arguments(__doc__, "orchestration")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mesh", default="meshes/longhealth.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as of forge-run"
    )
    options = parser.parse_args()
    steps = 6 if options.quick else options.steps
    told = provenance("orchestration", vars(options) | {"steps": steps})
    with tempfile.TemporaryDirectory() as directory:
        run = finished_run(options.mesh, steps, options.set, directory)
        results = json.loads((run / "results.json").read_text())
        lines = (run / "events.jsonl").read_text().splitlines()
    seconds = step_seconds(map(json.loads, lines), ARM)
    phases = {name: statistics.mean(s[name] for s in seconds) for name in seconds[0]}
    share = phases["orchestration"] / phases["step"]
    print("  ".join(f"{name} {1e3 * value:.0f} ms" for name, value in phases.items()))
    medians = {name: statistics.median(s[name] for s in seconds) for name in seconds[0]}
    spoken = "  ".join(f"{name} {medians[name]:.2f} s" for name in ("rollout", "hidden", "score"))
    hidden = medians["hidden"] / (medians["hidden"] + medians["score"])
    print(f"medians: {spoken}; {hidden:.0%} of the teachers' seconds hidden")
    verdict = "met" if share <= GOAL else "MISSED"
    print(
        f"orchestration {share:.1%} of a step of {phases['step']:.2f} s "
        f"({1e3 * phases['orchestration']:.0f} ms); goal {GOAL:.0%}: {verdict}"
    )
    found = {
        "steps": len(seconds), "mean_seconds": phases, "median_seconds": medians,
        "by_step": seconds, "orchestration_share_of_run": results["orchestration_share"],
    }  # fmt: skip
    write(options.out, told, {"orchestration over step": share}, found)


if __name__ == "__main__":
    main()
