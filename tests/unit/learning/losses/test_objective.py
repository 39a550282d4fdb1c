"""The combined step: each term against plain transformers, and what one channel must not do to
another."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import (
    ALL,
    bank_of,
    changed,
    do,
    episode,
    gradients,
    loss_form,
    of_cartridge,
    prefixes,
    progress_of,
    scene,
    scored,
    trained,
    whole_kv,
    with_sampler,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.decoder import Decoder
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.losses.doc_kl import doc_kl, jensen_shannon
from cartridge_forge.learning.model.loading import base_hash, load_model, load_tokenizer
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    document_kv,
    response_logprobs,
    score,
    score_over,
)
from cartridge_forge.plugins.episodes.losses.advantages import group_advantages
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec, SdpoSpec
from cartridge_forge.plugins.replay.spec import DpoSpec
from cartridge_forge.protocols.errors import DataError, ForgeError, RunError, StaleTokenError
from cartridge_forge.protocols.step import (
    HintedTurn,
    PolicySample,
    Sample,
    Sampling,
    TrainBatch,
    hinted,
)

CHANNELS = tuple(EpisodesObjective().weights)

if TYPE_CHECKING:
    from twins import Twin

    from cartridge_forge.learning.cartridge import CartridgeBank

READER = Path(__file__).parents[4] / "models/clinic-reader"

WEIGHTS = ("w_doc", "w_rl", "alpha", "beta")

NONE = EpisodesObjective(w_doc=0.0)

CLOSE = {"rel": 2e-5, "abs": 1e-6}


def only(*channels: str, like: EpisodesObjective = ALL) -> EpisodesObjective:
    """The objective with only these weights."""
    return changed(like, **{w: 0.0 for w in WEIGHTS if w not in channels})


def by_transformers(
    twin: Twin, bank: CartridgeBank, batch: TrainBatch, o: EpisodesObjective
) -> tuple[dict[str, float], Tensor]:
    """The four values of the batch, and the gradient: each cartridge's is of its own values."""
    values, _ = of_one(twin, bank, batch, o)
    own = [of_one(twin, bank, of_cartridge(batch, name), o)[1] for name in bank.names]
    return values, sum(own[1:], own[0])


def of_one(
    twin: Twin, bank: CartridgeBank, batch: TrainBatch, o: EpisodesObjective
) -> tuple[dict[str, float], Tensor]:
    """The four values and the gradient of their weighted sum, one sample at a time through plain
    transformers, as the formulas are written: no packing, no micro-batches."""
    trainable = trained(bank).requires_grad_()
    kv = dict(zip(bank.names, whole_kv(bank, trainable), strict=True))

    def logprobs(s: Sample) -> Tensor:
        return twin.response_logits(s, kv[s.cartridge]).log_softmax(-1)

    def picked(s: Sample) -> Tensor:
        return logprobs(s).gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]

    kl, tokens = torch.zeros(()), 0
    for s in batch.doc:
        text = twin.documents[s.cartridge] + s.prompt_ids + s.response_ids
        teacher = twin.logits(text)[-len(s.response_ids) - 1 : -1].log_softmax(-1)
        kl = kl + F.kl_div(logprobs(s), teacher, log_target=True, reduction="sum")
        tokens += len(s.response_ids)

    policy, own_tokens = torch.zeros(()), 0
    # By hand: (1, 0, 0) has mean 1/3, deviation 1/sqrt 3; (.2, .9) mean .55, deviation .7/sqrt 2.
    third, half = math.sqrt(1 / 3) + 1e-4, 0.7 / math.sqrt(2) + 1e-4
    advantages = {
        "e0": 2 / 3 / third, "e1": -1 / 3 / third, "e2": -1 / 3 / third,
        "e4": -0.35 / half, "e5": 0.35 / half,
    }  # fmt: skip
    for r in batch.rl:
        if r.reward is not None:
            own = picked(r.sample)[torch.tensor(r.trained)]
            policy = policy - advantages[r.sample.id] * (own - own.detach()).exp().sum()
            own_tokens += len(own)

    hints, turn_tokens = torch.zeros(()), 0
    by_id = {r.sample.id: r.sample for r in batch.rl}
    for item in batch.turns:
        s = by_id[item.sample]
        turn = s.response_ids[item.start : item.stop]
        with torch.no_grad():
            read = twin.logits(item.context_ids + turn, kv[s.cartridge])
            teacher = read[len(item.context_ids) - 1 : -1].log_softmax(-1)
        student = logprobs(s)[item.start : item.stop]
        hints = hints + jensen_shannon(student, teacher, 0.5).sum()
        turn_tokens += len(turn)

    preferred = torch.zeros(())
    for p in batch.pairs:
        sides = [
            picked(Sample("", p.cartridge, p.context_ids, x, (), ())).sum()
            for x in (p.chosen_ids, p.rejected_ids)
        ]
        gained, lost = sides[0] - p.ref_chosen, sides[1] - p.ref_rejected
        margin = gained / len(p.chosen_ids) - lost / len(p.rejected_ids)
        preferred = preferred - F.logsigmoid(2 * margin)

    values = dict(
        zip(
            CHANNELS,
            (kl / tokens, policy / own_tokens, hints / turn_tokens, preferred / len(batch.pairs)),
            strict=True,
        )
    )
    weights = dict(zip(CHANNELS, (o.w_doc, o.w_rl, o.alpha, o.beta), strict=True))
    total = sum(weights[name] * value for name, value in values.items())
    assert isinstance(total, Tensor)
    (gradient,) = torch.autograd.grad(total, trainable)
    return {name: value.item() for name, value in values.items()}, gradient


