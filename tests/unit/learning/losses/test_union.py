"""The divergence over the union of both top k and a tail, against the whole vocabulary in float64.

whole = union + rest of the student * KL of the two rests        (chain rule, reverse KL)
0 <= whole - union <= ln 2 * the mean of both rests              (JSD 0.5)
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from channel_setup import loss_form
from torch import Tensor
from twins import NEAR, Twin

from cartridge_forge.learning.losses.doc_kl import doc_kl_tokens, student_mass
from cartridge_forge.learning.teacher import (
    NO_TOKEN,
    TeacherDistribution,
    contexts_of,
    likely_of,
    score,
    score_kept,
    top_k,
    top_k_with,
)
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import Sample

TOKENS, VOCABULARY, K = 40, 300, 8


def random_pair(seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits of a student and a teacher that mostly agree, and on some tokens do not."""
    random = torch.Generator().manual_seed(seed)
    teacher = scale * torch.randn(TOKENS, VOCABULARY, generator=random)
    student = teacher + 2.0 * torch.randn(TOKENS, VOCABULARY, generator=random)
    return student.requires_grad_(), teacher


def union(student: Tensor, teacher: Tensor, k: int = K) -> TeacherDistribution:
    return TeacherDistribution(None, *top_k_with(teacher, k, student.detach().topk(k).indices))


def reference(log_s: Tensor, log_t: Tensor, direction: str) -> Tensor:
    """The divergence of each row in plain float64."""
    s, t = log_s.exp(), log_t.exp()
    if direction == "reverse":
        return (s * (log_s - log_t)).sum(-1)
    if direction == "forward":
        return (t * (log_t - log_s)).sum(-1)
    log_m = ((s + t) / 2).log()
    return ((t * (log_t - log_m)).sum(-1) + (s * (log_s - log_m)).sum(-1)) / 2


def coarse(logprobs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The entries with one for the rest, and the rest's own distribution [N, V]."""
    rest = logprobs.scatter(-1, indices, -math.inf)
    mass = rest.logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, indices), mass], -1), rest - mass


