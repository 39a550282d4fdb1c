"""Hold the cartridges of a run: in training, composed, fingerprinted, and version by version.

A cartridge is a trainable key/value prefix of P tokens; P may differ between cartridges. The first
`frozen` tokens (the attention sink) are not trained, because training them costs the model its
general ability; the other P - frozen are. The master copy is float32. Keys are stored post-RoPE for
positions 0..P-1; the input starts at position P. This is the layout of HazyResearch/cartridges,
stacked over layers: [L, 2, H_kv, P, D], for L layers, keys and values, H_kv heads of D numbers.

    bank          the cartridges in training
    composition   a sample over several cartridges is trained over the same ordered composition.
                  Gradient flows only into the cartridge of the sample's own document. The teacher
                  reads that document alone: the cartridge learns to be read beside others, not to
                  read them. Each prefix is moved behind those before it: a rotary embedding rotates
                  pairs of a key's numbers by position x frequency, and rotations add up, so that
                  rotating a key at position p by the angle of `by` gives exactly the key at p + by.
                  A score depends only on the distance between query and key, so moving both changes
                  no score; negative positions are valid
    fingerprint   a SHA-256 of the shape, dtype and bytes of the numbers in use. The trainer
                  fingerprints each version that it publishes. A generator fingerprints the tensor
                  that a request is decoded over, not the label that it was loaded under, and
                  reports it with the response. Equal fingerprints prove that the right numbers lay
                  before the decoder. They do not prove that the decoder used them: that is shown by
                  its log-probabilities (`learning.step.SamplerGap`). The name is not part of it, so
                  that one cartridge that is served under another's name is recognised. It is made
                  of one digest for each key/value head: processes that hold some heads each compute
                  it together
    versions      a version names every cartridge of a run, and a step changes few of them. So
                  numbers are identified by the cartridge's name and the version that last changed
                  them, and versions share them:

                      version 6    a since 6, b since 2
                      version 7    a since 7, b since 2    -> held: (a, 6), (a, 7), (b, 2)

Through the tensor plane pass those alone that the other side does not have: `put_changed` puts what
is not in the plane since the version before, `get_missing` gets what the reader does not hold. A
plane's operation costs about 2 ms at any size, so small cartridges share a packet. A packet stays
in the plane, and in its readers' memory, as long as one cartridge of it is in use. So a packet of
several cartridges is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cartridge_forge.learning.ranks import map_large, to_host
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    SEPARATOR,
    PrefixRef,
    PublishedCartridge,
    Sample,
    TensorRef,
)

if TYPE_CHECKING:  # to move and publish cartridges needs no model
    from cartridge_forge.learning.decoder import KeyFrequencies, LanguageModel


class CartridgeBank:
    """Hold the cartridges `names`, each apart from the others.

    frozen     by name, [L, 2, H_kv, F, D]
    trainable  by name, a parameter [L, 2, H_kv, P-F, D]
    """

    def __init__(self, names: Sequence[str], kv: Sequence[Tensor], frozen: int) -> None:
        """Take the initial keys and values [L, 2, H_kv, P, D] of each name."""
        lengths = [part.shape[3] for part in kv]
        if len(names) != len(kv) or not all(0 <= frozen < tokens for tokens in lengths):
            raise DataError(
                f"a bank needs one prefix a name and 0 <= frozen < P: got {len(names)} names, "
                f"{len(kv)} prefixes of P={lengths}, frozen={frozen}"
            )
        self.names = tuple(names)
        masters = {n: part.detach().float() for n, part in zip(names, kv, strict=True)}
        self.frozen = {n: part[..., :frozen, :].clone() for n, part in masters.items()}
        self.trainable = {
            n: nn.Parameter(part[..., frozen:, :].clone()) for n, part in masters.items()
        }

    def tokens(self, name: str) -> int:
        """Return the cartridge's tokens P."""
        return self.frozen[name].shape[3] + self.trainable[name].shape[3]

    def kv(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the named cartridges' keys and values [L, 2, H_kv, P, D], or those of all, with
        gradient into their trainable parts."""
        chosen = self.names if names is None else names
        return [self.full(name, self.trainable[name]) for name in chosen]

    def full(self, name: str, trainable: Tensor) -> Tensor:
        """Return the cartridge [L, 2, H_kv, P, D] with this `trainable` part."""
        return torch.cat([self.frozen[name], trainable], dim=3)

    @torch.no_grad()
    def fingerprint(self, names: Iterable[str]) -> int:
        """Return the sum of the bits of the named cartridges' numbers, read as integers: it changes
        with any single bit and does not depend on the order of summation."""
        return sum(
            int(x.view(torch.int32).sum())
            for name in names
            for x in (self.frozen[name], self.trainable[name])
        )


def first_tokens(documents: Mapping[str, Tensor], tokens: int, frozen: int) -> CartridgeBank:
    """Return a bank whose cartridges are the first P tokens' KV of each document
    [L, 2, H_kv, T, D]. The cartridge paper found this initialization best. Raises DataError for a
    document that is not longer than the cartridge."""
    for name, kv in documents.items():
        check_longer(name, kv.shape[3], tokens)
    names = sorted(documents)
    return CartridgeBank(names, [documents[n][:, :, :, :tokens] for n in names], frozen)


def check_longer(name: str, document: int, tokens: int) -> None:
    """Raise DataError for a document that is not longer than its cartridge, in tokens."""
    if document <= tokens:
        raise DataError(
            f"document {name} has {document} tokens, no more than the cartridge's {tokens}; "
            "lower cartridge.tokens"
        )


def prefix_name(sample: Sample) -> str:
    """Return the cartridge that learns, then the composition in order: "a", or "a\\nb\\na" for
    [b, a]."""
    return SEPARATOR.join((sample.cartridge, *sample.composed))


def prefix_lengths(samples: Iterable[Sample], lengths: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of every prefix that the samples name, and of each cartridge alone."""
    of_samples = {
        prefix_name(s): sum(lengths[name] for name in s.composed) for s in samples if s.composed
    }
    return {**lengths, **of_samples}


def student_prefixes(
    model: LanguageModel, bank: CartridgeBank, names: Sequence[str]
) -> list[Tensor]:
    """Return the KV [L, 2, H_kv, P_c, D] of each named prefix. Gradient flows into the cartridges
    that learn."""
    if not any(SEPARATOR in name for name in names):
        return bank.kv(names)
    learning = {name: name.split(SEPARATOR)[0] for name in names}
    prefixes = []
    for name in names:
        order = name.split(SEPARATOR)[1:] or [learning[name]]
        parts = bank.kv(order)
        learns = [
            part if one == learning[name] else part.detach()
            for one, part in zip(order, parts, strict=True)
        ]
        prefixes.append(composed(model, learns))
    return prefixes


def composed(model: LanguageModel, prefixes: Sequence[Tensor]) -> Tensor:
    """Return an ordered composition [L, 2, H_kv, P_1 + ... + P_n, D] of prefixes
    [L, 2, H_kv, P_i, D] that each begin at position 0: each is moved behind those before it. The
    texts do not attend to one another. Raises DataError as `LanguageModel.frequencies` does."""
    first, *later = prefixes
    if not later:
        return first
    of_model = model.frequencies()
    parts, start = [first], first.shape[3]
    for prefix in later:
        parts.append(shifted(prefix, start, of_model))
        start += prefix.shape[3]
    return torch.cat(parts, dim=3)


def shifted(kv: Tensor, by: int, frequencies: KeyFrequencies) -> Tensor:
    """Return keys and values [L, 2, H_kv, P, D] with the keys moved by `by` positions."""
    if by == 0:
        return kv
    keys, values = kv.double().unbind(1)
    return torch.stack([frequencies.turned(keys, by), values], dim=1).to(kv.dtype)


def fingerprint(kv: Tensor) -> str:
    """Return the fingerprint of a cartridge [L, 2, H_kv, P, D], in hexadecimal."""
    return joined_fingerprint(kv.shape, kv.dtype, head_digests(kv))


def head_digests(kv: Tensor) -> list[str]:
    """Return the SHA-256 of the bytes of each head of kv [L, 2, H_kv, P, D], in hexadecimal."""
    heads = kv.detach().movedim(2, 0)
    if kv.device.type == "cuda":
        heads = to_host(heads.contiguous())
    return map_large(
        lambda head: hashlib.sha256(head.contiguous().view(torch.uint8).numpy().data).hexdigest(),
        heads.cpu(), kv.nbytes,
    )  # fmt: skip


def joined_fingerprint(shape: Sequence[int], dtype: torch.dtype, heads: Sequence[str]) -> str:
    """Return the fingerprint of a whole cartridge of `shape` [L, 2, H_kv, P, D] from the digests of
    its heads, in order."""
    header = [list(shape), str(dtype).removeprefix("torch."), list(heads)]
    return hashlib.sha256(json.dumps(header).encode()).hexdigest()


class Fingerprints:
    """Compute the digests of tensors in use, each once as long as its numbers do not change.

    What is known belongs to a tensor in memory and to torch's count of the writes to it. Another
    tensor at the same address, or a write in place, is therefore computed anew. A write that torch
    does not count (to memory shared with another process) is not noticed.
    """

    def __init__(self) -> None:
        self._digests: MutableMapping[Tensor, dict[Any, list[str]]] = WeakTensorKeyDictionary()

    def heads(self, kv: Tensor) -> list[str]:
        """Return `head_digests` of kv [L, 2, H_kv, P, D], often a view of a larger tensor."""
        owner: Tensor = kv if kv._base is None else kv._base
        if owner.is_inference():  # torch does not count the writes to it
            return head_digests(kv)
        digests = self._digests.setdefault(owner, {})
        # The count is of the tensor that owns the memory.
        view = (kv._version, kv.storage_offset(), tuple(kv.shape), kv.stride())
        if view not in digests:
            for old in [p for p in digests if p[0] != kv._version]:
                del digests[old]
            digests[view] = head_digests(kv)
        return list(digests[view])

    def fingerprint(self, kv: Tensor) -> str:
        """Return the fingerprint of a cartridge [L, 2, H_kv, P, D]."""
        return joined_fingerprint(kv.shape, kv.dtype, self.heads(kv))

    def served(
        self, ref: PrefixRef, kv: Tensor, single: Callable[[PrefixRef], Tensor]
    ) -> tuple[str, ...]:
        """Return the fingerprint of each part of a prefix, "" for a document's own KV. `kv` is the
        prefix in use; the parts of a composition, whose keys are moved, are those of `single`."""
        parts = ref.parts
        return tuple(
            self.fingerprint(kv if len(parts) == 1 else single(part))
            if part.name.startswith(CARTRIDGE)
            else ""
            for part in parts
        )


PACKET_BYTES = 64 * 2**20
PUTS_AT_ONCE = 4  # packets; a plane may write each in a thread of its own

CartridgeId = tuple[str, int]
"""A cartridge's name and the version that last changed its numbers."""
PutTensors = Callable[[Mapping[str, Tensor]], Awaitable[TensorRef]]
GetTensors = Callable[[TensorRef], Awaitable[Mapping[str, Tensor]]]


async def put_changed(
    put: PutTensors,
    since: Mapping[str, int],
    kv: Mapping[str, Tensor],
    fingerprint: Callable[[Tensor], str],
    published: Sequence[PublishedCartridge],
) -> tuple[PublishedCartridge, ...]:
    """Put the cartridges `kv`, [L, 2, H_kv, P, D] each, that are not `published`, and return the
    references to all, in the order of `kv`. `published` is what the plane holds of another version.

    Raises PublishError for a cartridge whose numbers differ from those `published` since the same
    version.
    """
    by_id = {(c.name, c.since): c for c in published}
    fingerprints = {name: fingerprint(one) for name, one in kv.items()}
    changed = {}
    for name, one in kv.items():
        earlier = by_id.get((name, since[name]))
        if earlier is None:
            changed[name] = one
        elif earlier.fingerprint != fingerprints[name]:
            raise PublishError(
                f"cartridge {name} is said to be unchanged since version {since[name]}, and has "
                "other numbers than were published then: the trainer's state is damaged; resume "
                "the run from its last checkpoint"
            )
    slots = asyncio.Semaphore(PUTS_AT_ONCE)

    async def put_packet(names: Sequence[str]) -> dict[str, PublishedCartridge]:
        async with slots:
            packet = await put({name: changed[name] for name in names})
        return {n: PublishedCartridge(n, since[n], packet, fingerprints[n]) for n in names}

    packets = packet_names({name: one.nbytes for name, one in changed.items()})
    # All have ended before the first error is raised: none is left to write behind it.
    results = await asyncio.gather(*map(put_packet, packets), return_exceptions=True)
    put_now: dict[str, PublishedCartridge] = {}
    for one_packet in results:
        if isinstance(one_packet, BaseException):
            raise one_packet
        put_now |= one_packet
    return tuple(put_now[name] if name in put_now else by_id[name, since[name]] for name in kv)


async def get_missing(
    get: GetTensors, cartridges: Sequence[PublishedCartridge], missing: Collection[str]
) -> dict[str, Tensor]:
    """Return the tensors [L, 2, H_kv, P, D] of the `missing` names, each packet got once."""
    wanted = [c for c in cartridges if c.name in missing]
    packets = {c.packet.key: c.packet for c in wanted}
    got = {key: await get(packet) for key, packet in packets.items()}
    return {c.name: got[c.packet.key][c.name] for c in wanted}


def since_of(cartridges: Sequence[PublishedCartridge]) -> dict[str, int]:
    """Return by name the version that last changed each cartridge."""
    return {cartridge.name: cartridge.since for cartridge in cartridges}


def packet_names(sizes: Mapping[str, int], most: int = PACKET_BYTES) -> list[list[str]]:
    """Split names into packets, in order: each of one name, or of at most `most` bytes."""
    packets: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        if size > free or not packets:
            packets.append([])
            free = most
        packets[-1].append(name)
        free -= size
    return packets


class VersionLedger:
    """Track which versions a request may name, and which numbers stay loaded for them.

    A version id is never reused, so a version never changes under a request. Requests may name the
    newest `keep` versions. An older one is *evicted*. Numbers are released once no version that is
    held has them and the last request over them has ended.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._since: dict[int, dict[str, int]] = {}
        self._in_flight: Counter[CartridgeId] = Counter()
        self._newest = -1

    def missing(self, since: Mapping[str, int]) -> set[str]:
        """Return the names whose numbers, of the versions `since`, are not held."""
        return {name for name, version in self._unheld(since.items())}

    def add(
        self, version: int, since: Mapping[str, int], new: Collection[str]
    ) -> list[CartridgeId]:
        """Add a version, and evict those beyond `keep`; return what to release now. Raises
        PublishError as `check` does."""
        self.check(version, since, new)
        self._since[version] = dict(since)
        self._newest = version
        evicted = [self._since.pop(old) for old in sorted(self._since)[: -self._keep]]
        return self._unheld(cartridge for old in evicted for cartridge in old.items())

    def check(self, version: int, since: Mapping[str, int], new: Collection[str]) -> None:
        """Raise PublishError when the version is not newer than every one before it, or when its
        numbers are neither held nor among those of the `new` names, or are both."""
        if version <= self._newest:
            raise PublishError(
                f"cartridge version {version} was offered after version {self._newest}: version "
                "ids are never reused and never go back; publish a new one"
            )
        if odd := self.missing(since) ^ set(new):
            numbers = ", ".join(f"{name} since {since.get(name)}" for name in sorted(odd))
            raise PublishError(
                f"version {version} came with other numbers than those that are not held here "
                f"({numbers}); publish it again"
            )

    def drop(self, version: int) -> list[CartridgeId]:
        """Remove a version. Return what to release now; what requests in flight read is released by
        the last of them. Raises PublishError for a version that is not held."""
        if version not in self._since:
            raise PublishError(f"cartridge version {version} is not held: nothing to drop")
        return self._unheld(self._since.pop(version).items())

    def since(self, name: str, version: int) -> int:
        """Return the version that last changed cartridge `name` as of `version`. Raises
        PublishError for a version or name that is not held."""
        if version not in self._since:
            raise PublishError(
                f"cartridge {name} version {version} is not held here (held: "
                f"{sorted(self._since)}): it was never loaded by this generator, or was evicted"
            )
        cartridges = self._since[version]
        if name not in cartridges:
            raise PublishError(
                f"version {version} has no cartridge {name!r}; it has {tuple(cartridges)}"
            )
        return cartridges[name]

    def resolved(self, prefix: PrefixRef) -> PrefixRef:
        """Return the prefix with each cartridge's version replaced by the one that last changed it:
        equal prefixes are equal numbers. Raises PublishError as `since` does."""
        parts = []
        for part in prefix.parts:
            name = part.name.removeprefix(CARTRIDGE)
            trained = part.name.startswith(CARTRIDGE)
            at = self.since(name, part.version) if trained else part.version
            parts.append(PrefixRef(part.name, at))
        return PrefixRef(parts[0].name, parts[0].version, tuple(parts[1:]))

    def begin(self, prefix: PrefixRef) -> None:
        """Count a request over this resolved prefix as started."""
        self._in_flight.update(_cartridges(prefix))

    def end(self, prefix: PrefixRef) -> list[CartridgeId]:
        """Count a request over this resolved prefix as ended; return what to release now."""
        cartridges = _cartridges(prefix)
        self._in_flight.subtract(cartridges)
        self._in_flight = +self._in_flight  # without those that nobody reads
        return self._unheld(cartridges)

    def _unheld(self, cartridges: Iterable[CartridgeId]) -> list[CartridgeId]:
        """Return those that no version has and no request reads, each once."""
        return [
            (name, version)
            for name, version in dict.fromkeys(cartridges)
            if (name, version) not in self._in_flight
            and all(since.get(name) != version for since in self._since.values())
        ]


def _cartridges(prefix: PrefixRef) -> list[CartridgeId]:
    return [
        (part.name.removeprefix(CARTRIDGE), part.version)
        for part in prefix.parts
        if part.name.startswith(CARTRIDGE)
    ]


class CartridgeVersions:
    """Hold the newest `keep` versions of every cartridge, by version number, with their tensors."""

    def __init__(self, keep: int) -> None:
        self._ledger = VersionLedger(keep)
        self._kv: dict[CartridgeId, Tensor] = {}

    def missing(self, since: Mapping[str, int]) -> set[str]:
        """Return the names whose numbers, of the versions `since`, are not held."""
        return self._ledger.missing(since)

    def add(self, version: int, since: Mapping[str, int], new: Mapping[str, Tensor]) -> None:
        """Add a version with the tensors [L, 2, H_kv, P, D] of its cartridges that are not held,
        and drop what only versions beyond `keep` have. Raises PublishError as
        `VersionLedger.check` does."""
        released = self._ledger.add(version, since, new.keys())
        self._kv |= {(name, since[name]): kv for name, kv in new.items()}
        for old in released:
            del self._kv[old]

    async def fetch(
        self, get: GetTensors, cartridges: Sequence[PublishedCartridge], model: LanguageModel
    ) -> dict[str, Tensor]:
        """Return the tensors that are not held, on the model's device."""
        new = await get_missing(get, cartridges, self._ledger.missing(since_of(cartridges)))
        return {name: kv.to(model.device, model.dtype) for name, kv in new.items()}

    def get(self, name: str, version: int) -> Tensor:
        """Return one cartridge [L, 2, H_kv, P, D]. Raises PublishError for a version or name that
        is not held."""
        return self._kv[name, self._ledger.since(name, version)]