def test_every_term_and_the_gradient_equal_transformers(twin: Twin) -> None:
    bank = bank_of(twin)
    batch = scene(twin, bank)
    objective = changed(ALL, grpo=GrpoSpec(mismatch=None))
    values, gradient = by_transformers(twin, bank, batch, objective)
    done = do(twin, batch, objective, bank=bank)
    terms = done.result.terms
    assert {name: t["count"] for name, t in terms.items()} == {
        "doc_kl": 8, "grpo": 22, "sdpo": 8, "replay_dpo": 2
    }  # fmt: skip
    assert [t["weight"] for t in terms.values()] == [0.7, 1.3, 0.5, 0.9]
    for name, value in values.items():
        assert abs(value) > 0.01
        assert terms[name]["value"] == pytest.approx(value, rel=1e-4, abs=1e-5)
    assert done.result.kl == terms["doc_kl"]["value"]
    assert terms["grpo"]["excluded"] == 1
    assert done.result.tokens == 8 + 22 + 14  # the hinted turns are the episodes' own tokens
    assert done.gradient is not None
    scale = gradient.abs().max().item()
    torch.testing.assert_close(done.gradient, gradient, rtol=0, atol=1e-4 * scale)
    assert base_hash(twin.model) == base_hash(load_model(str(twin.path)))


def test_doc_kl_alone_is_bit_for_bit_the_step_written_out(llama: Twin) -> None:
    """Document distillation as it was before there were other channels."""
    ours, bank = bank_of(llama, "a"), bank_of(llama, "a")
    progress, optimizer = progress_of(ours), torch.optim.Adam([bank.trainable["a"]], lr=0.02)
    for seed in range(4):
        full = of_cartridge(scene(llama, bank_of(llama), seed), "a")
        done = do(llama, full, EpisodesObjective(), bank=ours, progress=progress)
        packed = pack(full.doc, {"a": 8, "b": 8}, 24)
        logits = response_logits(llama.model, packed, bank.kv(packed.names))
        total, count = doc_kl(logits, full.scores["doc_teacher"], loss_form())
        mean = total / max(count, 1)
        optimizer.zero_grad(set_to_none=True)
        mean.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_([bank.trainable["a"]], 1e9)
        optimizer.step()
        assert torch.equal(trained(ours), trained(bank))
        assert (done.result.kl, done.result.grad_norm) == (mean.item(), norm.item())
        assert done.result.tokens == count


def plain_grpo(twin: Twin, bank: CartridgeBank, rl: list[PolicySample]) -> Tensor:
    """A GRPO step and nothing else: the loss of rewarded episodes, their own tokens, dapo."""
    rl = [r for r in rl if r.reward is not None]
    advantages = group_advantages([r.reward for r in rl], [r.group for r in rl])
    of_token = [a for r, a in zip(rl, advantages, strict=True) for own in r.trained if own]
    own = torch.tensor([own for r in rl for own in r.trained])
    packed = pack([r.sample for r in rl], {"a": 8, "b": 8}, 24)
    packed = replace(packed, predicts=packed.predicts[own], targets=packed.targets[own])
    logits = response_logits(twin.model, packed, bank.kv(packed.names))
    pi = logits.log_softmax(-1).gather(-1, packed.targets[:, None])[:, 0]
    sampler = torch.tensor([x for r in rl for x in r.sample.sampler_logprobs])[own]
    weight = (pi.detach() - sampler).exp().clamp(max=2.0)
    ratio, advantage = (pi - pi.detach()).exp(), torch.tensor(of_token)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    loss = -(weight * gain).sum() / len(pi)
    bank.trainable["a"].grad = None
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def test_alpha_beta_and_w_doc_of_zero_are_bit_for_bit_plain_grpo(llama: Twin) -> None:
    """Other channels' data lie in the batch, and even spoilt do not matter."""
    ours, bank = bank_of(llama, "a"), bank_of(llama, "a")
    progress, optimizer = progress_of(ours), torch.optim.Adam([bank.trainable["a"]], lr=0.02)
    for seed in range(4):
        full = with_sampler(of_cartridge(scene(llama, bank_of(llama), seed), "a"), 3.0)
        spoilt = replace(full, scores={}, pairs=full.pairs * 2)
        zero = EpisodesObjective(w_doc=0.0, w_rl=1.0, alpha=0.0, beta=0.0)
        done = do(llama, spoilt, zero, bank=ours, progress=progress)
        loss = plain_grpo(llama, bank, list(full.rl))
        optimizer.step()
        assert done.result.terms["grpo"]["value"] == loss.item()
        assert torch.equal(trained(ours), trained(bank))
        assert list(done.result.terms) == ["grpo"]


