"""Check vLLM's engine with cartridges against the trainer, and what it costs to start."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.correctness import ON_VLLM, gap_outcome
from benchmarks.gpu.phase_step import bounds, synchronize
from benchmarks.gpu.rows import Check, Outcome
from benchmarks.gpu.scene import NAME, CheckScene
from cartridge_forge.actors.base import ModelSource, NoPlane, missing_vllm
from cartridge_forge.actors.engine_generator import build_engine, environment
from cartridge_forge.forge_run.plan.roofline import DevicePeaks
from cartridge_forge.plugins.cluster.manifests.devices import process_bytes
from cartridge_forge.plugins.cluster.manifests.sizing import model_size
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest

START_SECONDS = 240.0  # to load, compile and capture graphs
SHORT = 32  # tokens of a response where numbers are compared
PART_OF_GPU = 0.9  # most of the device's memory that an engine is given


def engine(scene: CheckScene, ceilings: Callable[[], DevicePeaks]) -> list[Check]:
    """Return the rows of this module, in order. All need the engine that the first one starts."""
    if missing_vllm():
        return []
    started = _Started(scene)
    mean, most = ON_VLLM
    gap = f"mean <= {mean:g}, max <= {most:g} nats"
    return [
        Check("vLLM starts and compiles", f"<= {START_SECONDS:g} s", started.start),
        Check("vLLM against the trainer", gap, started.compared),
        Check("hot swap", f"old and new at once; each {gap}", started.swapped),
        Check("rollout on vLLM", "beside its roofline", lambda: started.rollout(ceilings)),
    ]


class _Started:
    """Hold the engine, from the row that starts it on."""

    def __init__(self, scene: CheckScene) -> None:
        self._scene = scene

    @cached_property
    def _engine(self) -> Any:
        scene, setting = self._scene, self._scene.setting
        with tempfile.TemporaryDirectory(prefix="forge-gpu-check-") as folder:
            path = scene.write_model(Path(folder))
            base = ModelSource(str(path), setting.step.dtype, 1, {"none": (1,)}, 1 << 20, NoPlane())
            os.environ.update(environment(base))
            share = None
            if scene.device.type == "cuda":
                spec = scene.spec
                needed = process_bytes(spec, "generator", model_size(spec.learn.model))
                memory = torch.cuda.get_device_properties(scene.device).total_memory
                share = min(PART_OF_GPU, needed / memory)
            # The number of tokens of a step is a prompt's and its response's: no longer ones occur.
            return build_engine(
                base,
                frozenset(),
                GeneratorSpec(
                    backend="vllm", block_tokens=setting.block_tokens, chunk_tokens=2048,
                    kv_gib=setting.kv_gib, gpu_share=share,
                ),
            )  # fmt: skip

    def start(self) -> Outcome:
        start = time.perf_counter()
        self._engine.hold({(NAME, 0): self._scene.cartridge})
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        self._run(self._scene.requests(tokens=2)[:1])
        first = time.perf_counter() - start
        return Outcome(
            f"{seconds:.1f} s, and {first:.2f} s to a first response of two tokens",
            seconds <= START_SECONDS,
            {"start_s": seconds, "first_s": first},
        )

    def _run(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return the completions in the order of the requests. Raises RuntimeError for one that was
        refused."""
        for request in requests:
            self._engine.add(request.id, request, request.prefix)
        completions: dict[str, Completion] = {}
        while len(completions) < len(requests):
            for key, news in self._engine.step():
                if isinstance(news, Completion):
                    completions[key] = news
        for one in completions.values():
            if one.error:
                raise RuntimeError(one.error)
        return [completions[request.id] for request in requests]

    def _length(self) -> int:
        return min(SHORT, self._scene.setting.step.work.response)

    def compared(self) -> Outcome:
        completions = self._run(self._scene.requests(tokens=self._length()))
        return gap_outcome(self._scene, completions, self._scene.cartridge, ON_VLLM)

    def swapped(self) -> Outcome:
        """Publish a second version while requests over the first are decoded."""
        scene = self._scene
        old = scene.requests(tokens=self._length())
        for request in old:
            self._engine.add(request.id, request, request.prefix)
        completions: dict[str, Completion] = {}

        def take_some() -> None:
            for key, news in self._engine.step():
                if isinstance(news, Completion):
                    completions[key] = news

        take_some()
        # Other values to the same keys. Other places would be the same function: attention over a
        # prefix does not depend on the order of its tokens.
        second: Tensor = torch.cat([scene.cartridge[:, :1], -scene.cartridge[:, 1:]], dim=1)
        self._engine.hold({(NAME, 1): second})
        new = scene.requests(1, self._length())
        for request in new:
            self._engine.add(request.id, request, request.prefix)
        while len(completions) < len(old) + len(new):
            take_some()
        old_outcome = gap_outcome(scene, [completions[r.id] for r in old], scene.cartridge, ON_VLLM)
        moved = gap_outcome(scene, [completions[r.id] for r in new], second, ON_VLLM)
        wrong = gap_outcome(scene, [completions[r.id] for r in new], scene.cartridge, ON_VLLM)
        apart = wrong.figures["mean"] > ON_VLLM[0]
        return Outcome(
            f"old: {old_outcome.found}; new: {moved.found}; new by the old numbers: mean "
            f"{wrong.figures['mean']:.2g}",
            bool(old_outcome.passed and moved.passed and apart),
            {"old": old_outcome.figures, "new": moved.figures, "crossed": wrong.figures},
        )

    def rollout(self, ceilings: Callable[[], DevicePeaks]) -> Outcome:
        """Time the whole rollout of a step, after one that warms up."""
        scene, lasted = self._scene, []
        for _ in range(3):
            synchronize(scene.device)
            start = time.perf_counter()
            completions = self._run(scene.requests())
            lasted.append(time.perf_counter() - start)
        seconds = min(lasted[1:])
        bound = bounds(scene.setting.step)["rollout"].seconds(ceilings())
        tokens = sum(len(one.token_ids) for one in completions)
        return Outcome(
            f"{seconds:.2f} s, {tokens / seconds:,.0f} tokens/s, {seconds / bound:.1f} x its bound",
            None,
            {"seconds": seconds, "rounds": lasted, "tokens": tokens, "bound_s": bound},
        )
