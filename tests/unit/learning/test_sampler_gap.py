"""The sampler's log-probabilities are compared with those of the forward that trains."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import ALL, Done, bank_of, changed, do, prefixes, scene, trained
from rooms.learning.trainer_setup import random_rounding
from torch import Tensor

from cartridge_forge.learning import attention
from cartridge_forge.learning import attention as kernels
from cartridge_forge.learning import decode as decode_cache
from cartridge_forge.learning.batch import ChunkedLogits, sampled_tokens
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.step import SamplerGap
from cartridge_forge.learning.teacher import document_kv, response_logprobs
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.errors import PublishError, StaleTokenError
from cartridge_forge.protocols.files import REPOSITORY
from cartridge_forge.protocols.spec.sections import (
    GAP_BOUNDS,
    GapBounds,
    SamplerGapSpec,
    TrainSpec,
    gap_bounds,
)
from cartridge_forge.protocols.step import (
    GenerateRequest,
    PolicySample,
    PrefixRef,
    Sample,
    Sampling,
    TrainBatch,
)

if TYPE_CHECKING:
    from twins import Twin

TIGHT = GapBounds(1e-5, 1e-4)
OPEN = GapBounds(1e9, 1e9)
DOC_ALONE = EpisodesObjective()


def honest(twin: Twin, batch: TrainBatch, given: dict[str, Tensor]) -> TrainBatch:
    """The batch with log-probabilities by plain transformers under the cartridges `given`."""

    def told(s: Sample) -> Sample:
        logits = twin.response_logits(s, given[s.cartridge]).double()
        values = logits.log_softmax(-1)[range(len(s.response_ids)), list(s.response_ids)]
        own = [v if at >= 0 else 0.0 for v, at in zip(values.tolist(), s.versions, strict=True)]
        return replace(s, sampler_logprobs=tuple(own))

    def of_episode(r: PolicySample) -> PolicySample:
        return replace(r, sample=told(r.sample))

    return replace(batch, doc=[told(s) for s in batch.doc], rl=[of_episode(r) for r in batch.rl])


def record(gaps: list[float]) -> tuple[SamplerGap, Tensor]:
    gap = SamplerGap()
    tokens = tuple(range(len(gaps)))
    told = Sample("s", "a", (1,), tokens, (-1.0,) * len(gaps), (3,) * len(gaps))
    needed = torch.ones(len(gaps), dtype=torch.bool)
    trainer = torch.tensor(gaps) - 1.0
    gap.add(sampled_tokens([(told, True)], needed, 3), trainer)
    return gap, trainer


def test_mean_sign_and_maximum_by_hand() -> None:
    gap, _ = record([0.5, -0.25, 0.0, -0.75])
    assert gap.facts() == {"mean": 0.375, "signed": -0.125, "max": 0.75, "tokens": 4}
    assert gap.worst == {"sample": "s", "sampler": -1.0, "trainer": -1.75}
    assert SamplerGap().facts() == {}


def test_only_tokens_of_the_trained_version_are_compared() -> None:
    """A tool's and a teacher's tokens, those of an older version, those that bear no loss, texts
    without a record, and sets that nobody sampled are left out."""
    mixed = Sample("m", "a", (1,), (5, 6, 7, 8), (-0.1, -0.2, 0.0, -0.4), (3, 3, -1, 2))
    silent = Sample("n", "a", (1,), (5, 6), (), (3, 3))
    pair = Sample("p", "a", (1,), (5,), (-0.5,), (3,))
    last = Sample("z", "a", (1,), (5, 6), (-0.6, -0.7), (3, 3))
    needed = torch.tensor([0, 1, 1, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    texts = [(mixed, True), (silent, True), (pair, False), (last, True)]
    found = sampled_tokens(texts, needed, 3)
    assert found.compared.tolist() == [True, False, False, False, False, False, True]
    assert found.logprobs[found.compared].tolist() == pytest.approx([-0.2, -0.7])
    assert [found.locate(i) for i in range(7)] == ["m", "m", "m", "n", "n", "p", "z"]


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_an_infinite_gap(broken: float) -> None:
    gap = SamplerGap()
    s = Sample("s", "a", (1,), (5, 6), (-1.0, broken), (3, 3))
    gap.add(sampled_tokens([(s, True)], torch.ones(2, dtype=torch.bool), 3), -torch.ones(2))
    assert gap.most == math.inf
    with pytest.raises(StaleTokenError):
        gap.refuse(OPEN, 3)


def test_ranks_add_up() -> None:
    parts, whole = ([0.5, -0.25], [0.0, -0.75]), record([0.5, -0.25, 0.0, -0.75])[0]
    joined = SamplerGap.of_ranks([record(part)[0].sums() for part in parts])
    assert joined == whole
    assert SamplerGap.of_ranks([SamplerGap().sums(), whole.sums()]) == whole


@pytest.mark.parametrize(
    ("bounds", "passes"),
    [((0.375, 0.75), True), ((0.374, 1.0), False), ((1.0, 0.74), False), (None, True)],
)
def test_a_bound_is_passed_at_its_value(bounds: tuple[float, float] | None, passes: bool) -> None:
    gap, _ = record([0.5, -0.25, 0.0, -0.75])
    chosen = None if bounds is None else GapBounds(*bounds)
    if passes:
        gap.refuse(chosen, 3)
        return
    with pytest.raises(StaleTokenError, match=r"4 tokens are 0\.375 nats .* 0\.75 at most") as told:
        gap.refuse(chosen, 3)
    assert told.value.samples == ("s",)


def test_defaults_are_by_dtype_and_backend() -> None:
    for (dtype, backend), values in GAP_BOUNDS.items():
        assert gap_bounds(SamplerGapSpec(), dtype, backend) == GapBounds(*values)
    assert gap_bounds(SamplerGapSpec(mean=0.5), "float32", "torch") == GapBounds(
        0.5, GAP_BOUNDS["float32", "torch"][1]
    )
    assert gap_bounds(None, "float32", "torch") is None


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("noting", [True, False])
def test_observed_values_are_log_softmax_and_change_no_loss(
    chunk: int | None, noting: bool
) -> None:
    draws = torch.Generator().manual_seed(0)
    head = torch.randn(7, 31, generator=draws)
    start = torch.randn(9, 7, generator=draws)
    targets = torch.randint(31, (9,), generator=draws)
    projections = []

    def run(noting: bool) -> tuple[Tensor, Tensor, Tensor]:
        hidden = start.clone().requires_grad_()
        projections.clear()

        def project(part: Tensor) -> Tensor:
            projections.append(len(part))
            return part @ head

        logits = ChunkedLogits(hidden, targets, project, chunk, noting)
        rows = slice(2, 9)
        (loss,) = logits.read(rows, lambda one, of: (one.square().log_softmax(-1)[:, 3],))
        seen = logits.observed()
        loss.sum().backward()
        assert hidden.grad is not None
        return loss.detach(), hidden.grad, seen

    loss, gradient, seen = run(noting)
    if noting and chunk is not None and chunk < 9:
        assert sum(projections) == 7 + 2  # the seven tokens read, and the two that nobody read
    plain = run(False)
    assert torch.equal(loss, plain[0])
    assert torch.equal(gradient, plain[1])
    reference = (start.double() @ head.double()).log_softmax(-1)[range(9), targets]
    torch.testing.assert_close(seen.double(), reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("logit_bytes", [None, 5 * 4 * 97])
@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_an_honest_sampler_passes_in_every_channel(
    twin: Twin, logit_bytes: int | None, micro_tokens: int | None
) -> None:
    bank = bank_of(twin)
    batch = honest(twin, scene(twin, bank), prefixes(bank))
    done = do(
        twin, batch, ALL, gap_bounds=TIGHT, logit_bytes=logit_bytes, micro_tokens=micro_tokens
    )
    gap = done.result.sampler_gap
    # doc: 5 + 3 tokens; the student's own of the five judged episodes: 5 + 4 + 5 + 3 + 5.
    assert gap["tokens"] == 8 + 22
    assert 0 < gap["mean"] <= gap["max"] < 1e-4
    assert abs(gap["signed"]) <= gap["mean"]


def test_tokens_over_another_cartridge_are_refused_and_nothing_is_trained(twin: Twin) -> None:
    bank = bank_of(twin)
    given = prefixes(bank)
    moved = {**given, "b": given["b"] + 1e-2 * torch.sin(99 * given["b"])}
    batch = honest(twin, scene(twin, bank), moved)  # document b's alone
    before = trained(bank)
    with pytest.raises(StaleTokenError, match=r"bounds 1e-05 and 0\.0001") as told:
        do(twin, batch, ALL, bank=bank, gap_bounds=TIGHT)
    assert torch.equal(trained(bank), before)
    assert told.value.samples[0] in ("d1", "e4", "e5")
    measured = do(twin, batch, ALL, bank=bank).result.sampler_gap
    assert measured["max"] > 1e-3


def test_one_document_in_the_others_place_is_refused(twin: Twin) -> None:
    bank = bank_of(twin)
    given = prefixes(bank)
    swapped = {"a": given["b"], "b": given["a"]}
    batch = honest(twin, scene(twin, bank), swapped)
    with pytest.raises(StaleTokenError):
        do(twin, batch, DOC_ALONE, bank=bank, gap_bounds=TIGHT)


def test_comparing_changes_no_bit_of_the_step(twin: Twin) -> None:
    def done(batch: TrainBatch) -> Done:
        return do(twin, batch, changed(ALL, w_rl=0.0), gap_bounds=OPEN, logit_bytes=4 * 97 * 3)

    bank = bank_of(twin)
    batch = scene(twin, bank)
    compared = done(honest(twin, batch, prefixes(bank)))
    # grpo alone reads the sampler's values; with no versions to compare there is nothing to do.
    unknown = [replace(s, versions=(-1,) * len(s.versions)) for s in batch.doc]
    rl = [replace(r, sample=replace(r.sample, sampler_logprobs=(0.0,) * len(r.trained)))
          for r in batch.rl]  # fmt: skip
    plain = done(replace(batch, doc=unknown, rl=rl))
    assert torch.equal(compared.trained, plain.trained)
    assert compared.gradient is not None
    assert plain.gradient is not None
    assert torch.equal(compared.gradient, plain.gradient)


def test_tokens_of_an_older_version_are_not_compared(twin: Twin) -> None:
    bank = bank_of(twin)
    batch = scene(twin, bank, version=4)
    done = do(twin, batch, DOC_ALONE, version=5, staleness=1, gap_bounds=TIGHT)
    assert done.result.sampler_gap == {}
    assert done.result.stale_tokens == 8


def test_the_greedy_deficit_is_the_trainer_s_own(twin: Twin) -> None:
    """Of plain transformers' greedy text nothing is missing; of any other text what they say."""
    bank = bank_of(twin)
    trainer = CartridgeTrainer(twin.model, bank, TrainSpec(steps=3, row_tokens=24))
    version = trainer.begin("on_policy", 3)
    given = prefixes(bank)
    text: list[int] = []
    for _ in range(5):
        text.append(int(twin.logits((4, 5, 6, *text), given["a"])[-1].argmax()))
    other = (7, 8, 9)
    samples = [Sample("g", "a", (4, 5, 6), tuple(text), (), ()),
               Sample("o", "b", (4, 5), other, (), ())]  # fmt: skip
    greedy, deficit = trainer.greedy_deficit(samples, version)
    logits = twin.response_logits(samples[1], given["b"])
    expected = (logits.max(-1).values - logits[range(3), list(other)]).max().item()
    assert greedy == pytest.approx(0.0, abs=1e-4)
    assert deficit == pytest.approx(expected, abs=1e-3)
    assert expected > 0.1
    with pytest.raises(PublishError, match="version 9 cannot be scored"):
        trainer.greedy_deficit(samples, 9)