def test_channels_add_up(llama: Twin) -> None:
    """Each value is the one it has alone; the gradient is the weighted sum of theirs."""
    batch = scene(llama, bank_of(llama))
    together = do(llama, batch, ALL)
    alone = {
        name: do(llama, batch, only(weight)) for name, weight in zip(CHANNELS, WEIGHTS, strict=True)
    }
    total = torch.zeros_like(together.trained)
    for name, done in alone.items():
        assert list(done.result.terms) == [name]
        assert done.result.terms[name]["count"] == together.result.terms[name]["count"]
        for fact, value in done.result.terms[name].items():
            assert together.result.terms[name][fact] == pytest.approx(value, **CLOSE)
        assert done.gradient is not None
        total += done.gradient
    assert together.gradient is not None
    torch.testing.assert_close(together.gradient, total, rtol=1e-4, atol=1e-6)


EMPTY = {
    "doc_kl": ({"doc": ()}, {"doc_teacher": None}),
    "grpo": ({"rl": (), "turns": ()}, {"sdpo_teacher": None, "ref": None}),
    "sdpo": ({"turns": ()}, {"sdpo_teacher": None}),
    "replay_dpo": ({"pairs": ()}, {}),
}


@pytest.mark.parametrize("empty", [c for n in (1, 2, 3) for c in itertools.combinations(EMPTY, n)])
def test_an_empty_channel_is_zero_and_changes_nothing(llama: Twin, empty: tuple[str, ...]) -> None:
    """Bit for bit the step that never heard of it; an episode's turns go with the episode."""
    batch = scene(llama, bank_of(llama))
    for name in empty:
        data, scores = EMPTY[name]
        batch = replace(scored(batch, **scores), **data)
    gone = {*empty, "sdpo"} if "grpo" in empty else {*empty}
    left = [w for c, w in zip(CHANNELS, WEIGHTS, strict=True) if c not in gone]
    done = do(llama, batch, ALL, compare_gradients=True)
    for name in gone:
        term = done.result.terms[name]
        assert (term["value"], term["count"]) == (0.0, 0)
        assert "grad_norm" not in term
        assert all(math.isfinite(x) for x in term.values())
    if left:
        without = do(llama, batch, only(*left))
        assert torch.equal(done.trained, without.trained)
    else:
        assert torch.equal(done.trained, trained(bank_of(llama)))


@pytest.mark.parametrize("batch", ["nothing", "errors"])
def test_with_nothing_at_all_the_cartridge_stays(llama: Twin, batch: str) -> None:
    """Also in the middle of a run, when Adam has momentum."""
    bank = bank_of(llama)
    progress = progress_of(bank)
    full = scene(llama, bank)
    do(llama, full, ALL, bank=bank, progress=progress)
    before = trained(bank)
    none = (
        TrainBatch()
        if batch == "nothing"
        else TrainBatch(rl=[r for r in full.rl if r.reward is None])
    )
    done = do(llama, none, ALL, bank=bank, progress=progress)
    assert torch.equal(trained(bank), before)
    assert [t["value"] for t in done.result.terms.values()] == [0.0] * 4
    assert (done.result.grad_norm, done.result.tokens) == (0.0, 0)
    assert done.result.terms["grpo"]["excluded"] == len(none.rl)


def test_overlong_episodes_are_filtered_as_if_they_had_no_reward(llama: Twin) -> None:
    """And are compared with none: e2 was cut, so e0 and e1 alone are task x."""
    batch = scene(llama, bank_of(llama))
    cut = replace(batch, rl=[replace(r, truncated=r.sample.id == "e2") for r in batch.rl])
    errored = [
        replace(r, reward=None, error_kind="cut") if r.sample.id == "e2" else r for r in batch.rl
    ]
    filtering = changed(only("w_rl"), grpo=GrpoSpec(overlong="filter"))
    ours = do(llama, cut, filtering)
    theirs = do(llama, replace(batch, rl=errored), only("w_rl"))
    assert torch.equal(ours.trained, theirs.trained)
    assert ours.result.terms["grpo"]["overlong"] == 1
    assert not torch.equal(ours.trained, do(llama, cut, only("w_rl")).trained)
    # Cut without another of its reward, nothing of the task is left to compare.
    alone = replace(batch, rl=[replace(r, truncated=r.sample.id == "e0") for r in batch.rl])
    found = do(llama, alone, filtering).result.terms["grpo"]
    assert (found["count"], found["dropped_groups"]) == (8, 1)


def test_overlong_turns_cost_reward_and_no_group_its_place(llama: Twin) -> None:
    """A limit of 16 and a buffer of 4: 14 tokens cost half a reward. The reward before that tells
    whether a group varies."""
    batch = scene(llama, bank_of(llama))
    limit = Sampling(max_tokens=16)

    def cut(reward_of: dict[str, float], longest: int) -> TrainBatch:
        rl = [
            replace(r, sampling=limit, longest_turn=longest if r.sample.id == "e1" else 12,
                    reward=r.reward if r.reward is None else reward_of.get(r.sample.id, r.reward))
            for r in batch.rl
        ]  # fmt: skip
        return replace(batch, rl=rl)

    shape = changed(only("w_rl"), grpo=GrpoSpec(overlong="shape", overlong_buffer=4))
    ours = do(llama, cut({}, 14), shape)
    theirs = do(llama, cut({"e1": -0.5}, 12), only("w_rl"))
    assert torch.equal(ours.trained, theirs.trained)
    assert ours.result.terms["grpo"]["overlong"] == 1
    equal = dict.fromkeys(("e0", "e1", "e2"), 1.0)
    assert do(llama, cut(equal, 14), shape).result.terms["grpo"]["dropped_groups"] == 1


