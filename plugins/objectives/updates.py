"""Divide a step's rollout into the batches of its optimizer updates, and join their results.

    rollout -> pass 1: minibatch 1, 2, ... -> pass 2: the same data, divided anew -> one version

What belongs together stays together: the episodes of a group, with the samples of the same ids that
the document teacher scored and with their hinted turns. A cartridge's groups, further samples,
pairs and further channels' data are each drawn in a random order and dealt to the minibatches in
turn, by a generator of that cartridge: how its data is divided does not depend on the others'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.trainer_state import CartridgeProgress
from cartridge_forge.protocols.spec.mesh import HINTED_TEACHER
from cartridge_forge.protocols.step import TrainBatch, TrainStepOutput

OF_EPISODES = ("old", "ref", "document")  # scores of all response tokens of a batch's episodes
LAST = ("ratio", "clipped_low", "clipped_high", "approx_kl")  # also told of the last update


def run_updates(
    batch: TrainBatch,
    update: Callable[[TrainBatch, bool], TrainStepOutput],
    progress: Mapping[str, CartridgeProgress],
    *,
    passes: int,
    minibatches: int,
    stream: str,
) -> TrainStepOutput:
    """Call `update` for every minibatch of every pass, and return one result for all.

    `update` gets the minibatch, and whether it is the first. `stream` names the draws of the
    divisions, with the cartridge's own step. After an error the cartridges are as before the first
    update; `progress` is that of each.
    """
    learning = {_cartridge(s) for s in (*batch.doc, *(r.sample for r in batch.rl), *batch.pairs)}
    learning |= {_cartridge(item) for items in batch.extra.values() for item in items}
    saved = {n: ProgressCopy.of(part) for n, part in progress.items() if n in learning}
    outputs: list[TrainStepOutput] = []

    def draws(cartridge: str, n: int) -> random.Random:
        step = progress[cartridge].steps if cartridge in progress else 0
        return random.Random(f"{stream}/{step}/{n}")

    try:
        for n in range(passes):
            for part in divide(batch, minibatches, partial(draws, n=n)):
                outputs.append(update(part, not outputs))
    except BaseException:
        for name, copies in saved.items():
            copies.restore(progress[name])
        raise
    return joined_output(outputs, passes)


@dataclass(frozen=True)
class ProgressCopy:
    """Hold copies of what one optimizer update changes."""

    numbers: Tensor
    moments: Mapping[str, Tensor]
    balance: Mapping[str, Any]

    @classmethod
    def of(cls, progress: CartridgeProgress) -> ProgressCopy:
        """Return copies of a cartridge's progress."""
        return cls(
            progress.parameter.detach().clone(),
            {name: tensor.clone() for name, tensor in progress.moments.items()},
            {} if progress.balance is None else progress.balance.state(),
        )

    def restore(self, progress: CartridgeProgress) -> None:
        """Set the progress to what was copied."""
        with torch.no_grad():
            progress.parameter.copy_(self.numbers)
        progress.parameter.grad = None
        progress.moments = dict(self.moments)
        if progress.balance is not None:
            progress.balance.restore(self.balance)


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


def divide(
    batch: TrainBatch, parts: int, draws: Callable[[str], random.Random]
) -> list[TrainBatch]:
    """Return `parts` batches that together hold each item of the batch once, in its order; one part
    is the batch itself. A part may be empty. `draws` gives the generator of a cartridge's draws."""
    if parts == 1:
        return [batch]
    shares = [Share() for _ in range(parts)]
    for cartridge, kinds in _units(batch).items():
        drawn, dealt = draws(cartridge), 0
        for units in kinds:
            drawn.shuffle(units)
            for unit in units:
                shares[dealt % parts].add(unit)
                dealt += 1
    return [part_of(batch, share) for share in shares]


def joined_output(outputs: Sequence[TrainStepOutput], passes: int) -> TrainStepOutput:
    """Return one result for the updates of `passes` over a rollout.

    Values and facts of a channel are means over the updates, weighted by their denominators; of
    LAST also those of the last update. Counts are those of one pass. Gradient norms are means over
    updates, a cartridge's over those that trained it; channels' gradients were compared in the
    first.
    """
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
        cartridges=_joined_cartridges([output.cartridges for output in outputs], passes),
    )


def _joined_cartridges(
    parts: Sequence[Mapping[str, Mapping[str, float]]], passes: int
) -> dict[str, dict[str, float]]:
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        updates = [part[name] for part in parts if name in part]
        norm = sum(update["grad_norm"] for update in updates) / len(updates)
        tokens = sum(int(update["tokens"]) for update in updates) // passes
        joined[name] = {**updates[0], "grad_norm": norm, "tokens": tokens}
    return joined


def _joined_term(parts: Sequence[Mapping[str, float]], passes: int) -> dict[str, float]:
    facts: dict[str, float] = {}
    for fact in dict.fromkeys(fact for part in parts for fact in part):
        values = [(part[fact], part["count"]) for part in parts if fact in part]
        if fact in ("weight", "grad_norm"):
            facts[fact] = values[0][0]
        elif isinstance(values[0][0], int):
            facts[fact] = sum(int(value) for value, _ in values) // passes
        else:
            total = sum(count for _, count in values)
            facts[fact] = sum(value * count for value, count in values) / max(total, 1)
    with_data = [part for part in parts if part["count"]]
    if with_data:
        facts |= {f"{fact}_last": with_data[-1][fact] for fact in LAST if fact in with_data[-1]}
    return {**facts, "updates": len(parts)}


def _units(batch: TrainBatch) -> dict[str, list[list[Share]]]:
    """Return what is never divided, by cartridge and kind."""
    kinds: dict[str, list[list[Share]]] = {}

    def add(cartridge: str, kind: int, unit: Share) -> Share:
        kinds.setdefault(cartridge, [[], [], [], []])[kind].append(unit)
        return unit

    groups: dict[tuple[str, str], Share] = {}
    group_of: dict[str, Share] = {}
    for i, r in enumerate(batch.rl):
        key = (r.sample.cartridge, r.group)
        if key not in groups:
            groups[key] = add(r.sample.cartridge, 0, Share())
        group_of[r.sample.id] = groups[key]
        groups[key].rl.append(i)
    for i, turn in enumerate(batch.turns):
        group_of[turn.sample].turns.append(i)
    for i, s in enumerate(batch.doc):
        if s.id in group_of:
            group_of[s.id].doc.append(i)
        else:
            add(s.cartridge, 1, Share(doc=[i]))
    for i, pair in enumerate(batch.pairs):
        add(pair.cartridge, 2, Share(pairs=[i]))
    for name, items in batch.extra.items():
        for i, item in enumerate(items):
            add(_cartridge(item), 3, Share(extra={name: [i]}))
    return kinds


def _cartridge(item: Any) -> str:
    """Return the cartridge that an item of a batch trains, "" for a further channel's data that
    names none."""
    return str(getattr(item, "cartridge", ""))


def part_of(batch: TrainBatch, share: Share) -> TrainBatch:
    """Return what a share holds of a batch, with its scores."""
    doc, rl, turns = sorted(share.doc), sorted(share.rl), sorted(share.turns)
    index_of = {i: n for n, i in enumerate(doc)}
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
            replace(s, sample=index_of[s.sample]) for s in batch.doc_stored if s.sample in index_of
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
