"""Publish versions of cartridges, and hold those that a role loaded: each set of numbers once.

A version names every cartridge of a run, and a step changes few of them. So numbers are identified
by the cartridge's name and the version that last changed them, and versions share them:

    version 6    a since 6, b since 2
    version 7    a since 7, b since 2    -> held: (a, 6), (a, 7), (b, 2)

Through the tensor plane pass those alone that the other side does not have:

    put_changed    trainer -> the plane: what is not in the plane since the version before
    get_missing    the plane -> reader: what the reader does not hold

A plane's operation costs about 2 ms at any size, so small cartridges share a packet. A packet stays
in the plane, and in its readers' memory, as long as one cartridge of it is in use. So a packet of
several cartridges is bounded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor

from protocols.errors import PublishError
from protocols.types import CARTRIDGE, PrefixRef, PublishedCartridge, TensorRef

PACKET_BYTES = 64 * 2**20
PUTS_AT_ONCE = 4  # packets; a plane may write each in a thread of its own

CartridgeId = tuple[str, int]
"""A cartridge's name and the version that last changed its numbers."""
Put = Callable[[Mapping[str, Tensor]], Awaitable[TensorRef]]
Get = Callable[[TensorRef], Awaitable[Mapping[str, Tensor]]]


async def put_changed(
    put: Put,
    since: Mapping[str, int],
    kv: Mapping[str, Tensor],
    fingerprint: Callable[[Tensor], str],
    before: Sequence[PublishedCartridge],
) -> tuple[PublishedCartridge, ...]:
    """Put the cartridges `kv`, [L, 2, H_kv, P, D] each, that `before` does not have, and return the
    references to all, in the order of `kv`. `before` is what the plane holds of another version.

    Raises PublishError for a cartridge whose numbers differ from those that `before` has since the
    same version.
    """
    known = {(c.name, c.since): c for c in before}
    own = {name: fingerprint(one) for name, one in kv.items()}
    changed = {}
    for name, one in kv.items():
        same = known.get((name, since[name]))
        if same is None:
            changed[name] = one
        elif same.fingerprint != own[name]:
            raise PublishError(
                f"cartridge {name} is said to be unchanged since version {since[name]}, and has "
                "other numbers than were published then: the trainer's state is damaged; resume "
                "the run from its last checkpoint"
            )
    some = asyncio.Semaphore(PUTS_AT_ONCE)

    async def put_packet(names: Sequence[str]) -> dict[str, PublishedCartridge]:
        async with some:
            packet = await put({name: changed[name] for name in names})
        return {n: PublishedCartridge(n, since[n], packet, own[n]) for n in names}

    packets = packet_names({name: one.nbytes for name, one in changed.items()})
    # All have ended before the first error is raised: none is left to write behind it.
    done = await asyncio.gather(*map(put_packet, packets), return_exceptions=True)
    put_now: dict[str, PublishedCartridge] = {}
    for one_packet in done:
        if isinstance(one_packet, BaseException):
            raise one_packet
        put_now |= one_packet
    return tuple(put_now[name] if name in put_now else known[name, since[name]] for name in kv)


async def get_missing(
    get: Get, cartridges: Sequence[PublishedCartridge], missing: Collection[str]
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
        return self._unheld(each for old in evicted for each in old.items())

    def check(self, version: int, since: Mapping[str, int], new: Collection[str]) -> None:
        """Raise PublishError when the version is not newer than every one before it, or when its
        numbers are neither held nor among those of the `new` names, or are both."""
        if version <= self._newest:
            raise PublishError(
                f"cartridge version {version} was offered after version {self._newest}: version "
                "ids are never reused and never go back; publish a new one"
            )
        if odd := self.missing(since) ^ set(new):
            told = ", ".join(f"{name} since {since.get(name)}" for name in sorted(odd))
            raise PublishError(
                f"version {version} came with other numbers than those that are not held here "
                f"({told}); publish it again"
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

    def get(self, name: str, version: int) -> Tensor:
        """Return one cartridge [L, 2, H_kv, P, D]. Raises PublishError for a version or name that
        is not held."""
        return self._kv[name, self._ledger.since(name, version)]