def test_errored_episodes_are_left_out_bit_for_bit(llama: Twin) -> None:
    batch = scene(llama, bank_of(llama))
    draws = random.Random(9)
    died = [episode(draws, f"died{i}", [2], None, group) for i, group in enumerate("xyz")]
    silent = replace(episode(draws, "silent", [2], 5.0, "x"), trained=(False, False))
    more = replace(scored(batch, ref=None), rl=[died[0], *batch.rl, *died[1:], silent])
    ours, theirs = (do(llama, b, ALL) for b in (more, batch))
    assert torch.equal(ours.trained, theirs.trained)
    assert ours.result.terms["grpo"]["excluded"] == 5
    assert ours.result.terms["grpo"]["count"] == theirs.result.terms["grpo"]["count"]


def test_a_hinted_turn_of_an_errored_episode_is_learnt_from(llama: Twin) -> None:
    """It has no reward, but its tokens are the student's own."""
    bank = bank_of(llama)
    batch = scene(llama, bank)
    errored = batch.rl[3].sample
    item = HintedTurn(errored.id, 0, 2, (*errored.prompt_ids, 50, 51))
    teacher = TeacherDistribution(
        logits=score_over(llama.model, hinted([item], batch.rl), prefixes(bank), 64)
    )
    both = replace(scored(batch, sdpo_teacher=teacher), turns=[item])
    done = do(llama, both, only("w_rl", "alpha"))
    assert done.result.terms["sdpo"]["count"] == 2
    assert done.result.terms["sdpo"]["value"] != 0
    assert done.result.terms["grpo"] == pytest.approx(
        do(llama, batch, only("w_rl")).result.terms["grpo"], **CLOSE
    )


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_order_of_samples_changes_no_term(llama: Twin, data: st.DataObject) -> None:
    batch = scene(llama, bank_of(llama))
    objective = changed(ALL, grpo=GrpoSpec(kl=0.1))
    whole = do(llama, batch, objective)
    orders = [
        data.draw(st.permutations(range(len(part)))) for part in (batch.doc, batch.rl, batch.pairs)
    ]
    doc, rl, pairs = orders
    sizes = {"doc_teacher": [5, 3], "ref": [len(r.trained) for r in batch.rl]}
    order = {"doc_teacher": doc, "ref": rl}
    rows = {}
    for name, lengths in sizes.items():
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        rows[name] = torch.tensor([begins[i] + t for i in order[name] for t in range(lengths[i])])
    items = data.draw(st.permutations(range(len(batch.turns))))
    pieces = batch.scores["sdpo_teacher"].logits.split([item.tokens for item in batch.turns])
    shuffled = replace(
        batch,
        doc=[batch.doc[i] for i in doc],
        rl=[batch.rl[i] for i in rl],
        turns=[batch.turns[i] for i in items],
        pairs=[batch.pairs[i] for i in pairs],
        scores={
            "doc_teacher": batch.scores["doc_teacher"].rows(rows["doc_teacher"]),
            "ref": batch.scores["ref"][rows["ref"]],
            "sdpo_teacher": TeacherDistribution(logits=torch.cat([pieces[i] for i in items])),
        },
    )
    done = do(llama, shuffled, objective)
    for name, term in whole.result.terms.items():
        assert done.result.terms[name] == pytest.approx(term, **CLOSE)
    assert done.gradient is not None
    torch.testing.assert_close(done.gradient, whole.gradient, rtol=1e-3, atol=1e-6)


def test_sdpo_touches_the_turn_s_tokens_alone(llama: Twin) -> None:
    """What comes after a turn, the reward, the sampler, the trained marks elsewhere: poisoned one
    by one, they change not a bit. The turn's own token does."""
    batch = scene(llama, bank_of(llama))
    item = batch.turns[2]  # the second turn of e5, tokens 3 to 6 of 7
    batch = replace(batch, turns=[replace(item, stop=5)])
    teacher = score_over(llama.model, hinted(batch.turns, batch.rl), prefixes(bank_of(llama)), 64)
    batch = scored(batch, sdpo_teacher=TeacherDistribution(logits=teacher))
    clean = do(llama, batch, only("alpha"))
    assert clean.result.tokens == 2

    def poisoned(**changes: object) -> Tensor:
        rl = list(batch.rl)
        parts = {k: changes.pop(k) for k in list(changes) if k in Sample.__dataclass_fields__}
        rl[5] = replace(rl[5], sample=replace(rl[5].sample, **parts), **changes)
        return do(llama, replace(batch, rl=rl), only("alpha")).trained

    ids = batch.rl[5].sample.response_ids
    logprobs = batch.rl[5].sample.sampler_logprobs
    nan = float("nan")
    for changes in (
        {"response_ids": (*ids[:5], 90, 91)},
        {"sampler_logprobs": (nan,) * len(logprobs)},
        {"reward": -1e6},
        {"trained": (False, False, False, True, True, False, False)},
        {"group": "elsewhere"},
    ):
        assert torch.equal(poisoned(**changes), clean.trained), changes
    assert not torch.equal(poisoned(response_ids=(*ids[:3], 90, *ids[4:])), clean.trained)


