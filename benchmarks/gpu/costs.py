"""Time a step by phase beside its roofline, and compare each role's memory with the plan."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.phase_step import PHASES, PhaseStep, bounds, synchronize
from benchmarks.gpu.rows import Check, Outcome
from benchmarks.gpu.scene import NAME, CheckScene
from cartridge_forge.forge_run.plan.roofline import DevicePeaks
from cartridge_forge.learning.batch import context_of
from cartridge_forge.learning.cartridge import CartridgeBank, Fingerprints, get_missing, put_changed
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    contexts_of,
    score_kept,
)
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.cluster.manifests.sizing import model_size, role_needs
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.statistics.formatting import bytes_text
from cartridge_forge.protocols.step import PublishedCartridge, Sample, TensorRef

ROUNDS = 3
WARM_SECONDS = 60.0  # that the first step may take beyond a later one
PUBLISH_SECONDS = 0.1  # one cartridge, from the trainer to a reader's device
OVER_PLAN = 1.25  # times the plan's bytes: the allocator's rounding and cache
TOP = 20
KINDS = ("trainer", "doc_teacher")


def costs(scene: CheckScene, ceilings: Callable[[], DevicePeaks]) -> list[Check]:
    """Return the rows of this module, in order."""
    timed, most = _Timed(scene), f"<= {OVER_PLAN:g} x the plan"
    of_phase = [
        Check(f"{phase}, embedded", "beside its roofline", partial(timed.phase, phase, ceilings))
        for phase in PHASES[:3]
    ]
    return [
        Check("ceilings", "beside the printed peaks", lambda: _ceilings(ceilings())),
        Check("first step", f"<= {WARM_SECONDS:g} s beyond a later one", timed.warm_up),
        *of_phase,
        Check(
            "publish, one cartridge", f"<= {PUBLISH_SECONDS:g} s", partial(timed.publish, ceilings)
        ),
        Check("publish, a step's cartridges", "bytes and seconds", partial(_published, scene)),
        *(
            Check(f"memory of the {role}", most, partial(_memory, scene, role)) for role in KINDS
        ),
    ]  # fmt: skip


def _ceilings(peaks: DevicePeaks) -> Outcome:
    figures = {"flops": peaks.flops, "bandwidth": peaks.bandwidth, "link": peaks.link}
    return Outcome(
        f"{peaks.flops / 1e12:.3g} TFLOP/s, {bytes_text(round(peaks.bandwidth))}/s, to the host "
        f"{bytes_text(round(peaks.link))}/s",
        None,
        figures,
    )


class _Timed:
    """Run the steps once, for every row that reads of them."""

    def __init__(self, scene: CheckScene) -> None:
        self._scene = scene

    @cached_property
    def _laps(self) -> tuple[dict[str, str], dict[str, list[float]]]:
        """Return what failed in each phase, and its seconds of every round, the first one's too.
        Nothing of the step stays in memory: the rows of memory come later."""
        plane = asyncio.run(SharedMemoryPlane.start())
        try:
            step = PhaseStep(self._scene.setting.step, self._scene.device, plane)
            laps: dict[str, list[float]] = {phase: [] for phase in PHASES}
            for turn in range(ROUNDS + 1):
                step.laps = {}
                step.run(sample=turn < 2)  # the embedded sampler takes 17 s on an H200
                for phase, seconds in step.laps.items():
                    laps[phase].append(seconds)
        finally:
            asyncio.run(plane.stop())
        return step.failures, laps

    def _of(self, phase: str) -> list[float]:
        failures, laps = self._laps
        if phase in failures:
            raise RuntimeError(failures[phase])
        return laps[phase]

    def warm_up(self) -> Outcome:
        phases = [self._of(phase) for phase in PHASES]
        first, later = (sum(one[turn] for one in phases) for turn in (0, -1))
        return Outcome(
            f"{first:.2f} s, a later one {later:.2f} s",
            first - later <= WARM_SECONDS,
            {"first_s": first, "later_s": later},
        )

    def phase(self, phase: str, ceilings: Callable[[], DevicePeaks]) -> Outcome:
        return _beside(self._scene, phase, self._of(phase), ceilings(), None)

    def publish(self, ceilings: Callable[[], DevicePeaks]) -> Outcome:
        return _beside(self._scene, "publish", self._of("publish"), ceilings(), PUBLISH_SECONDS)


def _beside(
    scene: CheckScene, phase: str, laps: list[float], ceilings: DevicePeaks, most: float | None
) -> Outcome:
    """Return a phase's median, without the first round, beside its bound."""
    seconds = statistics.median(laps[1:])
    cost = bounds(scene.setting.step)[phase]
    bound = cost.seconds(ceilings)
    figures = {"seconds": seconds, "rounds": laps, "bound_s": bound, "flops": cost.flops,
               "bytes": cost.bytes}  # fmt: skip
    text = f"{seconds:.3f} s, {seconds / bound:.1f} x its bound"
    return Outcome(text, None if most is None else seconds <= most, figures)


def _names(scene: CheckScene) -> list[str]:
    """Return a name for each cartridge that a step may change."""
    learn = scene.spec.learn
    return [f"{NAME}{i}" for i in range(min(learn.rollout.prompts, learn.data.patients))]


