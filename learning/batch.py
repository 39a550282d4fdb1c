"""What one training step is given, cut into micro-batches and laid out for one student forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from learning.batching import text_of
from learning.teacher_logprobs import Teacher
from protocols.channels import PreferencePair, RLSample, SDPOItem, completions
from protocols.types import Sample


@dataclass(frozen=True)
class Batch:
    """The data of every channel; any may be empty. RL samples have ids of their own.

    doc, doc_teacher    samples, and the document teacher's view of their response tokens; with
                        `doc_trained`, of those that it marks in each sample, and only they bear
                        a loss (what a tool said between two turns does not)
    rl                  episodes; `old`, `ref`, `distill` are log-probabilities of *all* their
                        response tokens in order (those not trained on are never read): under the
                        version that sampled them (None: it is the one being trained), under the
                        reference, and under the teacher of on-policy distillation
    sdpo, sdpo_teacher  turns of samples in `rl`, and the hinted teacher's view of their tokens
    pairs               preferences
    """

    doc: Sequence[Sample] = ()
    doc_trained: Sequence[tuple[bool, ...]] | None = None
    doc_teacher: Teacher | None = None
    rl: Sequence[RLSample] = ()
    old: Tensor | None = None
    ref: Tensor | None = None
    distill: Tensor | None = None
    sdpo: Sequence[SDPOItem] = ()
    sdpo_teacher: Teacher | None = None
    pairs: Sequence[PreferencePair] = ()

    @property
    def texts(self) -> list[Sample]:
        """All that the student reads: documents' samples, episodes, both sides of pairs."""
        return [*self.doc, *(r.sample for r in self.rl), *completions(self.pairs)]

    @property
    def doc_marks(self) -> Sequence[tuple[bool, ...]]:
        """Of every document's sample, which response tokens bear a loss."""
        if self.doc_trained is not None:
            return self.doc_trained
        return [(True,) * len(s.response_ids) for s in self.doc]

    def take(self, doc: Sequence[int], rl: Sequence[int], pairs: Sequence[int]) -> Batch:
        """Some of the samples, episodes and pairs by index, with what belongs to them."""
        of_doc = _tokens([sum(marks) for marks in self.doc_marks], doc)
        of_rl = _tokens([len(r.trained) for r in self.rl], rl)
        kept = {self.rl[i].sample.id for i in rl}
        items = [i for i, item in enumerate(self.sdpo) if item.sample in kept]
        of_items = _tokens([item.tokens for item in self.sdpo], items)
        return Batch(
            doc=[self.doc[i] for i in doc],
            doc_trained=self.doc_trained and [self.doc_trained[i] for i in doc],
            doc_teacher=self.doc_teacher and self.doc_teacher.rows(of_doc),
            rl=[self.rl[i] for i in rl],
            old=None if self.old is None else self.old[of_rl],
            ref=None if self.ref is None else self.ref[of_rl],
            distill=None if self.distill is None else self.distill[of_rl],
            sdpo=[self.sdpo[i] for i in items],
            sdpo_teacher=self.sdpo_teacher and self.sdpo_teacher.rows(of_items),
            pairs=[self.pairs[i] for i in pairs],
        )


def split(
    batch: Batch, micro_tokens: int | None, rank: int = 0, world: int = 1, *, even: bool = False
) -> list[Batch]:
    """This rank's micro-batches of at most `micro_tokens` prompt and response tokens; None: one.

    An episode with its hinted turns and the document's sample of the same tokens, and the two
    sides of a pair, stay together: one that is longer is a micro-batch of its own. Longest first,
    each goes to the rank with the fewest tokens, the same way on every rank; one may get nothing.
    An empty batch gives none. `even` adds empty ones, so that all ranks have as many.
    """
    units = _units(batch)
    shares: list[list[Unit]] = [[] for _ in range(world)]
    held = [0] * world
    for i in sorted(range(len(units)), key=lambda i: (-units[i].length, i)):
        fewest = min(range(world), key=held.__getitem__)
        shares[fewest].append(units[i])
        held[fewest] += units[i].length
    order = {unit: i for i, unit in enumerate(units)}
    parts = [_cut(sorted(share, key=order.__getitem__), micro_tokens) for share in shares]
    own = [batch if len(part) == len(units) else _take(batch, part) for part in parts[rank]]
    most = max(map(len, parts)) if even else 0
    return own + [Batch()] * (most - len(own))


