"""Lay a train batch out for the student: samples -> micro-batches -> packed tokens -> logits.

    prepare       checks a batch, and collects the samples and loss-bearing tokens of its channels
    split         divides them into micro-batches, for each rank and each pass
    micro_batch   lays one out, and locates every channel's tokens in it
    pack          samples become one flat list of tokens. Sequences over one prefix lie side by
                  side. Every one attends to its prefix and itself, and its positions start where
                  the prefix ends, so packing does not change its result, and nothing is padded
    forward       `response_tokens` runs the model over it

Student and teacher logits are gathered in *sample order, response token by response token*: index n
means the same token for both, wherever it lies.

With a vocabulary of 128K the logits of one token take half a megabyte, and those of a batch more
than its model. The losses need a few numbers per token. Logits are therefore computed for a chunk
of tokens, read for numbers and their gradients, and dropped. It takes a few times a chunk's memory.

Dimensions: N tokens of a forward pass, n of them read, S sequences, C prefixes of P_c tokens each,
V the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decoder import LanguageModel, recomputing
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import SEPARATOR, Sample, TrainBatch, require_ids

Member = tuple[str, int]  # a group of samples: the name of its set, and its index there

# Index of a group in a channel's samples, and the group's response tokens that bear the loss.
Item = tuple[int, Sequence[int]]


class BatchReader(Protocol):
    """Read samples of a batch, and train on some of their tokens, as a loss channel does.

    name     the channel's name in `protocols.plugins`, and in metrics
    reads    the set of samples that it reads; channels that name the same set share its logits
    sampled  whether these samples carry the versions that sampled them: stale ones are refused
    """

    name: ClassVar[str]
    reads: ClassVar[str]
    sampled: ClassVar[bool] = True

    def samples(self, batch: TrainBatch) -> Sequence[tuple[Sample, ...]]:
        """Return the whole set `reads`, in groups that no micro-batch divides."""
        ...

    def items(self, batch: TrainBatch) -> Sequence[Item]:
        """Return the groups of `samples` that bear the loss, with their tokens. A group that is an
        item of no channel is not read."""
        ...

    def check(self, batch: TrainBatch, version: int) -> None:
        """Raise DataError for data that does not match, StaleTokenError for data that `version`
        cannot be trained on."""
        ...


@dataclass(frozen=True)
class ChannelTokens:
    """Locate one channel's n tokens of a micro-batch, item by item: each field is a slice or
    indices [n].

    items    the channel's items in this micro-batch
    owners   the cartridge that each item trains, and the item's number of tokens
    at       positions among the N tokens whose logits the student computes
    first    the first of these N tokens that belongs to the channel's set
    rows     positions among the tokens of all the channel's items in the whole batch
    inside   positions among all response tokens of the channel's set in the whole batch
    """

    items: Sequence[Item]
    owners: Sequence[tuple[str, int]]
    at: slice | Tensor
    first: int
    rows: slice | Tensor
    inside: slice | Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Hold the rows of one student forward and the tokens of every channel in them. `packed` covers
    the N response tokens that bear a loss of any channel, set by set; `sampled` is the sampler's
    record of them. `batch` is the whole batch of the step."""

    batch: TrainBatch
    packed: PackedTokens
    tokens: Mapping[str, ChannelTokens]
    sampled: SampledTokens


@dataclass(frozen=True)
class SampledTokens:
    """Hold the sampler's record of N response tokens, laid out as the student reads them.

    logprobs   [N] float32 of the sampler; 0 where not compared
    compared   [N] whether the version being trained sampled the token
    samples    the samples in order, and `counts` how many of the N tokens each has
    """

    logprobs: Tensor
    compared: Tensor
    samples: Sequence[str]
    counts: Sequence[int]

    def locate(self, index: int) -> str:
        """Return the id of the sample that token `index` belongs to."""
        for sample, count in zip(self.samples, self.counts, strict=True):
            if index < count:
                return sample
            index -= count
        raise IndexError(index)


