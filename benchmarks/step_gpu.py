"""One training step at the seed's size, phase by phase, each beside its roofline.

    python -m benchmarks.step_gpu                     # a GPU: Llama-3.2-3B's shape, bfloat16
    python -m benchmarks.step_gpu --shape tiny        # a CPU: the same code in seconds
    python -m benchmarks.step_gpu --shape 3b --dry    # no GPU: the 3B step counted on fake tensors

    rollout   learning.decoding.decode_batch.generate over the shared cartridge
    teacher   learning.scoring.score_kept on the document's cached KV, the top 20 kept
    student   learning.step.train_step: forward, backward, optimiser
    publish   one packed snapshot through the tensor plane to a reader's device

Random weights; 8 prompts of 200 tokens, each answered with 512, about a document of 12,000, over a
cartridge of 2,048. A bound takes a phase's FLOPs and bytes (forge_run.plan.roofline) at
the ceilings that this device reached just before. A phase that fails is printed with its error,
the others go on
over drawn tokens, and the exit code is 1. Where the student runs out of memory: `--micro-tokens
2848`. On a GPU the first step compiles attention, and is not measured.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from actors.base import keep_freed_memory
from benchmarks.record import ROOT, arguments, provenance, write
from forge_run.formatting import bytes_text, count_text, seconds_text
from forge_run.plan import roofline
from forge_run.plan.roofline import A100, EXPLICIT, H200, DevicePeaks, PhaseCost, Workload
from learning.cartridge.bank import CartridgeBank
from learning.decoding.decode_batch import generate
from learning.losses.doc_kl import doc_kl
from learning.losses.objective import active_channels
from learning.model.attention import DecodeCache, PrefixContext, hidden_states, kv_shape, register
from learning.model.document_kv import DocumentKVCache, document_kv
from learning.model.loading import flush_denormals
from learning.packing import pack, response_logits
from learning.scoring import TeacherDistribution, prefixes_of, score_kept
from learning.step import new_optimizer, train_step
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
aten = torch.ops.aten
# Ops that touch no memory, although their schema does not declare a view.
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}
# Ops that read only as much of their first input as they return.
GATHERS = {aten.embedding, aten.index, aten.gather, aten.index_select}


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


# -- counting the work of code while it runs, on fake tensors too ---------------------------------


@dataclass
class Count:
    """Hold counts. `flops`: of matrix products. `traffic`: bytes that every op reads and writes, as
    if nothing stayed in a cache and no two ops were fused. `kernels`: ops that launch something.
    `saved`: bytes kept for a backward, without weights."""

    flops: int = 0
    traffic: int = 0
    kernels: int = 0
    saved: int = 0


@contextmanager
def counted(parameters: Iterator[Tensor] | None = None) -> Iterator[Count]:
    """Count the block's work. `parameters` are not counted as saved."""
    count = Count()
    known = {p.untyped_storage()._cdata for p in parameters or ()}
    kept: dict[int, Any] = {}  # storages, kept alive so that no id is reused

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in kept:
            kept[storage._cdata] = storage
            count.saved += storage.nbytes()
        return tensor

    with (
        FlopCounterMode(display=False) as flops,
        _Traffic(count),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        yield count
    count.flops = flops.get_total_flops()


class _Traffic(TorchDispatchMode):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in FREE or func.namespace != "aten":
            return out
        written = _bytes(out)
        read = written if func.overloadpacket in GATHERS else _bytes((args, kwargs))
        if read + written:
            self._count.traffic += read + written
            self._count.kernels += 1
        return out


def _bytes(tree: Any) -> int:
    """Return bytes of the tensors' elements; an expanded one has fewer than its shape suggests."""
    return sum(
        min(leaf.numel() * leaf.element_size(), int(leaf.untyped_storage().nbytes()))
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
    )


# -- measured ceilings of a device ---------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for launched work: otherwise a GPU's time is that of the launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median of `times` runs, after one warm-up."""
    laps = []
    for _ in range(times + 1):
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        laps.append(time.perf_counter() - begun)
    return statistics.median(laps[1:])


def measured(device: torch.device, dtype: torch.dtype) -> DevicePeaks:
    """Measure the device's ceilings in this run. Memory bandwidth counts bytes read and written,
    the link's those that reach the host (on a CPU: a copy, which crosses no link)."""
    large = device.type == "cuda"
    n = 8192 if large else 512
    a = torch.ones(n, n, dtype=dtype, device=device)
    flops = 2 * n**3 / seconds(lambda: a @ a, device, 20)
    size = 2 << 30 if large else 64 << 20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), device, 10)
    piece = source[: 256 << 20]
    host = torch.empty_like(piece, device="cpu", pin_memory=large)
    link = piece.nbytes / seconds(lambda: host.copy_(piece), device, 10)
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