@pytest.mark.parametrize("spec", [SdpoSpec(), SdpoSpec(beta=0.0), SdpoSpec(variant="sampled")])
def test_without_a_hint_there_is_nothing_to_learn(twin: Twin, spec: SdpoSpec) -> None:
    bank = bank_of(twin)
    batch = scene(twin, bank)
    by_id = {r.sample.id: r.sample for r in batch.rl}
    items = [
        replace(i, context_ids=by_id[i.sample].prompt_ids + by_id[i.sample].response_ids[: i.start])
        for i in batch.turns
    ]
    taught = do(twin, batch, changed(only("alpha"), sdpo=spec))
    given = TeacherDistribution(
        logits=score_over(twin.model, hinted(items, batch.rl), prefixes(bank), 17)
    )
    empty = replace(scored(batch, sdpo_teacher=given), turns=items)
    done = do(twin, empty, changed(only("alpha"), sdpo=spec))
    assert abs(done.result.terms["sdpo"]["value"]) < 1e-5
    assert abs(taught.result.terms["sdpo"]["value"]) > 0.01
    assert done.result.grad_norm < 1e-4 < taught.result.grad_norm


@pytest.mark.parametrize("old_is_given", [False, True])
def test_the_sampled_variant_scores_the_turn_s_own_tokens(twin: Twin, old_is_given: bool) -> None:
    """sg(log S - log T) log S by plain transformers; under an older policy times S / old, here
    exp(.3) on every token."""
    bank = bank_of(twin)
    batch = scene(twin, bank)
    kv, by_id = prefixes(bank), {r.sample.id: r.sample for r in batch.rl}
    if old_is_given:
        own = response_logprobs(twin.model, [r.sample for r in batch.rl], kv, 64)
        batch = scored(batch, old=own - 0.3)
    losses = []
    for item in batch.turns:
        s = by_id[item.sample]
        turn = torch.tensor(s.response_ids[item.start : item.stop])[:, None]
        student = twin.response_logits(s, kv[s.cartridge])[item.start : item.stop]
        text = item.context_ids + s.response_ids[item.start : item.stop]
        teacher = twin.logits(text, kv[s.cartridge])[len(item.context_ids) - 1 : -1]
        log_s, log_t = (x.log_softmax(-1).gather(-1, turn)[:, 0] for x in (student, teacher))
        losses += ((log_s - log_t) * log_s).tolist()
    done = do(twin, batch, changed(only("alpha"), sdpo=SdpoSpec(variant="sampled")))
    factor = math.exp(0.3) if old_is_given else 1.0
    expected = factor * sum(losses) / 8
    assert abs(expected) > 0.05
    assert done.result.terms["sdpo"]["value"] == pytest.approx(expected, rel=1e-4)


def test_without_a_hint_the_reader_agrees_with_itself() -> None:
    """The shipped model over a real text, through the chat's own tokens; a hint moves it."""
    model, tokenizer = load_model(str(READER)), load_tokenizer(str(READER))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    chart = ids("The patient takes aspirin. The blood pressure is high. " * 4)
    question, hint = ids("What does the patient take?"), ids("The patient takes codeine.")
    answer = ids("The patient takes aspirin.")
    sample = Sample("e", "p", question, answer, (0.0,) * len(answer), (0,) * len(answer))
    rl = [PolicySample(sample, (True,) * len(answer), Sampling(), "g", 1.0)]
    kv = {"p": document_kv(model, (tokenizer.bos_token_id, *chart))[:, :, :, :24]}

    def divergence(start: int, given: tuple[int, ...]) -> float:
        item = HintedTurn("e", start, len(answer), given + question + answer[:start])
        teacher = score_over(model, hinted([item], rl), kv, 256)
        student = score_over(model, [sample], kv, 256)[start:]
        total, count = doc_kl(student, TeacherDistribution(logits=teacher), loss_form("jsd"))
        return (total / count).item()

    for start in (0, len(answer) // 2):
        assert abs(divergence(start, ())) < 1e-6
    assert divergence(0, hint) > 1e-4


def test_gradients_are_compared_without_touching_the_step(llama: Twin) -> None:
    batch = scene(llama, bank_of(llama))
    plain, compared = do(llama, batch, ALL), do(llama, batch, ALL, compare_gradients=True)
    assert torch.equal(plain.trained, compared.trained)
    assert "grad_norm" not in plain.result.terms["grpo"]
    assert plain.result.cosines == {}
    alone = {}
    for name, weight in zip(CHANNELS, WEIGHTS, strict=True):
        unit = changed(NONE, **{weight: 1.0})
        gradient = do(llama, batch, unit).gradient
        assert gradient is not None
        alone[name] = gradient.flatten()
        assert compared.result.terms[name]["grad_norm"] == pytest.approx(
            gradient.norm().item(), rel=1e-4
        )
    assert list(compared.result.cosines) == [
        "doc_kl/grpo", "doc_kl/sdpo", "doc_kl/replay_dpo", "grpo/sdpo", "grpo/replay_dpo",
        "sdpo/replay_dpo",
    ]  # fmt: skip
    for pair, cosine in compared.result.cosines.items():
        a, b = (alone[name] for name in pair.split("/"))
        assert cosine == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-4)


