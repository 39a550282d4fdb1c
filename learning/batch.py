"""Split a train batch into micro-batches and lay each out for one forward pass of the student."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from learning.losses.channel import ChannelTokens, Item, LossChannel, MicroBatch
from learning.packing import PackedTokens, even_parts, text_of, tokens_of
from learning.sampler_gap import sampled_tokens
from protocols.train_batch import TrainBatch
from protocols.types import Sample

Member = tuple[str, int]  # a group of samples: the name of its set, and its index there


@dataclass(frozen=True)
class PreparedBatch:
    """Hold a checked train batch with the samples and items of its channels
    (`learning.losses.channel`). `sets` maps the name of a set to its groups of samples. `read` has
    the indices of the groups that the student reads. `items` is keyed by channel. `version` is the
    one to be trained."""

    batch: TrainBatch
    channels: Sequence[LossChannel]
    sets: Mapping[str, Sequence[tuple[Sample, ...]]]
    read: Mapping[str, Sequence[int]]
    items: Mapping[str, Sequence[Item]]
    version: int

    def samples(self, sets: Iterable[str] | None = None) -> list[Sample]:
        """Return all samples that the student reads, or those of the sets named."""
        wanted = self.sets if sets is None else sets
        return [s for name in wanted for i in self.read[name] for s in self.sets[name][i]]

    def tokens(self) -> dict[str, int]:
        """Return by cartridge the number of response tokens that train it."""
        marked: dict[Member, set[int]] = {}
        for channel in self.channels:
            for i, bear in self.items[channel.name]:
                marked.setdefault((channel.reads, i), set()).update(bear)
        found: dict[str, int] = {}
        for (name, i), tokens in marked.items():
            cartridge = self.sets[name][i][0].cartridge
            found[cartridge] = found.get(cartridge, 0) + len(tokens)
        return found

    def units(self) -> list[tuple[Member, ...]]:
        """Return the units that no micro-batch divides: a group, with the groups of later sets that
        have the same text."""
        members = [(name, i) for name in self.sets for i in self.read[name]]
        twins: dict[str, dict[object, Member]] = {name: {} for name in self.sets}
        for name, i in members:
            if len(group := self.sets[name][i]) == 1:
                twins[name][text_of(group[0])] = (name, i)
        units: list[tuple[Member, ...]] = []
        taken: set[Member] = set()
        order = list(self.sets)
        for name, i in members:
            if (name, i) in taken:
                continue
            unit = [(name, i)]
            if len(group := self.sets[name][i]) == 1:
                for later in order[order.index(name) + 1 :]:
                    if twin := twins[later].pop(text_of(group[0]), None):
                        unit.append(twin)
            taken.update(unit)
            units.append(tuple(unit))
        return units

    def split(
        self,
        micro_tokens: int | None,
        rank: int = 0,
        world: int = 1,
        *,
        even: bool = False,
        only: Collection[str] | None = None,
        passes: int = 1,
    ) -> list[list[Member]]:
        """Return this rank's micro-batches of at most `micro_tokens` prompt and response tokens;
        None means `passes` of about equally many. They are of the cartridges `only`; None: of all.

        A longer unit is a micro-batch of its own. Units are assigned longest first, each to the
        rank with the fewest tokens, with the same result on every rank; a rank may get none. An
        empty batch gives no micro-batch. `even` adds empty micro-batches, so that all ranks have
        equally many.
        """
        units = self.units()
        owners = [self.sets[u[0][0]][u[0][1]][0].cartridge for u in units]
        if only is not None:
            units = [u for u, owner in zip(units, owners, strict=True) if owner in only]
            owners = [owner for owner in owners if owner in only]
        lengths = [sum(map(tokens_of, self.sets[name][i])) for (name, i), *_ in units]
        shares: list[list[int]] = [[] for _ in range(world)]
        held = [0] * world
        for u in sorted(range(len(units)), key=lambda u: (-lengths[u], u)):
            fewest = min(range(world), key=held.__getitem__)
            shares[fewest].append(u)
            held[fewest] += lengths[u]
        parts: list[list[list[Member]]] = []
        for share in map(sorted, shares):
            if micro_tokens is None:
                of = [lengths[u] for u in share], [owners[u] for u in share]
                even_ones = even_parts(*of, passes)
                parts.append([[m for i in part for m in units[share[i]]] for part in even_ones])
                continue
            parts.append([])
            room = 0
            for u in share:
                if not parts[-1] or lengths[u] > room:
                    parts[-1].append([])
                    room = micro_tokens
                parts[-1][-1] += units[u]
                room -= lengths[u]
        most = max(map(len, parts)) if even else 0
        return parts[rank] + [[]] * (most - len(parts[rank]))

    def micro_batch(
        self, part: Sequence[Member], pack: Callable[[list[Sample]], PackedTokens]
    ) -> MicroBatch:
        """Lay out one of the micro-batches that `split` returned."""
        texts: list[tuple[Sample, bool]] = []
        marks: list[Tensor] = []
        tokens: dict[str, ChannelTokens] = {}
        first = 0
        for name, groups in self.sets.items():
            chosen = sorted(i for of, i in part if of == name)
            sampled = any(c.sampled for c in self.channels if c.reads == name)
            texts += [(s, sampled) for i in chosen for s in groups[i]]
            whole = list(accumulate(map(_response, groups), initial=0))
            *begins, total = accumulate((_response(groups[i]) for i in chosen), initial=0)
            here = dict(zip(chosen, begins, strict=True))
            needed = torch.zeros(total, dtype=torch.bool)
            reading = [c.name for c in self.channels if c.reads == name]
            places = {}
            for channel in reading:
                items = self.items[channel]
                own = accumulate((len(bear) for _, bear in items), initial=0)
                found = [
                    (item, at) for item, at in zip(items, own, strict=False) if item[0] in here
                ]
                places[channel] = found
                needed[[here[g] + t for (g, bear), _ in found for t in bear]] = True
            at = first + needed.cumsum(0) - 1
            for channel, found in places.items():
                tokens[channel] = ChannelTokens(
                    items=[item for item, _ in found],
                    owners=[(groups[g][0].cartridge, len(bear)) for (g, bear), _ in found],
                    at=_index(at[[here[g] + t for (g, bear), _ in found for t in bear]].tolist()),
                    first=first,
                    own=_index([a + n for (_, bear), a in found for n in range(len(bear))]),
                    inside=_index([whole[g] + t for (g, bear), _ in found for t in bear]),
                )
            marks.append(needed)
            first += int(needed.sum())
        every = torch.cat(marks)
        record = sampled_tokens(texts, every, self.version)
        return MicroBatch(self.batch, pack([s for s, _ in texts]).only(every), tokens, record)


def prepare(batch: TrainBatch, channels: Sequence[LossChannel], version: int) -> PreparedBatch:
    """Check a batch and collect what its channels read, before any forward pass. Raises DataError
    for a batch whose parts do not match. Raises StaleTokenError for references or episodes of
    another version that lack the log-probabilities they need."""
    for channel in channels:
        channel.check(batch, version)
    sets: dict[str, Sequence[tuple[Sample, ...]]] = {}
    read: dict[str, set[int]] = {}
    items = {channel.name: channel.items(batch) for channel in channels}
    for channel in channels:
        sets.setdefault(channel.reads, channel.samples(batch))
        read.setdefault(channel.reads, set()).update(g for g, _ in items[channel.name])
    indices = {name: sorted(read[name]) for name in sets}
    return PreparedBatch(batch, channels, sets, indices, items, version)


def _response(group: Iterable[Sample]) -> int:
    return sum(len(s.response_ids) for s in group)


def _index(tokens: list[int]) -> slice | Tensor:
    """Return a slice for consecutive tokens, which costs no copy, or their indices."""
    start = tokens[0] if tokens else 0
    stop = start + len(tokens)
    if tokens == list(range(start, stop)):
        return slice(start, stop)
    return torch.tensor(tokens, dtype=torch.long)