@dataclass(frozen=True)
class PreparedBatch:
    """Hold a checked train batch with the samples and items of its channels
    (`learning.losses.channel`). `sets` maps the name of a set to its groups of samples. `read` has
    the indices of the groups that the student reads. `items` is keyed by channel. `version` is the
    one to be trained."""

    batch: TrainBatch
    channels: Sequence[BatchReader]
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
        counts: dict[str, int] = {}
        for (name, i), tokens in marked.items():
            cartridge = self.sets[name][i][0].cartridge
            counts[cartridge] = counts.get(cartridge, 0) + len(tokens)
        return counts

    def units(self) -> list[tuple[Member, ...]]:
        """Return the units that no micro-batch divides: a group, with the groups of later sets that
        have the same text."""
        members = [(name, i) for name in self.sets for i in self.read[name]]
        twins: dict[str, dict[object, Member]] = {name: {} for name in self.sets}
        for name, i in members:
            if len(group := self.sets[name][i]) == 1:
                twins[name][text_of(group[0])] = (name, i)
        units: list[tuple[Member, ...]] = []
        placed: set[Member] = set()
        order = list(self.sets)
        for name, i in members:
            if (name, i) in placed:
                continue
            unit = [(name, i)]
            if len(group := self.sets[name][i]) == 1:
                for later in order[order.index(name) + 1 :]:
                    if twin := twins[later].pop(text_of(group[0]), None):
                        unit.append(twin)
            placed.update(unit)
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
        loads = [0] * world
        for u in sorted(range(len(units)), key=lambda u: (-lengths[u], u)):
            fewest = min(range(world), key=loads.__getitem__)
            shares[fewest].append(u)
            loads[fewest] += lengths[u]
        parts: list[list[list[Member]]] = []
        for share in map(sorted, shares):
            if micro_tokens is None:
                texts = [lengths[u] for u in share], [owners[u] for u in share]
                even_ones = even_parts(*texts, passes)
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
            chosen = sorted(i for set_name, i in part if set_name == name)
            sampled = any(c.sampled for c in self.channels if c.reads == name)
            texts += [(s, sampled) for i in chosen for s in groups[i]]
            lengths = [sum(len(s.response_ids) for s in group) for group in groups]
            set_begins = list(accumulate(lengths, initial=0))
            *begins, total = accumulate((lengths[i] for i in chosen), initial=0)
            starts = dict(zip(chosen, begins, strict=True))
            needed = torch.zeros(total, dtype=torch.bool)
            reading = [c.name for c in self.channels if c.reads == name]
            places = {}
            for channel in reading:
                items = self.items[channel]
                offsets = accumulate((len(bear) for _, bear in items), initial=0)
                placed = [
                    (item, at)
                    for item, at in zip(items, offsets, strict=False)
                    if item[0] in starts
                ]
                places[channel] = placed
                needed[[starts[g] + t for (g, bear), _ in placed for t in bear]] = True
            at = first + needed.cumsum(0) - 1
            for channel, placed in places.items():
                tokens[channel] = ChannelTokens(
                    items=[item for item, _ in placed],
                    owners=[(groups[g][0].cartridge, len(bear)) for (g, bear), _ in placed],
                    at=_index(
                        at[[starts[g] + t for (g, bear), _ in placed for t in bear]].tolist()
                    ),
                    first=first,
                    rows=_index([a + n for (_, bear), a in placed for n in range(len(bear))]),
                    inside=_index([set_begins[g] + t for (g, bear), _ in placed for t in bear]),
                )
            marks.append(needed)
            first += int(needed.sum())
        every = torch.cat(marks)
        record = sampled_tokens(texts, every, self.version)
        packed = pack([s for s, _ in texts])
        # Logits are computed of the tokens that bear a loss.
        packed = replace(packed, predicts=packed.predicts[every], targets=packed.targets[every])
        return MicroBatch(self.batch, packed, tokens, record)


def prepare(batch: TrainBatch, channels: Sequence[BatchReader], version: int) -> PreparedBatch:
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


def _index(tokens: list[int]) -> slice | Tensor:
    """Return a slice for consecutive tokens, which costs no copy, or their indices."""
    start = tokens[0] if tokens else 0
    stop = start + len(tokens)
    if tokens == list(range(start, stop)):
        return slice(start, stop)
    return torch.tensor(tokens, dtype=torch.long)


