"""Check on a device that the numbers are right, before any of them is timed.

Attention against float64, a step against the same step in float32 on the CPU, the sampler against
the trainer, and the student against a teacher that reads the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.phase_step import synchronize
from benchmarks.gpu.rows import Check, Outcome
from benchmarks.gpu.scene import NAME, CheckScene
from cartridge_forge.learning.attention import AttentionOptions, attend, layout_of
from cartridge_forge.learning.batch import context_of, pack, response_logits, token_logprobs
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import Decoder
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    contexts_of,
    document_kv,
    response_logprobs,
    score_kept,
    top_k,
)
from cartridge_forge.protocols.spec.sections import GAP_BOUNDS, LossSpec
from cartridge_forge.protocols.step import Completion, Sample

SPREADS = (1, 3, 6)  # standard deviations of scores
OVER_TORCH = 1.5  # times the error of torch's own attention
# Mean and largest, nats; a run refuses a step beyond them.
EMBEDDED, ON_VLLM = GAP_BOUNDS["bfloat16", "torch"], GAP_BOUNDS["bfloat16", "vllm"]
# Nats, between bfloat16 and float32: its rounding alone. A wrong position or head costs whole nats.
ROUNDED_MEAN, ROUNDED_MAX = 0.05, 0.5
COSINE = 0.999  # of two gradients, of bfloat16 and of float32
ALIGNED = 1e-3  # nats a token; a shift by one token costs whole nats
TOP = 20


def correctness(scene: CheckScene) -> list[Check]:
    """Return the rows of this module, in order."""
    mean, most = EMBEDDED
    gap = f"mean <= {mean:g}, max <= {most:g} nats"
    return [
        *(
            Check(
                f"attention in bfloat16, score spread {spread}",
                f"error <= {OVER_TORCH:g} x torch's own",
                lambda spread=spread: _attention(scene, spread),  # type: ignore[misc]  # bound now
            )
            for spread in SPREADS
        ),
        Check(
            "step against float32 on the CPU",
            f"mean <= {ROUNDED_MEAN:g}, max <= {ROUNDED_MAX:g} nats; slopes' cosine >= {COSINE:g}",
            lambda: _step(scene),
        ),
        Check("the same step twice", "the same bits", lambda: _twice(scene)),
        Check("embedded sampler against the trainer", gap, lambda: _sampler(scene)),
        Check(
            "whole document as the cartridge", f"doc_kl <= {ALIGNED:g} nats a token",
            lambda: _alignment(scene),
        ),
    ]  # fmt: skip


def attention_errors(device: torch.device, spread: int) -> tuple[float, float]:
    """Return the norms of the errors against float64 of our attention and of torch's in bfloat16,
    over a prefix and own tokens, where scores have a standard deviation of `spread`."""
    heads, shared, size, prefix, tokens = 6, 2, 64, 512, 128
    draws = torch.Generator().manual_seed(spread)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draws) * scale).bfloat16().to(device)

    q = drawn(tokens, heads, size, scale=spread**0.5)
    k = drawn(prefix + tokens, shared, size, scale=spread**0.5)
    v = drawn(prefix + tokens, shared, size)
    mask = torch.ones(tokens, prefix + tokens, dtype=torch.bool, device=device).tril(prefix)

    def of_torch(dtype: torch.dtype) -> Tensor:
        queries, keys, values = (x.transpose(0, 1)[None].to(dtype) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, scale=size**-0.5, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    exact = of_torch(torch.float64)
    kv = torch.stack([k[:prefix].transpose(0, 1), v[:prefix].transpose(0, 1)])
    layout = layout_of([tokens], [1], torch.arange(prefix, prefix + tokens, device=device))
    ours_attended = attend(q, k[prefix:], v[prefix:], layout, [kv], AttentionOptions(size**-0.5))
    ours, theirs = (
        (x.double() - exact).norm().item() for x in (ours_attended, of_torch(torch.bfloat16))
    )
    return ours, theirs


def _attention(scene: CheckScene, spread: int) -> Outcome:
    ours, theirs = attention_errors(scene.device, spread)
    ratio = ours / theirs
    return Outcome(f"{ratio:.2f} x", ratio <= OVER_TORCH, {"over_torch": ratio})


def _student(
    model: Decoder, cartridge: Tensor, samples: list[Sample], teacher: TeacherDistribution
) -> tuple[Tensor, Tensor, float]:
    """Return log-probabilities [N], the cartridge's gradient, both float32 on the CPU, and doc_kl
    a token."""
    kv = cartridge.detach().to(model.device, torch.float32).requires_grad_()
    rows = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    packed = pack(samples, {NAME: kv.shape[3]}, rows)
    logits = response_logits(model, packed, [kv.to(model.dtype)])
    total, count = doc_kl(logits, teacher, LossSpec(form="tail"))
    (total / count).backward()
    synchronize(model.device)
    assert kv.grad is not None
    logprobs = token_logprobs(logits.detach(), packed.targets)
    return logprobs.cpu(), kv.grad.cpu(), float(total.detach()) / count


def _step(scene: CheckScene) -> Outcome:
    work = scene.setting.reference
    on_device, on_cpu = scene.shallow()
    document = scene.ids(work.document)
    samples = [
        scene.sample(i, scene.ids(work.response), prompt=scene.ids(work.prompt))
        for i in range(work.samples)
    ]
    with torch.no_grad():
        kv = document_kv(on_cpu, document)
        rows = work.sample_tokens
        packed = pack(samples, {NAME: work.document}, rows)
        teacher = TeacherDistribution(None, *top_k(response_logits(on_cpu, packed, [kv]), TOP))
    cartridge = kv[..., : work.cartridge, :].contiguous()
    exact, slope, loss = _student(on_cpu, cartridge, samples, teacher)
    logprobs, gradient, gradient_loss = _student(on_device, cartridge, samples, teacher)
    gap = (logprobs - exact).abs()
    cosine = F.cosine_similarity(gradient.flatten().double(), slope.flatten().double(), dim=0)
    mean, most, alike = gap.mean().item(), gap.max().item(), cosine.item()
    figures = {
        "mean": mean, "max": most, "cosine": alike, "doc_kl": gradient_loss, "doc_kl_exact": loss,
        "norm_ratio": (gradient.norm() / slope.norm()).item(), "layers": scene.setting.layers,
    }  # fmt: skip
    return Outcome(
        f"mean {mean:.2g}, max {most:.2g} nats; cosine {alike:.5f}",
        mean <= ROUNDED_MEAN and most <= ROUNDED_MAX and alike >= COSINE,
        figures,
    )


def _twice(scene: CheckScene) -> Outcome:
    samples = [scene.sample(i, scene.ids(64)) for i in range(2)]
    tokens = sum(len(s.response_ids) for s in samples)
    draws = torch.Generator().manual_seed(0)
    teacher = TeacherDistribution(
        indices=torch.arange(TOP, dtype=torch.int32).repeat(tokens, 1),
        logprobs=torch.randn(tokens, 64, generator=draws).log_softmax(-1)[:, :TOP],
    )
    first, slope, _ = _student(scene.model, scene.cartridge, samples, teacher)
    second, again, _ = _student(scene.model, scene.cartridge, samples, teacher)
    apart = [(a != b).sum().item() for a, b in ((first, second), (slope, again))]
    return Outcome(
        f"{apart[0]} log-probabilities and {apart[1]} of {slope.numel()} slopes differ",
        not any(apart),
        {"logprobs": apart[0], "slopes": apart[1]},
    )


def gap_outcome(
    scene: CheckScene, completions: list[Completion], cartridge: Tensor, bounds: tuple[float, float]
) -> Outcome:
    """Return the gap between a sampler's log-probabilities of what it drew over a cartridge
    [L, 2, H_kv, P, D] and the trainer's; `bounds` are of its mean and its largest, nats."""
    samples = [scene.sample(i, one.token_ids, one.logprobs) for i, one in enumerate(completions)]
    rows = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    logprobs = response_logprobs(scene.model, samples, {NAME: cartridge}, rows).double().cpu()
    sampled = torch.tensor([x for one in completions for x in one.logprobs], dtype=torch.float64)
    gap = (logprobs - sampled).abs()
    mean, most = gap.mean().item(), gap.max().item()
    return Outcome(
        f"mean {mean:.2g}, max {most:.2g} nats of {len(gap)} tokens",
        mean <= bounds[0] and most <= bounds[1],
        {"mean": mean, "max": most, "tokens": len(gap)},
    )


