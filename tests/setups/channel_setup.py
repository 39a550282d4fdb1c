"""A batch with something of every channel over the tiny twins, and its terms by transformers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeBank, first_tokens
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import (
    TeacherDistribution,
    response_logprobs,
    score,
    score_over,
)
from cartridge_forge.learning.trainer_state import CartridgeProgress, LearningRateSchedule
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.objectives.balance import GradientBalance
from cartridge_forge.plugins.objectives.policy_scores import with_references
from cartridge_forge.plugins.objectives.updates import Share, part_of
from cartridge_forge.protocols.spec.sections import GapBounds, LossSpec, TrainSpec
from cartridge_forge.protocols.step import (
    HintedTurn,
    PolicySample,
    PreferencePair,
    Sample,
    Sampling,
    TrainBatch,
    TrainStepOutput,
    hinted,
)

if TYPE_CHECKING:
    from twins import Twin

VOCAB = 97
ALL = EpisodesObjective(w_doc=0.7, w_rl=1.3, alpha=0.5, beta=0.9)


def changed(like: EpisodesObjective, **changes: Any) -> EpisodesObjective:
    return like.model_copy(update=changes)


def loss_form(
    direction: str = "forward", beta: float = 0.5, form: str = "tail", temperature: float = 1.0
) -> LossSpec:
    """The section unchecked: the betas 0 and 1 too, which a config writes as directions."""
    return LossSpec.model_construct(
        direction=direction, beta=beta, form=form, temperature=temperature
    )


def in_chunks(train: TrainSpec, logit_bytes: int) -> TrainSpec:
    """With chunks of logits far smaller than a config's MiB."""
    return train.model_copy(update={"logit_chunk_mb": Fraction(logit_bytes, 2**20)})


def scored(batch: TrainBatch, **scores: Any) -> TrainBatch:
    """The batch with other scores; None: without."""
    return replace(batch, scores={**batch.scores, **scores})


def ids(draws: random.Random, n: int) -> tuple[int, ...]:
    return tuple(draws.choices(range(3, VOCAB), k=n))


def episode(
    draws: random.Random,
    name: str,
    turns: Sequence[int],
    reward: float | None,
    group: str,
    document: str = "a",
    version: int = 0,
) -> PolicySample:
    """Turns of the student (`turns` tokens each) with a tool's two tokens after each but the last;
    the sampler's log-probabilities are yet to be filled in."""
    trained: list[bool] = []
    for i, n in enumerate(turns):
        trained += [True] * n + [False] * (2 if i + 1 < len(turns) else 0)
    n = len(trained)
    sample = Sample(
        name, document, ids(draws, 3), ids(draws, n), (0.0,) * n,
        tuple(version if own else -1 for own in trained), contexts=(document,),
    )  # fmt: skip
    error = "" if reward is not None else "environment_died"
    return PolicySample(sample, tuple(trained), Sampling(), group, reward, error)


def prefixes(bank: CartridgeBank) -> dict[str, Tensor]:
    return {name: kv.detach() for name, kv in zip(bank.names, bank.kv(bank.names), strict=True)}


def trained(bank: CartridgeBank) -> Tensor:
    """The trainable parts, stacked [C, L, 2, H_kv, P-F, D]: a copy."""
    return torch.stack([part.detach() for part in bank.trainable.values()])


def whole_kv(bank: CartridgeBank, trainable: Tensor) -> Tensor:
    """The cartridges [C, L, 2, H_kv, P, D] with these stacked trainable parts."""
    return torch.cat([torch.stack(list(bank.frozen.values())), trainable], dim=4)


def gradients(bank: CartridgeBank) -> Tensor | None:
    """Their gradients, stacked, with 0 for a cartridge that has none; None where none has one."""
    found = [part.grad for part in bank.trainable.values()]
    if all(one is None for one in found):
        return None
    parts = zip(found, bank.trainable.values(), strict=True)
    return torch.stack([torch.zeros_like(part) if one is None else one for one, part in parts])


def progress_of(
    bank: CartridgeBank, lr: float = 0.02, balance: bool = False
) -> dict[str, CartridgeProgress]:
    """The progress of untrained cartridges at a constant rate."""
    constant = LearningRateSchedule(lr, 0, 10**9)
    return {
        name: CartridgeProgress(part, constant, GradientBalance() if balance else None)
        for name, part in bank.trainable.items()
    }


def bank_of(twin: Twin, names: str = "ab", tokens: int = 8) -> CartridgeBank:
    return first_tokens({name: twin.kv[name] for name in names}, tokens, frozen=1)


