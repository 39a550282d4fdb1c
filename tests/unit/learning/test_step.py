"""The training step: its gradient, its optimiser by hand, what it refuses, what it leaves alone."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import (
    bank_of,
    gradients,
    loss_form,
    progress_of,
    trained,
    whole_kv,
)
from hypothesis import given
from hypothesis import strategies as st
from rooms.learning.trainer_setup import random_rounding
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.model.loading import base_hash, load_model
from cartridge_forge.learning.step import StepOptions, check_fresh, train_step
from cartridge_forge.learning.teacher import TeacherDistribution, score, top_k
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.errors import RunError, StaleTokenError
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import OFFLINE_VERSION, TrainBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twins import Twin

    from cartridge_forge.learning.cartridge import CartridgeBank
    from cartridge_forge.protocols.step import Sample, TrainStepOutput

    MakeSamples = Callable[..., list[Sample]]

SHAPES = (("a", 4, 5), ("b", 2, 3), ("a", 6, 7), ("b", 3, 1))
NO_CLIP = 1e9
UPDATE = """
import sys, torch
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule

parameter = torch.nn.Parameter(torch.zeros(4))
parameter.grad = torch.ones(4)
CartridgeProgress(parameter, LearningRateSchedule(0.1, 0, 5)).update(9.0)
assert parameter.tolist() != [0.0] * 4
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


def teacher_of(twin: Twin, samples: list[Sample]) -> TeacherDistribution:
    return TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))


def step(
    twin: Twin,
    bank: CartridgeBank,
    samples: list[Sample],
    *,
    progress: Mapping[str, CartridgeProgress] | None = None,
    teacher: TeacherDistribution | None = None,
    loss: LossSpec | None = None,
    lr: float = 0.01,
    clip: float = NO_CLIP,
    version: int = 0,
    staleness: int = 0,
) -> TrainStepOutput:
    progress = progress or progress_of(bank)
    for own in progress.values():
        own.schedule = LearningRateSchedule(lr, 0, 10**9)
    return train_step(
        twin.model,
        bank,
        progress,
        TrainBatch(doc=samples, scores={"doc_teacher": teacher or teacher_of(twin, samples)}),
        active_channels(EpisodesObjective(), loss),
        version,
        StepOptions(clip=clip, row_tokens=20, staleness=staleness),
    )


def by_transformers(twin: Twin, bank: CartridgeBank, samples: list[Sample]) -> tuple[float, Tensor]:
    """Mean forward KL per token, and the gradient of each cartridge's own mean into its trainable
    tokens, one sample at a time: plain transformers over past_key_values for the student, over the
    whole text for the teacher."""
    trainable = trained(bank).requires_grad_()
    kv = whole_kv(bank, trainable)
    totals, tokens = torch.zeros(len(bank.names)), torch.zeros(len(bank.names))
    for s in samples:
        c = bank.names.index(s.cartridge)
        student = twin.response_logits(s, kv[c])
        text = twin.documents[s.cartridge] + s.prompt_ids + s.response_ids
        teacher = twin.logits(text)[-len(s.response_ids) - 1 : -1]
        kl = F.kl_div(
            student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum"
        )
        totals = totals.index_add(0, torch.tensor([c]), kl[None])
        tokens[c] += len(s.response_ids)
    (gradient,) = torch.autograd.grad((totals / tokens).sum(), trainable)
    return (totals.sum() / tokens.sum()).item(), gradient


def test_loss_and_gradient_equal_transformers_autograd(
    twin: Twin, make_samples: MakeSamples
) -> None:
    samples, bank = make_samples(*SHAPES), bank_of(twin)
    kl, gradient = by_transformers(twin, bank, samples)
    result = step(twin, bank, samples)
    assert gradients(bank) is not None
    assert kl > 0.1
    assert result.kl == pytest.approx(kl, rel=1e-4)
    assert result.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert result.tokens == 16
    scale = gradient.abs().max().item()
    torch.testing.assert_close(gradients(bank), gradient, rtol=0, atol=1e-4 * scale)