def test_a_channel_without_gradient_has_no_angle(llama: Twin) -> None:
    """All rewards equal: advantages of 0."""
    batch = scene(llama, bank_of(llama))
    batch = replace(batch, rl=[replace(r, reward=1.0, error_kind="") for r in batch.rl])
    keep = changed(only("w_rl", "beta"), grpo=GrpoSpec(zero_variance="keep"))
    done = do(llama, batch, keep, compare_gradients=True)
    assert done.result.terms["grpo"]["value"] == 0.0
    assert done.result.terms["grpo"]["grad_norm"] == 0.0
    assert done.result.cosines == {}


def test_a_group_without_variance_is_in_no_denominator(llama: Twin) -> None:
    """Task y solved by both: its 8 tokens of 22 are out, bit for bit as if they were not there;
    kept, they only weaken task x."""
    batch = scene(llama, bank_of(llama))
    rl = [replace(r, reward=1.0) if r.group == "y" else r for r in batch.rl]
    equal = replace(batch, rl=rl)
    dropped = do(llama, equal, only("w_rl"))
    without = do(llama, replace(scored(batch, ref=None), rl=rl[:4]), only("w_rl"))
    kept = do(llama, equal, changed(only("w_rl"), grpo=GrpoSpec(zero_variance="keep")))
    assert torch.equal(dropped.trained, without.trained)
    found = dropped.result.terms["grpo"]
    assert (found["count"], found["dropped_groups"], found["excluded"]) == (14, 1, 1)
    assert kept.result.terms["grpo"]["count"] == 22
    assert "dropped_groups" not in kept.result.terms["grpo"]
    value = kept.result.terms["grpo"]["value"]
    assert value == pytest.approx(found["value"] * 14 / 22, rel=1e-4)
    nothing = replace(batch, rl=[replace(r, reward=1.0, error_kind="") for r in batch.rl])
    done = do(llama, nothing, only("w_rl"))
    assert (done.result.terms["grpo"]["value"], done.result.tokens) == (0.0, 0)
    assert done.result.terms["grpo"]["dropped_groups"] == 2


def test_tools_answers_are_not_trained_on(llama: Twin) -> None:
    """Of tokens that the student did not write not even the sampler's numbers are read."""
    batch = scene(llama, bank_of(llama))
    nan = float("nan")
    rl = [
        replace(r, sample=replace(r.sample, sampler_logprobs=tuple(
            0.0 if own else nan for own in r.trained)))
        for r in batch.rl
    ]  # fmt: skip
    ours, theirs = do(llama, replace(batch, rl=rl), only("w_rl")), do(llama, batch, only("w_rl"))
    assert torch.equal(ours.trained, theirs.trained)


def test_the_mismatch_weight_comes_from_the_sampler_alone(llama: Twin) -> None:
    """A sampler a tenth of a nat lower on every token weighs each by exp(.1)."""
    bank = bank_of(llama)
    batch = scene(llama, bank)
    samples = [r.sample for r in batch.rl]
    own = response_logprobs(llama.model, samples, prefixes(bank), 64)
    pieces = own.split([len(r.trained) for r in batch.rl])
    rl = [
        replace(r, sample=replace(r.sample, sampler_logprobs=tuple(p.tolist())))
        for r, p in zip(batch.rl, pieces, strict=True)
    ]
    exact = replace(batch, rl=rl)
    plain = do(llama, exact, changed(only("w_rl"), grpo=GrpoSpec(mismatch=None)))
    agreed, lower = (
        do(llama, exact, only("w_rl")),
        do(llama, with_sampler(exact, 0.1), only("w_rl")),
    )
    for done, factor in ((agreed, 1.0), (lower, math.exp(0.1))):
        grpo, reference = done.result.terms["grpo"], plain.result.terms["grpo"]
        assert grpo["value"] == pytest.approx(factor * reference["value"], abs=1e-6)
        assert grpo["mismatch_weight"] == pytest.approx(factor, abs=1e-5)
        assert grpo["ratio"] == 1.0


def test_older_episodes_need_the_policy_that_sampled_them(llama: Twin) -> None:
    """Given `old`, the ratio is the trained policy's to it. Without it the sampler's own record
    weighs them, if it may: by exp(pi - sampler), at most `high`."""
    bank = bank_of(llama)
    batch = scene(llama, bank, version=4)
    samples = [r.sample for r in batch.rl]
    own = response_logprobs(llama.model, samples, prefixes(bank), 64)
    uncorrected = changed(only("w_rl"), grpo=GrpoSpec(mismatch=None))
    with pytest.raises(StaleTokenError, match=r"e0 was sampled by versions \[4\], and version 5"):
        do(llama, batch, uncorrected, version=5, staleness=1)
    weighed = do(llama, batch, only("w_rl"), version=5, staleness=1)
    sampler = [v for r in batch.rl for v in r.sample.sampler_logprobs]
    bears = [r.reward is not None and t for r in batch.rl for t in r.trained]
    weights = (own - torch.tensor(sampler)).exp().clamp(max=2.0)[torch.tensor(bears)]
    found = weighed.result.terms["grpo"]["mismatch_weight"]
    assert found == pytest.approx(weights.mean().item(), rel=1e-4)
    late = scored(batch, old=own - 0.1)
    done = do(llama, late, only("w_rl"), bank=bank, version=5, staleness=1)
    assert done.result.terms["grpo"]["ratio"] == pytest.approx(math.exp(0.1), abs=1e-5)
    assert done.result.stale_tokens == 22


