"""Run the seed's training step, for comparison: one sample after the other.

    for each sample: the teacher reads the whole document again, then prompt and response
    for each sample: a student forward for "old" log-probabilities
    for each sample: a student forward and backward, its logits whole
    clip, Adam, and the cartridge through a file that is flushed to disk

The model is plain transformers with scaled dot-product attention; the loss is the one of
`learning.losses.doc_kl`, over the same denominator. The cost is due to the order of the calls:
nothing is slowed down, and the teacher's logits are computed for the response tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from learning.cartridge.bank import CartridgeBank
from learning.losses.doc_kl import doc_kl_tokens
from learning.scoring import TeacherDistribution, top_k
from protocols.files import flush
from protocols.spec.objective import LossSpec
from protocols.types import Sample

KEEP_TOP = 20


@dataclass
class SeedPhases:
    """Hold processor seconds of this process in each phase of one step, in their order; other users
    of the cores and waiting for the disk do not count."""

    seconds: dict[str, float] = field(default_factory=dict)
    _begun: float = field(default_factory=time.process_time)

    def done(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[phase] = now - self._begun
        self._begun = now


def load_plain(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.requires_grad_(False)
    return model.eval()


def response_logits(
    model: PreTrainedModel, sample: Sample, before: Sequence[int], kv: Tensor | None
) -> Tensor:
    """Return logits [n, V] of one sample's response tokens, after token ids or a cartridge's KV."""
    ids = torch.tensor([[*before, *sample.prompt_ids, *sample.response_ids]])
    cache = None
    if kv is not None:
        cache = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys[None], values[None], layer)
    n = len(sample.response_ids)
    out = model(ids, past_key_values=cache, use_cache=kv is not None, logits_to_keep=n + 1)
    return out.logits[0, :-1].float()


def seed_step(
    model: PreTrainedModel,
    bank: CartridgeBank,
    optimizer: torch.optim.Optimizer,
    document: Sequence[int],
    samples: Sequence[Sample],
    *,
    lr: float,
    clip: float,
    path: Path,
) -> tuple[float, float, SeedPhases]:
    """Run one step over samples of the bank's one document: (doc_kl, gradient norm, phases)."""
    phases = SeedPhases()
    with torch.no_grad():
        teachers = [
            TeacherDistribution(None, *top_k(response_logits(model, s, document, None), KEEP_TOP))
            for s in samples
        ]
    phases.done("teacher")

    with torch.no_grad():
        for s in samples:
            targets = torch.tensor(s.response_ids)[:, None]
            response_logits(model, s, (), bank.kv()[0]).log_softmax(-1).gather(-1, targets)
    phases.done("old log-probabilities")

    optimizer.zero_grad(set_to_none=True)
    tokens, total = sum(len(s.response_ids) for s in samples), 0.0
    for s, teacher in zip(samples, teachers, strict=True):
        student = response_logits(model, s, (), bank.kv()[0])
        loss = doc_kl_tokens(student, teacher, LossSpec()).sum() / tokens
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_([bank.trainable], clip).item()
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    phases.done("train")

    save_file({"kv": bank.snapshot(torch.float32)}, path)
    flush(path)
    load_file(path)
    phases.done("publish")
    return total, norm, phases
