"""One training step at the seed's size, phase by phase, each beside its roofline.

    python -m benchmarks.step_gpu                     # a GPU: Llama-3.2-3B's shape, bfloat16
    python -m benchmarks.step_gpu --shape tiny        # a CPU: the same code in seconds
    python -m benchmarks.step_gpu --shape 3b --dry    # no GPU: the 3B step counted on fake tensors

Random weights (`benchmarks.gpu.phase_step` has the phases); 8 prompts of 200 tokens, each answered
with 512, about a document of 12,000, over a cartridge of 2,048. A bound takes a phase's FLOPs and
bytes (forge_run.plan.roofline) at the ceilings that this device reached just before. A phase that
fails is printed with its error, the others go on over drawn tokens, and the exit code is 1. Where
the student runs out of memory: `--micro-tokens 2848`. The first step warms up and is not measured.
`python -m benchmarks.gpu` checks numbers, vLLM and memory too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.benchmark import Timer

from benchmarks.gpu.phase_step import PHASES, SETTINGS, PhaseStep, Setting, bounds
from benchmarks.meters import FigureTable, one_thread
from benchmarks.record import benchmark
from cartridge_forge.forge_run.plan.roofline import A100, EXPLICIT, H200, DevicePeaks, PhaseCost
from cartridge_forge.learning.attention import layout_of
from cartridge_forge.learning.batch import pack
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.statistics.formatting import bytes_text, count_text

GOAL = 2.0  # times the cached bound, of the whole step
PUBLISH_GOAL_S = 0.1


# -- measured ceilings of a device ---------------------------------------------------------------


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the mean of `times` runs, after a warm-up, a GPU's work included."""
    return float(Timer("work()", globals={"work": work}).timeit(times).mean)


def measured(device: torch.device, dtype: torch.dtype) -> DevicePeaks:
    """Measure the device's ceilings in this run. Memory bandwidth counts bytes read and written,
    the link's those that reach the host (on a CPU: a copy, which crosses no link)."""
    large = device.type == "cuda"
    n = 8192 if large else 512
    a = torch.ones(n, n, dtype=dtype, device=device)
    flops = 2 * n**3 / seconds(lambda: a @ a, 20)
    size = 2 << 30 if large else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), 10)
    piece = source[: 256 << 20]
    host = torch.empty_like(piece, device="cpu", pin_memory=large)
    link = piece.nbytes / seconds(lambda: host.copy_(piece), 10)
    if large:
        del source, target, piece
        torch.cuda.empty_cache()  # the step needs the memory
    name = torch.cuda.get_device_name(device) if large else "cpu"
    return DevicePeaks(f"{name}, measured", flops, bandwidth, link, mfu=1.0)


# -- phases beside their bounds -------------------------------------------------------------------


def phase_row(
    phase: str, cost: PhaseCost, bound_s: float, lasted: Sequence[float], **more: Any
) -> dict[str, Any]:
    """Return one phase: its analysis, its bound at the ceilings, and the median of what it lasted,
    None where that was not measured."""
    median = statistics.median(lasted) if lasted else None
    ratio = round(median / bound_s, 2) if median is not None else None
    figures = {"flops": cost.flops, "bytes": cost.bytes, "bound_s": bound_s}
    return {"phase": phase, **figures, "seconds": median, "over": ratio, **more}