def _published(scene: CheckScene) -> Outcome:
    """Put the cartridges of a step as the trainer does, and get them as a reader does."""
    step = scene.setting.step
    shape = (step.shape.layers, 2, step.shape.kv_heads, step.work.cartridge, step.shape.head_dim)
    kv = {name: _drawn(shape, scene, i) for i, name in enumerate(_names(scene))}

    async def move() -> tuple[float, float]:
        plane = await SharedMemoryPlane.start()
        keys = count()

        async def put_tensors(tensors: Mapping[str, Tensor]) -> TensorRef:
            return await plane.put(f"cartridges/{next(keys)}", tensors)

        async def lasts(work: Awaitable[Any]) -> tuple[float, Any]:
            synchronize(scene.device)
            start = time.perf_counter()
            result = await work
            synchronize(scene.device)
            return time.perf_counter() - start, result

        async def load(published: Sequence[PublishedCartridge]) -> None:
            for tensor in (await get_missing(plane.get, published, kv)).values():
                tensor.to(scene.device, copy=True)

        try:
            since = dict.fromkeys(kv, 0)
            putting, snapshots = await lasts(
                put_changed(put_tensors, since, kv, Fingerprints().fingerprint, ())
            )
            getting, _ = await lasts(load(snapshots))
            return putting, getting
        finally:
            await plane.stop()

    putting, getting = asyncio.run(move())
    moved = sum(x.nbytes for x in kv.values())
    return Outcome(
        f"{bytes_text(moved)}: put in {putting:.2f} s, read in {getting:.2f} s",
        None,
        {"bytes": moved, "put_s": putting, "read_s": getting},
    )


def _memory(scene: CheckScene, role: str) -> Outcome:
    """Run a role's part of a step at the sizes of the one-GPU mesh, and compare its peak with the
    plan."""
    device, learn = scene.device, scene.spec.learn
    plan = role_needs(scene.spec, role, model_size(learn.model)).held
    work = {"trainer": _train, "doc_teacher": _teach}[role]
    assert scene.model  # its weights are the role's too
    if device.type != "cuda":
        work(scene)
        return Outcome(f"not measured on a CPU; the plan has {bytes_text(plan)}", None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work(scene)
    peak = torch.cuda.max_memory_allocated(device)
    return Outcome(
        f"{bytes_text(peak)}, the plan {bytes_text(plan)}",
        peak <= OVER_PLAN * plan,
        {"peak": peak, "plan": plan, "reserved": torch.cuda.max_memory_reserved(device)},
    )


def _drawn(shape: Sequence[int], scene: CheckScene, seed: int) -> Tensor:
    draws = torch.Generator(scene.device).manual_seed(seed)
    dtype = getattr(torch, scene.setting.step.dtype)
    return torch.randn(shape, generator=draws, dtype=dtype, device=scene.device)


def _samples(scene: CheckScene, names: Sequence[str]) -> list[Sample]:
    """Return a sample of every prompt, each about a document of its own as far as there are."""
    response = scene.setting.step.work.response
    samples = []
    for i, prompt in enumerate(scene.prompts):
        name = names[i % len(names)]
        sample = scene.sample(i, scene.ids(response), prompt=prompt)
        samples.append(replace(sample, cartridge=name, contexts=(name,)))
    return samples


def _train(scene: CheckScene) -> None:
    """Make one step of the trainer over as many cartridges as the mesh has, and a version."""
    learn, step = scene.spec.learn, scene.setting.step
    shape = (step.shape.layers, 2, step.shape.kv_heads, step.work.cartridge, step.shape.head_dim)
    names = [f"{NAME}{i}" for i in range(learn.cartridges)]
    bank = CartridgeBank(names, [_drawn(shape, scene, i) for i in range(len(names))], frozen=1)
    trainer = CartridgeTrainer(
        scene.model, bank, learn.train, objective=learn.objective, loss=learn.loss,
        publish_dtype=step.dtype,
    )  # fmt: skip
    trainer.begin("memory", 1)
    samples = _samples(scene, names[: len(_names(scene))])
    tokens = sum(len(s.response_ids) for s in samples)
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, 64, generator=draws).log_softmax(-1)[:, :TOP]
    teacher = TeacherDistribution(
        indices=torch.arange(TOP, dtype=torch.int32).repeat(tokens, 1), logprobs=logits
    )
    trainer.step(doc_batch(samples, teacher), trainer.version)
    trainer.snapshot(trainer.version)


def _teach(scene: CheckScene) -> None:
    """Score a step over as many documents as the teacher holds."""
    learn, step = scene.spec.learn, scene.setting.step
    shape = (step.shape.layers, 2, step.shape.kv_heads, step.work.document, step.shape.head_dim)
    names = _names(scene)
    # Drawn, not read: a document of 12,000 tokens takes seconds.
    kv_of = {name: _drawn(shape, scene, i) for i, name in enumerate(names)}
    ids = {name: (i,) for i, name in enumerate(names)}
    cache = DocumentKVCache(
        lambda contexts: kv_of[names[contexts[0]]], ids, learn.teacher.max_kv_bytes
    )
    samples = _samples(scene, names)
    score_kept(
        scene.model, samples, contexts_of(samples, cache), step.work.sample_tokens, TOP,
        prefix=context_of,
    )  # fmt: skip