def sampled_tokens(
    texts: Sequence[tuple[Sample, bool]], needed: Tensor, version: int
) -> SampledTokens:
    """Return the record of the tokens marked by `needed` [all response tokens of the texts]. A text
    is a sample, and whether a sampler's record of it is expected at all."""
    logprobs: list[float] = []
    compared: list[bool] = []
    for s, sampled in texts:
        tokens = len(s.response_ids)
        recorded = sampled and len(s.sampler_logprobs) == len(s.versions) == tokens
        logprobs += s.sampler_logprobs if recorded else [0.0] * tokens
        compared += [v == version for v in s.versions] if recorded else [False] * tokens
    ends = list(accumulate(len(s.response_ids) for s, _ in texts))
    return SampledTokens(
        torch.tensor(logprobs, dtype=torch.float32)[needed],
        torch.tensor(compared, dtype=torch.bool)[needed],
        [s.id for s, _ in texts],
        [int(needed[a:b].sum()) for a, b in pairwise([0, *ends])],
    )


LOGIT_BYTES = 4  # float32
VALUE_BYTES = 2**24  # of logits whose exponentials exist at a time in `token_values`
# Computes [n] tensors from n tokens' logits [n, V], each number from its own token's logits. The
# slice gives their place among the tokens that are read.
Reader = Callable[[Tensor, slice], tuple[Tensor, ...]]


@dataclass(frozen=True)
class PackedTokens:
    """Hold N tokens of S sequences over C prefixes, sequence by sequence and prefix by prefix.

    names[c]        the prefix that group c reads: by default a cartridge
    counts[c]       how many sequences read it
    lengths         the sequences' tokens
    ids, positions  [N]; the last response token predicts none, and is left out
    predicts        [n] the token that predicts response token n
    targets         [n] the response tokens themselves
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    ids: Tensor
    positions: Tensor
    predicts: Tensor
    targets: Tensor


def cartridge_of(sample: Sample) -> str:
    """Return the name of the sample's cartridge, the default prefix."""
    return sample.cartridge


def context_of(sample: Sample) -> str:
    """Return the name of what the document teacher reads before the sample's prompt. Raises
    DataError for a sample without a context."""
    if not sample.contexts:
        raise DataError(
            f"sample {sample.id} names no context for the document teacher to read; give it the "
            "document or chunk that its prompt is about"
        )
    return SEPARATOR.join(sample.contexts)


def pack(
    samples: Sequence[Sample],
    prefix_tokens: Mapping[str, int],
    row_tokens: int,
    prefix: Callable[[Sample], str] = cartridge_of,
) -> PackedTokens:
    """Lay samples side by side, by prefix and then longest first. Samples with the same tokens over
    the same prefix share a place, wherever prompt ends and response begins: an episode that two
    channels train on is read once.

    `prefix` names a sample's prefix where that is not its cartridge alone. `prefix_tokens[name]` is
    the length of that prefix, the first position of its samples. Without samples the result is one
    token that predicts none. Raises DataError for a sample of more than `row_tokens` tokens, or one
    without prompt or response.
    """
    check_rows(samples, row_tokens)
    if not samples:
        return _one_token(*min(prefix_tokens.items()))
    laid: dict[tuple[str, tuple[int, ...]], int] = {}  # text -> the first sample that has it
    twins = [
        laid.setdefault((prefix(s), s.prompt_ids + s.response_ids), i)
        for i, s in enumerate(samples)
    ]
    names = tuple(sorted({name for name, _ in laid}))
    order = sorted(laid.values(), key=lambda i: (prefix(samples[i]), -tokens_of(samples[i]), i))
    ids: list[int] = []
    positions: list[int] = []
    first: dict[int, int] = {}  # sample -> its first token
    for i in order:
        s = samples[i]
        tokens = (s.prompt_ids + s.response_ids)[:-1]
        first[i], start = len(ids), prefix_tokens[prefix(s)]
        ids += tokens
        positions += range(start, start + len(tokens))
    predicts: list[int] = []
    for i, s in enumerate(samples):
        begin = first[twins[i]] + len(s.prompt_ids) - 1
        predicts += range(begin, begin + len(s.response_ids))
    count = Counter(name for name, _ in laid)
    return PackedTokens(
        names,
        tuple(count[name] for name in names),
        tuple(tokens_of(samples[i]) - 1 for i in order),
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(predicts),
        torch.tensor([t for s in samples for t in s.response_ids]),
    )