def _sampler(scene: CheckScene) -> Outcome:
    tokens = min(64, scene.setting.step.work.response)
    completions = generate(
        scene.model, scene.requests(tokens=tokens), lambda _: scene.cartridge, frozenset()
    )
    return gap_outcome(scene, completions, scene.cartridge, EMBEDDED)


def _alignment(scene: CheckScene) -> Outcome:
    work = scene.setting.step.work
    samples = [scene.sample(i, scene.ids(work.response)) for i in range(min(2, work.samples))]
    kv = scene.document_kv
    cache = DocumentKVCache(lambda _: kv, {NAME: scene.document}, kv.nbytes)
    scores = score_kept(
        scene.model, samples, contexts_of(samples, cache), work.sample_tokens, TOP,
        prefix=context_of,
    )  # fmt: skip
    with torch.no_grad():
        packed = pack(samples, {NAME: work.document}, work.sample_tokens)
        logits = response_logits(scene.model, packed, [kv.float().to(kv.dtype)])
        total, count = doc_kl(logits, TeacherDistribution(**scores), LossSpec(form="tail"))
        # What a shift by one token would give: the row sees what it is there for.
        shifted = TeacherDistribution(**{name: x.roll(1, 0) for name, x in scores.items()})
        wrong, _ = doc_kl(logits, shifted, LossSpec(form="tail"))
    a_token, off = total.item() / count, wrong.item() / count
    return Outcome(
        f"{a_token:.1e} nats a token (shifted by one: {off:.2g})",
        abs(a_token) <= ALIGNED < off,
        {"doc_kl": a_token, "shifted": off},
    )
