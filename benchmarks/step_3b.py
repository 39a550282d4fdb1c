"""One training step at the seed's size, phase by phase, each beside its roofline.

    python -m benchmarks.step_3b                     # a GPU: Llama-3.2-3B's shape, bfloat16
    python -m benchmarks.step_3b --shape tiny        # a CPU: the same code in seconds
    python -m benchmarks.step_3b --shape 3b --dry    # no GPU: the 3B step counted on fake tensors

Random weights; 8 prompts of 200 tokens, each answered with 512, about a document of 12,000, over a
cartridge of 2,048. The phases are learning's own functions: `generate` over the shared cartridge,
`score` on the document's cached KV, `train_step` with its optimiser, and one packed snapshot
through the shared-memory plane to a reader's device. A bound takes a phase's FLOPs and bytes
(forge_run.roofline) at the ceilings that this device reached just before. A phase that fails is
printed with its error, the others go on over drawn tokens, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from actors.setup import keep_freed_memory
from benchmarks.ceilings import measured, synchronize
from benchmarks.counting import Count, counted
from benchmarks.record import arguments, provenance, write
from forge_run import roofline
from forge_run.plan import bytes_text, count_text, seconds_text
from forge_run.roofline import A100, EXPLICIT, H200, Device, Phase, Workload
from learning.attention import IMPLEMENTATION, DecodeCache, PrefixContext
from learning.batch import Batch
from learning.batching import pack, response_logits
from learning.cartridge import CartridgeBank
from learning.combined import Objective
from learning.decoding import generate
from learning.losses import DocKL, Teacher, doc_kl
from learning.model import document_kv, flush_denormals, hidden_states, kv_shape
from learning.prefixes import DocumentCache
from learning.scoring import kept, score
from learning.step import new_optimizer, train_step
from protocols.learn_spec import ShapeSpec
from protocols.ports import TensorPlane
from protocols.types import Completion, GenerateRequest, PrefixRef, Sample, Sampling
from services.shared_memory import SharedMemoryPlane

GOAL = 2.0  # times the cached bound, of the whole step
PUBLISH_GOAL_S = 0.1
TOP = 20
NAME = "document"
PHASES = ("rollout", "teacher", "student", "publish")


@dataclass(frozen=True)
class Setting:
    """A model's shape and one step's workload on it."""

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
    """A Llama of this shape, frozen, its weights drawn on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=1 << 17, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=IMPLEMENTATION, dtype=getattr(torch, dtype)
        )
    model.requires_grad_(False)
    return model.eval()


def bounds(setting: Setting, kernel: roofline.Kernel = roofline.FUSED) -> dict[str, Phase]:
    """The analysis of each phase, and of reading the document once."""
    shape, work = setting.shape, setting.work
    return {
        "document": roofline.reading(shape, work.document, work.value_bytes),
        "rollout": roofline.rollout(shape, work, kernel),
        "teacher": roofline.teacher_cached(shape, work, kernel),
        "student": roofline.student(shape, work, kernel),
        "publish": roofline.publish(shape, work.distinct, work.cartridge, work.value_bytes),
    }