def even_parts(lengths: Sequence[int], prefixes: Sequence[str], count: int) -> list[list[int]]:
    """Return the indices of texts in `count` parts of about equally many tokens, fewer where there
    are fewer texts. Texts over one prefix lie together: at most `count` - 1 prefixes are in two
    parts or more."""
    parts: list[list[int]] = [[] for _ in range(count)]
    total, passed = max(1, sum(lengths)), 0
    for i in sorted(range(len(lengths)), key=lambda i: (prefixes[i], i)):
        middle = passed + lengths[i] / 2
        parts[min(count - 1, int(middle * count / total))].append(i)
        passed += lengths[i]
    return [sorted(part) for part in parts if part]


def text_of(sample: Sample) -> tuple[str, tuple[int, ...]]:
    """Return what a forward reads of a sample: its cartridge and its tokens."""
    return sample.cartridge, sample.prompt_ids + sample.response_ids


def check_rows(samples: Iterable[Sample], row_tokens: int) -> None:
    """Raise DataError for a sample of more than `row_tokens` tokens, or one without prompt or
    response."""
    for s in samples:
        length = len(s.prompt_ids) + len(s.response_ids)
        if not s.prompt_ids or not s.response_ids:
            raise DataError(f"sample {s.id} has an empty prompt or response: nothing to train on")
        if length > row_tokens:
            raise DataError(
                f"sample {s.id} has {length} tokens of prompt and response, and train.row_tokens "
                f"allows {row_tokens}; raise train.row_tokens or lower rollout.max_tokens"
            )


def check_ids(samples: Iterable[Sample], model: LanguageModel) -> None:
    """Raise DataError for a sample with a token id that the model does not have."""
    for s in samples:
        for ids, part in ((s.prompt_ids, "prompt"), (s.response_ids, "response")):
            require_ids(ids, model.vocabulary, f"the {part} of sample {s.id}")


def _one_token(name: str, position: int) -> PackedTokens:
    none, one = (torch.zeros(n, dtype=torch.long) for n in (0, 1))
    return PackedTokens((name,), (1,), (1,), one, one + position, none, none)


