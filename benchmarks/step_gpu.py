"""One training step at the seed's size, phase by phase, each beside its roofline.

    python -m benchmarks.step_gpu                     # a GPU: Llama-3.2-3B's shape, bfloat16
    python -m benchmarks.step_gpu --shape tiny        # a CPU: the same code in seconds
    python -m benchmarks.step_gpu --shape 3b --dry    # no GPU: the 3B step counted on fake tensors

    rollout   learning.decoding.generate.generate over the shared cartridge
    teacher   learning.scoring.score_kept on the document's cached KV, the top 20 kept
    student   learning.step.train_step: forward, backward, optimiser
    publish   one packed snapshot through the tensor plane to a reader's device

Random weights; 8 prompts of 200 tokens, each answered with 512, about a document of 12,000, over a
cartridge of 2,048. A bound takes a phase's FLOPs and bytes (forge_run.plan.roofline) at the
ceilings that this device reached just before. A phase that fails is printed with its error, the
others go on over drawn tokens, and the exit code is 1. Where the student runs out of memory:
`--micro-tokens 2848`. On a GPU the first step compiles attention, and is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.meters import Count, FigureTable, counted, one_thread
from benchmarks.record import ROOT, benchmark
from forge_run.formatting import bytes_text, count_text
from forge_run.plan import roofline
from forge_run.plan.roofline import A100, EXPLICIT, H200, DevicePeaks, PhaseCost, Workload
from learning.cartridge.bank import CartridgeBank
from learning.decoding.generate import generate
from learning.losses.doc_kl import doc_kl
from learning.losses.objective import active_channels
from learning.model.attention import DecodeCache, PrefixContext, register
from learning.model.document_kv import DocumentKVCache
from learning.model.loading import document_kv, hidden_states, kv_shape
from learning.packing import pack, response_logits
from learning.scoring import prefixes_of, score_kept
from learning.step import new_optimizer, train_step
from learning.teacher_logprobs import TeacherDistribution
from protocols.ports import TensorPlane
from protocols.spec.objective import LossSpec, ObjectiveSpec
from protocols.spec.sections import ShapeSpec
from protocols.train_batch import TrainBatch
from protocols.types import Completion, GenerateRequest, PrefixRef, Sample, Sampling
from services.planes.shared_memory import SharedMemoryPlane

GOAL = 2.0  # times the cached bound, of the whole step
PUBLISH_GOAL_S = 0.1
TOP = 20
NAME = "document"
PHASES = ("rollout", "teacher", "student", "publish")


@dataclass(frozen=True)
class Setting:
    """Describe a model's shape and one step's workload on it."""

    shape: ShapeSpec
    work: Workload
    dtype: str


SETTINGS = {
    "3b": Setting(
        ShapeSpec(
            layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192,
            vocab=128_256,
        ),
        Workload(8, 200, 512, 12_000, 2048, 1, 2),
        "bfloat16",
    ),
    "tiny": Setting(
        ShapeSpec(
            layers=3, hidden=96, heads=6, kv_heads=2, head_dim=16, intermediate=256, vocab=1024
        ),
        Workload(8, 20, 48, 600, 96, 1, 4),
        "float32",
    ),
}  # fmt: skip


def random_model(shape: ShapeSpec, dtype: str, device: torch.device) -> PreTrainedModel:
    """Return a frozen Llama of this shape, with random weights drawn on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=1 << 17, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=register(), dtype=getattr(torch, dtype)
        )
    model.requires_grad_(False)
    return model.eval()


def bounds(
    setting: Setting, kernel: roofline.AttentionKernel = roofline.FUSED
) -> dict[str, PhaseCost]:
    """Return the analysis of each phase, and of reading the document once."""
    shape, work = setting.shape, setting.work
    return {
        "document": roofline.reading(shape, work.document, work.value_bytes),
        "rollout": roofline.rollout(shape, work, kernel),
        "teacher": roofline.teacher_cached(shape, work, kernel),
        "student": roofline.student(shape, work, kernel),
        "publish": roofline.publish(shape, work.distinct, work.cartridge, work.value_bytes),
    }


# -- measured ceilings of a device ---------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for launched work: otherwise a GPU's time is that of the launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


