"""Divide a step's rollout into the batches of its optimizer updates, and join their results.

    rollout -> pass 1: minibatch 1, 2, ... -> pass 2: the same data, divided anew -> one version

What belongs together stays together: the episodes of a group, with the samples of the same ids that
the document teacher scored and with their hinted turns. Groups, further samples, pairs and further
channels' data are each drawn in a random order and dealt to the minibatches in turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from protocols.spec.mesh import HINTED_TEACHER
from protocols.train_batch import TrainBatch
from protocols.types import TrainStepOutput

OF_EPISODES = ("old", "ref", "document")  # scores of all response tokens of a batch's episodes
LAST = ("ratio", "clipped_low", "clipped_high", "approx_kl")  # also told of the last update


def run_updates(
    batch: TrainBatch,
    update: Callable[[TrainBatch, bool], TrainStepOutput],
    trained: tuple[Tensor, torch.optim.Optimizer],
    *,
    passes: int,
    minibatches: int,
    stream: str,
) -> TrainStepOutput:
    """Call `update` for every minibatch of every pass, and return one result for all.

    `update` gets the minibatch, and whether it is the first. `stream` names the draws of the
    divisions. After an error the parameter and the optimizer `trained` are as before the first
    update.
    """
    parameter, optimizer = trained
    if passes * minibatches == 1:
        return update(batch, True)
    held = {k: v.clone() for k, v in optimizer.state.get(parameter, {}).items()}
    before = parameter.detach().clone()
    outputs: list[TrainStepOutput] = []
    try:
        for n in range(passes):
            for part in divide(batch, minibatches, random.Random(f"{stream}/{n}")):
                outputs.append(update(part, not outputs))
    except BaseException:
        if outputs:
            with torch.no_grad():
                parameter.copy_(before)
            parameter.grad = None
            optimizer.state.clear()
            if held:
                optimizer.state[parameter] = held
        raise
    return joined_output(outputs, passes)


@dataclass
class Share:
    """Hold indices into a batch: of one unit, or of one minibatch."""

    doc: list[int] = field(default_factory=list)
    rl: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    extra: dict[str, list[int]] = field(default_factory=dict)

    def add(self, other: Share) -> None:
        self.doc += other.doc
        self.rl += other.rl
        self.turns += other.turns
        self.pairs += other.pairs
        for name, indices in other.extra.items():
            self.extra.setdefault(name, []).extend(indices)


def divide(batch: TrainBatch, parts: int, draws: random.Random) -> list[TrainBatch]:
    """Return `parts` batches that together hold each item of the batch once, in its order; one part
    is the batch itself. A part may be empty."""
    if parts == 1:
        return [batch]
    shares = [Share() for _ in range(parts)]
    dealt = 0
    for units in _units(batch):
        draws.shuffle(units)
        for unit in units:
            shares[dealt % parts].add(unit)
            dealt += 1
    return [_part(batch, share) for share in shares]


def joined_output(outputs: Sequence[TrainStepOutput], passes: int) -> TrainStepOutput:
    """Return one result for the updates of `passes` over a rollout.

    Values and facts of a channel are means over the updates, weighted by their denominators; of
    LAST also those of the last update. Counts are those of one pass. The gradient norm is the mean
    over updates; channels' gradients were compared in the first.
    """
    if len(outputs) == 1:
        return outputs[0]
    terms = {
        name: _joined_term([output.terms[name] for output in outputs], passes)
        for name in outputs[0].terms
    }
    return replace(
        outputs[-1],
        kl=terms.get("doc_kl", {}).get("value", 0.0),
        grad_norm=sum(output.grad_norm for output in outputs) / len(outputs),
        tokens=sum(output.tokens for output in outputs) // passes,
        stale_tokens=sum(output.stale_tokens for output in outputs) // passes,
        terms=terms,
        cosines=outputs[0].cosines,
        sampler_gap=outputs[0].sampler_gap,  # later updates changed the policy
    )


def _joined_term(parts: Sequence[Mapping[str, float]], passes: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for fact in dict.fromkeys(fact for part in parts for fact in part):
        held = [(part[fact], part["count"]) for part in parts if fact in part]
        if fact in ("weight", "grad_norm"):
            found[fact] = held[0][0]
        elif isinstance(held[0][0], int):
            found[fact] = sum(int(value) for value, _ in held) // passes
        else:
            whole = sum(count for _, count in held)
            found[fact] = sum(value * count for value, count in held) / max(whole, 1)
    with_data = [part for part in parts if part["count"]]
    if with_data:
        found |= {f"{fact}_last": with_data[-1][fact] for fact in LAST if fact in with_data[-1]}
    return {**found, "updates": len(parts)}


def _units(batch: TrainBatch) -> list[list[Share]]:
    """Return what is never divided, by kind."""
    groups: dict[str, Share] = {}
    group_of: dict[str, Share] = {}
    for i, r in enumerate(batch.rl):
        unit = group_of[r.sample.id] = groups.setdefault(r.group, Share())
        unit.rl.append(i)
    for i, turn in enumerate(batch.turns):
        group_of[turn.sample].turns.append(i)
    others = []
    for i, s in enumerate(batch.doc):
        if s.id in group_of:
            group_of[s.id].doc.append(i)
        else:
            others.append(Share(doc=[i]))
    pairs = [Share(pairs=[i]) for i in range(len(batch.pairs))]
    extra = [
        Share(extra={name: [i]}) for name, items in batch.extra.items() for i in range(len(items))
    ]
    return [list(groups.values()), others, pairs, extra]


def _part(batch: TrainBatch, share: Share) -> TrainBatch:
    doc, rl, turns = sorted(share.doc), sorted(share.rl), sorted(share.turns)
    place = {i: n for n, i in enumerate(doc)}
    marks = batch.doc_trained
    scores: dict[str, Any] = dict(batch.scores)
    for name in OF_EPISODES:
        if scores.get(name) is not None:
            scores[name] = scores[name][_tokens(rl, [len(r.trained) for r in batch.rl])]
    if (teacher := scores.get("doc_teacher")) is not None:
        scores["doc_teacher"] = teacher.rows(_tokens(doc, [sum(m) for m in batch.doc_marks]))
    if (teacher := scores.get(HINTED_TEACHER)) is not None:
        scores[HINTED_TEACHER] = teacher.rows(_tokens(turns, [t.tokens for t in batch.turns]))
    return replace(
        batch,
        doc=[batch.doc[i] for i in doc],
        doc_trained=None if marks is None else [marks[i] for i in doc],
        doc_stored=[
            replace(s, sample=place[s.sample]) for s in batch.doc_stored if s.sample in place
        ],
        rl=[batch.rl[i] for i in rl],
        turns=[batch.turns[i] for i in turns],
        pairs=[batch.pairs[i] for i in sorted(share.pairs)],
        extra={
            name: [items[i] for i in sorted(share.extra.get(name, ()))]
            for name, items in batch.extra.items()
        },
        scores=scores,
    )


def _tokens(chosen: Iterable[int], lengths: Sequence[int]) -> Tensor:
    """Return the indices of the chosen samples' tokens among those of all samples."""
    begins = list(accumulate(lengths, initial=0))
    return torch.tensor(
        [t for i in chosen for t in range(begins[i], begins[i + 1])], dtype=torch.long
    )
