"""Re-fit a cartridge to an edited document in closed form, so that it keeps what it had elsewhere.

Rows of text are read once by four readers side by side:

    over the new document, over the old one      what the edit changes in what a token reads
    over the cartridge as it was                 what training gave it
    over the entries fitted so far, the student

So layer l is fitted to the queries that the student has there. What a token is to read is what it
read over the cartridge as it was, moved towards what it reads over the new document by as much as
the edit changes that:

    target = before + g (new - before),   g = |new - old|^2 / (|new - old|^2 + GATE |new|^2)

Layer by layer and of each KV head, among the P - F entries that are not frozen:

    keys      the entries that tokens far from the edit attend to least, as many as the changed
              passages' share of the document, give way to the keys of these passages with the most
              attention. A bias, folded into a key, gives it the share of the cartridge's attention
              that it has of the document's
    values    of all entries, by least squares for what the student lacks, with a ridge towards the
              values that the cartridge has
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cartridge_forge.learning.attention import AttentionOptions, attend, layout_of
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.ranks import concurrently, most_beside
from cartridge_forge.plugins.library.attention_matching import (
    HeadQueries,
    MatchingAttention,
    attended,
    bias_direction,
    far_squares,
    feedback,
    of_head,
    over_rows,
    ridge_solution,
    scored,
    spans,
    weighed_keys,
)
from cartridge_forge.plugins.library.reference_rows import ReferenceRow
from cartridge_forge.protocols.step import advance_preparation

READERS = 4
GATE = 0.1  # of a token's square, a change that moves it halfway to the document
CHANGED_WEIGHT = 10.0  # of all that the edit changes, where all tokens together have 1
VALUE_RIDGE = 10.0  # times the mean diagonal of the value fit's squares
MOST_RATIO = 8.0  # of attention masses, as a logarithm


@dataclass(frozen=True)
class DocumentEdit:
    """Hold the KV [L, 2, H_kv, T, D] of the document as it was and as it is, the `places` of the
    changed tokens in the latter, and the rows to fit to."""

    old: Tensor
    new: Tensor
    places: Sequence[int]
    rows: Sequence[ReferenceRow]


@dataclass
class RefitAttention(MatchingAttention):
    """Attend as MatchingAttention does, by four readers, and re-fit each layer of `cartridge`
    [L, 2, H_kv, P, D], of which the first `first` entries are frozen, with `replaced` new keys."""

    cartridge: Tensor = field(kw_only=True)
    old: Tensor = field(kw_only=True)
    places: Tensor = field(kw_only=True)
    replaced: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = [len(row.ids) for row in self.rows]
        of_rows = self.student_positions - self.behind
        positions = [of_rows + n for n in (self.length, self.old.shape[3], self.behind)]
        self.teachers = layout_of(
            lengths * (READERS - 1), [len(lengths)] * (READERS - 1), torch.cat(positions)
        )

    def run(self) -> Tensor:
        """Read the rows; return the fitted entries [L, 2, H_kv, P, D] of all heads."""
        ids = torch.tensor([i for row in self.rows for i in row.ids], device=self.model.device)
        positions = torch.cat([self.teachers.positions, self.student_positions])
        with self._noting():
            self.model(ids.repeat(READERS), positions, self)
        entries = torch.stack(self.entries)
        return entries if self.model.tensor is None else self.model.tensor.whole(entries, 2)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention [4 N, H_q, D] of the tokens over both documents, over the cartridge
        as it was, and over the layer's entries, which are re-fitted now."""
        new, old, cartridge = (
            self._own(kv[layer : layer + 1]).to(q.device, q.dtype)[0]
            for kv in (self.document, self.old, self.cartridge)
        )
        count = len(q) // READERS
        (q_s, k_s, v_s) = (x[-count:] for x in (q, k, v))
        (q_t, k_t, v_t) = (x[:-count] for x in (q, k, v))
        taught = attend(q_t, k_t, v_t, self.teachers, [new, old, cartridge], options)
        own_out, own_sums = over_rows(q_s, k_s, v_s, self.student, options)
        targets, changes = self._aims(layer, taught)
        moved = self._moved(layer, new)
        entries = self._refitted(
            layer, q_s, own_out, own_sums, targets, changes, moved, cartridge, options
        )
        self.entries.append(entries)
        advance_preparation(1 / len(self.model.layers))
        read = attend(q_s, k_s, v_s, self.student, [entries], options)
        return torch.cat([taught, read])

    def _aims(self, layer: int, taught: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the student's tokens are to read [N, H_q, D], and how much the edit changes
        what each head of theirs reads [N, H_q]."""
        new, old, earlier = taught.float().chunk(3)
        changes = (new - old).square().sum(-1)  # [N, H_q]
        targets = earlier + gate(changes, new)[..., None] * (new - earlier)
        weight = self.model.out_weight(layer)
        if self.states is None or weight is None:
            return targets, changes
        new, old, earlier, student = self.states.flatten(0, -2).float().chunk(READERS)
        strength = gate((new - old).square().sum(-1), new)[:, None]
        lacking = earlier + strength * (new - earlier) - student
        ranks = self.model.tensor
        total = (lambda x: x) if ranks is None else ranks.total
        return targets + feedback(weight, lacking, total).view_as(targets), changes

    def _refitted(
        self, layer: int, q: Tensor, own_out: Tensor, own_sums: Tensor, targets: Tensor,
        changes: Tensor, document: Tensor, earlier: Tensor, options: AttentionOptions,
    ) -> Tensor:  # fmt: skip
        """Return a layer's entries [2, H_kv, P, D] from its document, as `_moved`, and those
        `earlier`."""
        kv_heads = document.shape[1]
        frequencies = self.frequencies.of_layer(layer)

        def refit(h: int) -> Tensor:
            head = self._head(h, kv_heads, q, own_out, own_sums, targets, options)
            squares, sums = far_squares(head.queries, frequencies)
            return refitted_head(
                head, of_head(changes, kv_heads, h), document[:, h], self.places, earlier[:, h],
                bias_direction(squares, sums), self.first, self.replaced,
            )  # fmt: skip

        return torch.stack([*concurrently(refit, range(kv_heads), most_beside(q.device))], dim=1)


def gate(changes: Tensor, new: Tensor) -> Tensor:
    """Return how far a token moves from the cartridge to the document, from 0 to 1: `changes` [...]
    are the squares of what the edit changes in vectors `new` [..., D]."""
    size = new.square().sum(-1)
    return changes / (changes + GATE * size).clamp(min=torch.finfo(size.dtype).tiny)


def refitted_head(
    head: HeadQueries, changes: Tensor, document: Tensor, places: Tensor, earlier: Tensor,
    direction: Tensor, frozen: int, replaced: int,
) -> Tensor:  # fmt: skip
    """Return a head's entries [2, P, D] re-fitted to its queries, of which the edit changes what
    they read by `changes` [n].

    Of the entries `earlier` [2, P, D] behind the `frozen` ones, `replaced` get keys among those of
    the document [2, T, D] at the `places` of its changed tokens; biases are folded into them along
    `direction` [D]. The frozen entries do not change.
    """
    wide, tiny = torch.float64, torch.finfo(torch.float32).tiny
    entry_keys, values = (x.clone() for x in earlier.to(head.queries))
    tokens, count = len(entry_keys), len(changes)
    of_change = changes / changes.sum().clamp(min=tiny)  # [n], 1 together
    if replaced:
        at_cartridge = replace(head, positions=head.kept_positions)
        far = (1 / count - of_change).clamp(min=0)
        used, _ = weighed_keys(at_cartridge, entry_keys, far)
        slots = used[frozen:].topk(replaced, largest=False).indices + frozen
        remaining = torch.ones(tokens, dtype=torch.bool, device=slots.device)
        remaining[slots] = False
        squares, sums = weighed_keys(head, document[0], of_change)
        chosen = places[squares[places].topk(replaced).indices]
        biases = mass_ratios(head, of_change, document[0], sums, entry_keys, remaining)[chosen]
        new_keys = document[0, chosen].to(entry_keys)
        entry_keys[slots] = new_keys + biases[:, None] * direction.to(new_keys)
        values[slots] = document[1, chosen].to(values)
    entry_keys = entry_keys.to(earlier.dtype).to(values)
    weights = (1 / count + CHANGED_WEIGHT * of_change).to(wide)
    gram = torch.zeros(tokens - frozen, tokens - frozen, dtype=wide, device=values.device)
    missed = gram.new_zeros(tokens - frozen, values.shape[1])
    for span in spans(head, tokens):
        scores = scored(head, entry_keys, span, head.kept_positions)
        shares, read = attended(head, span, scores, values)
        of_trained = shares[:, frozen:].to(wide)
        weighted = of_trained.T * weights[span]
        gram += weighted @ of_trained
        missed += weighted @ (head.targets[span] - read).to(wide)
    values[frozen:] += ridge_solution(gram, missed, VALUE_RIDGE).to(values)
    return torch.stack([entry_keys, values]).to(earlier.dtype)


def mass_ratios(
    head: HeadQueries, weights: Tensor, keys: Tensor, sums: Tensor, entry_keys: Tensor,
    remaining: Tensor,
) -> Tensor:  # fmt: skip
    """Return the biases [T] by which a document's keys [T, D] have of the attention on a
    cartridge's `remaining` among its entries [P, D] what they have of the document's.

    Each is the mean of the log ratio of the two masses over the queries, by their `weights` [n] and
    their squared attention on the key; `sums` [n] are the logs of the document's masses.
    """
    squares = torch.zeros(len(keys), device=keys.device)
    ratios = torch.zeros_like(squares)
    for span in spans(head, len(keys) + len(entry_keys)):
        entry_sums = scored(head, entry_keys, span, head.kept_positions)[:, remaining].logsumexp(-1)
        total = torch.logaddexp(sums[span], head.own_sums[span])
        scores = scored(head, keys, span, head.positions)
        shares = (scores - total[:, None]).exp_().square_() * weights[span, None]
        squares += shares.sum(0)
        ratios += (entry_sums - sums[span]) @ shares
    tiny = torch.finfo(squares.dtype).tiny
    return (ratios / squares.clamp(min=tiny)).clamp(-MOST_RATIO, MOST_RATIO)


@torch.no_grad()
def refitted(model: LanguageModel, cartridge: Tensor, frozen: int, edit: DocumentEdit) -> Tensor:
    """Return a cartridge [L, 2, H_kv, P, D] re-fitted to an edited document; its first `frozen`
    entries stay. A prompt starts at position P. All ranks of a divided or sharded base must call
    it."""
    tokens = cartridge.shape[3]
    share = len(edit.places) / edit.new.shape[3]
    replaced = min(tokens - frozen, len(edit.places), math.ceil(share * (tokens - frozen)))
    places = torch.tensor(edit.places, dtype=torch.long, device=model.device)
    reading = RefitAttention(
        model, edit.new, None, tokens - frozen, frozen, edit.rows,
        cartridge=cartridge, old=edit.old, places=places, replaced=replaced,
    )  # fmt: skip
    return reading.run()