@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.CHUNKED], ids=["flash", "chunked"])
def test_in_bfloat16_sampler_and_trainer_agree(
    kernel: kernels.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped reader over a cartridge of 64 tokens: 256 tokens, decoded one by one and then
    scored in one pass, by the kernel of a CPU and by that of other devices. Neither is farther from
    float64, nor from the other, than two passes are that round at random (0.04 nats on average,
    and single tokens up to 4)."""
    for module in (attention, decode_cache):
        monkeypatch.setattr(module, "kernel_for", lambda _: kernel)
    path = str(REPOSITORY / "models" / "clinic-reader")
    model = load_model(path, "bfloat16")
    draws = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 1400, (count,), generator=draws).tolist())

    kv, other = document_kv(model, ids(64)), document_kv(model, ids(64))
    drawn, ref = Sampling(max_tokens=32), PrefixRef("cartridge/p", 0)
    requests = [GenerateRequest(str(i), ids(12 + i), ref, drawn, i) for i in range(8)]
    done = generate(model, requests, lambda _: kv, frozenset())
    samples = [
        Sample(r.id, "p", r.prompt_ids, one.token_ids, one.logprobs, one.versions)
        for r, one in zip(requests, done, strict=True)
    ]
    assert next(model.parameters()).dtype == torch.bfloat16

    def scored(kv: Tensor = kv, model: LanguageModel = model) -> Tensor:
        return response_logprobs(model, samples, {"p": kv}, 64)

    passes = []
    for seed in range(6):
        with random_rounding(seed):
            passes.append(scored())
    apart = torch.stack([(a - b).abs() for a, b in combinations(passes, 2)])  # [15, 256]

    sampler = torch.tensor([x for one in done for x in one.logprobs])
    exact = scored(kv.double(), load_model(path, "bfloat16").to(torch.float64))
    for a, b in combinations((sampler, scored(), exact), 2):
        gap = (a - b).abs()
        assert len(gap) == 256
        assert gap.mean() <= apart.mean()
        assert gap.max() <= apart.max()
    assert (scored(other) - sampler).abs().mean() > 10 * apart.mean()