@dataclass(frozen=True)
class Unit:
    """What is never divided: samples, episodes and pairs by kind and index, of so many tokens that
    the student reads."""

    members: tuple[tuple[str, int], ...]
    length: int


def _units(batch: Batch) -> list[Unit]:
    episodes = {text_of(r.sample): i for i, r in enumerate(batch.rl)}
    units = []
    for i, s in enumerate(batch.doc):
        twin = episodes.pop(text_of(s), None)
        also = () if twin is None else (("rl", twin),)
        units.append(Unit((("doc", i), *also), _length(s)))
    taken = {member for unit in units for member in unit.members}
    alone = [i for i in range(len(batch.rl)) if ("rl", i) not in taken]
    units += [Unit((("rl", i),), _length(batch.rl[i].sample)) for i in alone]
    sides = [_length(s) for s in completions(batch.pairs)]
    return units + [
        Unit((("pairs", i),), sides[2 * i] + sides[2 * i + 1]) for i in range(len(batch.pairs))
    ]


def _cut(units: list[Unit], micro_tokens: int | None) -> list[list[Unit]]:
    """Runs of units that hold at most so many tokens, or are one longer unit."""
    parts: list[list[Unit]] = []
    room = 0
    for unit in units:
        if not parts or (micro_tokens is not None and unit.length > room):
            parts.append([])
            room = micro_tokens or 0
        parts[-1].append(unit)
        room -= unit.length
    return parts


def _take(batch: Batch, units: list[Unit]) -> Batch:
    members = sorted(member for unit in units for member in unit.members)
    return batch.take(
        **{kind: [i for of, i in members if of == kind] for kind in ("doc", "rl", "pairs")}
    )


@dataclass(frozen=True)
class Places:
    """Where each channel's tokens stand among the N logits of one student forward.

    texts      what is packed: documents' samples, episodes, completions of pairs
    needed     which of the texts' response tokens bear a loss: the N are these, in order
    doc        how many of the N, the first ones, are document distillation's
    policy     [n] the trained tokens of rewarded episodes, `lengths` of each
    turns      [m] the tokens of hinted turns, item by item
    pairs      where the completions' tokens begin; they are the last ones
    *_in_rl    the same tokens among all response tokens of the batch's episodes
    """

    texts: list[Sample]
    needed: Tensor
    doc: int
    policy: Tensor
    policy_in_rl: Tensor
    lengths: list[int]
    turns: Tensor
    turns_in_rl: Tensor
    pairs: int


def places(batch: Batch, rewarded: Collection[str]) -> Places:
    """Lay a batch out; `rewarded` are the ids of the episodes whose own tokens are trained on."""
    sides = completions(batch.pairs)
    starts = dict(
        zip(
            (r.sample.id for r in batch.rl),
            accumulate((len(r.trained) for r in batch.rl), initial=0),
            strict=False,
        )
    )
    policy, lengths = [], []
    for r in batch.rl:
        if r.sample.id in rewarded:
            own = [starts[r.sample.id] + t for t, trained in enumerate(r.trained) if trained]
            policy += own
            lengths.append(len(own))
    turns = [starts[item.sample] + t for item in batch.sdpo for t in range(item.start, item.stop)]

    of_doc = torch.tensor([m for marks in batch.doc_marks for m in marks], dtype=torch.bool)
    doc = int(of_doc.sum())
    in_rl = torch.zeros(sum(len(r.trained) for r in batch.rl), dtype=torch.bool)
    in_rl[policy + turns] = True
    at = doc + in_rl.cumsum(0) - 1
    return Places(
        texts=batch.texts,
        needed=torch.cat(
            [
                of_doc,
                in_rl,
                torch.ones(sum(len(s.response_ids) for s in sides), dtype=torch.bool),
            ]
        ),
        doc=doc,
        policy=at[policy],
        policy_in_rl=_index(policy),
        lengths=lengths,
        turns=at[turns],
        turns_in_rl=_index(turns),
        pairs=doc + int(in_rl.sum()),
    )


def _length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def _tokens(lengths: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Indices of the tokens of the chosen pieces, of pieces laid end to end."""
    ends = list(accumulate(lengths, initial=0))
    return _index(t for i in chosen for t in range(ends[i], ends[i + 1]))


def _index(tokens: Iterable[int]) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long)