def scene(twin: Twin, bank: CartridgeBank, seed: int = 0, version: int = 0) -> TrainBatch:
    """Two documents' samples, six episodes of two tasks (one errored), three hinted turns, two
    pairs; teachers and references scored under the bank as it is."""
    draws = random.Random(seed)
    doc = [
        Sample(
            f"d{i}",
            name,
            ids(draws, p),
            ids(draws, n),
            (0.0,) * n,
            (version,) * n,
            contexts=(name,),
        )
        for i, (name, p, n) in enumerate([("a", 4, 5), ("b", 2, 3)])
    ]
    shapes: list[tuple[list[int], float | None, str, str]] = [
        ([3, 2], 1.0, "x", "a"),
        ([4], 0.0, "x", "a"),
        ([2, 1, 2], 0.0, "x", "a"),
        ([2], None, "x", "a"),
        ([3], 0.2, "y", "b"),
        ([1, 4], 0.9, "y", "b"),
    ]
    rl = [
        episode(draws, f"e{i}", turns, reward, group, document, version)
        for i, (turns, reward, group, document) in enumerate(shapes)
    ]
    given = prefixes(bank)

    def item(i: int, start: int, stop: int) -> HintedTurn:
        s = rl[i].sample
        context = s.prompt_ids + s.response_ids[:start]
        return HintedTurn(s.id, start, stop, context[:-1] + ids(draws, 3) + context[-1:])

    turns = [item(2, 4, 5), item(0, 0, 3), item(5, 3, 7)]
    pairs = [
        PreferencePair(f"p{i}", name, ids(draws, 4), ids(draws, c), ids(draws, r), 0.0, 0.0, -1)
        for i, (name, c, r) in enumerate([("b", 3, 5), ("a", 4, 2)])
    ]
    older = {name: kv + 0.05 * torch.sin(kv * 99) for name, kv in given.items()}
    return TrainBatch(
        doc=doc,
        rl=rl,
        turns=turns,
        pairs=with_references(twin.model, pairs, older, 64, version, 0),
        scores={
            "doc_teacher": TeacherDistribution(logits=score(twin.model, doc, twin.cached(), 64)),
            "ref": response_logprobs(twin.model, [r.sample for r in rl], older, 64),
            "sdpo_teacher": TeacherDistribution(
                logits=score_over(twin.model, hinted(turns, rl), given, 64)
            ),
        },
    )


def of_cartridge(batch: TrainBatch, name: str) -> TrainBatch:
    """What of a batch trains one cartridge, with its scores."""
    learns = {r.sample.id: r.sample.cartridge for r in batch.rl}
    share = Share(
        doc=[i for i, s in enumerate(batch.doc) if s.cartridge == name],
        rl=[i for i, r in enumerate(batch.rl) if r.sample.cartridge == name],
        turns=[i for i, turn in enumerate(batch.turns) if learns[turn.sample] == name],
        pairs=[i for i, pair in enumerate(batch.pairs) if pair.cartridge == name],
        extra={
            channel: [i for i, item in enumerate(items) if item.cartridge == name]
            for channel, items in batch.extra.items()
        },
    )
    return part_of(batch, share)


@dataclass(frozen=True)
class Done:
    result: TrainStepOutput
    gradient: Tensor | None
    trained: Tensor


def do(
    twin: Twin,
    batch: TrainBatch,
    objective: EpisodesObjective,
    loss: LossSpec | None = None,
    *,
    bank: CartridgeBank | None = None,
    progress: Mapping[str, CartridgeProgress] | None = None,
    version: int = 0,
    staleness: int = 0,
    row_tokens: int = 24,
    micro_tokens: int | None = None,
    compare_gradients: bool = False,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    gap_bounds: GapBounds | None = None,
) -> Done:
    """One step without clipping, of a fresh bank if none is given."""
    bank = bank or bank_of(twin)
    result = train_step(
        twin.model,
        bank,
        progress or progress_of(bank),
        batch,
        active_channels(objective, loss),
        version,
        StepOptions(
            clip=1e9,
            row_tokens=row_tokens,
            staleness=staleness,
            micro_tokens=micro_tokens,
            logit_bytes=logit_bytes,
            recompute_layers=recompute_layers,
            gap_bounds=gap_bounds,
            compare_gradients=compare_gradients,
        ),
    )
    return Done(result, gradients(bank), trained(bank))


def with_sampler(batch: TrainBatch, offset: float = 0.0) -> TrainBatch:
    """Every sampler log-probability lowered: exp(offset) is then the mismatch weight's factor."""
    rl = [
        replace(r, sample=replace(r.sample, sampler_logprobs=tuple(
            x - offset for x in r.sample.sampler_logprobs)))
        for r in batch.rl
    ]  # fmt: skip
    return replace(batch, rl=rl)
