"""Pass cartridges through the tensor plane: those alone that the other side does not have.

    put_changed    trainer -> the plane: what is not in the plane since the version before
    get_missing    the plane -> reader: what the reader does not hold

A plane's operation costs about 2 ms at any size, so small cartridges share a packet. A packet stays
in the plane, and in its readers' memory, as long as one cartridge of it is in use. So a packet of
several cartridges is bounded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from torch import Tensor

from protocols.errors import PublishError
from protocols.types import PublishedCartridge, TensorRef

PACKET_BYTES = 64 * 2**20

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
    put_now: dict[str, PublishedCartridge] = {}
    for names in packet_names({name: one.nbytes for name, one in changed.items()}):
        packet = await put({name: changed[name] for name in names})
        put_now |= {n: PublishedCartridge(n, since[n], packet, own[n]) for n in names}
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