def tokens_of(sample: Sample) -> int:
    """Return the tokens of a sample's prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


def response_logits(
    model: LanguageModel, packed: PackedTokens, prefixes: Sequence[Tensor]
) -> Tensor:
    """Return logits [n, V] in float32 that predict each response token, in sample order. Prefixes
    [L, 2, H_kv, P_c, D] are in the order of `packed.names`. Gradient flows into those that require
    it."""
    return response_tokens(model, packed, prefixes).logits


def response_tokens(
    model: LanguageModel,
    packed: PackedTokens,
    prefixes: Sequence[Tensor],
    *,
    logit_bytes: int | None = None,
    recompute_layers: bool = False,
    noting: bool = False,
) -> ChunkedLogits:
    """Return the logits of `response_logits`, to be read in chunks of at most `logit_bytes`. With
    `recompute_layers` each layer keeps only its input for the backward pass; `noting` is for
    `ChunkedLogits.observed`."""
    device = model.device
    read, places = torch.unique(packed.predicts, return_inverse=True)
    if not len(read):  # a pass runs all the same where ranks gather the base together
        read = torch.zeros(1, dtype=torch.long)
    positions, read = packed.positions.to(device), read.to(device)
    head_prefixes = [model.own_heads(kv) for kv in prefixes]
    attention = FlatAttention(packed.lengths, packed.counts, positions, head_prefixes, read)
    with recomputing(model) if recompute_layers else nullcontext():
        hidden = model(packed.ids.to(device), positions, attention, read)
    chunk = chunk_tokens(model.vocabulary, logit_bytes)
    return ChunkedLogits(
        hidden[places.to(device)], packed.targets, model.projection(), chunk, noting
    )


@dataclass(frozen=True)
class ChunkedLogits:
    """Hold N tokens' hidden states [N, width] and the tokens [N] that they predict. `project`
    computes logits [n, V] in float32 of [n, width]. `chunk` is the most tokens whose logits exist
    at a time; None: all of them, computed once. `noting` keeps each token's log-probability when
    its logits are read, for `observed`."""

    hidden: Tensor
    targets: Tensor
    project: Callable[[Tensor], Tensor]
    chunk: int | None = None
    noting: bool = False
    _logprobs: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def logits(self) -> Tensor:
        """Return all tokens' logits, [N, V]."""
        return self.project(self.hidden)

    def read(self, rows: slice | Tensor, reader: Reader) -> tuple[Tensor, ...]:
        """Return what `reader` computes for the tokens `rows`, in their order, with gradient by
        their hidden states alone. A reader is called once for each chunk."""
        if self.chunk is None or len(self.hidden) <= self.chunk:
            logits = self.logits[rows]
            return reader(logits, slice(0, len(logits)))
        hidden = self.hidden[rows]
        places = torch.arange(len(self.hidden))[rows]

        def one(part: Tensor, span: slice) -> tuple[Tensor, ...]:
            logits = self.project(part)
            if self.noting:
                self._note(places[span], logits)
            return reader(logits, span)

        graph = torch.is_grad_enabled() and hidden.requires_grad
        read: Any = partial(_ReadChunk.apply, one) if graph else one
        starts = range(0, max(len(hidden), 1), self.chunk)  # no tokens: one empty chunk
        spans = [slice(a, min(a + self.chunk, len(hidden))) for a in starts]
        parts = [read(hidden[span], span) for span in spans]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def observed(self) -> Tensor:
        """Return the log-probabilities [N] of all tokens, on the host and without gradient. Those
        of logits that were read before cost no further projection, and no loss changes by a bit."""
        if self.chunk is None or len(self.hidden) <= self.chunk:
            if 0 in self._logprobs:
                return self._logprobs[0].detach().cpu()
            return token_values(self.logits, self.targets).cpu()
        values, noted = self._noted
        for places in torch.split((~noted).nonzero().flatten(), self.chunk):
            with torch.no_grad():
                self._note(places, self.project(self.hidden[places.to(self.hidden.device)]))
        return values.cpu()

    @cached_property
    def _noted(self) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [N] noted so far, and which they are."""
        values = torch.zeros(len(self.hidden), device=self.hidden.device)
        return values, torch.zeros(len(values), dtype=torch.bool)

    def _note(self, places: Tensor, logits: Tensor) -> None:
        """Note the log-probabilities of the tokens `places` [n] from logits [n, V], once."""
        values, noted = self._noted
        if not noted[places].all():
            values[places.to(values.device)] = token_values(logits, self.targets[places])
            noted[places] = True

    def logprobs(self, at: slice | Tensor, first: int = 0) -> Tensor:
        """Return the log-probabilities [n] of the tokens `at`, all at or after `first`. All tokens
        from `first` on are read once and kept for later calls."""
        if not any(start <= first for start in self._logprobs):
            targets = self.targets[first:]
            (self._logprobs[first],) = self.read(
                slice(first, None), lambda logits, span: (token_logprobs(logits, targets[span]),)
            )
        start = max(start for start in self._logprobs if start <= first)
        moved = slice(at.start - start, at.stop - start) if isinstance(at, slice) else at - start
        return self._logprobs[start][moved]


class _ReadChunk(torch.autograd.Function):
    """Read a chunk, and keep the gradients of the outputs [n] by its hidden states [n, width]."""

    @staticmethod
    def forward(ctx: Any, one: Reader, hidden: Tensor, span: slice) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an output that no loss reads has none
        with torch.enable_grad():
            outputs = one(leaf := hidden.detach().requires_grad_(), span)
            ctx.slopes = [
                torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] if x.requires_grad else x
                for x in outputs
            ]  # a number without gradient stands for itself, and is given none
        values = tuple(x.detach() for x in outputs)
        constants = [value for value, x in zip(values, outputs, strict=True) if not x.requires_grad]
        ctx.mark_non_differentiable(*constants)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None, None]:
        pairs = zip(grads, ctx.slopes, strict=True)
        parts = [grad[:, None] * slope for grad, slope in pairs if grad is not None]
        return None, sum(parts[1:], parts[0]) if parts else None, None


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability [N] of each target [N] under logits [N, V]."""
    return -F.cross_entropy(logits, targets.to(logits.device), reduction="none")


@torch.no_grad()
def token_values(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the values of `token_logprobs`, without gradient and with little memory."""
    rows = chunk_tokens(logits.shape[-1], VALUE_BYTES)
    parts = [part.logsumexp(-1) for part in torch.split(logits, rows or 1)]
    picked = logits.gather(-1, targets.to(logits.device)[:, None])[:, 0]
    return picked - torch.cat(parts)


def chunk_tokens(vocabulary: int, max_bytes: int | None) -> int | None:
    """Return how many tokens' logits fit into `max_bytes`, at least 1; None for no bound."""
    return None if max_bytes is None else max(1, max_bytes // (LOGIT_BYTES * vocabulary))