def test_distillation_and_the_reference_reach_the_loss(llama: Twin) -> None:
    """With all rewards equal, A = -price * (student - teacher), and k3 is a mean over tokens."""
    bank = bank_of(llama)
    batch = scene(llama, bank)
    rl = [replace(r, reward=1.0, error_kind="") for r in batch.rl]
    own = response_logprobs(llama.model, [r.sample for r in rl], prefixes(bank), 64)
    trained = torch.tensor([own for r in rl for own in r.trained])
    batch = replace(scored(batch, document=own - 2.0), rl=rl)
    spec = GrpoSpec(mismatch=None, distill=0.25, zero_variance="keep")
    done = do(llama, batch, changed(only("w_rl"), grpo=spec))
    assert done.result.terms["grpo"]["value"] == pytest.approx(0.25 * 2.0, abs=1e-5)
    assert done.result.terms["grpo"]["distilled"] == pytest.approx(2.0, abs=1e-5)
    d = (batch.scores["ref"] - own)[trained]
    k3 = (d.exp() - d - 1).mean().item()
    spec = GrpoSpec(mismatch=None, kl=0.5, zero_variance="keep")
    done = do(llama, batch, changed(only("w_rl"), grpo=spec))
    assert k3 > 1e-3
    assert done.result.terms["grpo"]["k3"] == pytest.approx(k3, rel=1e-3)
    assert done.result.terms["grpo"]["value"] == pytest.approx(0.5 * k3, rel=1e-3)


def test_alpha_follows_its_schedule() -> None:
    objective = changed(ALL, alpha=0.1, alpha_warmup_steps=4)
    channels = active_channels(objective)
    found = [{c.name: c.at(s).weight for c in channels} for s in (0, 1, 4, 9)]
    assert [weights["sdpo"] for weights in found] == [0.0, pytest.approx(0.025), 0.1, 0.1]
    assert found[0] == {"doc_kl": 0.7, "grpo": 1.3, "sdpo": 0.0, "replay_dpo": 0.9}


def spoil(batch: TrainBatch, what: str) -> TrainBatch:
    first = batch.rl[0]
    if what == "drawn colder":
        colder = replace(first, sampling=Sampling(temperature=0.7))
        return replace(batch, rl=[colder, *batch.rl[1:]])
    if what == "twice":
        return replace(batch, rl=[*batch.rl, first])
    if what == "stale pair":
        return replace(batch, pairs=[replace(batch.pairs[0], ref_version=-3)])
    if what == "pair of the future":
        return replace(batch, pairs=[replace(batch.pairs[0], ref_version=1)])
    if what == "turn of nobody":
        rest = {name: batch.scores[name][len(first.trained) :] for name in ("ref", "document")}
        return replace(scored(batch, **rest), rl=batch.rl[1:])
    hinted_teacher = batch.scores["sdpo_teacher"]
    return {
        "no teacher": scored(batch, doc_teacher=None),
        "no hinted teacher": scored(batch, sdpo_teacher=None),
        "short hinted teacher": scored(batch, sdpo_teacher=hinted_teacher.rows(slice(0, 7))),
        "no reference": scored(batch, ref=None),
        "short reference": scored(batch, ref=torch.zeros(9)),
        "no document teacher": scored(batch, document=None),
    }[what]


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("drawn colder", DataError, "e0 was drawn at temperature 0.7, top_p 1.0, top_k 0"),
        ("twice", DataError, r"several RL samples of the ids \['e0'\]"),
        ("stale pair", StaleTokenError, "pair p0 has a reference of version -3, and version 0"),
        ("pair of the future", StaleTokenError, "pair p0 has a reference of version 1"),
        ("turn of nobody", DataError, "sample e0, which is not in the batch"),
        ("no teacher", DataError, "the batch has no doc_teacher"),
        ("no hinted teacher", DataError, "the batch has no sdpo_teacher"),
        (
            "short hinted teacher",
            DataError,
            "sdpo_teacher speaks of 7 tokens and its samples have 8",
        ),
        ("no reference", DataError, "the batch has no ref"),
        ("short reference", DataError, r"ref speaks of 9 tokens and its samples have 32"),
        ("no document teacher", DataError, "the batch has no document"),
    ],
)
def test_what_does_not_fit_trains_nothing(
    llama: Twin, what: str, error: type[ForgeError], message: str
) -> None:
    bank = bank_of(llama)
    batch = scene(llama, bank)
    batch = scored(batch, document=batch.scores["ref"])
    objective = changed(
        ALL,
        grpo=GrpoSpec(kl=0.1, distill=0.1, zero_variance="keep"),
        dpo=DpoSpec(reference="first_use", max_reference_age=2),
    )
    before = trained(bank)
    do(llama, batch, objective)
    with pytest.raises(error, match=message):
        do(llama, spoil(batch, what), objective, bank=bank)
    assert torch.equal(trained(bank), before)
    assert gradients(bank) is None


