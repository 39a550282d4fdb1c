"""One training step at the seed's size, phase by phase, each beside its roofline.

    python -m benchmarks.step_3b                     # a GPU: Llama-3.2-3B's shape, bfloat16
    python -m benchmarks.step_3b --shape tiny        # a CPU: the same code in seconds
    python -m benchmarks.step_3b --shape 3b --dry    # no GPU: the 3B step counted on fake tensors

Random weights; 8 prompts of 200 tokens, each answered with 512, about a document of 12,000, over a
cartridge of 2,048. The phases are learning's own functions (benchmarks.phases). A bound takes a
phase's FLOPs and bytes (forge_run.plan.roofline) at the ceilings that this device reached just
before. A phase that fails is printed with its error, the others go on over drawn tokens, and the
exit code is 1. Where the student runs out of memory: `--micro-tokens 2848`. On a GPU the first step
compiles attention, and is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from actors.setup import keep_freed_memory
from benchmarks.ceilings import measured, seconds
from benchmarks.phases import PHASES, SETTINGS, Setting, Step, bounds
from benchmarks.record import arguments, provenance, write
from forge_run.figures import bytes_text, count_text, seconds_text
from forge_run.plan.roofline import A100, EXPLICIT, H200, Device
from learning.model import flush_denormals
from services.shared_memory import SharedMemoryPlane

GOAL = 2.0  # times the cached bound, of the whole step
PUBLISH_GOAL_S = 0.1


@dataclass
class Row:
    """One phase: analysis, bound at the ceilings, and the medians that were measured."""

    phase: str
    flops: float
    bytes: float
    bound_s: float
    seconds: float | None
    peak_bytes: int = 0
    error: str = ""
    rounds: list[float] = field(default_factory=list)

    def line(self) -> str:
        cells = [
            f"{self.phase:<10}",
            f"{count_text(self.flops):>10}",
            f"{bytes_text(self.bytes):>10}",
        ]
        cells.append(f"{seconds_text(self.bound_s):>10}")
        if self.seconds is None:
            return " ".join([*cells, f" FAILED {self.error}"])
        cells += [f"{seconds_text(self.seconds):>10}", f"{self.seconds / self.bound_s:>9.1f}x"]
        if self.peak_bytes:
            cells.append(f"{bytes_text(self.peak_bytes):>10}")
        return " ".join(cells)


def measure(step: Step, ceilings: Device, repeats: int) -> list[Row]:
    """Rows of the document, the four phases and the whole step, after one step of warm-up."""
    rounds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        step.laps = {"document": step.laps["document"]}
        step.run()
        for phase in PHASES:
            if turn and phase in step.laps:
                rounds[phase].append(step.laps[phase])
    rows = [
        Row(
            phase, analysis.flops, analysis.bytes, analysis.seconds(ceilings),
            statistics.median(rounds[phase]) if rounds[phase] else None,
            step.peak_bytes.get(phase, 0), step.failures.get(phase, ""), rounds[phase],
        )
        for phase, analysis in bounds(step.setting).items() if phase in PHASES
    ]  # fmt: skip
    known = [row.seconds for row in rows if row.seconds is not None]
    total = sum(known) if len(known) == len(rows) else None
    missing = "" if total is not None else "a phase failed"
    flops, moved = sum(row.flops for row in rows), sum(row.bytes for row in rows)
    rows.append(Row("step", flops, moved, sum(r.bound_s for r in rows), total, error=missing))
    analysis, work = bounds(step.setting)["document"], step.setting.work
    bound = analysis.seconds(ceilings)
    rows.append(Row("(document)", analysis.flops, analysis.bytes, bound, step.laps["document"]))
    # The rollout's forward of one token alone: the rest of it is drawing, and Python.
    whole, tokens = rows[0], work.response
    decode = step.decoding(work.prompt + work.response // 2)
    lap = seconds(decode, step.device, 10)
    rows.append(
        Row("(token)", whole.flops / tokens, whole.bytes / tokens, whole.bound_s / tokens, lap)
    )
    return rows


def published_bound(name: str, setting: Setting) -> tuple[str, float]:
    """The cached bound at half of a known device's printed peaks: what the goal is stated in."""
    device = next((d for d in (H200, A100) if d.name in name), H200)
    return device.name, sum(bounds(setting)[phase].seconds(device) for phase in PHASES)