def measure(step: PhaseStep, ceilings: DevicePeaks, repeats: int) -> list[dict[str, Any]]:
    """Print and return the four phases, the whole step, the document and a token of the rollout,
    after one warm-up step."""
    rounds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        step.laps = {"document": step.laps["document"]}
        step.run()
        for phase in PHASES:
            if turn and phase in step.laps:
                rounds[phase].append(step.laps[phase])
    analysis, work = bounds(step.setting), step.setting.work
    table = FigureTable()
    for phase in PHASES:
        cost, peak = analysis[phase], step.peak_bytes.get(phase, 0)
        error = step.failures.get(phase, "")
        failed = error and f"FAILED {error}"
        bound, laps = cost.seconds(ceilings), rounds[phase]
        table.add(phase_row(phase, cost, bound, laps, peak_bytes=peak, error=failed))
        table.rows[-1]["rounds"] = laps
    flops, moved, bound = (
        sum(row[name] for row in table.rows) for name in ("flops", "bytes", "bound_s")
    )
    medians = [row["seconds"] for row in table.rows]
    totals = [] if None in medians else [sum(medians)]
    table.add(phase_row("step", PhaseCost("step", flops, moved), bound, totals))
    document, rollout, tokens = analysis["document"], analysis["rollout"], work.response
    read_s = document.seconds(ceilings)
    table.add(phase_row("(document)", document, read_s, [step.laps["document"]]))
    # The rollout's forward of one token; the rest of its time is sampling and Python.
    lap = seconds(step.decoding(work.prompt + tokens // 2), 10)
    token_cost = PhaseCost("token", rollout.flops / tokens, rollout.bytes / tokens)
    table.add(phase_row("(token)", token_cost, rollout.seconds(ceilings) / tokens, [lap]))
    return table.rows


def published_bound(name: str, setting: Setting) -> tuple[str, float]:
    """Return the cached bound at half of a known device's printed peaks: GOAL refers to it."""
    device = next((d for d in (H200, A100) if d.name in name), H200)
    return device.name, sum(bounds(setting)[phase].seconds(device) for phase in PHASES)


@contextmanager
def _real_layouts() -> Iterator[None]:
    """Compute where tokens lie on real tensors, under fake ones: their values decide shapes."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with unset_fake_temporarily():
                return function(*arguments, **named)

        return call

    places = {
        "cartridge_forge.learning.step.pack": pack,
        "cartridge_forge.learning.teacher.pack": pack,
        "benchmarks.gpu.phase_step.pack": pack,
        "cartridge_forge.learning.attention.layout_of": layout_of,
        "torch.unique": torch.unique,
    }
    with ExitStack() as stack:
        for target, function in places.items():
            stack.enter_context(patch(target, real(function)))
        yield


def dry(setting: Setting) -> dict[str, Any]:
    """Count the step on fake tensors, which have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape, work = setting.shape, setting.work
    size = (shape.layers, 2, shape.kv_heads, work.document, shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True), _real_layouts():
        document = torch.empty(size, dtype=getattr(torch, setting.dtype))
        counts = PhaseStep(setting, torch.device("cpu"), document=document).counts()
    analysis, table = bounds(setting, EXPLICIT), FigureTable()
    for phase, count in counts.items():
        analysed = asdict(analysis[phase]) if phase in analysis else {}
        needed = {name: analysed.get(name, "") for name in ("flops", "bytes")}
        table.add({"phase": phase, "counted": asdict(count), "analysis": needed})
    return {phase: asdict(count) for phase, count in counts.items()}


def measure_step(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return each phase over its bound, and all figures; on the tiny shape counts as well."""
    setting, device = SETTINGS[options.shape], torch.device(options.device)
    if device.type == "cpu":
        one_thread()
    if options.dry:
        return {}, {"work": asdict(setting.work), "counted": dry(setting)}
    ceilings = measured(device, getattr(torch, setting.dtype))
    print(
        f"{ceilings.name}: {count_text(ceilings.flops)}FLOP/s, {bytes_text(ceilings.bandwidth)}/s, "
        f"to the host {bytes_text(ceilings.link)}/s"
    )
    plane = asyncio.run(SharedMemoryPlane.start())
    try:
        step = PhaseStep(setting, device, plane, options.micro_tokens)
        rows = measure(step, ceilings, options.repeats)
    finally:
        asyncio.run(plane.stop())
    lasted = {row["phase"]: row["seconds"] for row in rows}
    ratios = {
        f"{row['phase']} over its bound": row["seconds"] / row["bound_s"]
        for row in rows
        if row["phase"] in (*PHASES, "step") and row["seconds"] is not None
    }
    name, bound = published_bound(ceilings.name, setting)
    goals = {
        "step": (GOAL * bound, f"{GOAL:g} x {bound:.2f} s (cached bound, {name})"),
        "publish": (PUBLISH_GOAL_S, f"{PUBLISH_GOAL_S:g} s"),
    }
    for phase, (most, spoken) in goals.items():
        if options.shape == "3b" and lasted[phase] is not None:
            print(f"goal, {phase} <= {spoken}: {'met' if lasted[phase] <= most else 'MISSED'}")
    results: dict[str, Any] = {
        "work": asdict(setting.work),
        "ceilings": asdict(ceilings),
        "phases": rows,
        "cached_bound": {"device": name, "seconds": bound},
        "failures": step.failures,
    }
    if options.shape == "tiny":
        analysis = bounds(setting, EXPLICIT)
        counts = step.counts()
        for phase in ("teacher", "student"):
            ratio = counts[phase].flops / analysis[phase].flops
            ratios[f"{phase}, counted FLOPs over analysis"] = ratio
        results["counted"] = {phase: asdict(count) for phase, count in counts.items()}
    return ratios, results


def main() -> None:
    cuda = torch.cuda.is_available()
    record = benchmark(
        __doc__,
        measure_step,
        {
            "--device": "cuda" if cuda else "cpu",
            "--shape": {"choices": sorted(SETTINGS), "default": "3b" if cuda else "tiny"},
            "--repeats": (3, "measured steps"),
            "--micro-tokens": {"type": int, "help": "most tokens of one student forward"},
            "--dry": (False, "count on fake tensors, measure nothing"),
        },
        quick={"repeats": 1},
    )
    sys.exit(1 if record["results"].get("failures") else 0)


if __name__ == "__main__":
    main()
