"""One training step at a set size, phase by phase, over a random model, document and cartridge.

rollout   learning.decoding.generate.generate over the shared cartridge
teacher   learning.teacher.score_kept on the document's cached KV, the top 20 kept
student   learning.step.train_step: forward, backward, optimiser
publish   one packed snapshot through the tensor plane to a reader's device
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.meters import Count, counted
from benchmarks.record import ROOT
from cartridge_forge.forge_run.plan import roofline
from cartridge_forge.forge_run.plan.roofline import PhaseCost, Workload
from cartridge_forge.learning.batch import context_of, pack, response_logits
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.decode import DecodeAttention, DecodeCache, generate
from cartridge_forge.learning.decoder import Decoder
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    contexts_of,
    document_kv,
    score_kept,
)
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.spec.model import ShapeSpec
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    Sample,
    Sampling,
    TrainBatch,
)

TOP = 20
NAME = "document"
LOGIT_SPREAD = 1.1  # standard deviation of random logits; weights of width 3,072 have one of 0.02
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


def random_model(shape: ShapeSpec, dtype: str, device: torch.device) -> Decoder:
    """Return a frozen Llama of this shape, with random weights drawn on the device."""
    config = decoder_config({
        "model_type": "llama", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "tie_word_embeddings": True,
    })  # fmt: skip
    assert config is not None
    draws = torch.Generator(device).manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            model = Decoder(config)
    finally:
        torch.set_default_dtype(usual)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, LOGIT_SPREAD / shape.hidden**0.5, generator=draws)
    return model


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


def synchronize(device: torch.device) -> None:
    """Wait for launched work: otherwise a GPU's time is that of the launches."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        self.bank = CartridgeBank((NAME,), [kv[..., : work.cartridge, :]], frozen=1)
        constant = LearningRateSchedule(lr=1e-3, warmup_steps=1, steps=1)
        self._progress = {NAME: CartridgeProgress(self.bank.trainable[NAME], constant)}
        self._cartridge = self.snapshot()

    def sample(
        self, i: int, response: Sequence[int], logprobs: tuple[float, ...] | None = None
    ) -> Sample:
        logprob_values = logprobs or (0.0,) * len(response)
        versions = (0,) * len(response)
        return Sample(
            str(i),
            NAME,
            self._prompts[i],
            tuple(response),
            logprob_values,
            versions,
            contexts=(NAME,),
        )

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        start = time.perf_counter()
        result = work()
        synchronize(self.device)
        self.laps[phase] = time.perf_counter() - start
        if self.device.type == "cuda":
            self.peak_bytes[phase] = torch.cuda.max_memory_allocated(self.device)
        return result

    def run(self, sample: bool = True) -> None:
        """Run the four phases in order, on the rollout's responses; without `sample` the last three
        again, on the same."""
        completions = self._try("rollout", self.rollout) if sample else None
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
        prefixes = contexts_of(self.samples, self.cache)
        rows = self.setting.work.sample_tokens
        return TeacherDistribution(
            **score_kept(self.model, self.samples, prefixes, rows, TOP, prefix=context_of)
        )

    def student(self, teacher: TeacherDistribution) -> None:
        train_step(
            self.model,
            self.bank,
            self._progress,
            TrainBatch(doc=self.samples, scores={"doc_teacher": teacher}),
            active_channels(ObjectiveSpec()),
            0,
            StepOptions(
                clip=1.0,
                row_tokens=self.setting.work.sample_tokens,
                staleness=0,
                micro_tokens=self._micro_tokens,
            ),
        )

    def snapshot(self) -> Tensor:
        """Return the cartridge [L, 2, H_kv, P, D] as it is published."""
        (kv,) = self.bank.kv()
        return kv.detach().to(self.model.dtype)

    async def publish(self) -> None:
        """Publish from the trainer's float32 to a reader's device: snapshot, put, read, copy."""
        assert self._plane is not None
        packet = await self._plane.put("cartridges/0", {"kv": self.snapshot()})
        tensors = await self._plane.get(packet)
        self._cartridge = tensors["kv"].to(self.device, copy=True)
        await self._plane.delete(packet.key)

    # -- counting: the same forwards, without operations that read a tensor's values -------------

    def decoding(self, filled: int) -> Callable[[], Tensor]:
        """Return a function that decodes one token of every sample after `filled` tokens."""
        rows = self.setting.work.samples
        cache = DecodeCache.empty(self.model, rows, filled + 1)
        cache.used = filled
        ids = torch.zeros(rows, dtype=torch.long, device=self.device)
        attention = DecodeAttention(
            cache, ids, ids + filled, [(0, rows)], [self._cartridge.unbind(0)]
        )

        @torch.no_grad()
        def decode() -> Tensor:
            logits: Tensor = self.model.lm_head(self.model(ids, ids + filled, attention))
            return logits.float()

        return decode

    def learn(self, teacher: TeacherDistribution) -> None:
        """Run the student's forward and backward, without the optimiser."""
        tokens = self.setting.work.sample_tokens
        packed = pack(self.samples, {NAME: self.setting.work.cartridge}, tokens)
        kv = [kv.to(self.model.dtype) for kv in self.bank.kv(packed.names)]
        # Not the tail: which tokens have a small one depends on data that counting does without.
        form = LossSpec(form="renormalised")
        total, count = doc_kl(response_logits(self.model, packed, kv), teacher, form)
        (total / count).backward()

    def counts(self) -> dict[str, Count]:
        """Return each phase's counts. Decoding is counted half-way, where its cost is the mean."""
        work = self.setting.work
        work_of = {}
        decode = self.decoding(work.prompt + work.response // 2)
        with counted(self.model.parameters()) as work_of["decode, one token"]:
            decode()
        with counted(self.model.parameters()) as work_of["teacher"]:
            teacher = self.teacher()
        with counted(self.model.parameters()) as work_of["student"]:
            self.learn(teacher)
        return work_of