def test_the_union_by_hand() -> None:
    """Teacher's order 0, 1, 2, 3, 4; the student's two are 1 and 4: 0 and 2 complete it. Without
    the student's, the first four; token 0 named beside a missing one is kept."""
    teacher = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log().expand(3, 5)
    likely = torch.tensor([[1, 4], [NO_TOKEN, NO_TOKEN], [0, NO_TOKEN]])
    indices, logprobs = top_k_with(teacher, 2, likely)
    assert indices.tolist() == [[0, 1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert logprobs.exp()[0].tolist() == pytest.approx([0.5, 0.2, 0.15, 0.05], abs=1e-6)
    everything, _ = top_k_with(teacher, 4, likely)
    assert everything.shape == (3, 5)


@pytest.mark.parametrize("seed", [0, 1])
def test_both_top_k_are_in_the_union_and_no_token_twice(seed: int) -> None:
    student, teacher = random_pair(seed)
    indices, logprobs = top_k_with(teacher, K, student.detach().topk(K).indices)
    expected = teacher.double().log_softmax(-1).gather(-1, indices.long())
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-6)
    assert (logprobs.diff(dim=-1) <= 0).all()
    for row, own, teachers in zip(
        indices.tolist(), student.topk(K).indices.tolist(), teacher.topk(K).indices.tolist(),
        strict=True,
    ):  # fmt: skip
        assert len(set(row)) == len(row) == 2 * K
        assert {*own, *teachers} <= {*row}


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_union_and_whole_vocabulary_differ_by_the_rest_alone(direction: str) -> None:
    """Reverse and forward by the chain rule, to 1e-5; JSD within its bound. The union is nearer to
    the whole than the teacher's own top 2k are."""
    student, teacher = random_pair(3)
    log_s, log_t = (x.detach().double().log_softmax(-1) for x in (student, teacher))
    told = union(student, teacher)
    assert told.indices is not None
    found = doc_kl_tokens(student, told, loss_form(direction)).detach().double()
    (union_s, rest_s), (union_t, rest_t) = (coarse(x, told.indices.long()) for x in (log_s, log_t))
    torch.testing.assert_close(found, reference(union_s, union_t, direction), rtol=1e-5, atol=1e-5)
    whole = reference(log_s, log_t, direction)
    mass_s, mass_t = union_s[:, -1].exp(), union_t[:, -1].exp()
    outside = torch.isfinite(rest_s)
    if direction == "jsd":
        bound = math.log(2) * (mass_s + mass_t) / 2
        assert (whole - found > -1e-5).all()
        assert (whole - found < bound + 1e-5).all()
    else:
        rest_s, rest_t = (x.where(outside, -1e9) for x in (rest_s, rest_t))
        weight = mass_s if direction == "reverse" else mass_t
        lost = weight * reference(rest_s, rest_t, direction)
        torch.testing.assert_close(found + lost, whole, rtol=1e-5, atol=1e-5)
    alone = TeacherDistribution(None, *top_k(teacher, 2 * K))
    by_teacher = doc_kl_tokens(student, alone, loss_form(direction)).detach().double()
    if direction != "forward":
        assert (whole - found).mean() < (whole - by_teacher).mean()


def gradient(student: Tensor, told: TeacherDistribution, spec: LossSpec) -> Tensor:
    (found,) = torch.autograd.grad(doc_kl_tokens(student, told, spec).sum(), student)
    return found


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_the_gradient_is_that_of_the_union_in_float64(direction: str) -> None:
    """And points where that of the whole vocabulary does, by a cosine above 0.95; reverse KL over
    the teacher's own top 2k does so less."""
    student, teacher = random_pair(4)
    told, spec = union(student, teacher), loss_form(direction)
    found = gradient(student, told, spec).double()
    assert told.indices is not None
    wide = student.detach().double().requires_grad_()
    log_t = teacher.double().log_softmax(-1)
    (rest_s, _), (rest_t, _) = (
        coarse(x, told.indices.long()) for x in (wide.log_softmax(-1), log_t)
    )
    (expected,) = torch.autograd.grad(reference(rest_s, rest_t, direction).sum(), wide)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    (whole,) = torch.autograd.grad(reference(wide.log_softmax(-1), log_t, direction).sum(), wide)
    cosine = torch.cosine_similarity(found, whole, -1).mean()
    assert cosine > 0.95
    alone = TeacherDistribution(None, *top_k(teacher, 2 * K))
    by_teacher = gradient(student, alone, spec).double()
    if direction == "reverse":
        assert torch.cosine_similarity(by_teacher, whole, -1).mean() < cosine


def test_the_union_sees_a_student_that_the_teachers_top_misses() -> None:
    student, teacher = random_pair(5)
    alone = TeacherDistribution(None, *top_k(teacher, 2 * K))
    seen, missed = (student_mass(student, t).mean() for t in (union(student, teacher), alone))
    exact = student.detach().double().softmax(-1)
    told = union(student, teacher).indices
    assert told is not None
    assert seen.item() == pytest.approx(exact.gather(-1, told.long()).sum(-1).mean().item(), 1e-5)
    assert missed + 0.1 < seen


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_teacher_tells_the_students_likeliest(
    twin: Twin, make_samples: object, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """A sample with its student's tokens and one of a teacher, scored together, also where the
    logits of three tokens exist at a time."""
    if chunk:
        monkeypatch.setattr("cartridge_forge.learning.teacher.LOGIT_BYTES", chunk * 97 * 4)
    assert callable(make_samples)
    own, written = make_samples(("a", 4, 5), ("b", 2, 3))
    likely = tuple((7 + t, 30 + t) for t in range(5))
    samples: list[Sample] = [replace(own, likely=likely), written]
    kv = contexts_of(samples, twin.cached())
    kept = score_kept(twin.model, samples, kv, 20, 4, keep_sampled=True, student_top=2)
    logits = score(twin.model, samples, twin.cached(), 20)
    assert kept["indices"].shape == (8, 6)
    for row, wanted in zip(kept["indices"][:5].tolist(), likely, strict=True):
        assert {*wanted} <= {*row}
    assert kept["indices"][5:].tolist() == logits[5:].topk(6).indices.tolist()
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(
        kept["logprobs"].double(), exact.gather(-1, kept["indices"].long()), rtol=0, atol=NEAR
    )
    targets = torch.tensor([t for s in samples for t in s.response_ids])[:, None]
    torch.testing.assert_close(
        kept["sampled"].double(), exact.gather(-1, targets)[:, 0], rtol=0, atol=NEAR
    )


def test_likeliest_tokens_of_some_places_alone_are_refused(make_samples: object) -> None:
    assert callable(make_samples)
    (sample,) = make_samples(("a", 4, 5))
    with pytest.raises(DataError, match="5 tokens and the student's likeliest at 1 of them"):
        likely_of([replace(sample, likely=((1, 2),))], 2)