def test_the_gradient_is_the_slope_of_the_loss(llama: Twin, make_samples: MakeSamples) -> None:
    """Along a random direction d: (loss(x + h d) - loss(x - h d)) / 2h = gradient . d."""
    samples, bank = make_samples(("a", 4, 5), ("a", 6, 7)), bank_of(llama, "a")
    teacher = TeacherDistribution(None, *top_k(teacher_of(llama, samples).logits, 5))
    spec = loss_form("jsd", beta=0.3)
    start = trained(bank)
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    h = 3e-3

    def loss_at(point: Tensor) -> float:
        with torch.no_grad():
            bank.trainable["a"].copy_(point[0])
        return step(llama, bank, samples, teacher=teacher, loss=spec, lr=0.0).kl

    slope = (loss_at(start + h * direction) - loss_at(start - h * direction)) / (2 * h)
    loss_at(start)
    assert gradients(bank) is not None
    assert slope == pytest.approx((gradients(bank) * direction).sum().item(), rel=0.02)


def test_three_steps_of_adam_written_out(llama: Twin, make_samples: MakeSamples) -> None:
    """beta 0.9 and 0.999, epsilon 1e-8, no weight decay, each step at its own rate."""
    bank = bank_of(llama)
    progress = progress_of(bank)
    x = trained(bank).double()
    mean, square = torch.zeros_like(x), torch.zeros_like(x)
    for t, lr in enumerate([0.01, 0.03, 0.02], start=1):
        result = step(llama, bank, make_samples(*SHAPES, seed=t), progress=progress, lr=lr)
        assert result.lr == lr
        assert gradients(bank) is not None
        g = gradients(bank).double()
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g**2
        x = x - lr * (mean / (1 - 0.9**t)) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(trained(bank).double(), x, rtol=0, atol=1e-5)


def test_updates_are_those_of_torchs_optimizer() -> None:
    """Five of them, with a pause of the process after two: the moments go through `restart`."""
    shape, schedule = (2, 2, 1, 3, 4), LearningRateSchedule(lr=0.1, warmup_steps=2, steps=5)
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=draw)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    progress, adam = CartridgeProgress(ours, schedule), torch.optim.Adam([theirs], lr=0.0)
    for step in range(5):
        ours.grad = torch.randn(shape, generator=draw)
        theirs.grad = ours.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([theirs], 5.0)
        adam.param_groups[0]["lr"] = schedule.at(step)
        adam.step()
        assert progress.update(5.0) == norm.item()
        progress.steps += 1
        assert torch.equal(ours, theirs)
        assert progress.moments.keys() == adam.state[theirs].keys()
        for name, moment in adam.state[theirs].items():
            assert torch.equal(progress.moments[name], moment), name
        if step == 1:
            moments = progress.moments
            progress = CartridgeProgress(ours, schedule)
            progress.restart(schedule, since=2, steps=2, moments=moments)