def dry(setting: Setting) -> dict[str, Any]:
    """The step counted on fake tensors, which have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape, work = setting.shape, setting.work
    analysis = bounds(setting, EXPLICIT)
    size = (shape.layers, 2, shape.kv_heads, work.document, shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        document = torch.empty(size, dtype=getattr(torch, setting.dtype))
        counts = Step(setting, torch.device("cpu"), document=document).counts()
    for phase, count in counts.items():
        known = analysis.get(phase)
        beside = f" analysis {count_text(known.flops)}" if known else ""
        least = f" (needed {bytes_text(known.bytes)})" if known else ""
        print(
            f"{phase:<18} FLOPs {count_text(count.flops)}{beside}, unfused traffic "
            f"{bytes_text(count.traffic)}{least}, {count.kernels:,} kernels, kept "
            f"{bytes_text(count.saved)}"
        )
    return {phase: asdict(count) for phase, count in counts.items()}


def parse_arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "step_3b")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--shape", choices=sorted(SETTINGS), default="3b" if cuda else "tiny")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps")
    parser.add_argument("--micro-tokens", type=int, help="most tokens of one student forward")
    parser.add_argument("--dry", action="store_true", help="count on fake tensors, measure nothing")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    setting, device = SETTINGS[options.shape], torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
        flush_denormals()
    told = provenance("step_3b", vars(options) | {"work": asdict(setting.work)})
    if options.dry:
        write(options.out, told, {}, {"counted": dry(setting)})
        return
    ceilings = measured(device, getattr(torch, setting.dtype))
    told["device"]["name"] = ceilings.name if device.type == "cuda" else told["device"]["name"]
    print(
        f"{ceilings.name}: {count_text(ceilings.flops)}FLOP/s, {bytes_text(ceilings.bandwidth)}/s, "
        f"to the host {bytes_text(ceilings.link)}/s"
    )
    plane = asyncio.run(SharedMemoryPlane.start())
    try:
        step = Step(setting, device, plane, options.micro_tokens)
        rows = measure(step, ceilings, 1 if options.quick else options.repeats)
    finally:
        asyncio.run(plane.stop())
    heads = ("FLOPs", "bytes", "bound", "measured", "over", "peak")
    print(f"{'phase':<10} " + " ".join(f"{head:>10}" for head in heads))
    for row in rows:
        print(row.line())
    by_phase = {row.phase: row for row in rows}
    ratios = {
        f"{phase} over its bound": lasted / by_phase[phase].bound_s
        for phase in (*PHASES, "step")
        if (lasted := by_phase[phase].seconds) is not None
    }
    name, bound = published_bound(ceilings.name, setting)
    if options.shape == "3b" and (lasted := by_phase["step"].seconds) is not None:
        verdict = "met" if lasted <= GOAL * bound else "MISSED"
        print(f"goal, step <= {GOAL:g} x {bound:.2f} s (cached bound, {name}): {verdict}")
    publish = by_phase["publish"].seconds
    if options.shape == "3b" and publish is not None:
        verdict = "met" if publish <= PUBLISH_GOAL_S else "MISSED"
        print(f"goal, publish <= {PUBLISH_GOAL_S:g} s: {verdict}")
    results: dict[str, Any] = {
        "ceilings": asdict(ceilings),
        "phases": [asdict(row) for row in rows],
        "cached_bound": {"device": name, "seconds": bound},
        "failures": step.failures,
    }
    if options.shape == "tiny":
        analysis = bounds(setting, EXPLICIT)
        counts = step.counts()
        ratios |= {
            f"{phase}, counted FLOPs over analysis": counts[phase].flops / analysis[phase].flops
            for phase in ("teacher", "student")
        }
        results["counted"] = {phase: asdict(count) for phase, count in counts.items()}
    write(options.out, told, ratios, results)
    sys.exit(1 if step.failures else 0)


if __name__ == "__main__":
    main()