class Step:
    """One step over a random document and its cartridge; `laps` has each phase's last seconds."""

    def __init__(
        self,
        setting: Setting,
        device: torch.device,
        plane: TensorPlane | None = None,
        micro_tokens: int | None = None,
        document: Tensor | None = None,
    ) -> None:
        """Without a plane nothing can be published. `document` is its KV [L, 2, H_kv, T, D], where
        it need not be read."""
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
        self.cache = DocumentCache(lambda _: kv, {NAME: self._document}, kv.nbytes)
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
        """The four phases in their order, on what the rollout said."""
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
        except (RuntimeError, ValueError) as error:  # what torch raises, out of memory included
            where = traceback.extract_tb(error.__traceback__)
            own = [f for f in where if "site-packages" not in f.filename]
            last = own[-1]
            self.failures[phase] = (
                f"{type(error).__name__} at {last.filename}:{last.lineno}: {error}"[:500]
            )
            self.laps.pop(phase, None)
            return None

    def rollout(self) -> list[Completion]:
        """Every response to its full length, sampled at temperature 1."""
        ref = PrefixRef(f"cartridge/{NAME}", 0)
        drawn = Sampling(max_tokens=self.setting.work.response)
        requests = [
            GenerateRequest(str(i), prompt, ref, drawn, i) for i, prompt in enumerate(self._prompts)
        ]
        return generate(self.model, requests, lambda _: self._cartridge, frozenset())

    def teacher(self) -> Teacher:
        logits = score(self.model, self.samples, self.cache, self.setting.work.sample_tokens)
        return Teacher(**kept(logits, TOP))

    def student(self, teacher: Teacher) -> None:
        train_step(
            self.model, self.bank, self._optimizer, Batch(doc=self.samples, doc_teacher=teacher),
            Objective(), lr=1e-3, clip=1.0, row_tokens=self.setting.work.sample_tokens, version=0,
            staleness=0, micro_tokens=self._micro_tokens,
        )  # fmt: skip

    async def publish(self) -> None:
        """From the trainer's float32 to a reader's device: snapshot, one packet, read, copy."""
        assert self._plane is not None
        packet = await self._plane.put("cartridges/0", {"kv": self.bank.snapshot(self.model.dtype)})
        tensors = await self._plane.get(packet)
        self._cartridge = tensors["kv"].to(self.device, copy=True)[0]
        await self._plane.delete(packet.key)

    # -- counting: the same forwards without what asks a tensor for its values -------------------

    @torch.no_grad()
    def decode_once(self, filled: int) -> Tensor:
        """One token of every sample, `filled` columns of its own KV before it."""
        layers, heads, _ = kv_shape(self.model)
        rows = self.setting.work.samples
        cache = DecodeCache.empty(self._cartridge[None], layers, rows, heads, filled + 1)
        cache.used = filled
        context = PrefixContext(kv=self._cartridge[None], cache=cache)
        ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        mask = torch.ones(rows, 1, 1, filled + 1, dtype=torch.bool, device=self.device)
        hidden = hidden_states(self.model, ids, ids + filled, mask, context)
        return self.model.lm_head(hidden[:, -1]).float()

    def learn(self, teacher: Teacher) -> None:
        """The student's forward and backward, without the optimiser."""
        tokens = self.setting.work.sample_tokens
        packed = pack(self.samples, {NAME: self.setting.work.cartridge}, tokens)
        kv = self.bank.kv(packed.names).to(self.model.dtype)
        total, count = doc_kl(response_logits(self.model, packed, kv), teacher, DocKL())
        (total / count).backward()

    def counts(self) -> dict[str, Count]:
        """What each phase does. Decoding is counted half-way, where its cost is the mean one."""
        work = self.setting.work
        found = {}
        with counted(self.model.parameters()) as found["decode, one token"]:
            self.decode_once(work.prompt + work.response // 2)
        with counted(self.model.parameters()) as found["teacher"]:
            teacher = self.teacher()
        with counted(self.model.parameters()) as found["student"]:
            self.learn(teacher)
        return found


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
    analysis = bounds(step.setting)["document"]
    bound = analysis.seconds(ceilings)
    rows.append(Row("(document)", analysis.flops, analysis.bytes, bound, step.laps["document"]))
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
    print(f"{'phase':<10} {'FLOPs':>10} {'bytes':>10} {'bound':>10} {'measured':>10}")
    for row in rows:
        print(row.line())
    by_phase = {row.phase: row for row in rows}
    ratios = {
        f"{phase} over its bound": seconds / by_phase[phase].bound_s
        for phase in (*PHASES, "step")
        if (seconds := by_phase[phase].seconds) is not None
    }
    name, bound = published_bound(ceilings.name, setting)
    if options.shape == "3b" and (seconds := by_phase["step"].seconds) is not None:
        verdict = "met" if seconds <= GOAL * bound else "MISSED"
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