@dataclass
class PhaseRow:
    """Hold one phase: analysis, bound at the ceilings, and the measured medians."""

    phase: str
    flops: float
    bytes: float
    bound_s: float
    seconds: float | None
    peak_bytes: int = 0
    error: str = ""
    rounds: list[float] = field(default_factory=list)

    def line(self) -> str:
        known = count_text(self.flops), bytes_text(self.bytes), seconds_text(self.bound_s)
        line = f"{self.phase:<10}" + "".join(f" {text:>10}" for text in known)
        if self.seconds is None:
            return f"{line}  FAILED {self.error}"
        line += f" {seconds_text(self.seconds):>10} {self.seconds / self.bound_s:>9.1f}x"
        return line + (f" {bytes_text(self.peak_bytes):>10}" if self.peak_bytes else "")


def measure(step: PhaseStep, ceilings: DevicePeaks, repeats: int) -> list[PhaseRow]:
    """Return rows of the document, the four phases and the whole step, after one warm-up step."""
    rounds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        step.laps = {"document": step.laps["document"]}
        step.run()
        for phase in PHASES:
            if turn and phase in step.laps:
                rounds[phase].append(step.laps[phase])
    analysis, work = bounds(step.setting), step.setting.work
    rows = [
        PhaseRow(
            phase, analysis[phase].flops, analysis[phase].bytes, analysis[phase].seconds(ceilings),
            statistics.median(rounds[phase]) if rounds[phase] else None,
            step.peak_bytes.get(phase, 0), step.failures.get(phase, ""), rounds[phase],
        )
        for phase in PHASES
    ]  # fmt: skip
    known = [row.seconds for row in rows if row.seconds is not None]
    total = sum(known) if len(known) == len(rows) else None
    missing = "" if total is not None else "a phase failed"
    flops, moved = sum(row.flops for row in rows), sum(row.bytes for row in rows)
    document, whole, tokens = analysis["document"], rows[0], work.response
    # The rollout's forward of one token; the rest of its time is sampling and Python.
    lap = seconds(step.decoding(work.prompt + tokens // 2), step.device, 10)
    each = whole.flops / tokens, whole.bytes / tokens, whole.bound_s / tokens
    read = document.flops, document.bytes, document.seconds(ceilings)
    return [
        *rows,
        PhaseRow("step", flops, moved, sum(r.bound_s for r in rows), total, error=missing),
        PhaseRow("(document)", *read, step.laps["document"]),
        PhaseRow("(token)", *each, lap),
    ]


def published_bound(name: str, setting: Setting) -> tuple[str, float]:
    """Return the cached bound at half of a known device's printed peaks: GOAL refers to it."""
    device = next((d for d in (H200, A100) if d.name in name), H200)
    return device.name, sum(bounds(setting)[phase].seconds(device) for phase in PHASES)


def dry(setting: Setting) -> dict[str, Any]:
    """Count the step on fake tensors, which have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape, work = setting.shape, setting.work
    analysis = bounds(setting, EXPLICIT)
    size = (shape.layers, 2, shape.kv_heads, work.document, shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        document = torch.empty(size, dtype=getattr(torch, setting.dtype))
        counts = PhaseStep(setting, torch.device("cpu"), document=document).counts()
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


def main() -> None:
    parser = arguments(__doc__, "step_gpu")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--shape", choices=sorted(SETTINGS), default="3b" if cuda else "tiny")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps")
    parser.add_argument("--micro-tokens", type=int, help="most tokens of one student forward")
    parser.add_argument("--dry", action="store_true", help="count on fake tensors, measure nothing")
    options = parser.parse_args()
    setting, device = SETTINGS[options.shape], torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
        flush_denormals()
    told = provenance("step_gpu", vars(options) | {"work": asdict(setting.work)})
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
        step = PhaseStep(setting, device, plane, options.micro_tokens)
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
    goals = {
        "step": (GOAL * bound, f"{GOAL:g} x {bound:.2f} s (cached bound, {name})"),
        "publish": (PUBLISH_GOAL_S, f"{PUBLISH_GOAL_S:g} s"),
    }
    for phase, (most, spoken) in goals.items():
        if options.shape == "3b" and (lasted := by_phase[phase].seconds) is not None:
            print(f"goal, {phase} <= {spoken}: {'met' if lasted <= most else 'MISSED'}")
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
