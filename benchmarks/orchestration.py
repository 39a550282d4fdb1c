"""What share of a step is orchestration, in a short real run on this machine.

    python -m benchmarks.orchestration [--steps 20] [--quick]

Runs `forge-run meshes/longhealth.yaml`, plain on policy, shortened by overrides, without evaluation
questions beyond a few, and reads the run's own `results.json` and `events.jsonl`: orchestration is
the step's wall time in which no actor worked: neither a model nor an environment. `environment` is
the time in which only an environment or a reward worked. Orchestration's share depends on how long
a step is; its milliseconds say what a longer step would pay. Beside it stands the share of all
processor seconds that controller and client took since all roles stood: polling and heartbeats are
in that alone.
`hidden` are the seconds that teachers computed beside the rollout, which are in no phase.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, benchmark
from cartridge_forge.protocols.files import iter_rows

GOAL = 0.05  # of a step
ARM = "on_policy"
LIMIT_S = 280.0
CODE = "import sys; from cartridge_forge.forge_run.cli import forge_run; sys.exit(forge_run())"


def finished_run(
    mesh: str, steps: int, sets: Iterable[str], directory: str, limit_s: float = LIMIT_S
) -> Path:
    """Run `steps` plain steps and return the directory of the finished run."""
    chosen = [
        f"train.steps={steps}", "train.warmup_steps=2", "train.checkpoint_every=0",
        f'evaluate.arms=["{ARM}"]', "evaluate.questions=4", "evaluate.probe_every=0",
        "evaluate.sampled=false", "train.warm_start=null", "rollout.verify=null", *sets,
    ]  # fmt: skip
    words = [sys.executable, "-c", CODE, mesh, "--run-dir", directory]
    words += [word for setting in chosen for word in ("--set", setting)]
    completed = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if completed.returncode:
        sys.exit(
            f"the run ended with {completed.returncode}:\n{completed.stdout[-1000:]}"
            f"{completed.stderr[-2000:]}"
        )
    (run,) = {path.parent.resolve() for path in Path(directory).glob("*/*/results.json")}
    return run


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the share of a step in which no actor works, and the seconds of every step of the arm
    but the first, which opens connections."""
    with tempfile.TemporaryDirectory() as directory:
        run = finished_run(options.mesh, options.steps, options.set, directory)
        results = json.loads((run / "results.json").read_text())
        steps = [e for e in iter_rows(run / "events.jsonl") if e["event"] == "step"]
    seconds = [e["seconds"] | {"hidden": e["hidden"]} for e in steps if e["arm"] == ARM][1:]
    columns = {name: [s[name] for s in seconds] for name in seconds[0]}
    means = {name: statistics.mean(column) for name, column in columns.items()}
    medians = {name: statistics.median(column) for name, column in columns.items()}
    share, hidden = means["orchestration"] / means["step"], medians["hidden"]
    print("  ".join(f"{name} {1e3 * value:.0f} ms" for name, value in means.items()))
    spoken = "  ".join(f"{name} {medians[name]:.2f} s" for name in ("rollout", "hidden", "score"))
    hidden_share = hidden / (hidden + medians["score"])
    print(f"medians: {spoken}; {hidden_share:.0%} of the teachers' seconds hidden")
    print(
        f"orchestration {share:.1%} of a step of {means['step']:.2f} s "
        f"({1e3 * means['orchestration']:.0f} ms); goal {GOAL:.0%}: "
        f"{'met' if share <= GOAL else 'MISSED'}"
    )
    cpu = results["cpu"]
    print(
        f"controller and client took {cpu['orchestration']:.1f} of {cpu['all']:.1f} s of the "
        f"processors, {cpu['share']:.1%}; goal {GOAL:.0%}"
    )
    return {"orchestration over step": share, "orchestration over CPU": cpu["share"]}, {
        "steps": len(seconds), "mean_seconds": means, "median_seconds": medians,
        "by_step": seconds, "orchestration_share_of_run": results["orchestration_share"],
    }  # fmt: skip


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--steps": 20,
            "--mesh": "meshes/longhealth.yaml",
            "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
        },
        quick={"steps": 6},
    )