@pytest.mark.parametrize("micro", [None, 20])
def test_a_term_that_is_no_number_ends_the_run_before_the_update(
    llama: Twin, micro: int | None
) -> None:
    bank = bank_of(llama)
    before = trained(bank)
    batch = scene(llama, bank)
    spoilt = replace(batch, pairs=[batch.pairs[0], replace(batch.pairs[1], ref_chosen=math.nan)])
    with pytest.raises(
        RunError, match=r"replay_dpo became nan at version 0, of cartridge a; lower train\.lr"
    ):
        do(llama, spoilt, ALL, bank=bank, micro_tokens=micro)
    assert torch.equal(trained(bank), before)


@pytest.mark.parametrize("wrong", [{"w_rl": -1.0}, {"alpha": math.inf}, {"alpha_warmup_steps": -1}])
def test_weights_are_finite_and_not_negative(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        EpisodesObjective(**wrong)


@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_an_episode_in_one_piece_is_distilled_as_its_turns_one_by_one(
    llama: Twin, micro_tokens: int | None
) -> None:
    """The episode with its tool's answers, its own tokens marked, against each turn as a sample of
    its own after all that stood before it."""
    episodes = scene(llama, bank_of(llama)).rl
    whole = [r.sample for r in episodes]
    marks = [r.trained for r in episodes]
    own = torch.tensor([m for trained in marks for m in trained]).nonzero().flatten()
    turns = []
    for r in episodes:
        s, own_now = r.sample, r.trained
        edges = [0, *(t for t in range(1, len(own_now)) if own_now[t] != own_now[t - 1])]
        for start, stop in zip(edges, [*edges[1:], len(r.trained)], strict=True):
            if r.trained[start]:
                span = slice(start, stop)
                turns.append(
                    replace(
                        s, id=f"{s.id}/{start}", prompt_ids=s.prompt_ids + s.response_ids[:start],
                        response_ids=s.response_ids[span], versions=s.versions[span],
                        sampler_logprobs=s.sampler_logprobs[span],
                    )
                )  # fmt: skip
    teacher = score(llama.model, whole, llama.cached(), 64)
    in_one = TrainBatch(
        doc=whole,
        doc_trained=marks,
        scores={"doc_teacher": TeacherDistribution(logits=teacher).rows(own)},
    )
    apart = TrainBatch(
        doc=turns,
        scores={
            "doc_teacher": TeacherDistribution(logits=score(llama.model, turns, llama.cached(), 64))
        },
    )
    found = do(llama, in_one, EpisodesObjective(), micro_tokens=micro_tokens)
    expected = do(llama, apart, EpisodesObjective())
    assert found.result.terms["doc_kl"]["count"] == sum(map(sum, marks)) == 24
    assert found.result.kl == pytest.approx(expected.result.kl, **CLOSE)
    assert found.gradient is not None
    assert expected.gradient is not None
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("micro_tokens", [None, 20])
def test_channels_over_the_same_episodes_share_their_forward(
    llama: Twin, monkeypatch: pytest.MonkeyPatch, micro_tokens: int | None
) -> None:
    """doc_kl and grpo of the same episodes: each value as alone, the gradients' sum, and as many
    places among the packed tokens as for one of them."""
    read: list[int] = []

    forward = Decoder.forward

    def counted(model: Decoder, ids: Tensor, *rest: Any) -> Tensor:
        read[-1] += len(ids)
        return forward(model, ids, *rest)

    rl = [r for r in scene(llama, bank_of(llama)).rl if r.reward is not None]
    doc, marks = [r.sample for r in rl], [r.trained for r in rl]
    own = torch.tensor([m for trained in marks for m in trained]).nonzero().flatten()
    teacher = TeacherDistribution(logits=score(llama.model, doc, llama.cached(), 64)).rows(own)
    both = TrainBatch(doc=doc, doc_trained=marks, scores={"doc_teacher": teacher}, rl=rl)
    monkeypatch.setattr(Decoder, "forward", counted)
    found = []
    for weights in (("w_doc",), ("w_rl",), ("w_doc", "w_rl")):
        read.append(0)
        found.append(do(llama, both, only(*weights), micro_tokens=micro_tokens))
    alone_doc, alone_rl, together = found
    assert read == [read[0]] * 3
    assert read[0] == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in doc)
    assert together.result.kl == pytest.approx(alone_doc.result.kl, **CLOSE)
    value = together.result.terms["grpo"]["value"]
    assert value == pytest.approx(alone_rl.result.terms["grpo"]["value"], **CLOSE)
    assert together.gradient is not None
    assert alone_doc.gradient is not None
    assert alone_rl.gradient is not None
    summed = alone_doc.gradient + alone_rl.gradient
    torch.testing.assert_close(together.gradient, summed, rtol=2e-4, atol=1e-6)