class PhaseStep:
    """Run one step over a random document and its cartridge; `laps` has each phase's seconds."""

    def __init__(
        self,
        setting: Setting,
        device: torch.device,
        plane: TensorPlane | None = None,
        micro_tokens: int | None = None,
        document: Tensor | None = None,
    ) -> None:
        """Without a plane nothing can be published. `document` is its KV [L, 2, H_kv, T, D], if
        already read."""
        self.setting, self.device, self._plane = setting, device, plane
        self._micro_tokens = micro_tokens
        self.model = random_model(setting.shape, setting.dtype, device)
        work, draws = setting.work, random.Random("step_3b")
        self._ids = lambda count: tuple(draws.choices(range(setting.shape.vocab), k=count))
        self._document = self._ids(work.document)
        self._prompts = [self._ids(work.prompt) for _ in range(work.samples)]
        self.samples = [self.sample(i, self._ids(work.response)) for i in range(work.samples)]
        self.laps: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.failures: dict[str, str] = {}
        kv = document
        if kv is None:
            kv = self.timed("document", lambda: document_kv(self.model, self._document))
        self.cache = DocumentKVCache(lambda _: kv, {NAME: self._document}, kv.nbytes)
        self.bank = CartridgeBank((NAME,), kv[None, ..., : work.cartridge, :], frozen=1)
        self._optimizer = new_optimizer(self.bank)
        self._cartridge = self.bank.snapshot(self.model.dtype)[0]

    def sample(
        self, i: int, response: Sequence[int], logprobs: tuple[float, ...] | None = None
    ) -> Sample:
        held = logprobs or (0.0,) * len(response)
        versions = (0,) * len(response)
        return Sample(str(i), NAME, self._prompts[i], tuple(response), held, versions)

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        begun = time.perf_counter()
        done = work()
        synchronize(self.device)
        self.laps[phase] = time.perf_counter() - begun
        if self.device.type == "cuda":
            self.peak_bytes[phase] = torch.cuda.max_memory_allocated(self.device)
        return done

    def run(self) -> None:
        """Run the four phases in order, on the rollout's responses."""
        completions = self._try("rollout", self.rollout)
        if completions is not None:
            self.samples = [
                self.sample(i, c.token_ids, c.logprobs) for i, c in enumerate(completions)
            ]
        teacher = self._try("teacher", self.teacher)
        if teacher is not None:
            self._try("student", lambda: self.student(teacher))
        self._try("publish", lambda: asyncio.run(self.publish()))

    def _try(self, phase: str, work: Callable[[], Any]) -> Any:
        try:
            return self.timed(phase, work)
        except (RuntimeError, ValueError) as error:  # includes ours, and out of memory
            traced = traceback.extract_tb(error.__traceback__)
            last = [frame for frame in traced if "site-packages" not in frame.filename][-1]
            where = f"{os.path.relpath(last.filename, ROOT)}:{last.lineno}"
            self.failures[phase] = f"{type(error).__name__} at {where}: {error}"[:500]
            return None

    def rollout(self) -> list[Completion]:
        """Sample every response to its full length at temperature 1."""
        ref = PrefixRef(f"cartridge/{NAME}", 0)
        drawn = Sampling(max_tokens=self.setting.work.response)
        requests = [
            GenerateRequest(str(i), prompt, ref, drawn, i) for i, prompt in enumerate(self._prompts)
        ]
        return generate(self.model, requests, lambda _: self._cartridge, frozenset())

    def teacher(self) -> TeacherDistribution:
        prefixes = prefixes_of(self.samples, self.cache)
        rows = self.setting.work.sample_tokens
        return TeacherDistribution(**score_kept(self.model, self.samples, prefixes, rows, TOP))

    def student(self, teacher: TeacherDistribution) -> None:
        train_step(
            self.model, self.bank, self._optimizer,
            TrainBatch(doc=self.samples, scores={"doc_teacher": teacher}),
            active_channels(ObjectiveSpec()), lr=1e-3, clip=1.0,
            row_tokens=self.setting.work.sample_tokens, version=0, staleness=0,
            micro_tokens=self._micro_tokens,
        )  # fmt: skip

    async def publish(self) -> None:
        """Publish from the trainer's float32 to a reader's device: snapshot, put, read, copy."""
        assert self._plane is not None
        packet = await self._plane.put("cartridges/0", {"kv": self.bank.snapshot(self.model.dtype)})
        tensors = await self._plane.get(packet)
        self._cartridge = tensors["kv"].to(self.device, copy=True)[0]
        await self._plane.delete(packet.key)

    # -- counting: the same forwards, without operations that read a tensor's values -------------

    def decoding(self, filled: int) -> Callable[[], Tensor]:
        """Return a function that decodes one token of every sample after `filled` tokens."""
        layers, heads, _ = kv_shape(self.model)
        rows = self.setting.work.samples
        cache = DecodeCache.empty(self._cartridge[None], layers, rows, heads, filled + 1)
        cache.used = filled
        context = PrefixContext(kv=self._cartridge[None], cache=cache)
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        mask = torch.ones(rows, 1, 1, filled + 1, dtype=torch.bool, device=self.device)

        @torch.no_grad()
        def decode() -> Tensor:
            hidden = hidden_states(self.model, ids, ids + filled, mask, context)
            logits: Tensor = self.model.lm_head(hidden[:, -1])
            return logits.float()

        return decode

    def learn(self, teacher: TeacherDistribution) -> None:
        """Run the student's forward and backward, without the optimiser."""
        tokens = self.setting.work.sample_tokens
        packed = pack(self.samples, {NAME: self.setting.work.cartridge}, tokens)
        kv = self.bank.kv(packed.names).to(self.model.dtype)
        total, count = doc_kl(response_logits(self.model, packed, kv), teacher, LossSpec())
        (total / count).backward()

    def counts(self) -> dict[str, Count]:
        """Return each phase's counts. Decoding is counted half-way, where its cost is the mean."""
        work = self.setting.work
        found = {}
        decode = self.decoding(work.prompt + work.response // 2)
        with counted(self.model.parameters()) as found["decode, one token"]:
            decode()
        with counted(self.model.parameters()) as found["teacher"]:
            teacher = self.teacher()
        with counted(self.model.parameters()) as found["student"]:
            self.learn(teacher)
        return found


# -- phases beside their bounds -------------------------------------------------------------------


def phase_row(
    phase: str, cost: PhaseCost, bound_s: float, lasted: Sequence[float], **more: Any
) -> dict[str, Any]:
    """Return one phase: its analysis, its bound at the ceilings, and the median of what it lasted,
    None where that was not measured."""
    median = statistics.median(lasted) if lasted else None
    over = round(median / bound_s, 2) if median is not None else None
    figures = {"flops": cost.flops, "bytes": cost.bytes, "bound_s": bound_s}
    return {"phase": phase, **figures, "seconds": median, "over": over, **more}


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
        lap = rounds[phase]
        row = phase_row(phase, cost, cost.seconds(ceilings), lap, peak_bytes=peak, rounds=lap)
        table.add(row | {"error": error and f"FAILED {error}"})
    flops, moved, bound = (
        sum(row[name] for row in table.rows) for name in ("flops", "bytes", "bound_s")
    )
    medians = [row["seconds"] for row in table.rows]
    whole = [] if None in medians else [sum(medians)]
    table.add(phase_row("step", PhaseCost("step", flops, moved), bound, whole))
    document, rollout, tokens = analysis["document"], analysis["rollout"], work.response
    read_s = document.seconds(ceilings)
    table.add(phase_row("(document)", document, read_s, [step.laps["document"]]))
    # The rollout's forward of one token; the rest of its time is sampling and Python.
    lap = seconds(step.decoding(work.prompt + tokens // 2), 10)
    each = PhaseCost("token", rollout.flops / tokens, rollout.bytes / tokens)
    table.add(phase_row("(token)", each, rollout.seconds(ceilings) / tokens, [lap]))
    return table.rows


def published_bound(name: str, setting: Setting) -> tuple[str, float]:
    """Return the cached bound at half of a known device's printed peaks: GOAL refers to it."""
    device = next((d for d in (H200, A100) if d.name in name), H200)
    return device.name, sum(bounds(setting)[phase].seconds(device) for phase in PHASES)


def dry(setting: Setting) -> dict[str, Any]:
    """Count the step on fake tensors, which have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape, work = setting.shape, setting.work
    size = (shape.layers, 2, shape.kv_heads, work.document, shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        document = torch.empty(size, dtype=getattr(torch, setting.dtype))
        counts = PhaseStep(setting, torch.device("cpu"), document=document).counts()
    analysis, table = bounds(setting, EXPLICIT), FigureTable()
    for phase, count in counts.items():
        known = asdict(analysis[phase]) if phase in analysis else {}
        needed = {name: known.get(name, "") for name in ("flops", "bytes")}
        table.add({"phase": phase, "counted": asdict(count), "analysis": needed})
    return {phase: asdict(count) for phase, count in counts.items()}


def measure_step(asked: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return each phase over its bound, and all figures; on the tiny shape counts as well."""
    setting, device = SETTINGS[asked.shape], torch.device(asked.device)
    if device.type == "cpu":
        one_thread()
    if asked.dry:
        return {}, {"counted": dry(setting)}
    ceilings = measured(device, getattr(torch, setting.dtype))
    print(
        f"{ceilings.name}: {count_text(ceilings.flops)}FLOP/s, {bytes_text(ceilings.bandwidth)}/s, "
        f"to the host {bytes_text(ceilings.link)}/s"
    )
    plane = asyncio.run(SharedMemoryPlane.start())
    try:
        step = PhaseStep(setting, device, plane, asked.micro_tokens)
        rows = measure(step, ceilings, asked.repeats)
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
        if asked.shape == "3b" and lasted[phase] is not None:
            print(f"goal, {phase} <= {spoken}: {'met' if lasted[phase] <= most else 'MISSED'}")
    results: dict[str, Any] = {
        "ceilings": asdict(ceilings),
        "phases": rows,
        "cached_bound": {"device": name, "seconds": bound},
        "failures": step.failures,
    }
    if asked.shape == "tiny":
        analysis = bounds(setting, EXPLICIT)
        counts = step.counts()
        for phase in ("teacher", "student"):
            over = counts[phase].flops / analysis[phase].flops
            ratios[f"{phase}, counted FLOPs over analysis"] = over
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
        config={"work": {name: asdict(setting.work) for name, setting in SETTINGS.items()}},
    )
    sys.exit(1 if record["results"].get("failures") else 0)


if __name__ == "__main__":
    main()
