"""Check a GPU in ten minutes: correctness first, then a step's costs; nothing is downloaded.

    make gpu-check                              # one H100, H200 or A100: the published sizes
    python -m benchmarks.gpu --tiny             # anywhere: the same code on a small shape
    python -m benchmarks.gpu --only correctness

Three groups run one after another, each in a process of its own, so that none meets another's
memory or broken context:

    correctness   attention, a step against float32, the sampler, the alignment of both sides
    costs         a step by phase beside its roofline, publishing, memory by role
    engine        vLLM against the trainer, a hot swap, its start and its rollout

A row that fails is named with its error, and the next one runs. What the time does not suffice for
is NOT RUN. The rows are written as JSON and as a Markdown table; the exit code is 1 unless every
bounded row holds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from benchmarks.gpu.correctness import correctness
from benchmarks.gpu.costs import costs
from benchmarks.gpu.engine import engine
from benchmarks.gpu.rows import FAILED, NOT_RUN, OK, TOLD, Check, CheckRow, run_checks, table
from benchmarks.gpu.scene import SCENES, CheckScene
from benchmarks.meters import one_thread
from benchmarks.record import ROOT, provenance
from benchmarks.step_gpu import measured
from cartridge_forge.forge_run.plan.roofline import DevicePeaks

GROUPS = ("correctness", "costs", "engine")
MINUTES = 10.0
STEP_SECONDS = 2.1  # of a step at the published sizes on an H200: twice its cached bound
WHOLE_STEP = "step, sampled by vLLM"


def checks_of(group: str, scene: CheckScene) -> list[Check]:
    """Return a group's rows, none of which has run."""

    @cache
    def ceilings() -> DevicePeaks:
        return measured(scene.device, getattr(torch, scene.setting.step.dtype))

    groups: Mapping[str, Callable[[], list[Check]]] = {
        "correctness": lambda: correctness(scene),
        "costs": lambda: costs(scene, ceilings),
        "engine": lambda: engine(scene, ceilings),
    }
    return groups[group]()


def run_group(group: str, options: argparse.Namespace) -> None:
    """Run one group in this process, and write a line for each row as soon as it is there."""
    if options.device == "cpu":
        one_thread()
    scene = CheckScene(SCENES[options.scene], torch.device(options.device))
    checks = checks_of(group, scene)
    with options.rows.open("w") as file:
        names = [[check.name, check.wanted] for check in checks]
        file.write(json.dumps(names) + "\n")
        file.flush()
        for row in run_checks(checks):
            file.write(json.dumps(row.as_dict()) + "\n")
            file.flush()


def rows_of(group: str, options: argparse.Namespace, rows: Path, left_s: float) -> list[CheckRow]:
    """Run one group in a process of its own, for at most `left_s` seconds, and return its rows.
    Those that it did not come to have the reason as their error."""
    words = [
        "--scene",
        options.scene,
        "--device",
        options.device,
        "--group",
        group,
        "--rows",
        str(rows),
    ]
    reason, start = "", time.perf_counter()
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", *words, "--rows", str(rows)],
            cwd=ROOT,
            timeout=max(1.0, left_s),
        )
        reason = f"the group's process ended with exit code {completed.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"the group was stopped after {time.perf_counter() - start:.0f} s"
    lines = rows.read_text().splitlines() if rows.is_file() else []
    if not lines:
        return [CheckRow(group, "to start", verdict=FAILED, error=reason)]
    read_rows = [CheckRow(**json.loads(line)) for line in lines[1:] if line.endswith("}")]
    missing = json.loads(lines[0])[len(read_rows) :]
    # The row that was running when the process ended is the one that failed.
    verdicts = [FAILED] + [NOT_RUN] * len(missing)
    lost = [
        CheckRow(name, wanted, verdict=verdict, error=reason)
        for (name, wanted), verdict in zip(missing, verdicts, strict=False)
    ]
    return read_rows + lost


def whole_step(rows: Sequence[CheckRow], scene: str) -> list[CheckRow]:
    """Return the row of a step whose rollout is vLLM's, where its phases were measured."""
    names = ("rollout on vLLM", "teacher, embedded", "student, embedded", "publish, one cartridge")
    seconds_of = {row.name: row.figures.get("seconds") for row in rows}
    phases = [seconds_of.get(name) for name in names]
    if None in phases:
        return []
    seconds = sum(x for x in phases if x is not None)
    verdict = TOLD if scene != "3b" else OK if seconds <= STEP_SECONDS else FAILED
    wanted = f"<= {STEP_SECONDS:g} s on an H200"
    return [CheckRow(WHOLE_STEP, wanted, f"{seconds:.2f} s", verdict, figures={"seconds": seconds})]


def check(options: argparse.Namespace) -> int:
    """Run the groups, write what they found, and return the exit code."""
    options.out.mkdir(parents=True, exist_ok=True)
    name = "tiny" if options.scene == "tiny" else device_name(options.device)
    stem = options.out / name
    end, rows = time.perf_counter() + 60 * options.minutes, list[CheckRow]()
    for group in options.only or GROUPS:
        remaining_s = end - time.perf_counter()
        if remaining_s <= 0:
            rows.append(CheckRow(group, "to start", error=f"{options.minutes:g} minutes are over"))
            continue
        group_rows = rows_of(group, options, options.out / f".{group}.rows", remaining_s)
        print(table(group_rows), flush=True)
        rows += group_rows
    rows += whole_step(rows, options.scene)
    for group in GROUPS:
        (options.out / f".{group}.rows").unlink(missing_ok=True)
    record = {
        **provenance("gpu", {"device": options.device, "scene": options.scene}, "benchmarks.gpu"),
        "rows": [row.as_dict() for row in rows],
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    about = record["device"]
    head = f"{about['name']}, {about['cores']} cores, load {about['load']}: `{record['command']}`"
    stem.with_suffix(".md").write_text(f"{head}\n\n{table(rows)}")
    bad = [row.name for row in rows if row.verdict in (FAILED, NOT_RUN)]
    print(f"written to {stem}.json and .md; {len(rows)} rows, {len(bad)} failed or not run")
    for one in bad:
        print(f"  {one}")
    return 1 if bad else 0


def device_name(device: str) -> str:
    """Return the device's name, fit for a file: "nvidia-h200"."""
    spoken = torch.cuda.get_device_name(device) if device == "cuda" else device
    return re.sub(r"[^a-z0-9]+", "-", spoken.lower()).strip("-")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    has_cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--tiny", dest="scene", action="store_const", const="tiny", default="3b")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="these groups alone")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="most minutes of all groups")
    parser.add_argument("--out", type=Path, help="folder of the results")
    for name in ("--scene", "--group"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.scene == "3b" and options.device == "cpu":
        parser.error("the published sizes need a GPU, and torch sees none; add --tiny")
    if options.out is None:
        options.out = ROOT / "runs" / "bench"
    return options


def main() -> None:
    options = arguments()
    if options.group is not None:
        run_group(options.group, options)
        return
    sys.exit(check(options))


if __name__ == "__main__":
    main()