def test_an_update_imports_no_compiler() -> None:
    """Making an object of `torch.optim.Adam` imports 900 modules of it."""
    told = subprocess.run(
        [sys.executable, "-c", UPDATE], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.split() == []


def test_the_gradient_is_clipped_to_the_norm_and_reported_before(
    llama: Twin, make_samples: MakeSamples
) -> None:
    """Each cartridge's gradient by its own norm; the norm reported is that of all of them."""
    samples = make_samples(*SHAPES)
    free, clipped = bank_of(llama), bank_of(llama)
    found = step(llama, free, samples)
    gradient = gradients(free)
    assert gradient is not None
    assert found.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    norms = [found.cartridges[name]["grad_norm"] for name in "ab"]
    assert norms == pytest.approx([g.norm().item() for g in gradient], rel=1e-6)
    small, large = sorted(norms)
    assert small < 0.95 * large
    bound = (small + large) / 2
    assert step(llama, clipped, samples, clip=bound).grad_norm == found.grad_norm
    scales = torch.tensor([min(1.0, bound / norm) for norm in norms])
    expected = gradient * scales.reshape(2, *[1] * (gradient.ndim - 1))
    torch.testing.assert_close(gradients(clipped), expected)


@pytest.mark.parametrize(
    ("step_index", "rate"),
    [
        # Warm-up in quarters, then from 1 to .1: half-way between them half-way down.
        (0, 0.25),
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),
        (6, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (8, 0.55),
        (12, 0.1),
        (99, 0.1),
    ],
)
def test_the_schedule_by_hand(step_index: int, rate: float) -> None:
    assert LearningRateSchedule(lr=0.02, warmup_steps=4, steps=12).at(step_index) == pytest.approx(
        0.02 * rate
    )


def test_a_schedule_without_warm_up_or_without_anything_else() -> None:
    assert LearningRateSchedule(lr=2.0, warmup_steps=0, steps=10).at(0) == 2.0
    assert LearningRateSchedule(lr=2.0, warmup_steps=0, steps=10).at(5) == pytest.approx(1.1)
    assert [LearningRateSchedule(lr=2.0, warmup_steps=2, steps=2).at(i) for i in range(2)] == [
        1.0,
        2.0,
    ]


def test_only_the_trainable_cartridge_tokens_change(twin: Twin, make_samples: MakeSamples) -> None:
    bank = bank_of(twin)
    before, frozen = base_hash(twin.model), torch.stack(list(bank.frozen.values())).clone()
    trainable = trained(bank)
    progress = progress_of(bank)
    for seed in range(3):
        step(twin, bank, make_samples(*SHAPES, seed=seed), progress=progress)
    assert base_hash(twin.model) == before
    assert all(p.grad is None for p in twin.model.parameters())
    assert torch.equal(torch.stack(bank.kv(bank.names))[:, :, :, :, :1], frozen)
    moved = (trained(bank) - trainable).abs().flatten(4).amax(-1)  # [C, L, 2, H_kv]
    assert moved.min() > 1e-3  # keys and values of every head of every layer of both documents


def test_documents_not_sampled_are_not_moved(llama: Twin, make_samples: MakeSamples) -> None:
    bank = bank_of(llama, "abc")
    before = trained(bank)
    step(llama, bank, make_samples(("b", 4, 5), ("b", 3, 2)))
    for c, name in enumerate(bank.names):
        still = torch.equal(bank.trainable[name], before[c])
        assert still == (name != "b")
        assert (bank.trainable[name].grad is None) == (name != "b")


def test_doc_kl_falls(twin: Twin, make_samples: MakeSamples) -> None:
    samples, bank = make_samples(*SHAPES), bank_of(twin)
    progress, teacher = progress_of(bank), teacher_of(twin, samples)
    kl = [
        step(twin, bank, samples, progress=progress, teacher=teacher, lr=0.1, clip=1.0).kl
        for _ in range(15)
    ]
    assert kl[-1] < kl[0] / 3


def test_the_same_seed_gives_bit_identical_cartridges(
    llama: Twin, make_samples: MakeSamples
) -> None:
    def train() -> Tensor:
        bank = bank_of(llama)
        progress = progress_of(bank)
        for seed in range(5):
            step(llama, bank, make_samples(*SHAPES, seed=seed), progress=progress, clip=1.0)
        return trained(bank)

    assert torch.equal(train(), train())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_before_the_update(
    llama: Twin, make_samples: MakeSamples, bad: float
) -> None:
    samples, bank = make_samples(*SHAPES), bank_of(llama)
    before = trained(bank)
    scored = teacher_of(llama, samples).logits
    assert scored is not None
    scored[3, 50] = bad
    with pytest.raises(
        RunError, match=r"doc_kl became nan at version 6, of cartridge a; lower train.lr \(now 0.5"
    ):
        step(
            llama,
            bank,
            make_samples(*SHAPES, version=6),
            teacher=TeacherDistribution(scored),
            lr=0.5,
            version=6,
        )
    assert torch.equal(trained(bank), before)


def with_versions(samples: list[Sample], *versions: int) -> list[Sample]:
    """The one sample of three tokens with these versions."""
    return [replace(samples[0], versions=versions)]


@pytest.mark.parametrize(
    ("versions", "staleness", "stale"),
    [
        ((5, 5, 5), 0, 0),
        ((4, 5, 5), 1, 1),
        ((3, 4, 5), 2, 2),  # the bound itself is allowed
        ((OFFLINE_VERSION,) * 3, 0, 0),
        ((OFFLINE_VERSION, 4, 5), 1, 1),
    ],
)
def test_tokens_within_the_bound_are_counted(
    make_samples: MakeSamples, versions: tuple[int, ...], staleness: int, stale: int
) -> None:
    samples = with_versions(make_samples(("a", 2, 3)), *versions)
    assert check_fresh(samples, version=5, staleness=staleness) == stale
    assert check_fresh([*samples, *samples], version=5, staleness=staleness) == 2 * stale


@pytest.mark.parametrize(
    ("versions", "staleness", "message"),
    [
        ((5, 5, 4), 0, "sampled by version 4, and version 5 is being trained .*staleness 0"),
        ((5, 2, 5), 2, "sampled by version 2, .*staleness 2: a publish did not reach the gener"),
        ((5, 6, 5), 3, "sampled by version 6, and version 5"),  # from the future
        ((5, 5), 3, "s0 has 3 tokens and 2 versions: its tokens cannot be proven fresh"),
        ((), 3, "s0 has 3 tokens and 0 versions"),
        ((5, 5, 5, 5), 3, "s0 has 3 tokens and 4 versions"),
    ],
)
def test_tokens_that_are_not_fresh_are_refused(
    make_samples: MakeSamples, versions: tuple[int, ...], staleness: int, message: str
) -> None:
    samples = with_versions(make_samples(("a", 2, 3)), *versions)
    with pytest.raises(StaleTokenError, match=message):
        check_fresh(samples, version=5, staleness=staleness)


@given(
    versions=st.lists(st.integers(-1, 9), min_size=1, max_size=8),
    version=st.integers(0, 9),
    staleness=st.integers(0, 9),
)
def test_no_token_older_than_the_bound_is_ever_let_through(
    make_samples: MakeSamples, versions: list[int], version: int, staleness: int
) -> None:
    samples = make_samples(("a", 1, len(versions)))
    samples = [replace(samples[0], versions=tuple(versions))]
    ages = [version - v for v in versions if v != OFFLINE_VERSION]
    if all(0 <= age <= staleness for age in ages):
        assert check_fresh(samples, version, staleness) == sum(age > 0 for age in ages)
    else:
        with pytest.raises(StaleTokenError):
            check_fresh(samples, version, staleness)


def test_a_stale_batch_trains_nothing(llama: Twin, make_samples: MakeSamples) -> None:
    bank = bank_of(llama)
    before = trained(bank)
    fresh = make_samples(*SHAPES, version=4)
    late = [*fresh[:3], replace(fresh[3], versions=(3,))]
    with pytest.raises(StaleTokenError, match="sample s3 was sampled by version 3"):
        step(llama, bank, late, version=4)
    assert torch.equal(trained(bank), before)
    assert gradients(bank) is None
    assert step(llama, bank, late, version=4, staleness=1).stale_tokens == 1
    assert not torch.equal(trained(bank), before)


def test_a_base_in_bfloat16_trains_a_cartridge_in_float32(
    llama: Twin, make_samples: MakeSamples
) -> None:
    """The step's numbers are those of the same weights in float32, within twice what steps that
    round at random are off."""
    samples = make_samples(*SHAPES)
    teacher = teacher_of(llama, samples)
    half = replace(llama, model=load_model(str(llama.path), "bfloat16"))
    assert half.model.dtype == torch.bfloat16
    same = replace(llama, model=load_model(str(llama.path), "bfloat16").float())

    def stepped(twin: Twin) -> tuple[Tensor, Tensor, Tensor]:
        bank = bank_of(llama)
        done, gradient = step(twin, bank, samples, teacher=teacher), gradients(bank)
        assert gradient is not None
        parts = (gradient, *bank.trainable.values(), *bank.frozen.values())
        assert {x.dtype for x in parts} == {torch.float32}
        return torch.tensor(done.kl), torch.tensor(done.grad_norm), gradient

    drawn = []
    for seed in range(4):
        with random_rounding(seed):
            drawn.append(stepped(half))
    exact = stepped(same)
    for number, found in enumerate(stepped(half)):
        off = max((one[number] - exact[number]).norm() for one in drawn)
        assert (found - exact[number]).norm() <= 2 * off < 0.2 * exact[number].norm()
